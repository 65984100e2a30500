"""What commands share: exit codes, errors of usage, and values read from text.

The module imports only plain tables, so that arguments are read at once.
"""

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from nearfield.cli import presets

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
CODES = "exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted"

# The library's, written out so that reading arguments needs nothing; a test compares them.
IMPLS = ("auto", "gluon", "triton", "grouped", "reference")


class UsageError(Exception):
    """An argument that cannot be used, said as "`argument` must rule; got value. Hint"."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr)  # argparse's own passes over what cannot be written


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Names with a hyphen stay in one piece."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str
) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=_Formatter,
        epilog=f"examples:\n{examples}\n\n{CODES}",
    )
    added.set_defaults(run=run)
    return added


def show_help_without_command(parser: argparse.ArgumentParser) -> None:
    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return USAGE

    parser.set_defaults(run=show_help)


def wrong(argument: str, rule: str, got: object, hint: str = "") -> NoReturn:
    # Not a ValueError: argparse would replace the message with its own.
    raise UsageError(f"`{argument}` must {rule}; got {got}." + (f" {hint}" if hint else ""))


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Inside, a ValueError, and errors of these kinds, are errors of usage."""
    caught: tuple[type[Exception], ...] = (ValueError, *kinds)
    try:
        yield
    except caught as error:
        raise UsageError(str(error)) from None


def grid_sides(text: str) -> tuple[int, ...]:
    sides = text.lower().split("x")
    if not 1 <= len(sides) <= 3 or not all(side.isdecimal() and int(side) >= 1 for side in sides):
        wrong("--grid", "be one to three positive sides joined by x", repr(text), "Example: --grid 90x160")
    grid = tuple(map(int, sides))
    if math.prod(grid) > 2**18:
        wrong("--grid", "hold at most 262,144 tokens", f"{math.prod(grid):,}")
    return grid


def pixels(text: str) -> tuple[int, int]:
    """Height and width in pixels: N or HxW."""
    sides = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in text.lower().split("x")]
    if len(sides) > 2 or any(side < 8 or side % 8 for side in sides):
        rule = "be pixels or height x width, in multiples of 8"
        wrong("--size", rule, repr(text), "Example: --size 512")
    return sides[0], sides[-1]


def integer(argument: str, least: int, most: int = 2**24) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            wrong(argument, f"be an integer of at least {least}", repr(text))
        if value > most:
            wrong(argument, f"be at most {most:,}", f"{value:,}")
        return value

    return parse


def number(argument: str, *, least: float, is_above: bool = False) -> Callable[[str], float]:
    """A number of at least `least`, or above it."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (value > least if is_above else value >= least) or value == float("inf"):
            wrong(argument, f"be a number {'above' if is_above else 'of at least'} {least:g}", repr(text))
        return value

    return parse


def member(argument: str, allowed: Sequence[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        for value in allowed:
            if text == str(value):
                return value
        wrong(argument, f"be one of {', '.join(map(str, allowed))}", repr(text))

    return parse


def preset_name(argument: str) -> Callable[[str], str]:
    return member(argument, tuple(presets.PRESETS))


def comma_list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values between commas, each once."""
    return lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def layer_numbers(argument: str) -> Callable[[str], list[int]]:
    """Layers between commas, or from one to another: `2`, `0,2`, `0..3`."""
    number = integer(argument, 0, 2**16)

    def parse(text: str) -> list[int]:
        layers = list[int]()
        for part in text.split(","):
            first, dots, last = part.strip().partition("..")
            start = number(first)
            stop = number(last) if dots else start
            if stop < start:
                wrong(
                    argument,
                    "run from the smaller to the larger layer",
                    repr(text),
                    f"Example: {argument} 0..3",
                )
            layers += range(start, stop + 1)
        return list(dict.fromkeys(layers))

    return parse


def input_file(argument: str) -> Callable[[str], Path]:
    """A file that is there."""

    def parse(text: str) -> Path:
        path = Path(text)
        if not path.is_file():
            wrong(argument, "name a file that is there", repr(text))
        return path

    return parse


def output_file(argument: str, *suffixes: str) -> Callable[[str], Path]:
    """A file that can be written, as far as that is known before there is anything to write."""
    hint = f"Example: {argument} results{suffixes[0] if suffixes else '.json'}"

    def parse(text: str) -> Path:
        path = Path(text)
        if not text.strip():
            wrong(argument, "name a file", repr(text), hint)
        if suffixes and not path.name.lower().endswith(suffixes):
            wrong(argument, f"end in {' or '.join(suffixes)}", repr(text), hint)
        try:
            if path.is_dir() or text.endswith(("/", os.sep)):
                wrong(argument, "name a file, not a directory", repr(text), hint)
            if path.exists() and not path.is_file():
                wrong(argument, "name a plain file", repr(text), hint)
            folder = next(parent for parent in path.absolute().parents if parent.exists())
        except OSError as error:
            wrong(argument, "be a usable path", f"{text!r} ({error.strerror})", hint)
        if not folder.is_dir():
            wrong(argument, "stand in a directory", f"{text!r}, where {folder} is a file", hint)
        if not os.access(folder, os.W_OK | os.X_OK):
            wrong(argument, "stand where files can be written", f"{text!r}, where {folder} takes none", hint)
        return path

    return parse
