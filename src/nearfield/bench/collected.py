"""Results that were collected on another machine, and the page they are put on."""

import json
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any


class BadResults(Exception):
    """Something else than the results that are asked for."""


@contextmanager
def opened_folder(path: Path) -> Iterator[Path]:
    """A folder, or what an archive holds for as long as it is open."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise BadResults(f"{path} is no archive of results: {error}") from None
        yield Path(folder)


def read_document(path: Path) -> dict[str, Any]:
    """A JSON file; empty where there is none."""
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise BadResults(f"{path} is no JSON: {error}") from None


def read_plan(folder: Path, script: str) -> dict[str, Any]:
    """The settings and parts of a plan that a script has carried out."""
    plan = read_document(folder / "plan.json")
    if "settings" not in plan:
        raise BadResults(f"{folder} holds no plan.json of `benchmarks/{script} plan`")
    return plan


def machine_words(machine: dict[str, Any], commits: Sequence[str] = ()) -> str:
    """What it ran on, in one sentence.

    Args:
        commits: of what is shown; none: the machine's own.
    """
    names = [gpu["name"] for gpu in machine.get("gpus", ())] or [
        machine.get("cpu", {}).get("name", "unknown")
    ]
    code = (
        f"commits {', '.join(commits)}"
        if len(commits) > 1
        else f"commit {[*commits, machine.get('commit')][0]}"
    )
    return f"{names[0]}, torch {machine.get('versions', {}).get('torch')}, {code}."


def filled(text: str, indent: str = "") -> str:
    """In lines of a page; names of files stay whole.

    Args:
        indent: of all lines but the first.
    """
    return fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Headings and lines as a table for a page."""
    heads, *lines = rows
    return "\n".join(
        [
            f"| {' | '.join(heads)} |",
            f"|---|{'---:|' * (len(heads) - 1)}",
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def marks(what: str) -> tuple[str, str]:
    """Between which a page holds results."""
    return f"<!-- {what} results -->", f"<!-- end of {what} results -->"


def put_into(page: str, results: str, what: str) -> str:
    """A page with results in the place of what stood between its marks. Raises BadResults where it has none."""
    first, last = marks(what)
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise BadResults(f"the page has no place for results: it must hold {first} and {last}")
    return f"{before}{first}\n\n{results}\n\n{last}{after}"
