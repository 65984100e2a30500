"""Results of the same queries over different keys, merged in one pass in Triton.

They are few, so that what is to be spared is launches: the same in torch takes some twenty.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield._types import Attended
from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, padded

_ROWS = 8
"""Queries of one program."""


@triton.jit
def _merge_kernel(
    out, lse, merged, merged_lse,
    stride_op, stride_ob, stride_oh, stride_on, stride_lp, stride_lb, stride_lh, stride_ln,
    num_parts, num_heads, num_queries, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < num_queries
    column = tl.arange(0, PAD)
    is_value = exists[:, None] & (column < DIM)[None, :]
    batch, head = batch_head // num_heads, batch_head % num_heads
    out_rows = (
        out + batch * stride_ob + head * stride_oh + row.to(tl.int64)[:, None] * stride_on + column[None, :]
    )
    lse_rows = lse + batch * stride_lb + head * stride_lh + row.to(tl.int64) * stride_ln
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, PAD], tl.float32)
    for _ in range(num_parts):
        part_lse = tl.load(lse_rows, mask=exists, other=float("-inf"))
        part = tl.load(out_rows, mask=is_value, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, part_lse)
        # Nothing was read yet: subtracting -inf would give NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - anchor)
        weight = tl.exp(part_lse - anchor)
        total = total * shrink + weight
        values = values * shrink[:, None] + part * weight[:, None]
        top = new_top
        out_rows += stride_op
        lse_rows += stride_lp
    read_nothing = total == 0.0
    values = values / tl.where(read_nothing, 1.0, total)[:, None]
    place = batch_head * num_queries + row
    tl.store(merged + place[:, None] * DIM + column[None, :], values, mask=is_value)
    log_sum = tl.where(read_nothing, float("-inf"), top + tl.log(tl.where(read_nothing, 1.0, total)))
    tl.store(merged_lse + place, log_sum, mask=exists)


def unsupported(out: Tensor) -> str | None:
    """Why the kernel cannot take these parts, or None."""
    if out.stride(-1) != 1:
        return "channels do not lie side by side"
    return unsupported_tensor(out, most_channels=128)


def merge_partials(out: Tensor, lse: Tensor) -> Attended:
    """See `nearfield.ops.attention.partials_reference`."""
    parts, batch, heads, length, dim = out.shape
    merged = torch.empty(batch, heads, length, dim, device=out.device, dtype=out.dtype)
    merged_lse = torch.empty(batch, heads, length, device=out.device, dtype=torch.float32)
    if length:
        with torch.cuda.device_of(out):
            _merge_kernel[(batch * heads, ceil_div(length, _ROWS))](
                out, lse, merged, merged_lse, *out.stride()[:4], *lse.stride(), parts, heads, length,
                ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
            )  # fmt: skip
    return Attended(merged, merged_lse)
