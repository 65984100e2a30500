"""What lies around the tokens of a row in the image: which stretches of a curve are read exactly, without tiles.

A row is a run of the curve, hence a patch of the image. It reads the stretches of the ring that are nearest to it in
the image, as many tokens as a tile would hold; those that touch it first. So a token at the edge of its row reads
beyond it, whereas one at the edge of a tile reads nothing of what is next to it.

Patches and stretches are taken for the boxes around them: of a row those of its eighths, since it need not be a square.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.layout import Geometry, Span, tiling
from nearfield.methods.hilbert.layout import Pattern, layout_of

_PIECES = 8
"""The number of boxes that a row is divided into."""

_MOST_DISTANCES = 2**22
"""Computed at a time."""

_CENTRES = 1e-3
"""What the distance of the centres counts beside that of the boxes: it decides between stretches that are as near."""


class Boxes(NamedTuple):
    """The outermost places of sets of tokens, `[..., axes]` each."""

    low: Tensor
    high: Tensor

    @property
    def centre(self) -> Tensor:
        return (self.low + self.high) / 2


@lru_cache(maxsize=64)
def spans_around(pattern: Pattern, geometry: Geometry, q_block: int, k_block: int) -> Tensor:
    """The spans of the rings that each row reads, `[rows, spans, (start, stop)]`.

    They lie on multiples of the block of keys and of the windows of a far field, so that no window is read in part.
    """
    unit = k_block if pattern.far is None else math.lcm(k_block, pattern.far)
    layout = layout_of(pattern, geometry, q_block)
    images = tiling.coordinates(geometry, pattern.curve, pattern.shared, pattern.shared_tokens)
    found = [torch.zeros(-(-geometry.num_tokens // q_block), 0, 2, dtype=torch.int64, device="cpu")]
    for segment, image in zip(layout.segments, images, strict=True):
        if segment.num_shared < len(segment.order):
            rows = _in_rows(geometry, images, image.sides, q_block)
            ring = image.places[segment.num_shared :]
            found.append(_nearest(rows, ring, segment.ring, layout.tiles, unit))
    return torch.cat(found, dim=1)


def _in_rows(geometry: Geometry, images: list[tiling.Coordinates], sides: Tensor, q_block: int) -> Tensor:
    """Where the tokens of each row are in an image with other sides, `[rows, q_block, axes]`.

    Text that shares a row with image tokens is where one of these is; in rows of its own it is nowhere, NaN.
    """
    rows = -(-geometry.num_tokens // q_block)
    places = torch.full((rows * q_block, len(sides)), math.nan, dtype=torch.float64, device="cpu")
    for (start, stop), image in zip(geometry.image_spans, images, strict=True):
        places[start:stop] = (image.places + 0.5) * (sides / image.sides) - 0.5
    places[geometry.num_tokens :] = places[geometry.num_tokens - 1]
    found = places.view(rows, q_block, -1)
    is_somewhere = ~found.isnan().any(dim=2)
    some = is_somewhere.int().argmax(dim=1)
    one = found[torch.arange(rows, device="cpu"), some]
    return torch.where(is_somewhere[..., None], found, one[:, None])


def _nearest(rows: Tensor, ring: Tensor, span: Span, tiles: int, unit: int) -> Tensor:
    """The stretches of a ring that are nearest to each row, `[rows, spans, 2]`: as many as a tile has, and its own."""
    start, stop = span
    stretch = torch.arange(start, stop, device="cpu") // unit - start // unit
    number = int(stretch[-1]) + 1
    begins = (torch.arange(number + 1, device="cpu") + start // unit) * unit
    spans = torch.stack([begins[:-1], begins[1:]], dim=1).clamp(start, stop)
    index = stretch[:, None].expand_as(ring)
    low, high = (
        ring.new_empty(number, ring.shape[1]).scatter_reduce_(0, index, ring, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    distance = _distances(rows, Boxes(low, high))
    row_begins = torch.arange(len(rows), device="cpu")[:, None] * rows.shape[1]
    is_own = (spans[:, 0] < row_begins + rows.shape[1]) & (spans[:, 1] > row_begins)
    distance.masked_fill_(is_own, -torch.inf)
    wanted = max(-(-number // tiles), int(is_own.sum(dim=1).max()))
    nearest = spans[distance.argsort(dim=1, stable=True)[:, :wanted]]
    is_text = rows[:, 0, 0].isnan()  # which is near nothing
    return nearest.masked_fill_(is_text[:, None, None], 0)


def _distances(rows: Tensor, stretches: Boxes) -> Tensor:
    """How far stretches are from the pieces of each row, on average, `[rows, stretches]`; less than 0 if they touch."""
    pieces = rows.unflatten(1, (min(_PIECES, rows.shape[1]), -1))
    boxes = Boxes(pieces.amin(dim=2), pieces.amax(dim=2))
    touching = -2 * (stretches.high.amax() + 1)  # further from nothing than any two are apart
    found = []
    for some in torch.arange(len(rows), device="cpu").split(
        max(1, _MOST_DISTANCES // (pieces.shape[1] * len(stretches.low)))
    ):
        gaps = _gaps(Boxes(*(side[some] for side in boxes)), stretches)
        is_next = gaps.amin(dim=1) <= 1
        centres = _gaps(Boxes(*[boxes.centre[some]] * 2), Boxes(*[stretches.centre] * 2))
        found.append((gaps + _CENTRES * centres).mean(dim=1) + torch.where(is_next, touching, 0))
    return torch.cat(found)


def _gaps(first: Boxes, second: Boxes) -> Tensor:
    """The distance between boxes `[rows, pieces, axes]` and `[stretches, axes]`, `[rows, pieces, stretches]`."""
    square = first.low.new_zeros(*first.low.shape[:2], len(second.low))
    for axis in range(first.low.shape[2]):
        before, after = (side[..., axis, None] for side in first)
        gap = torch.maximum(second.low[:, axis] - after, before - second.high[:, axis]).clamp_(min=0)
        square += gap.square_()
    return square.sqrt_()
