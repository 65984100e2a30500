"""Matrices of regions times the tokens of regions, in Triton: what is taken away before and added after costs no pass.

The matrices are small, so all the time goes into reading and writing tokens, and each is read and written once. A
program owns some channels of one region.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, next_power_of_two

MOST_TOKENS = 256
"""Larger matrices are worth the tiles of a library."""

_TILE = 64
"""Rows and columns of a matrix that are multiplied at once."""

_CHANNEL_BYTES = 256


@triton.jit
def _multiply_kernel(
    matrix, x, minus, onto, out, num_regions, num_rows, num_columns, num_channels,
    stride_mb, stride_mr, stride_mn, stride_mk, stride_xb, stride_xr, stride_xn,
    stride_sb, stride_sr, stride_sn, stride_ab, stride_ar, stride_an, stride_ob, stride_or, stride_on,
    HAS_MINUS: tl.constexpr, HAS_ONTO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Neighbours among programs read neighbouring channels.
    program = tl.program_id(0).to(tl.int64)
    channel_tiles = tl.cdiv(num_channels, CHANNELS)
    row_tiles = tl.cdiv(num_rows, ROWS)
    channel = program % channel_tiles * CHANNELS + tl.arange(0, CHANNELS)
    row = program // channel_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    region = program // channel_tiles // row_tiles % num_regions
    batch = program // channel_tiles // row_tiles // num_regions
    has_channel = (channel < num_channels)[None, :]
    is_row = (row < num_rows)[:, None]

    if HAS_ONTO:  # asked for first: it arrives while the rest is multiplied
        onto += batch * stride_ab + region * stride_ar
        base = tl.load(onto + row[:, None] * stride_an + channel, mask=is_row & has_channel, other=0.0)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    matrix += batch * stride_mb + region * stride_mr
    x += batch * stride_xb + region * stride_xr
    minus += batch * stride_sb + region * stride_sr
    for first in range(0, num_columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        place = row[:, None] * stride_mn + column[None, :] * stride_mk
        weights = tl.load(matrix + place, mask=is_row & is_column[None, :], other=0.0)
        here = is_column[:, None] & has_channel
        tokens = tl.load(x + column[:, None] * stride_xn + channel, mask=here, other=0.0)
        if HAS_MINUS:
            taken = tl.load(minus + column[:, None] * stride_sn + channel, mask=here, other=0.0)
            tokens = (tokens.to(tl.float32) - taken.to(tl.float32)).to(x.dtype.element_ty)
        total = tl.dot(weights, tokens, total, input_precision=PRECISION)
    if HAS_ONTO:
        total += base.to(tl.float32)
    out += batch * stride_ob + region * stride_or
    tl.store(out + row[:, None] * stride_on + channel, total, mask=is_row & has_channel)


def unsupported(x: Tensor, others: Sequence[Tensor], most_tokens: int) -> str | None:
    """Why the kernel cannot take such tokens, in regions of at most `most_tokens`, or None."""
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{x.dtype} is for the reference"
    if any(tensor.dtype != x.dtype for tensor in others):
        return "the tensors differ in dtype"
    if any(tensor.dim() != 3 or tensor.stride(2) != 1 for tensor in (x, *others)):
        return "tokens are not [batch, tokens, channels] with channels side by side"
    if most_tokens > MOST_TOKENS:
        return f"regions of {most_tokens} tokens are larger than {MOST_TOKENS}"
    return unsupported_tensor(x, multiplies=True)


def multiply_into(
    out: Tensor, matrix: Tensor, x: Tensor, minus: Tensor | None = None, onto: Tensor | None = None
) -> None:
    """`nearfield.ops.merge.reference.regions.multiplied`, written to `out [B, regions, rows, C]`, a view of more."""
    batch, regions, rows, columns = matrix.shape
    channels = x.shape[3]
    tile, wide = (min(_TILE, max(16, next_power_of_two(size))) for size in (rows, columns))
    lanes = _CHANNEL_BYTES // x.element_size()
    grid = ceil_div(channels, lanes) * ceil_div(rows, tile) * regions * batch
    taken, base = x if minus is None else minus, out if onto is None else onto
    _multiply_kernel[(grid,)](
        matrix, x, taken, base, out, regions, rows, columns, channels,
        *matrix.stride(), *x.stride()[:3], *taken.stride()[:3], *base.stride()[:3], *out.stride()[:3],
        HAS_MINUS=minus is not None, HAS_ONTO=onto is not None, ROWS=tile, COLUMNS=wide, CHANNELS=lanes,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=1,
    )  # fmt: skip
