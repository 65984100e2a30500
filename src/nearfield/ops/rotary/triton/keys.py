"""Keys turned by rotary angles in Triton: read once, written once, wherever they shall stand."""

import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, padded

_ROWS, _HEADS = 16, 16
"""Tokens of a program, whose angles it holds, and heads (of all layers) that it turns by them."""


@triton.jit
def _turn_kernel(
    source, target, cos, sin, partner, stride_sl, stride_sg, stride_sn, stride_tl, stride_tg, stride_tn,
    num_tokens, num_heads, heads_per_layer,
    SIZE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.arange(0, PAD)[None, :]
    exists = (row < num_tokens) & (channel < DIM)
    turns = (row < num_tokens) & (channel < SIZE)
    # What lies behind the tables rests: times one, plus nothing.
    cosine = tl.load(cos + row * SIZE + channel, mask=turns, other=1.0)
    sine = tl.load(sin + row * SIZE + channel, mask=turns, other=0.0)
    other_channel = tl.load(partner + channel, mask=channel < SIZE, other=0)
    first = tl.program_id(1) * HEADS
    for head in range(first, tl.minimum(first + HEADS, num_heads)):
        layer = (head // heads_per_layer).to(tl.int64)
        group = (head % heads_per_layer).to(tl.int64)
        keys = source + layer * stride_sl + group * stride_sg + row * stride_sn
        own = tl.load(keys + channel, mask=exists, other=0.0).to(tl.float32)
        other = tl.load(keys + other_channel, mask=turns, other=0.0).to(tl.float32)
        turned = own * cosine + other * sine
        tl.store(
            target + layer * stride_tl + group * stride_tg + row * stride_tn + channel, turned, mask=exists
        )


def unsupported(x: Tensor) -> str | None:
    """Why the kernel cannot take such keys, or None."""
    if x.stride(-1) != 1:
        return "the channels of a key do not stand side by side"
    return unsupported_tensor(x, most_channels=256)


def turn(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
    """See `nearfield.ops.rotary.reference.keys`."""
    layers, groups, length, dim = source.shape
    grid = (ceil_div(length, _ROWS), ceil_div(layers * groups, _HEADS))
    _turn_kernel[grid](
        source, target, cos.contiguous(), sin.contiguous(), partner, *source.stride()[:3], *target.stride()[:3],
        length, layers * groups, groups,
        SIZE=cos.shape[-1], DIM=dim, PAD=padded(dim), ROWS=_ROWS, HEADS=_HEADS, num_warps=4,
    )  # fmt: skip
