"""Means of short runs of tokens: what a far field reads in place of the tokens themselves.

One operator, whose windows are tensors: a traced graph is the same for every size of image.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfield import kernels
from nearfield._types import Impl
from nearfield.reference import windows as reference


def window_means(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: Impl = "auto") -> Tensor:
    """The mean of every window of `x [B, H, N, D]`, `[B, H, windows, D]`. Differentiable.

    Args:
        starts: `[windows]`, the first token of each.
        sizes: `[windows]`, how many tokens each holds, from 1 to `window`. No token is in two windows.
    """
    means: Tensor = torch.ops.nearfield.window_means(x, starts, sizes, window, impl)
    return means


def _module(x: Tensor, impl: str) -> Any:
    """The kernels, where they are wanted and can run."""
    is_plain = impl in ("grouped", "reference") or (impl == "auto" and not x.is_cuda)
    return reference if is_plain else kernels.helper("windows", x) or reference


@torch.library.custom_op("nearfield::window_means", mutates_args=())
def _window_means(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    means: Tensor = _module(x, impl).window_means_forward(x, starts, sizes, window)
    return means


@_window_means.register_fake
def _(x: Tensor, starts: Tensor, sizes: Tensor, window: int, impl: str) -> Tensor:
    return x.new_empty(*x.shape[:2], starts.shape[0], x.shape[3])


@torch.library.custom_op("nearfield::window_means_backward", mutates_args=())
def _window_means_backward(
    grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int, impl: str
) -> Tensor:
    spread: Tensor = _module(grad, impl).window_means_backward(grad, starts, sizes, window, length)
    return spread


@_window_means_backward.register_fake
def _(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int, impl: str) -> Tensor:
    return grad.new_empty(*grad.shape[:2], length, grad.shape[3])


def _remember(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    x, starts, sizes, ctx.window, ctx.impl = inputs
    ctx.length = x.shape[2]
    ctx.save_for_backward(starts, sizes)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.nearfield.window_means_backward
    return backward(grad, *ctx.saved_tensors, ctx.window, ctx.length, ctx.impl), None, None, None, None


_window_means.register_autograd(_differentiate, setup_context=_remember)
