"""Rotary positions: applied to queries or keys, and moved where keys move."""

from typing import Any

import torch
from torch import Tensor

from nearfield._types import Impl
from nearfield.ops._op import is_plain_eager
from nearfield.ops._triton import are_wanted, kernels
from nearfield.ops.rotary.reference import keys as reference_keys
from nearfield.ops.rotary.reference import rotate as reference


def rotate(x: Tensor, cos: Tensor, sin: Tensor, impl: Impl = "auto") -> Tensor:
    """Queries or keys turned by rotary rows; by a kernel where it can run.

    Args:
        x: `[B, H, tokens, D]`.
        cos, sin: `[B or 1, 1, tokens, D]`, each value twice.
    """
    module = kernels("rotary.triton.rotate", impl, x) if is_plain_eager(x, cos, sin) else None
    cos, sin = cos.to(x.device), sin.to(x.device)
    if module is None:
        return reference.rotate(x, cos, sin)
    with torch.cuda.device_of(x):
        rotated: Tensor = module.rotate(x, cos, sin)
    return rotated


def is_rotated_by_kernel(impl: Impl, cos: Tensor, sin: Tensor) -> bool:
    """Whether a kernel rotates by these rows, so that it is worth leaving to `rotate`."""
    return are_wanted(impl, cos) and is_plain_eager(cos, sin)


def rerotate_keys(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
    """Write keys, turned, into `target`; see `reference_keys.turn`."""
    module: Any = kernels("rotary.triton.keys", "auto", source) or reference_keys
    with torch.cuda.device_of(source):
        module.turn(source, target, cos, sin, partner)
