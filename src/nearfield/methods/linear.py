"""SLA (arXiv 2509.24006): the best blocks are read exactly, all others by linear attention.

A block of queries chooses blocks of keys by the products of their means and reads their tokens. The tokens of the other
blocks are read by linear attention, whose weights are products of positive features. It costs a few small matrices per
block, and its result goes through a projection that the model learns, first zero, before it is added.
"""

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nearfield import dense_parts
from nearfield._checks import check_int, check_member, shape_of, wrong_value
from nearfield._types import Attended, Impl
from nearfield.attend import attend
from nearfield.geometry import Geometry, check_no_text
from nearfield.plan import Plan
from nearfield.pyramid import check_pooling, chosen_blocks, pool
from nearfield.tokenmap import CurveOrder, Ordering, along


@dataclass(frozen=True)
class SparseLinear:
    """Block top-k, plus linear attention over what was not chosen.

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
    ) -> "SparseLinearReader":
        """What a layer needs to attend: everything is chosen at the call."""
        del layer, heads, device  # every layer and head chooses for itself
        check_no_text(geometry)
        return SparseLinearReader(self, geometry)

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
            f"and read the others by linear attention where a projection lets them"
        )


class SparseLinearReader(NamedTuple):
    """What one layer reads: chosen anew at every call."""

    method: SparseLinear
    geometry: Geometry

    @property
    def num_pairs(self) -> int:
        """Pairs of tokens read exactly, per batch element and head."""
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
        projection: Tensor | None = None,
    ) -> Attended:
        """Attention among tokens in the method's order, `[B, H, N, D]`.

        Args:
            projection: `[D, D]`, or one per head, `[H, D, D]`, for what linear attention gives; None leaves it out.
                `lse` is that of the tokens that are read exactly.
        """
        if projection is not None and key_bias is not None:
            wrong_value("key_bias", "be None with a `projection`: linear attention cannot hide keys", "both")
        method = self.method
        queries, keys = (pool(x.detach(), method.block, 1, impl) for x in (query, key))
        plan = chosen_blocks(queries, keys, method.topk, scale, impl)
        near = attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
        if projection is None:
            return near
        dim = query.shape[3]
        if projection.shape[-2:] != (dim, dim) or projection.dim() > 3:
            wrong_value("projection", f"be [{dim}, {dim}], or one such matrix per head", shape_of(projection))
        others = linear_attention(query, key, value, plan) @ projection
        return Attended(near.out + others.to(near.out.dtype), near.lse)


def linear_attention(query: Tensor, key: Tensor, value: Tensor, chosen: Plan) -> Tensor:
    """Linear attention to the blocks that a plan does not list; zero for queries whose plan lists all.

    The weight of a key is the product of its features with the query's, over the sum of all such products; features are
    a softmax over channels. Sums over the keys of a block are made once, sums over blocks by one product with a mask.

    Args:
        chosen: of full rows, each id once.
    """
    repeats = query.shape[1] // key.shape[1]
    # One more channel of ones sums the weights.
    ones = value.new_ones(*value.shape[:3], 1)
    features, extended = _blocks(key.softmax(-1), chosen.k_block), torch.cat([value, ones], -1)
    states = features.mT @ _blocks(extended, chosen.k_block)  # [B, G, columns, D, D + 1]
    states = states.repeat_interleave(repeats, 1)
    unread = states.new_ones(*query.shape[:2], chosen.num_rows, chosen.num_columns)
    ids = chosen.blocks.view(*unread.shape[:3], -1).long()
    unread = unread.scatter(-1, ids, 0.0)
    sums = (unread @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    weighted = (_blocks(query.softmax(-1), chosen.q_block) @ sums).flatten(2, 3)[:, :, : query.shape[2]]
    total = weighted[..., -1:]
    shares: Tensor = weighted[..., :-1] / torch.where(total == 0, 1.0, total)
    return shares


def _blocks(x: Tensor, block: int) -> Tensor:
    """`[B, H, N, D]` to `[B, H, blocks, block, D]`; what pads the last one is zero."""
    blocks: Tensor = pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))
    return blocks


class SparseLinearAttention(nn.Module):
    """A self-attention layer for models of one's own: projections around `SparseLinear`, and its own, first zero.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        method: fields of the method.
    """

    def __init__(self, dim: int, heads: int, method: SparseLinear | None = None, bias: bool = True) -> None:
        super().__init__()
        check_int("heads", heads, at_least=1)
        if dim % heads:
            wrong_value("dim", f"be a multiple of `heads` ({heads})", dim)
        self.heads, self.method = heads, method or SparseLinear()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.projection = nn.Parameter(torch.zeros(heads, dim // heads, dim // heads))
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, geometry: Geometry) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        query, key, value = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        reader = self.method.reader(geometry, device=x.device)
        out = reader.attend(query, key, value, projection=self.projection).out
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected
