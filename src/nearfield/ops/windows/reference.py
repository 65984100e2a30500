"""Summaries of short runs of tokens, each with its own begin and size: the specification."""

from typing import NamedTuple

import torch
from torch import Tensor


def window_means_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """`[B, H, N, D]` to `[B, H, windows, D]`; sums are float32 at least.

    Args:
        starts: `[windows]`, the first token of each.
        sizes: `[windows]`, how many tokens each holds, from 1 to `window`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    total = tokens_of(x, starts, sizes, window).sum(dim=3, dtype=wide)
    means: Tensor = total / sizes[:, None]
    return means.to(x.dtype)


def window_means_backward(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int) -> Tensor:
    """Every token gets its share of the gradient of the mean it is part of; windows share no tokens."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    place, exists = window_places(starts, sizes, window)
    share = (grad.to(wide) / sizes[:, None]).unsqueeze(3) * exists[:, :, None]
    spread = torch.zeros(*grad.shape[:2], length, grad.shape[3], dtype=wide, device=grad.device)
    spread.index_add_(2, place.clamp(max=length - 1).flatten(), share.flatten(2, 3))
    return spread.to(grad.dtype)


def window_sums_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """Sums over the tokens of all windows, and of their squares, `[B, H, N, D]` to `[2, B, H, D]`; float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens = tokens_of(x, starts, sizes, window)
    # Squares of what float16 can hold may be beyond it.
    return torch.stack([tokens.sum(dim=(2, 3), dtype=wide), tokens.to(wide).square().sum(dim=(2, 3))])


def window_sums_backward(grad: Tensor, x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """To a token in a window belongs the gradient of the sum, and that of the sum of squares twice as often as it is
    large; to others none."""
    place, exists = window_places(starts, sizes, window)
    times = torch.zeros(x.shape[2], dtype=torch.int32, device=x.device)
    times.index_add_(0, place.clamp(max=x.shape[2] - 1).flatten(), exists.flatten().int())
    plain, squared = grad.unsqueeze(3).unbind()
    spread = torch.addcmul(plain, x.to(grad.dtype), squared, value=2)
    return spread.masked_fill(times[:, None] == 0, 0).to(x.dtype)


def weighted_windows_forward(
    key: Tensor, value: Tensor, moments: Tensor, starts: Tensor, sizes: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[B, G, windows, D]` in which tokens count as they do for the mean query, and biases
    `[B, G, windows]`; see `nearfield.ops.windows.api`. Float32 at least inside.

    Args:
        moments: `[2, B, G, D]`, the means of the queries and of their squares, channel by channel.
    """
    found = _weigh(key, moments, starts, sizes, window, scale)
    values = tokens_of(value, starts, sizes, window).to(moments.dtype)
    mean_value = torch.einsum("bgwn,bgwnd->bgwd", found.weights, values)
    bias = found.scores.logsumexp(dim=3) - scale * torch.einsum("bgwd,bgd->bgw", found.mean, moments[0])
    return found.mean.to(key.dtype), mean_value.to(value.dtype), bias + 2 * torch.log1p(found.rest / 2)


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
    """Gradients of keys, values and moments by those of `weighted_windows_forward`, of which nothing need be kept.

    Windows are weighed again. Tokens in no window get none.
    """
    found = _weigh(key, moments, starts, sizes, window, scale)
    values = tokens_of(value, starts, sizes, window).to(moments.dtype)
    grad_keys, grad_values, grad_bias = (grad.to(moments.dtype).unsqueeze(3) for grad in grads)
    grad_bias, keys, weights = grad_bias.unsqueeze(4), found.keys, found.weights.unsqueeze(4)
    mean, variance, rest = found.mean.unsqueeze(3), found.variance.unsqueeze(3), found.rest[..., None, None]
    centre, square = moments[:, :, :, None, None]
    has_spread = square > centre.square()
    spread = (square - centre.square()) * has_spread

    # From what was made back to the means, to the weights, and to the scores.
    grad_rest = grad_bias / (1 + rest / 2) * (scale**2 / 2)
    grad_square = grad_rest * spread * (variance > 0)
    grad_mean = grad_keys - 2 * mean * grad_square - scale * grad_bias * centre
    grad_weights = (grad_mean * keys + grad_square * keys.square() + grad_values * values).sum(4, True)
    centred = grad_weights - (weights * grad_weights).sum(3, True)
    grad_scores = weights * (centred + grad_bias)

    to_keys = weights * (grad_mean + 2 * grad_square * keys) + scale * grad_scores * centre
    to_spread = (grad_rest * variance).sum(2, True) * has_spread
    to_centre = scale * ((grad_scores * keys).sum(3, True) - grad_bias * mean).sum(2, True)
    grad_moments = torch.stack([to_centre - 2 * centre * to_spread, to_spread]).flatten(3, 5)
    place, exists = window_places(starts, sizes, window)
    grad_key = _put_back(to_keys, place, exists, key)
    grad_value = _put_back(weights * grad_values, place, exists, value)
    return grad_key, grad_value, grad_moments


