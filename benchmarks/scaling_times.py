"""What each rank of a split computes, timed on one device, rank after rank: how much more than its share of the whole.

Nothing is sent. A rank's layer is the code that runs on several GPUs (`parallel.attend`), among ranks that are not
there: what they would have sent is random numbers of the same sizes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.scaling import split_of
from benchmarks.scaling_cases import ScalingCase
from nearfield import Geometry, Hilbert
from nearfield._types import Attended
from nearfield.cli import check, report, timing
from nearfield.cli.timing import Timing
from nearfield.ops.attention.api import attend as attend_here
from nearfield.ops.attention.api import attend_continued
from nearfield.parallel import Ranks, Route, Shapes, Traffic, attend
from nearfield.parallel.route import CAME
from nearfield.plan.plan import Plan

Sides = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""

_GPU_BLOCK, _CPU_BLOCK = 128, 16
TARGET = 0.10
"""Loss of the kernels that is aimed at, on 8 ranks at 4096 pixels."""


@dataclass(frozen=True)
class KernelTimes:
    """One layer of a case on one number of ranks; times in milliseconds.

    Args:
        whole: one call of `attend` over the whole sequence.
        kernels: of each rank, its call of `attend` alone, over keys that lie ready.
        layers: of each rank, all that it computes for the layer: packing what it sends, the call, merging.
        pairs: of each rank, per batch element and head.
        is_graph: whether calls were timed as CUDA graphs: without what the processor takes to start them.
    """

    case: str
    ranks: int
    layer: int
    whole: Timing
    kernels: tuple[Timing, ...]
    layers: tuple[Timing, ...]
    pairs: tuple[int, ...]
    is_graph: bool = False
    status: str = "ok"

    @property
    def kernel_loss(self) -> float:
        return _loss(self.kernels, self.whole)

    @property
    def layer_loss(self) -> float:
        return _loss(self.layers, self.whole)

    @property
    def pair_loss(self) -> float:
        """The part of it that the split itself causes: the busiest rank has more pairs than others."""
        return max(self.pairs) * self.ranks / sum(self.pairs) - 1


def _loss(times: Sequence[Timing], whole: Timing) -> float:
    return max(time.median for time in times) / (whole.median / len(times)) - 1


class AbsentRanks(Ranks):
    """All ranks but one are missing: whatever is sent arrives nowhere, and noise comes back at once."""

    def __init__(self, index: int, size: int) -> None:
        self._index, self._size, self.overlap = index, size, False
        self.bytes_sent = self.num_exchanges = 0
        self._noise: dict[int, Tensor] = {}

    @property
    def size(self) -> int:
        return self._size

    @property
    def index(self) -> int:
        return self._index

    def agree(self, **facts: object) -> None:
        pass

    def _carry(self, buffer: Tensor, sizes: list[int], wanted: list[int]) -> tuple[Tensor, None]:
        count = sum(wanted)
        if count not in self._noise:  # made once: it is not part of what is timed
            # Read as float32, two numbers of 16 bits are one that is about as large as the second.
            noise = torch.randn(-(-count // 2), device=buffer.device).bfloat16()
            self._noise[count] = noise.view(torch.uint8)[:count]
        return self._noise[count], None


class WrongAnswer(Exception):
    """What was to be timed does not give what it should."""


def effort(device: torch.device, quick: bool) -> timing.Effort:
    """Of short calls, of which there are many: 17 for 8 ranks in each layer."""
    usual = timing.Effort.of(device, quick)
    return usual if quick or device.type == "cpu" else timing.Effort(rounds=5, seconds=0.15, most=30)


def run_all(
    cases: Sequence[ScalingCase],
    ranks: Sequence[int],
    device: torch.device,
    effort: timing.Effort,
    on_result: Callable[[str], None],
) -> Iterator[KernelTimes]:
    for case in cases:
        for num_ranks in ranks:
            for layer in range(Hilbert(**case.fields).phases):
                on_result(f"{case.name} on {num_ranks}, layer {layer}")
                yield measure(case, num_ranks, layer, device, effort)


def measure(
    case: ScalingCase, num_ranks: int, layer: int, device: torch.device, effort: timing.Effort
) -> KernelTimes:
    is_gpu = device.type == "cuda"
    block = _GPU_BLOCK if is_gpu else _CPU_BLOCK
    geometry = Geometry(case.grid, text=case.text)
    plan = Hilbert(**case.fields).plan(geometry, layer, q_block=block, k_block=block, device=device)
    split = split_of(case, num_ranks, block)
    traffic = Traffic(plan, split)
    routes = [traffic.route(rank, device) for rank in range(num_ranks)]
    whole = _tensors(case, geometry.num_tokens, device)
    functions: dict[str, timing.Function] = {"whole": lambda: attend_here(*whole, plan)}
    _check(whole, plan, lambda: attend_here(*whole, plan))
    for route in routes:
        held = split.held(route.rank).to(device)
        mine = _picked(whole, held)
        functions[f"kernels {route.rank}"] = _kernels(case, route, mine)
        functions[f"layer {route.rank}"] = _layer(route, mine)
    with torch.no_grad():
        functions, is_graph = _graphs(functions, device)
        times = timing.measure(functions, device, effort)
    return KernelTimes(
        case.name,
        num_ranks,
        layer,
        times["whole"],
        tuple(times[f"kernels {rank}"] for rank in range(num_ranks)),
        tuple(times[f"layer {rank}"] for rank in range(num_ranks)),
        tuple(route.num_pairs for route in routes),
        is_graph,
    )


def _check(tensors: Sides, plan: Plan, run: Callable[[], Attended]) -> None:
    """A wrong answer gets no figure."""
    with torch.no_grad(), check.poisoned_memory():
        found = run()
    checked = check.check_forward(tensors, plan, *found)
    if not checked.passed:
        raise WrongAnswer(str(checked))


def _graphs(
    functions: dict[str, timing.Function], device: torch.device
) -> tuple[dict[str, timing.Function], bool]:
    """The same as CUDA graphs, where they can be: a rank's share is so short that starting it would take longer."""
    if device.type != "cuda":
        return functions, False
    try:
        return {name: timing.captured(function, device) for name, function in functions.items()}, True
    except RuntimeError:
        return functions, False


