"""Means of consecutive tokens at several levels, and their adjoint, in Triton.

The tokens are read once, and give two levels at once where blocks are small enough for a program to hold a block of
blocks; the sums of the last (float32, a fraction of the size) give the next. Queries, keys and values share their
launches. Backwards every token gathers its share from all levels in one pass.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.layout import level_length, level_starts
from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, next_power_of_two, padded
from nearfield.ops._triton.walk import shares_of_means, store_rows

_TOKENS = 256
"""Tokens that one program reads."""
_UNROLLED = 16
"""Tokens of a mean that are added without a loop, so that loads may run ahead of sums."""


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
    source, second_source, third_source, means, second_means, third_means, sums,
    stride_sb, stride_sh, stride_sn, stride_sd, stride_mb, stride_mh, stride_mn, stride_md,
    num_heads, num_source, num_means, num_slots, num_upper, num_upper_slots, num_tokens, represents,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, UNROLLED: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    HAS_UPPER: tl.constexpr, KEEPS_SUMS: tl.constexpr, ARE_SEVERAL: tl.constexpr,
):  # fmt: skip
    """A level from the one below, and with HAS_UPPER the next one, too. The upper stands behind the lower in `means`;
    the sums that are kept are those of the highest.

    Every thread adds up its own channels of its own means, token after token: nothing passes between threads but for
    the upper level, a fraction of the data. ARE_SEVERAL: of two or three tensors with equal sizes and strides.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    if ARE_SEVERAL:
        which = tl.program_id(2)
        if which == 1:
            source = second_source
            means = second_means
        if which == 2:
            source = third_source
            means = third_means
        if KEEPS_SUMS:
            kept = num_upper if HAS_UPPER else num_means
            sums += which.to(tl.int64) * tl.num_programs(0) * kept * DIM
    source += batch * stride_sb + head * stride_sh
    means += batch * stride_mb + head * stride_mh
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PAD)[None, :]
    token = (row * BLOCK)[:, None]
    pointer = source + token.to(tl.int64) * stride_sn + column * stride_sd
    left = tl.where(column < DIM, num_source - token, 0)
    total = tl.zeros([ROWS, PAD], tl.float32)
    first = tl.full([], 0, tl.int64)
    for start in range(0, BLOCK, UNROLLED):
        for step in tl.static_range(UNROLLED):
            mask = left > start + step
            total += tl.load(pointer + (first + step) * stride_sn, mask=mask, other=0.0).to(tl.float32)
        first += UNROLLED
    _store_means(
        means, sums, batch_head, row, total, stride_mn, stride_md,
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
    grad, out, stride_gb, stride_gh, stride_gn, stride_gd, num_heads, num_tokens,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64)
    grad += batch_head // num_heads * stride_gb + batch_head % num_heads * stride_gh
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    total = shares_of_means(grad, token, exists, stride_gn, stride_gd, num_tokens, BLOCK, LEVELS, DIM, PAD)
    store_rows(out + batch_head * num_tokens * DIM, token, exists, DIM, 1, total, DIM, PAD)


def unsupported(x: Tensor, block: int, levels: int) -> str | None:
    """Why the kernels cannot pool this tensor, or None."""
    if block**levels >= 2**31:
        return f"{levels} levels of blocks of {block} do not fit in 32 bits"
    return unsupported_tensor(x, most_channels=128)


def pool_forward(x: Tensor, block: int, levels: int) -> Tensor:
    """See `nearfield.ops.pool_select.reference.pool`."""
    return _pooled([x], block, levels)[0]


def pool_together(tensors: Sequence[Tensor], block: int, levels: int) -> list[Tensor]:
    """`pool_forward` of up to three: in the launches of one, where their sizes and strides are the same."""
    if len({(x.shape, x.stride(), x.dtype) for x in tensors}) == 1:
        return _pooled(tensors, block, levels)
    return [pool_forward(x, block, levels) for x in tensors]


def _pooled(tensors: Sequence[Tensor], block: int, levels: int) -> list[Tensor]:
    """Of one tensor, or of two or three that are alike."""
    x, number = tensors[0], len(tensors)
    batch, heads, length, dim = x.shape
    starts = level_starts(length, block, levels)
    pooled = [
        torch.empty(batch, heads, starts[-1], dim, device=x.device, dtype=x.dtype) for _ in range(number)
    ]
    rows = max(8, _TOKENS // block)
    at_once = 2 if rows % block == 0 else 1
    sources, level = list(tensors), 1
    while level <= levels:
        last = min(level + at_once - 1, levels)
        num_means, num_upper = (level_length(length, block, each) for each in (level, level + 1))
        slots = starts[level] - starts[level - 1]
        upper_slots = starts[last] - starts[last - 1] if last > level else 0
        means = [each[:, :, starts[level - 1] :] for each in pooled]
        sums = means[0]
        if last < levels:
            kept = level_length(length, block, last)
            sums = torch.empty(number, batch, heads, kept, dim, device=x.device, dtype=torch.float32)
        programs = max(ceil_div(slots, rows), ceil_div(upper_slots * block, rows))
        _pool_kernel[(batch * heads, programs, number)](
            *_three(sources), *_three(means), sums, *sources[0].stride(), *means[0].stride(),
            heads, sources[0].shape[2], num_means, slots, num_upper, upper_slots, length, block**level,
            BLOCK=block, ROWS=rows, UNROLLED=min(block, _UNROLLED), DIM=dim, PAD=padded(dim),
            HAS_UPPER=last > level, KEEPS_SUMS=last < levels, ARE_SEVERAL=number > 1,
            num_warps=_warps(rows * padded(dim) * sources[0].element_size()),
        )  # fmt: skip
        sources, level = list(sums.unbind()) if last < levels else sources, last + 1
    return pooled


def _three(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The last ones again, for want of others."""
    return [tensors[min(number, len(tensors) - 1)] for number in range(3)]


def _warps(size: int) -> int:
    """As many as it takes for each thread to load 16 bytes at once."""
    return int(min(8, max(1, next_power_of_two(size) // 512)))


def pool_backward(grad: Tensor, length: int, block: int, levels: int) -> Tensor:
    """See `nearfield.ops.pool_select.reference.pool`."""
    batch, heads, _, dim = grad.shape
    out = torch.empty(batch, heads, length, dim, device=grad.device, dtype=grad.dtype)
    tokens = 128
    _unpool_kernel[(batch * heads, ceil_div(length, tokens))](
        grad, out, *grad.stride(), heads, length,
        BLOCK=block, LEVELS=levels, TOKENS=tokens, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return out
