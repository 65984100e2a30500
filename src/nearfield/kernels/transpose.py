"""Lists with the roles exchanged, in Triton: for each block of keys the rows that read it.

As `Plan.transpose` does it, by one sort of (list, column, row) as single numbers, but with two launches around the sort
instead of twenty.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels import unsupported_tensor

_TILE = 1024


@triton.jit
def _cells_kernel(
    offsets, blocks, cells, num_rows, num_columns, length, TILE: tl.constexpr, HALVINGS: tl.constexpr
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
    cell = (flat * (num_columns + 1) + column) * num_rows + row
    tl.store(cells + flat * length + slot, cell.to(cells.dtype.element_ty), mask=exists)


@triton.jit
def _lists_kernel(
    ordered, offsets, rows, num_rows, num_columns, length, TILE: tl.constexpr, HALVINGS: tl.constexpr
):
    """The rows of cells in order, and where each column begins among those of its list."""
    flat = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    ordered += flat * length
    exists = place < length
    cell = tl.load(ordered + place, mask=exists, other=0)
    tl.store(rows + flat * length + place, (cell % num_rows).to(tl.int32), mask=exists)
    # The first cell that is not before the column's.
    is_column = place <= num_columns
    first = (flat * (num_columns + 1) + place) * num_rows
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
    batch, heads, length = blocks.shape
    lists, num_rows = batch * heads, offsets.shape[2] - 1
    wide = torch.int32 if lists * (num_columns + 1) * num_rows < 2**31 else torch.int64
    cells = torch.empty(lists * length, device=blocks.device, dtype=wide)
    begins = torch.empty(batch, heads, num_columns + 1, device=blocks.device, dtype=torch.int32)
    rows = torch.empty_like(blocks)
    sizes = (num_rows, num_columns, length)
    if length:
        _cells_kernel[(lists, triton.cdiv(length, _TILE))](
            offsets, blocks, cells, *sizes, TILE=_TILE, HALVINGS=num_rows.bit_length(), num_warps=4
        )
    ordered = torch.sort(cells).values
    _lists_kernel[(lists, triton.cdiv(max(length, num_columns + 1), _TILE))](
        ordered, begins, rows, *sizes, TILE=_TILE, HALVINGS=length.bit_length(), num_warps=4
    )
    return begins, rows
