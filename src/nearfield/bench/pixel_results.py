"""What training runs on pixels came to: speed, and loss and pictures at equal samples and at equal time.

Read from what `benchmarks/train_pixel.sh collect` brings, or from the folder it was collected from.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.bench.collected import (
    filled,
    machine_words,
    markdown_table,
    opened_folder,
    read_document,
    read_plan,
)
from nearfield.bench.report import table
from nearfield.demo.pictures import Row
from nearfield.quality.images import open_images

NAMES = {
    "full": "full",
    "loglinear": "log-linear",
    "gated": "gated blocks (VSA)",
    "linear": "sparse and linear (SLA)",
}
LABELS = {
    "unenriched": "no summaries",
    "unweighted": "summaries without weight",
    "raster": "raster order",
}
"""What the paper takes away from log-linear attention."""

MOMENTS = ("steps", "seconds")
_POINTS = 60  # of a curve
_SHOWN = 8  # pictures of a model
_WIDE = 96  # pixels below which pictures are shown twice as large


class Run(NamedTuple):
    """A training run.

    Args:
        name: its folder's: size, attention and what was changed of it.
        log: step, seconds of training and loss, for every step.
        last: what its last command said.
        kept: for each moment at which its model was kept, what is known of that.
    """

    name: str
    log: Tensor
    last: dict[str, Any]
    kept: dict[str, dict[str, Any]]

    @property
    def size(self) -> int:
        return int(self.name.partition("-")[0])

    @property
    def attention(self) -> str:
        return self.name.split("-")[1]

    @property
    def label(self) -> str | None:
        parts = self.name.split("-", 2)
        return parts[2] if len(parts) == 3 else None

    @property
    def words(self) -> str:
        words = NAMES.get(self.attention, self.attention)
        return words if self.label is None else f"{words}, {LABELS.get(self.label, self.label)}"


class Collected(NamedTuple):
    """All that was collected: settings and parts are the plan's."""

    folder: Path
    settings: dict[str, Any]
    parts: dict[str, Any]
    runs: list[Run]
    benchmarks: list[dict[str, Any]]

    @property
    def size(self) -> int:
        """That of the runs that are compared."""
        return int(self.settings["size"])

    def full(self, size: int) -> Run | None:
        """What others of a size are compared with."""
        return next((run for run in self.runs if (run.size, run.attention) == (size, "full")), None)

    @property
    def compared(self) -> list[Run]:
        return [run for run in self.runs if run.size == self.size]


@contextmanager
def opened(path: Path) -> Iterator[Collected]:
    """The results in a folder or in an archive; pictures can be read as long as it is open."""
    with opened_folder(path) as folder:
        yield read_folder(folder)


def read_folder(folder: Path) -> Collected:
    plan = read_plan(folder, "train_pixel.sh")
    order = [*NAMES]
    runs = [_run(folder, path.parent) for path in (folder / "runs").glob("*/log.jsonl")]
    runs.sort(key=lambda run: (run.size, order.index(run.attention), run.label is not None, run.label or ""))
    benchmarks = [
        read_document(path)
        for path in sorted((folder / "bench").glob("*.json"), key=lambda path: int(path.stem))
    ]
    return Collected(folder, plan["settings"], plan["parts"], runs, benchmarks)


