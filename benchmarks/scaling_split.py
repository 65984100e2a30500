"""What ranks send each other when one image is split over them: counted by the code that sends it, and really sent."""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.cases import Case
from benchmarks.report import Record
from benchmarks.scaling_cases import CASES, LATENCY, LIKE, LINKS, MEASURED, Measured
from nearfield import Geometry
from nearfield.methods import PlanLayer
from nearfield.parallel import (
    Ranks,
    Shapes,
    Split,
    Traffic,
    attend,
    bytes_sent,
    bytes_summed,
    even_split,
    summary_split,
)

_BLOCK = 128  # of plans on a GPU
_SMALL_BLOCK = 16


class SplitCase:
    """A case with its method and geometry."""

    def __init__(self, case: Case) -> None:
        self.case, self.name = case, case.name
        self.geometry = Geometry(tuple(case.on["grid"]), text=case.on["text"])
        self.heads, self.head_dim, self.layers = (case.on[name] for name in ("heads", "head_dim", "layers"))

    @cached_property
    def method(self) -> Any:
        return self.case.made()

    @property
    def num_layers(self) -> int:
        """Layers of a cycle, after which plans repeat."""
        return getattr(self.method, "phases", 1)

    def readers(self, block: int) -> tuple[PlanLayer, ...]:
        """Those of a cycle of layers."""
        return _readers(self.method, self.geometry, block)

    def split(self, num_ranks: int, block: int) -> Split:
        """The split that `apply` makes."""
        return _split(self.method, self.geometry, num_ranks, block)


@lru_cache(maxsize=16)
def _readers(method: Any, geometry: Geometry, block: int) -> tuple[PlanLayer, ...]:
    layers = range(getattr(method, "phases", 1))
    return tuple(method.layer(geometry, layer, q_block=block, k_block=block) for layer in layers)


@lru_cache(maxsize=16)
def _split(method: Any, geometry: Geometry, num_ranks: int, block: int) -> Split:
    return even_split(method, geometry, num_ranks, block)


# -- bytes -------------------------------------------------------------------------------------------------------------


def count(case: SplitCase, num_ranks: int) -> Record:
    """What one layer sends.

    Bytes of the busiest rank forward, the mean over the layers of a cycle; the same of dense attention by a ring, and
    by Ulysses, which needs a number of heads that ranks divide; collectives per layer; pairs and tokens of the busiest
    rank, over an even share and over all; and the computed time of a denoising step.
    """
    split = case.split(num_ranks, _BLOCK)
    shapes = Shapes(1, case.heads, case.heads, case.head_dim, torch.bfloat16)
    readers = case.readers(_BLOCK)
    layers = [_traffics(reader, split) for reader in readers]
    sent = [
        max(_per_rank(layer, lambda one: _forward(one, shapes, split))) + _summed(reader, shapes, num_ranks)
        for layer, reader in zip(layers, readers, strict=True)
    ]
    busiest = [max(_per_rank(layer, Traffic.pairs_per_rank)) for layer in layers]
    whole = [sum(traffic.plan.num_pairs for traffic in layer) for layer in layers]
    exchanges = sum(1 + traffic.has_returns + traffic.has_everyones for traffic in layers[0])
    exchanges += _summed(readers[0], shapes, num_ranks) > 0
    wide = 2 * case.heads * case.head_dim
    is_divided = case.heads % num_ranks == 0
    found: Record = {
        "ranks": num_ranks,
        "sent": round(sum(sent) / len(sent)),
        "ring": 2 * wide * split.num_tokens * (num_ranks - 1) // num_ranks,
        "ulysses": 4 * wide * split.num_tokens * (num_ranks - 1) // num_ranks**2 if is_divided else None,
        "exchanges": exchanges,
        "pairs": sum(busiest) / sum(whole) * num_ranks,
        "tokens": max(split.num_held(rank) for rank in range(num_ranks)) / split.num_tokens,
    }
    return found | {
        "step_seconds": {name: _step_seconds(case, found, speed) for name, speed in LINKS.items()}
    }


