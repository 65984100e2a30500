"""Means of short runs of tokens, each with its own begin and size, and their adjoint: the specification."""

import torch
from torch import Tensor


def window_means_forward(x: Tensor, starts: Tensor, sizes: Tensor, window: int) -> Tensor:
    """`[B, H, N, D]` to `[B, H, windows, D]`; sums are float32 at least.

    Args:
        starts: `[windows]`, the first token of each.
        sizes: `[windows]`, how many tokens each holds, from 1 to `window`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    place, exists = _places(starts, sizes, window)
    rows = x.index_select(2, place.clamp(max=x.shape[2] - 1).flatten()).unflatten(2, place.shape)
    total = rows.masked_fill(~exists[:, :, None], 0).sum(dim=3, dtype=wide)
    means: Tensor = total / sizes[:, None]
    return means.to(x.dtype)


def window_means_backward(grad: Tensor, starts: Tensor, sizes: Tensor, window: int, length: int) -> Tensor:
    """Every token gets its share of the gradient of the mean it is part of; windows share no tokens."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    place, exists = _places(starts, sizes, window)
    share = (grad.to(wide) / sizes[:, None]).unsqueeze(3) * exists[:, :, None]
    spread = torch.zeros(*grad.shape[:2], length, grad.shape[3], dtype=wide, device=grad.device)
    spread.index_add_(2, place.clamp(max=length - 1).flatten(), share.flatten(2, 3))
    return spread.to(grad.dtype)


def _places(starts: Tensor, sizes: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Where the tokens of each window stand, and which of them there are; both `[windows, window]`."""
    number = torch.arange(window, device=starts.device)
    return starts[:, None].long() + number, number < sizes[:, None]
