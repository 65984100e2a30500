"""Means of consecutive tokens at several levels, and their adjoint: the specification of the pooling kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield.layout import level_length, level_starts, num_represented


def pool_forward(x: Tensor, block: int, levels: int) -> Tensor:
    """`[B, H, N, D]` to `[B, H, pooled, D]`, padding zero; sums are float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    sums, parts = x, []
    for level in range(1, levels + 1):
        sums = _padded(sums, block).unflatten(2, (-1, block)).sum(dim=3, dtype=wide)
        counts = num_represented(x.shape[2], block, level, x.device).to(wide)
        parts.append(_padded((sums / counts[:, None]).to(x.dtype), block))
    return torch.cat(parts, dim=2)


def pool_together(tensors: Sequence[Tensor], block: int, levels: int) -> list[Tensor]:
    """`pool_forward` of each."""
    return [pool_forward(x, block, levels) for x in tensors]


def pool_backward(grad: Tensor, length: int, block: int, levels: int) -> Tensor:
    """Every token gets its share of the gradient of each mean it is part of."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = torch.zeros(*grad.shape[:2], length, grad.shape[3], dtype=wide, device=grad.device)
    for level, start in enumerate(level_starts(length, block, levels)[:-1], start=1):
        means = grad.narrow(2, start, level_length(length, block, level)).to(wide)
        share = means / num_represented(length, block, level, grad.device).to(wide)[:, None]
        total += share.repeat_interleave(block**level, dim=2)[:, :, :length]
    return total.to(grad.dtype)


def _padded(x: Tensor, block: int) -> Tensor:
    short = -x.shape[2] % block
    return pad(x, (0, 0, 0, short)) if short else x  # padding copies, even by nothing
