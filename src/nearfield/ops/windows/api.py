"""Summaries of short runs of tokens: what a far field reads in place of the tokens themselves.

Operators whose windows are tensors: a traced graph is the same for every size of image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._types import Impl
from nearfield.ops import _triton as kernels
from nearfield.ops._op import dispatch, node
from nearfield.ops.windows import reference


def window_means(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: Impl = "auto") -> Tensor:
    """The mean of every window of `x [B, H, N, D]`, `[B, H, windows, D]`. Differentiable.

    Args:
        starts: `[windows]`, the first token of each.
        sizes: `[windows]`, how many tokens each holds, from 1 to `window`. No token is in two windows.
    """
    read = dispatch(_means, torch.ops.nearfield.window_means, x, differentiable=_means_node)
    means: Tensor = read(x, starts, sizes, window, impl)
    return means


class WeightedWindows(NamedTuple):
    """What windows are to queries: keys and values `[B, G, windows, D]`, and biases `[B, H, windows]`."""

    keys: Tensor
    values: Tensor
    bias: Tensor


def weighted_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
    moments: Tensor | None = None,
) -> WeightedWindows:
    """Keys, values and biases of windows that stand for their tokens to second order.

    To a query, a window weighs as much as the log of the sum of the exponentials of its tokens' scores. Expanded at the
    mean query, its slope is the mean key, with tokens counting as they do for that query; values are averaged alike.
    What is left, half the variance of the scores, is taken over all queries, channel by channel. A window of few tokens
    cannot weigh much more than its largest, so large values are damped.

    Queries of tokens in no window have no part in the mean. Heads that share keys share it.

    Args:
        moments: the means of all queries and of their squares, `[2, B, G, D]`, where these are not all of them.
    """
    # Autocast would round scores, and squares whose difference is wanted.
    with torch.autocast(query.device.type, enabled=False):
        if moments is None:
            moments = query_sums(query, starts, sizes, window, key.shape[1], impl) / sizes.sum()
        scale = query.shape[3] ** -0.5 if scale is None else scale
        operator = torch.ops.nearfield.weighted_windows
        read = dispatch(_weighted, operator, key, value, moments, differentiable=_weighted_node)
        keys, values, bias = read(key, value, moments, starts, sizes, window, scale, impl)
    shared_by = query.shape[1] // key.shape[1]
    return WeightedWindows(keys, values, bias if shared_by == 1 else bias.repeat_interleave(shared_by, dim=1))


def query_sums(
    query: Tensor, starts: Tensor, sizes: Tensor, window: int, groups: int, impl: Impl = "auto"
) -> Tensor:
    """Sums of queries, and of their squares, over the tokens of all windows, averaged over the heads of each group:
    `[2, B, groups, D]`, in float32 or more. Differentiable."""
    read = dispatch(_sums, torch.ops.nearfield.window_sums, query, differentiable=_sums_node)
    sums: Tensor = read(query, starts, sizes, window, impl)
    return sums if query.shape[1] == groups else sums.unflatten(2, (groups, -1)).mean(dim=3)


def _module(x: Tensor, impl: str) -> Any:
    """The kernels, where they are wanted and can run."""
    return (kernels.helper("windows", x) if kernels.are_wanted(impl, x) else None) or reference


# -- the operators: each a function, and what torch is told of it ---------------------------------------------------


def _means(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    with torch.cuda.device_of(x):
        means: Tensor = _module(x, impl).window_means_forward(x, starts, sizes, window)
    return means


def _means_backward(
    grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int, impl: str
) -> Tensor:
    with torch.cuda.device_of(grad):
        spread: Tensor = _module(grad, impl).window_means_backward(grad, starts, sizes, window, length)
    return spread


def _remember_means(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, starts, sizes, ctx.window, ctx.impl = inputs
    ctx.length = x.shape[2]
    ctx.save_for_backward(starts, sizes)


def _differentiate_means(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    backward = dispatch(_means_backward, torch.ops.nearfield.window_means_backward, grad)
    return backward(grad, *ctx.saved_tensors, ctx.window, ctx.length, ctx.impl), None, None, None, None


_means_operator = torch.library.custom_op("nearfield::window_means", _means, mutates_args=())
_means_operator.register_autograd(_differentiate_means, setup_context=_remember_means)
_means_node = node(_means, _remember_means, _differentiate_means)


@_means_operator.register_fake
def _(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    return x.new_empty(*x.shape[:2], starts.shape[0], x.shape[3])


_means_backward_operator = torch.library.custom_op(
    "nearfield::window_means_backward", _means_backward, mutates_args=()
)


@_means_backward_operator.register_fake
def _(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int, impl: str) -> Tensor:
    return grad.new_empty(*grad.shape[:2], length, grad.shape[3])


def _sums(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    with torch.cuda.device_of(x):
        sums: Tensor = _module(x, impl).window_sums_forward(x, starts, sizes, window)
    return sums


def _sums_backward(grad: Tensor, x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    with torch.cuda.device_of(x):
        spread: Tensor = _module(x, impl).window_sums_backward(grad, x, starts, sizes, window)
    return spread


def _remember_sums(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, starts, sizes, ctx.window, ctx.impl = inputs
    ctx.save_for_backward(x, starts, sizes)


def _differentiate_sums(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    backward = dispatch(_sums_backward, torch.ops.nearfield.window_sums_backward, grad, *saved)
    return backward(grad, *saved, ctx.window, ctx.impl), None, None, None, None


_sums_operator = torch.library.custom_op("nearfield::window_sums", _sums, mutates_args=())
_sums_operator.register_autograd(_differentiate_sums, setup_context=_remember_sums)
_sums_node = node(_sums, _remember_sums, _differentiate_sums)


@_sums_operator.register_fake
def _(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(2, *x.shape[:2], x.shape[3], dtype=wide)


_sums_backward_operator = torch.library.custom_op(
    "nearfield::window_sums_backward", _sums_backward, mutates_args=()
)


@_sums_backward_operator.register_fake
def _(grad: Tensor, x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    return x.new_empty(x.shape)


def _weighted(
    key: Tensor,
    value: Tensor,
    moments: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(key):
        found: tuple[Tensor, Tensor, Tensor] = _module(key, impl).weighted_windows_forward(
            key, value, moments, starts, sizes, window, scale
        )
    return found


def _weighted_backward(
    grad_keys: Tensor,
    grad_values: Tensor,
    grad_bias: Tensor,
    key: Tensor,
    value: Tensor,
    moments: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = grad_keys, grad_values, grad_bias
    with torch.cuda.device_of(key), torch.autocast(key.device.type, enabled=False):
        found: tuple[Tensor, Tensor, Tensor] = _module(key, impl).weighted_windows_backward(
            grads, key, value, moments, starts, sizes, window, scale
        )
    return found


def _remember_weighted(ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    key, value, moments, starts, sizes, ctx.window, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(key, value, moments, starts, sizes)


def _differentiate_weighted(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    backward = dispatch(_weighted_backward, torch.ops.nearfield.weighted_windows_backward, *grads, *saved)
    return *backward(*grads, *saved, ctx.window, ctx.scale, ctx.impl), None, None, None, None, None


_weighted_operator = torch.library.custom_op("nearfield::weighted_windows", _weighted, mutates_args=())
_weighted_operator.register_autograd(_differentiate_weighted, setup_context=_remember_weighted)
_weighted_node = node(_weighted, _remember_weighted, _differentiate_weighted)


@_weighted_operator.register_fake
def _(key: Tensor, value: Tensor, moments: Tensor, starts: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*key.shape[:2], starts.shape[0])
    return (
        key.new_empty(*shape, key.shape[3]),
        value.new_empty(*shape, value.shape[3]),
        moments.new_empty(shape),
    )


_weighted_backward_operator = torch.library.custom_op(
    "nearfield::weighted_windows_backward", _weighted_backward, mutates_args=()
)


@_weighted_backward_operator.register_fake
def _(
    grad_keys: Tensor,
    grad_values: Tensor,
    grad_bias: Tensor,
    key: Tensor,
    value: Tensor,
    moments: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return key.new_empty(key.shape), value.new_empty(value.shape), moments.new_empty(moments.shape)
