"""Relative L2 errors against dense attention at equal shares of pairs: on every sample, and as a table."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nearfield.cli import reports
from nearfield_lab.captured.rows import Row
from nearfield_lab.captured.samples import Sample

Record = dict[str, Any]


def measured(samples: Iterable[Sample], rows: Mapping[str, Row], shares: Sequence[float]) -> Iterator[Record]:
    """One record for each sample, share and row: the error of every head, or why there is none."""
    for sample in samples:
        for name, row in rows.items():
            for share in shares:
                yield {"sample": sample.name, "row": name, "share": share} | _record(sample, row, share)


def _record(sample: Sample, row: Row, share: float) -> Record:
    try:
        read = row(sample, share)
    except (ValueError, NotImplementedError) as error:
        return {"errors": [], "note": str(error)}
    if read is None:
        return {"errors": [], "note": "it reads more, whatever its fields"}
    image = sample.image
    want, got = sample.dense[0][:, image], read.out[:, image]
    errors = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    weight = None if read.weight is None else float(read.weight[:, image].mean())
    return {"errors": errors.tolist(), "kept": read.kept, "weight": weight, "note": ""}


def averaged(records: Sequence[Record]) -> list[Record]:
    """One record for each share and row: means over samples and heads, and the worst head."""
    groups: dict[tuple[float, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["share"], record["row"]), []).append(record)
    found = []
    for (share, row), group in groups.items():
        errors = [error for record in group for error in record["errors"]]
        about = {"case": row, "share": share, "heads": len(errors)}
        if not errors:
            found.append(about | {"note": group[0]["note"]})
            continue
        known = [record for record in group if record["errors"]]
        weights = [record["weight"] for record in known]
        found.append(
            about
            | {
                "kept": statistics.fmean(record["kept"] for record in known),
                "error": statistics.fmean(errors),
                "worst": max(errors),
                "weight": None if None in weights else statistics.fmean(weights),
                "note": next((record["note"] for record in group if not record["errors"]), ""),
            }
        )
    return sorted(found, key=lambda record: -record["share"])


def tabulated(records: Sequence[Record]) -> str:
    """The means for people: rows that have no figure say why."""
    lines = [["share", "row", "kept", "error", "worst", "weight read", "heads", "note"]]
    for record in averaged(records):
        figures = [""] * 4
        if "error" in record:
            weight = "-" if record["weight"] is None else f"{record['weight']:.1%}"
            figures = [f"{record['kept']:.1%}", f"{record['error']:.4f}", f"{record['worst']:.4f}", weight]
        lines.append(
            [f"{record['share']:.0%}", record["case"], *figures, str(record["heads"]), record["note"]]
        )
    return reports.table(lines)
