"""Plans over split sequences: the cases of the parallel tests, and what one rank does with each."""

import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from tests.tiles import paper
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nearfield import Geometry, Hilbert, Plan, attend, parallel, planning
from nearfield.parallel import Ranks, Shapes, Split, Traffic, bytes_sent
from nearfield.parallel.split import REPLICATED


class Case(NamedTuple):
    plan: Plan
    split: Callable[[int], Split]
    heads: int = 2
    key_heads: int = 2
    batch: int = 1
    has_bias: bool = False


def _hilbert(
    method: Hilbert, geometry: Geometry, layer: int = 1, heads: int | None = None, **more: Any
) -> Case:
    plan = method.plan(geometry, layer, heads=heads, q_block=8, k_block=8)
    spans = [section.span for section in method.sections(geometry)]
    text = [geometry.text_span] if geometry.text else []
    return Case(plan, partial(Split.even, spans, unit=8, replicated=text), heads or 2, **more)


def _contiguous(plan: Plan, **more: Any) -> Case:
    return Case(plan, partial(Split.even, [(0, plan.num_queries)]), **more)


def _random_lists() -> Plan:
    mask = torch.rand(2, 4, 9, 33, generator=torch.Generator().manual_seed(0)) < 0.15
    return planning.from_mask(mask, q_block=16, k_block=4, num_queries=131, num_keys=131)


