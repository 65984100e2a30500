"""Summaries of short runs of tokens, each with its own begin and size, in Triton: means, their adjoint, sums, weighted
means.

Where tokens count alike, a program holds the sums of some windows and goes through their tokens side by side: no sum
crosses threads. Where they do not, a warp holds one window.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels import unsupported_tensor
from nearfield.kernels.launch import padded
from nearfield.kernels.walk import load_rows, store_rows

_ROWS = 16
"""Windows of one program that averages or adds."""
_TOKENS = 16
"""Of a window that is weighted, how many are held at a time."""


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
def _sums_kernel(
    source, sums, starts, sizes, stride_sb, stride_sh, stride_sn, stride_sd, num_heads, num_windows,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """What the tokens of this program's windows add to the sum, and to that of the squares."""
    batch_head = tl.program_id(0).to(tl.int64)
    source += batch_head // num_heads * stride_sb + batch_head % num_heads * stride_sh
    _, _, start, size = _window(starts, sizes, num_windows, ROWS)
    total = tl.zeros([ROWS, PAD], tl.float32)
    square = tl.zeros([ROWS, PAD], tl.float32)
    origin = tl.full([], 0, tl.int64)
    for number in tl.range(0, WINDOW, loop_unroll_factor=8):
        rows = load_rows(source, origin, start + number, number < size, stride_sn, stride_sd, DIM, PAD, True)
        wide = rows.to(tl.float32)
        total += wide
        square += wide * wide
    channel = tl.arange(0, PAD)
    place = sums + (batch_head * tl.num_programs(1) + tl.program_id(1)) * DIM + channel
    tl.store(place, tl.sum(total, 0), mask=channel < DIM)
    others = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * DIM
    tl.store(place + others, tl.sum(square, 0), mask=channel < DIM)


@triton.jit
def _weighted_kernel(
    key, value, moments, keys, values, biases, starts, sizes,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
    num_heads, num_windows, scale,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """A softmax over the tokens of one window, of their scores with the mean query: TOKENS at a time, all of them if
    there are so few. One warp holds them, so that none waits for another's sums."""
    row, batch_head = tl.program_id(0) % num_windows, (tl.program_id(0) // num_windows).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    key += batch * stride_kb + head * stride_kh
    value += batch * stride_vb + head * stride_vh
    start, size = tl.load(starts + row).to(tl.int64), tl.load(sizes + row)
    channel = tl.arange(0, PAD)
    place = moments + batch_head * DIM + channel
    mean_query = tl.load(place, mask=channel < DIM, other=0.0)
    square = tl.load(place + tl.num_programs(0) // num_windows * DIM, mask=channel < DIM, other=0.0)
    variance = tl.maximum(square - mean_query * mean_query, 0.0)

    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    key_sum = tl.zeros([PAD], tl.float32)
    square_sum = tl.zeros([PAD], tl.float32)
    value_sum = tl.zeros([PAD], tl.float32)
    number = tl.arange(0, TOKENS)
    for first in tl.range(0, WINDOW, TOKENS):
        is_there = first + number < size
        one = load_rows(key, start, first + number, is_there, stride_kn, stride_kd, DIM, PAD, True)
        other = load_rows(value, start, first + number, is_there, stride_vn, stride_vd, DIM, PAD, True)
        one, other = one.to(tl.float32), other.to(tl.float32)
        score = tl.where(is_there, tl.sum(one * mean_query[None, :], 1) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        kept = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        total = total * kept + tl.sum(weight, 0)
        weighted = weight[:, None] * one
        key_sum = key_sum * kept + tl.sum(weighted, 0)
        square_sum = square_sum * kept + tl.sum(weighted * one, 0)
        value_sum = value_sum * kept + tl.sum(weight[:, None] * other, 0)
        top = higher

    mean = key_sum / total
    rest = tl.sum(tl.maximum(square_sum / total - mean * mean, 0.0) * variance, 0) * (scale * scale / 2)
    bias = tl.log(total) + top - scale * tl.sum(mean * mean_query, 0) + 2 * tl.log(1 + rest / 2)
    found = batch_head * num_windows + row
    tl.store(keys + found * DIM + channel, mean.to(keys.dtype.element_ty), mask=channel < DIM)
    tl.store(
        values + found * DIM + channel, (value_sum / total).to(values.dtype.element_ty), mask=channel < DIM
    )
    tl.store(biases + found, bias)


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


def window_sums_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """See `nearfield.reference.windows`."""
    batch, heads, _, dim = x.shape
    programs = triton.cdiv(len(starts), _ROWS)
    sums = torch.empty(2, batch, heads, programs, dim, device=x.device, dtype=torch.float32)
    _sums_kernel[(batch * heads, programs)](
        x, sums, starts, sizes, *x.stride(), heads, len(starts),
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return sums.sum(dim=3)


def weighted_windows_forward(
    key: Tensor, value: Tensor, moments: Tensor, starts: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nearfield.reference.windows`."""
    batch, heads, _, dim = key.shape
    keys, values = (
        torch.empty(batch, heads, len(starts), dim, device=key.device, dtype=x.dtype) for x in (key, value)
    )
    bias = torch.empty(batch, heads, len(starts), device=key.device, dtype=moments.dtype)
    _weighted_kernel[(batch * heads * len(starts),)](  # the second side of a grid has an end
        key, value, moments.contiguous(), keys, values, bias, starts, sizes,
        *key.stride(), *value.stride(), heads, len(starts), scale,
        WINDOW=window, TOKENS=min(triton.next_power_of_2(window), _TOKENS), DIM=dim, PAD=padded(dim), num_warps=1,
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
