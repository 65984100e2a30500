"""The list kernels in plain Triton: any GPU Triton runs on, and the interpreter.

Three loops over the same lists: the forward and the query gradient walk the plan, one program per query block; the key
gradients walk its transpose, one program per key block.
"""

import torch
from torch import Tensor

from nearfield._types import Positions
from nearfield.kernels import is_interpreted
from nearfield.kernels.backward import attend_backward
from nearfield.kernels.forward import attend_forward
from nearfield.kernels.pair import attend_together_backward, attend_together_forward
from nearfield.plan import Plan

__all__ = [
    "attend_backward",
    "attend_forward",
    "attend_together_backward",
    "attend_together_forward",
    "unsupported",
]


def unsupported(
    query: Tensor,
    key: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    backward: bool,
) -> str | None:
    """Why the plain Triton kernels cannot run this call, or None."""
    if not query.is_cuda and not is_interpreted():
        return f"the tensors are on {query.device}"
    if query.dtype == torch.float64:
        return "float64 is for the reference"
    if query.dtype == torch.bfloat16 and is_interpreted():
        return "Triton's interpreter computes wrong bfloat16 products"
    if query.shape[-1] > 128:
        return f"head dimension {query.shape[-1]} is above 128"
    return None
