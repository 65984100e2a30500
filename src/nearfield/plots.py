"""Pictures: a curve, its tiles, who reads whom, and benchmark bars. The only importer of matplotlib."""

import colorsys
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.plan import Plan

INK, MUTED, FAINT = "#22262e", "#6b7280", "#e3e6eb"
SHARED = "#4b5563"
_BAR_COLOURS = ("#2f6f9f", "#c27a2c", "#5a9367", "#8a6fae", "#b5545c")
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


def draw_curve(axis: Any, order: Tensor, grid: tuple[int, int]) -> None:
    """The curve through the cells, its colour running once around the wheel."""
    from matplotlib.collections import LineCollection

    height, width = grid
    points = torch.stack([order % width, order // width], dim=1).double()
    closes = len(order) > 2 and float((points[0] - points[-1]).norm()) <= 1.0
    path = torch.cat([points, points[:1]]) if closes else points
    segments = torch.stack([path[:-1], path[1:]], dim=1).tolist()
    colours = [_wheel(index / max(1, len(segments))) for index in range(len(segments))]
    line_width = max(0.6, min(3.0, 110 / max(height, width)))
    axis.add_collection(LineCollection(segments, colors=colours, linewidths=line_width, capstyle="round"))
    _picture_frame(axis, height, width)
    _title(axis, f"Hilbert curve, {height}x{width}", "closed: ends beside its start" if closes else "open")


def draw_tiles(axis: Any, order: Tensor, grid: tuple[int, int], run: int, shift: int) -> None:
    """Every cell in the colour of its tile, with lines where tiles meet."""
    height, width = grid
    tile_of_cell = torch.empty(len(order), dtype=torch.long)
    tile_of_cell[order] = _tile_of_position(len(order), run, shift)
    tile = tile_of_cell.view(height, width)
    colours = torch.tensor(_tile_colours(math.ceil(len(order) / run)))
    axis.imshow(colours[tile].numpy(), interpolation="nearest", aspect="equal")
    _draw_borders(axis, tile)
    _picture_frame(axis, height, width)


def draw_mask(axis: Any, plan: Plan, text: int, run: int, shift: int) -> None:
    """The plan's blocks; those of text rows and columns grey, the others in the colour of the query's tile."""
    reads = (plan.block_counts()[0, 0] > 0).cpu()
    rows = torch.arange(plan.num_rows) * plan.q_block + plan.q_block // 2
    columns = torch.arange(plan.num_columns) * plan.k_block + plan.k_block // 2
    image = plan.num_queries - text
    tile = _tile_of_position(image, run, shift)[(rows - text).clamp(0, image - 1)]
    colours = torch.tensor(_tile_colours(math.ceil(image / run)))
    cells = colours[tile][:, None].expand(-1, plan.num_columns, -1).clone()
    shared = (rows < text)[:, None] | (columns < text)[None]
    cells[shared] = torch.tensor([int(SHARED[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    cells[~reads] = 1.0
    extent = (0, plan.num_columns * plan.k_block, plan.num_rows * plan.q_block, 0)
    axis.imshow(cells.numpy(), interpolation="nearest", aspect="auto", extent=extent)
    axis.set_xlim(0, plan.num_keys)
    axis.set_ylim(plan.num_queries, 0)
    axis.set_box_aspect(1)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("keys", color=MUTED, fontsize=9, labelpad=3)
    axis.set_ylabel("queries", color=MUTED, fontsize=9, labelpad=3)
    _thin_spines(axis)


def benchmark_bars(path: Path, records: Sequence[dict[str, Any]], machine: str) -> None:
    """One bar per measured result: its rate on the kept pairs over the dense rate, and in it the speed-up."""
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    measured = [record for record in records if record["status"] == "ok"]
    impls = list(dict.fromkeys(record["impl"] for record in measured))
    colours = {impl: _BAR_COLOURS[index % len(_BAR_COLOURS)] for index, impl in enumerate(impls)}
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
    require_matplotlib()
    import matplotlib.pyplot as pyplot

    measured = [record for record in records if record["status"] == "ok"]
    others = list(dict.fromkeys(name for record in measured for name in record["speed_ups"]))
    colours = dict(zip(others, _BAR_COLOURS, strict=False))
    figure, axis = pyplot.subplots(figsize=(8.6, 1.3 + 0.62 * len(measured)))
    thickness = 0.8 / max(1, len(others))
    for place, record in enumerate(measured):
        for index, name in enumerate(others):
            if (speed_up := record["speed_ups"].get(name)) is not None:
                height = place - 0.4 + (index + 0.5) * thickness
                axis.barh(height, speed_up, height=0.92 * thickness, color=colours[name])
                axis.text(speed_up, height, f" {speed_up:.2f}x", va="center", fontsize=8, color=INK)
        _mark(axis, record["bound"], place, INK)
        if record["target"]:
            _mark(axis, record["target"], place, MUTED, dashed=True)
    axis.set_yticks(range(len(measured)), [record["case"] for record in measured])
    axis.set_ylim(len(measured) - 0.45, -0.55)
    axis.set_xscale("log")
    figures = [
        value for record in measured for value in (*record["speed_ups"].values(), record["bound"], 1.0)
    ]
    axis.set_xlim(min(figures, default=1) / 1.15, max(figures, default=1) * 1.35)
    ticks = [
        tick
        for tick in (0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 50)
        if axis.get_xlim()[0] < tick < axis.get_xlim()[1]
    ]
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(
        "speed-up of one attention call;  solid line: bound by pairs over the best dense, dashed: target"
    )
    _plain_bars(axis)
    _legend(pyplot, axis, colours, [f"over {name}" for name in others])
    axis.set_title(f"Hilbert on {machine}", loc="left", fontsize=11, color=INK, fontweight="bold", pad=9)
    figure.tight_layout()
    _save(figure, path)


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


def _draw_borders(axis: Any, tile: Tensor) -> None:
    from matplotlib.collections import LineCollection

    right = (tile[:, 1:] != tile[:, :-1]).nonzero().tolist()
    below = (tile[1:] != tile[:-1]).nonzero().tolist()
    lines = [[(x + 0.5, y - 0.5), (x + 0.5, y + 0.5)] for y, x in right]
    lines += [[(x - 0.5, y + 0.5), (x + 0.5, y + 0.5)] for y, x in below]
    axis.add_collection(LineCollection(lines, colors="white", linewidths=1.4, capstyle="projecting"))


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
    import matplotlib.pyplot as pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".nearfield-{os.getpid()}.part")
    try:
        figure.savefig(part, format="png", dpi=110, facecolor="white", metadata={"Software": None})
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
        pyplot.close(figure)
