"""The Hilbert method on one image, as a picture and in numbers: curve, tiles, shared region, who reads whom."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nearfield import Geometry, Hilbert, curves
from nearfield.layout import tiling
from nearfield.layout.tiling import Segment
from nearfield.methods import PlanLayer
from nearfield_lab.plots.cells import canvas_of
from nearfield_lab.plots.method import LayerPicture, MethodPicture, Reading, method_overview

_FINE, _COARSE, _FINE_TOKENS = 16, 64, 20_000
"""Keys per block of a mask. Pairs are counted in fine ones; beyond so many tokens nobody would see them drawn."""


class Shown(NamedTuple):
    """A method on a geometry, with everything that is drawn or printed about it."""

    geometry: Geometry
    method: Hilbert
    segment: Segment
    unit: int
    q_block: int
    layers: dict[int, PlanLayer]
    density: dict[int, float]

    def tiles(self, layer: int) -> int:
        number = self.method.tiles_in(layer)
        assert number is not None  # `tile_size` is not offered, and around blocks nobody asks
        return number

    @property
    def has_tiles(self) -> bool:
        return self.method.near == "tile"

    @property
    def is_shared(self) -> torch.Tensor:
        """`[n]` bool, tokens in raster order."""
        shared = torch.zeros(len(self.segment.order), dtype=torch.bool)
        shared[self.segment.order[: self.segment.num_shared]] = True
        return shared

    def num_colours(self, layer: int) -> int:
        """As many as `tile_of_cell` may tell apart."""
        return self.tiles(layer) if self.has_tiles else -(-self.geometry.num_tokens // self.q_block)

    def cuts(self, layer: int) -> torch.Tensor:
        """Where the tiles of a layer begin on the ring."""
        shift = layer % self.method.cycle, self.method.cycle
        return tiling.cuts(self.segment.ring, self.tiles(layer), shift, self.unit)

    def tile_of_cell(self, layer: int) -> torch.Tensor:
        """The tile of every token in raster order; shared tokens lie where the curve passes them.

        Where there are no tiles, the block of queries that it is in.
        """
        if not self.has_tiles:
            row = (torch.arange(len(self.segment.order)) + self.segment.start) // self.q_block
            return torch.empty_like(row).scatter_(0, self.segment.order, row - int(row[0]))
        start, stop = self.segment.ring
        tile = torch.zeros(len(self.segment.order), dtype=torch.long)
        if start < stop:
            positions = torch.cat([self.segment.places, torch.arange(stop - start)])
            tile[self.segment.order] = tiling.tile_at(positions, self.cuts(layer))
        return tile


def examine(geometry: Geometry, method: Hilbert, layers: Sequence[int], q_block: int | None = None) -> Shown:
    """Plans and tiles of the chosen layers. The tiles are cut by the functions that the method cuts them with.

    What is around a block depends on the blocks of keys: there they are the method's own, not finer ones.

    Args:
        q_block: by default what the method chooses on a CPU for the first of the layers.
    """
    first = method.plan(geometry, layers[0], heads=method.phases, q_block=q_block)
    q_block, is_around = first.q_block, method.near == "around"
    unit = q_block if method.far is None else math.lcm(q_block, method.far)
    (segment,) = tiling.segments_of(geometry, method.curve, method.shared, method.shared_tokens)
    coarse = _FINE if geometry.num_tokens <= _FINE_TOKENS else _COARSE
    k_blocks = (None, max(first.k_block, coarse)) if is_around else (_FINE, coarse)
    readers, density = {}, {}
    for layer in layers:
        fine, readers[layer] = (
            method.layer(geometry, layer, heads=method.phases, q_block=q_block, k_block=k_block)
            for k_block in k_blocks
        )
        density[layer] = fine.num_pairs / geometry.num_tokens**2
    return Shown(geometry, method, segment, unit, q_block, readers, density)


def draw(path: Path, shown: Shown) -> None:
    method_overview(path, picture(shown))


def picture(shown: Shown) -> MethodPicture:
    geometry, method = shown.geometry, shown.method
    return MethodPicture(
        grid=geometry.grid,
        text=geometry.text,
        curve=tiling.curve_order(geometry.grid, method.curve),
        curve_name=_curve_name(shown),
        sequence=shown.segment.order,
        is_shared=shown.is_shared,
        shared_reads_all=method.share == "two-way",
        num_tiles=max(map(shown.num_colours, shown.layers)),
        tile_name="Tiles" if shown.has_tiles else "Blocks of queries",
        q_block=shown.q_block,
        k_block=next(iter(shown.layers.values())).near.k_block,
        layers=[_layer_picture(shown, layer) for layer in shown.layers],
        facts=_facts(shown),
        readings=[] if shown.has_tiles else _readings(shown),
    )


def _layer_picture(shown: Shown, layer: int) -> LayerPicture:
    near, far = shown.layers[layer].near, shown.layers[layer].far
    head = "head 0: " if shown.method.interleave else ""
    slid = f"slid by {int(shown.cuts(layer)[0])}; " if shown.has_tiles else ""
    return LayerPicture(
        layer,
        shown.tile_of_cell(layer),
        near.block_counts()[0, 0] > 0,
        far.plan.block_counts()[0, 0] > 0 if far is not None else None,
        f"{head}{slid}{shown.density[layer]:.1%} of the pairs",
    )


def _readings(shown: Shown) -> list[Reading]:
    """What the block in the middle of the picture reads in the first of the layers, and the one in its first corner."""
    first, corner = _reading(shown, _middle(shown)), _reading(shown, 0)
    pictures = [first._replace(title="What a block reads")]
    if corner.block != first.block:
        pictures.append(corner._replace(subtitle=f"in the corner: {corner.subtitle}"))
    return pictures


def _middle(shown: Shown) -> int:
    """The token nearest to the middle of a frame that is drawn, of those that are not shared, by its raster index."""
    canvas = canvas_of(shown.geometry.grid)
    height, width = shown.geometry.grid[-2:]
    start = canvas.frames[len(canvas.frames) // 2] * canvas.frame_size
    cells = torch.arange(canvas.frame_size)
    distance = (cells // width - height // 2) ** 2 + (cells % width - width // 2) ** 2
    distance[shown.is_shared[start : start + canvas.frame_size]] += height**2 + width**2
    return start + int(distance.argmin())


def _reading(shown: Shown, cell: int) -> Reading:
    """Of the block that a token is in, by its raster index."""
    layer, reader = next(iter(shown.layers.items()))
    near, far, order = reader.near, reader.far, shown.segment.order
    tokens = torch.arange(len(order)) + shown.segment.start
    place = torch.empty_like(order).scatter_(0, order, tokens)  # in the sequence, of tokens in raster order
    row = int(place[cell]) // near.q_block
    exactly = near.block_counts()[0, 0, row] > 0
    summary, words = torch.full_like(place, -1), ""
    if far is not None:
        is_read = far.plan.block_counts()[0, 0, row] > 0
        window = (torch.searchsorted(far.starts, place, right=True) - 1).clamp(min=0)
        inside = (place >= far.starts[window]) & (place < (far.starts + far.sizes)[window])
        summary = torch.where(inside & is_read[window], window, -1)
        words = f", {int(is_read.sum()):,} summaries"
    exactly = exactly[place // near.k_block]
    words = f"{int(exactly.sum()):,} tokens exactly{words}"
    return Reading(int(shown.tile_of_cell(layer)[cell]), exactly, summary, "", words)


def _curve_name(shown: Shown) -> str:
    curve = shown.method.curve
    if curve in ("morton", "raster"):
        return f"{curve.capitalize()} order"
    closed = {"auto": None, "hilbert": False}.get(curve, True)
    is_closed = curves.choose(shown.geometry.grid, closed=closed).closed
    return f"Hilbert curve, {'closed' if is_closed else 'open'}"


def _sizes(shown: Shown, layer: int) -> list[int]:
    """Tokens of each tile that is not empty."""
    found: list[int] = shown.cuts(layer).diff().tolist()
    return [size for size in found if size]


def _num_around(shown: Shown) -> int:
    """Tokens of the ring that the block in its middle reads in the first of the layers."""
    near = next(iter(shown.layers.values())).near
    start, stop = shown.segment.ring
    begins = torch.arange(near.num_columns) * near.k_block
    inside = ((begins + near.k_block).clamp(max=stop) - begins.clamp(min=start)).clamp(min=0)
    row = min((start + stop) // 2 // near.q_block, near.num_rows - 1)
    return int(inside[near.block_counts()[0, 0, row] > 0].sum())


def _tile_fact(shown: Shown) -> str:
    if not shown.has_tiles:
        return f"{_num_around(shown):,} tokens around each block of {shown.q_block}"
    sizes = [size for layer in shown.layers for size in _sizes(shown, layer)]
    span = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{max(sizes, default=0)}"
    return f"{len(_sizes(shown, next(iter(shown.layers))))} tiles of {span} tokens"


def _facts(shown: Shown) -> list[str]:
    density = sum(shown.density.values()) / len(shown.density)
    text = f", {shown.geometry.text} of text" if shown.geometry.text else ""
    facts = [
        f"{shown.geometry.num_tokens:,} tokens{text}",
        _tile_fact(shown),
    ]
    if shown.segment.num_shared:
        manner = "read and are read by all" if shown.method.share == "two-way" else "are read by all"
        facts.append(f"{shown.segment.num_shared} shared tokens {manner}")
    if shown.method.text_reads == "summary" and shown.geometry.text:
        facts.append("text reads the image in summary")
    if shown.method.far is not None:
        weighted = "weighted " if shown.method.summary == "weighted" else ""
        facts.append(f"far field: {weighted}means of {shown.method.far} tokens")
    return [*facts, f"{density:.1%} of the pairs: at most {1 / density:.2f}x"]


def record(shown: Shown) -> dict[str, Any]:
    """The numbers, as plain values."""
    layers = [
        {
            "layer": layer,
            "shift": int(shown.cuts(layer)[0]) if shown.has_tiles else 0,
            "tiles": _sizes(shown, layer) if shown.has_tiles else [],
            "density": shown.density[layer],
            "bound_over_dense": 1 / shown.density[layer],
        }
        for layer in shown.layers
    ]
    return {
        "grid": list(shown.geometry.grid),
        "text": shown.geometry.text,
        "tokens": shown.geometry.num_tokens,
        "method": asdict(shown.method),
        "q_block": shown.q_block,
        "curve": _curve_name(shown),
        "shared_tokens": shown.segment.num_shared,
        "layers": layers,
        "description": shown.method.describe(shown.geometry, q_block=shown.q_block),
    }
