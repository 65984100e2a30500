"""What commands do with results that were collected elsewhere: `--results`, and the page they go to."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearfield._files import replace_file
from nearfield.commands.arguments import output_file, wrong

OPTIONS = ("sheet", "page")
"""That come with `--results` alone."""


def add_results(parser: argparse.ArgumentParser, script: str) -> None:
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help=f"measure nothing: tell what was measured elsewhere, collected by benchmarks/{script}",
    )
    parser.add_argument(
        "--sheet",
        type=output_file("--sheet", ".png", ".jpg"),
        metavar="FILE",
        help="for --results: pictures, one row above the other (.png or .jpg)",
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="for --results: put the tables between the marks for them on this Markdown page",
    )


def require_results(arguments: argparse.Namespace, *others: str) -> None:
    """Options that are for results were given with them."""
    for name in (*others, *OPTIONS):
        if getattr(arguments, name) is not None:
            wrong(f"--{name}", "come with `--results`", repr(str(getattr(arguments, name))))


def check_results(arguments: argparse.Namespace) -> None:
    """What is named is there."""
    if not arguments.results.exists():
        wrong("--results", "name a file or a folder that is there", repr(str(arguments.results)))
    if arguments.page is not None and not arguments.page.is_file():
        wrong("--page", "name a page that is there", repr(str(arguments.page)))


def seen_from(page: Path, path: Path) -> str:
    """A path as a page names it."""
    return Path(os.path.relpath(path.resolve(), page.resolve().parent)).as_posix()


def text_writer(text: str) -> Callable[[Path], Any]:
    return lambda path: replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))
