"""Measured methods as points of speed and quality, from results of several benchmarks; and which of them nothing beats.

Points are compared only with those of their own group: pictures of one number, size and seed, in one file.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import report, special
from benchmarks.report import Column, Record, plain
from nearfield.cli import FAILED, OK, UsageError, add_json, add_plot, machine, wrong
from nearfield.cli.reports import write_reports
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.plots.fronts import PANELS, Panel, pareto_panels
from nearfield_lab.quality.results import QualityRow, read_rows, unbeaten

COMMITTED = Path(__file__).parent / "results"
QUALITY = ("quality", "pictures")
KINDS = (*QUALITY, "model", "step", "hilbert", "attention")
"""Benchmarks whose files are read, of today and of before."""
_DENSE = "dense"
_FAMILIES = {
    "hilbert": "Hilbert",
    "window": "mask",
    "band": "mask",
    "Composition": "Merge | Hilbert",
    "merge": "Merge",
    "merge+hilbert": "Merge | Hilbert",
    "": "a plan",
    **{name: each.method for each in special.known().values() for name in each.former},
}
examples = (
    "  python -m benchmarks pareto --plot pareto.png\n"
    "  python -m benchmarks pareto --results mine.json step.json --json points.json --plot pareto.svg"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="results of pictures, step or attention: files, or folders of them (default: the committed ones)",
    )
    add_json(parser, "write all points, and which nothing beats")
    add_plot(parser, "draw them", ".png", ".svg")


def run(options: argparse.Namespace) -> int:
    """Tell of all points, draw them, and write them; returns the exit code."""
    require_reports("--plot", options.plot, options.json)
    for path in options.results or ():
        if not path.exists():
            wrong("--results", "name files or folders that are there", repr(str(path)))
    files = files_in(options.results or ([COMMITTED] if COMMITTED.is_dir() else []))
    try:
        points = [point for path in files for point in read_points(path)]
    except ValueError as error:
        raise UsageError(f"`--results` must name results of benchmarks. {error}") from None
    if not points:
        wrong("--results", "hold results", "none")
    records = with_fronts(points)
    print(tables(records))
    document = report.document(
        "pareto", {}, machine.facts(), [record | {"status": "ok"} for record in records]
    )
    written = write_reports(
        plain(document), options.json, options.plot, pareto_panels, "Methods of nearfield"
    )
    return OK if written else FAILED


def draw_rows(path: Path, records: Sequence[Record], title: str) -> None:
    """Records of pictures, as points."""
    rows = [QualityRow.of(record) for record in records]
    pareto_panels(path, with_fronts(points_of(rows, "measured")), title)


@dataclass(frozen=True)
class Point:
    """One method with the figures that are known of it; None for the others.

    Args:
        name: for people.
        family: the class of the method.
        group: what it may be compared with.
        pairs_kept, tokens_kept: shares of the dense ones.
        milliseconds, speed_up: of a denoising step, or of one attention call, over the dense one of the same run.
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
    if kind in QUALITY:
        return points_of(read_rows(path), path.stem)
    if kind not in KINDS:
        raise ValueError(f"{path} holds no results of {', '.join(KINDS)}.")
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
    if kind in ("hilbert", "attention"):
        settings = record.get("settings", {"method": "Hilbert"})  # of the format before there were none
        family = _FAMILIES.get(settings["method"], settings["method"])
        return Point(record["case"], family, f"{source}: one attention call", **common)
    method = record.get("method_name", "hilbert")
    family = _FAMILIES.get(method, method)
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


_COLUMNS = (
    Column("method", "name"),
    Column("pairs", "pairs_kept", ".1%"),
    Column("tokens", "tokens_kept", ".0%"),
    Column("ms per step", "milliseconds", ",.1f"),
    Column("speed-up", "speed_up", ".2f"),
    Column("LPIPS", "lpips", ".3f"),
    Column("PSNR", "psnr", ".1f"),
    Column("seam / dense", "seam_ratio", ".3f"),
    Column("Inception", "inception_distance", ".4f"),
    Column("EfficientNet", "efficientnet_distance", ".4f"),
    Column("FID", "fid", ".1f"),
    Column("unbeaten in", lambda record: ", ".join(title.lower() for title in record["front"]) or None),
)


def tables(records: Sequence[Record]) -> str:
    """A table for each group, with a column for what any of its points has."""
    return "\n\n".join(
        f"{group}\n{report.table(_COLUMNS, members)}" for group, members in _grouped(records).items()
    )
