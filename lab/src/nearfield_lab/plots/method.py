"""A method on one image: its curve, tiles or blocks of some layers, and what each reads: `nearfield explain --plot`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield import Geometry
from nearfield.methods import View
from nearfield_lab.plots.cells import (
    Canvas,
    canvas_of,
    draw_cells,
    draw_curve_lines,
    outline,
    picture_frame,
    shade,
)
from nearfield_lab.plots.figures import save, two_rows_of_axes
from nearfield_lab.plots.masks import mask_frame, paint
from nearfield_lab.plots.style import FAR, MUTED, SHARED, SHARED_KEYS, heading, rgb, swatches, tile_colours


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


class Reading(NamedTuple):
    """What one block of queries reads of the image; all in raster order.

    Args:
        block: its number, as in `LayerPicture.tile`.
        exactly: `[n]` bool, which tokens.
        summary: `[n]` int64, the summary that each other token is read in, -1 for none.
        title, subtitle: what to say above it.
    """

    block: int
    exactly: Tensor
    summary: Tensor
    title: str
    subtitle: str


class MethodPicture(NamedTuple):
    """A method on one image, ready to be drawn.

    Args:
        view: of the first layer: the curve, the order of tokens, what is shared, and what one colour stands for.
        q_block, k_block: tokens per row and column of the masks.
        facts: lines to print next to the masks.
        readings: of up to two blocks of the first layer, where there are no tiles that show what is read.
    """

    geometry: Geometry
    view: View
    num_tiles: int
    q_block: int
    k_block: int
    layers: Sequence[LayerPicture]
    facts: Sequence[str]
    readings: Sequence[Reading] = ()


def method_overview(path: Path, picture: MethodPicture) -> None:
    """The curve and the tiles of each layer above, who reads whom in each below, at the right what blocks read."""
    canvas = canvas_of(picture.geometry.grid)
    height, width = canvas.cells.shape
    figure, above, below = two_rows_of_axes(width / height, 1 + len(picture.layers) + bool(picture.readings))
    shade(above[0], canvas, picture.view.is_shared)
    draw_curve_lines(above[0], picture.view.curve, canvas)
    picture_frame(above[0], height, width)
    slices = f"; frames {', '.join(map(str, canvas.frames))}" if len(picture.geometry.grid) == 3 else ""
    heading(above[0], picture.view.curve_name, "x".join(map(str, picture.geometry.grid)) + slices)
    _write_facts(below[0], picture)
    number = len(picture.layers)
    for axis, reading in zip([above[-1], below[-1]][: len(picture.readings)], picture.readings, strict=True):
        _draw_reading(axis, picture, reading, canvas)
    if len(picture.readings) == 1:
        below[-1].set_axis_off()
    axes = zip(picture.layers, above[1 : 1 + number], below[1 : 1 + number], strict=True)
    for layer, tiles_axis, mask_axis in axes:
        label = torch.where(picture.view.is_shared & picture.view.shared_reads_all, -2, layer.tile)
        draw_cells(tiles_axis, _cell_colours(picture, layer), label, canvas)
        outline(tiles_axis, canvas, picture.view.is_shared)
        heading(tiles_axis, f"{picture.view.group_name} of layer {layer.layer}", layer.subtitle)
        draw_layer(mask_axis, picture, layer)
    save(figure, path)


def _draw_reading(axis: Any, picture: MethodPicture, reading: Reading, canvas: Canvas) -> None:
    """The block in its colour, what else it reads exactly in a lighter one, summaries as patches, the rest white."""
    own = picture.layers[0].tile == reading.block
    colour = tile_colours(picture.num_tiles)[reading.block]
    colours = torch.where(reading.summary[:, None] >= 0, _lighter(rgb(FAR), 0.35), 1.0)
    colours[reading.exactly] = _lighter(colour, 0.5)
    colours[reading.exactly & picture.view.is_shared] = rgb(SHARED_KEYS)
    colours[own] = colour
    label = torch.where(reading.exactly, -2, reading.summary)
    draw_cells(axis, colours, torch.where(own, -3, label), canvas, linewidth=0.8)
    heading(axis, reading.title, reading.subtitle)


def _lighter(colour: Tensor, share: float) -> Tensor:
    """So much of a colour, and white."""
    return 1 - share * (1 - colour)


def _cell_colours(picture: MethodPicture, layer: LayerPicture) -> Tensor:
    """Tiles in their colours; shared cells grey, or half so where they also belong to a tile."""
    colours = tile_colours(picture.num_tiles)[layer.tile]
    mixed = rgb(SHARED) if picture.view.shared_reads_all else (colours + rgb(SHARED)) / 2
    return torch.where(picture.view.is_shared[:, None], mixed, colours)


def draw_layer(axis: Any, picture: MethodPicture, layer: LayerPicture) -> None:
    """Blocks that are read, in the colour of the query's tile; text and shared keys grey; summaries at the right."""
    num_tokens = picture.geometry.text + len(picture.view.sequence)
    row_tile, row_kind = _in_sequence(picture, layer, picture.q_block)
    _, column_kind = _in_sequence(picture, layer, picture.k_block)
    colours = tile_colours(picture.num_tiles)[row_tile]
    reads_all = (row_kind == 0) | ((row_kind == 1) & picture.view.shared_reads_all)
    colours[reads_all] = rgb(SHARED)
    cells = colours[:, None].expand(-1, len(column_kind), -1).clone()
    cells[:, column_kind == 0] = rgb(SHARED)
    cells[(~reads_all)[:, None] & (column_kind == 1)[None]] = rgb(SHARED_KEYS)
    cells[~layer.reads] = 1.0
    height = len(row_kind) * picture.q_block
    paint(axis, cells, len(column_kind) * picture.k_block, height)
    end = float(num_tokens)
    if layer.reads_far is not None:
        gap = 0.02 * num_tokens
        end = num_tokens + gap + layer.reads_far.shape[1]
        far = torch.where(layer.reads_far[..., None], rgb(FAR), 1.0)
        paint(axis, far, end, height, left=num_tokens + gap)
    mask_frame(axis, num_tokens, end)


