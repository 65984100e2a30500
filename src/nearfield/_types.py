"""Shape legend and the few types every layer shares.

Letters in shape comments:

    B  batch                 D  head dimension
    H  query heads           G  key heads (H is a multiple of G)
    N  queries               M  keys
    b, h  the plan's own batch and heads; 1 broadcasts
    rows     query blocks, ceil(N / q_block)
    columns  key blocks, ceil(M / k_block)
"""

from typing import Literal, NamedTuple

from torch import Tensor

Impl = Literal["auto", "gluon", "triton", "grouped", "reference"]


class Positions(NamedTuple):
    """Where queries and keys stand in time: a key is visible if its position is not after the query's.

    Both are integer tensors, `[B, N]` and `[B, M]`; a leading 1 broadcasts over the batch.
    """

    query: Tensor
    key: Tensor


class Attended(NamedTuple):
    """What reading gave: the weighted values, and the log of the sum of weights (`-inf` for empty rows)."""

    out: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """What one backward pass gives; `key_bias` is None where there was none."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_bias: Tensor | None


class Moment(NamedTuple):
    """Where a denoising loop stands: step `step_index` of `total`, and which of its calls (guidance makes several).

    Two calls with one moment compute the same thing for one batch.
    """

    step_index: int
    total: int
    branch: str = ""
