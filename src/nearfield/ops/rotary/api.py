"""Rotary positions: applied to queries or keys, and moved where keys move."""

from typing import Any

import torch
from torch import Tensor

from nearfield._types import Impl
from nearfield.ops import _triton
from nearfield.ops._op import is_plain_eager
from nearfield.ops.rotary.reference import keys as reference_keys
from nearfield.ops.rotary.reference import rotate as reference


def rotate(x: Tensor, cos: Tensor, sin: Tensor, impl: Impl = "auto") -> Tensor:
    """Queries or keys turned by rotary rows; by a kernel where it can run.

    Args:
        x: `[B, H, tokens, D]`.
        cos, sin: `[B or 1, 1, tokens, D]`, each value twice.
    """
    is_plain = not _triton.are_wanted(impl, x) or not is_plain_eager(x, cos, sin)
    module = None if is_plain else _triton.helper("rotate", x)
    cos, sin = cos.to(x.device), sin.to(x.device)
    if module is None:
        return reference.rotate(x, cos, sin)
    with torch.cuda.device_of(x):
        rotated: Tensor = module.rotate(x, cos, sin)
    return rotated


def is_rotated_by_kernel(impl: Impl, cos: Tensor, sin: Tensor) -> bool:
    """Whether a kernel rotates by these rows, so that it is worth leaving to `rotate`."""
    return _triton.are_wanted(impl, cos) and is_plain_eager(cos, sin)


def rerotate_keys(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
    """Write keys, turned, into `target`; see `reference_keys.turn`."""
    module: Any = (_triton.helper("turn", source) if source.is_cuda else None) or reference_keys
    with torch.cuda.device_of(source):
        module.turn(source, target, cos, sin, partner)
