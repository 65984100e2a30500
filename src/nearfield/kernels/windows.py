"""Summaries of short runs of tokens, each with its own begin and size, in Triton: means, their adjoint, weighted means.

A program holds the sums of some windows and goes through their tokens side by side: no sum crosses threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels import unsupported_tensor
from nearfield.kernels.launch import padded
from nearfield.kernels.walk import load_rows, store_rows

_ROWS = 16
"""Windows of one program."""


@triton.jit
def _window(starts, sizes, num_windows, ROWS: tl.constexpr):
    """The windows of this program: their numbers, which there are, first tokens and sizes."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < num_windows
    start = tl.load(starts + row, mask=exists, other=0)
    return row, exists, start.to(tl.int64), tl.load(sizes + row, mask=exists, other=0)


@triton.jit
def _means_kernel(
    source, means, starts, sizes, stride_sb, stride_sh, stride_sn, stride_sd, num_heads, num_windows,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64)
    source += batch_head // num_heads * stride_sb + batch_head % num_heads * stride_sh
    row, exists, start, size = _window(starts, sizes, num_windows, ROWS)
    total = tl.zeros([ROWS, PAD], tl.float32)
    origin = tl.full([], 0, tl.int64)
    for number in tl.range(0, WINDOW, loop_unroll_factor=16):
        rows = load_rows(source, origin, start + number, number < size, stride_sn, stride_sd, DIM, PAD, True)
        total += rows.to(tl.float32)
    mean = total / tl.maximum(size, 1).to(tl.float32)[:, None]
    store_rows(means + batch_head * num_windows * DIM, row, exists, DIM, 1, mean, DIM, PAD)


@triton.jit
def _spread_kernel(
    grad, out, starts, sizes, stride_gb, stride_gh, stride_gn, stride_gd, num_heads, num_windows, num_tokens,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64)
    grad += batch_head // num_heads * stride_gb + batch_head % num_heads * stride_gh
    row, exists, start, size = _window(starts, sizes, num_windows, ROWS)
    origin = tl.full([], 0, tl.int64)
    rows = load_rows(grad, origin, row.to(tl.int64), exists, stride_gn, stride_gd, DIM, PAD, True)
    share = rows.to(tl.float32) / tl.maximum(size, 1).to(tl.float32)[:, None]
    for number in tl.range(0, WINDOW, loop_unroll_factor=16):
        store_rows(
            out + batch_head * num_tokens * DIM, start + number, number < size, DIM, 1, share, DIM, PAD
        )


@triton.jit
def _weighted_kernel(
    key, value, centre, spread, keys, values, biases, starts, sizes,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
    num_heads, num_windows, scale,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """A softmax over the tokens of each window, of their scores with the mean query, in one pass."""
    batch_head = tl.program_id(0).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    key += batch * stride_kb + head * stride_kh
    value += batch * stride_vb + head * stride_vh
    row, exists, start, size = _window(starts, sizes, num_windows, ROWS)
    channel = tl.arange(0, PAD)
    mean_query = tl.load(centre + batch_head * DIM + channel, mask=channel < DIM, other=0.0).to(tl.float32)
    variance = tl.load(spread + batch_head * DIM + channel, mask=channel < DIM, other=0.0).to(tl.float32)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    key_sum = tl.zeros([ROWS, PAD], tl.float32)
    square_sum = tl.zeros([ROWS, PAD], tl.float32)
    value_sum = tl.zeros([ROWS, PAD], tl.float32)
    origin = tl.full([], 0, tl.int64)
    for number in tl.range(0, WINDOW, loop_unroll_factor=4):
        is_there = number < size
        one = load_rows(key, origin, start + number, is_there, stride_kn, stride_kd, DIM, PAD, True).to(
            tl.float32
        )
        other = load_rows(value, origin, start + number, is_there, stride_vn, stride_vd, DIM, PAD, True).to(
            tl.float32
        )
        score = tl.where(is_there, tl.sum(one * mean_query[None, :], 1) * scale, float("-inf"))
        higher = tl.maximum(top, score)
        finite = tl.where(higher == float("-inf"), 0.0, higher)  # of windows that are not there
        kept = tl.exp(top - finite)
        weight = tl.exp(score - finite)
        total = total * kept + weight
        key_sum = key_sum * kept[:, None] + weight[:, None] * one
        square_sum = square_sum * kept[:, None] + weight[:, None] * one * one
        value_sum = value_sum * kept[:, None] + weight[:, None] * other
        top = higher

    total = tl.where(exists, total, 1.0)
    mean = key_sum / total[:, None]
    rest = tl.sum(tl.maximum(square_sum / total[:, None] - mean * mean, 0.0) * variance[None, :], 1) * (
        scale * scale / 2
    )
    bias = tl.log(total) + top - scale * tl.sum(mean * mean_query[None, :], 1) + 2 * tl.log(1 + rest / 2)
    place = batch_head * num_windows
    store_rows(keys + place * DIM, row, exists, DIM, 1, mean, DIM, PAD)
    store_rows(values + place * DIM, row, exists, DIM, 1, value_sum / total[:, None], DIM, PAD)
    tl.store(biases + place + row, bias, mask=exists)


def unsupported(x: Tensor) -> str | None:
    """Why the kernels cannot take this tensor, or None."""
    return unsupported_tensor(x, most_channels=128)


def window_means_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """See `nearfield.reference.windows`."""
    batch, heads, _, dim = x.shape
    means = torch.empty(batch, heads, len(starts), dim, device=x.device, dtype=x.dtype)
    _means_kernel[(batch * heads, triton.cdiv(len(starts), _ROWS))](
        x, means, starts, sizes, *x.stride(), heads, len(starts),
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return means


def weighted_windows_forward(
    key: Tensor,
    value: Tensor,
    centre: Tensor,
    spread: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nearfield.reference.windows`."""
    batch, heads, _, dim = key.shape
    keys, values = (
        torch.empty(batch, heads, len(starts), dim, device=key.device, dtype=x.dtype) for x in (key, value)
    )
    bias = torch.empty(batch, heads, len(starts), device=key.device, dtype=centre.dtype)
    _weighted_kernel[(batch * heads, triton.cdiv(len(starts), _ROWS))](
        key, value, centre.contiguous(), spread.contiguous(), keys, values, bias, starts, sizes,
        *key.stride(), *value.stride(), heads, len(starts), scale,
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return keys, values, bias


def window_means_backward(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int) -> Tensor:
    """See `nearfield.reference.windows`."""
    batch, heads, _, dim = grad.shape
    out = torch.zeros(batch, heads, length, dim, device=grad.device, dtype=grad.dtype)
    _spread_kernel[(batch * heads, triton.cdiv(len(starts), _ROWS))](
        grad, out, starts, sizes, *grad.stride(), heads, len(starts), length,
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return out
