"""LLSA (arXiv 2512.16615): trainable attention whose cost grows with N log N.

Tokens are pooled into a pyramid. From its top down every query chooses the best few keys among the children of those
its parent chose, until whole blocks of tokens are chosen. It then reads, in one softmax,

- the tokens of the blocks it chose,
- at each level below the top the children of what was chosen one level above, each counting as often as it has tokens,
- all of the top level, counting likewise.

So near things are read exactly and far things in summary, and what is near is learned. Choosing has no gradient.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield._checks import check_bool, check_int, check_member, wrong_value
from nearfield._memo import tensor_cache
from nearfield._types import Attended, Impl
from nearfield.layout import CurveOrder, Geometry, level_length, level_starts, most_levels, num_represented
from nearfield.methods.base import Method
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.layers import LayerAttention
from nearfield.ops import (
    KeyValuePart,
    attend,
    attend_parts,
    attend_pooled,
    check_pooling,
    for_one_call,
    pool_and_select,
)
from nearfield.plan import Plan
from nearfield.plan import builders as planning

_ROWS = (128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class LogLinear(Method):
    """Hierarchical top-k over pooled levels, with the pooled levels read, too.

    Args:
        block: tokens that are pooled into one, at every level; also queries and keys per block.
        topk: keys that a query chooses at every level.
        levels: pooled levels; "auto" goes up as long as a level has at least a block of tokens.
        enrich: up to which level pooled keys are read; all by default, 0 reads chosen tokens only.
        weighted: a summary counts as many times as it stands for tokens; without, once, as in the paper's ablation.
        order: the order of image tokens in which consecutive ones are pooled.
        exclude_selected: what is read at a finer level is left out of the coarser ones. (The paper counts it at all.)
        keep_own: a query always chooses the block it is in.
        dense_layers: how many of the first layers stay dense, or the indices of those that do.
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them; two numbers
            are of the first and of the last steps.
    """

    name: ClassVar[str] = "loglinear"
    example: ClassVar[Mapping[str, Any]] = {"block": 4, "topk": 1}

    block: int = 16
    topk: int = 8
    levels: int | Literal["auto"] = "auto"
    enrich: int | None = None
    weighted: bool = True
    order: CurveOrder = "hilbert"
    exclude_selected: bool = False
    keep_own: bool = False
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: DenseSteps = 0

    def __post_init__(self) -> None:
        check_pooling("block", self.block)
        check_int("topk", self.topk, at_least=1)
        if self.levels != "auto":
            check_int("levels", self.levels, at_least=1)
        if self.enrich is not None:
            check_int("enrich", self.enrich, at_least=0)
        check_member("order", self.order, get_args(CurveOrder))
        for name in ("weighted", "exclude_selected", "keep_own"):
            check_bool(name, getattr(self, name))
        self.check_dense_parts()

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "LogLinearLayer":
        """What a layer needs to attend. What it reads depends on its queries and keys, so little is made beforehand."""
        del index, heads, device  # every layer and head chooses for itself
        return LogLinearLayer(self, geometry)

    @property
    def warning(self) -> str:
        return (
            "LogLinear is made for models that are trained with it: one that was trained with full attention loses"
            " quality (measured on the embedded model at 512 px, topk=8: LPIPS 0.23, 20.2 dB to dense; see"
            " docs/loglinear.md). Train or tune it with the method in place, or use Hilbert."
        )

    @property
    def weighs_image_keys(self) -> bool:
        """Whether a bias on image tokens counts wherever they are read: choosing and summaries know nothing of it."""
        return False

    def num_levels(self, num_queries: int, num_keys: int) -> int:
        """Pooled levels for these numbers of tokens; each has at least one of either."""
        length = min(num_queries, num_keys)
        most = most_levels(length, self.block)
        if self.levels == "auto":
            return most
        highest = max(1, math.ceil(math.log(length, self.block))) if length > 1 else 1
        if self.levels > highest:
            wrong_value(
                "levels", f"be at most {highest} for {length} tokens in blocks of {self.block}", self.levels
            )
        return self.levels

    def keys_per_query(self, num_tokens: int) -> int:
        """The most keys that a query reads: what the cost grows with."""
        levels = self.num_levels(num_tokens, num_tokens)
        lengths = [level_length(num_tokens, self.block, level) for level in range(levels + 1)]
        enriched = levels if self.enrich is None else min(self.enrich, levels)
        keys = sum(
            min(lengths[level], min(self.topk, lengths[level + 1]) * self.block)
            for level in range(min(levels, enriched + 1))
        )
        return keys + (lengths[levels] if enriched == levels else 0)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry: levels, keys per query, pairs."""
        tokens = geometry.num_image_tokens
        levels = self.num_levels(tokens, tokens)
        lengths = [level_length(tokens, self.block, level) for level in range(levels + 1)]
        return "\n".join(
            [
                f"{geometry}: {geometry.num_tokens} tokens in {self.order} order",
                f"  levels of {', '.join(map(str, lengths))} tokens; each query chooses {self.topk} at each",
                f"  keys per image query: at most {self.keys_per_query(tokens) + geometry.text}",
                *self.pair_lines(geometry, device),
            ]
        )


