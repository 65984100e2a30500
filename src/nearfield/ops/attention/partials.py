"""Merging results of several calls over the same queries, as ranks have them."""

from typing import Any

from torch import Tensor

from nearfield._types import Attended
from nearfield.ops._triton import kernels
from nearfield.ops.attention import partials_reference as reference_partials


def merge_partials(out: Tensor, lse: Tensor) -> Attended:
    """One result of several; see `reference_partials.merge_partials`."""
    module: Any = kernels("attention.triton.partials", "auto", out) or reference_partials
    merged: Attended = module.merge_partials(out, lse)
    return merged
