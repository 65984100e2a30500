"""Merging results of several calls over the same queries, as ranks have them."""

from typing import Any

from torch import Tensor

from nearfield._types import Attended
from nearfield.ops import _triton
from nearfield.ops.attention import partials_reference as reference_partials


def merge_partials(out: Tensor, lse: Tensor) -> Attended:
    """One result of several; see `reference_partials.merge_partials`."""
    module: Any = (_triton.helper("partials", out) if out.is_cuda else None) or reference_partials
    merged: Attended = module.merge_partials(out, lse)
    return merged
