"""The tables of docs/commands.md, from the commands themselves: `python docs/command_tables.py`.

Between `<!-- NAME -->` and `<!-- end -->` stands what the parser of a command says of its options, or, for the name
`methods`, what classes of methods say of themselves. What is around them is written by hand.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src")]

from nearfield.cli.explain import overview  # noqa: E402
from nearfield.cli.main import parser_of  # noqa: E402
from nearfield.methods import own_methods  # noqa: E402
from nearfield_lab.commands import add_commands  # noqa: E402

PAGE = ROOT / "docs" / "commands.md"
_BLOCK = re.compile(r"<!-- (?P<name>[\w ]+) -->\n.*?<!-- end -->", re.DOTALL)
_METHOD = ("--method", "--set", "--recipe")
_METHOD_ROW = "who reads whom, [the same for every command](#methods-and-their-fields)"
_FURTHER = re.compile(r"^  ([\w-]+)=(\S+) +(.*(?:\n {26}.*)*)$", re.MULTILINE)


def commands(parser: argparse.ArgumentParser, before: str = "nearfield") -> Iterator[tuple[str, Any]]:
    """Every command that runs something, with its parser."""
    families = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not families:
        yield before, parser
    for family in families:
        for name, child in family.choices.items():
            yield from commands(child, f"{before} {name}")


def options_table(parser: argparse.ArgumentParser) -> str:
    """Options and further options, a row each."""
    rows = ["| option | meaning |", "|---|---|", *_rows(parser)]
    further = [_cells(f"`{name}={value}`", words) for name, value, words in _further(parser)]
    if further:
        rows += ["", "| as `--option NAME=VALUE` | meaning |", "|---|---|", *further]
    return "\n".join(rows)


def _rows(parser: argparse.ArgumentParser) -> Iterator[str]:
    has_method = False
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or "--option" in action.option_strings:
            continue
        name = action.option_strings[0] if action.option_strings else str(action.metavar)
        if name in _METHOD:
            known = [each for each in _METHOD if each in parser._option_string_actions]
            if not has_method:
                yield _cells(", ".join(f"`{each}`" for each in known), _METHOD_ROW)
            has_method = True
            continue
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        yield _cells(f"`{name}{value}`", str(action.help))


def _further(parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    listed = (parser.epilog or "").partition("\n\n")[0]
    return [(name, value, " ".join(words.split())) for name, value, words in _FURTHER.findall(listed)]


def methods_table() -> str:
    """Every method of the package by its name."""
    known = overview()["methods"]
    found = [(kind.name, known[kind.name]) for kind in own_methods()]
    return "\n".join(
        ["| method | what it does |", "|---|---|", *(_cells(f"`{name}`", words) for name, words in found)]
    )


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def written(page: str) -> str:
    """The page with its tables as they are now."""
    tables = {name: options_table(parser) for name, parser in commands(parser_of([add_commands]))}
    tables["methods"] = methods_table()
    return _BLOCK.sub(lambda block: f"<!-- {block['name']} -->\n{tables[block['name']]}\n<!-- end -->", page)


def write() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
