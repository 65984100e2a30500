"""Means of consecutive tokens at several levels, and their adjoint, in Triton.

The tokens are read once, for the first level; its sums (float32, a block-th of the size) give the next. Backwards every
token gathers its share from all levels in one pass.
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
def _pool_kernel(
    source, means, sums, stride_sb, stride_sh, stride_sn, stride_sd, stride_mb, stride_mh, stride_mn, stride_md,
    num_heads, num_source, num_means, num_slots, num_tokens, represents,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, KEEPS_SUMS: tl.constexpr,
):  # fmt: skip
    """One level from the one below: sums of BLOCK rows, and what they are per token they stand for; zero for slots
    that pad the level."""
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
    total = tl.sum(tl.reshape(rows.to(tl.float32), [ROWS, BLOCK, PAD]), 1)
    row = first + tl.arange(0, ROWS)
    if KEEPS_SUMS:
        store_rows(sums + batch_head * num_means * DIM, row, row < num_means, DIM, 1, total, DIM, PAD)
    count = tl.minimum(num_tokens - row.to(tl.int64) * represents, represents)
    mean = total / tl.maximum(count, 1).to(tl.float32)[:, None]
    means += batch * stride_mb + head * stride_mh
    store_rows(means, row, row < num_slots, stride_mn, stride_md, mean, DIM, PAD)


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
    source = x
    for level in range(1, levels + 1):
        tokens = level_length(length, block, level)
        slots = starts[level] - starts[level - 1]
        means = pooled[:, :, starts[level - 1] :]
        sums = means
        if level < levels:
            sums = torch.empty(batch, heads, tokens, dim, device=x.device, dtype=torch.float32)
        _pool_kernel[(batch * heads, triton.cdiv(slots, rows))](
            source, means, sums, *source.stride(), *means.stride(),
            heads, source.shape[2], tokens, slots, length, block**level,
            BLOCK=block, ROWS=rows, DIM=dim, PAD=padded(dim), KEEPS_SUMS=level < levels, num_warps=4,
        )  # fmt: skip
        source = sums
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