def _idle_text() -> Case:
    """Text that all ranks hold and that reads nothing, as it reads no summaries."""
    case = CASES["hilbert"]
    reads = case.plan.block_counts()[0, 0] > 0
    reads[: PICTURE.text // case.plan.q_block] = False
    sizes = {"num_queries": case.plan.num_queries, "num_keys": case.plan.num_keys}
    return case._replace(plan=planning.from_mask(reads, q_block=8, k_block=8, **sizes))


def _repeated() -> Plan:
    keys = torch.tensor([[0, 0, 3], [1, 2, 2], [2, 4, 4]])[None, None]
    return planning.key_lists(keys, None, q_block=16, k_block=8, num_queries=40, num_keys=40)


def _torn_text(num_ranks: int) -> Split:
    """Text inside blocks, between tokens of one rank, and shares of very different size."""
    spans = [(0, 3), (5, 131)]
    cuts = [5, *(131 - 7 * (num_ranks - rank) for rank in range(1, num_ranks)), 131]
    owned = [[(start, stop)] for start, stop in pairwise(cuts)]
    owned[-1].append(spans[0])
    return Split(131, tuple(map(tuple, owned)), ((3, 5),))


PICTURE = Geometry((12, 13), text=24)
CASES = {
    "hilbert": _hilbert(paper(tiles=5, shared_tokens=16), PICTURE),
    "hilbert, keys": _hilbert(paper(tiles=5, shared_tokens=16, share="keys"), PICTURE, layer=2),
    "hilbert, nothing shared": _hilbert(paper(tiles=8, shared="none"), Geometry((16, 16))),
    "hilbert, text torn": _hilbert(paper(tiles=4, shared_tokens=16), Geometry((12, 13), text=21)),
    "hilbert, text behind": _hilbert(
        paper(tiles=4, shared_tokens=16), Geometry((12, 12), text=10, text_first=False), has_bias=True
    ),
    "hilbert, video": _hilbert(paper(tiles=6, shared_tokens=16), Geometry((3, 7, 8), text=16)),
    "hilbert, two images": _hilbert(paper(tiles=3, shared_tokens=16), Geometry((8, 9), references=((8, 8),))),
    "hilbert, interleaved": _hilbert(
        paper(tiles=6, shared_tokens=16, interleave=True), PICTURE, heads=4, batch=2
    ),
    "contiguous": _contiguous(paper(tiles=5).plan(PICTURE, 3, q_block=16, k_block=4), has_bias=True),
    "full": _contiguous(planning.full(75, q_block=16, k_block=8), heads=4, key_heads=2),
    "random lists": _contiguous(_random_lists(), batch=2, heads=4, key_heads=2, has_bias=True),
    "read twice": _contiguous(_repeated()),
    "torn by text": Case(_random_lists(), _torn_text, heads=4, key_heads=1, batch=2, has_bias=True),
}
CASES["idle text"] = _idle_text()


def inputs(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """Query, key, value and bias of the whole sequence, and gradients of output and `lse`."""
    torch.manual_seed(0)
    tokens = case.plan.num_queries
    query = torch.randn(case.batch, case.heads, tokens, 8).to(dtype)
    key, value = (torch.randn(case.batch, case.key_heads, tokens, 8).to(dtype) for _ in range(2))
    bias = torch.randn(case.batch, case.heads, tokens).to(torch.promote_types(dtype, torch.float32))
    grads = [torch.randn_like(query), torch.randn_like(bias)]
    return [query, key, value, *[bias] * case.has_bias], grads


def attended(tensors: list[Tensor], grads: list[Tensor], read: Callable[..., Any]) -> list[Tensor]:
    """Output, `lse`, and the gradients of everything that was given."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out, lse = read(*leaves[:3], key_bias=leaves[3] if len(leaves) > 3 else None)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, tuple(grads))]


def whole(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What one process computes."""
    case = CASES[name]
    return attended(*inputs(case, dtype), partial(attend, plan=case.plan))


class Part(NamedTuple):
    """What a rank has: results and gradients of the tokens it holds, and the bytes it sent."""

    results: list[Tensor]
    bytes_forward: int
    bytes_backward: int


def part(
    mesh: DeviceMesh, name: str, dtype: torch.dtype = torch.float64, overlap: bool | None = None
) -> Part:
    """What one rank of several computes. Rows that all hold belong to the loss of rank 0."""
    case, ranks = CASES[name], Ranks(mesh, overlap)
    split = case.split(ranks.size)
    route = Traffic(case.plan, split).route(ranks.index)
    held = split.held(ranks.index)
    tensors, grads = inputs(case, dtype)
    counts = (split.owners[held] == ranks.index) | (ranks.index == 0)
    mine = [grads[0][:, :, held] * counts[:, None], grads[1][:, :, held] * counts]
    forward = 0

    def read(*args: Tensor, key_bias: Tensor | None) -> Any:
        nonlocal forward
        result = parallel.attend(*args, route, ranks, key_bias=key_bias)
        forward = ranks.bytes_sent
        return result

    results = attended([x[:, :, held] for x in tensors], mine, read)
    return Part(results, forward, ranks.bytes_sent - forward)


def counted(name: str, num_ranks: int, dtype: torch.dtype = torch.float64) -> list[tuple[int, int]]:
    """The bytes each rank would send, forward and backward."""
    case = CASES[name]
    shapes = Shapes(case.batch, case.heads, case.key_heads, 8, dtype, case.has_bias)
    return list(zip(*bytes_sent(Traffic(case.plan, case.split(num_ranks)), shapes), strict=True))


def joined(name: str, parts: list[Part]) -> list[Tensor]:
    """The whole of what ranks have: results of each token's owner, and gradients added up."""
    case, num_ranks = CASES[name], len(parts)
    split = case.split(num_ranks)
    wholes = []
    for number, first in enumerate(parts[0].results):
        total = first.new_zeros(*first.shape[:2], split.num_tokens, *first.shape[3:])
        for rank, one in enumerate(parts):
            held = split.held(rank)
            is_result = number < 2
            if is_result:
                kept = (split.owners[held] != REPLICATED) | (rank == 0)
                total[:, :, held[kept]] = one.results[number][:, :, kept]
            else:
                total[:, :, held] += one.results[number]
        wholes.append(total)
    return wholes


# -- other things that ranks do ----------------------------------------------------------------------------------------


def without_gradient(mesh: DeviceMesh, name: str) -> torch.Tensor:
    case, ranks = CASES[name], Ranks(mesh)
    split = case.split(ranks.size)
    held = split.held(ranks.index)
    tensors = [x[:, :, held] for x in inputs(case)[0]]
    bias = tensors[3] if case.has_bias else None
    route = Traffic(case.plan, split).route(ranks.index)
    with torch.inference_mode():
        return parallel.attend(*tensors[:3], route, ranks, key_bias=bias).out.clone()


def chosen_overlap(mesh: DeviceMesh, machines: int) -> bool | None:
    """What ranks on so many machines decide about overlapping, if nobody has told them."""
    ranks = Ranks(mesh)
    with mock.patch("platform.node", return_value=f"machine {ranks.index % machines}"):
        ranks.agree(anything=0)
    return ranks.overlap


def other_plans(mesh: DeviceMesh) -> None:
    ranks = Ranks(mesh)
    plan = planning.ring(64, 16, shift=8 * (ranks.index % 2), q_block=16, k_block=16)
    route = Traffic(plan, Split.even([(0, 64)], ranks.size)).route(ranks.index)
    query = torch.zeros(1, 1, route.num_queries, 8)
    parallel.attend(query, query, query, route, ranks)


def other_types(mesh: DeviceMesh) -> None:
    ranks = Ranks(mesh)
    route = Traffic(planning.full(64), Split.even([(0, 64)], ranks.size)).route(ranks.index)
    query = torch.zeros(1, 1, route.num_queries, 8, dtype=(torch.float32, torch.float64)[ranks.index % 2])
    parallel.attend(query, query, query, route, ranks)


def bad_calls(mesh: DeviceMesh) -> list[str]:
    """The messages of calls that no rank sends anything for."""
    ranks = Ranks(mesh)
    route = Traffic(planning.full(64), Split.even([(0, 64)], ranks.size)).route(ranks.index)
    fit, unfit = torch.zeros(1, 1, route.num_queries, 8), torch.zeros(1, 1, 65, 8)
    messages = []
    for call in (
        lambda: parallel.attend(unfit, fit, fit, route, ranks),
        lambda: parallel.attend(fit, unfit, unfit, route, ranks),
        lambda: parallel.attend(fit, fit, fit, planning.full(64), ranks),  # type: ignore[arg-type]
        lambda: parallel.attend(
            fit, fit, fit, Traffic(planning.full(64), Split.even([(0, 64)], 1)).route(0), ranks
        ),
        lambda: Ranks("cuda"),  # type: ignore[arg-type]
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


def lost(mesh: DeviceMesh, manner: str) -> float:
    """Attend again and again; the last rank stops doing so. Returns when this rank noticed."""
    ranks, is_trained = Ranks(mesh), manner == "dies before its backward pass"
    route = Traffic(planning.full(64), Split.even([(0, 64)], ranks.size)).route(ranks.index)
    query = torch.zeros(1, 1, route.num_queries, 8, requires_grad=is_trained)
    for turn in range(3):
        stops = turn == 2 and ranks.index == ranks.size - 1
        if stops and manner == "dies":
            os._exit(1)
        if stops and manner == "hangs":
            time.sleep(6)
            return 0.0
        started = time.monotonic()
        try:
            out = parallel.attend(query, query, query, route, ranks).out
            if stops:
                os._exit(1)
            if is_trained:
                out.sum().backward()
        except parallel.ExchangeFailed as error:
            is_told = f"rank {ranks.index} of {ranks.size} lost the others" in str(error)
            return time.monotonic() - started if is_told else float("inf")
    raise AssertionError("the loss was not noticed")