def _in_sequence(picture: MethodPicture, layer: LayerPicture, block: int) -> tuple[Tensor, Tensor]:
    """The tile of the token in the middle of each block, and its kind: 0 text, 1 shared, 2 of a tile only."""
    count = -(-(picture.geometry.text + len(picture.view.sequence)) // block)
    middle = torch.arange(count) * block + block // 2 - picture.geometry.text
    token = picture.view.sequence[middle.clamp(0, len(picture.view.sequence) - 1)]
    kind = torch.where(picture.view.is_shared[token], 1, 2)
    return layer.tile[token], torch.where(middle < 0, 0, kind)


def _write_facts(axis: Any, picture: MethodPicture) -> None:
    """A legend, and below it what the method comes to."""
    axis.set_axis_off()
    kinds = {}
    is_any_shared = bool(picture.view.is_shared.any())
    names = ["text"] * bool(picture.geometry.text) + ["shared queries"] * (
        is_any_shared and picture.view.shared_reads_all
    )
    if names:
        kinds[" and ".join(names)] = SHARED
    if is_any_shared:
        kinds["shared keys"] = SHARED_KEYS
    if any(layer.reads_far is not None for layer in picture.layers):
        kinds["far field: summaries"] = FAR
    if kinds:
        axis.legend(swatches(kinds.values()), kinds, frameon=False, fontsize=9, loc="upper left",
                    bbox_to_anchor=(-0.02, 1.02), borderaxespad=0, handlelength=1, handleheight=1)  # fmt: skip
    axis.annotate("\n".join(picture.facts), (0, 0), xycoords="axes fraction", fontsize=8.5, color=MUTED,
                  va="bottom", linespacing=1.45)  # fmt: skip