@dataclass(frozen=True, eq=False)
class LogLinearLayer(LayerAttention):
    """What one layer reads: chosen anew at every call."""

    method: LogLinear
    geometry: Geometry

    @property
    def num_pairs(self) -> int:
        """Pairs read per batch element and head, at most."""
        geometry = self.geometry
        image = geometry.num_image_tokens
        keys = self.method.keys_per_query(image) + geometry.text
        return image * min(keys, geometry.num_tokens) + geometry.text * geometry.num_tokens

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
        """Attention among tokens in the method's order, `[B, H, N, D]`. `key_bias` may hide text, not image tokens."""
        text = slice(*self.geometry.text_span)
        if not self.geometry.text:
            return _attend(self.method, query, key, value, None, scale, impl)
        image = _without(self.geometry.text_span, key.shape[2])
        bias = None if key_bias is None else key_bias.expand(*key_bias.shape[:-1], key.shape[2])
        known = _Text(key[:, :, text], value[:, :, text], None if bias is None else bias[..., text])
        picture = _attend(
            self.method, query[:, :, image], key[:, :, image], value[:, :, image], known, scale, impl
        )
        full = _full_plan(self.geometry.text, key.shape[2], str(query.device))
        words = attend(query[:, :, text], key, value, full, key_bias=bias, scale=scale, impl=impl)
        parts = (words, picture) if self.geometry.text_first else (picture, words)
        return Attended(
            torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2)
        )


# -- one call ------------------------------------------------------------------------------------------------------


class _Text(NamedTuple):
    """Keys that every image query reads exactly."""

    key: Tensor
    value: Tensor
    bias: Tensor | None


class Chosen(NamedTuple):
    """What a call reads: the blocks it chose, and the summaries and text that come with them.

    Args:
        near: which blocks of tokens are read exactly.
        key, value: summaries, then text, `[B, G, M, D]`; None where there are neither.
        bias: on those keys, `[B or 1, H or 1, M]`.
        far: which of them are read.
        levels: up to which level these keys are summaries and nothing else; 0 where there is text among them.
    """

    near: Plan
    key: Tensor | None = None
    value: Tensor | None = None
    bias: Tensor | None = None
    far: Plan | None = None
    levels: int = 0


def choose(
    method: LogLinear,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    text: _Text | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Chosen:
    """Pool, choose from coarse to fine, and write down who reads whom. Never waits for the device."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    levels = method.num_levels(num_queries, num_keys)
    keys, values, picks, packed = pool_and_select(
        query,
        key,
        value,
        method.block,
        levels,
        method.topk,
        keep_own=method.keep_own,
        # Choosing compares products; a negative scale turns best into worst.
        negate_scores=scale is not None and scale < 0,
        impl=impl,
    )
    near = planning.key_lists(
        picks[0],
        None,
        q_block=method.block,
        k_block=method.block,
        num_queries=num_queries,
        num_keys=num_keys,
        similar_rows=True,  # neighbours choose among the same blocks
        check=False,
    )
    for_one_call(near, packed)
    enriched = levels if method.enrich is None else min(method.enrich, levels)
    if not enriched and text is None:
        return Chosen(near)
    bias = _summary_bias(num_keys, method.block, enriched, method.weighted, _bias_dtype(query), query.device)
    far_key, far_value = keys.up_to(enriched), values.up_to(enriched)
    if text is not None:
        far_key, far_value = (
            torch.cat(parts, dim=2) for parts in ((far_key, text.key), (far_value, text.value))
        )
        bias = _joined_bias(bias, text)
    far = _Lists(method, picks, num_queries, num_keys, enriched).plan(
        0 if text is None else text.key.shape[2]
    )
    for_one_call(far)
    return Chosen(near, far_key, far_value, bias, far, enriched if text is None else 0)


def _attend(
    method: LogLinear,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    text: _Text | None,
    scale: float | None,
    impl: Impl,
) -> Attended:
    """Chosen blocks are read by blocks of queries; summaries, which siblings share, by wider ones."""
    chosen = choose(method, query, key, value, text=text, scale=scale, impl=impl)
    if chosen.far is None or chosen.key is None or chosen.value is None:
        return attend(query, key, value, chosen.near, scale=scale, impl=impl)
    near = KeyValuePart(key, value, chosen.near)
    far = KeyValuePart(chosen.key, chosen.value, chosen.far, chosen.bias)
    if chosen.levels:
        return attend_pooled(query, near, far, method.block, chosen.levels, scale=scale, impl=impl)
    return attend_parts(query, [near, far], scale=scale, impl=impl)


# -- summaries -----------------------------------------------------------------------------------------------------


@tensor_cache
def _summary_bias(
    num_keys: int, block: int, levels: int, weighted: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The log of how many tokens each key of the pooled levels stands for, or zero where that does not count,
    `[1, 1, keys]`; `-inf` for padding."""
    starts = level_starts(num_keys, block, levels)
    parts = []
    for level, (start, stop) in enumerate(pairwise(starts), start=1):
        counts = num_represented(num_keys, block, level, device).double()
        weights = counts.log() if weighted else torch.zeros_like(counts)
        parts.append(pad(weights, (0, stop - start - len(counts)), value=-torch.inf))
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=device)
    return joined.to(dtype).view(1, 1, -1)


