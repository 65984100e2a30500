"""Bars of measured attention calls and steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearfield_lab.plots.figures import require_pyplot, save_titled
from nearfield_lab.plots.style import FAINT, INK, MUTED, colours_of, legend


def attend_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """One bar per measured result: its rate on the kept pairs over the dense rate, and in it the speed-up."""
    pyplot = require_pyplot()
    measured = [record for record in records if record["status"] == "ok"]
    impls = list(dict.fromkeys(record["impl"] for record in measured))
    colours = colours_of(impls)
    places = _bar_places(measured)
    figure, axis = pyplot.subplots(figsize=(8.6, 1.3 + 0.3 * (max(places, default=0) + 1)))
    for place, record in zip(places, measured, strict=True):
        _draw_bar(axis, place, record, colours[record["impl"]])
    axis.set_yticks(places, [_bar_label(record) for record in measured])
    axis.set_ylim(max(places, default=0) + 0.6, -0.6)
    axis.set_xlim(
        0, max(1.1, 1.1 * max((record["fraction_of_dense_rate"] for record in measured), default=0))
    )
    axis.axvline(1, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.9)
    axis.set_xlabel("rate on the kept pairs / dense rate on the same tensors;  figures: speed-up over dense")
    _plain_bars(axis)
    legend(axis, colours, impls)
    save_titled(figure, axis, f"attend on {machine}", path)


def _draw_bar(axis: Any, place: float, record: dict[str, Any], colour: str) -> None:
    fraction, label = record["fraction_of_dense_rate"], f"{record['speed_up']:.2f}x"
    axis.barh(place, fraction, height=0.76, color=colour)
    fits = fraction > 0.12
    axis.text(fraction, place, f"{label} " if fits else f" {label}", va="center", ha="right" if fits else "left",
              fontsize=8.5, color="white" if fits else INK)  # fmt: skip


def _bar_label(record: dict[str, Any]) -> str:
    work = f"grain {record['grain']}" if record["pattern"] == "random" else record["pattern"]
    backward = " backward" if record["direction"] == "backward" else ""
    return f"{record['preset']}  {work}{backward}"


def _bar_places(records: Sequence[dict[str, Any]]) -> list[float]:
    """Heights of the bars, with a gap wherever the preset changes."""
    places: list[float] = []
    for index, record in enumerate(records):
        gap = 0.8 if index and record["preset"] != records[index - 1]["preset"] else 0.0
        places.append(places[-1] + 1 + gap if places else 0.0)
    return places


def hilbert_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """What `call_bars` draws, of calls of one method."""
    call_bars(path, records, f"Hilbert on {machine}")


def call_bars(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """For each measured call its speed-up over everything it was timed with, its bound and its target."""
    cases = {
        ", ".join(filter(None, (record["case"], record.get("work")))): record
        for record in records
        if record["status"] == "ok"
    }
    words = "speed-up of one attention call;  solid line: bound by pairs over the best dense, dotted: target"
    _speed_up_bars(path, cases, title, words)


def model_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """For each size of image the speed-up of a denoising step; its bound is the step without any attention."""
    sizes = {
        record.get("name", f"{record['pixels']} px").replace("; ", "\n"): record
        | {"bound": record["ceiling"]}
        for record in records
        if record["status"] == "ok"
    }
    model = {"wan21-1.3b": "Wan 2.1 1.3B"}.get(records[0].get("model", "") if records else "", "FLUX.1")
    _step_bars(path, sizes, f"{model}'s architecture on {machine}")


def step_bars(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """The same for measured steps of any models."""
    steps = {
        f"{record['case']}, {record['variant']}": record | {"bound": record["ceiling"]}
        for record in records
        if record["status"] == "ok"
    }
    _step_bars(path, steps, title)


def _step_bars(path: Path, steps: dict[str, dict[str, Any]], title: str) -> None:
    words = "speed-up of one denoising step;  solid line: with no attention at all over the best dense, dotted: target"
    _speed_up_bars(path, steps, title, words)


def _speed_up_bars(path: Path, records: dict[str, dict[str, Any]], title: str, words: str) -> None:
    pyplot = require_pyplot()
    others = list(dict.fromkeys(name for record in records.values() for name in record["speed_ups"]))
    colours = colours_of(others)
    figure, axis = pyplot.subplots(figsize=(8.6, 1.3 + 0.62 * len(records)))
    shown = [
        figure for record in records.values() for figure in (*record["speed_ups"].values(), record["bound"])
    ]
    _times_axis(axis, shown)
    thickness = 0.8 / max(1, len(others))
    for place, record in enumerate(records.values()):
        for index, name in enumerate(others):
            if (speed_up := record["speed_ups"].get(name)) is not None:
                height = place - 0.4 + (index + 0.5) * thickness
                _draw_speed_up(axis, height, speed_up, 0.92 * thickness, colours[name])
        _mark(axis, record["bound"], place, "-")
        if record["target"]:
            _mark(axis, record["target"], place, ":")
    axis.set_yticks(range(len(records)), list(records))
    axis.set_ylim(len(records) - 0.45, -0.55)
    axis.set_xlabel(words)
    _plain_bars(axis)
    legend(axis, colours, [f"over {name}" for name in others])
    save_titled(figure, axis, title, path)


def _times_axis(axis: Any, figures: Sequence[float]) -> None:
    """A logarithmic axis of ratios that holds all figures, and 1."""
    least, most = min([*figures, 1.0]) / 1.15, max([*figures, 1.0]) * 1.15
    axis.set_xscale("log")
    axis.set_xlim(least, most)
    ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100) if least < tick < most]
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.set_xticks([], minor=True)


def _draw_speed_up(axis: Any, place: float, value: float, height: float, colour: str) -> None:
    """A bar with its figure at the foot, where no mark of a bound stands; next to it if the bar is short."""
    axis.barh(place, value, height=height, color=colour)
    least, most = axis.get_xlim()
    fits = math.log(value / least) > 0.1 * math.log(most / least)
    axis.text(least if fits else value, place, f" {value:.2f}x", va="center", fontsize=8,
              color="white" if fits else INK)  # fmt: skip


def _mark(axis: Any, value: float, place: float, line: str) -> None:
    axis.vlines(value, place - 0.44, place + 0.44, color=INK, linewidth=1.2, linestyle=line)


def _plain_bars(axis: Any) -> None:
    axis.xaxis.label.set(color=MUTED, fontsize=9)
    axis.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)
