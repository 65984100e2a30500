"""Results: one JSON document for all benchmarks, and one table."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from nearfield.cli import reports
from nearfield.cli.check import Checked
from nearfield.cli.timing import Timing

FORMAT = 2
Record = dict[str, Any]


def document(
    name: str, facts: Mapping[str, Any], machine: Mapping[str, Any], records: Sequence[Record]
) -> Record:
    """What a results file holds: every record names its case, settings, commit and date."""
    return {"format": FORMAT, "benchmark": name, "machine": dict(machine), **facts, "results": list(records)}


def read(path: Path | None, name: str) -> list[Record]:
    """Records of an earlier run of the same benchmark. Raises ValueError where the file holds something else."""
    if path is None or not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (found["format"], found["benchmark"]) == (FORMAT, name):
            return list(found["results"])
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"{path} does not hold results of `{name}` in format {FORMAT}.")


def plain(value: Any) -> Any:
    """What JSON gives back: lists for tuples; None for a number that is not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return [plain(part) for part in value]
    if isinstance(value, Timing):
        return asdict(value)
    if isinstance(value, Checked):
        return reports.check_record(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def value_at(record: Mapping[str, Any], path: str) -> Any:
    """A value by the names that lead to it, joined by "/"."""
    value: Any = record
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class Column(NamedTuple):
    """A column of the table.

    Args:
        value: the path of a value in the record, or what gives the cell.
        form: how a number is written.
    """

    heading: str
    value: str | Callable[[Record], Any]
    form: str = ""

    def cell(self, record: Record) -> str:
        found = value_at(record, self.value) if isinstance(self.value, str) else self.value(record)
        return "-" if found is None else format(found, self.form)


def table(columns: Sequence[Column], records: Sequence[Record]) -> str:
    """Every record as a line, with a column for what any of them has; the first column always."""
    cells = {column: [column.cell(record) for record in records] for column in columns}
    shown = [column for column in columns if column is columns[0] or set(cells[column]) - {"-", ""}]
    rows = zip(*(cells[column] for column in shown), strict=True)
    return reports.table([[column.heading for column in shown], *map(list, rows)])


def error_cell(record: Record) -> str | None:
    """What was compared, as "error / limit"."""
    checked = record.get("check")
    if not checked or checked["relative_error"] is None:
        return None
    return f"{checked['relative_error']:.1e} / {checked['limit']:.1e}"


def times_cell(path: str) -> Callable[[Record], str | None]:
    """A speed-up, "2.50x"."""

    def cell(record: Record) -> str | None:
        found = value_at(record, path)
        return None if found is None else f"{found:.2f}x"

    return cell


def target_cell(record: Record) -> str | None:
    """The target, and whether it was reached."""
    if record.get("target_reached") is None:
        return times_cell("target")(record)
    return f"{record['target']:.2f}x {'reached' if record['target_reached'] else 'missed'}"


def speed_figures(
    ours: float, dense: Mapping[str, Timing], density: float | None, target: float | None
) -> Record:
    """Speed-ups over every dense implementation and over the best, the bound by pairs, and the verdict.

    Targets are meant over attention on a GPU, which torch does not call "sdpa".
    """
    speed_ups = {name: timing.median / ours for name, timing in dense.items()}
    best = min(speed_ups, key=lambda name: speed_ups[name], default=None)
    speed_up = None if best is None else speed_ups[best]
    on_gpu = speed_up is not None and "sdpa" not in dense
    return {
        "dense_milliseconds": dict(dense),
        "dense_backend": best,
        "speed_ups": speed_ups,
        "speed_up": speed_up,
        "bound": 1 / density if density else None,
        "fraction_of_bound": speed_up * density if speed_up and density else None,
        "target": target,
        "target_reached": speed_up >= target if target and on_gpu and speed_up else None,
    }
