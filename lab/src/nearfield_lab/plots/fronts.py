"""Points of cost and quality, and the front of the best: of measured pictures, and of `tune`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nearfield_lab.plots.figures import require_pyplot, save, save_titled
from nearfield_lab.plots.style import (
    BAR_COLOURS,
    INK,
    MUTED,
    colours_of,
    label_axes,
    legend,
    light_grid,
    percent,
    wheel,
)
from nearfield_lab.quality.results import QualityRow, pareto_front
from nearfield_lab.tuning import Trial, front


class Panel(NamedTuple):
    """Two figures of points against each other.

    Args:
        across, up: names of the figures.
        is_more_better: whether more of the first is better; less of the second always is, where there is a front.
        has_front: whether what nothing beats is sought.
    """

    title: str
    across: str
    up: str
    is_more_better: bool
    has_front: bool = True

    def value_of(self, record: Mapping[str, Any]) -> tuple[float, float] | None:
        """Where a point stands, or None."""
        across, up = record[self.across], record[self.up]
        return None if across is None or up is None else (across, up)


PANELS = (
    Panel("Speed and likeness", "speed_up", "lpips", is_more_better=True),
    Panel("Pairs and likeness", "pairs_kept", "lpips", is_more_better=False),
    Panel("Pairs and FID", "pairs_kept", "fid", is_more_better=False),
    Panel("Pairs and speed", "pairs_kept", "speed_up", is_more_better=False, has_front=False),
)


def quality_front(path: Path, rows: Sequence[QualityRow], title: str) -> None:
    """Pairs kept against FID, a point for every pattern. A line joins the points that no other beats in both, one line
    for models that were tuned and one for the others.

    Points take their colour from `settings["tuning"]` ("none" if it is not there).
    """
    pyplot = require_pyplot()
    measured = [row for row in rows if row.fid is not None]
    kinds = list(dict.fromkeys(str(row.settings.get("tuning", "none")) for row in measured))
    colours = colours_of(kinds)
    figure, axis = pyplot.subplots(figsize=(8.6, 5.2))
    fronts = [pareto_front(row for row in measured if row.is_tuned == tuned) for tuned in (False, True)]
    for front_rows in fronts:
        _draw_front(axis, [(row.pairs_kept, row.fid) for row in front_rows])
    best = [row for front_rows in fronts for row in front_rows]
    names: list[tuple[tuple[float, float], str, bool]] = []
    for row in measured:
        assert row.fid is not None  # others are not measured
        place, is_best = (row.pairs_kept, row.fid), row in best
        _draw_point(axis, place, colours[str(row.settings.get("tuning", "none"))], is_best)
        names.append((place, row.pattern, is_best))
    _front_axes(axis, [row.fid or 0.0 for row in measured], {row.samples for row in measured})
    _write_names(axis, names)
    legend(axis, colours, [f"tuning: {kind}" for kind in kinds])
    save_titled(figure, axis, title, path)


def _front_axes(axis: Any, distances: Sequence[float], samples: set[int]) -> None:
    """Logarithmic in both directions: a pattern with half the pairs is as far as one with half the FID."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_ylim(max(1e-3, 0.8 * min(distances, default=1.0)), 1.25 * max(distances, default=1.0))
    axis.set_xlim(right=1.6)  # room for the name of the dense model
    for direction, ticks in (
        (axis.xaxis, (0.02, 0.05, 0.1, 0.2, 0.5, 1)),
        (axis.yaxis, (5, 10, 20, 50, 100, 200)),
    ):
        low, high = direction.get_view_interval()
        direction.set_ticks([tick for tick in ticks if low <= tick <= high])
        direction.set_major_formatter("{x:g}")
        direction.set_ticks([], minor=True)
    counts = " or ".join(f"{count:,}" for count in sorted(samples))
    label_axes(axis, "pairs kept (1 is dense)", f"FID of {counts} images" if counts else "FID")
    light_grid(axis)


def pareto_panels(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """Methods as points of speed, pairs and distance to dense, a panel for every two figures that some points have.

    Records are points of `python -m benchmarks pareto`. Colours stand for methods, marks for groups, and a line joins
    the points that nothing in their group beats.
    """
    pyplot = require_pyplot()
    panels = [panel for panel in PANELS if _drawn_in(panel, records)]
    columns = min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure, grid = pyplot.subplots(rows, columns, figsize=(6.6 * columns, 4.9 * rows + 0.9), squeeze=False)
    families = list(dict.fromkeys(record["family"] for record in records))
    colours = {
        family: INK if family == "dense" else wheel(place / len(families), lightness=0.42)
        for place, family in enumerate(families)
    }
    groups = list(dict.fromkeys(record["group"] for record in records))
    marks = dict(zip(groups, "os^DvPX*" * len(groups), strict=False))
    for axis, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axis, panel, _drawn_in(panel, records), colours, marks)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    handles = [pyplot.Line2D([], [], color=colour, marker="o", linestyle="", label=family)
               for family, colour in colours.items()]  # fmt: skip
    handles += [pyplot.Line2D([], [], color=MUTED, marker=mark, linestyle="", label=group)
                for group, mark in marks.items()]  # fmt: skip
    figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK, fontweight="bold")
    lines = -(-len(handles) // 4)
    figure.legend(handles=handles, loc="lower left", ncols=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, min(0.4, (0.15 + 0.2 * lines) / figure.get_figheight()), 1, 0.98))
    save(figure, path)


