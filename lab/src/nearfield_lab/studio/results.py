"""Committed benchmark results, as tables and as the library's own plots."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearfield._files import BadFile, read_json
from nearfield_lab.plots.bars import attend_bars, call_bars, hilbert_bars, model_bars, step_bars
from nearfield_lab.plots.fronts import pareto_panels, quality_front
from nearfield_lab.plots.lines import fidelity_lines, loss_lines, recall_lines, scaling_lines
from nearfield_lab.quality.results import QualityRow, read_rows

RESULTS = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
"""Where a checkout keeps them; an installed package has none."""

NONE_THERE = (
    "There are no results here: they are part of a checkout (`benchmarks/results`), not of the installed package. "
    "`python -m benchmarks attention --quick` measures this machine there."
)
_LONGEST = 40

# Values by their path in a record, for the kinds whose records are large; any other kind shows all its plain values.
_COLUMNS = {
    "attend": ("preset", "pattern", "grain", "direction", "impl", "density", "milliseconds.median",
               "dense_milliseconds.median", "dense_backend", "speed_up", "bound", "fraction_of_dense_rate"),
    "hilbert": ("case", "impl", "density", "milliseconds", "dense_backend", "speed_up", "speed_ups.flex", "bound",
                "fraction_of_bound", "target", "target_reached"),
    "attention": ("case", "work", "impl", "density", "milliseconds.median", "dense_backend", "speed_up", "bound",
                  "fraction_of_bound", "target", "target_reached"),
    "model": ("pixels", "variant", "tokens", "density", "milliseconds.nearfield.median", "dense_backend", "speed_up",
              "ceiling", "target", "target_reached"),
    "step": ("case", "variant", "tokens", "density", "milliseconds.nearfield.median", "dense_backend", "speed_up",
             "ceiling", "target", "target_reached"),
    "retrieval": ("case", "questions", "divergence.mean", "divergence.low", "divergence.high", "agreement.mean",
                  "f1.mean", "milliseconds.full prefill.median", "milliseconds.reuse.median", "speed_up", "target"),
    "pictures": ("pattern", "samples", "pairs_kept", "tokens_kept", "speed_up", "fid", "lpips", "psnr", "ssim", "seam",
                 "dense_seam", "inception_distance", "efficientnet_distance"),
    "bench retrieval": ("selector", "ratio", "questions", "divergence.mean", "divergence.low", "divergence.high",
                        "agreement.mean"),
    "pixel-training": ("name", "size", "steps", "seconds", "tokens_per_second", "equal_samples.loss",
                       "equal_samples.fid", "equal_time.loss", "equal_time.fid"),
}  # fmt: skip


class Results(NamedTuple):
    """One file."""

    name: str
    kind: str
    about: str
    headings: list[str]
    rows: list[list[str]]
    draw: Callable[[Path], None] | None


def names(folder: Path = RESULTS) -> list[str]:
    """The files there are; quality first, for it has the front."""
    found = sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []
    return sorted(found, key=lambda name: not name.startswith("quality"))


def read(name: str, folder: Path = RESULTS) -> Results:
    """The results of one of the `names`; what is no results file raises ValueError."""
    if name not in names(folder):
        raise ValueError(f"`name` must be one of {', '.join(names(folder))}; got {name!r}.")
    path = folder / f"{name}.json"
    try:
        document = read_json(path, {"machine": dict, "results": list})
        records, machine = _records(document), _machine(document)
        kind = document["benchmark"] if "benchmark" in document else document["command"]
    except (KeyError, TypeError, AttributeError, IndexError, BadFile) as error:
        raise ValueError(f"{path.name} holds no benchmark results: {type(error).__name__} {error}.") from None
    headings, rows = _table(kind, records)
    return Results(
        name, kind, f"`{kind}` on {machine}", headings, rows, _drawing(kind, path, document, machine)
    )


def _records(document: dict[str, Any]) -> list[dict[str, Any]]:
    """What is shown: a summary of the records where there is one."""
    found: list[dict[str, Any]] = document.get("summary") or document["results"]
    return found


def _machine(document: dict[str, Any]) -> str:
    machine = document["machine"]
    gpus = machine.get("gpus")
    return str(gpus[0]["name"] if gpus else machine["cpu"]["name"])


def _table(kind: str, records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = _COLUMNS.get(kind) or _plain_columns(records)
    rows = [[_words(_value(record, column)) for column in columns] for record in records]
    return [_heading(column) for column in columns], rows


def _plain_columns(records: Sequence[dict[str, Any]]) -> list[str]:
    """Keys whose values are plain in every record, and not always empty."""
    keys = dict.fromkeys(key for record in records for key in record)

    def is_shown(key: str) -> bool:
        values = [record.get(key) for record in records]
        is_plain = all(value is None or isinstance(value, str | int | float) for value in values)
        return is_plain and any(value not in (None, "") for value in values)

    return [key for key in keys if is_shown(key)]


def _value(record: dict[str, Any], column: str) -> Any:
    value: Any = record
    for key in column.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _heading(column: str) -> str:
    return column.removesuffix(".median").replace("milliseconds", "ms").replace(".", " ").replace("_", " ")


def _words(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _drawing(kind: str, path: Path, document: dict[str, Any], machine: str) -> Callable[[Path], None] | None:
    """What draws the picture that the library has for this kind."""
    records = _records(document)
    known: dict[str, Callable[[Path], None]] = {
        "attention": lambda out: call_bars(out, records, f"Attention calls on {machine}"),
        "attend": lambda out: attend_bars(out, records, machine),
        "hilbert": lambda out: hilbert_bars(out, records, machine),
        "step": lambda out: step_bars(out, records, f"Steps on {machine}"),
        "model": lambda out: model_bars(out, records, machine),
        "pareto": lambda out: pareto_panels(out, records, f"Methods of nearfield on {machine}"),
        "recall": lambda out: recall_lines(out, records, document["source"]["kind"]),
        "scaling": lambda out: scaling_lines(out, records),
        "pixel-training": lambda out: loss_lines(out, records, f"Training on pixels, {machine}"),
    }
    if kind in ("quality", "pictures"):
        rows: list[QualityRow] = read_rows(path)
        if any(row.fid is not None for row in rows):
            return lambda out: quality_front(out, rows, document.get("about") or path.stem)
    if records and all({"selector", "ratio", "divergence"} <= set(record) for record in records):
        return lambda out: fidelity_lines(out, records, path.stem)
    return known.get(kind)
