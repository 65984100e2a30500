"""Keys turned by rotary angles: the specification."""

import torch
from torch import Tensor


def turn(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
    """Write `source`, turned, into `target`: every channel times its cosine, plus its partner times its sine.

    Channels behind those that the tables know are copied. Computed in single precision or better.

    Args:
        source, target: `[L, G, N, D]`; of one dtype, without common memory.
        cos, sin: `[N, R]` float32, `R` at most `D`; a sine has the sign with which the partner enters.
        partner: `[R]` int64, the channel that each one turns with.
    """
    size = cos.shape[-1]
    wide = source[..., :size].to(torch.promote_types(source.dtype, torch.float32))
    turned = (wide * cos.to(wide)).addcmul_(wide[..., partner], sin.to(wide))
    target[..., :size].copy_(turned)
    target[..., size:].copy_(source[..., size:])
