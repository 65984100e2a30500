"""Trainable block selection with a second branch that reads what was not chosen: as VSA and as SLA do.

A block of queries chooses blocks of keys by the products of their means, and reads their tokens. VSA (arXiv 2505.13389)
adds attention among the means of all blocks, times a gate that the model computes. SLA (arXiv 2509.24006) reads the
tokens of the other blocks by linear attention, whose weights are products of positive features; it costs a few small
matrices per block, and its result goes through a projection that the model learns. Both branches are zero at first.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nearfield._checks import check_int, check_member, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Impl
from nearfield.layout import CurveOrder, Geometry, check_no_text
from nearfield.methods.base import Method
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.layers import LayerAttention
from nearfield.ops import attend, check_pooling, chosen_blocks, log_sizes, pool
from nearfield.plan import Plan
from nearfield.plan import builders as planning


class _Call(NamedTuple):
    """What one call is made with, and what it has chosen."""

    query: Tensor
    key: Tensor
    value: Tensor
    means: tuple[Tensor, Tensor]
    plan: Plan
    scale: float | None
    impl: Impl


@dataclass(frozen=True)
class _ChosenBlocks(Method):
    """Blocks that are chosen by the products of their means, and a second branch that the model lets in.

    Args:
        block: tokens per block, of queries and of keys.
        topk: blocks that a block of queries chooses; more than there are means all.
    """

    block: int = 64
    topk: int = 8
    order: CurveOrder = "hilbert"
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: DenseSteps = 0

    takes_text: ClassVar[bool] = False
    is_baseline: ClassVar[bool] = True
    example: ClassVar[Mapping[str, Any]] = {"block": 4, "topk": 1}
    argument: ClassVar[str]
    """The argument of `attend` that lets the second branch in."""
    no_bias: ClassVar[str]
    """Why keys can have no bias then."""
    second_words: ClassVar[str]

    def __post_init__(self) -> None:
        check_pooling("block", self.block)
        check_int("topk", self.topk, at_least=1)
        check_member("order", self.order, get_args(CurveOrder))
        self.check_dense_parts()

    def layer(self, geometry: Geometry, index: int = 0, **_: Any) -> "ChosenLayer":
        """What a layer needs to attend: everything is chosen at the call, by every layer and head for itself."""
        del index
        check_no_text(geometry)
        return ChosenLayer(self, geometry)

    @abstractmethod
    def second(self, call: _Call, admitted: Tensor) -> Tensor:
        """What the second branch adds to what is read exactly, `[B, H, N, D]`."""

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry."""
        del device
        blocks = -(-geometry.num_tokens // self.block)
        chosen = f"{blocks} blocks of {self.block} tokens choose {min(self.topk, blocks)} each"
        return f"{geometry}: {chosen}, and {self.second_words}"


@dataclass(frozen=True, eq=False)
class ChosenLayer(LayerAttention):
    """What one layer reads: chosen anew at every call."""

    method: _ChosenBlocks
    geometry: Geometry

    @property
    def num_pairs(self) -> int:
        """Pairs of tokens read exactly, per batch element and head; the second branch is not counted."""
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
        **extra: Tensor,
    ) -> Attended:
        """Attention among tokens in the method's order, `[B, H, N, D]`; `lse` is that of what is read exactly.

        Args:
            extra: what lets the second branch in, as the method's `module` gives it; without it there is no such
                branch.
        """
        method = self.method
        admitted = extra.pop(method.argument, None)
        if extra:
            wrong_type("extra", f"hold `{method.argument}` alone", ", ".join(extra))
        if admitted is not None and key_bias is not None:
            wrong_value("key_bias", f"be None with a `{method.argument}`: {method.no_bias}", "both")
        queries, keys = (pool(x, method.block, 1, impl) for x in (query, key))
        plan = chosen_blocks(queries, keys, method.topk, scale, impl)
        near = attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
        if admitted is None:
            return near
        call = _Call(query, key, value, (queries.level(1), keys.level(1)), plan, scale, impl)
        return Attended(near.out + method.second(call, admitted).to(near.out.dtype), near.lse)


# -- attention among means, behind a gate --------------------------------------------------------------------------


