"""What each rank of a split computes, timed on one device, rank after rank: how much more than its share of the whole.

Nothing is sent. A rank's layer is the code that runs on several GPUs (`parallel.attend`), among ranks that are not
there: what they would have sent is random numbers of the same sizes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.report import Record
from benchmarks.runner import require
from benchmarks.scaling_split import SplitCase
from nearfield import Attended, Plan
from nearfield.cli import check, timing
from nearfield.cli.timing import Timing
from nearfield.ops import attend as attend_here
from nearfield.ops import attend_continued
from nearfield.parallel import Ranks, Route, Shapes, Traffic, attend

Sides = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""
_GPU_BLOCK, _CPU_BLOCK = 128, 16
TARGET = 0.10
"""Loss of the kernels that is aimed at, on 8 ranks at 4096 pixels."""


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


def effort(device: torch.device, usual: timing.Effort, quick: bool) -> timing.Effort:
    """The effort for short calls, of which there are many: 17 for 8 ranks in each layer."""
    return usual if quick or device.type == "cpu" else timing.Effort(rounds=5, seconds=0.15, most=30)


def measure(
    case: SplitCase, num_ranks: int, layer: int, device: torch.device, effort: timing.Effort
) -> Record:
    """Milliseconds of one layer: one call over the whole sequence; and of each rank its call of `attend` alone, over
    keys that lie ready, and all that it computes for the layer: packing what it sends, the call, merging."""
    block = _GPU_BLOCK if device.type == "cuda" else _CPU_BLOCK
    plan = case.method.layer(case.geometry, layer, q_block=block, k_block=block, device=device).near
    split = case.split(num_ranks, block)
    traffic = Traffic(plan, split)
    routes = [traffic.route(rank, device) for rank in range(num_ranks)]
    whole = _tensors(case, case.geometry.num_tokens, device)
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
    kernels, layers = (
        [times[f"{name} {rank}"] for rank in range(num_ranks)] for name in ("kernels", "layer")
    )
    found = {
        "ranks": num_ranks,
        "layer": layer,
        "whole": times["whole"],
        "kernels": kernels,
        "layers": layers,
    }
    return (
        found
        | losses(times["whole"], kernels, layers, [route.num_pairs for route in routes])
        | {"is_graph": is_graph}
    )


def losses(
    whole: Timing, kernels: Sequence[Timing], layers: Sequence[Timing], pairs: Sequence[int]
) -> Record:
    """What the slowest rank takes over an even share; and the part of it that the split itself causes, for the busiest
    rank has more pairs than others."""

    def loss(times: Sequence[Timing]) -> float:
        return max(time.median for time in times) / (whole.median / len(times)) - 1

    pair_loss = max(pairs) * len(pairs) / sum(pairs) - 1
    return {
        "pairs": list(pairs),
        "kernel_loss": loss(kernels),
        "layer_loss": loss(layers),
        "pair_loss": pair_loss,
    }


def _check(tensors: Sides, plan: Plan, run: Callable[[], Attended]) -> None:
    with torch.no_grad(), check.poisoned_memory():
        found = run()
    require(check.check_forward(tensors, plan, *found))


def _graphs(
    functions: dict[str, timing.Function], device: torch.device
) -> tuple[dict[str, timing.Function], bool]:
    """The functions as CUDA graphs, where possible: launching a rank's share would take longer than running it."""
    if device.type != "cuda":
        return functions, False
    try:
        return {name: timing.captured(function, device) for name, function in functions.items()}, True
    except RuntimeError:
        return functions, False


def _tensors(case: SplitCase, tokens: int, device: torch.device) -> Sides:
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


def _kernels(case: SplitCase, route: Route, mine: Sides) -> timing.Function:
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
        if call.keys.tokens is None and len(call.key_groups) > 1:
            found = attend_continued(query, key, value, more, call.plan)
        return found or attend_here(query, whole_key, whole_value, call.plan)

    _check((query, whole_key, whole_value), call.plan, run)
    return run


def _arrived(case: SplitCase, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as they lie in what other ranks have sent."""
    row = Shapes(1, case.heads, case.heads, case.head_dim, like.dtype).key
    key, value = row.tensors(row.filled(_tensors(case, count, like.device)[1:]))
    return key, value
