"""Options that several commands have, each added by one call."""

import argparse
from typing import TYPE_CHECKING, Any

from nearfield.cli.arguments import IMPLS, input_file, integer, member, number, output_file, wrong

if TYPE_CHECKING:
    import torch

TakesOptions = Any
"""A parser, or what has its `add_argument`."""


def add_integer(
    parser: TakesOptions,
    name: str,
    default: int | None,
    words: str,
    least: int = 1,
    most: int = 2**24,
) -> None:
    """A whole number; its default, if it has one, is said behind the words."""
    shown = words if default is None else f"{words} (default {default})"
    parser.add_argument(name, type=integer(name, least, most), default=default, metavar="N", help=shown)


def add_number(
    parser: TakesOptions, name: str, default: float | None, words: str, is_above: bool = False
) -> None:
    """A number of at least zero, or above it."""
    shown = words if default is None else f"{words} (default {default:g})"
    parse = number(name, least=0, is_above=is_above)
    parser.add_argument(name, type=parse, default=default, metavar="X", help=shown)


DEVICE_WORDS = "cpu, cuda, cuda:1 (default: cuda if there is one)"


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help=DEVICE_WORDS)


def device_of(name: str | None) -> "torch.device":
    """The device that `--device` names; a GPU where there is one."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        wrong("--device", "name a device", repr(name), "Example: --device cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        wrong("--device", f"be there ({torch.cuda.device_count()} CUDA devices are)", repr(name))
    return device


def add_impl(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--impl",
        type=member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )


def add_weights(parser: argparse.ArgumentParser, words: str = "a model of `nearfield train demo`") -> None:
    """`--weights FILE` instead of the embedded model."""
    parse = input_file("--weights")
    parser.add_argument("--weights", type=parse, metavar="FILE", help=f"{words} (default: the embedded one)")


def add_json(parser: argparse.ArgumentParser, words: str = "write results and machine facts") -> None:
    parser.add_argument("--json", type=output_file("--json"), metavar="FILE", help=words)


def add_plot(parser: argparse.ArgumentParser, words: str, *suffixes: str) -> None:
    """`--plot FILE`."""
    endings = suffixes or (".png",)
    parser.add_argument(
        "--plot",
        type=output_file("--plot", *endings),
        metavar="FILE",
        help=f"{words} ({' or '.join(endings)})",
    )
