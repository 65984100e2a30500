"""Summaries of short runs of tokens, which a far field reads instead of the tokens.

Windows are tensors, so a traced graph is the same for every size of image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._types import Impl
from nearfield.ops._op import Gradient, Operation
from nearfield.ops._triton import kernels
from nearfield.ops.windows import reference
from nearfield.ops.windows.slopes import Slope, slope_of


def window_means(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: Impl = "auto") -> Tensor:
    """The mean of every window of `x [B, H, N, D]`, `[B, H, windows, D]`. Differentiable.

    Args:
        starts: `[windows]`, the first token of each.
        sizes: `[windows]`, how many tokens each holds, from 1 to `window`. No token is in two windows.
    """
    means: Tensor = _means(x, starts, sizes, window, impl)
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
        keys, values, bias = _weighted(key, value, moments, starts, sizes, window, scale, impl)
    shared_by = query.shape[1] // key.shape[1]
    return WeightedWindows(keys, values, bias if shared_by == 1 else bias.repeat_interleave(shared_by, dim=1))


def window_slope(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    windows: WeightedWindows,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    readers: Tensor,
    q_block: int,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Slope:
    """What weighted windows leave out: how their values change with the query. See `slopes.py`."""
    with torch.autocast(query.device.type, enabled=False):
        moments = query_sums(query, starts, sizes, window, key.shape[1], impl) / sizes.sum()
        scale = query.shape[3] ** -0.5 if scale is None else scale
        call = query, key, value, moments, windows.bias, starts, sizes, window, readers, q_block, scale
        return slope_of(*call)


def query_sums(
    query: Tensor, starts: Tensor, sizes: Tensor, window: int, groups: int, impl: Impl = "auto"
) -> Tensor:
    """Sums of queries, and of their squares, over the tokens of all windows, averaged over the heads of each group:
    `[2, B, groups, D]`, in float32 or more. Differentiable."""
    sums: Tensor = _sums(query, starts, sizes, window, impl)
    return sums if query.shape[1] == groups else sums.unflatten(2, (groups, -1)).mean(dim=3)


# -- the operations ------------------------------------------------------------------------------------------------


def _module(x: Tensor, impl: str) -> Any:
    return kernels("windows.triton", impl, x) or reference


def _means_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    with torch.cuda.device_of(x):
        means: Tensor = _module(x, impl).window_means_forward(x, starts, sizes, window)
    return means


def _means_shape(x: Tensor, starts: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:2], starts.shape[0], x.shape[3])


def _means_backward(
    grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int, impl: str
) -> Tensor:
    with torch.cuda.device_of(grad):
        spread: Tensor = _module(grad, impl).window_means_backward(grad, starts, sizes, window, length)
    return spread


def _spread_shape(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int, impl: str) -> Tensor:
    return grad.new_empty(*grad.shape[:2], length, grad.shape[3])


def _saved_of_means(call: Sequence[Any], _: Sequence[Tensor]) -> Sequence[Any]:
    x, starts, sizes, window, impl = call
    return starts, sizes, window, x.shape[2], impl


_means = Operation(
    "window_means",
    _means_forward,
    _means_shape,
    gradient=Gradient(
        of=(0,),
        backward=Operation("window_means_backward", _means_backward, _spread_shape),
        saves=_saved_of_means,
    ),
)


def _sums_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    with torch.cuda.device_of(x):
        sums: Tensor = _module(x, impl).window_sums_forward(x, starts, sizes, window)
    return sums


def _sums_shape(x: Tensor, *_: Any) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(2, *x.shape[:2], x.shape[3], dtype=wide)


def _sums_backward(grad: Tensor, x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    with torch.cuda.device_of(x):
        spread: Tensor = _module(x, impl).window_sums_backward(grad, x, starts, sizes, window)
    return spread


_sums = Operation(
    "window_sums",
    _sums_forward,
    _sums_shape,
    gradient=Gradient(
        of=(0,),
        backward=Operation("window_sums_backward", _sums_backward, lambda grad, x, *_: x.new_empty(x.shape)),
        saves=lambda call, _: call,
    ),
)


def _weighted_forward(
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


def _weighted_shapes(
    key: Tensor, value: Tensor, moments: Tensor, starts: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*key.shape[:2], starts.shape[0])
    return (
        key.new_empty(*shape, key.shape[3]),
        value.new_empty(*shape, value.shape[3]),
        moments.new_empty(shape),
    )


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


def _weighted_backward_shapes(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    key, value, moments = call[3:6]
    return key.new_empty(key.shape), value.new_empty(value.shape), moments.new_empty(moments.shape)


_weighted = Operation(
    "weighted_windows",
    _weighted_forward,
    _weighted_shapes,
    gradient=Gradient(
        of=(0, 1, 2),
        backward=Operation("weighted_windows_backward", _weighted_backward, _weighted_backward_shapes),
        saves=lambda call, _: call,
    ),
)
