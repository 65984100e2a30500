"""`nearfield generate`: pictures by a dense model and by a sparse one, side by side."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nearfield.cli import (
    DENSE,
    DEVICE_WORDS,
    OK,
    Bar,
    UsageError,
    add_integer,
    add_json,
    add_method,
    add_weights,
    as_usage,
    command,
    input_file,
    machine,
    member,
    note_load,
    output_file,
    recipe_of,
    write_reports,
    wrong,
)
from nearfield.methods import DEFAULT, Recipe
from nearfield_lab import quality
from nearfield_lab.commands.further import Further, add_path, add_switch
from nearfield_lab.commands.launched import chosen_device, mesh_of_ranks, num_ranks
from nearfield_lab.commands.many import generate_many, opened, sampler_of
from nearfield_lab.commands.sampling import (
    add_pixel_options,
    check_pixel_options,
    is_on_pixels,
    sample_pixels,
)
from nearfield_lab.embedded import generate, pictures
from nearfield_lab.embedded.generate import Run, Sampler
from nearfield_lab.embedded.lora import lora_on, method_of_lora, suits
from nearfield_lab.embedded.model import EMBEDDED_LORA

_PIXELS, _ON_SHEET = 8, 8
_LORA_OFF = "none"
_UNSTEADY = 1.5
"""How many times as long as another a step may take."""
_SHEET = Path("cats.png")
ENGINES = ("process", "ray")


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "generate",
        _generate,
        "make pictures with sparse attention: on the embedded model, a model that you trained, or a diffusers pipeline",
        "  nearfield generate --compare --out cats.png\n  nearfield generate --recipe cats-close --compare\n"
        "  nearfield generate --method dense --num 8 --seed 7\n  nearfield generate --method NAME --compare\n"
        "  nearfield generate --weights run/model.safetensors --set tiles=4 --set dense_steps=0 --compare\n"
        "  nearfield generate --model black-forest-labs/FLUX.1-dev --prompt 'a cat' --size 1024 --compare\n"
        "  torchrun --nproc-per-node 4 -m -- nearfield generate --size 2048 --num 1\n"
        "  nearfield generate --num 10000 --images samples --option engine=ray",
    )
    add_method(parser)
    add_switch(parser, "--compare", "make the dense model's pictures, too, and compare")
    add_pictures(parser, steps=20, num=4)
    add_model(parser, "a model of `nearfield train demo` or `train pixel`")
    words = (
        "also write every picture to DIR/dense and DIR/METHOD, or DIR/RECIPE; for a model on pixels to DIR"
    )
    add_path(parser, "--images", "DIR", words)
    sheet = output_file("--out", ".png")
    add_path(parser, "--out", "FILE", "the sheet of pictures (default cats.png)", type=sheet)
    add_json(parser, "write figures and machine facts")
    further = Further(parser)
    further.add_argument(
        "lora",
        type=lambda text: text if text == _LORA_OFF else str(input_file("lora")(text)),
        metavar="FILE",
        help="a LoRA of `nearfield distill` for the sparse pictures, or none (default: what the recipe says, else the"
        " embedded model's)",
    )
    add_further_pictures(further)
    _add_engine(further)
    add_pixel_options(further)


def _add_engine(further: Further) -> None:
    """The options of what makes many pictures."""
    further.add_argument(
        "engine",
        type=member("engine", ENGINES),
        metavar="NAME",
        help="for many pictures, to --images DIR: process (this one) or ray (a Ray cluster); the same command goes on"
        " where it ended",
    )
    add_integer(further, "tries", None, "of pictures that fail (default 3); for engine", most=100)
    words = "for engine=ray (default: one for each GPU of the cluster; where it has none, for each core)"
    add_integer(further, "workers", None, words, most=10**5)
    further.add_argument(
        "ray-address",
        metavar="ADDRESS",
        help="of a cluster: auto, HOST:PORT (default: RAY_ADDRESS, else a cluster of this machine alone)",
    )


def add_pictures(parser: argparse.ArgumentParser, *, steps: int, num: int) -> None:
    """Which pictures are made, and how."""
    parser.add_argument(
        "--size", type=_size, metavar="N", help="pixels: N or HxW (default: what the model was trained at)"
    )
    add_integer(parser, "--steps", steps, "denoising steps", most=1000)
    add_integer(parser, "--seed", 0, "of the noise", least=0, most=2**31)
    add_integer(parser, "--num", num, "pictures", most=10**6)


def add_further_pictures(further: Further) -> None:
    """The options of pictures that are seldom needed."""
    add_integer(further, "first", 0, "number of the first picture of the seed", least=0, most=10**6)
    add_integer(further, "batch", 4, "pictures at a time", most=4096)
    further.add_argument("device", metavar="NAME", help=DEVICE_WORDS)


def add_model(parser: argparse.ArgumentParser, weights: str = "a model of `nearfield train demo`") -> None:
    """The options that name the model."""
    parser.add_argument(
        "--model", metavar="ID", help="a diffusers pipeline: its id on the Hub, or its folder"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what to draw; for --model")
    add_weights(parser, weights)


def _generate(arguments: argparse.Namespace) -> int:
    if is_on_pixels(arguments):
        return sample_pixels(arguments)
    # What the embedded LoRA was distilled for.
    recipe = recipe_of(arguments, DEFAULT.with_dense_steps(0) if _is_embedded(arguments) else DEFAULT)
    _check(arguments)
    lora = _lora(arguments, recipe)
    if arguments.engine:
        return generate_many(arguments, folder_name(arguments), recipe, lora)
    arguments.out = arguments.out or _SHEET
    device = chosen_device(arguments.device)
    if arguments.compare:
        note_load(device.type)
    with mesh_of_ranks(device) as mesh:
        pipeline = opened(arguments)
        sample = sampler_of(arguments, pipeline, on_step=_step_bar(arguments) if _speaks(mesh) else None)
        with as_usage():  # a size, fields that do not fit it, or a recipe for another model
            runs = _runs(arguments, pipeline, sample, recipe, lora, mesh)
        if not _speaks(mesh):
            return OK
    records = generate.compared(runs, measures(arguments.device, runs[0].images) if len(runs) > 1 else {})
    shown = [run._replace(images=run.images[:_ON_SHEET]) for run in runs]
    if arguments.images:
        for run, name in zip(runs, ["dense"] * arguments.compare + [folder_name(arguments)], strict=True):
            pictures.write_pictures(arguments.images / name, run.images, arguments.first)
        print(f"wrote {arguments.num} pictures each to {arguments.images}")
    pictures.write_rows(arguments.out, generate.rows(shown, records))
    for run, record in zip(runs, records, strict=True):
        print(f"{run.name}: {generate.figures(record)}")
        if run.summary:
            print(run.summary)
    if arguments.compare and _are_batches_alike(arguments):
        _note_unsteady(runs[0])
    print(f"wrote {arguments.out}")
    return OK if write_reports(_document(arguments, records), arguments.json) else 1


def _are_batches_alike(arguments: argparse.Namespace) -> bool:
    """A smaller last one takes less time."""
    return bool(arguments.model or arguments.num <= arguments.batch or arguments.num % arguments.batch == 0)


def _note_unsteady(dense: Run) -> None:
    """Where steps of one kind took times of many kinds, something else was busy, too."""
    shortest, longest = dense.extremes
    if longest > _UNSTEADY * shortest:
        times = f"dense steps took {shortest:.2g} to {longest:.2g} s"
        print(f"note: {times}: something else was busy, too, and speed-ups are off", file=sys.stderr)


def _speaks(mesh: DeviceMesh | None) -> bool:
    """Every rank has the whole picture; the first writes it."""
    return mesh is None or mesh.get_local_rank() == 0


def _check(arguments: argparse.Namespace) -> None:
    if num_ranks() > 1 and arguments.method == DENSE:
        hint = "Only sparse attention is split over ranks."
        wrong("--method", "be another than dense under torchrun", DENSE, hint)
    check_model(arguments)
    if arguments.compare and arguments.method == DENSE:
        wrong("--compare", "compare dense with another `--method`", DENSE)
    check_pixel_options(arguments)
    _check_engine(arguments)


def _check_engine(arguments: argparse.Namespace) -> None:
    for name, needed, engines in (
        ("tries", "engine", ENGINES),
        ("workers", "engine=ray", ENGINES[1:]),
        ("ray_address", "engine=ray", ENGINES[1:]),
    ):
        value = getattr(arguments, name)
        if value is not None and arguments.engine not in engines:
            wrong(name.replace("_", "-"), f"be given with `{needed}` only", value)
    if arguments.engine is None:
        return
    if arguments.images is None:
        wrong("--images", "name a folder with `engine`", None, "Example: --images samples")
    if arguments.out:
        wrong("--out", "be left out with `engine`, which makes no sheet", str(arguments.out))
    if arguments.compare:
        wrong("--compare", "be left out with `engine`", True, "Run it once more with --method dense.")
    if num_ranks() > 1:
        wrong("engine", "be left out under torchrun", arguments.engine, "Ray starts workers by itself.")


def check_model(arguments: argparse.Namespace) -> None:
    """Refuse options of the model that do not go together."""
    if arguments.model and arguments.weights:
        wrong("--weights", "be left out with `--model`", str(arguments.weights))
    if bool(arguments.model) != bool(arguments.prompt):
        wrong("--prompt", "be given with `--model`, and only there", repr(arguments.prompt))
    if arguments.model and arguments.first:
        wrong("first", "be left out with `--model`", arguments.first, "Use another --seed.")


def _lora(arguments: argparse.Namespace, recipe: Recipe | None) -> Path | None:
    """The LoRA to use: the one that was named, what the recipe says, or the embedded one if it is for the method."""
    if recipe is None or arguments.lora == _LORA_OFF:
        return None
    if arguments.lora:
        try:
            made_for = method_of_lora(Path(arguments.lora))
        except ValueError as error:  # a recipe that this version cannot read
            raise UsageError(f"`lora` must be for a method that is known. {error}") from None
        if made_for is not None and not suits(made_for, recipe.method):
            print(f"note: {arguments.lora} was distilled for {made_for}", file=sys.stderr)
        return Path(arguments.lora)
    if recipe.lora == _LORA_OFF:
        return None

    if not _is_embedded(arguments) or not EMBEDDED_LORA.exists():
        if recipe.lora:
            rule = "be used with the embedded model, whose LoRA it was measured with"
            wrong("--recipe", rule, arguments.recipe, "Add `--option lora=none` for its fields alone.")
        return None
    made_for = method_of_lora(EMBEDDED_LORA)
    if suits(made_for, recipe.method):
        return EMBEDDED_LORA
    print(f"without the embedded LoRA, which is for {made_for}", file=sys.stderr)
    return None


def _is_embedded(arguments: argparse.Namespace) -> bool:
    return not arguments.model and not arguments.weights


def _runs(
    arguments: argparse.Namespace,
    pipeline: Any,
    sample: Sampler,
    recipe: Recipe | None,
    lora: Path | None,
    mesh: DeviceMesh | None,
) -> list[Run]:
    if recipe is not None:
        recipe.check_model(pipeline.transformer)
    runs = [generate.run_dense(sample)] if recipe is None or arguments.compare else []
    if recipe is not None:
        with lora_on(pipeline, lora) as stepwise:
            runs.append(generate.run_sparse(sample, pipeline, recipe.method, mesh, stepwise))
    return runs


def measures(device_name: str | None, images: Tensor) -> dict[str, generate.Measure]:
    """Means over pairs of pictures like `images [num, height, width, 3]`: PSNR, and LPIPS where it applies."""
    device = chosen_device(device_name)

    def mean_of(measure: Any) -> generate.Measure:
        def mean(first: Tensor, second: Tensor) -> float:
            pairs = zip(first.split(4), second.split(4), strict=True)
            values = (measure(*(part.permute(0, 3, 1, 2).to(device) for part in pair)) for pair in pairs)
            return float(sum(value.sum() for value in values)) / len(first)

        return mean

    found = {"psnr": mean_of(quality.psnr)}
    if min(images.shape[1:3]) >= 64:
        found["lpips"] = mean_of(quality.load_lpips(device=device))
    return found


def _document(arguments: argparse.Namespace, records: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("model", "prompt", "size", "steps", "seed", "num", "first", "batch", "method", "recipe")
    settings = {name: getattr(arguments, name) for name in names}
    weights = str(arguments.weights) if arguments.weights else None
    return {
        "format": 1,
        "command": "generate",
        "machine": machine.facts(),
        "settings": settings | {"weights": weights, "lora": arguments.lora},
        "runs": records,
        "picture": str(arguments.out),
    }


def folder_name(arguments: argparse.Namespace) -> str:
    """Of the pictures that were asked for: the recipe they are made by, or the method."""
    return Path(arguments.recipe).stem if arguments.recipe else str(arguments.method)


def _step_bar(arguments: argparse.Namespace) -> Callable[[int, int], None]:
    per_run = arguments.steps * -(-arguments.num // (1 if arguments.model else arguments.batch))
    bar = Bar(per_run * (2 if arguments.compare else 1), "steps")
    done = 0

    def show(step: int, steps: int) -> None:
        nonlocal done
        bar.show(done)
        done += 1
        if done == bar.total and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    return show


def _size(text: str) -> int | tuple[int, int]:
    sides = text.lower().split("x")
    numbers = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in sides]
    if len(numbers) > 2 or any(number < _PIXELS or number % _PIXELS for number in numbers):
        wrong(
            "--size",
            f"be pixels or height x width, in multiples of {_PIXELS}",
            repr(text),
            "Example: --size 512",
        )
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])
