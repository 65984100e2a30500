"""Methods in which content decides: at every call, blocks of queries choose among blocks of keys by what these hold."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from nearfield._checks import (
    check_int,
    check_member,
    check_number,
    check_share,
    check_tensor,
    shape_of,
    wrong_type,
    wrong_value,
)
from nearfield._memo import device_name
from nearfield._types import Attended, Impl
from nearfield.layout import CurveOrder, Geometry, Span, check_geometry, num_represented
from nearfield.methods.base import Method
from nearfield.methods.layers import FarField, LayerAttention, Summary
from nearfield.ops import (
    Blocks,
    KeyValuePart,
    Prediction,
    ReadStats,
    attend,
    attend_parts,
    merge_attended,
    predict,
)
from nearfield.plan import Plan, check_block
from nearfield.plan import builders as planning

Rest = Literal["drop", "pooled", "weighted"]
RestBy = Literal["query", "block"]
Forced = Sequence[tuple[Span, Span]]
"""Pairs of spans: the queries of the first read the keys of the second."""


class Summaries(NamedTuple):
    """What a method sees of the queries, or of the keys, of one layer: means of consecutive tokens.

    Args:
        means: `[B, H, summaries, D]`, float32 (float64 of float64). Heads of queries that share keys see the same ones.
        log_masses: the log of how many tokens a summary holds, broadcastable to `[B, H, summaries]`. A key counts by
            its bias: not at all where that hides it, several times where it stands for merged tokens.
        scale: by what attention multiplies products of queries and keys.
        tokens: what was summarised, `[B, H or fewer, N, D]`, for other statistics.
        size: tokens per summary; the last may hold fewer.
        per_block: summaries per block; the last block may have fewer.
        value_tokens: the values of the keys; None of queries.
    """

    means: Tensor
    log_masses: Tensor
    scale: float
    tokens: Tensor
    size: int
    per_block: int = 1
    value_tokens: Tensor | None = None

    @property
    def spreads(self) -> Tensor:
        """The mean squared distance of the tokens of a summary to their mean, `[B, H, summaries]`."""
        return self._spreads(self.tokens, self.means)

    @property
    def similarities(self) -> Tensor:
        """The mean cosine of the tokens of a summary with their mean, `[B, H, summaries]`."""
        tokens = self.tokens.to(self.means.dtype)
        return self._mean_of(cosine_similarity(tokens, self._spread_out(self.means), dim=-1))

    @property
    def values(self) -> Tensor:
        """The mean value of every summary of keys, `[B, H, summaries, D]`."""
        values = _block_means(self._values, self.size)
        return values.repeat_interleave(self._shared_by, 1)

    @property
    def value_spreads(self) -> Tensor:
        """The mean squared distance of the values of a summary to their mean, `[B, H, summaries]`."""
        return self._spreads(self._values, self.values)

    def logits(self, keys: "Summaries") -> Tensor:
        """What softmax is taken of where mean queries read mean keys that count as often as they have tokens."""
        return self.scale * self.means @ keys.means.mT + keys.log_masses[..., None, :]

    def by_block(self, keys: "Summaries", pairs: Tensor) -> Tensor:
        """Numbers for all pairs of summaries, gathered for pairs of blocks: `[B, H, rows, columns, pairs]`.

        Where a last block has fewer summaries, `-inf` stands for the missing ones.
        """
        missing = -pairs.shape[3] % keys.per_block, -pairs.shape[2] % self.per_block
        whole: Tensor = pad(pairs, (0, missing[0], 0, missing[1]), value=-math.inf)
        cells = whole.unflatten(3, (-1, keys.per_block)).unflatten(2, (-1, self.per_block))
        gathered: Tensor = cells.transpose(3, 4).flatten(-2)
        return gathered

    def least_by_block(self, numbers: Tensor) -> Tensor:
        """The least of the numbers `[B, H, summaries]` in every block, `[B, H, blocks]`."""
        whole: Tensor = pad(numbers, (0, -numbers.shape[2] % self.per_block), value=math.inf)
        least: Tensor = whole.unflatten(2, (-1, self.per_block)).amin(-1)
        return least

    @property
    def _values(self) -> Tensor:
        if self.value_tokens is None:
            wrong_value("values", "be asked of keys, in a call that has values", None)
        return self.value_tokens

    @property
    def _shared_by(self) -> int:
        return self.means.shape[1] // self.tokens.shape[1]

    def _spreads(self, tokens: Tensor, means: Tensor) -> Tensor:
        return self._mean_of((tokens - self._spread_out(means)).square().sum(-1))

    def _spread_out(self, means: Tensor) -> Tensor:
        """The mean of every token's summary."""
        return means[:, :: self._shared_by].repeat_interleave(self.size, 2)[:, :, : self.tokens.shape[2]]

    def _mean_of(self, numbers: Tensor) -> Tensor:
        means = _block_means(numbers[..., None], self.size)[..., 0]
        return means.repeat_interleave(self._shared_by, 1)


