"""Results of the same queries over different keys, merged: the specification."""

import torch
from torch import Tensor

from nearfield._types import Attended


def merge_partials(out: Tensor, lse: Tensor) -> Attended:
    """Parts `[P, B, H, N, D]` and `[P, B, H, N]` as one, in the precision of `lse`.

    A row that read nothing in any part gives zeros and `-inf`.
    """
    top = lse.amax(dim=0)
    top = top.masked_fill(top == float("-inf"), 0)
    weights = torch.exp(lse - top)
    total = weights.sum(dim=0)
    # A row that read nothing has only zeros to weigh.
    shares = weights / total.masked_fill(total == 0, 1)
    merged = (shares.unsqueeze(-1) * out).sum(dim=0)
    return Attended(merged.to(out.dtype), top + total.log())
