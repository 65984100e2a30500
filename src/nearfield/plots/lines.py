"""Lines over a share or a number: `bench retrieval`, `bench recall`, `bench scaling`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearfield.plots.figures import require_matplotlib, save
from nearfield.plots.style import BAR_COLOURS, INK, MUTED, thin_spines, wheel


def fidelity_lines(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """Divergence from full prefill against the share of tokens computed again, a line for each selector.

    Records hold `selector`, `ratio` and either `fidelity` of one question or `divergence` with an interval.
    """
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    figure, axis = pyplot.subplots(figsize=(7.2, 4.6))
    names = list(dict.fromkeys(record["selector"] for record in records))
    colours = dict(zip(names, BAR_COLOURS * len(names), strict=False))
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
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_xlabel("tokens computed again", color=MUTED)
    axis.set_ylabel("KL to full prefill, nats per token", color=MUTED)
    axis.legend(frameon=False, fontsize=9)
    thin_spines(axis)
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    save(figure, path)


def _divergence(record: dict[str, Any]) -> tuple[float, float, float]:
    if "fidelity" in record:
        value = record["fidelity"]["divergence"]
        return value, value, value
    found = record["divergence"]
    return found["mean"], found["low"], found["high"]


def recall_lines(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """The share of weights that is kept against the share of pairs, a line for each pattern; chosen by means dashed.

    Records hold `pattern`, `by`, `tiles`, `kept` and `recall`; those of several samples are averaged.
    """
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    figure, axis = pyplot.subplots(figsize=(7.2, 5.0))
    names = list(dict.fromkeys(record["pattern"] for record in records))
    for place, name in enumerate(names):
        colour = INK if place == 0 else wheel((place - 1) / max(1, len(names) - 1) * 0.75)
        for by in dict.fromkeys(record["by"] for record in records if record["pattern"] == name):
            groups: dict[int, list[dict[str, Any]]] = {}
            for record in records:
                if (record["pattern"], record["by"]) == (name, by):
                    groups.setdefault(record["tiles"], []).append(record)
            points = sorted((_mean_of(group, "kept"), _mean_of(group, "recall")) for group in groups.values())
            is_estimate = by == "means"
            axis.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3.5,
                color=colour,
                linestyle=":" if is_estimate else "-",
                linewidth=1.0 if is_estimate else 1.5,
                label=None if is_estimate else name,
            )
    axis.set_xscale("log", base=2)
    for each in (axis.xaxis, axis.yaxis):
        each.set_major_formatter(lambda value, _: f"{value:.0%}" if value >= 0.1 else f"{value:.1%}")
    axis.set_xlabel("pairs read", color=MUTED)
    axis.set_ylabel("weight of full attention that is kept", color=MUTED)
    axis.plot([], [], color=MUTED, linestyle=":", label="chosen by means")
    axis.legend(frameon=False, fontsize=9)
    thin_spines(axis)
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    save(figure, path)


def _mean_of(records: Sequence[dict[str, Any]], name: str) -> float:
    return float(sum(record[name] for record in records)) / len(records)


def scaling_lines(path: Path, records: Sequence[dict[str, Any]], machine: str = "") -> None:
    """Bytes per layer and rank against ranks, of nearfield, ring attention and Ulysses; below, computed step times."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    cases = list(dict.fromkeys(record["case"] for record in records))
    figure, axes = pyplot.subplots(2, len(cases), figsize=(3.1 * len(cases), 6), squeeze=False, sharey="row")
    colours = dict(zip(("nearfield", "ring", "ulysses"), BAR_COLOURS, strict=False))
    for (upper, lower), case in zip(axes.T, cases, strict=True):
        mine = [record for record in records if record["case"] == case]
        for name, field in (("nearfield", "sent"), ("ring", "ring"), ("ulysses", "ulysses")):
            points = [
                (record["ranks"], record[field] / 2**20) for record in mine if record[field] is not None
            ]
            upper.plot(*zip(*points, strict=True), "o-", color=colours[name], markersize=3.5, linewidth=1.4)
        for link, style in zip(mine[0]["step_seconds"], ("-", "--", ":"), strict=False):
            for name, colour in colours.items():
                times = [(record["ranks"], record["step_seconds"][link].get(name)) for record in mine]
                drawn = [point for point in times if point[1] is not None]
                if drawn:
                    lower.plot(*zip(*drawn, strict=True), style, color=colour, linewidth=1.3)
        upper.set_title(case, loc="left", fontsize=10, color=INK, fontweight="bold")
        if not lower.lines:
            lower.text(
                0.5, 0.5, "no kernel times\nmeasured", ha="center", transform=lower.transAxes, color=MUTED
            )
        for axis in (upper, lower):
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks([record["ranks"] for record in mine], [str(record["ranks"]) for record in mine])
            thin_spines(axis)
        lower.set_xlabel("ranks", color=MUTED)
    axes[0][0].set_ylabel("MiB sent per layer by the busiest rank (counted)", color=MUTED, fontsize=8)
    axes[1][0].set_ylabel("seconds per step (computed)", color=MUTED, fontsize=8)
    links = list(records[0]["step_seconds"])
    words = "; ".join(
        f"{style}: {link}" for link, style in zip(links, ("solid", "dashed", "dotted"), strict=False)
    )
    handles = [pyplot.Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="lower left", ncols=3, frameon=False, fontsize=9)
    figure.text(0.99, 0.015, words, ha="right", fontsize=8, color=MUTED)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    save(figure, path)
