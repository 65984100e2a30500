"""`nearfield sample`: pictures by a model of `nearfield train pixel`, one file each, for `nearfield quality`."""

import argparse
import time
from pathlib import Path
from typing import Any

from nearfield.cli.arguments import FAILED, OK, UsageError, command, wrong
from nearfield.cli.options import add_device, add_integer, add_json, add_number
from nearfield.cli.progress import Bar, time_for
from nearfield.cli.reports import write_reports
from nearfield_lab.commands.folders import check_settings, missing_pictures, run_length
from nearfield_lab.commands.generating import chosen_device, missing_extras_told

_EVALUATED = 1024  # pictures that the loss of a model is the mean of


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "sample",
        _sample,
        "make pictures with a model of `nearfield train pixel`, each in a file of its own",
        "  nearfield sample --weights run128/model.safetensors --num 5000 --out samples\n"
        "  nearfield sample --weights run128/model.safetensors --out samples --data cats512 --json sample.json\n"
        "  nearfield quality samples cats512 --size 128",
    )
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="the model")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the pictures; those that are there are kept"
    )
    add_integer(parser, "--num", 16, "pictures", most=10**6)
    add_integer(parser, "--steps", 20, "denoising steps", most=1000)
    add_integer(parser, "--seed", 0, "of the noise", least=0, most=2**31)
    add_integer(parser, "--batch", 16, "pictures at a time", most=4096)
    add_integer(
        parser, "--size", None, "pixels per side (default: what the model was trained at)", least=8, most=4096
    )
    add_number(
        parser,
        "--minutes",
        None,
        "begin no further batch after this time; the same command goes on",
        is_above=True,
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="let torch.compile make the model faster; pays from some hundred pictures on, best a multiple of --batch",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="photographs: tell the model's loss with them, too, with noise that is the same for every model",
    )
    parser.add_argument(
        "--pixels", type=Path, metavar="DIR", help="where their pixels are kept (default: --out)"
    )
    add_device(parser)
    add_json(parser, "write figures and machine facts")


def _sample(arguments: argparse.Namespace) -> int:
    if not arguments.weights.is_file():
        wrong("--weights", "name a file that is there", repr(str(arguments.weights)))
    with missing_extras_told():
        from nearfield_lab.embedded import pictures, pixel

        model, facts = pixel.load_pixel_model(arguments.weights)
        model.to(chosen_device(arguments.device)).eval()
        settings = {
            "weights": arguments.weights.name,
            "step": facts.get("step"),
            "size": arguments.size or model.config.size,
            **{name: getattr(arguments, name) for name in ("steps", "seed")},
        }
        check_settings("--out", arguments.out, settings)
        body = pixel.compiled_body(model.body) if arguments.compile else None
        started, made, is_time = time.monotonic(), 0, time_for(arguments.minutes)
        missing = missing_pictures(arguments.out, range(arguments.num))
        with Bar(arguments.num, "pictures") as bar:
            while missing and is_time():
                first, count = missing[0], run_length(missing, arguments.batch)
                bar.show(arguments.num - len(missing))
                try:
                    images = pixel.sample(
                        model,
                        range(first, first + count),
                        size=settings["size"],
                        steps=arguments.steps,
                        seed=arguments.seed,
                        body=body,
                    )
                except ValueError as error:  # a size that the model's fields do not fit
                    raise UsageError(str(error)) from None
                pictures.write_pictures(arguments.out, images, first)
                missing, made = missing[count:], made + count
        loss = _loss(arguments, model, settings["size"]) if arguments.data else None
    seconds = time.monotonic() - started
    print(
        f"wrote {made} pictures to {arguments.out}, {arguments.num - len(missing)} of {arguments.num} are there"
    )
    if loss is not None:
        print(f"loss with {arguments.data}: {loss:.5f}")
    if missing:
        print("time is up; the same command goes on")
    document = _document(settings, made, seconds, len(missing), loss)
    return OK if write_reports(document, arguments.json) else FAILED


def _loss(arguments: argparse.Namespace, model: Any, size: int) -> float:
    from nearfield_lab.training.data import pictures, read_pixels
    from nearfield_lab.training.pixel import evaluated_loss

    pixels = read_pixels(pictures(arguments.data), arguments.pixels or arguments.out, size)
    return evaluated_loss(model, pixels, min(_EVALUATED, len(pixels)), batch=arguments.batch)


def _document(
    settings: dict[str, Any], made: int, seconds: float, missing: int, loss: float | None
) -> dict[str, Any]:
    from nearfield.cli import machine

    return {
        "format": 1,
        "command": "sample",
        "machine": machine.facts(),
        "settings": settings,
        "pictures_of_this_run": made,
        "missing": missing,
        "loss": loss,
        "seconds": seconds,
    }