def _run(folder: Path, place: Path) -> Run:
    lines = [json.loads(line) for line in (place / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    log = [[line["step"], line["seconds"], line["loss"]] for line in lines]
    kept = {moment: _kept(folder / "quality", f"{place.name}-{moment}") for moment in MOMENTS}
    found = {moment: figures for moment, figures in kept.items() if figures}
    return Run(
        place.name,
        torch.tensor(log, dtype=torch.float64).view(-1, 3),
        read_document(place / "last.json"),
        found,
    )


def _kept(folder: Path, name: str) -> dict[str, Any]:
    """The figures of a kept model: its loss and step, and how far its pictures are from photographs."""
    made, measured = read_document(folder / f"{name}-made.json"), read_document(folder / f"{name}.json")
    if not made:
        return {}
    figures = measured.get("figures", {})
    wanted = ("images", "references", "fid", "kid", "kid_error", "precision", "recall")
    return {"loss": made.get("loss"), "step": made["settings"]["step"]} | {
        name: figures[name] for name in wanted if figures.get(name) is not None
    }


# -- figures -------------------------------------------------------------------------------------------------------


def as_json(collected: Collected) -> dict[str, Any]:
    """A document of its own: tables and curves can be made of it without what was collected."""
    return {
        "format": 1,
        "benchmark": "pixel-training",
        "machine": next((run.last["machine"] for run in collected.runs if run.last), {}),
        "settings": collected.settings,
        "parts": collected.parts,
        "throughput": [_throughput(benchmark) for benchmark in collected.benchmarks],
        "results": [_record(run, collected.full(run.size)) for run in collected.runs],
    }


def _throughput(benchmark: dict[str, Any]) -> dict[str, Any]:
    wanted = (
        "name",
        "attention",
        "status",
        "note",
        "milliseconds",
        "tokens_per_second",
        "over_full",
        "target",
        "peak_bytes",
    )
    lines = [{name: line.get(name) for name in wanted} for line in benchmark["results"]]
    return {"size": benchmark["task"]["size"], "batch": benchmark["task"]["batch"], "results": lines}


def _record(run: Run, full: Run | None) -> dict[str, Any]:
    kept = dict(run.kept)
    if run.attention == "full" and "steps" in kept:
        kept.setdefault("seconds", kept["steps"])  # it sets the measure of both
    return {
        "run": run.name,
        "name": run.words,
        "attention": run.attention,
        "label": run.label,
        "size": run.size,
        "batch": run.last.get("batch"),
        "steps": int(run.log[-1, 0]) if len(run.log) else 0,
        "seconds": float(run.log[-1, 1]) if len(run.log) else 0.0,
        "tokens_per_second": run.last.get("tokens_per_second"),
        "equal_samples": kept.get("steps"),
        "equal_time": kept.get("seconds"),
        "curve": curve(run.log),
        "over_full": None if full is None else curve(_over(run.log, full.log)),
    }


def curve(log: Tensor) -> list[list[float]]:
    """A log as few points: the last step and its second, and the mean of the losses, of each of equal stretches."""
    if not len(log):
        return []
    stretches = log.split(max(1, -(-len(log) // _POINTS)))
    return [
        [int(part[-1, 0]), *(round(float(x), 6) for x in (part[-1, 1], part[:, 2].mean()))]
        for part in stretches
    ]


def _over(log: Tensor, full: Tensor) -> Tensor:
    """Losses over those of full attention at the same steps, where pictures, noise and levels were the same."""
    steps = min(len(log), len(full))
    shares = log[:steps, 2] / full[:steps, 2]
    return torch.cat([log[:steps, :2], shares[:, None]], dim=1)


# -- tables --------------------------------------------------------------------------------------------------------


def tables(document: dict[str, Any]) -> str:
    """For people in a terminal."""
    return "\n\n".join(
        table(rows) for rows in (_speed_rows(document), _quality_rows(document)) if len(rows) > 1
    )


def markdown(
    document: dict[str, Any], pictures: Mapping[str, str] | None = None, source: str | None = None
) -> str:
    """The same for a page, with how it came about.

    Args:
        pictures: what they show, and where they are.
        source: where the document is.
    """
    parts = [
        markdown_table(rows) for rows in (_speed_rows(document), _quality_rows(document)) if len(rows) > 1
    ]
    shown = [f"![{words}]({place})" for words, place in (pictures or {}).items()]
    return "\n\n".join([_circumstances(document, source), *parts, *shown])


def _circumstances(document: dict[str, Any], source: str | None) -> str:
    settings, machine = document["settings"], document["machine"]
    counts = {kept["images"]: kept["references"] for kept in _all_kept(document) if kept.get("images")}
    sentences = [
        machine_words(machine),
        f"Every run starts from one model with full attention: {settings['small_seconds']:g} s at"
        f" {settings['small']} px, batch {settings['small_batch']}.",
        f"Full attention then trains for {settings['seconds']:g} s at {settings['size']} px, batch {settings['batch']};"
        " the others until they have made as many steps (equal samples) and taken as long (equal time).",
        "Loss: of the averaged model, with 1,024 photographs, noise and levels that are the same for all.",
    ]
    if source is not None:
        sentences.append(f"All figures: [{Path(source).name}]({source}).")
    for images, references in counts.items():
        sentences.append(f"FID and KID: {images:,} pictures, 20 steps, against {references:,} photographs.")
    return filled(" ".join(sentences))


def _all_kept(document: dict[str, Any]) -> list[dict[str, Any]]:
    moments = ("equal_samples", "equal_time")
    return [record[moment] for record in document["results"] for moment in moments if record[moment]]


def _speed_rows(document: dict[str, Any]) -> list[list[str]]:
    """Training speed, a row for each attention and a pair of columns for each size."""
    tasks = document["throughput"]
    heads = ["training speed"]
    for task in tasks:
        heads += [f"{task['size']} px, batch {task['batch']}: tokens/s", "over full", "memory"]
    names = dict.fromkeys(line["name"] for task in tasks for line in task["results"])
    rows = [heads]
    for name in names:
        row = [_spoken(name)]
        for task in tasks:
            line: dict[str, Any] = next((line for line in task["results"] if line["name"] == name), {})
            row += [
                _number(line.get("tokens_per_second"), ",.0f"),
                _with_target(line),
                _number(line.get("peak_bytes") and line["peak_bytes"] / 2**30, ".1f", " GiB"),
            ]
        rows.append(row)
    return rows


def _spoken(name: str) -> str:
    """`full, cudnn` and the like with the words for its attention."""
    attention, comma, kernel = name.partition(", ")
    return NAMES.get(attention, attention) + comma + kernel


def _with_target(line: dict[str, Any]) -> str:
    reached = _number(line.get("over_full"), ".2f", "x")
    return f"{reached} (to reach: {line['target']:.0f}x)" if line.get("target") else reached


def _quality_rows(document: dict[str, Any]) -> list[list[str]]:
    size = document["settings"]["size"]
    heads = [f"{size} px", "steps", "loss", "FID", "KID x 1000"]
    rows = [[*heads, *(f"{head}, equal time" for head in heads[1:])]]
    for record in document["results"]:
        if record["size"] == size:
            cells = [_cells(record[moment] or {}) for moment in ("equal_samples", "equal_time")]
            rows.append([record["name"], *cells[0], *cells[1]])
    return rows


def _cells(kept: dict[str, Any]) -> list[str]:
    kid = kept.get("kid")
    return [
        _number(kept.get("step"), ",d"),
        _number(kept.get("loss"), ".4f"),
        _number(kept.get("fid"), ".1f"),
        "-" if kid is None else f"{1000 * kid:.1f} ± {1000 * kept.get('kid_error', 0.0):.1f}",
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


# -- pictures ------------------------------------------------------------------------------------------------------


def sheet_rows(collected: Collected) -> list[Row]:
    """The first pictures of every model that was kept at equal samples, of one noise."""
    rows = []
    for run in collected.compared:
        folder = collected.folder / "samples" / f"{run.name}-steps"
        if "steps" in run.kept and folder.is_dir():
            images = open_images(folder)[:_SHOWN]
            pixels = torch.cat(list(images.batches(_SHOWN, None))).permute(0, 2, 3, 1)
            larger = 2 if run.size < _WIDE else 1
            pixels = pixels.repeat_interleave(larger, 1).repeat_interleave(larger, 2)
            rows.append(Row(run.words, _sheet_words(run.kept["steps"]), pixels))
    return rows


def _sheet_words(kept: dict[str, Any]) -> str:
    words = [f"{kept['step']:,} steps"]
    if kept.get("fid") is not None:
        words.append(f"FID {kept['fid']:.1f}")
    return ", ".join(words)
