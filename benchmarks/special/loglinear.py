"""LogLinear in benchmarks: its attention calls, which are judged on the blocks that it chose."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.attention_calls import BOTH, FORWARD, Call, Work, line
from benchmarks.cases import CUDA, QUICK, Case
from benchmarks.special import Special
from nearfield import LogLinear, attend_with
from nearfield.cli.check import Checked, Inputs, compare, keys_of, poisoned_memory, worst
from nearfield.cli.timing import Function
from nearfield.methods.loglinear import Chosen, choose
from nearfield.ops import pool

MILLISECONDS = {
    "loglinear-4x6x16384x64": (0.29, 1.3),
    "loglinear-1x6x65536x64": (0.39, 2.0),
    "loglinear-4x6x65536x64": (1.45, 6.5),
    "loglinear-1x6x131072x64": (0.95, 5.0),
}
"""Milliseconds to reach on one H200: forward, and forward with backward."""


def _cases() -> Iterator[Case]:
    for shape, levels, where in (
        ((4, 6, 16384, 64), 2, CUDA),
        ((1, 6, 65536, 64), 2, CUDA),
        ((4, 6, 65536, 64), 2, CUDA),
        ((1, 6, 131072, 64), 2, CUDA),
        ((1, 6, 16384, 64), "auto", CUDA),
        ((1, 6, 65536, 64), "auto", CUDA),
        ((1, 6, 262144, 64), "auto", CUDA),
        ((1, 2, 1024, 32), 1, QUICK),
        ((1, 2, 1000, 32), "auto", QUICK),
    ):
        name = "loglinear-" + "x".join(map(str, shape)) + ("-auto" if levels == "auto" else "")
        on = {"preset": line(*shape), "backward": True}
        yield Case(name, on, "LogLinear", {"levels": levels}, where=(where,))


def works(call: Call, method: LogLinear) -> Iterator[tuple[str, Work]]:
    """The call, and with its backward; pooling and choosing by themselves."""
    attention = partial(attend_with, method, impl=call.impl)
    tokens = call.preset.tokens
    kept = min(1.0, method.keys_per_query(tokens) / tokens)
    levels = method.num_levels(tokens, tokens)
    parts: dict[str, Function] = {
        "pooling": lambda: [pool(x, method.block, levels, call.impl) for x in call.alike],
        "pooling, choosing and lists": lambda: choose(method, *call.alike, impl=call.impl),
    }
    keys = {"keys_per_query": method.keys_per_query(tokens)}
    targets = [{"target_milliseconds": each} for each in MILLISECONDS.get(call.case.name, ())]
    forward_facts, both_facts = (keys | target for target in targets or ({}, {}))
    run = partial(attention, *call.alike)
    judged = partial(_judged, call, method, run)
    yield FORWARD, Work(run, judged, kept, FORWARD, parts, True, facts=forward_facts, by_graph=True)
    if call.on["backward"]:
        both = partial(call.differentiated, attention, call.alike)
        judged = partial(_judged, call, method, lambda: both()[0], gradients=True)
        yield BOTH, Work(both, judged, kept, BOTH, in_graph=True, facts=both_facts, by_graph=True)


def _judged(call: Call, method: LogLinear, run: Callable[[], Tensor], *, gradients: bool = False) -> Checked:
    """Some blocks of queries against float64, for what was chosen.

    Args:
        run: gives results, or the gradients of the queries.
    """
    with poisoned_memory():
        out = run()
    if not bool(torch.isfinite(out).all()):
        return Checked(float("nan"), 0.0, "out holds values that are not finite")
    found = choose(method, *call.alike, impl=call.impl)
    samples = []
    for head in ((0, 0), (out.shape[0] - 1, out.shape[1] - 1)):
        for row in sorted({0, found.near.num_rows // 2, found.near.num_rows - 1}):
            rows = slice(row * method.block, (row + 1) * method.block)
            grad_out = call.grad_out[head][rows] if gradients else None
            exact, rough = (
                _chosen_row(call.alike, found, head, row, dtype, grad_out)
                for dtype in (torch.float64, out.dtype)
            )
            samples.append(compare(out[head][rows], exact, rough, f"head {head[1]}, row {row}"))
    return worst(samples)


def _chosen_row(
    inputs: Inputs,
    found: Chosen,
    head: tuple[int, int],
    row: int,
    dtype: torch.dtype,
    grad_out: Tensor | None,
) -> Tensor:
    """What one block of queries should give, or the gradient of these queries, computed in `dtype`."""
    query, key, value = (x.detach()[head].to(dtype) for x in inputs)
    first, block = row * found.near.q_block, found.near.q_block
    near = keys_of(found.near, head, row)
    keys, values, bias = [key[near]], [value[near]], [key.new_zeros(len(near))]
    if found.far is not None and found.key is not None and found.value is not None:
        assert found.bias is not None
        far = keys_of(found.far, head, first // found.far.q_block)
        keys.append(found.key[head][far].to(dtype))
        values.append(found.value[head][far].to(dtype))
        bias.append(found.bias[0, 0, far].to(dtype))
    rows = query[first : first + block].requires_grad_(grad_out is not None)
    scores = rows @ torch.cat(keys).mT * query.shape[-1] ** -0.5
    out = torch.softmax(scores + torch.cat(bias), -1) @ torch.cat(values)
    return out if grad_out is None else torch.autograd.grad(out, rows, grad_out.to(dtype))[0]


SPECIAL = Special("LogLinear", {"attention": [*_cases()]}, works=works)
