"""Selectors decide which rows of a context are recomputed.

A selector gives every row a score. `select` takes as many of the best rows of all chunks as the ratio allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor

from nearfield._checks import check_int, check_member, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Positions
from nearfield.ops import attend
from nearfield.retrieval.chunks import Context, check_tokens
from nearfield.retrieval.reading import read_after, run
from nearfield.retrieval.recomputing import check_global, plan_up_to, run_rows
from nearfield.retrieval.rotary import check_model


class Selector(Protocol):
    """Scores rows. `fixed_ratio` replaces the caller's ratio where it is not None."""

    fixed_ratio: ClassVar[float | None]

    def score(self, model: Any, context: Context, question: Tensor) -> Tensor:
        """Scores `[T]`. Rows with higher scores are recomputed first."""


@dataclass(frozen=True)
class InfoFlow:
    """The rows that the question attends to, under the positions that generation will use.

    The question runs over the assembled cache. In the scoring layers its attention weights are averaged over heads, the
    norm over its tokens is taken for every row of the context, and the layers are averaged. Layers after the last
    scoring layer do not run. From InfoFlow KV, arXiv 2603.05353.

    Args:
        depth: from which to which share of the layers scores are taken; at least one layer is.
        norm: over the question's tokens: "l2", or "sum".
    """

    depth: tuple[float, float] = (0.45, 0.65)
    norm: Literal["l2", "sum"] = "l2"
    fixed_ratio: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_member("norm", self.norm, ("l2", "sum"))
        if not 0 <= self.depth[0] < self.depth[1] <= 1:
            wrong_value("depth", "ascend between 0 and 1", self.depth)

    def layers(self, num_layers: int) -> range:
        """The scoring layers of a model."""
        first = min(int(self.depth[0] * num_layers), num_layers - 1)
        return range(first, max(first + 1, ceil(self.depth[1] * num_layers)))

    def score(self, model: Any, context: Context, question: Tensor) -> Tensor:
        reader = _Weighing(context, self.layers(len(context.cache.layers)), self.norm)
        places = context.next_position + torch.arange(len(question), device=question.device)
        with torch.inference_mode():  # operators cost less to call; nothing but the scores stays
            run(model, question, places, reader)
        return reader.scores / len(reader.layers)


class _Weighing:
    """The question's tokens read the context and each other. Some layers add their attention weights to the scores."""

    def __init__(self, context: Context, layers: range, norm: str) -> None:
        self.layers = layers
        self.scores = torch.zeros(context.num_tokens, device=context.tokens.device)
        self._context, self._order = context, 2 if norm == "l2" else 1

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        cached = self._context.cache.layers[layer]
        keys = torch.cat([cached.keys, key], 2)
        if layer in self.layers:
            weights = head_weights(query, keys, scale, None)[:, : self._context.num_tokens]
            self.scores = self.scores + torch.linalg.vector_norm(weights, self._order, dim=0)
        if layer == self.layers[-1]:
            return None
        return read_after(query, keys, torch.cat([cached.values, value], 2), scale)


_WEIGHTS_AT_ONCE = 2**27


