"""Rotary rows of each sample applied to queries or keys: the specification."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs of neighbouring channels, in float32 at least, as models do.

    Args:
        x: `[B, H, tokens, D]`.
        cos, sin: `[B or 1, 1, tokens, D]`, each value twice; one row for the whole batch, or one for each sample.
    """
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * cos + turned.to(wide) * sin).to(x.dtype)
