"""Options in a line each, and `--option NAME=VALUE`: what a command seldom needs, so that its help stays short."""

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearfield.cli import TakesOptions, member, wrong

_COLUMN = 26


def add_path(parser: TakesOptions, name: str, metavar: str, words: str, **more: Any) -> None:
    parser.add_argument(name, metavar=metavar, help=words, **{"type": Path, **more})


def add_switch(parser: TakesOptions, name: str, words: str) -> None:
    parser.add_argument(name, action="store_true", help=words)


def add_choice(
    parser: TakesOptions, name: str, choices: Sequence[str], default: str, words: str, metavar: str = "NAME"
) -> None:
    """One of some words, which are said behind the help with their default."""
    shown = f"{words}: {', '.join(choices)} (default {default})"
    parser.add_argument(name, type=member(name, choices), default=default, metavar=metavar, help=shown)


class _Option(NamedTuple):
    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


class Further:
    """Further options of a command. They are declared as others are, and stand in the namespace under their names.

    The command's help lists them below its options.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser, self.known = parser, dict[str, _Option]()
        parser.add_argument(
            "--option",
            action=_assigning(self.known),
            metavar="NAME=VALUE",
            help="one of the further options below; repeat it for several",
        )
        parser.epilog = f"\n\n{parser.epilog}"

    def add_argument(
        self,
        name: str,
        *,
        type: Callable[[str], Any] = str,
        default: Any = None,
        metavar: str = "WORD",
        help: str = "",
        action: str = "",
    ) -> None:
        """As of a parser; a switch takes true or false."""
        is_switch = action == "store_true"
        option = _Option(name, _switch(name) if is_switch else type, "true" if is_switch else metavar, help)
        self.known[name] = option
        self._parser.set_defaults(**{option.field: False if is_switch else default})
        listed, _, rest = (self._parser.epilog or "").partition("\n\n")
        head = listed or "further options, each as --option NAME=VALUE:"
        left = f"  {name + '=' + option.metavar:<{_COLUMN - 3}} "
        words = textwrap.fill(help, 100, initial_indent=left, subsequent_indent=" " * _COLUMN)
        self._parser.epilog = f"{head}\n{words}\n\n{rest}"


def _switch(name: str) -> Callable[[str], bool]:
    def parse(text: str) -> bool:
        if text.lower() not in ("true", "false"):
            wrong(name, "be true or false", repr(text))
        return text.lower() == "true"

    return parse


def _assigning(known: dict[str, _Option]) -> type[argparse.Action]:
    """An action that puts the value of an option where it belongs."""

    class Assign(argparse.Action):
        def __call__(
            self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
        ) -> None:
            name, equals, text = values.partition("=")
            if not equals or name not in known:
                wrong("--option", f"be NAME=VALUE with one of {', '.join(known)}", repr(values))
            setattr(namespace, known[name].field, known[name].parse(text))

    return Assign
