"""Several parts in one softmax: the same as one dense softmax over all of them, forward and backward."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.attending import INF, NEEDS_TRITON, assert_budget, random_bias, random_inputs, random_plan
from torch import Tensor

from nearfield import attend as attend_function
from nearfield import planning
from nearfield._types import Positions
from nearfield.ops import KeyValuePart, attend_parts, attend_pooled, find_boxes
from nearfield.ops.attention import operators
from nearfield.ops.attention.api import checked_parts
from nearfield.ops.pool_select import api as pyramid
from nearfield.plan.plan import BLOCKS, Plan

IMPLEMENTATIONS = ["reference", "grouped", pytest.param("triton", marks=NEEDS_TRITON)]


def call(
    device: torch.device, key_heads: int = 2, empty_rows: bool = False
) -> tuple[Tensor, list[KeyValuePart]]:
    """Two parts of different lengths and grains, the second with a bias that hides a key."""
    query, key, value = random_inputs(2, 2, 40, 40, 16, device=device)
    _, far_key, far_value = random_inputs(2, 2, 40, 24, 16, device=device, seed=5)
    key, value, far_key, far_value = (x[:, :key_heads] for x in (key, value, far_key, far_value))
    bias = random_bias(1, 2, 24, device=device)
    bias[..., 3] = -INF
    near = random_plan(40, 40, q_block=16, k_block=16, heads=2, empty_rows=empty_rows, device=device)
    far = random_plan(40, 24, q_block=32, k_block=8, empty_rows=empty_rows, device=device, seed=1)
    return query, [KeyValuePart(key, value, near), KeyValuePart(far_key, far_value, far, bias)]


def leaves_of(
    query: Tensor, parts: Sequence[KeyValuePart], dtype: torch.dtype
) -> tuple[list[Tensor], list[KeyValuePart]]:
    made = [query.to(dtype).clone().requires_grad_()]
    fresh = []
    for part in parts:
        key, value = (x.to(dtype).clone().requires_grad_() for x in (part.key, part.value))
        bias = None if part.key_bias is None else part.key_bias.to(dtype).clone().requires_grad_()
        made += [x for x in (key, value, bias) if x is not None]
        fresh.append(KeyValuePart(key, value, part.plan, bias, part.positions))
    return made, fresh


def results(
    function: Any, query: Tensor, parts: Sequence[KeyValuePart], dtype: torch.dtype
) -> dict[str, Tensor]:
    leaves, fresh = leaves_of(query, parts, dtype)
    out, lse = function(leaves[0], fresh)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator).to(query.device, dtype) for x in (out, lse)]
    loss = (out * weights[0]).sum() + (lse.masked_fill(lse == -INF, 0) * weights[1]).sum()
    names = ["query", "key", "value", "far key", "far value", "bias"]
    names += [f"{name} again" for name in names[1 : len(leaves) - 5]]
    gradients = torch.autograd.grad(loss, leaves)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}


def dense(query: Tensor, parts: Sequence[KeyValuePart]) -> tuple[Tensor, Tensor]:
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
    got = results(lambda q, p: attend_parts(q, p, impl=impl), query, parts, torch.float32)
    for name in exact:
        assert_budget(name, got[name], exact[name], low[name])


@NEEDS_TRITON
def test_one_part_is_attend(device: torch.device) -> None:
    query, parts = call(device)
    one = attend_parts(query, parts[:1], impl="triton")
    alone = attend_function(query, parts[0].key, parts[0].value, parts[0].plan, impl="triton")
    assert torch.equal(one.out, alone.out)
    assert torch.equal(one.lse, alone.lse)


@NEEDS_TRITON
def test_it_is_a_proper_operator_that_compiles(device: torch.device) -> None:
    query, parts = call(device)

    def together(query: Tensor, *tensors: Tensor) -> Tensor:
        near, far = (
            KeyValuePart(*tensors[:2], parts[0].plan),
            KeyValuePart(*tensors[2:4], parts[1].plan, parts[1].key_bias),
        )
        out, lse = attend_parts(query, [near, far], impl="triton")
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
    bias = parts[1].key_bias
    assert bias is not None
    parts[1] = parts[1]._replace(key_bias=bias.expand(2, -1, -1))
    leaves, fresh = leaves_of(query, parts, query.dtype)
    torch.library.opcheck(
        torch.ops.nearfield.attend_2_parts.default,
        operators.flatten(leaves[0], fresh, 0.25, "triton"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),  # compiled above
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_part_may_have_positions(impl: Any, number: int, device: torch.device) -> None:
    query, parts = call(device, key_heads=1)
    keys = parts[number].key.shape[2]
    places = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(device)
    positions = Positions(places[None, :40], places[None, :keys])
    parts[number] = parts[number]._replace(positions=positions)
    exact = results(dense, query, parts, torch.float64)
    low = results(dense, query, parts, torch.float32)
    got = results(lambda q, p: attend_parts(q, p, impl=impl), query, parts, torch.float32)
    got["out"], got["lse"] = attend_parts(query, parts, impl=impl)  # no gradient is wanted here
    for name in exact:
        assert_budget(name, got[name], exact[name], low[name])


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("key_heads", "learns", "compiles", "transposed"),
    [(2, False, False, False), (1, True, False, False), (1, True, True, False), (2, False, False, True)],
)
def test_gradients_of_means_go_to_what_they_are_means_of(
    key_heads: int, learns: bool, compiles: bool, transposed: bool, device: torch.device
) -> None:
    """Two levels above an odd number of keys: by the kernel as by autograd; whether the bias is learned or not, and if
    means of values lie in another order than those of keys."""
    query, key, value = random_inputs(2, 2, 40, 37, 16, device=device)
    near = random_plan(40, 37, q_block=16, k_block=16, heads=2, empty_rows=True, device=device)
    far = random_plan(40, 16, q_block=32, k_block=4, device=device, seed=1)
    bias = random_bias(1, 2, 16, device=device)
    leaves = [x.clone().requires_grad_() for x in (query, key[:, :key_heads], value[:, :key_heads])]
    leaves += [bias.requires_grad_()] if learns else []

    def loss(by_kernel: bool, *leaves: Tensor) -> Tensor:
        query, key, value, *_ = leaves
        means = [pyramid.pool(x, 4, 2, "triton").data for x in (key, value)]
        if transposed:
            means[1] = means[1].mT.contiguous().mT
        parts = [KeyValuePart(key, value, near), KeyValuePart(means[0], means[1], far, bias)]
        if by_kernel:
            out, lse = attend_pooled(query, *parts, 4, 2, impl="triton")
        else:
            out, lse = attend_parts(query, parts, impl="triton")
        return out.square().sum() + lse.masked_fill(lse == -INF, 0).sum()

    torch._dynamo.reset()
    function = torch.compile(loss, backend="aot_eager") if compiles else loss
    by_kernel = torch.autograd.grad(function(True, *leaves), leaves)
    by_autograd = torch.autograd.grad(loss(False, *leaves), leaves)
    torch._dynamo.reset()
    for mine, theirs in zip(by_kernel, by_autograd, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_means_must_be_of_the_first_part(device: torch.device) -> None:
    query, parts = call(device)
    with pytest.raises(ValueError, match="`far` must have 12 keys, pooled from those of `near`; got 24"):
        attend_pooled(query, *parts, 4, 1)


def test_there_must_be_a_part(device: torch.device) -> None:
    query, _ = call(device)
    with pytest.raises(ValueError, match="`parts` must hold at least one part; got none"):
        attend_parts(query, [])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_calls_of_more_parts_than_an_operator_takes_are_merged(impl: Any, device: torch.device) -> None:
    query, parts = call(device)
    many = parts * 2
    assert len(many) > operators.MOST_PARTS
    exact = results(dense, query, many, torch.float64)
    low = results(dense, query, many, torch.float32)
    got = results(lambda q, p: attend_parts(q, p, impl=impl), query, many, torch.float32)
    for name in exact:
        assert_budget(name, got[name], exact[name], low[name])


@NEEDS_TRITON
def test_parts_without_bias_have_gradients(device: torch.device) -> None:
    query, parts = call(device)
    parts[1] = parts[1]._replace(key_bias=None)
    leaf = query.clone().requires_grad_()
    out = attend_parts(leaf, parts, impl="triton").out
    expected = query.clone().requires_grad_()
    (found,) = torch.autograd.grad(out.sum(), leaf)
    (wanted,) = torch.autograd.grad(dense(expected, parts)[0].sum(), expected)
    torch.testing.assert_close(found, wanted)


@NEEDS_TRITON
def test_each_part_is_checked(device: torch.device) -> None:
    query, parts = call(device)
    wrong = KeyValuePart(parts[1].key, parts[1].value, planning.full(40, 23, device=device))
    with pytest.raises(ValueError, match="`plan` must be made for 40 queries and 24 keys; got 40 and 23"):
        attend_parts(query, [parts[0], wrong], impl="triton")


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
    parts = [KeyValuePart(key, value, near), KeyValuePart(far_key, far_value, far, bias)][
        :: -1 if swapped else 1
    ]
    exact, low = (
        dense(
            query.to(wanted),
            [KeyValuePart(*(x.to(wanted) if isinstance(x, Tensor) else x for x in p)) for p in parts],
        )
        for wanted in (torch.float64, dtype)
    )
    for name, *values in zip(("out", "lse"), attend_parts(query, parts), exact, low, strict=True):
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
    parts = [KeyValuePart(key, value, before), KeyValuePart(key, value, edge, positions=positions)]
    exact, low = (
        dense(query.to(wanted), [part._replace(key=key.to(wanted), value=value.to(wanted)) for part in parts])
        for wanted in (torch.float64, torch.bfloat16)
    )
    for name, *values in zip(("out", "lse"), attend_parts(query, parts), exact, low, strict=True):
        assert_budget(name, *values)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("q_block", "k_block", "dim", "far_heads", "key_heads", "near_kind", "dtype"),
    [
        (128, 128, 128, 1, 8, "some", torch.bfloat16),
        (128, 128, 128, 1, 8, "some with a bias", torch.bfloat16),
        (128, 128, 128, 8, 2, "all", torch.float16),
        (128, 64, 64, 1, 8, "some", torch.bfloat16),
        (128, 16, 128, 1, 8, "some", torch.bfloat16),
        (128, 32, 64, 1, 8, "some", torch.bfloat16),
        (64, 16, 64, 1, 8, "some", torch.bfloat16),
        (64, 16, 128, 1, 8, "some", torch.bfloat16),
        (192, 64, 128, 1, 4, "some with a bias", torch.float16),
        (192, 64, 128, 1, 4, "all", torch.bfloat16),
        (64, 8, 64, 8, 8, "some", torch.bfloat16),
    ],
    ids=str,
)
def test_on_a_gpu_one_kernel_reads_boxes_after_its_list(
    q_block: int,
    k_block: int,
    dim: int,
    far_heads: int,
    key_heads: int,
    near_kind: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are more than processors, so a program goes from the boxes of one to the list of the next."""
    device = torch.device("cuda")
    sides = [
        random_inputs(3, 8, 1500, n, dim, key_heads=key_heads, device=device, seed=n) for n in (1400, 333)
    ]
    (query, key, value), (_, far_key, far_value) = ([x.to(dtype) for x in side] for side in sides)
    if near_kind == "all":  # rows of one length take fixed turns
        near = planning.full(1500, 1400, q_block=q_block, k_block=k_block, device=device)
    else:
        near = random_plan(1500, 1400, q_block=q_block, k_block=k_block, empty_rows=True, device=device)
    far = stretches(1500, 333, q_block, far_heads, device)
    bias = random_bias(3, 8, 333, device=device)
    bias[..., 40:50] = -INF
    hidden = random_bias(1, 8, 1400, device=device) if near_kind == "some with a bias" else None
    parts = [KeyValuePart(key, value, near, hidden), KeyValuePart(far_key, far_value, far, bias)]
    exact, low = (
        dense(
            query.to(wanted),
            [KeyValuePart(*(x.to(wanted) if isinstance(x, Tensor) else x for x in p)) for p in parts],
        )
        for wanted in (torch.float64, dtype)
    )
    far_parts = watched_far_parts(monkeypatch)
    together = attend_parts(query, parts)
    assert far_parts == ([True] if torch.cuda.get_device_capability() == (9, 0) else [])
    far_parts.clear()
    apart = attend_parts(query, [parts[0], parts[1]._replace(plan=without_boxes(far))])
    assert True not in far_parts
    for got in (together, apart):
        for name, *values in zip(("out", "lse"), got, exact, low, strict=True):
            assert_budget(name, *values)


