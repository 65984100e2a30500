"""Block selection: every block of queries reads the blocks of keys whose means it likes best.

What methods such as VSA and SpargeAttention choose by, as a baseline for finer grains: attention among the means of
blocks, of which the best are kept, by number or by mass (`BlockTopK`). `GatedBlocks` is the trainable form.
"""

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from nearfield import dense_parts, planning, predict
from nearfield._checks import check_int, check_member, check_share, wrong_value
from nearfield._types import Attended, Impl
from nearfield.attend import attend
from nearfield.geometry import Geometry, check_no_text
from nearfield.plan import check_block
from nearfield.predict import Blocks, Prediction, Tally
from nearfield.pyramid import check_pooling, chosen_blocks, log_sizes, pool
from nearfield.tokenmap import CurveOrder, Ordering, along

_DEFAULT_KEEP = 0.25


@dataclass(frozen=True)
class BlockTopK:
    """The best blocks by attention among their means.

    Args:
        query_block: queries that choose together.
        grain: keys that are chosen together.
        keep: which share of the blocks of keys is kept; a quarter by default.
        mass: instead of `keep`: the fewest blocks that hold this share of the attention among means.
        guard: blocks whose tokens are less alike than that (mean cosine with their mean) are read whole; None for none.
        order: the order of image tokens in which consecutive ones form blocks.
        dense_layers: how many of the first layers stay dense, or the indices of those that do.
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them.
    """

    query_block: int = 128
    grain: int = 64
    keep: float | None = None
    mass: float | None = None
    guard: float | None = None
    order: CurveOrder = "hilbert"
    dense_layers: int | tuple[int, ...] = 1
    dense_steps: int | float = 0.2

    def __post_init__(self) -> None:
        check_block("query_block", self.query_block)
        check_block("grain", self.grain)
        if self.keep is not None and self.mass is not None:
            wrong_value("mass", "be given instead of `keep`, not with it", (self.keep, self.mass))
        for name, above in (("keep", 0.0), ("mass", 0.0), ("guard", -1.0)):
            if getattr(self, name) is not None:
                check_share(name, getattr(self, name), above=above)
        check_member("order", self.order, get_args(CurveOrder))
        object.__setattr__(self, "dense_layers", dense_parts.checked_layers(self.dense_layers))
        dense_parts.check_steps(self.dense_steps)

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens (all images, one after another; the text stays where it is)."""
        return along(self.order, geometry, str(device))

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "BlockReader":
        """What a layer needs to attend: everything is chosen at the call."""
        del layer, heads, device  # every layer and head chooses for itself
        return BlockReader(self, geometry)

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

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        return dense_parts.layer_reason(self.dense_layers, layer, num_layers)

    def num_dense_steps(self, num_steps: int) -> int:
        """How many of `num_steps` denoising steps stay dense."""
        return dense_parts.num_steps(self.dense_steps, num_steps)

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


class BlockReader:
    """What one layer reads: chosen anew at every call."""

    def __init__(self, method: BlockTopK, geometry: Geometry) -> None:
        self.method, self.geometry = method, geometry
        self.blocks = method.blocks(geometry)
        self.tally = Tally()

    @property
    def num_pairs(self) -> int | None:
        """Pairs read per batch element and head; None where mass or likeness decide: that is known after calls."""
        tokens, method = self.geometry.num_tokens, self.method
        if method.mass is not None or method.guard is not None:
            return None
        kept = min(tokens, round(tokens * (method.keep or _DEFAULT_KEEP)) + self.geometry.text)
        return (tokens - self.geometry.text) * kept + self.geometry.text * tokens

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
        self.tally.add(prediction.kept, prediction.dropped.mean())
        plan = self.blocks.plan(prediction.keep, compact=False)
        return attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)


# -- a gated coarse branch -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GatedBlocks:
    """VSA (arXiv 2505.13389), trainable: the best blocks by the products of their means, plus attention among means.

    A query reads the tokens of the blocks that its own block chose. What its block reads among all means, times a gate
    that the model computes for it, is added. Without a gate there is no such branch.

    Args:
        block: tokens per block, of queries and of keys.
        topk: blocks that a block of queries chooses; more than there are means all.
        order: the order of image tokens in which consecutive ones form blocks.
        dense_layers: how many of the first layers stay dense, or the indices of those that do.
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them.
    """

    block: int = 64
    topk: int = 8
    order: CurveOrder = "hilbert"
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: int | float = 0

    def __post_init__(self) -> None:
        check_pooling("block", self.block)
        check_int("topk", self.topk, at_least=1)
        check_member("order", self.order, get_args(CurveOrder))
        object.__setattr__(self, "dense_layers", dense_parts.checked_layers(self.dense_layers))
        dense_parts.check_steps(self.dense_steps)

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens."""
        return along(self.order, geometry, str(device))

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "GatedReader":
        """What a layer needs to attend: everything is chosen at the call."""
        del layer, heads, device  # every layer and head chooses for itself
        check_no_text(geometry)
        return GatedReader(self, geometry)

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        return dense_parts.layer_reason(self.dense_layers, layer, num_layers)

    def num_dense_steps(self, num_steps: int) -> int:
        """How many of `num_steps` denoising steps stay dense."""
        return dense_parts.num_steps(self.dense_steps, num_steps)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry."""
        del device
        blocks = -(-geometry.num_tokens // self.block)
        return (
            f"{geometry}: {blocks} blocks of {self.block} tokens choose {min(self.topk, blocks)} each, "
            f"and read all means where a gate lets them"
        )


class GatedReader(NamedTuple):
    """What one layer reads: chosen anew at every call."""

    method: GatedBlocks
    geometry: Geometry

    @property
    def num_pairs(self) -> int:
        """Pairs of tokens read per batch element and head; pairs of means are not counted."""
        tokens = self.geometry.num_tokens
        return tokens * min(tokens, self.method.topk * self.method.block)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
        gate: Tensor | None = None,
    ) -> Attended:
        """Attention among tokens in the method's order, `[B, H, N, D]`.

        Args:
            gate: broadcastable to `query`; None leaves the coarse branch out. `lse` is that of the tokens alone.
        """
        if gate is not None and key_bias is not None:
            wrong_value("key_bias", "be None with a `gate`: a mean cannot hide some of its tokens", "both")
        method = self.method
        queries, keys = (pool(x, method.block, 1, impl) for x in (query, key))
        plan = chosen_blocks(queries, keys, method.topk, scale, impl)
        near = attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
        if gate is None:
            return near
        values = pool(value, method.block, 1, impl)
        rows, columns, read = (pooled.level(1) for pooled in (queries, keys, values))
        full = planning.full(rows.shape[2], columns.shape[2], device=query.device)
        bias = log_sizes(key.shape[2], method.block, key.device)
        coarse = attend(rows, columns, read, full, key_bias=bias, scale=scale, impl=impl).out
        spread = coarse.repeat_interleave(method.block, 2)[:, :, : query.shape[2]]
        return Attended(near.out + (gate * spread).to(near.out.dtype), near.lse)


class GatedBlocksAttention(nn.Module):
    """A self-attention layer for models of one's own: projections around `GatedBlocks`, and its gate, first zero.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        method: fields of the method.
    """

    def __init__(self, dim: int, heads: int, method: GatedBlocks | None = None, bias: bool = True) -> None:
        super().__init__()
        check_int("heads", heads, at_least=1)
        if dim % heads:
            wrong_value("dim", f"be a multiple of `heads` ({heads})", dim)
        self.heads, self.method = heads, method or GatedBlocks()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.to_gate = nn.Linear(dim, dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)
        for parameter in self.to_gate.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, geometry: Geometry) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        query, key, value = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        gate = self.to_gate(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = self.method.reader(geometry, device=x.device).attend(query, key, value, gate=gate).out
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected
