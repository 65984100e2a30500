"""Summaries of short runs of tokens, each with its own begin and size, in Triton: means, sums, weighted means, and the
gradients of each.

Where tokens count alike, a program holds the sums of some windows and goes through their tokens side by side: no sum
crosses threads. Where they do not, a warp holds one window.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, next_power_of_two, padded
from nearfield.ops._triton.walk import load_rows, store_rows

_ROWS = 16
"""Windows of one program that averages or adds."""
_TOKENS = 16
"""Of a window that is weighted, how many are held at a time."""
_WINDOWS = 4
"""Windows of one program that differentiates weighted ones: it adds up what they leave to the mean query."""


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
def _spread_sums_kernel(
    grad, source, out, starts, sizes, stride_sb, stride_sh, stride_sn, stride_sd, num_heads, num_windows, num_tokens,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """To every token the gradient of the sum, and that of the sum of squares twice as often as it is large."""
    batch_head = tl.program_id(0).to(tl.int64)
    source += batch_head // num_heads * stride_sb + batch_head % num_heads * stride_sh
    _, _, start, size = _window(starts, sizes, num_windows, ROWS)
    channel = tl.arange(0, PAD)
    place = grad + batch_head * DIM + channel
    plain = tl.load(place, mask=channel < DIM, other=0.0)[None, :]
    squared = tl.load(place + tl.num_programs(0) * DIM, mask=channel < DIM, other=0.0)[None, :]
    origin = tl.full([], 0, tl.int64)
    for number in tl.range(0, WINDOW, loop_unroll_factor=8):
        is_there = number < size
        rows = load_rows(source, origin, start + number, is_there, stride_sn, stride_sd, DIM, PAD, True)
        spread = plain + 2 * rows.to(tl.float32) * squared
        store_rows(out + batch_head * num_tokens * DIM, start + number, is_there, DIM, 1, spread, DIM, PAD)


@triton.jit
def _moments_of(moments, batch_head, num_batch_heads, DIM: tl.constexpr, PAD: tl.constexpr):
    """The mean query, and the mean of the squares."""
    channel = tl.arange(0, PAD)
    place = moments + batch_head * DIM + channel
    mean_query = tl.load(place, mask=channel < DIM, other=0.0)
    return mean_query, tl.load(place + num_batch_heads * DIM, mask=channel < DIM, other=0.0)


@triton.jit
def _scored(
    key, value, start, size, number, mean_query, scale, stride_kn, stride_kd, stride_vn, stride_vd,
    DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Of the tokens with these numbers in a window: which there are, keys, values, and scores with the mean query."""
    is_there = number < size
    one = load_rows(key, start, number, is_there, stride_kn, stride_kd, DIM, PAD, True)
    other = load_rows(value, start, number, is_there, stride_vn, stride_vd, DIM, PAD, True)
    one, other = one.to(tl.float32), other.to(tl.float32)
    score = tl.where(is_there, tl.sum(one * mean_query[None, :], 1) * scale, float("-inf"))
    return is_there, one, other, score


