"""What a layer attends with, ready made."""

from typing import Literal, NamedTuple

from torch import Tensor

from nearfield._types import Attended, Impl
from nearfield.attend import Part, attend, attend_together
from nearfield.methods.hilbert.far_field import FarField
from nearfield.plan import Plan

Summary = Literal["mean", "weighted"]


class HilbertReader(NamedTuple):
    """What one layer reads: its tiles, and the summaries of the rest."""

    near: Plan
    far: FarField | None
    summary: Summary = "mean"

    @property
    def num_pairs(self) -> int:
        """Pairs read per batch element and head, on average over heads."""
        pairs = self.near.num_pairs / self.near.blocks.shape[1]
        if self.far is not None:
            pairs += self.far.plan.num_pairs / self.far.plan.blocks.shape[1]
        return round(pairs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended:
        """Attention among tokens in the method's order, `[B, H, N, D]`.

        `key_bias` may hide text; bias on image tokens is not carried over into the far field.
        """
        if self.far is None:
            return attend(query, key, value, self.near, key_bias=key_bias, scale=scale, impl=impl)
        near = Part(key, value, self.near, key_bias)
        if self.summary == "weighted":
            keys, values, bias = self.far.weighted(query, key, value, scale, impl)
        else:
            keys, values = (self.far.pooled(x, impl) for x in (key, value))
            bias = self.far.bias
        # Who reads a summary reads its neighbours, but for the edges of what it reads exactly.
        far = Part(keys, values, self.far.plan, bias, rows_alike=True)
        return attend_together(query, [near, far], scale=scale, impl=impl)
