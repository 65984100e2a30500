"""`nearfield capture` and `nearfield errors`."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfield.cli import (
    FAILED,
    OK,
    Bar,
    UsageError,
    add_device,
    add_integer,
    add_json,
    add_weights,
    comma_list,
    command,
    device_of,
    integer,
    number,
    write_reports,
    wrong,
)
from nearfield.methods import DEFAULT

if TYPE_CHECKING:
    import torch

    from nearfield_lab.captured.samples import Sample

_PATCH = 14


def add_commands(commands: Any) -> None:
    _add_capture(commands)
    _add_errors(commands)


def _add_capture(commands: Any) -> None:
    parser = command(
        commands,
        "capture",
        _capture,
        "write what attention layers are given, from a model that makes a picture; `errors` compares methods on it",
        "  nearfield capture --out captured --size 512\n"
        "  nearfield capture --model black-forest-labs/FLUX.1-dev --prompt 'a cat' --size 1024 --layers 5,30\n"
        "  nearfield capture --dino dinov2s.pt --photo photo.jpg --size 1792 --out dino",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("captured"), metavar="DIR", help="the folder (default captured)"
    )
    parser.add_argument(
        "--model", metavar="ID", help="a diffusers pipeline: its id on the Hub, or its folder"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="what to draw; for --model")
    add_weights(parser)
    parser.add_argument("--dino", type=Path, metavar="FILE", help="instead, the weights of DINOv2 ViT-S/14")
    parser.add_argument(
        "--latent",
        type=Path,
        metavar="FILE",
        help="instead, safetensors of latents, whose tokens are queries and keys",
    )
    parser.add_argument("--photo", type=Path, metavar="FILE", help="the picture that DINOv2 looks at")
    add_integer(parser, "--size", 512, f"pixels per side; for --dino a multiple of {_PATCH}")
    add_integer(parser, "--steps", 8, "denoising steps", most=1000)
    add_integer(parser, "--seed", 0, "of the noise", least=0)
    numbers = comma_list(integer("--at", 0))
    parser.add_argument(
        "--at", type=numbers, default=[2, 5], metavar="N,N", help="steps that are kept, from 0 (default 2,5)"
    )
    parser.add_argument(
        "--layers",
        type=comma_list(integer("--layers", 0)),
        metavar="N,N",
        help="layers that are kept (default: all)",
    )
    add_integer(parser, "--heads", 2, "heads of each layer, evenly spaced")
    add_device(parser)


def _capture(arguments: argparse.Namespace) -> int:
    from nearfield_lab.missing import MissingExtra

    if arguments.dino is None and max(arguments.at) >= arguments.steps:
        wrong("--at", f"be numbers of steps below {arguments.steps}", max(arguments.at))
    if bool(arguments.dino) != bool(arguments.photo):
        wrong("--photo", "be given with `--dino`, and only there", str(arguments.photo))
    if bool(arguments.model) != bool(arguments.prompt):
        wrong("--prompt", "be given with `--model`, and only there", repr(arguments.prompt))
    kind = _dino if arguments.dino else _latents if arguments.latent else _pipeline
    try:
        new = kind(arguments)
    except MissingExtra as error:
        raise UsageError(str(error)) from None
    except ValueError as error:  # a size that the model cannot make, or no latent
        raise UsageError(str(error)) from None
    print(f"wrote {new} files to {arguments.out}")
    return OK


def _pipeline(arguments: argparse.Namespace) -> int:
    from nearfield_lab.captured.samples import capture
    from nearfield_lab.embedded import generate
    from nearfield_lab.embedded.sampler import DemoPipeline

    device = device_of(arguments.device)
    common = {"size": arguments.size, "steps": arguments.steps, "seed": arguments.seed}
    with Bar(arguments.steps, "steps") as bar:
        call: Callable[[], object]
        if arguments.model:
            pipeline = generate.open_pipeline(arguments.model, device)
            call = generate.pipeline_sampler(
                pipeline, arguments.prompt, 1, on_step=lambda step, _: bar.show(step + 1), **common
            )
        else:
            pipeline = DemoPipeline.load(arguments.weights or generate.embedded_weights(), device)
            call = partial(pipeline.sample, range(1), on_step=lambda step, _: bar.show(step), **common)
        return capture(
            pipeline,
            call,
            arguments.out,
            source=f"seed{arguments.seed}",
            layers=arguments.layers,
            steps=arguments.at,
            heads=arguments.heads,
        )


def _dino(arguments: argparse.Namespace) -> int:
    from nearfield_lab.captured.dino import PATCH, samples_of

    if arguments.size % PATCH:
        wrong("--size", f"be a multiple of {PATCH}", arguments.size)
    for name in ("dino", "photo"):
        if not getattr(arguments, name).is_file():
            wrong(f"--{name}", "name a file that is there", repr(str(getattr(arguments, name))))
    image = _square(arguments.photo, arguments.size)
    return _written(arguments.out, samples_of(image, arguments.dino, arguments.layers, arguments.heads))


def _latents(arguments: argparse.Namespace) -> int:
    from nearfield_lab.captured.samples import latent_sample
    from nearfield_lab.storage import read_tensors

    tensors, _ = read_tensors(arguments.latent)
    samples = [
        latent_sample(latent, f"{name}-{place}")
        for name, batch in tensors.items()
        for place, latent in enumerate(batch)
    ]
    return _written(arguments.out, samples)


def _written(folder: Path, samples: "list[Sample]") -> int:
    """How many of these are new."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {folder / f"{sample.name}.safetensors": sample for sample in samples}
    missing = {path: sample for path, sample in paths.items() if not path.exists()}
    for path, sample in missing.items():
        sample.write(path)
    return len(missing)


