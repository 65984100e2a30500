"""Pictures: a curve, its tiles, who reads whom, and benchmark bars. The only importer of matplotlib."""

import colorsys
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.bench.pareto_report import PANELS, Panel
from nearfield.plan import Plan
from nearfield.quality.results import QualityRow, pareto_front
from nearfield.tuning import Trial, front

INK, MUTED, FAINT = "#22262e", "#6b7280", "#e3e6eb"
SHARED, SHARED_KEYS, SHADE, FAR = "#4b5563", "#8b93a1", "#d3d7de", "#b5545c"
BAR_COLOURS = ("#2f6f9f", "#c27a2c", "#5a9367", "#8a6fae", "#b5545c")
_MOST_VECTORS = 4096
"""Lines that a vector picture holds as such; more of them are drawn as points."""
Colour = tuple[float, float, float]


class MissingExtra(ImportError):
    """Drawing was asked for and matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raise, with the remedy, where nothing can be drawn."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"`matplotlib` must be installed to draw; got {error}. "
            "Install it with `pip install 'nearfield[bench]'`."
        ) from None
    matplotlib.use("Agg")


def overview(
    path: Path, order: Tensor, grid: tuple[int, int], text: int, run: int, layers: Sequence[tuple[int, Plan]]
) -> None:
    """One picture: the curve, the tiles of each layer (given as its shift and plan), and the last layer's mask."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    figure, axes = _row_of_axes(pyplot, [grid[1] / grid[0]] * (1 + len(layers)) + [1.0])
    draw_curve(axes[0], order, grid)
    for index, (axis, (shift, _)) in enumerate(zip(axes[1:-1], layers, strict=True)):
        draw_tiles(axis, order, grid, run, shift)
        moved = f", slid by {shift}" if index else ""
        _title(axis, f"Tiles of layer {index}", f"{math.ceil(len(order) / run)} x {run} tokens{moved}")
    shift, plan = layers[-1]
    draw_mask(axes[-1], plan, text, run, shift)
    _title(
        axes[-1],
        "Who reads whom",
        f"layer {len(layers) - 1}: {plan.density:.1%} of the pairs{'; grey: text' if text else ''}",
    )
    _save(figure, path)


def _row_of_axes(pyplot: Any, shapes: Sequence[float]) -> tuple[Any, list[Any]]:
    """Axes of one height side by side, as wide as their shapes (width over height) ask, within reason."""
    shapes = [min(2.5, max(0.62, shape)) for shape in shapes]
    gap, above, below = 0.42, 0.62, 0.30
    height = min(3.0, 15.0 / sum(shapes))
    size = sum(shapes) * height + gap * (len(shapes) + 1), height + above + below
    figure = pyplot.figure(figsize=size)
    axes, left = [], gap
    for shape in shapes:
        box = (left / size[0], below / size[1], shape * height / size[0], height / size[1])
        axes.append(figure.add_axes(box, anchor="NW"))
        left += shape * height + gap
    return figure, axes


class LayerPicture(NamedTuple):
    """What one layer of a method reads.

    Args:
        tile: `[n]` the tile of every token in raster order.
        reads: `[rows, columns]` bool, which block of queries reads which block of keys.
        reads_far: `[rows, summaries]` bool, or None where there is no far field.
        subtitle: what to say below the layer's name.
    """

    layer: int
    tile: Tensor
    reads: Tensor
    reads_far: Tensor | None
    subtitle: str


class MethodPicture(NamedTuple):
    """A method on one image, ready to be drawn.

    Args:
        curve: `[n]` raster index of each token along the curve.
        sequence: `[n]` raster index of each image token as they stand after the text.
        is_shared: `[n]` bool in raster order.
        shared_reads_all: whether shared tokens belong to no tile, as they read everything.
        q_block, k_block: tokens per row and column of the masks.
        facts: lines to print beside the masks.
    """

    grid: tuple[int, ...]
    text: int
    curve: Tensor
    curve_name: str
    sequence: Tensor
    is_shared: Tensor
    shared_reads_all: bool
    num_tiles: int
    q_block: int
    k_block: int
    layers: Sequence[LayerPicture]
    facts: Sequence[str]


def method_overview(path: Path, picture: MethodPicture) -> None:
    """The curve and the tiles of each layer above, who reads whom in each layer below."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    canvas = _canvas(picture.grid)
    height, width = canvas.cells.shape
    figure, above, below = _two_rows_of_axes(pyplot, width / height, 1 + len(picture.layers))
    _shade(above[0], canvas, picture.is_shared)
    _draw_curve_lines(above[0], picture.curve, canvas)
    _picture_frame(above[0], height, width)
    slices = f"; frames {', '.join(map(str, canvas.frames))}" if len(picture.grid) == 3 else ""
    _title(above[0], picture.curve_name, "x".join(map(str, picture.grid)) + slices)
    _write_facts(pyplot, below[0], picture)
    for layer, tiles_axis, mask_axis in zip(picture.layers, above[1:], below[1:], strict=True):
        label = torch.where(picture.is_shared & picture.shared_reads_all, -2, layer.tile)
        _draw_cells(tiles_axis, _cell_colours(picture, layer), label, canvas)
        _outline(tiles_axis, canvas, picture.is_shared)
        _title(tiles_axis, f"Tiles of layer {layer.layer}", layer.subtitle)
        _draw_reads(mask_axis, picture, layer)
    _save(figure, path)


def draw_curve(axis: Any, order: Tensor, grid: tuple[int, int]) -> None:
    """The curve through the cells, its colour running once around the wheel."""
    height, width = grid
    closes = _draw_curve_lines(axis, order, _canvas(grid))
    _picture_frame(axis, height, width)
    _title(axis, f"Hilbert curve, {height}x{width}", "closed: ends beside its start" if closes else "open")


def draw_tiles(axis: Any, order: Tensor, grid: tuple[int, int], run: int, shift: int) -> None:
    """Every cell in the colour of its tile, with lines where tiles meet."""
    tile_of_cell = torch.empty(len(order), dtype=torch.long)
    tile_of_cell[order] = _tile_of_position(len(order), run, shift)
    colours = torch.tensor(_tile_colours(math.ceil(len(order) / run)))
    _draw_cells(axis, colours[tile_of_cell], tile_of_cell, _canvas(grid))


def draw_mask(axis: Any, plan: Plan, text: int, run: int, shift: int) -> None:
    """The plan's blocks; those of text rows and columns grey, the others in the colour of the query's tile."""
    reads = (plan.block_counts()[0, 0] > 0).cpu()
    rows = torch.arange(plan.num_rows) * plan.q_block + plan.q_block // 2
    columns = torch.arange(plan.num_columns) * plan.k_block + plan.k_block // 2
    image = plan.num_queries - text
    tile = _tile_of_position(image, run, shift)[(rows - text).clamp(0, image - 1)]
    colours = torch.tensor(_tile_colours(math.ceil(image / run)))
    cells = colours[tile][:, None].expand(-1, plan.num_columns, -1).clone()
    cells[(rows < text)[:, None] | (columns < text)[None]] = rgb(SHARED)
    cells[~reads] = 1.0
    extent = (0, plan.num_columns * plan.k_block, plan.num_rows * plan.q_block, 0)
    axis.imshow(cells.numpy(), interpolation="nearest", aspect="auto", extent=extent)
    _mask_frame(axis, plan.num_queries, plan.num_keys)


class Drawing(NamedTuple):
    """One panel of a picture: its words, its width over its height, and what draws it on an axis."""

    title: str
    subtitle: str
    shape: float
    draw: Callable[[Any], None]


def side_by_side(path: Path, drawings: Sequence[Drawing]) -> None:
    """One picture of several panels."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    figure, axes = _row_of_axes(pyplot, [drawing.shape for drawing in drawings])
    for axis, drawing in zip(axes, drawings, strict=True):
        drawing.draw(axis)
        _title(axis, drawing.title, drawing.subtitle)
    _save(figure, path)