def _tensors(case: ScalingCase, tokens: int, device: torch.device) -> Sides:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = 3, 1, case.heads, tokens, case.head_dim
    query, key, value = torch.randn(shape, device=device, dtype=dtype)
    return query, key, value


def _picked(sides: Sides, tokens: Tensor) -> Sides:
    query, key, value = (x.index_select(2, tokens) for x in sides)
    return query, key, value


def _layer(route: Route, mine: Sides) -> timing.Function:
    ranks = AbsentRanks(route.rank, route.num_ranks)
    return lambda: attend(*mine, route, ranks)


def _kernels(case: ScalingCase, route: Route, mine: Sides) -> timing.Function:
    """The call of `attend` alone, on tensors that lie ready."""
    call = route.joined
    query, key, value = mine
    visitors, *_ = _tensors(case, len(call.queries.place) - query.shape[2], query.device)
    more = _arrived(case, len(call.keys.place) - key.shape[2], query)
    query = call.queries.enter(torch.cat([query, visitors], dim=2))
    whole_key, whole_value = (
        call.keys.enter(torch.cat(parts, dim=2)) for parts in ((key, more[0]), (value, more[1]))
    )

    def run() -> Attended:
        found = None
        if call.keys.tokens is None and CAME in call.key_groups:
            found = attend_continued(query, key, value, more, call.plan)
        return found or attend_here(query, whole_key, whole_value, call.plan)

    _check((query, whole_key, whole_value), call.plan, run)
    return run


def _arrived(case: ScalingCase, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as they lie in what other ranks have sent."""
    row = Shapes(1, case.heads, case.heads, case.head_dim, like.dtype).key
    key, value = row.tensors(row.filled(_tensors(case, count, like.device)[1:]))
    return key, value


# -- reports -----------------------------------------------------------------------------------------------------------


def results_table(results: Sequence[KernelTimes]) -> str:
    rows = [["case", "ranks", "layer", "whole", "share", "kernels", "loss", "all", "loss", "pairs"]]
    for result in results:
        rows.append(
            [
                result.case,
                str(result.ranks),
                str(result.layer),
                f"{result.whole.median:.3f} ms",
                f"{result.whole.median / result.ranks:.3f}",
                f"{max(time.median for time in result.kernels):.3f}",
                f"{result.kernel_loss:+.1%}",
                f"{max(time.median for time in result.layers):.3f}",
                f"{result.layer_loss:+.1%}",
                f"{result.pair_loss:+.1%}",
            ]
        )
    how = "as CUDA graphs" if all(result.is_graph for result in results) else "with what starting them takes"
    return "\n".join(
        [
            report.table(rows),
            "whole: one call; share: an even part of it; kernels: of the slowest rank; all: with packing and merging;",
            f"pairs: the busiest rank over an even share. Calls were timed {how}.",
            f"to reach: at most {TARGET:+.0%} for the kernels, on 8 ranks at 4096 pixels",
        ]
    )


def as_json(results: Sequence[KernelTimes], device: str, machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": 1,
        "benchmark": "scaling-kernel-time",
        "machine": machine,
        "device": device,
        "measured": "milliseconds on one device, the ranks one after another; nothing is sent",
        "target_kernel_loss": TARGET,
        "results": [
            asdict(result)
            | {
                "kernel_loss": result.kernel_loss,
                "layer_loss": result.layer_loss,
                "pair_loss": result.pair_loss,
            }
            for result in results
        ],
    }
