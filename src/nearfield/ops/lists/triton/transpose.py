"""Lists with the roles exchanged, in Triton: for each block of keys the rows that read it.

As `Plan.transpose` does it, by one sort of (list, column, row) as single numbers, but with two launches around the sort
instead of twenty.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div
from nearfield.plan import Plan

_TILE = 1024


@triton.jit
def _cells_kernel(
    offsets,
    blocks,
    cells,
    num_rows,
    num_columns,
    length,
    first_cell,
    TILE: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """(list, column, row) of every slot; those that are unused are in the column behind the last."""
    flat = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * TILE + tl.arange(0, TILE)
    offsets += flat * (num_rows + 1)
    is_used = slot < tl.load(offsets + num_rows)
    # The last row that begins at or before the slot.
    row = tl.zeros([TILE], tl.int32)
    above = row + num_rows
    for _ in range(HALVINGS):
        middle = (row + above) // 2
        is_reached = tl.load(offsets + middle) <= slot
        row = tl.where(is_reached, middle, row)
        above = tl.where(is_reached, above, middle)
    exists = slot < length
    column = tl.load(blocks + flat * length + slot, mask=exists & is_used, other=num_columns)
    cell = first_cell + (flat * (num_columns + 1) + column) * num_rows + row
    tl.store(cells + flat * length + slot, cell.to(cells.dtype.element_ty), mask=exists)


@triton.jit
def _lists_kernel(
    ordered,
    offsets,
    rows,
    num_rows,
    num_columns,
    length,
    first_cell,
    TILE: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """The rows of cells in order, and where each column begins among those of its list."""
    flat = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ordered += flat * length
    exists = place < length
    cell = tl.load(ordered + place, mask=exists, other=0) - first_cell
    tl.store(rows + flat * length + place, (cell % num_rows).to(tl.int32), mask=exists)
    # The first cell that is not before the column's.
    is_column = place <= num_columns
    first = first_cell + (flat * (num_columns + 1) + place) * num_rows
    begin = tl.zeros([TILE], tl.int32)
    end = begin + length
    for _ in range(HALVINGS):
        middle = (begin + end) // 2
        is_before = tl.load(ordered + middle, mask=is_column & (middle < end), other=0).to(tl.int64) < first
        is_before = is_before & (middle < end)
        begin = tl.where(is_before, middle + 1, begin)
        end = tl.where(is_before, end, middle)
    tl.store(offsets + flat * (num_columns + 1) + place, begin, mask=is_column)


def unsupported(blocks: Tensor) -> str | None:
    """Why the kernels cannot transpose such lists, or None."""
    return unsupported_tensor(blocks)


def transpose(offsets: Tensor, blocks: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Offsets and rows, by column, of `[b, h, rows + 1]` and `[b, h, capacity]`; see `Plan.transpose`."""
    found = _room(offsets, blocks, num_columns)
    _transpose_into([found], [(offsets, blocks, num_columns)])
    return found


def transpose_together(plans: Sequence[Plan]) -> list[Plan]:
    """Each plan's transpose, by one sort for all of them."""
    found = [room_for_transpose(plan) for plan in plans]
    transpose_into(found, plans)
    return found


def room_for_transpose(plan: Plan) -> Plan:
    """A plan of the transpose's sizes, whose lists `transpose_into` writes."""
    lists = _room(plan.offsets, plan.blocks, plan.num_columns)
    sizes = plan.k_block, plan.q_block, plan.num_keys, plan.num_queries
    return Plan.of_known(*lists, *sizes, similar_rows=plan.similar_rows)


def transpose_into(found: Sequence[Plan], plans: Sequence[Plan]) -> None:
    """See `transpose_together`. All else that is allocated here is temporary."""
    _transpose_into(
        [(each.offsets, each.blocks) for each in found],
        [(plan.offsets, plan.blocks, plan.num_columns) for plan in plans],
    )


def _room(offsets: Tensor, blocks: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    begins = torch.empty(*offsets.shape[:2], num_columns + 1, device=blocks.device, dtype=torch.int32)
    return begins, torch.empty_like(blocks)


def _transpose_into(
    found: Sequence[tuple[Tensor, Tensor]], every: Sequence[tuple[Tensor, Tensor, int]]
) -> None:
    """Lists one after another, those of the second plan behind all of the first: they stay so when cells are sorted."""
    sizes = [(offsets.shape[2] - 1, columns, blocks.shape[2]) for offsets, blocks, columns in every]
    lists = [blocks.shape[0] * blocks.shape[1] for _, blocks, _ in every]
    slots = [0, *accumulate(number * length for number, (_, _, length) in zip(lists, sizes, strict=True))]
    first_cells = [
        0,
        *accumulate(
            number * (columns + 1) * rows for number, (rows, columns, _) in zip(lists, sizes, strict=True)
        ),
    ]
    wide = torch.int32 if first_cells[-1] < 2**31 else torch.int64
    cells = torch.empty(slots[-1], device=every[0][1].device, dtype=wide)
    for number, (offsets, blocks, _) in enumerate(every):
        if length := blocks.shape[2]:
            _cells_kernel[(lists[number], ceil_div(length, _TILE))](
                offsets, blocks, cells[slots[number] :], *sizes[number], first_cells[number],
                TILE=_TILE, HALVINGS=sizes[number][0].bit_length(), num_warps=4,
            )  # fmt: skip
    ordered = torch.sort(cells).values
    for number, (begins, rows) in enumerate(found):
        _, columns, length = sizes[number]
        _lists_kernel[(lists[number], ceil_div(max(length, columns + 1), _TILE))](
            ordered[slots[number] :], begins, rows, *sizes[number], first_cells[number],
            TILE=_TILE, HALVINGS=length.bit_length(), num_warps=4,
        )  # fmt: skip