def draw_reads(
    axis: Any, reads: Tensor, colours: Tensor | None = None, borders: Sequence[float] = ()
) -> None:
    """Which columns each row reads, `[rows, columns]` bool, in the row's colour; with lines between columns."""
    colours = rgb(BAR_COLOURS[0]).expand(len(reads), 3) if colours is None else colours
    cells = torch.where(reads[..., None], colours[:, None], 1.0)
    axis.imshow(
        cells.numpy(), interpolation="nearest", aspect="auto", extent=(0, reads.shape[1], len(reads), 0)
    )
    for border in borders:
        axis.axvline(border, color=MUTED, linewidth=0.8)
    _mask_frame(axis, len(reads), reads.shape[1])
    axis.set_box_aspect(None)


def draw_cells(axis: Any, colours: Tensor, label: Tensor, grid: tuple[int, int]) -> None:
    """Cells of an image in colours, both in raster order, with lines where labels differ."""
    _draw_cells(axis, colours, label, _canvas(grid))


def draw_path(axis: Any, order: Tensor, grid: tuple[int, int]) -> None:
    """The way of a sequence through the cells of an image."""
    _draw_curve_lines(axis, order, _canvas(grid))


def draw_shares(axis: Any, shares: Tensor) -> None:
    """A matrix of shares from 0, white, to 1."""
    cells = 1 - shares[..., None] * (1 - rgb(BAR_COLOURS[0]))
    axis.imshow(
        cells.numpy(), interpolation="nearest", aspect="auto", extent=(0, shares.shape[1], len(shares), 0)
    )
    _mask_frame(axis, len(shares), shares.shape[1])
    axis.set_box_aspect(None)
    axis.set_xlabel("tokens", color=MUTED, fontsize=9, labelpad=3)
    axis.set_ylabel("merged tokens", color=MUTED, fontsize=9, labelpad=3)


def draw_weights(axis: Any, dense: Tensor, sparse: Tensor, is_read: Tensor) -> None:
    """Weights of one query over all keys: dense in grey, sparse over it, and below which keys are read."""
    places = torch.arange(len(dense)).numpy()
    axis.bar(places, dense.numpy(), width=1.0, color=SHADE)
    axis.bar(places, sparse.numpy(), width=1.0, color=FAR, alpha=0.75)
    top = float(sparse.max()) * 1.08
    axis.fill_between(
        places, -0.09 * top, -0.03 * top, where=is_read.numpy(), color=BAR_COLOURS[0], step="mid", linewidth=0
    )
    axis.set_xlim(0, len(dense))
    axis.set_ylim(-0.11 * top, top)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("keys; blue: in the list", color=MUTED, fontsize=9, labelpad=3)
    axis.set_ylabel("weight", color=MUTED, fontsize=9, labelpad=3)
    _thin_spines(axis)