class _Weighed(NamedTuple):
    """Windows whose tokens count as they do for the mean query.

    Args:
        keys: of the tokens, `[B, G, windows, window, D]`.
        scores, weights: theirs, `[B, G, windows, window]`.
        mean, variance: of the keys, `[B, G, windows, D]`.
        rest: half of the variance of the scores over all queries, `[B, G, windows]`.
    """

    keys: Tensor
    scores: Tensor
    weights: Tensor
    mean: Tensor
    variance: Tensor
    rest: Tensor


def _weigh(
    key: Tensor, moments: Tensor, starts: Tensor, sizes: Tensor, window: int, scale: float
) -> _Weighed:
    centre, square = moments.unbind()
    spread = (square - centre.square()).clamp(min=0)
    keys = tokens_of(key, starts, sizes, window).to(moments.dtype)
    _, exists = window_places(starts, sizes, window)
    scores = scale * torch.einsum("bgwnd,bgd->bgwn", keys, centre)
    scores = scores.masked_fill(~exists, float("-inf"))
    weights = scores.softmax(dim=3)
    mean, mean_square = (torch.einsum("bgwn,bgwnd->bgwd", weights, x) for x in (keys, keys.square()))
    variance = (mean_square - mean.square()).clamp(min=0)
    rest = scale**2 / 2 * (variance * spread[:, :, None]).sum(dim=3)
    return _Weighed(keys, scores, weights, mean, variance, rest)


def _put_back(spent: Tensor, place: Tensor, exists: Tensor, x: Tensor) -> Tensor:
    """What belongs to the tokens of windows, `[B, H, windows, window, D]`, as a gradient of `x`."""
    grad = torch.zeros(x.shape, dtype=spent.dtype, device=x.device)
    spent = spent.masked_fill(~exists[:, :, None], 0)
    grad.index_add_(2, place.clamp(max=x.shape[2] - 1).flatten(), spent.flatten(2, 3))
    return grad.to(x.dtype)


def tokens_of(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """The tokens of each window, `[B, H, windows, window, D]`; zeros where there are none."""
    if _are_whole(starts, sizes, window):
        whole: Tensor = x.narrow(2, int(starts[0]), len(starts) * window).unflatten(2, (-1, window))
        return whole
    place, exists = window_places(starts, sizes, window)
    found: Tensor = x.index_select(2, place.clamp(max=x.shape[2] - 1).flatten()).unflatten(2, place.shape)
    return found.masked_fill(~exists[:, :, None], 0)


def _are_whole(starts: Tensor, sizes: Tensor, window: int) -> bool:
    """Whether windows are full and follow each other, so that nothing need be copied.

    Asked on a CPU alone: elsewhere it would wait for the device, and a graph that is traced must hold for all windows.
    """
    is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if starts.device.type != "cpu" or type(starts) is not Tensor or is_traced or not len(starts):
        return False
    return bool((sizes == window).all()) and bool((starts.diff() == window).all())


def window_places(starts: Tensor, sizes: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of each window stand, and which of them there are; both `[windows, window]`."""
    number = torch.arange(window, device=starts.device)
    return starts[:, None].long() + number, number < sizes[:, None]
