"""`nearfield sample`: pictures by a model of `nearfield train pixel`, one file each, for `nearfield quality`."""

import argparse
import time
from pathlib import Path
from typing import Any

from nearfield.commands.arguments import FAILED, OK, UsageError, command, integer, output_file, wrong
from nearfield.commands.folders import check_settings, missing_pictures, run_length
from nearfield.commands.generating import chosen_device, missing_extras_told
from nearfield.commands.methods import number
from nearfield.commands.progress import Bar
from nearfield.commands.reports import write_reports


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "sample",
        _sample,
        "make pictures with a model of `nearfield train pixel`, each in a file of its own",
        "  nearfield sample --weights run128/model.safetensors --num 5000 --out samples\n"
        "  nearfield quality samples cats512 --size 128",
    )
    parser.add_argument("--weights", type=Path, required=True, metavar="FILE", help="the model")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the pictures; those that are there are kept"
    )
    for name, least, most, default, words in (
        ("--num", 1, 10**6, 16, "pictures"),
        ("--steps", 1, 1000, 20, "denoising steps"),
        ("--seed", 0, 2**31, 0, "of the noise"),
        ("--batch", 1, 4096, 16, "pictures at a time"),
    ):
        parser.add_argument(
            name,
            type=integer(name, least, most),
            default=default,
            metavar="N",
            help=f"{words} (default {default})",
        )
    parser.add_argument(
        "--size",
        type=integer("--size", 8, 4096),
        metavar="N",
        help="pixels per side (default: what the model was trained at)",
    )
    parser.add_argument(
        "--minutes",
        type=number("--minutes", least=0, is_above=True),
        metavar="X",
        help="begin no further batch after this time; the same command goes on",
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write figures and machine facts"
    )


def _sample(arguments: argparse.Namespace) -> int:
    if not arguments.weights.is_file():
        wrong("--weights", "name a file that is there", repr(str(arguments.weights)))
    with missing_extras_told():
        from nearfield.demo import pictures, pixel

        model, facts = pixel.load_pixel_model(arguments.weights)
        model.to(chosen_device(arguments.device)).eval()
        settings = {
            "weights": arguments.weights.name,
            "step": facts.get("step"),
            "size": arguments.size or model.config.size,
            **{name: getattr(arguments, name) for name in ("steps", "seed")},
        }
        check_settings("--out", arguments.out, settings)
        started, made = time.monotonic(), 0
        missing = missing_pictures(arguments.out, range(arguments.num))
        with Bar(arguments.num, "pictures") as bar:
            while missing and not _is_late(started, arguments.minutes):
                first, count = missing[0], run_length(missing, arguments.batch)
                bar.show(arguments.num - len(missing))
                try:
                    images = pixel.sample(
                        model,
                        range(first, first + count),
                        size=settings["size"],
                        steps=arguments.steps,
                        seed=arguments.seed,
                    )
                except ValueError as error:  # a size that the model's fields do not fit
                    raise UsageError(str(error)) from None
                pictures.write_pictures(arguments.out, images, first)
                missing, made = missing[count:], made + count
    seconds = time.monotonic() - started
    print(
        f"wrote {made} pictures to {arguments.out}, {arguments.num - len(missing)} of {arguments.num} are there"
    )
    if missing:
        print("time is up; the same command goes on")
    return OK if write_reports(_document(settings, made, seconds, len(missing)), arguments.json) else FAILED


def _is_late(started: float, minutes: float | None) -> bool:
    return minutes is not None and time.monotonic() - started > 60 * minutes


def _document(settings: dict[str, Any], made: int, seconds: float, missing: int) -> dict[str, Any]:
    from nearfield.bench import machine

    return {
        "format": 1,
        "command": "sample",
        "machine": machine.facts(),
        "settings": settings,
        "pictures_of_this_run": made,
        "missing": missing,
        "seconds": seconds,
    }
