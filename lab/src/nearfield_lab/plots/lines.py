"""Lines over a share or a number: the benchmarks `retrieval`, `recall` and `scaling`, and training on pixels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearfield_lab.plots.figures import require_pyplot, save, save_titled
from nearfield_lab.plots.style import INK, MUTED, colours_of, label_axes, percent, thin_spines, wheel

# What ranks send, by the name of a way and the field of its records.
_SENT = {"nearfield": "sent", "ring": "ring", "ulysses": "ulysses"}
_LINK_STYLES = ("solid", "dashed", "dotted")


def fidelity_lines(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """Divergence from full prefill against the share of tokens computed again, a line for each selector.

    Records hold `selector`, `ratio` and either `fidelity` of one question or `divergence` with an interval.
    """
    pyplot = require_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.2, 4.6))
    names = list(dict.fromkeys(record["selector"] for record in records))
    colours = colours_of(names)
    for name in names:
        points = sorted(
            (record["ratio"], *_divergence(record)) for record in records if record["selector"] == name
        )
        ratios, means, lows, highs = (list(column) for column in zip(*points, strict=True))
        if len(points) == 1:  # a selector with a ratio of its own
            axis.axhline(means[0], color=colours[name], linewidth=1, linestyle="--", label=name)
            continue
        axis.plot(ratios, means, "o-", color=colours[name], linewidth=1.4, markersize=4.5, label=name)
        axis.fill_between(ratios, lows, highs, color=colours[name], alpha=0.12, linewidth=0)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_formatter(percent)
    label_axes(axis, "tokens computed again", "KL to full prefill, nats per token")
    axis.legend(frameon=False, fontsize=9)
    thin_spines(axis)
    save_titled(figure, axis, title, path)


def _divergence(record: dict[str, Any]) -> tuple[float, float, float]:
    if "fidelity" in record:
        value = record["fidelity"]["divergence"]
        return value, value, value
    found = record["divergence"]
    return found["mean"], found["low"], found["high"]


def recall_lines(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """The share of weights that is kept against the share of pairs, a line for each pattern; chosen by means dotted.

    Records hold `pattern`, `by`, `tiles`, `kept` and `recall`; records of several samples are averaged.
    """
    pyplot = require_pyplot()
    figure, axis = pyplot.subplots(figsize=(7.2, 5.0))
    names = list(dict.fromkeys(record["pattern"] for record in records))
    for place, name in enumerate(names):
        colour = INK if place == 0 else wheel((place - 1) / max(1, len(names) - 1) * 0.75)
        for by in dict.fromkeys(record["by"] for record in records if record["pattern"] == name):
            mine = [record for record in records if (record["pattern"], record["by"]) == (name, by)]
            style = (
                {"linestyle": ":", "linewidth": 1.0} if by == "means" else {"linewidth": 1.5, "label": name}
            )
            axis.plot(*_mean_recall(mine), marker="o", markersize=3.5, color=colour, **style)
    axis.set_xscale("log", base=2)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(lambda value, _: f"{value:.0%}" if value >= 0.1 else f"{value:.1%}")
    label_axes(axis, "pairs read", "weight of full attention that is kept")
    axis.plot([], [], color=MUTED, linestyle=":", label="chosen by means")
    axis.legend(frameon=False, fontsize=9)
    thin_spines(axis)
    save_titled(figure, axis, title, path)


def _mean_recall(records: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Pairs and weights kept with each number of tiles, over all samples."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["tiles"], []).append(record)
    points = sorted((_mean_of(group, "kept"), _mean_of(group, "recall")) for group in groups.values())
    return [kept for kept, _ in points], [recall for _, recall in points]


def _mean_of(records: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records)) / len(records)


def scaling_lines(path: Path, records: Sequence[dict[str, Any]], machine: str = "") -> None:
    """Bytes per layer and rank against ranks, of nearfield, ring attention and Ulysses; below, computed step times."""
    pyplot = require_pyplot()
    cases = list(dict.fromkeys(record["case"] for record in records))
    figure, axes = pyplot.subplots(2, len(cases), figsize=(3.1 * len(cases), 6), squeeze=False, sharey="row")
    colours = colours_of(_SENT)
    for (upper, lower), case in zip(axes.T, cases, strict=True):
        mine = [record for record in records if record["case"] == case]
        _draw_bytes(upper, mine, colours)
        _draw_step_times(lower, mine, colours)
        upper.set_title(case, loc="left", fontsize=10, color=INK, fontweight="bold")
        for axis in (upper, lower):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks([record["ranks"] for record in mine], [str(record["ranks"]) for record in mine])
            thin_spines(axis)
        lower.set_xlabel("ranks", color=MUTED)
    axes[0][0].set_ylabel("MiB sent per layer by the busiest rank (counted)", color=MUTED, fontsize=8)
    axes[1][0].set_ylabel("seconds per step (computed)", color=MUTED, fontsize=8)
    words = "; ".join(
        f"{style}: {link}" for link, style in zip(records[0]["step_seconds"], _LINK_STYLES, strict=False)
    )
    handles = [pyplot.Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="lower left", ncols=3, frameon=False, fontsize=9)
    figure.text(0.99, 0.015, words, ha="right", fontsize=8, color=MUTED)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save(figure, path)


def _draw_bytes(axis: Any, records: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    for name, field in _SENT.items():
        points = [(record["ranks"], record[field] / 2**20) for record in records if record[field] is not None]
        axis.plot(*zip(*points, strict=True), "o-", color=colours[name], markersize=3.5, linewidth=1.4)


def _draw_step_times(axis: Any, records: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    """A style of line for each link between ranks, where kernels were timed."""
    for link, style in zip(records[0]["step_seconds"], _LINK_STYLES, strict=False):
        for name, colour in colours.items():
            times = [(record["ranks"], record["step_seconds"][link].get(name)) for record in records]
            drawn = [point for point in times if point[1] is not None]
            if drawn:
                axis.plot(*zip(*drawn, strict=True), linestyle=style, color=colour, linewidth=1.3)
    if not axis.lines:
        axis.text(0.5, 0.5, "no kernel times\nmeasured", ha="center", transform=axis.transAxes, color=MUTED)


def loss_lines(path: Path, records: Sequence[dict[str, Any]], title: str = "") -> None:
    """The losses of training runs against pictures seen, against time, and over full attention's at the same pictures.

    A row for each size at which several attentions were trained; ablations, which have a `label`, are not drawn against
    time. Records hold `size`, `batch`, `name`, `attention`, `label`, `curve` and `over_full`: points of step, seconds
    and loss.
    """
    pyplot = require_pyplot()
    sizes = [size for size, mine in _by_size(records).items() if len(mine) > 1]
    figure, axes = pyplot.subplots(
        max(1, len(sizes)), 3, figsize=(13.5, 4.0 * max(1, len(sizes))), squeeze=False
    )
    colours = colours_of(dict.fromkeys(record["attention"] for record in records))
    for size, (samples, seconds, shares) in zip(sizes, axes, strict=False):
        for record in _by_size(records)[size]:
            style = _style_of(record, colours)
            points = list(zip(*record["curve"], strict=True))
            samples.plot([step * record["batch"] for step in points[0]], points[2], **style)
            if record["label"] is None:  # ablations may have shared the machine: their seconds say nothing
                seconds.plot(points[1], points[2], **style)
            if record["over_full"] and record["attention"] != "full":
                steps, _, over = zip(*record["over_full"], strict=True)
                shares.plot([step * record["batch"] for step in steps], over, **style)
        shares.axhline(1, color=colours.get("full", INK), linewidth=1.2)
        shares.yaxis.set_major_formatter(lambda value, _: f"{value:.1%}")
        samples.set_title(f"{size} px", loc="left", fontsize=10, color=INK, fontweight="bold")
        label_axes(samples, "pictures", "loss")
        label_axes(seconds, "seconds of training", "loss")
        label_axes(shares, "pictures", "loss over full attention's")
        samples.legend(frameon=False, fontsize=8)
        for axis in (samples, seconds, shares):
            axis.locator_params(axis="x", nbins=6)
            thin_spines(axis)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, fontweight="bold")
    figure.tight_layout()
    save(figure, path)


def _by_size(records: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    sizes: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        if record["curve"] and record["batch"]:
            sizes.setdefault(record["size"], []).append(record)
    return sizes


def _style_of(record: dict[str, Any], colours: dict[str, str]) -> dict[str, Any]:
    """A colour for each attention; what something was taken away from is thin, in a dash of its own."""
    dashes = {None: "-", "unenriched": "--", "unweighted": "-.", "raster": ":"}
    width = 1.5 if record["label"] is None else 1.0
    dash = dashes.get(record["label"], "--")
    return {
        "color": colours[record["attention"]],
        "linestyle": dash,
        "linewidth": width,
        "label": record["name"],
    }