def _bias_dtype(query: Tensor) -> torch.dtype:
    """What `attend` wants a bias in."""
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _joined_bias(summaries: Tensor, text: _Text) -> Tensor:
    if text.bias is None:
        words = summaries.new_zeros(1, 1, text.key.shape[2])
    else:
        words = text.bias[(None,) * (3 - text.bias.dim())].to(summaries.dtype)
    return torch.cat([summaries.expand(*words.shape[:2], -1), words], dim=-1)


class _Lists(NamedTuple):
    """The plan over summaries and the text that follows them. Ids count blocks; single keys where some are left out."""

    method: LogLinear
    picks: Sequence[Tensor]
    num_queries: int
    num_keys: int
    enriched: int

    @property
    def q_block(self) -> int:
        """Queries that share their lists: all that have one grandparent, unless exclusion tells siblings apart."""
        block = self.method.block
        if self.method.exclude_selected:
            return block
        return next(rows for rows in _ROWS if block**2 % rows == 0)

    @property
    def k_block(self) -> int:
        return 1 if self.method.exclude_selected else self.method.block

    def plan(self, text: int) -> Plan:
        starts = level_starts(self.num_keys, self.method.block, self.enriched)
        num_keys = starts[-1] + text
        batch, heads = self.picks[0].shape[:2]
        rows = -(-self.num_queries // self.q_block)
        sections = [section.expand(batch, heads, rows, -1) for section in self._sections(starts, num_keys)]
        ids = torch.cat(sections, dim=-1)
        counts = None
        if self.method.exclude_selected:
            ids = ids.sort(dim=-1).values
            counts = (ids < num_keys).sum(-1)
        return planning.key_lists(
            ids,
            counts,
            q_block=self.q_block,
            k_block=self.k_block,
            num_queries=self.num_queries,
            num_keys=num_keys,
            check=False,
        )

    def _sections(self, starts: list[int], num_keys: int) -> Iterator[Tensor]:
        """The ids of each level in turn, and of the text; what is not read sorts behind all others."""
        top = len(self.picks)
        for level, start in enumerate(starts[:-1], start=1):
            if level == top:
                break
            parents = self._picked(level + 1)
            if self.method.exclude_selected:
                yield self._unread(parents, level, num_keys) + start
            else:
                first = start // self.k_block
                yield parents + first if first else parents
        # The last ones are the same for all: the top level, if it is read at all, and the text behind it.
        begin = starts[top - 1] if len(starts) > top else starts[-1]
        if not self.method.exclude_selected:
            yield _every(begin // self.k_block, -(-num_keys // self.k_block), self.picks[0].device)
            return
        if len(starts) > top:
            ids = _every(0, level_length(self.num_keys, self.method.block, top), self.picks[0].device)
            picked = self._picked(top)
            is_read = ~_is_among(ids.expand(*picked.shape[:3], -1), picked)
            yield torch.where(is_read, ids + begin, num_keys)
        yield _every(starts[-1], num_keys, self.picks[0].device)

    def _unread(self, parents: Tensor, level: int, unused: int) -> Tensor:
        """The tokens of a level whose parents were chosen, one by one, but for those that are read more finely."""
        block = self.method.block
        ids = (parents[..., None] * block + torch.arange(block, device=parents.device)).flatten(-2)
        exists = ids < level_length(self.num_keys, block, level)
        return torch.where(exists & ~_is_among(ids, self._picked(level)), ids, unused)

    def _picked(self, level: int) -> Tensor:
        """What the ancestor of each row chose at a level, `[B, H, rows, k]`."""
        picks, size = self.picks[level - 1], self.method.block**level
        if size == self.q_block:
            return picks
        return picks.index_select(2, _ancestors(self.num_queries, self.q_block, size, picks.device))


@tensor_cache
def _every(start: int, stop: int, device: torch.device) -> Tensor:
    """All ids of a span, for every row."""
    return torch.arange(start, stop, device=device, dtype=torch.int32).view(1, 1, 1, -1)


@tensor_cache
def _ancestors(num_queries: int, q_block: int, size: int, device: torch.device) -> Tensor:
    """Which token of a level, each of `size` queries, every row belongs to."""
    return torch.arange(0, num_queries, q_block, device=device) // size


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    return (ids[..., None] == others[..., None, :]).any(-1)


# -- layouts -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _full_plan(num_queries: int, num_keys: int, device: str) -> Plan:
    with torch.inference_mode(False):
        return planning.full(num_queries, num_keys, device=device)


def _without(text: tuple[int, int], length: int) -> slice:
    """The images: what is left of a sequence whose text stands at one of its ends."""
    return slice(text[1], length) if text[0] == 0 else slice(0, text[0])
