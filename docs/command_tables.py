"""The page of commands, from the commands themselves: `python docs/command_tables.py` writes docs/commands.md.

What the page says of a command is its `--help`; only the words around it are here.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "lab" / "src"), str(ROOT)]

from benchmarks.__main__ import BENCHMARKS, _add  # noqa: E402

from nearfield.cli.explain import overview  # noqa: E402
from nearfield.cli.main import parser_of  # noqa: E402
from nearfield.cli.presets import PRESETS  # noqa: E402
from nearfield.methods import own_methods  # noqa: E402
from nearfield_lab.commands import add_commands  # noqa: E402

PAGE = ROOT / "docs" / "commands.md"
_METHOD = ("--method", "--set", "--recipe")
_METHOD_ROW = "who reads whom: [the same for every command](#methods-and-their-fields)"
_FURTHER = re.compile(r"^  ([\w-]+)=(\S+) +(.*(?:\n {26}.*)*)$", re.MULTILINE)
_EXAMPLES = re.compile(r"^examples:\n((?:  .*\n?)+)", re.MULTILINE)
_ABOUT = {
    "generate": "[results](results.md), [many pictures](scaling.md#many-pictures)",
    "studio": "[studio](studio.md)",
    "tune": "[tuning](tuning.md)",
    "rag": "[retrieval](retrieval.md)",
    "train": "[training](training.md)",
    "distill": "[training](training.md#distillation)",
    "quality": "[measures](measures.md)",
}
"""The page that says more about a command."""

PAGE_TEXT = """# Commands

This page is made by `make docs` from what each command says with `--help`; a test fails where it is out of date.

`nearfield doctor`, `explain` and `bench` come with the library, all other commands of `nearfield` with
`nearfield-lab` (`pip install . ./lab` in a checkout). Where the lab is not installed but on the path
(`PYTHONPATH=src:lab/src`), run `python -m nearfield_lab` instead of `nearfield`. Benchmarks run from the root of a
checkout.

Exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted. Results go to stdout, progress and
errors to stderr.

## Methods and their fields

Commands that need a method take it in the same way:

```sh
nearfield generate --method blocktopk --set keep=0.3 --set dense_steps=0     # a method and its fields
nearfield generate --set tiles=4,4,16 --set dense_layers=0,-1                # fields of the default method
nearfield generate --method merge+hilbert --set ratio=0.3 --set hilbert.tiles=4
nearfield generate --recipe cats-close                                       # method and fields from a recipe
```

`--method` takes a name of this table, of a method that an installed package brings, or `dense`; `A+B` is a method that
merges and one that reads. `--set FIELD=VALUE` is repeated for each field. A value is `none`, `true` or `false`, a word,
a number, or numbers between commas; a comma after a single number makes it a list (`dense_layers=4,`). Where both
methods of `A+B` have a field, write the method's name before it. `nearfield explain --method NAME` lists the fields of
a method with their defaults.

{methods}

`--recipe` is a [recipe](tuning.md) instead of both. Options that a command seldom needs are given as
`--option NAME=VALUE`, once for each.

### Presets

Shapes of attention calls, for `explain` and `bench`:

{presets}

{commands}

## `python -m benchmarks NAME`

Measures on this machine; [the page of benchmarks](../benchmarks/README.md) says what the cases are. A wrong answer gets
no figure. These options are common to all but `pareto`:

{common}

{benchmarks}
"""


def page() -> str:
    named = [(name, child) for name, child in commands(parser_of([add_commands])) if name != "nearfield"]
    every = [(f"python -m benchmarks {name}", benchmark(name)) for name in BENCHMARKS]
    shared = _shared([parser for name, parser in every if not name.endswith("pareto")])
    return PAGE_TEXT.format(
        methods=methods_table(),
        presets=presets_table(),
        commands="\n\n".join(section(name, parser) for name, parser in named),
        common="\n".join(["| option | meaning |", "|---|---|", *shared.values()]),
        benchmarks="\n\n".join(section(name, parser, without=set(shared)) for name, parser in every),
    )


def commands(
    parser: argparse.ArgumentParser, before: str = "nearfield"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that runs something, with its parser."""
    families = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not families:
        yield before, parser
    for family in families:
        for name, child in family.choices.items():
            yield from commands(child, f"{before} {name}")


def benchmark(name: str) -> argparse.ArgumentParser:
    """The parser of one benchmark, with its own options."""
    family = argparse.ArgumentParser(prog="python -m benchmarks").add_subparsers()
    _add([name], family)
    parser: argparse.ArgumentParser = family.choices[name]
    return parser


def section(
    name: str, parser: argparse.ArgumentParser, without: frozenset[str] | set[str] = frozenset()
) -> str:
    """What a command does, examples, and its options, except those of `without`."""
    parts = [f"## `{name}`", str(parser.description)]
    word = next((word for word in name.split()[1:] if word in _ABOUT), None)
    if word and name.startswith("nearfield"):
        parts[1] += f" More: {_ABOUT[word]}."
    examples = _EXAMPLES.search(parser.epilog or "")
    if examples:
        lines = (line.removeprefix("  ") for line in examples[1].rstrip("\n").split("\n"))
        parts.append("\n".join(["```sh", *lines, "```"]))
    rows = [row for option, row in _rows(parser) if option not in without]
    if rows:
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    further = [_cells(f"`{option}={value}`", words) for option, value, words in _further(parser)]
    if further:
        parts.append("\n".join(["| as `--option NAME=VALUE` | meaning |", "|---|---|", *further]))
    return "\n\n".join(parts)


def _shared(parsers: list[argparse.ArgumentParser]) -> dict[str, str]:
    """The rows that all of these commands have."""
    first, *others = [dict(_rows(parser)) for parser in parsers]
    return {option: row for option, row in first.items() if all(option in rows for rows in others)}


def _rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    has_method = False
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or "--option" in action.option_strings:
            continue
        name = action.option_strings[0] if action.option_strings else str(action.metavar)
        if name in _METHOD:
            known = [each for each in _METHOD if each in parser._option_string_actions]
            if not has_method:
                yield "--method", _cells(", ".join(f"`{each}`" for each in known), _METHOD_ROW)
            has_method = True
            continue
        value = f" {action.metavar}" if action.metavar and action.option_strings else ""
        words = str(action.help)
        if name in ("--cases", "--case"):  # the names of all cases, and keys that only some have
            words = re.sub(r": [^;)]*$|: name, method[^;]*;", ";" if ";" in words else "", words)
        yield name, _cells(f"`{name}{value}`", words)


def _further(parser: argparse.ArgumentParser) -> list[tuple[str, str, str]]:
    listed = (parser.epilog or "").partition("\n\n")[0]
    return [(name, value, " ".join(words.split())) for name, value, words in _FURTHER.findall(listed)]


def methods_table() -> str:
    """Every method of the package by its name."""
    known = overview()["methods"]
    rows = [_cells(f"`{kind.name}`", known[kind.name]) for kind in own_methods()]
    return "\n".join(["| method | what it does |", "|---|---|", *rows])


def presets_table() -> str:
    rows = [
        _cells(
            f"`{preset.name}`",
            ", ".join(str(size) for size in preset.shape),
            "x".join(str(side) for side in preset.grid),
            str(preset.text),
            str(preset.layers),
        )
        for preset in PRESETS.values()
    ]
    header = "| preset | batch, heads, tokens, head dimension | grid | text | layers |"
    return "\n".join([header, "|---|---|---|---:|---:|", *rows])


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
