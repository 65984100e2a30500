"""Methods in which content decides: at every call, blocks of queries choose among blocks of keys by what these hold."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nearfield._checks import check_member, check_share, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Impl
from nearfield.layout import CurveOrder, Geometry, Span, check_geometry, num_represented
from nearfield.methods.base import Method
from nearfield.methods.layers import LayerAttention
from nearfield.ops import (
    Blocks,
    KeyValuePart,
    Prediction,
    ReadStats,
    attend,
    attend_parts,
    predict,
    window_means,
)
from nearfield.plan import Plan, check_block
from nearfield.plan import builders as planning

Rest = Literal["drop", "pooled"]


class Summaries(NamedTuple):
    """What a method sees of the queries, or of the keys, of one layer: blocks of consecutive tokens.

    Args:
        means: `[B, H, blocks, D]`, float32 (float64 of float64). Heads of queries that share keys see the same ones.
        log_masses: the log of how many tokens a block holds, broadcastable to `[B, H, blocks]`. A key counts by its
            bias: not at all where that hides it, several times where it stands for merged tokens.
        scale: by what attention multiplies products of queries and keys.
        tokens: those of the blocks, `[B, H or fewer, N, D]`, for other statistics.
        block: tokens per block; the last may hold fewer.
    """

    means: Tensor
    log_masses: Tensor
    scale: float
    tokens: Tensor
    block: int

    @property
    def spreads(self) -> Tensor:
        """The mean squared distance of the tokens of a block to their mean, `[B, H, blocks]`."""
        shared_by = self.means.shape[1] // self.tokens.shape[1]
        means = self.means[:, ::shared_by].repeat_interleave(self.block, 2)[:, :, : self.tokens.shape[2]]
        distances = (self.tokens - means).square().sum(-1, keepdim=True)
        return _block_means(distances, self.block)[..., 0].repeat_interleave(shared_by, 1)


class SelectMethod(Method):
    """A method in which content decides. Write `scores`; everything else follows from it.

    Blocks are chosen anew at every call, without a gradient, and without waiting for the device.

    Args:
        q_block: queries that choose together.
        k_block: keys that are chosen together.
        keep: which share of the blocks of keys each block of queries reads, at least one of them.
        top_p: instead of `keep`: the fewest blocks that hold this share of the softmax of the scores.
        rest: what stands for the blocks that are not read: "drop", nothing; "pooled", the mean of their keys and that
            of their values, which count as often as the block has tokens.
    """

    q_block: int = 128
    k_block: int = 64
    keep: float = 0.25
    top_p: float | None = None
    rest: Rest = "drop"

    def __post_init__(self) -> None:
        check_block("q_block", self.q_block)
        check_block("k_block", self.k_block)
        check_share("keep", self.keep)
        if self.top_p is not None:
            check_share("top_p", self.top_p)
        check_member("rest", self.rest, get_args(Rest))
        check_member("order", self.order, get_args(CurveOrder))
        self.check_dense_parts()

    @abstractmethod
    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        """How much each block of queries wants each block of keys, `[B, H, rows, columns]`; larger is better.

        A row of scores that holds NaN is read whole.
        """

    def forced(self, geometry: Geometry) -> Sequence[Span]:
        """Spans of tokens that read everything and that everyone reads, exactly: the text."""
        return (geometry.text_span,)

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "SelectLayer":
        """What a layer needs to attend: everything is chosen at the call."""
        del index, heads  # every layer and head chooses for itself
        check_geometry(geometry)
        return SelectLayer(self, geometry, device)

    def blocks(self, geometry: Geometry) -> Blocks:
        """How the tokens are cut, and what is read whatever the scores are."""
        forced, tokens = tuple(self.forced(geometry)), geometry.num_tokens
        for start, stop in forced:
            if not 0 <= start <= stop <= tokens:
                wrong_value("forced", f"give spans from 0 to {tokens}", (start, stop))
        text = range(*geometry.text_span)
        if self.rest == "pooled" and not all(any(a <= i < b for a, b in forced) for i in text):
            hint = "What pads text is hidden by a bias, of which pooled keys know nothing."
            wrong_value(
                "forced", f'hold the text {geometry.text_span} where `rest` is "pooled"', forced, hint
            )
        return Blocks(self.q_block, self.k_block, tokens, tokens, forced)

    @property
    def weighs_image_keys(self) -> bool:
        return self.rest == "drop"

    def pair_lines(self, geometry: Geometry, device: torch.device | str) -> list[str]:
        del device
        rows, columns = (-(-geometry.num_tokens // block) for block in (self.q_block, self.k_block))
        share = f"{self.keep:.0%} of them"
        if self.top_p is not None:
            share = f"those that hold {self.top_p:.0%} of the softmax of its scores"
        rest = "" if self.rest == "drop" else "; the rest is read pooled"
        chosen = f"{rows} blocks of {self.q_block} queries choose among {columns} of {self.k_block} keys"
        return [f"  at every call {chosen}: {share}{rest}"]


class SelectLayer(LayerAttention):
    """What one layer of a `SelectMethod` reads: chosen anew at every call."""

    stats: ReadStats

    def __init__(self, method: SelectMethod, geometry: Geometry, device: torch.device | str) -> None:
        self.method, self.blocks = method, method.blocks(geometry)
        self.stats = ReadStats()
        # A graph of training saves the windows: they must not be made in inference mode.
        with torch.inference_mode(False):
            self.sizes = num_represented(geometry.num_tokens, method.k_block, 1, device).to(torch.int32)
            self.starts = torch.arange(len(self.sizes), device=device) * method.k_block

    @property
    def num_pairs(self) -> None:
        """Not known before the calls: what is chosen may be what everyone reads anyway. `stats` knows it after."""
        return None

    def plans_like(self, device: torch.device) -> tuple[Plan, ...]:
        return (self.blocks.blank(device),)

    def choose(
        self,
        query: Tensor,
        key: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Prediction:
        """Which blocks a call with these queries and keys reads."""
        blocks = self.blocks
        for name, x in (("query", query), ("key", key)):
            if x.shape[2] != blocks.num_keys:
                wrong_value(name, f"have the {blocks.num_keys} tokens of the geometry", x.shape[2])
        scale = query.shape[3] ** -0.5 if scale is None else scale
        # Autocast would round scores.
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            counts = num_represented(blocks.num_queries, blocks.q_block, 1, query.device)
            means = _block_means(query.detach(), blocks.q_block)
            queries = Summaries(means, counts.to(means.dtype).log(), scale, query.detach(), blocks.q_block)
            masses = predict.log_masses(blocks, key_bias, query)
            masses = masses if key_bias is None else masses[..., 0, :]
            key_means = _block_means(key.detach(), blocks.k_block)
            key_means = key_means.repeat_interleave(query.shape[1] // key.shape[1], 1)
            keys = Summaries(key_means, masses, scale, key.detach(), blocks.k_block)
            scores = self._checked(self.method.scores(queries, keys), queries, keys)
            if key_bias is not None:
                scores = scores.masked_fill((masses == -torch.inf)[..., None, :], -torch.inf)
            method = self.method
            topk = None if method.top_p is not None else max(1, round(scores.shape[-1] * method.keep))
            return predict.by_scores(scores, blocks, mass=method.top_p, topk=topk, impl=impl)

    def _checked(self, scores: Tensor, queries: Summaries, keys: Summaries) -> Tensor:
        check_tensor("scores", scores, dims=4)
        expected = *queries.means.shape[:3], keys.means.shape[2]
        if scores.shape != expected:
            wrong_value("scores", f"have shape {list(expected)}", shape_of(scores))
        if not scores.is_floating_point():
            wrong_type("scores", "be floating point", scores.dtype)
        return scores.to(queries.means.dtype)

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

        Pooled blocks know nothing of `key_bias`: it may hide what is always read exactly (text).
        """
        prediction = self.choose(query, key, key_bias=key_bias, scale=scale, impl=impl)
        plan = self.blocks.plan(prediction.keep, compact=False)
        kept = prediction.kept
        if self.method.rest == "drop":
            self.stats.add(kept, prediction.dropped.mean())
            return attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
        self.stats.add(kept + (1 - kept) / self.blocks.k_block, prediction.dropped.mean())
        near = KeyValuePart(key, value, plan, key_bias)
        return attend_parts(
            query, [near, self._rest(key, value, ~prediction.keep, impl)], scale=scale, impl=impl
        )

    def _rest(self, key: Tensor, value: Tensor, unread: Tensor, impl: Impl) -> KeyValuePart:
        """The means of all blocks, and that each row reads those of which it reads no tokens."""
        blocks, columns = self.blocks, len(self.sizes)
        plan = planning.from_mask(
            unread,
            q_block=blocks.q_block,
            k_block=1,
            num_queries=blocks.num_queries,
            num_keys=columns,
            compact=False,
        )
        keys, values = (window_means(x, self.starts, self.sizes, blocks.k_block, impl) for x in (key, value))
        wide = torch.promote_types(key.dtype, torch.float32)
        return KeyValuePart(keys, values, plan, self.sizes.to(wide).log())


def _block_means(x: Tensor, block: int) -> Tensor:
    """Means over blocks of consecutive tokens, `[B, H, N, D]` to `[B, H, blocks, D]`, in float32 or more."""
    wide = torch.promote_types(x.dtype, torch.float32)
    whole = x.shape[2] // block * block
    means = x[:, :, :whole].unflatten(2, (-1, block)).mean(3, dtype=wide) if whole else x[:, :, :0].to(wide)
    last = x[:, :, whole:]
    return torch.cat([means, last.mean(2, keepdim=True, dtype=wide)], 2) if last.shape[2] else means
