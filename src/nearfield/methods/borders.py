"""Where a method parts neighbours: tokens that lie side by side in the image and do not read each other."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.layout import Geometry, Ordering
from nearfield.plan import Plan


class Borders(NamedTuple):
    """How often neighbouring tokens are apart (do not read each other, or are not merged together), from 0 to 1.

    Args:
        right: `[height, width - 1]`, between a token and the one to its right.
        below: `[height - 1, width]`, between a token and the one below it.
    """

    right: Tensor
    below: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        return self.right.shape[0], self.below.shape[1]


class Reads(NamedTuple):
    """How much of each block of tokens is read by each block, `[rows, columns]`, and how many tokens blocks have."""

    shares: Tensor
    q_block: int
    k_block: int

    @classmethod
    def of(cls, plan: Plan) -> "Reads":
        """On average over the heads of a plan."""
        shares = (plan.block_counts()[0] > 0).double().mean(dim=0).cpu()
        return cls(shares, plan.q_block, plan.k_block)


def check_flat(geometry: Geometry) -> None:
    """Borders are those of a picture."""
    if len(geometry.grid) != 2:
        hint = "Measure the frames of a video one by one."
        wrong_value("geometry", "have a grid of two sides", geometry, hint)


def borders_of_reads(ordering: Ordering, geometry: Geometry, layers: Sequence[Reads]) -> Borders:
    """On average over layers, how much of the reading between neighbours is missing."""
    check_flat(geometry)
    if not layers:
        wrong_value("layers", "name at least one layer", "none")
    count = math.prod(geometry.grid)
    position = (ordering.inverse[:count] + geometry.image_spans[0][0]).view(geometry.grid)
    read = []
    for reads in layers:
        row, column = position // reads.q_block, position // reads.k_block
        read.append(Borders(*(_mutual(reads.shares, row, column, axis) for axis in (1, 0))))
    right, below = (1 - torch.stack(shares).mean(dim=0) for shares in zip(*read, strict=True))
    return Borders(right, below)


def borders_of_regions(ordering: Ordering, geometry: Geometry, lengths: Sequence[int]) -> Borders:
    """The borders of consecutive regions of an order, 1 each."""
    check_flat(geometry)
    along = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    region = along[ordering.inverse[: math.prod(geometry.grid)]].view(geometry.grid)
    return Borders(*((region.diff(dim=axis) != 0).double() for axis in (1, 0)))


def _mutual(reads: Tensor, row: Tensor, column: Tensor, axis: int) -> Tensor:
    """How much of the two directions between neighbours along an axis is read."""
    length = row.shape[axis] - 1
    forward = reads[row.narrow(axis, 0, length), column.narrow(axis, 1, length)]
    backward = reads[row.narrow(axis, 1, length), column.narrow(axis, 0, length)]
    return (forward + backward) / 2
