"""How much of full attention's weight is left, pattern by pattern, at equal numbers of pairs.

Single keys, few of them together, whole blocks, and runs of a curve: each reads as many pairs as the run does, and what
it holds of the weights of full attention is added up exactly. Queries and keys come from a model's layers, recorded
through `apply`, or are the tokens of a latent themselves.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearfield import attend, planning
from nearfield._types import Attended, Impl
from nearfield.cli.report import table
from nearfield.diffusers import apply
from nearfield.layout.geometry import Geometry
from nearfield.layout.ordering import Ordering, along
from nearfield.methods import Hilbert, LayerAttention, Method
from nearfield.ops.predict import api as predict
from nearfield.ops.predict.api import Blocks
from nearfield.ops.predict.reference import columns

QUERY_BLOCK = 128
GRAINS = (1, 4, 8, 16, 64, 128)
FINEST_BLOCK = 16
"""From here on a grain is called a block."""
TILES = (2, 4, 8, 16)
RUNS = "Hilbert runs"


class Sample(NamedTuple):
    """Queries and keys of one layer, `[B, H, N, D]`, in raster order."""

    name: str
    geometry: Geometry
    query: Tensor
    key: Tensor
    scale: float


@dataclass(frozen=True)
class Recall:
    """What one pattern holds of one sample.

    Args:
        by: how it was chosen: by "weights" of full attention, by "means" of blocks, or by "place".
        tiles: of the run that says how many pairs are read.
        kept: share of the pairs that is read.
        recall: share of the weights that is in them, on average over queries.
    """

    sample: str
    pattern: str
    by: str
    tiles: int
    kept: float
    recall: float


# -- where queries and keys come from --------------------------------------------------------------------------------


class Recording(Method):
    """A method that reads everything, and keeps the queries and keys it was given."""

    order = "raster"

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def layer(self, geometry: Geometry, index: int = 0, **_: Any) -> "_RecordingLayer":
        return _RecordingLayer(self, geometry, index)

    def describe(self, geometry: Geometry, **_: Any) -> str:
        return f"{geometry}: everything is read, and queries and keys are kept"


@dataclass(frozen=True)
class _RecordingLayer(LayerAttention):
    method: Recording
    geometry: Geometry
    layer: int

    @property
    def num_pairs(self) -> int:
        return self.geometry.num_tokens**2

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
        scale = query.shape[3] ** -0.5 if scale is None else scale
        kept_query, kept_key = (x.detach().float() for x in (query, key))
        self.method.samples.append(Sample(f"layer {self.layer}", self.geometry, kept_query, kept_key, scale))
        full = planning.full(query.shape[2], key.shape[2], device=query.device)
        return attend(query, key, value, full, key_bias=key_bias, scale=scale, impl=impl)


def recorded(model: nn.Module, call: Callable[[], object]) -> list[Sample]:
    """What the attention layers of a diffusers model are given while `call` calls it; biases are not regarded."""
    method = Recording()
    with apply(model, method), torch.no_grad():
        call()
    return method.samples


def latent_sample(latent: Tensor, patch: int = 2, name: str = "latent") -> Sample:
    """The tokens of a latent, each its own query and key: no model, only what real videos or images are like.

    A token is a patch, each channel with mean 0 and standard deviation 1 over the latent; logits are products of tokens
    over the root of their length.

    Args:
        latent: `[C, height, width]` or `[C, frames, height, width]`.
        patch: latent pixels per side of a token.
    """
    channels = latent.float().flatten(1)
    normal = ((channels - channels.mean(1, keepdim=True)) / channels.std(1, keepdim=True)).view_as(latent)
    cells = normal.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # ..., h, patch, w, patch
    tokens = cells.movedim((0, -3, -1), (-3, -2, -1)).flatten(-3)
    grid = tuple(tokens.shape[:-1])
    query = tokens.flatten(0, -2)[None, None]
    return Sample(name, Geometry(grid), query, query, query.shape[3] ** -0.5)


# -- what is held ----------------------------------------------------------------------------------------------------


def measured(
    sample: Sample, tiles: Sequence[int] = TILES, query_block: int = QUERY_BLOCK
) -> Iterator[Recall]:
    """Every pattern, with as many pairs as the runs of so many tiles have.

    Args:
        query_block: queries that share a choice. One that holds text reads everything.
    """
    lse = full_lse(sample)
    runs = [run_recall(sample, lse, number) for number in tiles]
    yield from runs
    ordering = along("hilbert", sample.geometry, str(sample.query.device))
    query, key, ordered_lse = (
        _ordered(x, sample.geometry, ordering) for x in (sample.query, sample.key, lse)
    )
    tokens = sample.geometry.num_tokens
    for grain in GRAINS:
        blocks = Blocks(query_block, grain, tokens, tokens, (sample.geometry.text_span,))
        maxima, masses = columns.column_statistics(
            query, key, ordered_lse, blocks.q_block, blocks.k_block, sample.scale
        )
        name = f"grain {grain}" if grain < FINEST_BLOCK else f"blocks of {grain}"
        for run in runs:
            for by, keep in (
                ("weights", largest(maxima, blocks, run.kept)),
                ("means", by_means(query, key, blocks, run.kept, sample.scale)),
            ):
                kept, recall = _held(keep, masses, blocks)
                yield Recall(sample.name, name, by, run.tiles, kept, recall)


def full_lse(sample: Sample) -> Tensor:
    full = planning.full(sample.query.shape[2], sample.key.shape[2], device=sample.query.device)
    return attend(sample.query, sample.key, sample.key, full, scale=sample.scale).lse


def run_recall(sample: Sample, lse: Tensor, tiles: int) -> Recall:
    """Of the runs of a curve: the sum over what a plan lists is known from its `lse`."""
    method = Hilbert(tiles=tiles, near="tile", far=None)
    ordering = method.ordering(sample.geometry, device=sample.query.device)
    query, key, full = (_ordered(x, sample.geometry, ordering) for x in (sample.query, sample.key, lse))
    attention = method.layer(sample.geometry, 0, heads=query.shape[1], device=query.device)
    held = (attention.attend(query, key, key, scale=sample.scale).lse - full).exp()
    kept = attention.num_pairs / sample.geometry.num_tokens**2
    return Recall(sample.name, RUNS, "place", tiles, kept, float(held.mean()))


def largest(maxima: Tensor, blocks: Blocks, share: float) -> Tensor:
    """The cells with the largest weights in them, up to a share of all pairs.

    Text and the best of each row come first, however many pairs that makes.
    """
    rows, always = blocks.always(maxima.device)
    first = (rows[:, None] | always).expand_as(maxima)
    first = first.scatter(-1, maxima.argmax(-1, keepdim=True), True)
    order = maxima.masked_fill(first, math.inf).flatten(2).argsort(dim=-1, descending=True, stable=True)
    queries = _sizes(blocks.num_queries, blocks.q_block, maxima).double()
    keys = _sizes(blocks.num_keys, blocks.k_block, maxima).double()
    pairs = torch.outer(queries, keys).flatten()[order].cumsum(-1)
    fits = pairs <= share * blocks.num_queries * blocks.num_keys
    keep = torch.zeros_like(fits).scatter(-1, order, fits).view_as(maxima)
    return keep | first


def by_means(query: Tensor, key: Tensor, blocks: Blocks, share: float, scale: float) -> Tensor:
    """As `BlockTopK` and online prediction choose: so many of each row."""
    number = max(1, round(share * -(-blocks.num_keys // blocks.k_block)))
    return predict.by_means(query, key, blocks, topk=number, scale=scale).keep


def _held(keep: Tensor, masses: Tensor, blocks: Blocks) -> tuple[float, float]:
    """The share of pairs in a mask, and that of the weights."""
    queries = _sizes(blocks.num_queries, blocks.q_block, masses)
    keys = _sizes(blocks.num_keys, blocks.k_block, masses)
    pairs = queries @ keep.to(masses.dtype) @ keys / (blocks.num_queries * blocks.num_keys)
    recall = (masses * keep).sum(-1) @ queries / blocks.num_queries
    return float(pairs.mean()), float(recall.mean())


def _sizes(length: int, block: int, like: Tensor) -> Tensor:
    sizes = torch.full((-(-length // block),), block, device=like.device, dtype=like.dtype)
    sizes[-1] = length - (len(sizes) - 1) * block
    return sizes


def _ordered(x: Tensor, geometry: Geometry, ordering: Ordering) -> Tensor:
    start = geometry.image_spans[0][0]
    order = torch.arange(geometry.num_tokens, device=x.device)
    order[start : start + len(ordering)] = start + ordering.order
    return x[:, :, order]


# -- reports -----------------------------------------------------------------------------------------------------------


def averaged(results: Sequence[Recall]) -> list[Recall]:
    """Over samples."""
    groups: dict[tuple[str, str, int], list[Recall]] = {}
    for result in results:
        groups.setdefault((result.pattern, result.by, result.tiles), []).append(result)
    return [
        Recall("all", pattern, by, tiles, *(_mean(group, name) for name in ("kept", "recall")))
        for (pattern, by, tiles), group in groups.items()
    ]


def _mean(group: Sequence[Recall], name: str) -> float:
    return float(sum(getattr(result, name) for result in group)) / len(group)


def results_table(results: Sequence[Recall]) -> str:
    """Patterns by number of pairs; averages over samples. Where other pairs were needed, a cell says how many."""
    means = averaged(results)
    tiles = sorted({result.tiles for result in means})
    kept = {result.tiles: result.kept for result in means if result.pattern == RUNS}
    rows = [["pattern", "chosen by", *(f"{kept[number]:.1%} of pairs" for number in tiles)]]
    for pattern, by in dict.fromkeys((result.pattern, result.by) for result in means):
        found = {result.tiles: result for result in means if (result.pattern, result.by) == (pattern, by)}
        rows.append([pattern, by, *(_cell(found[number], kept[number]) for number in tiles)])
    return table(rows)


def _cell(result: Recall, kept: float) -> str:
    words = f"{result.recall:.1%}"
    return words if abs(result.kept / kept - 1) < 0.05 else f"{words} of {result.kept:.1%}"


def as_json(results: Sequence[Recall], machine: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    records = [asdict(result) | {"status": "ok"} for result in results]
    return {"format": 1, "benchmark": "recall", "machine": machine, "source": source, "results": records}