def _drawn_in(panel: Panel, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that have both figures. A panel without a front shows records of which only speed was measured."""
    shown = [record for record in records if panel.value_of(record)]
    return shown if panel.has_front else [record for record in shown if record["lpips"] is None]


def _draw_panel(
    axis: Any,
    panel: Panel,
    records: Sequence[dict[str, Any]],
    colours: dict[str, Any],
    marks: dict[str, str],
) -> None:
    _panel_axes(axis, panel)
    fronts: dict[str, list[tuple[float, float]]] = {}
    names: list[tuple[tuple[float, float], str, bool]] = []
    for record in records:
        place = panel.value_of(record)
        assert place is not None  # others are not drawn here
        is_best = panel.title in record["front"]
        if is_best:
            fronts.setdefault(record["group"], []).append(place)
        mark, colour = marks[record["group"]], colours[record["family"]]
        _draw_point(axis, place, colour, is_best, mark)
        names.append((place, record["name"], is_best))
    where = "pre" if panel.is_more_better else "post"
    for places in fronts.values():
        _draw_front(axis, sorted(places), where)
    _write_names(axis, names)


_BESIDE = (
    *((5, 3, "left"), (5, -9, "left"), (-5, 3, "right"), (-5, -9, "right")),
    *((0, 7, "center"), (0, -13, "center"), (9, -3, "left"), (-9, -3, "right")),
)
"""Where a name may stand: points across and up from its mark, and the side of it that is there."""
_FURTHER = ((5, -19, "left"), (-5, -19, "right"), (5, 13, "left"), (-5, 13, "right"))
"""The same for names of the best, which are to be read even where they stand in line."""


def _write_names(axis: Any, names: Sequence[tuple[tuple[float, float], str, bool]]) -> None:
    """Write names next to points: of the best first, and of these the long ones, which find a place least easily.

    A point with no free place next to it has no name.

    A place is free where there is no other name and no point; names of the best may cover points that are not.
    """
    axis.autoscale_view()  # now, and not when it is drawn: places depend on it
    renderer = axis.figure.canvas.get_renderer()
    inside = axis.get_window_extent(renderer)
    taken = [_box_around(axis, place) for place, _, is_best in names if is_best]
    others = [_box_around(axis, place) for place, _, is_best in names if not is_best]
    for place, name, is_best in sorted(
        names, key=lambda each: (not each[2], -len(each[1]) if each[2] else 0)
    ):
        for across, up, side in (*_BESIDE, *(_FURTHER if is_best else ())):
            text = axis.annotate(
                name,
                place,
                (across, up),
                textcoords="offset points",
                ha=side,
                fontsize=7.5 if is_best else 6,
                color=INK if is_best else MUTED,
            )
            box = text.get_window_extent(renderer)
            is_inside = inside.x0 <= box.x0 and box.x1 <= inside.x1
            if is_inside and not any(box.overlaps(other) for other in (taken if is_best else taken + others)):
                taken.append(box)
                break
            text.remove()


def _box_around(axis: Any, place: tuple[float, float], reach: float = 3.0) -> Any:
    """What a point covers."""
    from matplotlib.transforms import Bbox

    across, up = axis.transData.transform(place)
    return Bbox.from_extents(across - reach, up - reach, across + reach, up + reach)


def _panel_axes(axis: Any, panel: Panel) -> None:
    words = {
        "speed_up": "speed-up over dense",
        "pairs_kept": "pairs kept, over all layers and steps",
        "lpips": "LPIPS to dense",
        "fid": "FID",
    }
    label_axes(axis, words[panel.across], words[panel.up])
    if panel.up == "speed_up":
        axis.set_yscale("log", base=2)
    if panel.across == "pairs_kept":
        axis.xaxis.set_major_formatter(percent)
    for name, direction in ((panel.across, axis.xaxis), (panel.up, axis.yaxis)):
        if name == "speed_up":
            direction.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.margins(x=0.16, y=0.08)  # room for names
    light_grid(axis)
    axis.set_title(panel.title, loc="left", fontsize=10.5, color=INK, fontweight="bold")


def tuning_front(path: Path, trials: Sequence[Trial], limit: float) -> None:
    """Pairs kept against distance to dense pictures: every trial is a point, and a line joins the best."""
    pyplot = require_pyplot()
    searched = [trial for trial in trials if trial.purpose == "search"]
    best = front(searched)
    figure, axis = pyplot.subplots(figsize=(7.2, 4.6))
    _draw_front(axis, [(trial.lpips, trial.pairs_kept) for trial in best])
    for trial in searched:
        colour = BAR_COLOURS[0] if trial.lpips <= limit else MUTED
        _draw_point(axis, (trial.lpips, trial.pairs_kept), colour, trial in best)
    axis.axvline(limit, color=INK, linewidth=1, linestyle="--")
    label_axes(axis, "LPIPS to dense (dashed: the limit)", "pairs kept, over all layers and steps")
    axis.yaxis.set_major_formatter(percent)
    light_grid(axis)
    save_titled(figure, axis, "What was tried", path)


def _draw_front(axis: Any, places: Sequence[tuple[Any, Any]], where: str = "post") -> None:
    axis.step(
        [across for across, _ in places], [up for _, up in places], where=where, color=MUTED, linewidth=1
    )


def _draw_point(axis: Any, place: tuple[Any, Any], colour: Any, is_best: bool, mark: str = "o") -> None:
    axis.plot(*place, mark, color=colour, markersize=7 if is_best else 4.5)