def head_weights(query: Tensor, key: Tensor, scale: float | None, lse: Tensor | None) -> Tensor:
    """Attention weights `[N, M]`, averaged over heads, in bounded memory.

    Args:
        lse: `[1, H, N]` logs of the sums of weights over all keys, where `key` are only some of them. Without it the
            last keys are the queries' own, and attention among them is causal.
    """
    precise = torch.promote_types(query.dtype, torch.float32)
    heads, num_queries, size = query.shape[1:]
    groups, num_keys = key.shape[1:3]
    per_key = heads // groups
    scale = size**-0.5 if scale is None else scale
    queries = (scale * query[0].to(precise)).reshape(groups, per_key * num_queries, size)
    later = torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device).triu(1)
    total = torch.zeros(num_queries, num_keys, dtype=precise, device=query.device)
    step = max(1, _WEIGHTS_AT_ONCE // (per_key * num_queries * num_keys))
    for first in range(0, groups, step):
        here = slice(first, first + step)
        logits = torch.bmm(queries[here], key[0, here].to(precise).mT).view(-1, num_queries, num_keys)
        if lse is None:
            logits[..., -num_queries:].masked_fill_(later, float("-inf"))
            total += logits.softmax(-1).sum(0)
        else:
            sums = lse[0, per_key * first : per_key * (first + step), :, None]
            total += logits.sub_(sums).exp_().sum(0)
    return total / heads


@dataclass(frozen=True)
class CacheBlend:
    """The rows whose keys or values differ most from fresh ones at an early layer (CacheBlend, arXiv 2405.16444).

    The whole context runs through the layers before `layer`, so scoring costs that share of a full prefill.
    """

    layer: int = 1
    of: Literal["value", "key"] = "value"
    fixed_ratio: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        check_int("layer", self.layer, at_least=0)
        check_member("of", self.of, ("value", "key"))

    def score(self, model: Any, context: Context, question: Tensor) -> Tensor:
        check_global(context)
        if self.layer >= len(context.cache.layers):
            wrong_value("layer", f"be below {len(context.cache.layers)}, the model's layers", self.layer)
        reader = _Deviating(context, self)
        run_rows(model, context, torch.arange(context.num_tokens, device=context.tokens.device), reader)
        return reader.scores


class _Deviating:
    """The context's tokens read each other as in full prefill, up to the layer whose keys or values are compared."""

    def __init__(self, context: Context, selector: CacheBlend) -> None:
        self.scores = torch.zeros(context.num_tokens)
        self._context, self._selector = context, selector
        self._positions = Positions(context.positions[None], context.positions[None])
        self._plan = plan_up_to(context.positions, context.num_tokens)

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        if layer < self._selector.layer:
            return attend(query, key, value, self._plan, positions=self._positions, scale=scale).out
        cached = self._context.cache.layers[layer]
        fresh, reused = (key, cached.keys) if self._selector.of == "key" else (value, cached.values)
        precise = torch.promote_types(fresh.dtype, torch.float32)
        self.scores = (fresh.to(precise) - reused.to(precise)).square().sum((0, 1, 3))
        return None


@dataclass(frozen=True)
class Epic:
    """Selects the first rows of every chunk, equally many of each (EPIC, arXiv 2410.15332)."""

    fixed_ratio: ClassVar[float | None] = None

    def score(self, model: Any, context: Context, question: Tensor) -> Tensor:
        return -context.offset.float()


@dataclass(frozen=True)
class Random:
    """Random rows, which a selector must beat. They are the same in every call."""

    seed: int = 0
    fixed_ratio: ClassVar[float | None] = None

    def score(self, model: Any, context: Context, question: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(context.num_tokens, generator=generator).to(context.tokens.device)


class _Fixed:
    """Selects a fixed share of the rows, whatever the ratio."""

    fixed_ratio: ClassVar[float | None]

    def score(self, model: Any, context: Context, question: Tensor) -> Tensor:
        return torch.zeros(context.num_tokens, device=context.tokens.device)


@dataclass(frozen=True)
class All(_Fixed):
    """Selects every row: full prefill."""

    fixed_ratio: ClassVar[float | None] = 1.0


@dataclass(frozen=True)
class Nothing(_Fixed):
    """Selects no row: plain reuse."""

    fixed_ratio: ClassVar[float | None] = 0.0


SelectorName = Literal["infoflow", "cacheblend", "epic", "random", "all", "none"]
_BY_NAME: dict[str, type[Selector]] = {
    "infoflow": InfoFlow,
    "cacheblend": CacheBlend,
    "epic": Epic,
    "random": Random,
    "all": All,
    "none": Nothing,
}


def selector_of(selector: Selector | SelectorName) -> Selector:
    """The selector of a name, with its defaults. Other selectors are returned unchanged."""
    if not isinstance(selector, str):
        return selector
    check_member("selector", selector, get_args(SelectorName))
    return _BY_NAME[selector]()


def score(
    model: Any, context: Context, question: Tensor, selector: Selector | SelectorName = "infoflow"
) -> Tensor:
    """Scores `[T]` of the context's rows for a question: token ids `[N]` of all that will follow the context."""
    check_model(model, is_moved=False)
    check_tokens(model, "question", question)
    return selector_of(selector).score(model, context, question.to(context.tokens))


class Rows(Protocol):
    """The properties of a context that `select` needs."""

    @property
    def owner(self) -> Tensor: ...

    @property
    def num_tokens(self) -> int: ...


def select(context: Rows, scores: Tensor, ratio: float = 0.15) -> Tensor:
    """The rows to recompute, ascending: the best `max(1, int(ratio * T))` of all chunks but the first.

    The first chunk has seen all that stands before it: it is exact already. Among equal scores earlier rows win.
    """
    check_ratio(ratio)
    check_tensor("scores", scores, dims=1)
    if len(scores) != context.num_tokens:
        wrong_value("scores", f"have one entry for each of {context.num_tokens} rows", shape_of(scores))
    return _best(scores, torch.nonzero(context.owner > 0)[:, 0], _budget(ratio, context.num_tokens))


def check_ratio(ratio: float) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        wrong_type("ratio", "be a number", type(ratio).__name__)
    if not 0 <= ratio <= 1:
        wrong_value("ratio", "lie between 0 and 1", ratio)


def _budget(ratio: float, num_tokens: int) -> int:
    return max(1, int(ratio * num_tokens)) if ratio > 0 else 0


def _best(scores: Tensor, candidates: Tensor, budget: int) -> Tensor:
    order = scores[candidates].argsort(descending=True, stable=True)
    return candidates[order[:budget]].sort().values


def chunk_shares(context: Context, scores: Tensor, ratio: float = 0.15) -> list[float]:
    """For every chunk, the first included, the share of its tokens that are among the best of all."""
    check_ratio(ratio)
    everything = torch.arange(context.num_tokens, device=scores.device)
    best = _best(scores, everything, _budget(ratio, context.num_tokens))
    counts = torch.bincount(context.owner[best], minlength=len(context.lengths)).tolist()
    return [count / length for count, length in zip(counts, context.lengths, strict=True)]


def best_last(shares: Sequence[float]) -> list[int]:
    """The order of chunks in which the best stands last, nearest to the question."""
    return sorted(range(len(shares)), key=lambda index: shares[index])
