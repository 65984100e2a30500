"""Measured methods as points of speed and quality, from results of several benchmarks; and which of them nothing beats.

Points are compared only with those of their own group: pictures of one number, size and seed, in one file.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nearfield.cli.report import table
from nearfield_lab.plots.fronts import PANELS, Panel
from nearfield_lab.quality.results import QualityRow, read_rows, unbeaten

KINDS = ("quality", "model", "hilbert")
"""Benchmarks whose files are read."""
COMMITTED = Path(__file__).resolve().parent / "results"
_DENSE = "dense"
_FAMILIES = {"hilbert": "Hilbert", "window": "mask", "band": "mask", "Composition": "Merge | Hilbert"}
_SPEED_FAMILIES = {"merge": "Merge", "merge+hilbert": "Merge | Hilbert", "fine": "FineGrained"}


@dataclass(frozen=True)
class Point:
    """One method with the figures that are known of it; None for the others.

    Args:
        name: for people.
        family: the class of the method.
        group: what it may be compared with.
        pairs_kept, tokens_kept: shares of the dense ones.
        milliseconds, speed_up: of a denoising step over dense beside it; of one attention call in `hilbert`.
        lpips, psnr, inception_distance, efficientnet_distance: to the dense pictures of the same seeds.
        seam_ratio: seam energy over that of the dense pictures on the same lines.
        fid: to photographs.
    """

    name: str
    family: str
    group: str
    pairs_kept: float | None = None
    tokens_kept: float | None = None
    milliseconds: float | None = None
    speed_up: float | None = None
    lpips: float | None = None
    psnr: float | None = None
    inception_distance: float | None = None
    efficientnet_distance: float | None = None
    seam_ratio: float | None = None
    fid: float | None = None


# -- reading ---------------------------------------------------------------------------------------------------------


def points_of(rows: Iterable[QualityRow], source: str) -> list[Point]:
    """Points of quality rows, measured or read."""
    return [_point_of(row, source) for row in rows]


def _point_of(row: QualityRow, source: str) -> Point:
    settings, is_dense = row.settings, row.pattern == _DENSE
    method = str(settings.get("method", _DENSE))
    named = (
        f"{settings[name]} {unit}" for name, unit in (("size", "px"), ("steps", "steps")) if name in settings
    )
    group = ", ".join([f"{source}: {row.samples:,} pictures", *named])
    return Point(
        row.pattern,
        _DENSE if is_dense else _FAMILIES.get(method, method),
        group,
        row.pairs_kept,
        row.tokens_kept,
        row.milliseconds,
        row.speed_up,
        0.0 if is_dense else row.lpips,  # the dense pictures are their own measure
        row.psnr,
        row.inception_distance,
        row.efficientnet_distance,
        row.seam / row.dense_seam if row.seam is not None and row.dense_seam else None,
        row.fid,
    )


def files_in(paths: Sequence[Path]) -> list[Path]:
    """The files among these, and those of folders that hold results of the KINDS."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        found += [each for each in inside if not path.is_dir() or _kind_of(each) in KINDS]
    return found


def read_points(path: Path) -> list[Point]:
    """Points of a results file. Raises ValueError if it holds none."""
    kind = _kind_of(path)
    if kind == "quality":
        return points_of(read_rows(path), path.stem)
    if kind not in KINDS:
        raise ValueError(f"{path} holds no results of the benchmarks {', '.join(KINDS)}.")
    records = json.loads(path.read_text(encoding="utf-8"))["results"]
    return [_speed_point(record, kind, path.stem) for record in records if record["status"] == "ok"]


def _kind_of(path: Path) -> str | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    kind = document.get("benchmark") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else None


def _speed_point(record: Mapping[str, Any], kind: str, source: str) -> Point:
    common = {"pairs_kept": record["density"], "speed_up": record["speed_up"]}
    if kind == "hilbert":
        return Point(record["case"], "Hilbert", f"{source}: one attention call", **common)
    family = _SPEED_FAMILIES.get(record.get("method_name", ""), "Hilbert")
    median = record["milliseconds"]["nearfield"]["median"]
    name = record.get("name", f"{record['pixels']} px")
    return Point(name, family, f"{source}: one step", milliseconds=median, **common)


# -- fronts ----------------------------------------------------------------------------------------------------------


def with_fronts(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Records of all points, each with `front`: titles of the panels in which no other point of its group beats it."""
    records = [asdict(point) | {"front": list[str]()} for point in points]
    for panel in PANELS:
        for group in _grouped(records).values() if panel.has_front else ():
            for record in unbeaten(_costs(panel, group)):
                record["front"].append(panel.title)
    return records


def _costs(panel: Panel, group: Iterable[dict[str, Any]]) -> Iterator[tuple[float, float, dict[str, Any]]]:
    for record in group:
        place = panel.value_of(record)
        if place is not None:
            yield (-place[0] if panel.is_more_better else place[0]), place[1], record


def _grouped(records: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record)
    return groups


# -- words -----------------------------------------------------------------------------------------------------------

_COLUMNS = {
    "pairs_kept": ("pairs", ".1%"),
    "tokens_kept": ("tokens", ".0%"),
    "milliseconds": ("ms per step", ",.1f"),
    "speed_up": ("speed-up", ".2f"),
    "lpips": ("LPIPS", ".3f"),
    "psnr": ("PSNR", ".1f"),
    "seam_ratio": ("seam / dense", ".3f"),
    "inception_distance": ("Inception", ".4f"),
    "efficientnet_distance": ("EfficientNet", ".4f"),
    "fid": ("FID", ".1f"),
}


def tables(records: Sequence[dict[str, Any]]) -> str:
    """A table for each group, with a column for what any of its points has."""
    return "\n\n".join(f"{group}\n{_table(members)}" for group, members in _grouped(records).items())


def _table(members: Sequence[dict[str, Any]]) -> str:
    shown = [name for name in _COLUMNS if any(member[name] is not None for member in members)]
    has_front = any(member["front"] for member in members)
    headings = ["method", *(_COLUMNS[name][0] for name in shown), *(["unbeaten in"] if has_front else [])]
    rows = [
        [
            member["name"],
            *(_cell(member[name], _COLUMNS[name][1]) for name in shown),
            *([_front(member)] if has_front else []),
        ]
        for member in members
    ]
    return table([headings, *rows])


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _front(record: Mapping[str, Any]) -> str:
    return ", ".join(title.lower() for title in record["front"]) or "-"


def as_json(records: Sequence[dict[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any]:
    """All points, where each came from, and the fronts."""
    results = [record | {"status": "ok"} for record in records]
    return {"format": 1, "benchmark": "pareto", "machine": dict(machine), "results": results}
