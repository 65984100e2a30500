"""What a layer sends when one image is split over ranks, beside ring attention and Ulysses; and a model of its time.

Bytes are counted by the code that sends them (`parallel.bytes_sent`), and small runs of real processes are compared
with that. Times are computed: from kernel times measured on one H200, scaled by the pairs and tokens of the busiest
rank, and from link speeds that are stated, not measured.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from benchmarks.scaling_cases import CASES, LATENCY, LINKS, Measured, ScalingCase
from nearfield import Geometry, Hilbert
from nearfield.cli import report
from nearfield.methods import PlanLayer
from nearfield.parallel import Ranks, Shapes, Split, Traffic, attend, bytes_sent
from nearfield.parallel.far import bytes_summed, summary_split

_BLOCK = 128  # of plans on a GPU
_SMALL_BLOCK = 16


@dataclass(frozen=True)
class ScalingResult:
    """One case on one number of ranks.

    Args:
        sent: bytes that the busiest rank sends in one layer forward, the mean over the layers of a cycle.
        ring, ulysses: the same of dense attention; Ulysses needs a number of heads that ranks divide.
        exchanges: collectives per layer.
        pairs: of the busiest rank, over an even share of all.
        tokens: those of the busiest rank, text included, over all.
        step_seconds: computed time of a denoising step for each link: "nearfield", "ring", "ulysses".
    """

    case: str
    ranks: int
    sent: int
    ring: int
    ulysses: int | None
    exchanges: int
    pairs: float
    tokens: float
    step_seconds: dict[str, dict[str, float | None]]
    status: str = "ok"


def run_all(
    cases: Sequence[ScalingCase], ranks: Sequence[int], on_result: Callable[[str], None]
) -> list[ScalingResult]:
    results = []
    for case in cases:
        for num_ranks in ranks:
            on_result(f"{case.name} on {num_ranks}")
            results.append(count(case, num_ranks))
    return results


def count(case: ScalingCase, num_ranks: int) -> ScalingResult:
    split = split_of(case, num_ranks, _BLOCK)
    shapes = Shapes(1, case.heads, case.heads, case.head_dim, torch.bfloat16)
    readers = _readers(case, _BLOCK)
    layers = [_traffics(reader, split) for reader in readers]
    sent = [
        max(_per_rank(layer, lambda one: _forward(one, shapes, split))) + _summed(reader, shapes, num_ranks)
        for layer, reader in zip(layers, readers, strict=True)
    ]
    busiest = [max(_per_rank(layer, Traffic.pairs_per_rank)) for layer in layers]
    whole = [sum(traffic.plan.num_pairs for traffic in layer) for layer in layers]
    exchanges = sum(1 + traffic.has_returns + traffic.has_everyones for traffic in layers[0])
    exchanges += _summed(readers[0], shapes, num_ranks) > 0
    tokens = max(split.num_held(rank) for rank in range(num_ranks)) / split.num_tokens
    share = sum(busiest) / sum(whole)
    wide = 2 * case.heads * case.head_dim
    ring = 2 * wide * split.num_tokens * (num_ranks - 1) // num_ranks
    is_divided = case.heads % num_ranks == 0
    ulysses = 4 * wide * split.num_tokens * (num_ranks - 1) // num_ranks**2 if is_divided else None
    result = ScalingResult(
        case.name,
        num_ranks,
        round(sum(sent) / len(sent)),
        ring,
        ulysses,
        exchanges,
        share * num_ranks,
        tokens,
        {},
    )
    for name, speed in LINKS.items():
        result.step_seconds[name] = _step_seconds(case, result, speed)
    return result


def _traffics(reader: PlanLayer, split: Split) -> list[Traffic]:
    """Of the tokens, and of the summaries where there are any: as `SplitReader` sends them."""
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


def _step_seconds(case: ScalingCase, result: ScalingResult, speed: float) -> dict[str, float | None]:
    """Ring attention is taken to hide all it can behind its kernels, nearfield and Ulysses to hide nothing."""
    times = measured(case)
    if times is None:
        return {}
    ranks, layers = result.ranks, case.layers
    sparse, dense, rest = (value / 1e3 for value in (times.sparse, times.dense, times.rest))
    ring = layers * max(dense / ranks, result.ring / speed) + rest / ranks
    ulysses = None
    if result.ulysses is not None:
        ulysses = layers * (dense / ranks + result.ulysses / speed + 2 * LATENCY) + rest / ranks
    mine = (
        layers * (sparse * result.pairs / ranks + result.sent / speed + result.exchanges * LATENCY)
        + rest * result.tokens
    )
    return {"nearfield": mine, "ring": ring, "ulysses": ulysses}


def measured(case: ScalingCase) -> Measured | None:
    """Times of one GPU: measured ones, or those of a case that is alike, scaled."""
    if case.like is None:
        return case.measured
    like = CASES[case.like]
    times = like.measured
    assert times is not None
    tokens, other = (_geometry(one).num_tokens for one in (case, like))
    pairs, other_pairs = (
        sum(reader.near.num_pairs for reader in _readers(one, _BLOCK)) for one in (case, like)
    )
    return Measured(
        times.sparse * pairs / other_pairs, times.dense * (tokens / other) ** 2, times.rest * tokens / other
    )


def _geometry(case: ScalingCase) -> Geometry:
    return Geometry(case.grid, text=case.text)


@lru_cache(maxsize=16)
def _readers(case: ScalingCase, block: int) -> tuple[PlanLayer, ...]:
    """Those of a cycle of layers."""
    method = Hilbert(**case.fields)
    return tuple(
        method.layer(_geometry(case), layer, q_block=block, k_block=block) for layer in range(method.phases)
    )


@lru_cache(maxsize=16)
def split_of(case: ScalingCase, num_ranks: int, block: int) -> Split:
    """As `apply` splits it."""
    from nearfield.parallel.cuts import even_split

    return even_split(Hilbert(**case.fields), _geometry(case), num_ranks, block)


# -- real processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """Bytes that real ranks sent, forward and backward, beside what was counted for them."""

    ranks: int
    sent: tuple[int, ...]
    counted: tuple[int, ...]

    @property
    def passed(self) -> bool:
        return self.sent == self.counted


def check(case: ScalingCase, num_ranks: int) -> Checked:
    """Run a cycle of layers, forward and backward, on processes of this machine (gloo)."""
    split = split_of(case, num_ranks, _SMALL_BLOCK)
    shapes = Shapes(1, case.heads, case.heads, case.head_dim, torch.float32)
    counted = [0] * num_ranks
    for reader in _readers(case, _SMALL_BLOCK):
        for way in bytes_sent(Traffic(reader.near, split), shapes):
            counted = [total + sent for total, sent in zip(counted, way, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_attend_and_tell, (num_ranks, folder, case), num_ranks)
        sent = [int((Path(folder) / str(rank)).read_text()) for rank in range(num_ranks)]
    return Checked(num_ranks, tuple(sent), tuple(counted))


def _attend_and_tell(rank: int, num_ranks: int, folder: str, case: ScalingCase) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    (Path(folder) / str(rank)).write_text(str(_bytes_of_a_cycle(case)))
    dist.destroy_process_group()
    os._exit(0)  # at an ordinary end, what torch still holds has aborted one process in thirty


def _bytes_of_a_cycle(case: ScalingCase) -> int:
    """What this rank really sends in a cycle of layers."""
    ranks = Ranks(dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    split = split_of(case, ranks.size, _SMALL_BLOCK)
    for reader in _readers(case, _SMALL_BLOCK):
        route = Traffic(reader.near, split).route(ranks.index)
        query, key, value = torch.randn(
            3, 1, case.heads, route.num_queries, case.head_dim, requires_grad=True
        )
        attend(query, key, value, route, ranks).out.sum().backward()
    return ranks.bytes_sent


# -- reports -----------------------------------------------------------------------------------------------------------


def results_table(results: Sequence[ScalingResult]) -> str:
    links = list(LINKS)
    rows = [
        [
            "case",
            "ranks",
            "MiB sent",
            "ring",
            "Ulysses",
            "of ring",
            "busiest",
            *(f"step, {link}" for link in links),
        ]
    ]
    for result in results:
        ulysses = "-" if result.ulysses is None else _mebibytes(result.ulysses)
        rows.append(
            [
                result.case,
                str(result.ranks),
                _mebibytes(result.sent),
                _mebibytes(result.ring),
                ulysses,
                f"{result.sent / result.ring:.1%}",
                f"{result.pairs:.2f}x",
                *(_seconds(result.step_seconds[link]) for link in links),
            ]
        )
    return report.table(rows)


def _mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f}"


def _seconds(times: dict[str, float | None]) -> str:
    if not times:
        return "-"
    return f"{times['nearfield']:.3f} s (ring {times['ring']:.3f})"


def as_json(
    results: Sequence[ScalingResult], checks: Sequence[Checked], machine: dict[str, Any]
) -> dict[str, Any]:
    return {
        "format": 1,
        "benchmark": "scaling",
        "machine": machine,
        "measured": "bytes of real processes (`checks`); kernel times on one H200 (hilbert-h200, model-h200)",
        "computed": "bytes of the other sizes, by the same code; all step times",
        "links": LINKS,
        "latency_seconds": LATENCY,
        "checks": [asdict(one) | {"passed": one.passed} for one in checks],
        "results": [asdict(result) for result in results],
    }
