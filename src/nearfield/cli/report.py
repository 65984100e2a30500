"""Tables for people, and verdicts in plain values for programs."""

from collections.abc import Sequence
from typing import Any

from nearfield.cli.check import Checked

_FEW_TOKENS = 8192


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


def too_small_note(tokens: int, speed_up: float, density: float) -> str | None:
    """None unless dense attention wins on few tokens although a good part of the pairs is left out."""
    if speed_up >= 1 or density >= 0.9 or tokens > _FEW_TOKENS:
        return None
    return f"note: where dense is faster here, the problem ({tokens:,} tokens) is too small to gain"


def check_record(checked: Checked | None) -> dict[str, Any] | None:
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
