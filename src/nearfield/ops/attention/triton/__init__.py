"""The list kernels in plain Triton: any GPU Triton runs on, and the interpreter.

Three loops over the same lists: the forward and the query gradient walk the plan, one program per query block; the key
gradients walk its transpose, one program per key block.
"""

from torch import Tensor

from nearfield._types import Positions
from nearfield.ops._triton import unsupported_tensor
from nearfield.ops.attention.triton.forward import attend_forward
from nearfield.ops.attention.triton.pair import attend_backward, attend_parts_forward
from nearfield.plan import Plan

__all__ = [
    "attend_backward",
    "attend_forward",
    "attend_parts_forward",
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
    return unsupported_tensor(query, most_channels=128, multiplies=True)
