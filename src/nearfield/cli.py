"""The command line: one parser for all commands, and one line on stderr for whatever goes wrong.

Arguments are read with nothing imported but the package itself (whose `__init__` imports torch); what a command needs
besides is imported when it runs.

Exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from nearfield.commands import (
    benchmarks,
    following,
    generating,
    inspecting,
    retrieving,
    sampling,
    serving,
    training,
    tuning,
)
from nearfield.commands.arguments import (
    CODES,
    FAILED,
    INTERRUPTED,
    OK,
    USAGE,
    Parser,
    UsageError,
    show_help_without_command,
)

_FIRST = """\
examples:
  nearfield doctor                     is all in place here, and what will run
  nearfield demo                       tiles of a curve, and what they save on this machine
  nearfield generate --compare         pictures by a small model, dense and sparse
  nearfield studio                     the same and more in the browser
  nearfield explain flux-2048          what FLUX at 2048 px would read

in Python, with a diffusers pipeline:
  from nearfield import Hilbert, apply
  with apply(pipe, Hilbert()) as handle:
      image = pipe("a cat", height=2048, width=2048).images[0]
      print(handle.summary())"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _prepare_streams()
    try:
        return _run(argv)
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


def _run(argv: Sequence[str] | None) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed")
    try:
        words = sys.argv[1:] if argv is None else argv
        arguments = _parser(words).parse_args(argv)
        code: int = arguments.run(arguments)
        hint = following.after(words)
        if code == OK and hint and sys.stderr.isatty():  # for people; scripts and logs want results alone
            print(hint, file=sys.stderr)
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


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="nearfield",
        description="Sparse attention for diffusion transformers: who reads whom, how fast, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{_FIRST}\n\n{CODES}",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    show_help_without_command(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for family in (inspecting, generating, serving, retrieving, sampling, training, tuning, benchmarks):
        family.add_commands(commands)
    _add_quality(commands, words)
    return parser


def _add_quality(commands: Any, words: Sequence[str]) -> None:
    """`nearfield quality` stands in its own package, which loads torch: only its name is needed to list it."""
    if "quality" not in words:
        commands.add_parser(
            "quality", help="distances between two sets of images: FID, LPIPS, PSNR, seams ..."
        )
        return
    from nearfield.quality.command import add_command

    def facts() -> dict[str, Any]:
        from nearfield.bench import machine

        return machine.facts()

    add_command(commands, facts)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import nearfield

        print(f"nearfield {nearfield.__version__}")
        parser.exit()