class SelectMethod(Method):
    """A method in which content decides. Write `scores`; everything else follows from it.

    Blocks are chosen anew at every call, without a gradient, and without waiting for the device.

    Args:
        q_block: queries that choose together.
        k_block: keys that are chosen together.
        keep: which share of the blocks of keys each block of queries reads, at least one of them.
        top_p: instead of `keep`: the fewest blocks that hold this share of the softmax of the scores.
        threshold: instead of `keep`: the blocks whose score is above this, and the best of every row.
        min_similarity: blocks whose tokens are less similar than this (mean cosine with their mean) read everything,
            or are read by everyone; None for no such blocks.
        rest: what stands for the blocks that are not read: "drop", nothing; "pooled", the mean of their keys and that
            of their values, which count as often as the block has tokens; "weighted", means in which tokens count as
            they do for the mean query.
        rest_by: who reads what stands for the rest: each "query" for itself, or the mean of each "block" of queries for
            all of them.
        granularity: tokens per summary that `scores` sees, of queries and of keys; None: those of a block.
    """

    q_block: int = 128
    k_block: int = 64
    keep: float = 0.25
    top_p: float | None = None
    threshold: float | None = None
    min_similarity: float | None = None
    rest: Rest = "drop"
    rest_by: RestBy = "query"
    granularity: int | None = None

    def __post_init__(self) -> None:
        check_block("q_block", self.q_block)
        check_block("k_block", self.k_block)
        check_share("keep", self.keep)
        if self.top_p is not None:
            check_share("top_p", self.top_p)
        if self.threshold is not None:
            check_number("threshold", self.threshold)
        if self.min_similarity is not None:
            check_share("min_similarity", self.min_similarity, above=-1.0)
        self._check_one_rule()
        check_member("rest", self.rest, get_args(Rest))
        check_member("rest_by", self.rest_by, get_args(RestBy))
        if self.granularity is not None:
            check_int("granularity", self.granularity, at_least=1)
            if self.q_block % self.granularity or self.k_block % self.granularity:
                rule = f"divide `q_block` ({self.q_block}) and `k_block` ({self.k_block})"
                wrong_value("granularity", rule, self.granularity)
        check_member("order", self.order, get_args(CurveOrder))
        self.check_dense_parts()

    def _check_one_rule(self) -> None:
        """Refuse two rules for how many blocks are read; a `keep` that is the default gives way."""
        rules = [name for name in ("keep", "top_p", "threshold") if getattr(self, name) is not None]
        if self.keep == type(self).keep:
            rules.remove("keep")
        if len(rules) > 1:
            rule = f"be given instead of `{rules[0]}`, not with it"
            wrong_value(rules[1], rule, (getattr(self, rules[0]), getattr(self, rules[1])))

    @abstractmethod
    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        """How much each block of queries wants each block of keys, `[B, H, rows, columns]`; larger is better.

        A row of scores that holds NaN is read whole.
        """

    def forced(self, geometry: Geometry) -> Forced:
        """What is read exactly whatever the scores are, as pairs of spans (queries, keys): text reads everything, and
        everything reads the text."""
        everything = 0, geometry.num_tokens
        return (geometry.text_span, everything), (everything, geometry.text_span)

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

    @property
    def weighs_image_keys(self) -> bool:
        return self.rest == "drop"

    def pair_lines(self, geometry: Geometry, device: torch.device | str) -> list[str]:
        del device
        rows, columns = (-(-geometry.num_tokens // block) for block in (self.q_block, self.k_block))
        share = f"{self.keep:.0%} of them"
        if self.top_p is not None:
            share = f"those that hold {self.top_p:.0%} of the softmax of its scores"
        if self.threshold is not None:
            share = f"those whose score is above {self.threshold:g}"
        rest = {"drop": "", "pooled": "; the rest is read pooled"}.get(
            self.rest, f"; the rest is read in {self.rest} means"
        )
        chosen = f"{rows} blocks of {self.q_block} queries choose among {columns} of {self.k_block} keys"
        return [f"  at every call {chosen}: {share}{rest}"]


class _Reads(NamedTuple):
    """What of a method's reading the geometry decides, on one device.

    Args:
        blocks: how tokens are cut, and which spans read everything and are read by everyone.
        also: `[rows, columns]` bool, what else is read whatever the scores are; None for nothing.
        unforced: `[windows]`, the blocks of keys that not everyone reads anyway.
        windows: these blocks, as a far field whose plan each call makes; None where nothing stands for the rest.
    """

    blocks: Blocks
    also: Tensor | None
    unforced: Tensor
    windows: FarField | None


@lru_cache(maxsize=64)
def _reads(method: SelectMethod, geometry: Geometry, device: str) -> _Reads:
    tokens, everything = geometry.num_tokens, (0, geometry.num_tokens)
    pairs = tuple(method.forced(geometry))
    for span in (span for pair in pairs for span in pair):
        if not isinstance(span, tuple):
            wrong_type("forced", "give pairs of spans, (queries, keys)", pairs)
        if not 0 <= span[0] <= span[1] <= tokens:
            wrong_value("forced", f"give spans from 0 to {tokens}", span)
    both = tuple(keys for queries, keys in pairs if queries == everything and (keys, everything) in pairs)
    blocks = Blocks(method.q_block, method.k_block, tokens, tokens, both)
    whole, always = blocks.always(torch.device("cpu"))
    known = whole[:, None] | always
    forced = known.clone()
    for queries, keys in pairs:
        forced[_blocks_of(queries, method.q_block), _blocks_of(keys, method.k_block)] = True
    if method.rest != "drop" and not forced[:, _blocks_of(geometry.text_span, method.k_block)].all():
        rule = f'hold the text {geometry.text_span} for all queries where `rest` is "{method.rest}"'
        hint = f"What pads text is hidden by a bias, of which {method.rest} keys know nothing."
        wrong_value("forced", rule, pairs, hint)
    also = None if torch.equal(forced, known) else forced.to(device)
    unforced = (~forced.all(0)).nonzero()[:, 0]
    windows = None
    # A graph of training saves the windows: they must not be made in inference mode.
    with torch.inference_mode(False):
        if method.rest != "drop" and len(unforced):
            sizes = num_represented(tokens, method.k_block, 1, torch.device("cpu"))[unforced].to(torch.int32)
            queries = (1, len(whole)) if method.rest_by == "block" else (method.q_block, tokens)
            plan = Blocks(queries[0], 1, queries[1], len(unforced)).blank(torch.device(device))
            starts, bias = unforced * method.k_block, sizes.double().log()
            windows = FarField((), method.k_block, starts.to(device), sizes.to(device), bias.to(device), plan)
        return _Reads(blocks, also, unforced.to(device), windows)


def _blocks_of(span: Span, block: int) -> slice:
    """The blocks that hold a token of a span."""
    start, stop = span
    return slice(start // block, -(-stop // block) if start < stop else start // block)


class SelectLayer(LayerAttention):
    """What one layer of a `SelectMethod` reads: chosen anew at every call."""

    stats: ReadStats

    def __init__(self, method: SelectMethod, geometry: Geometry, device: torch.device | str) -> None:
        self.method, self.geometry, self.stats = method, geometry, ReadStats()
        self.blocks, self.also, self.unforced, self.windows = _reads(method, geometry, device_name(device))

    @property
    def num_pairs(self) -> int | None:
        """Pairs read exactly per batch element and head, but for rounding to blocks; None where content decides that,
        too."""
        method, tokens, text = self.method, self.geometry.num_tokens, self.geometry.text
        rules = method.top_p, method.threshold, method.min_similarity, self.also, self.windows
        if any(rule is not None for rule in rules):
            return None
        kept = min(tokens, round(tokens * method.keep) + text)
        return (tokens - text) * kept + text * tokens

    def plans_like(self, device: torch.device) -> tuple[Plan, ...]:
        return (self.blocks.blank(device),)

    def choose(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Prediction:
        """Which blocks a call with these queries, keys and values reads."""
        method, blocks = self.method, self.blocks
        for name, x in (("query", query), ("key", key)):
            if x.shape[2] != blocks.num_keys:
                wrong_value(name, f"have the {blocks.num_keys} tokens of the geometry", x.shape[2])
        scale = query.shape[3] ** -0.5 if scale is None else scale
        # Autocast would round scores.
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            queries, keys = self._summaries(query, key, value, key_bias, scale)
            scores = self._checked(method.scores(queries, keys), query)
            if key_bias is not None:
                masses = predict.log_masses(blocks, key_bias, query)
                scores = scores.masked_fill(masses == -torch.inf, -torch.inf)
            topk = None if method.top_p is not None else max(1, round(scores.shape[-1] * method.keep))
            also = self.also
            if method.threshold is not None:
                topk, also = 1, _either(also, scores > method.threshold)
            if method.min_similarity is not None:
                rows, columns = (
                    x.least_by_block(x.similarities) < method.min_similarity for x in (queries, keys)
                )
                also = _either(also, rows[..., None] | columns[..., None, :])
            return predict.by_scores(scores, blocks, mass=method.top_p, topk=topk, also=also, impl=impl)

    def _summaries(
        self, query: Tensor, key: Tensor, value: Tensor | None, key_bias: Tensor | None, scale: float
    ) -> tuple[Summaries, Summaries]:
        q_block, k_block, tokens = self.method.q_block, self.method.k_block, self.geometry.num_tokens
        q_size, k_size = (self.method.granularity or block for block in (q_block, k_block))
        query, key = query.detach(), key.detach()
        means = _block_means(query, q_size)
        counts = num_represented(tokens, q_size, 1, query.device)
        queries = Summaries(means, counts.to(means.dtype).log(), scale, query, q_size, q_block // q_size)
        masses = predict.log_masses(self.blocks._replace(k_block=k_size), key_bias, query)
        masses = masses if key_bias is None else masses[..., 0, :]
        key_means = _block_means(key, k_size).repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = None if value is None else value.detach()
        return queries, Summaries(key_means, masses, scale, key, k_size, k_block // k_size, value)

    def _checked(self, scores: Tensor, query: Tensor) -> Tensor:
        check_tensor("scores", scores, dims=4)
        sizes = (
            -(-self.geometry.num_tokens // block) for block in (self.method.q_block, self.method.k_block)
        )
        expected = *query.shape[:2], *sizes
        if scores.shape != expected:
            wrong_value("scores", f"have shape {list(expected)}", shape_of(scores))
        if not scores.is_floating_point():
            wrong_type("scores", "be floating point", scores.dtype)
        return scores.to(torch.promote_types(query.dtype, torch.float32))

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

        What stands for blocks that are not read knows nothing of `key_bias`: it may hide what is always read exactly
        (text).
        """
        prediction = self.choose(query, key, value, key_bias=key_bias, scale=scale, impl=impl)
        plan, kept = self.blocks.plan(prediction.keep, compact=False), prediction.kept
        if self.windows is None:
            self.stats.add(kept, prediction.dropped.mean())
            return attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
        rest = self._rest(query, key, value, ~prediction.keep, scale, impl)
        q_block, k_block = self.blocks.q_block, self.blocks.k_block
        if self.method.rest_by == "query":
            self.stats.add(kept + (1 - kept) / k_block, prediction.dropped.mean())
            near = KeyValuePart(key, value, plan, key_bias)
            return attend_parts(query, [near, rest], scale=scale, impl=impl)
        self.stats.add(kept + (1 - kept) / (k_block * q_block), prediction.dropped.mean())
        means = _block_means(query, q_block).to(query.dtype)
        of_blocks = attend(means, *rest[:3], key_bias=rest.key_bias, scale=scale, impl=impl)
        far = (x.repeat_interleave(q_block, 2)[:, :, : query.shape[2]] for x in of_blocks)
        near_by = attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
        return merge_attended(near_by, Attended(*far))

    def _rest(
        self, query: Tensor, key: Tensor, value: Tensor, unread: Tensor, scale: float | None, impl: Impl
    ) -> KeyValuePart:
        """What stands for all blocks, and that each row reads it for those of which it reads no tokens."""
        assert self.windows is not None
        blank, bias = self.windows.plan, self.windows.bias.to(torch.promote_types(key.dtype, torch.float32))
        plan = planning.from_mask(
            unread.index_select(-1, self.unforced),
            q_block=blank.q_block,
            k_block=1,
            num_queries=blank.num_queries,
            num_keys=blank.num_keys,
            compact=False,
        )
        summary: Summary = "mean" if self.method.rest == "pooled" else "weighted"
        return self.windows._replace(plan=plan, bias=bias).part(query, key, value, summary, scale, impl)


def _either(also: Tensor | None, more: Tensor) -> Tensor:
    return more if also is None else also | more


def _block_means(x: Tensor, block: int) -> Tensor:
    """Means over blocks of consecutive tokens, `[B, H, N, D]` to `[B, H, blocks, D]`, in float32 or more."""
    wide = torch.promote_types(x.dtype, torch.float32)
    whole = x.shape[2] // block * block
    means = x[:, :, :whole].unflatten(2, (-1, block)).mean(3, dtype=wide) if whole else x[:, :, :0].to(wide)
    last = x[:, :, whole:]
    return torch.cat([means, last.mean(2, keepdim=True, dtype=wide)], 2) if last.shape[2] else means
