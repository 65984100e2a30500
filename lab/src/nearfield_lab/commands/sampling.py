"""`nearfield generate` with a model of `nearfield train pixel`: pictures one file each, and the model's loss."""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from nearfield.cli import add_number, wrong
from nearfield_lab.commands.further import Further, add_path, add_switch
from nearfield_lab.commands.launched import chosen_device
from nearfield_lab.commands.many import Job, fill, identity, portable
from nearfield_lab.embedded import pixel
from nearfield_lab.embedded.pictures import packed
from nearfield_lab.storage import read_facts
from nearfield_lab.training.data import pictures, read_pixels
from nearfield_lab.training.pixel import evaluated_loss

_EVALUATED = 1024  # pictures that the loss of a model is the mean of
_FOREIGN = ("recipe", "compare", "model", "prompt", "lora", "out")
"""What a model on pixels does not have: its method and fields are in its file."""
_OWN = ("minutes", "compile", "data", "pixels")


def add_pixel_options(further: Further) -> None:
    """What only a model on pixels has."""
    words = "begin no further batch after this time, and go on with the same command; for models on pixels"
    add_number(further, "minutes", None, words, is_above=True)
    words = (
        "let torch.compile make the model faster; pays from some hundred pictures on, best a multiple of the batch;"
        " for models on pixels"
    )
    add_switch(further, "compile", words)
    words = (
        "photographs: tell the model's loss with them, too, with noise that is the same for every model; for models"
        " on pixels"
    )
    add_path(further, "data", "DIR", words)
    add_path(further, "pixels", "DIR", "where the pixels of data are kept (default: --images)")


def check_pixel_options(arguments: argparse.Namespace) -> None:
    """Refuse what only models on pixels have, for another."""
    rule, hint = (
        "be given with a model of `nearfield train pixel` only",
        "Example: --weights run/model.safetensors",
    )
    for name in _OWN:
        if getattr(arguments, name):
            wrong(name, rule, getattr(arguments, name), hint)


def is_on_pixels(arguments: argparse.Namespace) -> bool:
    """Whether `--weights` holds such a model."""
    return bool(arguments.weights) and read_facts(arguments.weights).get("kind") == pixel.KIND


def sample_pixels(arguments: argparse.Namespace) -> int:
    """Make the pictures that are missing in `--images`."""
    rule = "be left out with a model on pixels"
    if arguments.is_method_given or arguments.settings:
        wrong("--method", f"{rule}, which brings its own", arguments.settings or arguments.method)
    for name in _FOREIGN:
        if getattr(arguments, name):
            wrong(name if name == "lora" else f"--{name}", rule, getattr(arguments, name))
    if arguments.images is None:
        hint = "Example: --images samples"
        wrong("--images", "name a folder for the pictures of a model on pixels", None, hint)
    if isinstance(arguments.size, tuple):
        got = "x".join(map(str, arguments.size))
        wrong("--size", "be one number: pictures of a model on pixels are square", got)
    settings = {"weights": identity(arguments.weights)}
    settings |= {name: getattr(arguments, name) for name in ("size", "steps", "seed")}
    job = PixelJob(portable(arguments))
    return fill(arguments, arguments.images, job, settings, partial(_loss, arguments))


class PixelJob(Job):
    """What a worker does with a model on pixels."""

    def __call__(self) -> Callable[[range], list[bytes]]:
        asked = self.arguments
        model, _ = _model(asked)
        body = pixel.compiled_body(model.body) if asked.compile else None
        how: dict[str, Any] = {"size": asked.size, "steps": asked.steps, "seed": asked.seed, "body": body}
        return lambda numbers: [packed(image) for image in pixel.sample(model, numbers, **how)]


def _model(arguments: argparse.Namespace) -> tuple[pixel.PixelTransformer, int]:
    """The model, and the size of its pictures."""
    model, _ = pixel.load_pixel_model(arguments.weights)
    return model.to(chosen_device(arguments.device)).eval(), arguments.size or model.config.size


def _loss(arguments: argparse.Namespace) -> dict[str, Any]:
    if not arguments.data:
        return {"loss": None}
    model, size = _model(arguments)
    pixels = read_pixels(pictures(arguments.data), arguments.pixels or arguments.images, size)
    loss = evaluated_loss(model, pixels, min(_EVALUATED, len(pixels)), batch=arguments.batch)
    print(f"loss with {arguments.data}: {loss:.5f}")
    return {"loss": loss}
