"""The list kernels in plain Triton: any GPU Triton runs on, and the interpreter.

Three loops over the same lists: the forward and the query gradient walk the plan, one program per query block; the key
gradients walk its transpose, one program per key block.
"""

from torch import Tensor

from nearfield._types import Positions
from nearfield.kernels import unsupported_tensor
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
    return unsupported_tensor(query, most_channels=128, multiplies=True)
