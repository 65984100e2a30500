"""Results as tables, and on disk: JSON and pictures, each whatever becomes of the other."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfield._files import write_json

if TYPE_CHECKING:
    from nearfield.cli.check import Checked

Drawing = Callable[[Path, Sequence[dict[str, Any]], str], None]


def note_load(device: str) -> None:
    from nearfield.cli import machine

    if device == "cpu" and (load := machine.load()) and load > (os.cpu_count() or 1):
        print(f"note: {load} processes want to run here; times will be long and uneven", file=sys.stderr)


def write_so_far(document: dict[str, Any], json_path: Path | None) -> None:
    """Write intermediate results, in case the command is interrupted. A failure to write is reported at the end."""
    if json_path:
        with suppress(OSError):
            write_json(json_path, document)


def write_reports(
    document: dict[str, Any],
    json_path: Path | None,
    picture: Path | None = None,
    draw: Drawing | None = None,
    device_name: str = "",
) -> bool:
    """Write what was asked for, each whatever becomes of the other; returns whether all of it was written."""
    writers: dict[Path, Callable[[Path], object]] = {}
    if json_path:
        writers[json_path] = lambda path: write_json(path, document)
    if picture and draw and any(record["status"] == "ok" for record in document["results"]):
        writers[picture] = lambda path: draw(path, document["results"], device_name)
    elif picture:
        print("nothing to draw: no result passed its check", file=sys.stderr)
    return write_all(writers)


def write_all(writers: Mapping[Path, Callable[[Path], object]]) -> bool:
    """Write every file, whatever becomes of the others; returns whether all of them were written."""
    written = True
    for path, write in writers.items():
        try:
            write(path)
        except OSError as error:
            print(f"nearfield: error: {path} was not written: {error}", file=sys.stderr)
            written = False
        else:
            print(f"wrote {path}")
    return written


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first row being the headings; columns that start with a digit stand to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = [
        all(cell[:1].isdigit() or cell in ("", "-") for cell in column[1:])
        for column in zip(*rows, strict=True)
    ]
    lines = []
    for row in rows:
        cells = zip(row, widths, numeric, strict=True)
        lines.append(
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells
            ).rstrip()
        )
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join(lines)


def check_record(checked: "Checked | None") -> dict[str, Any] | None:
    """A verdict in plain values."""
    if checked is None:
        return None
    error = checked.error if checked.error == checked.error else None  # JSON has no NaN
    return {
        "passed": checked.passed,
        "relative_error": error,
        "limit": checked.limit,
        "worst_sample": checked.where,
    }
