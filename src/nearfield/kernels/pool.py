"""Means of consecutive tokens at several levels, and their adjoint, in Triton.

The tokens are read once, and give two levels at once where blocks are small enough for a program to hold a block of
blocks; the sums of the last (float32, a fraction of the size) give the next. Backwards every token gathers its share
from all levels in one pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels import is_interpreted
from nearfield.kernels.launch import padded
from nearfield.kernels.walk import load_rows, store_rows
from nearfield.levels import level_length, level_starts

_TOKENS = 256
"""Tokens that one program reads, or writes backwards."""


@triton.jit
def _store_means(
    means, sums, batch_head, row, total, stride_mn, stride_md, num_means, num_slots, num_tokens, represents,
    DIM: tl.constexpr, PAD: tl.constexpr, KEEPS_SUMS: tl.constexpr,
):  # fmt: skip
    """Sums, and what they are per token they stand for; zero for slots that pad the level."""
    if KEEPS_SUMS:
        store_rows(sums + batch_head * num_means * DIM, row, row < num_means, DIM, 1, total, DIM, PAD)
    count = tl.minimum(num_tokens - row.to(tl.int64) * represents, represents)
    mean = total / tl.maximum(count, 1).to(tl.float32)[:, None]
    store_rows(means, row, row < num_slots, stride_mn, stride_md, mean, DIM, PAD)


@triton.jit
def _pool_kernel(
    source, means, sums, stride_sb, stride_sh, stride_sn, stride_sd, stride_mb, stride_mh, stride_mn, stride_md,
    num_heads, num_source, num_means, num_slots, num_upper, num_upper_slots, num_tokens, represents,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    HAS_UPPER: tl.constexpr, KEEPS_SUMS: tl.constexpr,
):  # fmt: skip
    """A level from the one below, and with HAS_UPPER the next one, too. The upper stands behind the lower in `means`;
    the sums that are kept are those of the highest."""
    batch_head = tl.program_id(0).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    first = tl.program_id(1) * ROWS
    token = first * BLOCK + tl.arange(0, ROWS * BLOCK)
    origin = tl.full([], 0, tl.int64)
    rows = load_rows(
        source + batch * stride_sb + head * stride_sh, origin, token.to(tl.int64), token < num_source,
        stride_sn, stride_sd, DIM, PAD, True,
    )  # fmt: skip
    means += batch * stride_mb + head * stride_mh
    total = tl.sum(tl.reshape(rows.to(tl.float32), [ROWS, BLOCK, PAD]), 1)
    _store_means(
        means, sums, batch_head, first + tl.arange(0, ROWS), total, stride_mn, stride_md,
        num_means, num_slots, num_tokens, represents, DIM, PAD, KEEPS_SUMS and not HAS_UPPER,
    )  # fmt: skip
    if HAS_UPPER:
        upper_row = tl.program_id(1) * (ROWS // BLOCK) + tl.arange(0, ROWS // BLOCK)
        _store_means(
            means + num_slots.to(tl.int64) * stride_mn, sums, batch_head, upper_row,
            tl.sum(tl.reshape(total, [ROWS // BLOCK, BLOCK, PAD]), 1), stride_mn, stride_md,
            num_upper, num_upper_slots, num_tokens, represents * BLOCK, DIM, PAD, KEEPS_SUMS,
        )  # fmt: skip


@triton.jit
def _unpool_kernel(
    grad, out, stride_gb, stride_gh, stride_gn, stride_gd, num_heads, num_tokens, first_represents,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Each token's shares of the gradients of its means, level by level in ascending order."""
    batch_head = tl.program_id(0).to(tl.int64)
    grad += batch_head // num_heads * stride_gb + batch_head % num_heads * stride_gh
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    total = tl.zeros([TOKENS, PAD], tl.float32)
    start = tl.full([], 0, tl.int64)
    represents = first_represents
    for _ in tl.static_range(LEVELS):
        mean = token // represents
        rows = load_rows(grad, start, mean.to(tl.int64), exists, stride_gn, stride_gd, DIM, PAD, True)
        count = tl.minimum(num_tokens - mean * represents, represents)
        total += rows.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)[:, None]
        represents *= BLOCK
        start += tl.cdiv(num_tokens, represents) * BLOCK
    store_rows(out + batch_head * num_tokens * DIM, token, exists, DIM, 1, total, DIM, PAD)


def unsupported(x: Tensor, block: int, levels: int) -> str | None:
    """Why the kernels cannot pool this tensor, or None."""
    if not x.is_cuda and not is_interpreted():
        return f"the tensors are on {x.device}"
    if x.dtype == torch.float64:
        return "float64 is for the reference"
    if x.shape[-1] > 128:
        return f"head dimension {x.shape[-1]} is above 128"
    if block**levels >= 2**31:
        return f"{levels} levels of blocks of {block} do not fit in 32 bits"
    return None


def pool_forward(x: Tensor, block: int, levels: int) -> Tensor:
    """See `nearfield.reference.pool`."""
    batch, heads, length, dim = x.shape
    starts = level_starts(length, block, levels)
    pooled = torch.empty(batch, heads, starts[-1], dim, device=x.device, dtype=x.dtype)
    rows = max(1, _TOKENS // block)
    at_once = 2 if block * block <= _TOKENS else 1
    source, level = x, 1
    while level <= levels:
        last = min(level + at_once - 1, levels)
        num_means, num_upper = (level_length(length, block, each) for each in (level, level + 1))
        slots = starts[level] - starts[level - 1]
        upper_slots = starts[last] - starts[last - 1] if last > level else 0
        means = pooled[:, :, starts[level - 1] :]
        sums = means
        if last < levels:
            kept = level_length(length, block, last)
            sums = torch.empty(batch, heads, kept, dim, device=x.device, dtype=torch.float32)
        programs = max(triton.cdiv(slots, rows), triton.cdiv(upper_slots * block, rows))
        _pool_kernel[(batch * heads, programs)](
            source, means, sums, *source.stride(), *means.stride(),
            heads, source.shape[2], num_means, slots, num_upper, upper_slots, length, block**level,
            BLOCK=block, ROWS=rows, DIM=dim, PAD=padded(dim), HAS_UPPER=last > level, KEEPS_SUMS=last < levels,
            num_warps=4 if dim <= 64 else 8,
        )  # fmt: skip
        source, level = sums, last + 1
    return pooled


def pool_backward(grad: Tensor, length: int, block: int, levels: int) -> Tensor:
    """See `nearfield.reference.pool`."""
    batch, heads, _, dim = grad.shape
    out = torch.empty(batch, heads, length, dim, device=grad.device, dtype=grad.dtype)
    tokens = 128
    _unpool_kernel[(batch * heads, triton.cdiv(length, tokens))](
        grad, out, *grad.stride(), heads, length, block,
        BLOCK=block, LEVELS=levels, TOKENS=tokens, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return out
