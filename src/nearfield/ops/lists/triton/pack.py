"""Several rows of a plan walked by one program: their lists merged into one that says who of them reads each block.

Rows of 16 queries leave tensor cores mostly idle, and each fetches its keys for itself. Neighbours choose much the same
blocks; four of them walked together fill a tile of 64, and a block that several read is fetched once. What a row does
not read is masked. At worst nothing is shared: then the same keys are fetched, and four times the products computed.
In the backward, rows are blocks of keys: up to 16 small ones, read by the same queries, fill a tile of which each would
fill but a part.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton.launch import Tiles, ceil_div, list_strides
from nearfield.ops.lists.triton.order import longest_first, order_into, room_for_order
from nearfield.plan import Plan

_GROUPS = 32
_NONE = tl.constexpr(2**31 - 1)


class Rows(NamedTuple):
    """The lists that programs walk: a plan's own, or merged ones.

    Args:
        offsets: as in a plan; where rows are packed, where each list starts and how long it is.
        blocks: as in a plan; where rows are packed, `id * 2**pack + bits`, a bit for each row that reads it.
        order: in which to start them, if it matters.
        strides: of both over batch and heads.
        number: how many lists each head has.
        size: tokens that share one.
    """

    offsets: Tensor
    blocks: Tensor
    order: Tensor | None
    strides: tuple[int, ...]
    number: int
    size: int


@triton.jit
def _pack_kernel(
    offsets, blocks, bounds, packed, num_rows, num_groups, capacity, packed_capacity,
    PACK: tl.constexpr, MULTIPLE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Merge ascending lists: of all next ids take the smallest, note whose it is, go on in those lists."""
    flat = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    exists = group < num_groups
    member = tl.arange(0, PACK)[None, :]
    row = group[:, None] * PACK + member
    offsets += flat * (num_rows + 1)
    blocks += flat * capacity
    place = tl.load(offsets + row, mask=row < num_rows, other=0)
    end = tl.load(offsets + row + 1, mask=row < num_rows, other=0)
    # Merged lists are no longer than their parts, but for what fills them up to a multiple.
    start = tl.load(offsets + group * PACK, mask=exists, other=0) + group * (MULTIPLE - 1)
    out = packed + flat * packed_capacity + start
    count = tl.zeros([GROUPS], tl.int32)
    last = tl.zeros([GROUPS], tl.int32)
    next_id = tl.load(blocks + place, mask=place < end, other=_NONE)
    smallest = tl.min(next_id, 1)
    while tl.min(smallest, 0) < _NONE:
        is_left = smallest < _NONE
        is_taken = (next_id == smallest[:, None]) & is_left[:, None]
        bits = tl.sum(tl.where(is_taken, 1 << member, 0), 1)
        tl.store(out + count, smallest * (1 << PACK) + bits, mask=is_left)
        count += is_left.to(tl.int32)
        last = tl.where(is_left, smallest, last)
        place += is_taken.to(tl.int32)
        next_id = tl.load(blocks + place, mask=place < end, other=_NONE)
        smallest = tl.min(next_id, 1)
    for _ in tl.static_range(MULTIPLE - 1):
        is_short = count % MULTIPLE != 0
        tl.store(out + count, last * (1 << PACK), mask=is_short & exists)
        count += is_short.to(tl.int32)
    bounds += (flat * num_groups + group) * 2
    tl.store(bounds, start, mask=exists)
    tl.store(bounds + 1, count, mask=exists)


def has_room_for_bits(plan: Plan, pack: int) -> bool:
    """Whether ids of the plan, and a bit for each of `pack` rows, fit into 32 bits."""
    return plan.num_columns << pack <= 2**31


def rows_of(plan: Plan, tiles: Tiles, batch: int, heads: int) -> Rows:
    """What the programs of a launch walk. Packed rows start in their own order: it is the lists that differ, not the
    order of magnitude of their lengths."""
    if tiles.pack == 1:
        return _own_rows(plan, longest_first(plan, batch, heads))
    known = plan.prepared.packed
    if known is not None and (known.rows, known.multiple) == (tiles.pack, _multiple(plan, tiles)):
        return _packed_rows(plan, tiles, known.bounds, known.blocks)
    rows = room_for_rows(plan, tiles, batch, heads)
    fill_rows(rows, plan, tiles, batch, heads)
    return rows


def room_for_rows(plan: Plan, tiles: Tiles, batch: int, heads: int) -> Rows:
    """What `fill_rows` writes to; of the plan itself only sizes are needed."""
    if tiles.pack == 1:
        return _own_rows(plan, room_for_order(plan, batch, heads))
    lists, capacity = plan.blocks.shape[:2], plan.blocks.shape[2]
    groups = ceil_div(plan.num_rows, tiles.pack)
    packed_capacity = capacity + groups * (_multiple(plan, tiles) - 1)
    bounds = torch.empty(*lists, 2 * groups, device=plan.device, dtype=torch.int32)
    packed = torch.empty(*lists, packed_capacity, device=plan.device, dtype=torch.int32)
    return _packed_rows(plan, tiles, bounds, packed)


def fill_rows(rows: Rows, plan: Plan, tiles: Tiles, batch: int, heads: int) -> None:
    """See `rows_of`. All else that is allocated here is temporary."""
    if tiles.pack == 1:
        if rows.order is not None:
            order_into(rows.order, plan, batch, heads)
        return
    lists = plan.blocks.shape[0] * plan.blocks.shape[1]
    _pack_kernel[(lists, ceil_div(rows.number, _GROUPS))](
        plan.offsets, plan.blocks, rows.offsets, rows.blocks,
        plan.num_rows, rows.number, plan.blocks.shape[2], rows.blocks.shape[2],
        PACK=tiles.pack, MULTIPLE=_multiple(plan, tiles), GROUPS=_GROUPS,
        num_warps=min(8, max(1, tiles.pack * _GROUPS // 32)),
    )  # fmt: skip


def _multiple(plan: Plan, tiles: Tiles) -> int:
    """Of how many ids a merged list is to be."""
    return max(1, tiles.other // plan.k_block)


def _own_rows(plan: Plan, order: Tensor | None) -> Rows:
    strides = list_strides(plan.offsets, plan.blocks)
    return Rows(plan.offsets, plan.blocks, order, strides, plan.num_rows, plan.q_block)


def _packed_rows(plan: Plan, tiles: Tiles, bounds: Tensor, packed: Tensor) -> Rows:
    groups = ceil_div(plan.num_rows, tiles.pack)
    return Rows(bounds, packed, None, list_strides(bounds, packed), groups, plan.q_block * tiles.pack)
