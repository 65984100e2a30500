"""Several parts in one softmax: the same as one dense softmax over all of them, forward and backward."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.attending import INF, NEEDS_TRITON, assert_budget, random_bias, random_inputs, random_plan
from torch import Tensor

from nearfield import attend as attend_function
from nearfield import planning
from nearfield._types import Positions
from nearfield.attend import Part, attend_together

IMPLEMENTATIONS = ["reference", "grouped", pytest.param("triton", marks=NEEDS_TRITON)]


def call(device: torch.device, key_heads: int = 2, empty_rows: bool = False) -> tuple[Tensor, list[Part]]:
    """Two parts of different lengths and grains, the second with a bias that hides a key."""
    query, key, value = random_inputs(2, 2, 40, 40, 16, device=device)
    _, far_key, far_value = random_inputs(2, 2, 40, 24, 16, device=device, seed=5)
    key, value, far_key, far_value = (x[:, :key_heads] for x in (key, value, far_key, far_value))
    bias = random_bias(1, 2, 24, device=device)
    bias[..., 3] = -INF
    near = random_plan(40, 40, q_block=16, k_block=16, heads=2, empty_rows=empty_rows, device=device)
    far = random_plan(40, 24, q_block=32, k_block=8, empty_rows=empty_rows, device=device, seed=1)
    return query, [Part(key, value, near), Part(far_key, far_value, far, bias)]


def leaves_of(query: Tensor, parts: Sequence[Part], dtype: torch.dtype) -> tuple[list[Tensor], list[Part]]:
    made = [query.to(dtype).clone().requires_grad_()]
    fresh = []
    for part in parts:
        key, value = (x.to(dtype).clone().requires_grad_() for x in (part.key, part.value))
        bias = None if part.key_bias is None else part.key_bias.to(dtype).clone().requires_grad_()
        made += [x for x in (key, value, bias) if x is not None]
        fresh.append(Part(key, value, part.plan, bias, part.positions))
    return made, fresh


def results(function: Any, query: Tensor, parts: Sequence[Part], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves, fresh = leaves_of(query, parts, dtype)
    out, lse = function(leaves[0], fresh)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator).to(query.device, dtype) for x in (out, lse)]
    loss = (out * weights[0]).sum() + (lse.masked_fill(lse == -INF, 0) * weights[1]).sum()
    names = ["query", "key", "value", "far key", "far value", "bias"]
    gradients = torch.autograd.grad(loss, leaves)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}


def dense(query: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """One softmax over all keys, who reads whom written out."""
    logits, values = [], []
    for part in parts:
        repeats = query.shape[1] // part.key.shape[1]
        times = part.plan.pair_counts()
        one = query @ part.key.repeat_interleave(repeats, 1).mT * query.shape[3] ** -0.5
        one = one if part.key_bias is None else one + part.key_bias[..., None, :]
        one = (one + times.to(one.dtype).log()).masked_fill(times == 0, -INF)
        if part.positions is not None:
            visible = part.positions.key[:, None, None] <= part.positions.query[:, None, :, None]
            one = one.masked_fill(~visible, -INF)
        logits.append(one)
        values.append(part.value.repeat_interleave(repeats, 1))
    every = torch.cat(logits, -1)
    nothing = (every == -INF).all(-1, keepdim=True)
    weights = torch.softmax(every.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)
    lse = torch.logsumexp(every.masked_fill(nothing, 0), -1).masked_fill(nothing[..., 0], -INF)
    return weights @ torch.cat(values, 2), lse


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("key_heads", "empty_rows"), [(2, False), (1, False), (2, True)])
def test_several_parts_are_one_softmax(
    impl: Any, key_heads: int, empty_rows: bool, device: torch.device
) -> None:
    query, parts = call(device, key_heads, empty_rows)
    exact = results(dense, query, parts, torch.float64)
    low = results(dense, query, parts, torch.float32)
    got = results(lambda q, p: attend_together(q, p, impl=impl), query, parts, torch.float32)
    for name in exact:
        assert_budget(name, got[name], exact[name], low[name])


@NEEDS_TRITON
def test_one_part_is_attend(device: torch.device) -> None:
    query, parts = call(device)
    one = attend_together(query, parts[:1], impl="triton")
    alone = attend_function(query, parts[0].key, parts[0].value, parts[0].plan, impl="triton")
    assert torch.equal(one.out, alone.out)
    assert torch.equal(one.lse, alone.lse)


@NEEDS_TRITON
def test_it_is_a_proper_operator_that_compiles(device: torch.device) -> None:
    query, parts = call(device)

    def together(query: Tensor, *tensors: Tensor) -> Tensor:
        near, far = Part(*tensors[:2], parts[0].plan), Part(*tensors[2:4], parts[1].plan, parts[1].key_bias)
        out, lse = attend_together(query, [near, far], impl="triton")
        return out.square().sum() + lse.sum()

    tensors = [query, parts[0].key, parts[0].value, parts[1].key, parts[1].value]
    torch._dynamo.reset()
    gradients = []
    for function in (together, torch.compile(together, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in tensors]
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, compiled)
    torch._dynamo.reset()
    lists = [
        x
        for part in parts
        for x in (
            part.plan.offsets,
            part.plan.blocks,
            None,
            part.plan.transpose().offsets,
            part.plan.transpose().blocks,
            None,
        )
    ]
    bias = parts[1].key_bias
    assert bias is not None
    torch.library.opcheck(
        torch.ops.nearfield.attend_together.default,
        (
            query.clone().requires_grad_(),
            [part.key.clone().requires_grad_() for part in parts],
            [part.value.clone().requires_grad_() for part in parts],
            lists,
            [bias.expand(2, -1, -1)],
            [1],
            [],
            [],
            [part.plan._extent for part in parts],
            [16, 16, 32, 8],
            0.25,
            "triton",
        ),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),  # compiled above
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_part_may_have_positions(impl: Any, number: int, device: torch.device) -> None:
    """Forward in one operator, with gradients part by part."""
    query, parts = call(device, key_heads=1)
    keys = parts[number].key.shape[2]
    places = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(device)
    positions = Positions(places[None, :40], places[None, :keys])
    parts[number] = parts[number]._replace(positions=positions)
    exact = results(dense, query, parts, torch.float64)
    low = results(dense, query, parts, torch.float32)
    got = results(lambda q, p: attend_together(q, p, impl=impl), query, parts, torch.float32)
    got["out"], got["lse"] = attend_together(query, parts, impl=impl)  # no gradient is wanted here
    for name in exact:
        assert_budget(name, got[name], exact[name], low[name])


@NEEDS_TRITON
def test_parts_without_bias_have_gradients(device: torch.device) -> None:
    query, parts = call(device)
    parts[1] = parts[1]._replace(key_bias=None)
    leaf = query.clone().requires_grad_()
    out = attend_together(leaf, parts, impl="triton").out
    expected = query.clone().requires_grad_()
    (found,) = torch.autograd.grad(out.sum(), leaf)
    (wanted,) = torch.autograd.grad(dense(expected, parts)[0].sum(), expected)
    torch.testing.assert_close(found, wanted)


@NEEDS_TRITON
def test_each_part_is_checked(device: torch.device) -> None:
    query, parts = call(device)
    wrong = Part(parts[1].key, parts[1].value, planning.full(40, 23, device=device))
    with pytest.raises(ValueError, match="`plan` must be made for 40 queries and 24 keys; got 40 and 23"):
        attend_together(query, [parts[0], wrong], impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("q_block", [16, 64])
def test_on_a_gpu_parts_may_have_kernels_of_their_own(
    q_block: int, dtype: torch.dtype, swapped: bool
) -> None:
    """The long part is for the fastest kernel. So is the short one with blocks of 64 queries, and they are merged; with
    16 the plain kernel goes on from the other's results, whichever was named first."""
    device = torch.device("cuda")
    query, key, value = (x.to(dtype) for x in random_inputs(2, 4, 1000, 1000, 64, device=device))
    _, far_key, far_value = (x.to(dtype) for x in random_inputs(2, 4, 1000, 90, 64, device=device, seed=5))
    bias = random_bias(1, 4, 90, device=device)
    near = random_plan(1000, 1000, q_block=128, k_block=64, heads=4, device=device)
    far = random_plan(1000, 90, q_block=q_block, k_block=8, empty_rows=True, device=device, seed=1)
    parts = [Part(key, value, near), Part(far_key, far_value, far, bias)][:: -1 if swapped else 1]
    exact, low = (
        dense(
            query.to(wanted),
            [Part(*(x.to(wanted) if isinstance(x, Tensor) else x for x in p)) for p in parts],
        )
        for wanted in (torch.float64, dtype)
    )
    for name, *values in zip(("out", "lse"), attend_together(query, parts), exact, low, strict=True):
        assert_budget(name, *values)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_on_a_gpu_the_last_keys_may_have_positions(dim: int) -> None:
    """As rows of a cache are computed again: the fastest kernel reads what all see, the plain one goes on."""
    device = torch.device("cuda")
    query, key, value = (
        x.to(torch.bfloat16) for x in random_inputs(1, 8, 300, 1000, dim, key_heads=2, device=device)
    )
    places = torch.arange(700, 1000, device=device)
    columns = torch.arange(16, device=device)
    sure = columns < 10
    sizes = {"q_block": 128, "k_block": 64, "num_queries": 300, "num_keys": 1000}
    before, edge = (planning.from_mask(mask.expand(3, 16), **sizes) for mask in (sure, ~sure))
    positions = Positions(places[None], torch.arange(1000, device=device)[None])
    parts = [Part(key, value, before), Part(key, value, edge, positions=positions)]
    exact, low = (
        dense(query.to(wanted), [part._replace(key=key.to(wanted), value=value.to(wanted)) for part in parts])
        for wanted in (torch.float64, torch.bfloat16)
    )
    for name, *values in zip(("out", "lse"), attend_together(query, parts), exact, low, strict=True):
        assert_budget(name, *values)