def benchmark_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """One bar per measured result: its rate on the kept pairs over the dense rate, and in it the speed-up."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    measured = [record for record in records if record["status"] == "ok"]
    impls = list(dict.fromkeys(record["impl"] for record in measured))
    colours = {impl: BAR_COLOURS[index % len(BAR_COLOURS)] for index, impl in enumerate(impls)}
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
    _legend(pyplot, axis, colours, impls)
    axis.set_title(f"attend on {machine}", loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


def hilbert_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """For each measured case its speed-up over everything it ran beside, its bound and its target."""
    cases = {record["case"]: record for record in records if record["status"] == "ok"}
    words = "speed-up of one attention call;  solid line: bound by pairs over the best dense, dotted: target"
    _speed_up_bars(path, cases, f"Hilbert on {machine}", words)


def model_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """For each size of image the speed-up of a denoising step; its bound is the step without any attention."""
    sizes = {
        record.get("name", f"{record['pixels']} px").replace("; ", "\n"): record
        | {"bound": record["ceiling"]}
        for record in records
        if record["status"] == "ok"
    }
    words = "speed-up of one denoising step;  solid line: with no attention at all over the best dense, dotted: target"
    model = {"wan21-1.3b": "Wan 2.1 1.3B"}.get(records[0].get("model", "") if records else "", "FLUX.1")
    _speed_up_bars(path, sizes, f"{model}'s architecture on {machine}", words)


def _speed_up_bars(path: Path, records: dict[str, dict[str, Any]], title: str, words: str) -> None:
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    others = list(dict.fromkeys(name for record in records.values() for name in record["speed_ups"]))
    colours = dict(zip(others, BAR_COLOURS, strict=False))
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
        _mark(axis, record["bound"], place, INK)
        if record["target"]:
            _mark(axis, record["target"], place, INK, dashed=True)
    axis.set_yticks(range(len(records)), list(records))
    axis.set_ylim(len(records) - 0.45, -0.55)
    axis.set_xlabel(words)
    _plain_bars(axis)
    _legend(pyplot, axis, colours, [f"over {name}" for name in others])
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


def quality_front(path: Path, rows: Sequence[QualityRow], title: str) -> None:
    """Pairs kept against FID: every pattern a point, those that none beats in both joined by a line.

    Points take their colour from `settings["tuning"]` ("none" if it is not there).
    """
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    measured = [row for row in rows if row.fid is not None]
    front = pareto_front(measured)
    kinds = list(dict.fromkeys(str(row.settings.get("tuning", "none")) for row in measured))
    colours = dict(zip(kinds, BAR_COLOURS * len(kinds), strict=False))
    figure, axis = pyplot.subplots(figsize=(8.6, 5.2))
    axis.step(
        [row.pairs_kept for row in front], [row.fid for row in front], where="post", color=MUTED, linewidth=1
    )
    for row in measured:
        is_best = row in front
        colour = colours[str(row.settings.get("tuning", "none"))]
        axis.plot(row.pairs_kept, row.fid, "o", color=colour, markersize=7 if is_best else 4.5)
        axis.annotate(row.pattern, (row.pairs_kept, row.fid), (6, 3), textcoords="offset points",
                      fontsize=8.5 if is_best else 7, color=INK if is_best else MUTED)  # fmt: skip
    _front_axes(axis, [row.fid or 0.0 for row in measured], {row.samples for row in measured})
    _legend(pyplot, axis, colours, [f"tuning: {kind}" for kind in kinds])
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


def pareto_panels(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """Methods as points of speed, pairs and distance to dense, a panel for every two figures that some points have.

    Records are those of `bench pareto`. Colours tell methods, marks tell groups, and those that nothing in their group
    beats are joined by a line.
    """
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    panels = [panel for panel in PANELS if _drawn_in(panel, records)]
    columns = min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure, grid = pyplot.subplots(rows, columns, figsize=(6.6 * columns, 4.9 * rows + 0.9), squeeze=False)
    families = list(dict.fromkeys(record["family"] for record in records))
    colours = {
        family: INK if family == "dense" else _wheel(place / len(families), lightness=0.42)
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
    _save(figure, path)


def _drawn_in(panel: Panel, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that have both figures. Where only speed was measured pairs say how well it was done; else they repeat."""
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
        axis.plot(*place, mark, color=colour, markersize=7 if is_best else 4.5)
        names.append((place, record["name"], is_best))
    where = "pre" if panel.is_more_better else "post"
    for places in fronts.values():
        axis.step(*zip(*sorted(places), strict=True), where=where, color=MUTED, linewidth=1)
    _write_names(axis, names)


def _write_names(axis: Any, names: Sequence[tuple[tuple[float, float], str, bool]]) -> None:
    """Names beside points, of the best first; where another stands already a point goes without."""
    axis.autoscale_view()  # now, and not when it is drawn: places depend on it
    taken: set[tuple[int, int]] = set()
    for place, name, is_best in sorted(names, key=lambda each: not each[2]):
        across, up = axis.transAxes.inverted().transform(axis.transData.transform(place))
        cells = {(column + int(8 * across), round(40 * up)) for column in (0, 1)}
        if taken & cells and not is_best:
            continue
        taken |= cells
        axis.annotate(name, place, (5, 3), textcoords="offset points",
                      fontsize=7.5 if is_best else 6, color=INK if is_best else MUTED)  # fmt: skip


