"""Rotary rows of each sample applied to queries or keys, in Triton: in one pass, and in the layout they have.

In plain torch it is nine passes, most of them in float32: more than attention itself takes among a few thousand tokens.
A program holds the rows of some tokens and turns several heads by them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, padded

_TOKENS, _HEADS = 16, 4
"""Of one program."""


@triton.jit
def _load_pairs(pointer, place, mask, TOKENS: tl.constexpr, PAD: tl.constexpr):
    """The first and the second channels of all pairs, in float32."""
    values = tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(values, [TOKENS, PAD // 2, 2]))


@triton.jit
def _rotate_kernel(
    x, cos, sin, out, num_heads, num_tokens,
    stride_xb, stride_xh, stride_xn, stride_ob, stride_oh, stride_on,
    stride_cb, stride_cn, stride_sb, stride_sn,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    channel = tl.arange(0, PAD)[None, :]
    exists = (token < num_tokens) & (channel < DIM)
    cos_real, cos_imaginary = _load_pairs(
        cos, batch * stride_cb + token * stride_cn + channel, exists, TOKENS, PAD
    )
    sin_real, sin_imaginary = _load_pairs(
        sin, batch * stride_sb + token * stride_sn + channel, exists, TOKENS, PAD
    )
    for number in tl.static_range(HEADS):
        head = tl.program_id(0).to(tl.int64) * HEADS + number
        here = exists & (head < num_heads)
        place = batch * stride_xb + head * stride_xh + token * stride_xn + channel
        real, imaginary = _load_pairs(x, place, here, TOKENS, PAD)
        turned = tl.join(
            real * cos_real - imaginary * sin_real, imaginary * cos_imaginary + real * sin_imaginary
        )
        place = batch * stride_ob + head * stride_oh + token * stride_on + channel
        tl.store(out + place, tl.reshape(turned, [TOKENS, PAD]), mask=here)


def unsupported(x: Tensor) -> str | None:
    """Why the kernel cannot turn these queries or keys, or None."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{x.dtype} is for the reference"
    if x.stride(3) != 1:
        return "the channels of a head must lie side by side"
    return unsupported_tensor(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `nearfield.ops.rotary.reference`. Rows are float32."""
    batch, heads, tokens, dim = x.shape
    out = torch.empty_like(x)
    cos, sin = (rows if rows.stride(3) == 1 else rows.contiguous() for rows in (cos, sin))
    row_strides = [
        stride for rows in (cos, sin) for stride in (rows.stride(0) if len(rows) > 1 else 0, rows.stride(2))
    ]
    _rotate_kernel[(ceil_div(heads, _HEADS), ceil_div(tokens, _TOKENS), batch)](
        x, cos, sin, out, heads, tokens, *x.stride()[:3], *out.stride()[:3],
        *row_strides,
        HEADS=_HEADS, TOKENS=_TOKENS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return out
