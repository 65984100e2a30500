"""`nearfield generate` with a model of `nearfield train pixel`: pictures one file each, and the model's loss."""

import argparse
import time
from pathlib import Path
from typing import Any

from nearfield.cli import FAILED, OK, Bar, UsageError, number, time_for, write_reports, wrong
from nearfield_lab.commands.folders import check_settings, missing_pictures, run_length
from nearfield_lab.commands.further import Further

_EVALUATED = 1024  # pictures that the loss of a model is the mean of
_FOREIGN = ("recipe", "compare", "model", "prompt", "lora", "engine", "out", "first")
"""What a model on pixels does not have: its method and fields are in its file."""
_OWN = ("minutes", "compile", "data", "pixels")


def add_pixel_options(further: Further) -> None:
    """What only a model on pixels has."""
    further.add_argument(
        "minutes",
        type=number("minutes", least=0, is_above=True),
        metavar="X",
        help="begin no further batch after this time, and go on with the same command; for models on pixels",
    )
    further.add_argument(
        "compile",
        action="store_true",
        help="let torch.compile make the model faster; pays from some hundred pictures on, best a multiple of the"
        " batch; for models on pixels",
    )
    further.add_argument(
        "data",
        type=Path,
        metavar="DIR",
        help="photographs: tell the model's loss with them, too, with noise that is the same for every model; for"
        " models on pixels",
    )
    further.add_argument(
        "pixels", type=Path, metavar="DIR", help="where the pixels of data are kept (default: --images)"
    )


def check_pixel_options(arguments: argparse.Namespace) -> None:
    """Refuse what only models on pixels have, for another."""
    for name in _OWN:
        if getattr(arguments, name):
            hint = "Example: --weights run/model.safetensors"
            wrong(
                name, "be given with a model of `nearfield train pixel` only", getattr(arguments, name), hint
            )


def is_on_pixels(arguments: argparse.Namespace) -> bool:
    """Whether `--weights` holds such a model."""
    if not arguments.weights or not arguments.weights.is_file():
        return False
    from nearfield_lab.commands.generating import missing_extras_told
    from nearfield_lab.embedded.pixel import KIND
    from nearfield_lab.embedded.storage import read_facts

    with missing_extras_told():
        return bool(read_facts(arguments.weights).get("kind") == KIND)


def sample_pixels(arguments: argparse.Namespace) -> int:
    """Make the pictures that are missing in `--images`."""
    from nearfield_lab.commands.generating import chosen_device, missing_extras_told

    if arguments.is_method_given or arguments.settings:
        got = arguments.settings or arguments.method
        wrong("--method", "be left out with a model on pixels, which brings its own", got)
    for name in _FOREIGN:
        if getattr(arguments, name):
            option = name if name in ("lora", "engine", "first") else f"--{name}"
            wrong(option, "be left out with a model on pixels", getattr(arguments, name))
    if arguments.images is None:
        wrong(
            "--images",
            "name a folder for the pictures of a model on pixels",
            None,
            "Example: --images samples",
        )
    size = _square(arguments.size)
    with missing_extras_told():
        from nearfield_lab.embedded import pictures, pixel

        model, facts = pixel.load_pixel_model(arguments.weights)
        model.to(chosen_device(arguments.device)).eval()
        settings = {
            "weights": arguments.weights.name,
            "step": facts.get("step"),
            "size": size or model.config.size,
            **{name: getattr(arguments, name) for name in ("steps", "seed")},
        }
        check_settings("--images", arguments.images, settings)
        body = pixel.compiled_body(model.body) if arguments.compile else None
        started, made, is_time = time.monotonic(), 0, time_for(arguments.minutes)
        missing = missing_pictures(arguments.images, range(arguments.num))
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
                pictures.write_pictures(arguments.images, images, first)
                missing, made = missing[count:], made + count
        loss = _loss(arguments, model, settings["size"]) if arguments.data else None
    seconds = time.monotonic() - started
    print(
        f"wrote {made} pictures to {arguments.images}, {arguments.num - len(missing)} of {arguments.num} are there"
    )
    if loss is not None:
        print(f"loss with {arguments.data}: {loss:.5f}")
    if missing:
        print("time is up; the same command goes on")
    document = _document(settings, made, seconds, len(missing), loss)
    return OK if write_reports(document, arguments.json) else FAILED


def _square(size: int | tuple[int, int] | None) -> int | None:
    if isinstance(size, tuple):
        wrong("--size", "be one number: pictures of a model on pixels are square", "x".join(map(str, size)))
    return size


def _loss(arguments: argparse.Namespace, model: Any, size: int) -> float:
    from nearfield_lab.training.data import pictures, read_pixels
    from nearfield_lab.training.pixel import evaluated_loss

    pixels = read_pixels(pictures(arguments.data), arguments.pixels or arguments.images, size)
    return evaluated_loss(model, pixels, min(_EVALUATED, len(pixels)), batch=arguments.batch)


def _document(
    settings: dict[str, Any], made: int, seconds: float, missing: int, loss: float | None
) -> dict[str, Any]:
    from nearfield.cli import machine

    return {
        "format": 1,
        "command": "generate",
        "machine": machine.facts(),
        "settings": settings,
        "pictures_of_this_run": made,
        "missing": missing,
        "loss": loss,
        "seconds": seconds,
    }