@pytest.mark.gpu
@pytest.mark.parametrize(("k_block", "has_bias"), [(128, False), (128, True), (16, False)])
def test_on_a_gpu_keys_that_nobody_reads_do_not_matter_to_the_far_part(k_block: int, has_bias: bool) -> None:
    """Rows without a list load some tile nonetheless, before what they read of the far part."""
    device = torch.device("cuda")
    query, key, value = (x.bfloat16() for x in random_inputs(1, 4, 1000, 900, 128, device=device))
    _, far_key, far_value = (x.bfloat16() for x in random_inputs(1, 4, 1000, 333, 128, device=device, seed=5))
    mask = torch.ones(8, -(-900 // k_block), dtype=torch.bool)
    mask[:, 0] = False
    mask[3:6] = False
    sizes = {"q_block": 128, "k_block": k_block, "num_queries": 1000, "num_keys": 900}
    near = planning.from_mask(mask, **sizes).to(device)
    near_bias = random_bias(1, 4, 900, device=device) if has_bias else None
    far = KeyValuePart(
        far_key, far_value, stretches(1000, 333, 128, 1, device), random_bias(1, 4, 333, device=device)
    )
    expected = attend_parts(query, [KeyValuePart(key, value, near, near_bias), far])
    key[:, :, :k_block], value[:, :, :k_block] = float("nan"), float("nan")
    got = attend_parts(query, [KeyValuePart(key, value, near, near_bias), far])
    assert expected.out.isfinite().all()
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


def watched_far_parts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the Hopper kernel from now on has a far part."""
    hopper = hopper_kernels()
    seen: list[bool] = []
    forward = hopper.attend_forward

    def watched(*call: Any, **options: Any) -> Any:
        seen.append(options.get("far") is not None)
        return forward(*call, **options)

    monkeypatch.setattr(hopper, "attend_forward", watched)
    return seen


def hopper_kernels() -> Any:
    from nearfield.ops.attention import hopper

    return hopper


def without_boxes(plan: Plan) -> Plan:
    return Plan(
        plan.offsets, plan.blocks, plan.q_block, plan.k_block, plan.num_queries, plan.num_keys, check=False
    )


def stretches(num_queries: int, num_keys: int, q_block: int, heads: int, device: torch.device) -> Plan:
    """Rows that read all but a stretch, all, nothing, and a few single keys."""
    rows = -(-num_queries // q_block)
    mask = torch.ones(1, heads, rows, num_keys, dtype=torch.bool)
    generator = torch.Generator().manual_seed(7)
    for head in range(heads):
        for row in range(rows):
            start = int(torch.randint(num_keys, (1,), generator=generator))
            mask[0, head, row, start : start + 90] = False
        mask[0, head, 0] = True
        mask[0, head, 1] = False
        mask[0, head, 2] = torch.rand(num_keys, generator=generator) > 0.9
    sizes = {"q_block": q_block, "k_block": 1, "num_queries": num_queries, "num_keys": num_keys}
    plan = planning.from_mask(mask, **sizes).to(device)
    find_boxes(plan)
    return plan


@pytest.mark.parametrize("heads", [1, 3])
def test_boxes_hold_what_the_lists_hold(heads: int) -> None:
    plan = stretches(700, 333, 128, heads, torch.device("cpu"))
    assert plan.prepared.boxes is not None
    offsets, boxes = plan.prepared.boxes
    for head in range(heads):
        for row in range(plan.num_rows):
            found = [
                int(box) // 128 + place
                for box in boxes[0, head, offsets[0, head, row] : offsets[0, head, row + 1]]
                for place in range(int(box) % 128)
            ]
            start, stop = plan.offsets[0, head, row : row + 2].tolist()
            assert found == plan.blocks[0, head, start:stop].tolist(), (head, row)
    lengths = boxes[0, 0, : offsets[0, 0, -1]] % 128
    assert lengths.min() > 0
    assert lengths.max() == 64


@pytest.mark.parametrize("seed", range(5))
def test_boxes_of_any_lists(seed: int) -> None:
    """With batches, repeated keys, empty rows and unused slots."""
    made = random_plan(
        100,
        200,
        q_block=16,
        k_block=1,
        batch=2,
        heads=3,
        share=0.97,
        repeats=True,
        empty_rows=True,
        seed=seed,
    )
    room = torch.nn.functional.pad(made.blocks, (0, 9), value=77)
    plan = Plan(made.offsets, room, 16, 1, 100, 200)
    offsets, boxes = find_boxes(plan)
    times = torch.zeros_like(plan.block_counts())
    for batch, head, row in itertools.product(range(2), range(3), range(plan.num_rows)):
        for box in boxes[batch, head, offsets[batch, head, row] : offsets[batch, head, row + 1]].tolist():
            assert 0 < box % 128 <= 64
            times[batch, head, row, box // 128 : box // 128 + box % 128] += 1
    assert torch.equal(times, plan.block_counts())


def test_lists_that_hold_nothing_have_no_boxes() -> None:
    plan = planning.from_mask(
        torch.zeros(2, 10, dtype=torch.bool), q_block=16, k_block=1, num_queries=20, num_keys=10
    )
    assert find_boxes(plan).offsets.tolist() == [[[0, 0, 0]]]


def test_boxes_are_of_single_keys() -> None:
    with pytest.raises(ValueError, match="`k_block` must be 1 where lists are to be boxes; got 16"):
        find_boxes(planning.full(64, k_block=16))


@NEEDS_TRITON
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_boxes_cross_the_operator(
    compiles: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, parts = call(device)
    far = stretches(40, 24, 16, 1, device)
    parts[1] = parts[1]._replace(plan=far)
    seen = []

    def none_at_once(_: Tensor, parts: Sequence[Any], __: float) -> None:
        seen.append([part.plan.prepared.boxes for part in parts])

    monkeypatch.setattr("nearfield.ops.attention.triton.attend_parts_forward", none_at_once)

    def together(query: Tensor) -> Tensor:
        return attend_parts(query, parts, impl="triton").out

    torch._dynamo.reset()
    (torch.compile(together, fullgraph=True, backend="aot_eager") if compiles else together)(query)
    torch._dynamo.reset()
    ((near_boxes, far_boxes),) = seen
    assert near_boxes is None
    assert far.prepared.boxes is not None
    assert all(map(torch.equal, far_boxes, far.prepared.boxes))


@NEEDS_TRITON
def test_tiles_of_the_hopper_kernel_cut_blocks_evenly_or_hold_whole_ones() -> None:
    for q_block, k_block, dim in itertools.product((64, 128, 192), BLOCKS, (64, 128)):
        tile = hopper_kernels().launch_for(q_block, k_block, dim).tile
        assert max(tile, k_block) % min(tile, k_block) == 0, (q_block, k_block)


@NEEDS_TRITON
def test_which_parts_one_kernel_reads_on_a_hopper() -> None:
    suits = hopper_kernels().suits_far
    tokens, summaries = torch.zeros(1, 4, 300, 64), torch.zeros(1, 4, 100, 64)
    plan, far_plan = planning.full(300, q_block=128), stretches(300, 100, 128, 1, torch.device("cpu"))
    bias = torch.zeros(1, 4, 100)
    near = KeyValuePart(tokens, tokens, plan)
    far = KeyValuePart(summaries, summaries, far_plan, bias)
    assert suits(near, far)
    assert not suits(near, far._replace(key_bias=None))
    assert not suits(near, far._replace(plan=without_boxes(far_plan)))
    assert not suits(near, far._replace(key=summaries[:, :2], value=summaries[:, :2]))
    assert not suits(near._replace(plan=planning.full(300, q_block=64)), far)
    assert not suits(near._replace(plan=planning.full(300, k_block=4)), far)


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (["gluon", "gluon"], ["gluon", "triton"]),
        (["gluon", "triton"], ["triton"]),
        (["triton", "triton"], ["triton"]),
    ],
)
def test_the_fastest_kernel_is_asked_first_if_it_reads_every_part(names: list[str], asked: list[str]) -> None:
    _, parts = call(torch.device("cpu"))
    assert list(operators._at_once(parts, names)) == asked
    steps = torch.arange(40)[None]
    parts[0] = parts[0]._replace(positions=Positions(steps, steps))
    assert not operators._at_once(parts, names)


def test_a_key_that_is_read_twice_begins_a_box() -> None:
    offsets = torch.tensor([[[0, 5]]], dtype=torch.int32)
    blocks = torch.tensor([[[3, 4, 4, 5, 9]]], dtype=torch.int32)
    boxes = find_boxes(Plan(offsets, blocks, 16, 1, 16, 10)).boxes
    assert boxes.tolist() == [[[3 * 128 + 2, 4 * 128 + 2, 9 * 128 + 1]]]


# -- on a CPU ----------------------------------------------------------------------------------------------------------


def _plain_call() -> tuple[Tensor, list[KeyValuePart]]:
    """Parts that are read in one pass where no gradients are wanted."""
    query, key, value = random_inputs(2, 2, 40, 40, 16)
    _, far_key, far_value = random_inputs(2, 2, 40, 24, 16, seed=5)
    near = random_plan(40, 40, q_block=16, k_block=16)
    far = random_plan(40, 24, q_block=16, k_block=8, seed=1)
    return query, [
        KeyValuePart(key, value, near),
        KeyValuePart(far_key, far_value, far, random_bias(1, 2, 24)),
    ]


def _out_of(parts: Sequence[KeyValuePart]) -> Any:
    def function(query: Tensor, *tensors: Tensor) -> Tensor:
        fresh = [part._replace(key=tensors[2 * i], value=tensors[2 * i + 1]) for i, part in enumerate(parts)]
        return attend_parts(query, fresh, impl="grouped").out

    return function


def test_parts_may_be_read_under_transforms_of_torch_func() -> None:
    query, parts = _plain_call()
    tensors = [query, *(x for part in parts for x in (part.key, part.value))]
    function = _out_of(parts)
    samples = [torch.stack([x, x.flip(2)]) for x in tensors]
    found = torch.func.vmap(function)(*samples)
    for index in range(2):
        torch.testing.assert_close(found[index], function(*(x[index] for x in samples)))


def test_an_exported_graph_can_be_differentiated() -> None:
    query, parts = _plain_call()
    tensors = [query, *(x for part in parts for x in (part.key, part.value))]

    class Module(torch.nn.Module):
        def forward(self, query: Tensor, *tensors: Tensor) -> Tensor:
            return _out_of(parts)(query, *tensors)

    graph = torch.export.export(Module(), tuple(tensors)).module()
    leaves = [x.clone().requires_grad_() for x in tensors]
    others = [x.clone().requires_grad_() for x in tensors]
    found = torch.autograd.grad(graph(*leaves).square().sum(), leaves)
    wanted = torch.autograd.grad(_out_of(parts)(*others).square().sum(), others)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("wants_bias", [False, True])
def test_gradients_have_the_shapes_that_the_operator_promises(impl: Any, wants_bias: bool) -> None:
    """That of a bias which is not learned, too."""
    query, parts = call(torch.device("cpu"))
    attended = attend_parts(query, parts, scale=0.3, impl=impl)
    flat = operators.flatten(query, checked_parts(query, parts, impl), 0.3, impl)
    wanted = [True] * 6 + [wants_bias]
    torch.library.opcheck(
        torch.ops.nearfield.attend_2_parts_backward.default,
        (wanted, torch.ones_like(attended.out), torch.ones_like(attended.lse), *flat, *attended),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_inference_gives_the_bits_of_eager() -> None:
    query, parts = _plain_call()
    tensors = [query, *(x for part in parts for x in (part.key, part.value))]
    torch._dynamo.reset()
    function = _out_of(parts)
    with torch.no_grad():
        compiled = torch.compile(function, fullgraph=True, backend="eager")(*tensors)
    assert torch.equal(compiled, function(*tensors))
    torch._dynamo.reset()


def test_a_bias_of_another_kind_is_told() -> None:
    query, parts = _plain_call()
    with pytest.raises(TypeError, match="`key_bias` must be a tensor; got list"):
        attend_parts(query, [parts[0], parts[1]._replace(key_bias=[0.0])], impl="grouped")  # type: ignore[arg-type]
