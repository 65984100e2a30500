"""Block selection: every block of queries reads the blocks of keys whose means it likes best.

What methods such as VSA and SpargeAttention choose by, as a baseline for finer grains: attention among the means of
blocks, of which the best are kept, by number or by mass.
"""

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from nearfield._checks import check_member, check_share, wrong_value
from nearfield._types import Attended, Impl
from nearfield.layout import CurveOrder, Geometry
from nearfield.methods.base import Method
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.layers import LayerAttention
from nearfield.ops import Blocks, Prediction, ReadStats, attend, predict
from nearfield.plan import Plan, check_block

_DEFAULT_KEEP = 0.25


@dataclass(frozen=True)
class BlockTopK(Method):
    """The best blocks by attention among their means.

    Args:
        query_block: queries that choose together.
        grain: keys that are chosen together.
        keep: which share of the blocks of keys is kept; a quarter by default.
        mass: instead of `keep`: the fewest blocks that hold this share of the attention among means.
        guard: blocks whose tokens are less alike than that (mean cosine with their mean) are read whole; None for none.
    """

    name: ClassVar[str] = "blocktopk"
    is_baseline: ClassVar[bool] = True

    query_block: int = 128
    grain: int = 64
    keep: float | None = None
    mass: float | None = None
    guard: float | None = None
    order: CurveOrder = "hilbert"
    dense_layers: int | tuple[int, ...] = 1
    dense_steps: DenseSteps = 0.2

    def __post_init__(self) -> None:
        check_block("query_block", self.query_block)
        check_block("grain", self.grain)
        if self.keep is not None and self.mass is not None:
            wrong_value("mass", "be given instead of `keep`, not with it", (self.keep, self.mass))
        for name, above in (("keep", 0.0), ("mass", 0.0), ("guard", -1.0)):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name), above=above)
        check_member("order", self.order, get_args(CurveOrder))
        self.check_dense_parts()

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "BlockLayer":
        """What a layer needs to attend: everything is chosen at the call."""
        del index, heads, device  # every layer and head chooses for itself
        return BlockLayer(self, geometry)

    def predict(
        self,
        query: Tensor,
        key: Tensor,
        geometry: Geometry,
        scale: float | None = None,
        key_bias: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Prediction:
        """What a call with these queries and keys would read, and an estimate of what it leaves out."""
        blocks = self.blocks(geometry)
        columns = -(-geometry.num_tokens // self.grain)
        count = None if self.mass is not None else max(1, round(columns * (self.keep or _DEFAULT_KEEP)))
        return predict.by_means(
            query,
            key,
            blocks,
            mass=self.mass,
            topk=count,
            guard=self.guard,
            key_bias=key_bias,
            scale=scale,
            impl=impl,
        )

    def blocks(self, geometry: Geometry) -> Blocks:
        tokens = geometry.num_tokens
        return Blocks(self.query_block, self.grain, tokens, tokens, (geometry.text_span,))

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry."""
        del device
        rows, columns = (-(-geometry.num_tokens // block) for block in (self.query_block, self.grain))
        chosen = (
            f"those that hold {self.mass:.0%} of it"
            if self.mass
            else f"{self.keep or _DEFAULT_KEEP:.0%} of them"
        )
        return (
            f"{geometry}: {rows} blocks of {self.query_block} queries choose among {columns} of {self.grain} keys, "
            f"by attention among their means: {chosen}"
        )


class BlockLayer(LayerAttention):
    """What one layer reads: chosen anew at every call."""

    stats: ReadStats

    def __init__(self, method: BlockTopK, geometry: Geometry) -> None:
        self.method, self.geometry = method, geometry
        self.blocks = method.blocks(geometry)
        self.stats = ReadStats()

    @property
    def num_pairs(self) -> int | None:
        """Pairs read per batch element and head; None where mass or likeness decide: that is known after calls."""
        tokens, method = self.geometry.num_tokens, self.method
        if method.mass is not None or method.guard is not None:
            return None
        kept = min(tokens, round(tokens * (method.keep or _DEFAULT_KEEP)) + self.geometry.text)
        return (tokens - self.geometry.text) * kept + self.geometry.text * tokens

    def plans_like(self, device: torch.device) -> tuple[Plan, ...]:
        return (self.blocks.blank(device),)

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
        """Attention among tokens in the method's order, `[B, H, N, D]`."""
        prediction = self.method.predict(query, key, self.geometry, scale, key_bias, impl)
        self.stats.add(prediction.kept, prediction.dropped.mean())
        plan = self.blocks.plan(prediction.keep, compact=False)
        return attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
