"""Where the tokens of every image stand, and into how many tiles they are cut."""

import math
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nearfield.layout import Curve, Geometry, Grid, Ordering, Segment, Shared, Shortened, curves, tiling
from nearfield.plan import check_block

Near = Literal["tile", "around"]
Share = Literal["two-way", "keys"]
TextReads = Literal["all", "summary"]

DEFAULT_TILES = 16

_LEAST_AROUND = 512
"""Tokens that are read around a block unless somebody says how many: four blocks of 128, which GPUs like best. Two such
blocks would leave out much of what is next to the tokens at the edge."""


class Pattern(NamedTuple):
    """The fields of the method that decide who reads whom: what is kept of a geometry is kept by these alone."""

    near: Near
    tiles: int | None
    tile_size: int | None
    cycle: int
    shared: Shared
    share: Share
    shared_tokens: int | None
    curve: Curve
    far: int | None
    text_reads: TextReads


class Layout(NamedTuple):
    """The images of a geometry in their order.

    Args:
        tiles: how many each ring is cut into.
        unit: cuts lie on multiples of it in the sequence.
    """

    segments: tuple[Segment, ...]
    tiles: int
    unit: int

    def cuts(self, segment: Segment, phase: int, cycle: int) -> Tensor:
        """Where the tiles of an image begin on its ring, in one phase of the cycle."""
        return tiling.cuts(segment.ring, self.tiles, (phase, cycle), self.unit)


def curve_of(pattern: Pattern, grid: Grid) -> curves.Choice | None:
    """The Hilbert curve of a grid; None where another order was asked for."""
    if pattern.curve in ("morton", "raster"):
        return None
    return curves.choose(grid, closed={"auto": None, "hilbert": False}.get(pattern.curve, True))


def segments_of(pattern: Pattern, geometry: Geometry) -> tuple[Segment, ...]:
    return tiling.segments_of(geometry, pattern.curve, pattern.shared, pattern.shared_tokens)


@lru_cache(maxsize=64)
def ordering_of(pattern: Pattern, geometry: Geometry, device: str) -> Ordering:
    with torch.inference_mode(False):
        return Ordering.joined([segment.order for segment in segments_of(pattern, geometry)]).to(device)


@lru_cache(maxsize=64)
def pieces_of(pattern: Pattern, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    """Of every image, how many tokens are shared and how many are not, where there are any."""
    segments = segments_of(pattern, geometry)
    lengths = ((segment.num_shared, len(segment.order) - segment.num_shared) for segment in segments)
    return tuple(tuple(length for length in pair if length) for pair in lengths)


@lru_cache(maxsize=64)
def layout_of(pattern: Pattern, geometry: Geometry, q_block: int) -> Layout:
    unit = q_block if pattern.far is None else math.lcm(q_block, pattern.far)
    segments = segments_of(pattern, geometry)
    tiles = pattern.tiles or DEFAULT_TILES
    whole = _whole(geometry)
    size = _tile_size(pattern, whole)
    if size is not None:
        # Tiles of merged tokens cover as much of the image.
        start, stop = segments_of(pattern, whole)[0].ring
        tiles = max(1, round((stop - start) / size))
    return Layout(segments, tiles, unit)


def block_sizes(
    pattern: Pattern,
    geometry: Geometry,
    q_block: int | None,
    k_block: int | None,
    device: torch.device | str,
) -> tuple[int, int]:
    """Block sizes that suit a device: whole warpgroups on a GPU; small ones, which follow tiles closely, elsewhere.

    Tiles are cut at multiples of a block. Where they are small, so are the blocks: a tile of less than one and a half
    could not slide.

    What is read around a block of queries must reach beyond it on all sides, so it holds at least three times as many
    tokens, in eight blocks or more, unless it is smaller than blocks can be. No two blocks of queries read the same
    there, so that small ones suit no device.
    """
    tile = _tile(pattern, geometry)
    is_around = pattern.near == "around"
    if q_block is None:
        largest = 128 if is_around or torch.device(device).type == "cuda" else 16
        q_block = _block_within(min(largest, tile / (3 if is_around else 1.5)))
    if k_block is None:
        # Runs of 32 are no squares, and those around a square are far from it with their other half.
        k_block = _block_within(tile / 8, but=32) if is_around else q_block
    check_block("q_block", q_block)
    check_block("k_block", k_block)
    return q_block, k_block


def _tile(pattern: Pattern, geometry: Geometry) -> float:
    """Tokens of a tile; of merged ones it covers as much of the image."""
    count, whole = math.prod(geometry.grid), _whole(geometry)
    size = _tile_size(pattern, whole)
    if size is None:
        return count / (pattern.tiles or DEFAULT_TILES)
    return size * (count / math.prod(whole.grid))


def _tile_size(pattern: Pattern, geometry: Geometry) -> float | None:
    """Tokens of a tile, or around a block, where no number of tiles says it."""
    if pattern.tile_size is not None:
        return pattern.tile_size
    if pattern.near == "tile" or pattern.tiles is not None:
        return None
    count = math.prod(geometry.grid)
    return max(count / DEFAULT_TILES, min(_LEAST_AROUND, count / 4))


def _whole(geometry: Geometry) -> Geometry:
    """What there was before tokens were merged."""
    if not isinstance(geometry, Shortened):
        return geometry
    return geometry.whole or geometry


def _block_within(most: float, but: int | None = None) -> int:
    """The largest block of at most this many tokens; at least 16."""
    return max(block for block in (16, 32, 64, 128) if block <= max(16, most) and block != but)
