"""The command line: one parser for all commands, and one line on stderr for whatever goes wrong.

Arguments are read with nothing imported but the package itself (whose `__init__` imports torch); what a command needs
besides is imported when it runs.

Exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from nearfield.cli import inspecting
from nearfield.cli.arguments import (
    CODES,
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    Parser,
    UsageError,
    show_help_without_command,
)
from nearfield.methods import DEFAULT

ENTRY_POINTS = "nearfield.commands"
AddCommands = Callable[[Any], None]

LAB = ("capture", "distill", "drawings", "errors", "generate", "quality", "rag", "studio", "train", "tune")
"""Commands of nearfield-lab: without it, their error says how to install it."""

_FIRST = f"""\
examples:
  nearfield doctor                     is all in place here, and what will run
  nearfield explain flux-2048          what FLUX at 2048 px would read, how much faster that can be, and why

in Python, with a diffusers pipeline:
  from nearfield import {type(DEFAULT).__name__}, apply
  with apply(pipe, {DEFAULT.label}) as handle:
      image = pipe("a cat", height=2048, width=2048).images[0]
      print(handle.summary())"""


def main(argv: Sequence[str] | None = None, others: Sequence[AddCommands] = ()) -> int:
    """Run one command; returns the exit code.

    Args:
        others: functions that add commands, besides those of installed packages.
    """
    return _guarded(lambda words: parser_of(others, words), argv)


def run_family(
    prog: str, description: str, add_commands: AddCommands, argv: Sequence[str] | None = None
) -> int:
    """Run one command of another program whose commands are built alike; returns the exit code."""

    def parser(_: Sequence[str]) -> argparse.ArgumentParser:
        parser = Parser(prog=prog, description=description, epilog=CODES)
        show_help_without_command(parser)
        add_commands(parser.add_subparsers(title="commands", metavar="NAME"))
        return parser

    return _guarded(parser, argv)


def _guarded(parser: Callable[[Sequence[str]], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    """Run a command; one line on stderr for whatever goes wrong."""
    _prepare_streams()
    try:
        return _run(parser, argv)
    except UsageError as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nnearfield: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has left
        _drop_unwritten()
        return OK
    except OSError as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        _drop_unwritten()
        return FAILED


def _run(parser: Callable[[Sequence[str]], argparse.ArgumentParser], argv: Sequence[str] | None) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed")
    words = sys.argv[1:] if argv is None else argv
    try:
        arguments = parser(words).parse_args(words)
        code: int = arguments.run(arguments)
        return code
    finally:
        sys.stdout.flush()


def _prepare_streams() -> None:
    """Where the encoding lacks a character, print "?" rather than fail; where stderr is closed, complain to nobody."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_unwritten() -> None:
    """What stdout does not take, Python would try to flush once more at its exit, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser_of(others: Sequence[AddCommands] = (), words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        others: functions that add commands, besides those of installed packages.
        words: what is to be read; a command that is not installed is refused by what brings it.
    """
    parser = Parser(
        prog="nearfield",
        description="Sparse attention for diffusion transformers: who reads whom, how fast, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{_FIRST}\n\n{CODES}",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    show_help_without_command(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    installed: list[AddCommands] = [entry.load() for entry in entry_points(group=ENTRY_POINTS)]
    for add_commands in dict.fromkeys((inspecting.add_commands, *installed, *others)):
        add_commands(commands)
    name = next((word for word in words if not word.startswith("-")), "")
    if name in LAB and name not in commands.choices:
        raise UsageError(
            f"`nearfield {name}` comes with nearfield-lab. "
            "Run `pip install nearfield-lab`, in a checkout `pip install ./lab`."
        )
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import nearfield

        print(f"nearfield {nearfield.__version__}")
        parser.exit()
