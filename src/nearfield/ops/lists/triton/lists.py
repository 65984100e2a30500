"""The ascending lists of a mask, in Triton: one program walks one row and closes its gaps by a running sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import next_power_of_two

_CHUNK = 2048


@triton.jit
def _lists_kernel(mask, offsets, blocks, num_rows, num_columns, capacity, CHUNK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    batch_head = program // num_rows
    place = tl.load(offsets + program + batch_head)  # each head has one offset more than rows
    mask += program * num_columns
    blocks += batch_head * capacity
    for start in range(0, num_columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        keep = tl.load(mask + column, mask=column < num_columns, other=0).to(tl.int32)
        behind = tl.cumsum(keep, 0)
        tl.store(blocks + place + behind - 1, column, mask=keep > 0)
        place += tl.sum(keep, 0)


def unsupported(mask: Tensor) -> str | None:
    """Why the kernel cannot make these lists, or None."""
    return unsupported_tensor(mask)


def lists_of(mask: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """See `nearfield.ops.lists.reference`."""
    batch, heads, rows, columns = mask.shape
    blocks = torch.zeros(batch, heads, capacity, device=mask.device, dtype=torch.int32)
    if columns:
        _lists_kernel[(batch * heads * rows,)](
            mask.contiguous().view(torch.uint8), offsets.contiguous(), blocks, rows, columns, capacity,
            CHUNK=min(_CHUNK, max(32, next_power_of_two(columns))), num_warps=4,
        )  # fmt: skip
    return blocks