@triton.jit
def _weigh(
    key, value, start, size, mean_query, scale, stride_kn, stride_kd, stride_vn, stride_vd,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """A softmax over the tokens of one window, of their scores with the mean query: TOKENS at a time, all of them if
    there are so few. The highest score, the sum of exponentials, and the means of keys, of their squares and of values.
    """
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    key_sum = tl.zeros([PAD], tl.float32)
    square_sum = tl.zeros([PAD], tl.float32)
    value_sum = tl.zeros([PAD], tl.float32)
    number = tl.arange(0, TOKENS)
    for first in tl.range(0, WINDOW, TOKENS):
        _, one, other, score = _scored(
            key, value, start, size, first + number, mean_query, scale, stride_kn, stride_kd, stride_vn, stride_vd,
            DIM, PAD,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(score, 0))
        kept = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        total = total * kept + tl.sum(weight, 0)
        weighted = weight[:, None] * one
        key_sum = key_sum * kept + tl.sum(weighted, 0)
        square_sum = square_sum * kept + tl.sum(weighted * one, 0)
        value_sum = value_sum * kept + tl.sum(weight[:, None] * other, 0)
        top = higher
    return top, total, key_sum / total, square_sum / total, value_sum / total


@triton.jit
def _weighted_kernel(
    key, value, moments, keys, values, biases, starts, sizes,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
    num_heads, num_windows, scale,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """One warp holds a window, so that none waits for another's sums."""
    row, batch_head = tl.program_id(0) % num_windows, (tl.program_id(0) // num_windows).to(tl.int64)
    batch, head = batch_head // num_heads, batch_head % num_heads
    start, size = tl.load(starts + row).to(tl.int64), tl.load(sizes + row)
    mean_query, square = _moments_of(moments, batch_head, tl.num_programs(0) // num_windows, DIM, PAD)
    variance = tl.maximum(square - mean_query * mean_query, 0.0)
    top, total, mean, mean_square, mean_value = _weigh(
        key + batch * stride_kb + head * stride_kh, value + batch * stride_vb + head * stride_vh, start, size,
        mean_query, scale, stride_kn, stride_kd, stride_vn, stride_vd, WINDOW, TOKENS, DIM, PAD,
    )  # fmt: skip
    rest = tl.sum(tl.maximum(mean_square - mean * mean, 0.0) * variance, 0) * (scale * scale / 2)
    bias = tl.log(total) + top - scale * tl.sum(mean * mean_query, 0) + 2 * tl.log(1 + rest / 2)
    found = batch_head * num_windows + row
    channel = tl.arange(0, PAD)
    tl.store(keys + found * DIM + channel, mean.to(keys.dtype.element_ty), mask=channel < DIM)
    tl.store(values + found * DIM + channel, mean_value.to(values.dtype.element_ty), mask=channel < DIM)
    tl.store(biases + found, bias)


@triton.jit
def _weighted_gradient_kernel(
    grad_keys, grad_values, grad_bias, key, value, moments, grad_key, grad_value, partials, starts, sizes,
    stride_gkb, stride_gkh, stride_gkn, stride_gkd, stride_gvb, stride_gvh, stride_gvn, stride_gvd,
    stride_gbb, stride_gbh, stride_gbn, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, num_heads, num_windows, num_tokens, num_programs, scale,
    WINDOWS: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Windows are weighed again; see the reference for the formulas. One warp takes WINDOWS of them in turn, and leaves
    in its part of `partials` what they add to the gradient of the moments."""
    batch_head = (tl.program_id(0) // num_programs).to(tl.int64)
    program = tl.program_id(0) % num_programs
    batch, head = batch_head // num_heads, batch_head % num_heads
    key += batch * stride_kb + head * stride_kh
    value += batch * stride_vb + head * stride_vh
    grad_keys += batch * stride_gkb + head * stride_gkh
    grad_values += batch * stride_gvb + head * stride_gvh
    grad_bias += batch * stride_gbb + head * stride_gbh
    batch_heads = tl.num_programs(0) // num_programs
    mean_query, square = _moments_of(moments, batch_head, batch_heads, DIM, PAD)
    has_spread = square > mean_query * mean_query
    spread = tl.where(has_spread, square - mean_query * mean_query, 0.0)
    channel = tl.arange(0, PAD)
    number = tl.arange(0, TOKENS)
    to_centre = tl.zeros([PAD], tl.float32)
    to_spread = tl.zeros([PAD], tl.float32)
    for step in tl.range(0, tl.minimum(WINDOWS, num_windows - program * WINDOWS)):
        row = program * WINDOWS + step
        start, size = tl.load(starts + row).to(tl.int64), tl.load(sizes + row)
        top, total, mean, mean_square, mean_value = _weigh(
            key, value, start, size, mean_query, scale, stride_kn, stride_kd, stride_vn, stride_vd,
            WINDOW, TOKENS, DIM, PAD,
        )  # fmt: skip
        is_channel = channel < DIM
        long_row = row.to(tl.int64)
        of_key = tl.load(grad_keys + long_row * stride_gkn + channel * stride_gkd, mask=is_channel, other=0.0)
        of_value = tl.load(
            grad_values + long_row * stride_gvn + channel * stride_gvd, mask=is_channel, other=0.0
        )
        of_key, of_value = of_key.to(tl.float32), of_value.to(tl.float32)
        of_bias = tl.load(grad_bias + long_row * stride_gbn)
        variance = tl.maximum(mean_square - mean * mean, 0.0)
        rest = tl.sum(variance * spread, 0) * (scale * scale / 2)
        of_rest = of_bias / (1 + rest / 2) * (scale * scale / 2)
        of_square = tl.where(variance > 0, of_rest * spread, 0.0)
        of_mean = of_key - 2 * mean * of_square - scale * of_bias * mean_query
        # Of all weights together, as much as a token's own is less by: the softmax sums to one.
        shared = tl.sum(of_mean * mean + of_square * mean_square + of_value * mean_value, 0) - of_bias
        for first in tl.range(0, WINDOW, TOKENS):
            is_there, one, other, score = _scored(
                key, value, start, size, first + number, mean_query, scale, stride_kn, stride_kd, stride_vn, stride_vd,
                DIM, PAD,
            )  # fmt: skip
            weight = tl.exp(score - top) / total
            own = one * (of_mean[None, :] + of_square[None, :] * one) + of_value[None, :] * other
            of_score = weight * (tl.sum(own, 1) - shared)
            to_key = weight[:, None] * (of_mean[None, :] + 2 * of_square[None, :] * one)
            to_key += scale * of_score[:, None] * mean_query[None, :]
            place = batch_head * num_tokens * DIM
            token = start + first + number
            store_rows(grad_key + place, token, is_there, DIM, 1, to_key, DIM, PAD)
            store_rows(
                grad_value + place, token, is_there, DIM, 1, weight[:, None] * of_value[None, :], DIM, PAD
            )
            to_centre += scale * tl.sum(of_score[:, None] * one, 0)
        to_centre -= scale * of_bias * mean
        to_spread += tl.where(has_spread, of_rest * variance, 0.0)
    place = partials + (batch_head * num_programs + program) * DIM + channel
    tl.store(place, to_centre - 2 * mean_query * to_spread, mask=channel < DIM)
    others = batch_heads.to(tl.int64) * num_programs * DIM
    tl.store(place + others, to_spread, mask=channel < DIM)


def unsupported(x: Tensor) -> str | None:
    """Why the kernels cannot take this tensor, or None."""
    return unsupported_tensor(x, most_channels=128)


def window_means_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """See `nearfield.ops.windows.reference`."""
    batch, heads, _, dim = x.shape
    means = torch.empty(batch, heads, len(starts), dim, device=x.device, dtype=x.dtype)
    _means_kernel[(batch * heads, ceil_div(len(starts), _ROWS))](
        x, means, starts, sizes, *x.stride(), heads, len(starts),
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return means


def window_sums_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """See `nearfield.ops.windows.reference`."""
    batch, heads, _, dim = x.shape
    programs = ceil_div(len(starts), _ROWS)
    sums = torch.empty(2, batch, heads, programs, dim, device=x.device, dtype=torch.float32)
    _sums_kernel[(batch * heads, programs)](
        x, sums, starts, sizes, *x.stride(), heads, len(starts),
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return sums.sum(dim=3)


def window_sums_backward(grad: Tensor, x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """See `nearfield.ops.windows.reference`."""
    batch, heads, length, dim = x.shape
    out = torch.zeros(x.shape, device=x.device, dtype=x.dtype)
    _spread_sums_kernel[(batch * heads, ceil_div(len(starts), _ROWS))](
        grad.contiguous(), x, out, starts, sizes, *x.stride(), heads, len(starts), length,
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return out


def weighted_windows_forward(
    key: Tensor, value: Tensor, moments: Tensor, starts: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nearfield.ops.windows.reference`."""
    batch, heads, _, dim = key.shape
    keys, values = (
        torch.empty(batch, heads, len(starts), dim, device=key.device, dtype=x.dtype) for x in (key, value)
    )
    bias = torch.empty(batch, heads, len(starts), device=key.device, dtype=moments.dtype)
    _weighted_kernel[(batch * heads * len(starts),)](  # the second side of a grid has an end
        key, value, moments.contiguous(), keys, values, bias, starts, sizes,
        *key.stride(), *value.stride(), heads, len(starts), scale,
        WINDOW=window, TOKENS=min(next_power_of_two(window), _TOKENS), DIM=dim, PAD=padded(dim), num_warps=1,
    )  # fmt: skip
    return keys, values, bias


def weighted_windows_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    moments: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nearfield.ops.windows.reference`."""
    batch, heads, length, dim = key.shape
    # Tokens in no window get none.
    grad_key, grad_value = (torch.zeros(x.shape, device=x.device, dtype=x.dtype) for x in (key, value))
    programs = ceil_div(len(starts), _WINDOWS)
    partials = torch.empty(2, batch, heads, programs, dim, device=key.device, dtype=torch.float32)
    _weighted_gradient_kernel[(batch * heads * programs,)](
        *grads, key, value, moments.contiguous(), grad_key, grad_value, partials, starts, sizes,
        *(stride for grad in grads for stride in grad.stride()), *key.stride(), *value.stride(),
        heads, len(starts), length, programs, scale,
        WINDOWS=_WINDOWS, WINDOW=window, TOKENS=min(next_power_of_two(window), _TOKENS),
        DIM=dim, PAD=padded(dim), num_warps=1,
    )  # fmt: skip
    return grad_key, grad_value, partials.sum(dim=3)


def window_means_backward(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int) -> Tensor:
    """See `nearfield.ops.windows.reference`."""
    batch, heads, _, dim = grad.shape
    out = torch.zeros(batch, heads, length, dim, device=grad.device, dtype=grad.dtype)
    _spread_kernel[(batch * heads, ceil_div(len(starts), _ROWS))](
        grad, out, starts, sizes, *grad.stride(), heads, len(starts), length,
        WINDOW=window, ROWS=_ROWS, DIM=dim, PAD=padded(dim), num_warps=4,
    )  # fmt: skip
    return out