def _panel_axes(axis: Any, panel: Panel) -> None:
    words = {
        "speed_up": "speed-up over dense",
        "pairs_kept": "pairs kept, over all layers and steps",
        "lpips": "LPIPS to dense",
        "fid": "FID",
    }
    axis.set_xlabel(words[panel.across], color=MUTED)
    axis.set_ylabel(words[panel.up], color=MUTED)
    if panel.up == "speed_up":
        axis.set_yscale("log", base=2)
    if panel.across == "pairs_kept":
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for name, direction in ((panel.across, axis.xaxis), (panel.up, axis.yaxis)):
        if name == "speed_up":
            direction.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.margins(x=0.16, y=0.08)  # room for names
    axis.grid(color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    _thin_spines(axis)
    axis.set_title(panel.title, loc="left", fontsize=10.5, color=INK, fontweight="bold")


def tuning_front(path: Path, trials: Sequence[Trial], limit: float) -> None:
    """Pairs kept against distance to dense pictures: every trial a point, those that none beats joined by a line."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    searched = [trial for trial in trials if trial.purpose == "search"]
    best = front(searched)
    figure, axis = pyplot.subplots(figsize=(7.2, 4.6))
    axis.step([t.lpips for t in best], [t.pairs_kept for t in best], where="post", color=MUTED, linewidth=1)
    for trial in searched:
        colour = BAR_COLOURS[0] if trial.lpips <= limit else MUTED
        axis.plot(trial.lpips, trial.pairs_kept, "o", color=colour, markersize=7 if trial in best else 4.5)
    axis.axvline(limit, color=INK, linewidth=1, linestyle="--")
    axis.set_xlabel("LPIPS to dense (dashed: the limit)", color=MUTED)
    axis.set_ylabel("pairs kept, over all layers and steps", color=MUTED)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    _thin_spines(axis)
    axis.set_title("What was tried", loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


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
    _thin_spines(axis)
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


def recall_lines(path: Path, records: Sequence[dict[str, Any]], title: str) -> None:
    """The share of weights that is kept against the share of pairs, a line for each pattern; chosen by means dashed.

    Records hold `pattern`, `by`, `tiles`, `kept` and `recall`; those of several samples are averaged.
    """
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    figure, axis = pyplot.subplots(figsize=(7.2, 5.0))
    names = list(dict.fromkeys(record["pattern"] for record in records))
    for place, name in enumerate(names):
        colour = INK if place == 0 else _wheel((place - 1) / max(1, len(names) - 1) * 0.75)
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
    _thin_spines(axis)
    axis.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


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
            _thin_spines(axis)
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
    _save(figure, path)


def _divergence(record: dict[str, Any]) -> tuple[float, float, float]:
    if "fidelity" in record:
        value = record["fidelity"]["divergence"]
        return value, value, value
    found = record["divergence"]
    return found["mean"], found["low"], found["high"]


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
    axis.set_xlabel("pairs kept (1 is dense)", color=MUTED)
    axis.set_ylabel(f"FID of {counts} images" if counts else "FID", color=MUTED)
    axis.grid(color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    _thin_spines(axis)


def _times_axis(axis: Any, figures: Sequence[float]) -> None:
    """A logarithmic axis of ratios that holds all figures, and 1."""
    least, most = min([*figures, 1.0]) / 1.15, max([*figures, 1.0]) * 1.15
    axis.set_xscale("log")
    axis.set_xlim(least, most)
    ticks = [tick for tick in (0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 50, 100) if least < tick < most]
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.set_xticks([], minor=True)


def _draw_speed_up(axis: Any, place: float, value: float, height: float, colour: str) -> None:
    """A bar with its figure at the foot, where no mark of a bound stands; beside it if the bar is short."""
    axis.barh(place, value, height=height, color=colour)
    least, most = axis.get_xlim()
    fits = math.log(value / least) > 0.1 * math.log(most / least)
    axis.text(least if fits else value, place, f" {value:.2f}x", va="center", fontsize=8,
              color="white" if fits else INK)  # fmt: skip


def _mark(axis: Any, value: float, place: float, colour: str, dashed: bool = False) -> None:
    axis.vlines(
        value, place - 0.44, place + 0.44, color=colour, linewidth=1.2, linestyle=":" if dashed else "-"
    )


def _plain_bars(axis: Any) -> None:
    axis.xaxis.label.set(color=MUTED, fontsize=9)
    axis.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[:].set_visible(False)


def _legend(pyplot: Any, axis: Any, colours: dict[str, str], labels: Sequence[str]) -> None:
    swatches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    corner = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": max(1, len(labels))}
    axis.legend(swatches, labels, frameon=False, fontsize=8.5, **corner)


def _draw_bar(axis: Any, place: float, record: dict[str, Any], colour: str) -> None:
    fraction, label = record["fraction_of_dense_rate"], f"{record['speed_up']:.2f}x"
    axis.barh(place, fraction, height=0.76, color=colour)
    fits = fraction > 0.12
    axis.text(fraction, place, f"{label} " if fits else f" {label}", va="center", ha="right" if fits else "left",
              fontsize=8.5, color="white" if fits else INK)  # fmt: skip


# -- details -----------------------------------------------------------------------------------------------------------


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


def _wheel(turn: float, lightness: float = 0.48, saturation: float = 0.46) -> Colour:
    """A muted colour wheel that starts at blue."""
    return colorsys.hls_to_rgb((0.58 + turn) % 1.0, lightness, saturation)


def _tile_colours(count: int) -> list[Colour]:
    """The wheel again, lighter and darker in turn so that neighbours on the curve differ."""
    return [_wheel(i / count, *((0.55, 0.40) if i % 2 else (0.73, 0.46))) for i in range(count)]


def _tile_of_position(length: int, run: int, shift: int) -> Tensor:
    return (torch.arange(length) - shift) % length // run


def rgb(colour: str) -> Tensor:
    return torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


class _Canvas(NamedTuple):
    """Where cells are drawn: `[height, width]` raster indices, -1 for gaps; which frames these are; cells per frame."""

    cells: Tensor
    frames: list[int]
    frame_size: int

    @property
    def shown(self) -> Tensor:
        return self.cells >= 0

    def of(self, values: Tensor) -> Tensor:
        """Values given in raster order as they are drawn; gaps hold anything."""
        return values[self.cells.clamp(min=0)]


def _canvas(grid: tuple[int, ...]) -> _Canvas:
    """A picture is its own canvas. Of a video up to four frames, from the first to the last, stand in two rows."""
    height, width = grid[-2:]
    cells = torch.arange(math.prod(grid)).view(-1, height, width)
    if len(cells) == 1:
        return _Canvas(cells[0], [0], height * width)
    count = min(4, len(cells))
    frames = [round(index * (len(cells) - 1) / (count - 1)) for index in range(count)]
    down, gap = -(-count // 2), max(1, width // 16)
    drawn = torch.full((down * (height + gap) - gap, 2 * width + gap), -1)
    for index, frame in enumerate(frames):
        y, x = index // 2 * (height + gap), index % 2 * (width + gap)
        drawn[y : y + height, x : x + width] = cells[frame]
    return _Canvas(drawn, frames, height * width)


def _draw_curve_lines(axis: Any, order: Tensor, canvas: _Canvas) -> bool:
    """Draws the steps inside each frame that is shown; returns whether a picture's curve ends beside its start."""
    from matplotlib.collections import LineCollection

    points = torch.full((len(order), 2), -1.0, dtype=torch.float64)  # of cells in raster order
    y, x = canvas.shown.nonzero().unbind(1)
    points[canvas.cells[y, x]] = torch.stack([x, y], dim=1).double()
    reach = float((points[order[0]] - points[order[-1]]).norm())
    closes = len(order) > 2 and canvas.frame_size == len(order) and reach <= 1.0
    path = torch.cat([order, order[:1]]) if closes else order
    start, stop = path[:-1], path[1:]
    stays = start // canvas.frame_size == stop // canvas.frame_size
    drawn = (stays & (points[start, 0] >= 0)).nonzero().flatten()
    segments = torch.stack([points[start], points[stop]], dim=1)[drawn].tolist()
    colours = [_wheel(index / max(1, len(start))) for index in drawn.tolist()]
    style: dict[str, Any] = {
        "linewidths": max(0.6, min(3.0, 110 / max(canvas.cells.shape))),
        "capstyle": "round",
    }
    many = len(segments) > _MOST_VECTORS
    axis.add_collection(LineCollection(segments, colors=colours, rasterized=many, **style))
    return closes


def _draw_cells(axis: Any, colours: Tensor, label: Tensor, canvas: _Canvas) -> None:
    """Cells in colours given in raster order, with white lines where labels differ; gaps stay white."""
    drawn = torch.where(canvas.shown[..., None], canvas.of(colours), 1.0)
    axis.imshow(drawn.numpy(), interpolation="nearest", aspect="equal")
    _draw_borders(axis, torch.where(canvas.shown, canvas.of(label), -1), colors="white", linewidths=1.4)
    _picture_frame(axis, *canvas.cells.shape)


def _draw_borders(axis: Any, label: Tensor, **style: Any) -> None:
    from matplotlib.collections import LineCollection

    right = (label[:, 1:] != label[:, :-1]).nonzero().tolist()
    below = (label[1:] != label[:-1]).nonzero().tolist()
    lines = [[(x + 0.5, y - 0.5), (x + 0.5, y + 0.5)] for y, x in right]
    lines += [[(x - 0.5, y + 0.5), (x + 0.5, y + 0.5)] for y, x in below]
    many = len(lines) > _MOST_VECTORS
    axis.add_collection(LineCollection(lines, capstyle="projecting", rasterized=many, **style))


def _outline(axis: Any, canvas: _Canvas, is_shared: Tensor) -> None:
    """A dark line around what is shared."""
    _draw_borders(axis, canvas.shown & canvas.of(is_shared), colors=INK, linewidths=1.5)


def _shade(axis: Any, canvas: _Canvas, is_shared: Tensor) -> None:
    inside = canvas.shown & canvas.of(is_shared)
    cells = torch.where(inside[..., None], rgb(SHADE), 1.0)
    axis.imshow(cells.numpy(), interpolation="nearest", aspect="equal")


def _cell_colours(picture: MethodPicture, layer: LayerPicture) -> Tensor:
    """Tiles in their colours; shared cells grey, or half so where they also belong to a tile."""
    colours = torch.tensor(_tile_colours(picture.num_tiles))[layer.tile]
    mixed = rgb(SHARED) if picture.shared_reads_all else (colours + rgb(SHARED)) / 2
    return torch.where(picture.is_shared[:, None], mixed, colours)


def _draw_reads(axis: Any, picture: MethodPicture, layer: LayerPicture) -> None:
    """Blocks that are read, in the colour of the query's tile; text and shared keys grey; summaries at the right."""
    num_tokens = picture.text + len(picture.sequence)
    row_tile, row_kind = _in_sequence(picture, layer, picture.q_block)
    _, column_kind = _in_sequence(picture, layer, picture.k_block)
    colours = torch.tensor(_tile_colours(picture.num_tiles))[row_tile]
    reads_all = (row_kind == 0) | ((row_kind == 1) & picture.shared_reads_all)
    colours[reads_all] = rgb(SHARED)
    cells = colours[:, None].expand(-1, len(column_kind), -1).clone()
    cells[:, column_kind == 0] = rgb(SHARED)
    cells[(~reads_all)[:, None] & (column_kind == 1)[None]] = rgb(SHARED_KEYS)
    cells[~layer.reads] = 1.0
    height = len(row_kind) * picture.q_block
    box = (0, len(column_kind) * picture.k_block, height, 0)
    axis.imshow(cells.numpy(), interpolation="nearest", aspect="auto", extent=box)
    end = float(num_tokens)
    if layer.reads_far is not None:
        gap = 0.02 * num_tokens
        end = num_tokens + gap + layer.reads_far.shape[1]
        far = torch.where(layer.reads_far[..., None], rgb(FAR), 1.0)
        axis.imshow(
            far.numpy(), interpolation="nearest", aspect="auto", extent=(num_tokens + gap, end, height, 0)
        )
    _mask_frame(axis, num_tokens, end)


def _in_sequence(picture: MethodPicture, layer: LayerPicture, block: int) -> tuple[Tensor, Tensor]:
    """The tile of the token in the middle of each block, and its kind: 0 text, 1 shared, 2 of a tile only."""
    count = -(-(picture.text + len(picture.sequence)) // block)
    middle = torch.arange(count) * block + block // 2 - picture.text
    token = picture.sequence[middle.clamp(0, len(picture.sequence) - 1)]
    kind = torch.where(picture.is_shared[token], 1, 2)
    return layer.tile[token], torch.where(middle < 0, 0, kind)


def _mask_frame(axis: Any, num_queries: int, num_keys: float) -> None:
    axis.set_xlim(0, num_keys)
    axis.set_ylim(num_queries, 0)
    axis.set_box_aspect(1)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("keys", color=MUTED, fontsize=9, labelpad=3)
    axis.set_ylabel("queries", color=MUTED, fontsize=9, labelpad=3)
    _thin_spines(axis)


def _write_facts(pyplot: Any, axis: Any, picture: MethodPicture) -> None:
    """A legend, and below it what the method comes to."""
    axis.set_axis_off()
    kinds = {}
    is_any_shared = bool(picture.is_shared.any())
    names = ["text"] * bool(picture.text) + ["shared queries"] * (is_any_shared and picture.shared_reads_all)
    if names:
        kinds[" and ".join(names)] = SHARED
    if is_any_shared:
        kinds["shared keys"] = SHARED_KEYS
    if any(layer.reads_far is not None for layer in picture.layers):
        kinds["far field: summaries"] = FAR
    swatches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in kinds.values()]
    if swatches:
        axis.legend(swatches, kinds, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(-0.02, 1.02),
                    borderaxespad=0, handlelength=1, handleheight=1)  # fmt: skip
    axis.annotate("\n".join(picture.facts), (0, 0), xycoords="axes fraction", fontsize=8.5, color=MUTED,
                  va="bottom", linespacing=1.45)  # fmt: skip


def _two_rows_of_axes(pyplot: Any, shape: float, columns: int) -> tuple[Any, list[Any], list[Any]]:
    """Pictures of one shape (width over height) side by side above, a square below each."""
    shape = min(2.5, max(0.62, shape))
    gap, head, foot = 0.42, 0.62, 0.34
    height = min(3.0, 17.0 / (columns * shape))
    width = shape * height
    square = min(width, 3.0)
    size = columns * (width + gap) + gap, head + height + gap + square + foot
    figure = pyplot.figure(figsize=size)
    above, below = [], []
    for column in range(columns):
        left = (gap + column * (width + gap)) / size[0]
        box = (left, (foot + square + gap) / size[1], width / size[0], height / size[1])
        above.append(figure.add_axes(box, anchor="NW"))
        wide = width if column == 0 else square
        below.append(figure.add_axes((left, foot / size[1], wide / size[0], square / size[1]), anchor="NW"))
    return figure, above, below


def _picture_frame(axis: Any, height: int, width: int) -> None:
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(height - 0.5, -0.5)
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])
    _thin_spines(axis)


def _thin_spines(axis: Any) -> None:
    for spine in axis.spines.values():
        spine.set_color("#c4c9d2")
        spine.set_linewidth(0.8)


def _title(axis: Any, title: str, subtitle: str) -> None:
    axis.annotate(title, (0, 1), (0, 21), xycoords="axes fraction", textcoords="offset points",
                  fontsize=11.5, fontweight="bold", color=INK)  # fmt: skip
    axis.annotate(subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points",
                  fontsize=9, color=MUTED)  # fmt: skip


def _save(figure: Any, path: Path) -> None:
    """Write the whole picture or nothing, without the date, so that equal pictures are equal files."""
    import matplotlib
    import matplotlib.pyplot as pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".nearfield-{os.getpid()}.part")
    kind = "svg" if path.suffix.lower() == ".svg" else "png"
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "nearfield"}):
            figure.savefig(part, format=kind, dpi=110, facecolor="white", metadata=metadata)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        pyplot.close(figure)
