"""`nearfield drawings`: captioned drawings from packages, and the model that draws from captions."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfield import Method
from nearfield.cli import (
    DENSE,
    FAILED,
    OK,
    Bar,
    UsageError,
    add_device,
    add_integer,
    add_json,
    add_method,
    add_number,
    as_usage,
    command,
    device_of,
    integer,
    machine,
    member,
    output_file,
    recipe_of,
    show_help_without_command,
    write_reports,
    wrong,
)
from nearfield.methods import DEFAULT
from nearfield_lab.commands.further import Further
from nearfield_lab.commands.training import BACKENDS, begin, ended, shown

if TYPE_CHECKING:
    from torch import Tensor

    from nearfield_lab.drawings.captions import Drawing

TINY = {
    **{"joint_blocks": 1, "single_blocks": 2, "heads": 4, "head_dim": 32, "condition_tokens": 32},
    **{"condition_dim": 64, "vocabulary": 512, "text_blocks": 2},
}
"""A model to try the chain with, in minutes on a CPU."""

QUESTIONS = ("prompts", "categories", "held-out")


def add_commands(commands: Any) -> None:
    summary = "a model that draws from a caption: its data, training, pictures and tests"
    words = (
        f"{summary.capitalize()}. The README of nearfield_lab/drawings says how far it is and how to go on."
    )
    parser = commands.add_parser("drawings", help=summary, description=words)
    show_help_without_command(parser)
    parts = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_pack(parts)
    _add_train(parts)
    _add_draw(parts)
    _add_render(parts)
    _add_probe(parts)
    _add_card(parts)


def _add_pack(parts: Any) -> None:
    parser = command(
        parts,
        "pack",
        _pack,
        "select drawings from packages, caption them, and write them to a few small files",
        "  nearfield drawings pack --packages .cache/drawings/packages --out .cache/drawings/packed",
    )
    parser.add_argument(
        "--packages", type=Path, required=True, metavar="DIR", help="where packages were unpacked"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where files are written")
    add_number(parser, "--part-mib", 9.0, "the most that one file holds, in MiB", is_above=True)


def _add_train(parts: Any) -> None:
    parser = command(
        parts,
        "train",
        _train,
        "train the model on packed drawings",
        "  nearfield drawings train --data packed --out run256 --minutes 7 --compile --option kernel=flash\n"
        "  nearfield drawings train --data packed --out run512 --size 512 --option batch=64 --option shift=2"
        " --start run256/model.safetensors --option seed=1 --minutes 7 --compile\n"
        "  nearfield drawings train --data packed --out try --tiny --size 64 --option batch=16 --option limit=64"
        " --steps 20",
    )
    _add_data(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="checkpoints and results")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out, if there is one"
    )
    parser.add_argument("--start", type=Path, metavar="FILE", help="start from this model of an earlier run")
    add_integer(parser, "--size", 256, "pixels per side", least=32, most=4096)
    add_integer(parser, "--steps", None, "to reach in all, over all runs in --out")
    add_number(parser, "--minutes", None, "time for this run", is_above=True)
    parser.add_argument(
        "--tiny", action="store_true", help="a model to try the chain with, in minutes on a CPU"
    )
    parser.add_argument("--compile", action="store_true", help="let torch.compile make the model faster")
    add_method(parser, DENSE)
    add_device(parser)
    add_json(parser)
    further = Further(parser)
    add_integer(further, "batch", 256, "drawings per step")
    add_integer(further, "seed", 0, "of weights, order and noise; of each run another", least=0)
    add_integer(further, "samples", 64, "pictures on a sample sheet", least=0, most=256)
    add_integer(further, "limit", None, "use this many drawings, evenly spaced")
    add_integer(further, "workers", None, "processes that render (default: cores)")
    add_number(further, "learning-rate", 4e-4, "after warming up", is_above=True)
    add_integer(further, "warm-up", 200, "steps until the full learning rate", least=0)
    add_integer(further, "cool-down", 0, "last steps, over which the learning rate falls to zero", least=0)
    add_integer(further, "accumulate", 1, "pieces of a batch, one after another, to save memory", most=4096)
    add_number(further, "shift", 1.0, "of the noise levels; larger sizes want more than 1", is_above=True)
    add_number(further, "sample-seconds", 180.0, "time between sample sheets", is_above=True)
    words = f"torch's for dense attention: {', '.join(BACKENDS)} (default auto)"
    further.add_argument(
        "kernel", type=member("kernel", BACKENDS), default="auto", metavar="NAME", help=words
    )


def _add_draw(parts: Any) -> None:
    parser = command(
        parts,
        "draw",
        _draw,
        "draw pictures from captions: one sheet, or an archive for tests",
        "  nearfield drawings draw --weights model.safetensors --out sheet.png\n"
        "  nearfield drawings draw --weights model.safetensors --out apple.png --prompt 'a red apple, flat icon'\n"
        "  nearfield drawings draw --weights model.safetensors --out asked.tar --ask held-out --data packed --num 5000",
    )
    parser.add_argument(
        "--weights", type=Path, required=True, metavar="FILE", help="a model of `drawings train`"
    )
    kind = output_file("--out", ".png", ".tar")
    parser.add_argument(
        "--out", type=kind, required=True, metavar="FILE", help="a sheet (.png) or an archive (.tar)"
    )
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="repeat it for several pictures")
    parser.add_argument(
        "--ask",
        type=member("--ask", QUESTIONS),
        default="prompts",
        metavar="WHAT",
        help=f"without --prompt: {', '.join(QUESTIONS)} (default prompts: 64 that never change)",
    )
    _add_data(parser, is_needed=False)
    add_integer(
        parser, "--num", None, "of held-out drawings, or pictures of each category (default 5000, 30)"
    )
    add_integer(parser, "--size", None, "pixels per side (default: what the model was trained at)", least=32)
    add_integer(parser, "--steps", 24, "denoising steps")
    add_number(parser, "--guidance", 4.0, "how far captions are followed; 1 is half the work")
    add_integer(parser, "--batch", 64, "pictures at a time")
    add_integer(parser, "--seed", 0, "of the noise", least=0)
    add_method(parser, DENSE)
    add_device(parser)


def _add_render(parts: Any) -> None:
    parser = command(
        parts,
        "render",
        _render,
        "render the held-out drawings that pictures are compared with, into an archive for `nearfield quality`",
        "  nearfield drawings render --data packed --out held-out.tar --num 5000 --size 256",
    )
    _add_data(parser)
    kind = output_file("--out", ".tar")
    parser.add_argument("--out", type=kind, required=True, metavar="FILE", help="an archive (.tar)")
    add_integer(parser, "--num", 5000, "of drawings")
    add_integer(parser, "--size", 256, "pixels per side", least=32)
    _add_workers(parser)


def _add_probe(parts: Any) -> None:
    parser = command(
        parts,
        "probe",
        _probe,
        "how often an independent network takes pictures for what was asked for, and real drawings for what they are",
        "  nearfield drawings probe --data packed\n"
        "  nearfield drawings probe --data packed --pictures categories.tar --json probe.json",
    )
    _add_data(parser)
    parser.add_argument(
        "--pictures", type=Path, metavar="FILE", help="an archive of `drawings draw --ask categories`"
    )
    _add_workers(parser)
    add_device(parser)
    add_json(parser)


def _add_card(parts: Any) -> None:
    parser = command(
        parts,
        "card",
        _card,
        "write the model card: data with authors and licences, training, limits",
        "  nearfield drawings card --data packed --weights run512/model.safetensors --out MODEL_CARD.md",
    )
    _add_data(parser)
    parser.add_argument("--weights", type=Path, metavar="FILE", help="the model (default: a card to fill in)")
    parser.add_argument(
        "--out", type=output_file("--out", ".md"), required=True, metavar="FILE", help="where it is written"
    )


def _add_data(parser: argparse.ArgumentParser, is_needed: bool = True) -> None:
    words = "what `nearfield drawings pack` wrote"
    parser.add_argument("--data", type=Path, required=is_needed, metavar="DIR", help=words)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=integer("--workers", 1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes that render (default: cores)",
    )


# -- commands ----------------------------------------------------------------------------------------------------------


def _pack(arguments: argparse.Namespace) -> int:
    from nearfield_lab.drawings.packages import read_packages
    from nearfield_lab.drawings.packed import licence_table, read_index, write_parts

    with as_usage(FileNotFoundError), Bar(None, "sets") as bar:
        found = []
        for one in read_packages(arguments.packages):
            found.append(one)
            bar.show(len(found), one[0].set)
        parts = write_parts(arguments.out, found, round(arguments.part_mib * 2**20))
    (arguments.out / "licences.md").write_text(
        licence_table(read_index(arguments.out)["sets"]), encoding="utf-8"
    )
    print(f"{sum(len(drawings) for _, drawings in found):,} drawings of {len(found)} sets")
    for path in parts:
        print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)")
    print(f"wrote {arguments.out / 'licences.md'}")
    return OK


def _train(arguments: argparse.Namespace) -> int:
    from nearfield_lab.drawings.model import DrawingConfig
    from nearfield_lab.drawings.packed import is_held_out
    from nearfield_lab.drawings.training import DrawingRecipe, DrawingTraining, encode, fingerprint
    from nearfield_lab.embedded.model import num_parameters
    from nearfield_lab.training.loop import Schedule

    method = _method(arguments, DEFAULT.with_dense_steps(0))
    if arguments.start and arguments.tiny:
        wrong("--tiny", "be left out with `--start`, which brings a model", "both")
    if arguments.steps is None and arguments.minutes is None:
        wrong("--steps", "be given, or `--minutes`", None, "Training has to end somewhere.")
    with as_usage(FileNotFoundError):
        device = device_of(arguments.device)
        schedule = Schedule(
            steps=arguments.steps,
            minutes=arguments.minutes,
            learning_rate=arguments.learning_rate,
            warm_up=arguments.warm_up,
            cool_down=arguments.cool_down,
            parts=arguments.accumulate,
        )
        drawings = [one for one in _drawings(arguments.data) if not is_held_out(one)]
        if arguments.limit:
            drawings = drawings[:: max(1, len(drawings) // arguments.limit)][: arguments.limit]
        with Bar(len(drawings), "drawings") as bar:
            latents, kept = encode(
                drawings,
                arguments.data,
                arguments.size,
                workers=arguments.workers or os.cpu_count() or 1,
                device=device,
                on_progress=lambda done, total, words: bar.show(done, words, total),
            )
        recipe = DrawingRecipe(
            size=arguments.size,
            batch=arguments.batch,
            shift=arguments.shift,
            seed=arguments.seed,
            method=method,
            dense_kernel=arguments.kernel,
            compiled=arguments.compile,
            samples=arguments.samples,
            sample_seconds=arguments.sample_seconds,
            data=fingerprint(kept),
        )
        with Bar(arguments.steps, "steps") as bar:
            training = DrawingTraining(
                latents,
                kept,
                arguments.out,
                recipe,
                schedule,
                config=DrawingConfig(**TINY) if arguments.tiny else None,
                start=arguments.start,
                device=device,
                on_step=shown(bar),
            )
            begin(arguments, training)
            parameters, text = num_parameters(training.model), num_parameters(training.model.text)
            words = (
                f"{parameters:,} parameters, {text:,} of them for text; {len(training.vocabulary):,} tokens"
            )
            print(f"{words}; {len(kept):,} drawings at {arguments.size} px")
            if training.handle is not None:
                print(training.handle.summary())
            return ended(arguments, training)


def _draw(arguments: argparse.Namespace) -> int:
    import torch

    from nearfield.diffusers import apply
    from nearfield_lab.drawings.pixels import write_archive
    from nearfield_lab.drawings.sampler import DrawingPipeline
    from nearfield_lab.embedded.pictures import grid_of, write_picture

    method = _method(arguments, DEFAULT)
    with as_usage(FileNotFoundError):
        asked = arguments.prompt or _questions(arguments)
        pipeline = DrawingPipeline.load(arguments.weights, device_of(arguments.device), arguments.guidance)
        pipeline.ask(asked)

        def pictures() -> Iterator["Tensor"]:
            for start in range(0, len(asked), arguments.batch):
                bar.show(start)
                number = min(arguments.batch, len(asked) - start)
                yield pipeline(
                    number,
                    first=start,
                    size=arguments.size,
                    steps=arguments.steps,
                    seed=arguments.seed,
                    batch=number,
                ).images

        with Bar(len(asked), "pictures") as bar, nullcontext() if method is None else apply(pipeline, method):
            if arguments.out.suffix == ".tar":
                write_archive(arguments.out, pictures())
            else:
                write_picture(arguments.out, grid_of(torch.cat(list(pictures()))))
    print(f"wrote {arguments.out}")
    return OK


def _questions(arguments: argparse.Namespace) -> list[str]:
    """The captions of `--ask`."""
    from nearfield_lab.drawings.captions import captions
    from nearfield_lab.drawings.packed import compared_with
    from nearfield_lab.drawings.prompts import PROMPTS, category_prompts

    if arguments.ask == "prompts":
        return list(PROMPTS)
    if arguments.ask == "categories":
        return [caption for _, caption in category_prompts(arguments.num or 30)]
    if arguments.data is None:
        wrong("--data", "be given with `--ask held-out`", None)
    return [captions(one)[0] for one in compared_with(_drawings(arguments.data), arguments.num or 5000)]


def _render(arguments: argparse.Namespace) -> int:
    from nearfield_lab.drawings.packed import compared_with
    from nearfield_lab.drawings.pixels import rendered, write_archive

    with as_usage(FileNotFoundError), Bar(arguments.num, "drawings") as bar:
        chosen = compared_with(_drawings(arguments.data), arguments.num)
        done = 0

        def pictures() -> Iterator["Tensor"]:
            nonlocal done
            for numbers, some in rendered(chosen, arguments.size, arguments.workers, together=64):
                done += len(numbers)
                bar.show(done)
                yield some.permute(0, 2, 3, 1)

        write_archive(arguments.out, pictures())
    print(f"wrote {arguments.out}")
    return OK


def _probe(arguments: argparse.Namespace) -> int:
    import torch

    from nearfield_lab.drawings import probe
    from nearfield_lab.drawings.pixels import rendered
    from nearfield_lab.drawings.sets import CATEGORIES
    from nearfield_lab.quality.images import open_images
    from nearfield_lab.quality.inception import MissingWeights

    def looked_at(drawings: "Sequence[Drawing]") -> "tuple[Tensor, Tensor]":
        kept = list[int]()

        def pictures() -> Iterator["Tensor"]:
            for numbers, some in rendered(drawings, 256, arguments.workers, together=64):
                kept.extend(numbers)
                bar.show(len(kept), "real drawings")
                yield some

        found = probe.features(pictures(), device_of(arguments.device))
        return found, probe.labels([drawings[number] for number in kept])

    with as_usage(FileNotFoundError), Bar(None, "pictures") as bar:
        try:
            parts = probe.split(_drawings(arguments.data))
            learned = probe.Probe.learn(*looked_at(parts.learned))
            real = probe.score(learned, *looked_at(parts.tried))
            scores = {"real drawings": real}
            if arguments.pictures:
                images = open_images(arguments.pictures)
                each, rest = divmod(len(images), len(CATEGORIES))
                if rest:
                    wrong(
                        "--pictures",
                        f"hold as many pictures of each of {len(CATEGORIES)} categories",
                        len(images),
                    )
                found = probe.features(images.batches(64, None), device_of(arguments.device))
                answers = torch.arange(len(CATEGORIES)).repeat_interleave(each)
                scores["pictures"] = probe.score(learned, found, answers)
        except MissingWeights as error:
            raise UsageError(str(error)) from None
    print(f"learned from {len(parts.learned)} real drawings of {len(CATEGORIES)} categories")
    for name, one in scores.items():
        print(f"{name}: {one.accuracy:.3f} of {one.pictures} are taken for what they should be")
    record = {"format": 1, "command": "drawings probe", "machine": machine.facts()}
    record["scores"] = {name: one._asdict() for name, one in scores.items()}
    return OK if write_reports(record, arguments.json) else FAILED


def _card(arguments: argparse.Namespace) -> int:
    from nearfield_lab.drawings.card import card

    with as_usage(FileNotFoundError):
        arguments.out.write_text(card(arguments.data, arguments.weights), encoding="utf-8")
    print(f"wrote {arguments.out}")
    return OK


def _drawings(folder: Path) -> "list[Drawing]":
    from nearfield_lab.drawings.packed import read_parts

    return read_parts(folder)


def _method(arguments: argparse.Namespace, base: Method) -> Method | None:
    recipe = recipe_of(arguments, base)
    return None if recipe is None else recipe.method
