"""Tiles of a curve: which tokens are shared, where the tiles are cut, and which tile every token belongs to.

An image's tokens stand in the sequence as `[shared, ring]`. The shared tokens were taken out of the curve; the ring is
what is left of it, closed. The ring is cut into tiles, and the cuts slide from layer to layer. Every cut lies on a
multiple of `unit` in the sequence, so that no block of queries belongs to two tiles. Tiles are therefore up to a unit
larger or smaller than an even share, but there are exactly as many as asked for (fewer only where a tile would be
smaller than a unit).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.layout import curves
from nearfield.layout.geometry import Geometry, Grid, Shortened, Span

Curve = Literal["auto", "hilbert", "hilbert-closed", "morton", "raster"]
Shared = Literal["centre", "distributed", "none"]

_REGIONS_PER_SIDE = 4
_NO_CLOSED = "A closed curve needs an even number of tokens and two sides longer than 1."


class Segment(NamedTuple):
    """One image in its order.

    Args:
        order: `[n]` raster index of each token, the shared ones first.
        start: where the image begins in the sequence.
        places: for each shared token, how many tokens of the ring precede it on the curve.
    """

    order: Tensor
    start: int
    places: Tensor

    @property
    def num_shared(self) -> int:
        return len(self.places)

    @property
    def shared(self) -> Span:
        return self.start, self.start + self.num_shared

    @property
    def ring(self) -> Span:
        return self.start + self.num_shared, self.start + len(self.order)


def segments_of(
    geometry: Geometry, curve: Curve, shared: Shared, shared_tokens: int | None, unit: int | None = None
) -> tuple[Segment, ...]:
    """The order of every image of a geometry. Rings begin on a multiple of `unit` where there is a shared region.

    By default the unit is `shared_unit` of each image, whatever blocks plans have: one order serves every device.
    Merged tokens keep their order, and so does what they were merged from: shared tokens first.
    """
    if isinstance(geometry, Shortened):
        assert geometry.whole is not None
        whole = segments_of(geometry.whole, curve, shared, shared_tokens, unit)
        parts = zip(whole, geometry.image_spans, geometry.runs_of_images(), strict=True)
        return tuple(_shortened(segment, start, runs) for segment, (start, _), runs in parts)
    segments = []
    for grid, (start, stop) in zip(geometry.images, geometry.image_spans, strict=True):
        order = curve_order(grid, curve)
        count = 0
        if shared != "none":
            wanted = default_shared(grid) if shared_tokens is None else shared_tokens
            count = aligned_count(wanted, start, stop, unit or shared_unit(wanted))
        is_shared = torch.zeros(len(order), dtype=torch.bool, device="cpu")
        is_shared[_closest(grid, count, 1 if shared == "centre" else _REGIONS_PER_SIDE)] = True
        on_curve = is_shared[order]
        places = (~on_curve).cumsum(0)[on_curve]
        segments.append(Segment(torch.cat([order[on_curve], order[~on_curve]]), start, places))
    return tuple(segments)


def _shortened(segment: Segment, start: int, runs: Sequence[tuple[int, int]]) -> Segment:
    """An image of which some tokens are left of every run. A run may not hold shared tokens and others."""
    lengths, counts = torch.tensor(runs, device="cpu").unbind(1)
    ends, ends_left = lengths.cumsum(0), counts.cumsum(0)
    begins, begins_left = ends - lengths, ends_left - counts
    num_runs = int(torch.searchsorted(ends, segment.num_shared, right=True))
    num_shared = int(counts[:num_runs].sum())
    if int(lengths[:num_runs].sum()) != segment.num_shared:
        wrong_value(
            "runs", f"end where the {segment.num_shared} shared tokens do", list(runs[: num_runs + 1])
        )
    old = _stand_ins(runs)[:num_shared]
    place = (segment.num_shared + segment.places[old]).clamp(max=len(segment.order) - 1)
    run = torch.searchsorted(ends, place, right=True)
    places = begins_left[run] + (place - begins[run]) * counts[run] // lengths[run] - num_shared
    return Segment(torch.arange(int(ends_left[-1]), device="cpu"), start, places.clamp(min=0))


def _stand_ins(runs: Sequence[tuple[int, int]]) -> Tensor:
    """For each token that is left of runs, one of those that were there: what is left of a run stands for it evenly."""
    lengths, counts = torch.tensor(runs, device="cpu").unbind(1)
    run = torch.arange(len(runs), device="cpu").repeat_interleave(counts)
    rank = torch.arange(len(run), device="cpu") - (counts.cumsum(0) - counts)[run]
    return (lengths.cumsum(0) - lengths)[run] + (2 * rank + 1) * lengths[run] // (2 * counts[run])


class Coordinates(NamedTuple):
    """Where the tokens of an image are in it.

    Args:
        places: `[n, axes]` float64, in the order of the sequence.
        sides: `[axes]` float64, of the grid.
    """

    places: Tensor
    sides: Tensor


def coordinates(
    geometry: Geometry, curve: Curve, shared: Shared, shared_tokens: int | None
) -> list[Coordinates]:
    """Of every image, all with as many axes as the one that has most. Merged tokens are where some of theirs were."""
    whole = geometry.whole if isinstance(geometry, Shortened) else None
    of = geometry if whole is None else whole
    axes = max(map(len, of.images))
    found = []
    for grid, segment in zip(of.images, segments_of(of, curve, shared, shared_tokens), strict=True):
        sides = (1,) * (axes - len(grid)) + grid
        places = torch.stack(torch.unravel_index(segment.order, sides), dim=1)
        found.append(Coordinates(places.double(), torch.tensor(sides, dtype=torch.float64, device="cpu")))
    if isinstance(geometry, Shortened):
        runs = geometry.runs_of_images()
        found = [
            image._replace(places=image.places[_stand_ins(mine)])
            for image, mine in zip(found, runs, strict=True)
        ]
    return found


def curve_order(grid: Grid, curve: Curve) -> Tensor:
    if curve == "morton":
        return curves.morton(grid)
    if curve == "raster":
        return curves.raster(grid)
    if curve != "hilbert-closed":
        return curves.hilbert(grid, closed=None if curve == "auto" else False)
    try:
        return curves.hilbert(grid, closed=True)
    except ValueError:
        sides = "x".join(map(str, grid))
        wrong_value("curve", f'be "auto" or "hilbert" for a grid of {sides}', repr(curve), _NO_CLOSED)


def default_shared(grid: Grid) -> int:
    """The tokens of a box with a quarter of each side (at least one token)."""
    return math.prod(max(1, side // 4) for side in grid)


def shared_unit(wanted: int) -> int:
    """The largest block that kernels use, of those that a shared region of this size can fill; at least 16."""
    return max(unit for unit in (16, 32, 64, 128) if unit <= max(wanted, 16))


def aligned_count(wanted: int, start: int, stop: int, unit: int) -> int:
    """The number of shared tokens nearest to `wanted` after which the ring begins on a multiple of `unit`."""
    if wanted == 0:
        return 0
    end = round((start + wanted) / unit) * unit
    if end <= start:
        end = (start // unit + 1) * unit
    return min(end, stop) - start


def _closest(grid: Grid, count: int, regions: int) -> Tensor:
    """The `count` tokens closest to the centres of `regions` equal boxes per side, shared out evenly among them.

    Distance is measured in sides of the box (the largest over the axes, then the sum), so a region has the shape of
    the image.
    """
    region = torch.zeros(grid, dtype=torch.int64, device="cpu")
    largest, total = (torch.zeros(grid, dtype=torch.float64, device="cpu") for _ in range(2))
    for axis, side in enumerate(grid):
        number = min(regions, side)
        place = (torch.arange(side, device="cpu", dtype=torch.float64) + 0.5) * number / side
        box = place.floor()
        view = [-1 if other == axis else 1 for other in range(len(grid))]
        distance = (place - box - 0.5).abs().view(view)
        region = region * number + box.long().view(view)
        largest, total = torch.maximum(largest, distance), total + distance
    order = (largest * 1e3 + total).flatten().argsort(stable=True)
    order = order[region.flatten()[order].argsort(stable=True)]
    sizes = region.flatten().bincount()
    rank = torch.arange(len(order), device="cpu") - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return order[rank.argsort(stable=True)[:count]]


def cuts(ring: Span, tiles: int, shift: tuple[int, int], unit: int) -> Tensor:
    """Where the tiles begin, `[tiles + 1]`: ascending positions on the ring, unwrapped; the last is the first + n.

    Args:
        shift: how far the cuts are moved, as a fraction of a tile: `(phase, cycle)`, with `phase < cycle`.
        unit: cuts lie on multiples of it in the sequence (or at the ends of the ring).
    """
    start, stop = ring
    n = stop - start
    phase, cycle = shift
    parts = tiles * cycle
    # In whole numbers: a quotient of tensors has torch's default dtype, which may be a short one.
    place = start * parts + (torch.arange(tiles, device="cpu") * cycle + phase) * n
    rounded = (2 * place + unit * parts) // (2 * unit * parts) * unit
    begins = rounded.clamp(start, stop) - start
    return torch.cat([begins, begins[:1] + n])


def tile_at(positions: Tensor, begins: Tensor) -> Tensor:
    """The tile of each position on the ring (positions from 0 to n; n is 0 again)."""
    n = int(begins[-1] - begins[0])
    positions = positions % max(n, 1)
    unwrapped = torch.where(positions < begins[0], positions + n, positions)
    return (torch.searchsorted(begins, unwrapped, right=True) - 1).clamp(max=len(begins) - 2)


def tile_spans(ring: Span, begins: Tensor) -> Tensor:
    """The tokens of each tile, `[tiles, 2, (start, stop)]`: up to the end of the ring, and from its start."""
    start, stop = ring
    n = stop - start
    first, last = begins[:-1], begins[1:]
    before = torch.stack([first.clamp(max=n), last.clamp(max=n)], dim=-1)
    after = torch.stack([(first - n).clamp(min=0), (last - n).clamp(min=0)], dim=-1)
    return torch.stack([before, after], dim=1) + start
