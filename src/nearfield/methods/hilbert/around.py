"""What lies around the tokens of a row in the image: which stretches of a curve are read exactly, where nothing is cut.

A row is a run of the curve, hence a patch of the image. It reads the stretches of the ring that are nearest to it in
the image, as many tokens as a tile would hold. So a token at the edge of its row reads beyond it on every side, whereas
one at the edge of a tile reads nothing of what is next to it.
"""

import math

import torch
from torch import Tensor

from nearfield import tiling
from nearfield.geometry import Geometry, Span
from nearfield.methods.hilbert.layout import Layout, Pattern

_MOST_DISTANCES = 2**22
"""Computed at a time."""

_CENTRES = 1e-3
"""What the distance of the centres counts beside that of the tokens: it decides between stretches that are as near."""


def spans_around(pattern: Pattern, geometry: Geometry, layout: Layout, q_block: int, k_block: int) -> Tensor:
    """The spans of the rings that each row reads, `[rows, spans, (start, stop)]`.

    They lie on multiples of the block of keys and of the windows of a far field, so that no window is read in part.
    """
    unit = k_block if pattern.far is None else math.lcm(k_block, pattern.far)
    images = tiling.coordinates(geometry, pattern.curve, pattern.shared, pattern.shared_tokens)
    found = [torch.zeros(-(-geometry.num_tokens // q_block), 0, 2, dtype=torch.int64, device="cpu")]
    for segment, own in zip(layout.segments, images, strict=True):
        if segment.num_shared < len(segment.order):
            seen = _in_rows(geometry, images, own.sides, q_block)
            found.append(_nearest(seen, own.places[segment.num_shared :], segment.ring, layout.tiles, unit))
    return torch.cat(found, dim=1)


def _in_rows(geometry: Geometry, images: list[tiling.Coordinates], sides: Tensor, q_block: int) -> Tensor:
    """Where the tokens of each row are in an image with other sides, `[rows, q_block, axes]`; NaN for text."""
    rows = -(-geometry.num_tokens // q_block)
    places = torch.full((rows * q_block, len(sides)), math.nan, dtype=torch.float32, device="cpu")
    for (start, stop), image in zip(geometry.image_spans, images, strict=True):
        places[start:stop] = (image.places + 0.5) * (sides / image.sides) - 0.5
    return places.view(rows, q_block, -1)


def _nearest(rows: Tensor, ring: Tensor, span: Span, tiles: int, unit: int) -> Tensor:
    """The stretches of a ring that are nearest to each row, `[rows, spans, 2]`: about a tile's tokens, and its own."""
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
    distance = _distances(rows, low, high)
    row_begins = torch.arange(len(rows), device="cpu")[:, None] * rows.shape[1]
    is_own = (spans[:, 0] < row_begins + rows.shape[1]) & (spans[:, 1] > row_begins)
    distance.masked_fill_(is_own, -1.0)
    wanted = max(-(-number // tiles), int(is_own.sum(dim=1).max()))
    return spans[distance.argsort(dim=1, stable=True)[:, :wanted]]


def _distances(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far the boxes `low ... high` are from the tokens of each row, on average, `[rows, boxes]`."""
    found = []
    for some in rows.split(max(1, _MOST_DISTANCES // (rows.shape[1] * len(low)))):
        square = some.new_zeros(*some.shape[:2], len(low))
        for place, first, last in zip(some.unbind(-1), low.T, high.T, strict=True):
            beyond = torch.maximum(first - place[..., None], place[..., None] - last).clamp_(min=0)
            square += beyond.square_()
        centres = torch.cdist(some.nanmean(dim=1), (low + high) / 2)
        found.append(square.sqrt_().nanmean(dim=1) + _CENTRES * centres)
    return torch.cat(found)
