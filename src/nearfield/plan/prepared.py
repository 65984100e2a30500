"""What follows from the lists of a plan and is kept with it, because making it takes longer than using it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from nearfield.plan.plan import Plan

BOX = 64
"""The most keys of one of `Boxes`."""

Run = tuple[int, int]
"""Consecutive tokens: the first, and the one after the last."""

Runs = tuple[Run, ...]


class Boxes(NamedTuple):
    """Lists of single keys as stretches of consecutive ones: a copy engine loads a stretch at once.

    Args:
        offsets: `[b, h, rows + 1]` int32, as a plan's.
        boxes: `[b, h, capacity]` int32, each `first * 2 * BOX + length`.
    """

    offsets: Tensor
    boxes: Tensor


class Packing(NamedTuple):
    """How the lists of several rows are merged into one.

    Args:
        rows: how many.
        multiple: the length of a merged list is a multiple of this; ids that no row reads fill it up.
    """

    rows: int
    multiple: int


class Packed(NamedTuple):
    """The lists of a plan, merged.

    Args:
        bounds: `[b, h, 2 * lists]` int32: where each starts and how long it is.
        blocks: `[b, h, capacity]` int32, each `id * 2**rows` and a bit for each of the rows that read it.
        rows, multiple: see `Packing`.
    """

    bounds: Tensor
    blocks: Tensor
    rows: int
    multiple: int


@dataclass
class PreparedPlan:
    """Everything that is derived from the lists of a plan. `ops/lists` fills it; so do the plan's own methods.

    Args:
        transpose: the plan with the roles of queries and keys exchanged.
        transposes_later: the plan serves one call alone, so it is transposed in the backward pass of that call, while
            the first kernels of that pass run.
        orders: for a batch and a number of heads, the order in which rows start.
        boxes: the lists as stretches of keys.
        packed: the lists of several rows merged.
        runs: for a batch element of the lists, what each row reads as runs of tokens.
    """

    transpose: Plan | None = None
    transposes_later: bool = False
    orders: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    boxes: Boxes | None = None
    packed: Packed | None = None
    runs: dict[int, tuple[Runs, ...]] = field(default_factory=dict)
