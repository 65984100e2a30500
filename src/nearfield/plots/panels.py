"""A picture of several panels, each drawn by a function on an axis: those of the documentation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.plots import cells
from nearfield.plots.cells import canvas_of, draw_curve_lines
from nearfield.plots.figures import require_matplotlib, row_of_axes, save
from nearfield.plots.style import BAR_COLOURS, FAR, MUTED, SHADE, heading, thin_spines


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

    figure, axes = row_of_axes(pyplot, [drawing.shape for drawing in drawings])
    for axis, drawing in zip(axes, drawings, strict=True):
        drawing.draw(axis)
        heading(axis, drawing.title, drawing.subtitle)
    save(figure, path)


def draw_cells(axis: Any, colours: Tensor, label: Tensor, grid: tuple[int, int]) -> None:
    """Cells of an image in colours, both in raster order, with lines where labels differ."""
    cells.draw_cells(axis, colours, label, canvas_of(grid))


def draw_path(axis: Any, order: Tensor, grid: tuple[int, int]) -> None:
    """The way of a sequence through the cells of an image."""
    draw_curve_lines(axis, order, canvas_of(grid))


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
    thin_spines(axis)