def _square(path: Path, side: int) -> "torch.Tensor":
    """The middle of a photograph, `[3, side, side]` bytes."""
    from nearfield_lab.images import Picture
    from nearfield_lab.training.data import decoded

    return decoded(Picture(path.name, path, 0, path.stat().st_size), side)


def _add_errors(commands: Any) -> None:
    parser = command(
        commands,
        "errors",
        _errors,
        "how far methods are from dense attention on captured activations, at equal shares of pairs",
        "  nearfield errors captured\n"
        "  nearfield errors captured --row 'best keys' --row 'hilbert near=tile tiles=32|16|8' --shares 0.2,0.1\n"
        "  nearfield errors captured --row mymodule:my_rule --json errors.json",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `nearfield capture` has written")
    parser.add_argument(
        "--row",
        dest="rows",
        action="append",
        metavar="ROW",
        help="a method with its fields, where A|B tries both values and * all of the method's ladder; a rule in plain"
        " torch by its name; or a function of your own as module:name. Repeat it for several (default: all rules,"
        f" and `{DEFAULT.name}`)",
    )
    shares = comma_list(number("--shares", least=0, is_above=True))
    parser.add_argument(
        "--shares",
        type=shares,
        default=[0.3, 0.2, 0.12],
        metavar="X,X",
        help="of pairs (default 0.3,0.2,0.12)",
    )
    add_device(parser)
    add_json(parser, "write every head's error and machine facts")


def _errors(arguments: argparse.Namespace) -> int:
    from nearfield.cli import machine
    from nearfield_lab.captured import default_rows, measured, read_samples, tabulated

    rows = {text: _row(text) for text in arguments.rows or default_rows()}
    device = device_of(arguments.device)
    try:
        samples = list(read_samples(arguments.folder))
    except OSError as error:
        raise UsageError(f"`DIR` must hold captured activations. {error}") from None
    with Bar(len(samples) * len(rows) * len(arguments.shares), "figures") as bar:
        records = []
        for record in measured((sample.to(device) for sample in samples), rows, arguments.shares):
            records.append(record)
            bar.show(len(records), record["row"])
    print(tabulated(records))
    document = {"format": 1, "command": "errors", "machine": machine.facts(), "results": records}
    return OK if write_reports(document, arguments.json) else FAILED


def _row(text: str) -> Any:
    from nearfield_lab.captured.rows import row_of

    try:
        return row_of(text)
    except (ValueError, TypeError, ImportError, AttributeError) as error:
        raise UsageError(f"`--row` must name a rule, a method or a function; got {text!r}. {error}") from None
