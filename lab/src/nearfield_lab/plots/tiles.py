"""An image, its curve and the tiles along it: the picture of `nearfield demo`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.plan.plan import Plan
from nearfield_lab.plots.cells import canvas_of, draw_cells, draw_curve_lines, picture_frame
from nearfield_lab.plots.figures import row_of_axes, save
from nearfield_lab.plots.masks import mask_frame, paint
from nearfield_lab.plots.style import SHARED, heading, rgb, tile_colours


def overview(
    path: Path, order: Tensor, grid: tuple[int, int], text: int, run: int, layers: Sequence[tuple[int, Plan]]
) -> None:
    """One picture: the curve, the tiles of each layer (given as its shift and plan), and the last layer's mask."""
    figure, axes = row_of_axes([grid[1] / grid[0]] * (1 + len(layers)) + [1.0])
    draw_curve(axes[0], order, grid)
    for index, (axis, (shift, _)) in enumerate(zip(axes[1:-1], layers, strict=True)):
        draw_tiles(axis, order, grid, run, shift)
        moved = f", slid by {shift}" if index else ""
        heading(axis, f"Tiles of layer {index}", f"{math.ceil(len(order) / run)} x {run} tokens{moved}")
    shift, plan = layers[-1]
    draw_mask(axes[-1], plan, text, run, shift)
    heading(
        axes[-1],
        "Who reads whom",
        f"layer {len(layers) - 1}: {plan.density:.1%} of the pairs{'; grey: text' if text else ''}",
    )
    save(figure, path)


def draw_curve(axis: Any, order: Tensor, grid: tuple[int, int]) -> None:
    """The curve through the cells, its colour running once around the wheel."""
    height, width = grid
    closes = draw_curve_lines(axis, order, canvas_of(grid))
    picture_frame(axis, height, width)
    heading(axis, f"Hilbert curve, {height}x{width}", "closed: ends beside its start" if closes else "open")


def draw_tiles(axis: Any, order: Tensor, grid: tuple[int, int], run: int, shift: int) -> None:
    """Every cell in the colour of its tile, with lines where tiles meet."""
    tile_of_cell = torch.empty(len(order), dtype=torch.long)
    tile_of_cell[order] = _tile_of_position(len(order), run, shift)
    colours = tile_colours(math.ceil(len(order) / run))
    draw_cells(axis, colours[tile_of_cell], tile_of_cell, canvas_of(grid))


def draw_mask(axis: Any, plan: Plan, text: int, run: int, shift: int) -> None:
    """The plan's blocks; those of text rows and columns grey, the others in the colour of the query's tile."""
    reads = (plan.block_counts()[0, 0] > 0).cpu()
    rows = torch.arange(plan.num_rows) * plan.q_block + plan.q_block // 2
    columns = torch.arange(plan.num_columns) * plan.k_block + plan.k_block // 2
    image = plan.num_queries - text
    tile = _tile_of_position(image, run, shift)[(rows - text).clamp(0, image - 1)]
    colours = tile_colours(math.ceil(image / run))
    cells = colours[tile][:, None].expand(-1, plan.num_columns, -1).clone()
    cells[(rows < text)[:, None] | (columns < text)[None]] = rgb(SHARED)
    cells[~reads] = 1.0
    paint(axis, cells, plan.num_columns * plan.k_block, plan.num_rows * plan.q_block)
    mask_frame(axis, plan.num_queries, plan.num_keys)


def _tile_of_position(length: int, run: int, shift: int) -> Tensor:
    return (torch.arange(length) - shift) % length // run