def _traffics(reader: PlanLayer, split: Split) -> list[Traffic]:
    """Traffic of tokens and, where there are any, of summaries, as a `SplitLayer` sends them."""
    near = Traffic(reader.near, split)
    return (
        [near]
        if reader.far is None
        else [near, Traffic(reader.far.plan, split, summary_split(reader.far, split))]
    )


def _forward(traffic: Traffic, shapes: Shapes, tokens: Split) -> Sequence[int]:
    """Bytes of each rank; summaries have a bias."""
    return bytes_sent(traffic, shapes._replace(has_bias=traffic.keys is not tokens)).forward


def _summed(reader: PlanLayer, shapes: Shapes, num_ranks: int) -> int:
    """Bytes that each rank sends so that all know the mean query."""
    return 0 if reader.far is None else bytes_summed(reader.summary, shapes, num_ranks).forward[0]


def _per_rank(layer: Sequence[Traffic], count: Callable[[Traffic], Sequence[int]]) -> list[int]:
    """The sum over what a layer sends, rank by rank."""
    return [sum(numbers) for numbers in zip(*map(count, layer), strict=True)]


def _step_seconds(case: SplitCase, found: Record, speed: float) -> dict[str, float | None]:
    """Ring attention is taken to hide all it can behind its kernels, nearfield and Ulysses to hide nothing."""
    times = measured(case)
    if times is None:
        return {}
    ranks, layers = found["ranks"], case.layers
    sparse, dense, rest = (value / 1e3 for value in times)
    ring = layers * max(dense / ranks, found["ring"] / speed) + rest / ranks
    ulysses = None
    if found["ulysses"] is not None:
        ulysses = layers * (dense / ranks + found["ulysses"] / speed + 2 * LATENCY) + rest / ranks
    exchanged = found["sent"] / speed + found["exchanges"] * LATENCY
    mine = layers * (sparse * found["pairs"] / ranks + exchanged) + rest * found["tokens"]
    return {"nearfield": mine, "ring": ring, "ulysses": ulysses}


def measured(case: SplitCase) -> Measured | None:
    """Times of one GPU: measured ones, or those of a case that is alike, scaled."""
    if case.name not in LIKE:
        return MEASURED.get(case.name)
    like = SplitCase(CASES[LIKE[case.name]])
    times = MEASURED[like.name]
    tokens = case.geometry.num_tokens / like.geometry.num_tokens
    pairs, other_pairs = (
        sum(reader.near.num_pairs for reader in one.readers(_BLOCK)) for one in (case, like)
    )
    return Measured(times.sparse * pairs / other_pairs, times.dense * tokens**2, times.rest * tokens)


# -- real processes ----------------------------------------------------------------------------------------------------


def check(case: SplitCase, num_ranks: int) -> Record:
    """Bytes that ranks really sent in a cycle of layers, forward and backward, on processes of this machine (gloo), and
    what was counted for them."""
    split = case.split(num_ranks, _SMALL_BLOCK)
    shapes = Shapes(1, case.heads, case.heads, case.head_dim, torch.float32)
    counted = [0] * num_ranks
    for reader in case.readers(_SMALL_BLOCK):
        for way in bytes_sent(Traffic(reader.near, split), shapes):
            counted = [total + sent for total, sent in zip(counted, way, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_attend_and_tell, (num_ranks, folder, case.case), num_ranks)
        sent = [int((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks)]
    return {"ranks": num_ranks, "sent_by_rank": sent, "counted": counted}


def _attend_and_tell(rank: int, num_ranks: int, folder: str, case: Case) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    (Path(folder) / str(rank)).write_text(str(_bytes_of_a_cycle(SplitCase(case))))
    dist.destroy_process_group()
    os._exit(0)  # at an ordinary end, what torch still holds has aborted one process in thirty


def _bytes_of_a_cycle(case: SplitCase) -> int:
    """What this rank really sends in a cycle of layers."""
    ranks = Ranks(dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    split = case.split(ranks.size, _SMALL_BLOCK)
    for reader in case.readers(_SMALL_BLOCK):
        route = Traffic(reader.near, split).route(ranks.index)
        shape = 3, 1, case.heads, route.num_queries, case.head_dim
        query, key, value = torch.randn(shape, requires_grad=True)
        attend(query, key, value, route, ranks).out.sum().backward()
    return ranks.bytes_sent
