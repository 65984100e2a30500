"""What nearfield is compared with, where the library itself has no such method: calls of other packages, and masks."""

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

from torch import Tensor

from nearfield import Plan
from nearfield.cli.check import Inputs
from nearfield.cli.timing import Function

KERNELS = ("flex", "fa4", "bsa")
"""Modules with a function `calls`: torch's flex_attention, FlashAttention-4 and cuDNN's block-sparse attention."""


class Rival(NamedTuple):
    """A call of another package.

    Args:
        run: gives the output `[B, H, N, D]`, or the three gradients, as nearfield's call does.
        plan: what it reads.
    """

    run: Function
    plan: Plan


def calls(name: str, inputs: Inputs, plan: Plan, grad_out: Tensor | None = None) -> Mapping[str, Rival]:
    """The calls of a package on the lists of a plan.

    Args:
        grad_out: time the backward with this gradient of the output.

    Raises:
        NotImplementedError: the package is not there, or cannot read these lists.
    """
    try:
        found: Mapping[str, Rival] = import_module(f"benchmarks.rivals.{name}").calls(inputs, plan, grad_out)
    except ImportError as error:
        hint = "benchmarks/rivals/README.md says how to bring its wheels"
        raise NotImplementedError(f"the package of {name!r} is not installed ({error}); {hint}") from None
    return found


def uniform_lists(plan: Plan) -> Tensor:
    """Lists of equal lengths, `[1, H, rows, count]`. Raises NotImplementedError where they are of several."""
    if not plan.uniform:
        raise NotImplementedError("it reads lists of one length alone")
    lists: Tensor = plan.blocks.unflatten(-1, (plan.num_rows, -1))
    return lists.contiguous()