@dataclass(frozen=True)
class GatedBlocks(_ChosenBlocks):
    """VSA: the best blocks by the products of their means, plus attention among means.

    A query reads the tokens of the blocks that its own block chose. What its block reads among all means, times a gate
    that the model computes for it, is added. Without a gate there is no such branch.
    """

    name: ClassVar[str] = "gatedblocks"
    argument: ClassVar[str] = "gate"
    no_bias: ClassVar[str] = "a mean cannot hide some of its tokens"
    second_words: ClassVar[str] = "read all means where a gate lets them"

    def module(self, dim: int, heads: int) -> "Gate":
        return Gate(dim, heads)

    def second(self, call: _Call, admitted: Tensor) -> Tensor:
        """What each block reads among all means, times a gate that is broadcastable to the queries."""
        given: dict[str, Any] = {"scale": call.scale, "impl": call.impl}
        (rows, columns), read = call.means, pool(call.value, self.block, 1, call.impl).level(1)
        full = planning.full(rows.shape[2], columns.shape[2], device=rows.device)
        bias = log_sizes(call.key.shape[2], self.block, rows.device)
        coarse = attend(rows, columns, read, full, key_bias=bias, **given).out
        return admitted * coarse.repeat_interleave(self.block, 2)[:, :, : call.query.shape[2]]


class Gate(nn.Module):
    """The gate of the coarse branch, first zero."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_gate = nn.Linear(dim, dim)
        for parameter in self.to_gate.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"gate": self.to_gate(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)}


# -- linear attention, behind a projection -------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseLinear(_ChosenBlocks):
    """SLA: block top-k, plus linear attention over what was not chosen."""

    name: ClassVar[str] = "sparselinear"
    argument: ClassVar[str] = "projection"
    no_bias: ClassVar[str] = "linear attention cannot hide keys"
    second_words: ClassVar[str] = "read the others by linear attention where a projection lets them"

    def module(self, dim: int, heads: int) -> "Projection":
        return Projection(dim, heads)

    def second(self, call: _Call, admitted: Tensor) -> Tensor:
        """What linear attention gives, projected by a matrix `[D, D]` or by one per head, `[H, D, D]`."""
        dim = call.query.shape[3]
        if admitted.shape[-2:] != (dim, dim) or admitted.dim() > 3:
            wrong_value("projection", f"be [{dim}, {dim}], or one such matrix per head", shape_of(admitted))
        return linear_attention(call.query, call.key, call.value, call.plan) @ admitted


def linear_attention(query: Tensor, key: Tensor, value: Tensor, chosen: Plan) -> Tensor:
    """Linear attention to the blocks that a plan does not list; zero for queries whose plan lists all.

    The weight of a key is the product of its features with the query's, over the sum of all such products; features are
    a softmax over channels. Sums over the keys of a block are made once, sums over blocks by products with a mask. The
    features' own sums, which give the sum of weights, stand apart: beside the values they would make matrices of odd
    width, which tensor cores do not take.

    Args:
        chosen: of full rows, each id once.
    """
    repeats = query.shape[1] // key.shape[1]
    features = _blocks(key.softmax(-1), chosen.k_block)
    states = features.mT @ _blocks(value, chosen.k_block)  # [B, G, columns, D, D]
    weights = features.sum(-2).to(states.dtype)
    if repeats > 1:
        states, weights = (x.repeat_interleave(repeats, 1) for x in (states, weights))
    unread = states.new_ones(*query.shape[:2], chosen.num_rows, chosen.num_columns)
    ids = chosen.blocks.view(*unread.shape[:3], -1).long()
    unread = unread.scatter(-1, ids, 0.0)
    sums = (unread @ states.flatten(-2)).unflatten(-1, states.shape[-2:])
    rows = _blocks(query.softmax(-1), chosen.q_block)
    total = (rows * (unread @ weights)[:, :, :, None]).sum(-1, keepdim=True)
    shares: Tensor = (rows @ sums) / torch.where(total == 0, 1.0, total)
    return shares.flatten(2, 3)[:, :, : query.shape[2]]


def _blocks(x: Tensor, block: int) -> Tensor:
    """`[B, H, N, D]` to `[B, H, blocks, block, D]`; what pads the last one is zero."""
    blocks: Tensor = pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))
    return blocks


class Projection(nn.Module):
    """A matrix per head for what linear attention gives, first zero."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.zeros(heads, dim // heads, dim // heads))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"projection": self.projection}
