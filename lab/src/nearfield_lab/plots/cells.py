"""Tokens where they stand in an image, or in frames of a video: cells, lines between them, the way of a curve."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield_lab.plots.style import INK, SHADE, frame_without_ticks, rgb, wheel

_MOST_VECTORS = 4096
"""Lines that a vector picture holds as such; more of them are drawn as points."""


class Canvas(NamedTuple):
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


def canvas_of(grid: tuple[int, ...]) -> Canvas:
    """A picture is its own canvas. Of a video up to four frames, from the first to the last, stand in two rows."""
    height, width = grid[-2:]
    cells = torch.arange(math.prod(grid)).view(-1, height, width)
    if len(cells) == 1:
        return Canvas(cells[0], [0], height * width)
    count = min(4, len(cells))
    frames = [round(index * (len(cells) - 1) / (count - 1)) for index in range(count)]
    down, gap = -(-count // 2), max(1, width // 16)
    drawn = torch.full((down * (height + gap) - gap, 2 * width + gap), -1)
    for index, frame in enumerate(frames):
        y, x = index // 2 * (height + gap), index % 2 * (width + gap)
        drawn[y : y + height, x : x + width] = cells[frame]
    return Canvas(drawn, frames, height * width)


def draw_curve_lines(axis: Any, order: Tensor, canvas: Canvas) -> bool:
    """Draws the steps inside each frame that is shown; returns whether a picture's curve ends next to its start."""
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
    colours = [wheel(index / max(1, len(start))) for index in drawn.tolist()]
    style: dict[str, Any] = {
        "linewidths": max(0.6, min(3.0, 110 / max(canvas.cells.shape))),
        "capstyle": "round",
    }
    many = len(segments) > _MOST_VECTORS
    axis.add_collection(LineCollection(segments, colors=colours, rasterized=many, **style))
    return closes


def draw_cells(axis: Any, colours: Tensor, label: Tensor, canvas: Canvas, linewidth: float = 1.4) -> None:
    """Cells in colours given in raster order, with white lines where labels differ; gaps stay white."""
    drawn = torch.where(canvas.shown[..., None], canvas.of(colours), 1.0)
    axis.imshow(drawn.numpy(), interpolation="nearest", aspect="equal")
    _draw_borders(axis, torch.where(canvas.shown, canvas.of(label), -1), colors="white", linewidths=linewidth)
    picture_frame(axis, *canvas.cells.shape)


def _draw_borders(axis: Any, label: Tensor, **style: Any) -> None:
    from matplotlib.collections import LineCollection

    right = (label[:, 1:] != label[:, :-1]).nonzero().tolist()
    below = (label[1:] != label[:-1]).nonzero().tolist()
    lines = [[(x + 0.5, y - 0.5), (x + 0.5, y + 0.5)] for y, x in right]
    lines += [[(x - 0.5, y + 0.5), (x + 0.5, y + 0.5)] for y, x in below]
    many = len(lines) > _MOST_VECTORS
    axis.add_collection(LineCollection(lines, capstyle="projecting", rasterized=many, **style))


def outline(axis: Any, canvas: Canvas, is_shared: Tensor) -> None:
    """A dark line around what is shared."""
    _draw_borders(axis, canvas.shown & canvas.of(is_shared), colors=INK, linewidths=1.5)


def shade(axis: Any, canvas: Canvas, is_shared: Tensor) -> None:
    inside = canvas.shown & canvas.of(is_shared)
    cells = torch.where(inside[..., None], rgb(SHADE), 1.0)
    axis.imshow(cells.numpy(), interpolation="nearest", aspect="equal")


def picture_frame(axis: Any, height: int, width: int) -> None:
    axis.set_xlim(-0.5, width - 0.5)
    axis.set_ylim(height - 0.5, -0.5)
    axis.set_aspect("equal")
    frame_without_ticks(axis)
