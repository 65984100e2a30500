"""The mean of every block of tokens, and how well it stands for them, in one pass in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, next_power_of_two, padded

_TOKENS = 64
"""Tokens that one program reads at least."""


@triton.jit
def _means_kernel(
    source, means, likeness, stride_sb, stride_sh, stride_sn, stride_sd, num_heads, num_tokens, num_means,
    BLOCK: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64)
    source += batch_head // num_heads * stride_sb + batch_head % num_heads * stride_sh
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    column = tl.arange(0, PAD)
    token = row[:, None] * BLOCK + lane[None, :]
    exists = (lane[None, :] < BLOCK) & (token < num_tokens)
    pointer = source + token.to(tl.int64)[:, :, None] * stride_sn + column[None, None, :] * stride_sd
    tokens = tl.load(pointer, mask=exists[:, :, None] & (column < DIM)[None, None, :], other=0.0)
    tokens = tokens.to(tl.float32)
    count = tl.maximum(tl.minimum(num_tokens - row * BLOCK, BLOCK), 1).to(tl.float32)
    mean = tl.sum(tokens, 1) / count[:, None]

    products = tl.sum(tokens * mean[:, None, :], 2)
    lengths = tl.sqrt(tl.sum(tokens * tokens, 2))
    mean_length = tl.sqrt(tl.sum(mean * mean, 1))
    cosine = products / (tl.maximum(lengths, 1e-8) * tl.maximum(mean_length, 1e-8)[:, None])
    alike = tl.sum(tl.where(exists, cosine, 0.0), 1) / count

    is_mean = row < num_means
    out = batch_head * num_means + row
    tl.store(
        means + out[:, None] * DIM + column[None, :], mean, mask=is_mean[:, None] & (column < DIM)[None, :]
    )
    tl.store(likeness + out, alike, mask=is_mean)


def unsupported(x: Tensor) -> str | None:
    """Why the kernel cannot take this tensor, or None."""
    return unsupported_tensor(x, most_channels=128)


def block_means(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """See `nearfield.ops.predict.reference.means`."""
    batch, heads, length, dim = x.shape
    num_means = ceil_div(length, block)
    lanes = next_power_of_two(block)
    rows = max(1, _TOKENS // lanes)
    means = torch.empty(batch, heads, num_means, dim, device=x.device, dtype=torch.float32)
    likeness = torch.empty(batch, heads, num_means, device=x.device, dtype=torch.float32)
    _means_kernel[(batch * heads, ceil_div(num_means, rows))](
        x, means, likeness, *x.stride(), heads, length, num_means,
        BLOCK=block, LANES=lanes, ROWS=rows, DIM=dim, PAD=padded(dim), num_warps=8 if lanes > _TOKENS else 4,
    )  # fmt: skip
    return means, likeness
