"""Every implementation of `nearfield.attend` against plain attention and against each other. Needs pytest alone."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attending import (
    HOPPER,
    IDENTITIES,
    INF,
    NEEDS_HOPPER,
    NEEDS_TRITON,
    SMALL,
    Call,
    Size,
    assert_within_budget,
    plan_of_counts,
    random_bias,
    random_inputs,
    random_plan,
    run,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import nearfield
from nearfield import Plan, planning
from nearfield._types import Impl, Positions
from nearfield.ops import KeyValuePart, attend_continued
from nearfield.ops.attention.operators import flatten

IMPLEMENTATIONS = [
    "reference",
    "grouped",
    pytest.param("triton", marks=NEEDS_TRITON),
    pytest.param("gluon", marks=NEEDS_HOPPER),
]
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)

# The kernels run in half precision too: on a GPU, since Triton's interpreter is slow, and wrong in bfloat16.
SIZES = [
    ("reference", SMALL, []),
    ("grouped", SMALL, []),
    ("triton", SMALL, [NEEDS_TRITON]),
    ("triton", replace(SMALL, dtype=torch.float16), [pytest.mark.gpu]),
    ("triton", HOPPER, [pytest.mark.gpu]),
    ("gluon", replace(HOPPER, dtype=torch.float16), NEEDS_HOPPER),
    ("gluon", HOPPER, NEEDS_HOPPER),
]


def _cases(sizes: list[tuple[str, Size, Any]]) -> Any:
    params = [pytest.param(impl, size, marks=marks, id=f"{impl}-{size}") for impl, size, marks in sizes]
    return pytest.mark.parametrize(("impl", "size"), params)


every_size = _cases(SIZES)


@_cases([*SIZES, ("reference", replace(HOPPER, dtype=torch.float16), []), ("grouped", HOPPER, [])])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity(identity: str, impl: str, size: Size, device: torch.device) -> None:
    IDENTITIES[identity](impl, size, device)


@NEEDS_TRITON
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs every identity in half precision")
@pytest.mark.parametrize("identity", ["every_grain_reads_the_same", "odd_sizes"])
def test_identity_in_half_precision_interpreted(identity: str, device: torch.device) -> None:
    """The copy engine takes half types only: without a GPU nothing else would follow its path."""
    IDENTITIES[identity]("triton", replace(SMALL, dtype=torch.float16), device)


def dtypes() -> list[torch.dtype]:
    """On a GPU also bfloat16, whose dot products Triton's interpreter gets wrong."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@every_implementation
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("dim", [16, 40, 64, 72, 96, 128])
def test_head_dimensions(dim: int, dtype: torch.dtype, impl: str, device: torch.device) -> None:
    if impl == "gluon" and (dim not in (64, 128) or dtype == torch.float32):
        pytest.skip("left to the plain kernels")
    inputs = random_inputs(1, 1, 40, 70, dim, dtype=dtype, device=device)
    plan = random_plan(40, 70, q_block=64, k_block=64, device=device)
    assert_within_budget(Call(*inputs, plan, random_bias(70, device=device)), impl)


@every_size
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(scale: float, impl: str, size: Size, device: torch.device) -> None:
    num_queries, num_keys = size.tokens(40), size.tokens(70)
    inputs = size.inputs(1, 1, num_queries, num_keys, device=device)
    plan = random_plan(num_queries, num_keys, q_block=size.block, k_block=size.block, device=device)
    assert_within_budget(Call(*inputs, plan, scale=scale), impl)


@every_size
@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.7])
def test_scale_leaves_masks_alone(scale: float, impl: str, size: Size, device: torch.device) -> None:
    """With ragged tails, empty rows and tiles gathered from single keys: whatever is masked must stay masked."""
    num_queries, num_keys = size.tokens(72), size.tokens(70)
    inputs = size.inputs(1, 1, num_queries, num_keys, device=device)
    for k_block in (size.block, 1):
        plan = random_plan(
            num_queries, num_keys, q_block=size.block, k_block=k_block, empty_rows=True, device=device
        )
        assert_within_budget(Call(*inputs, plan, scale=scale), impl)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("impl", ["reference", "grouped"])
def test_plain_torch_dtypes(dtype: torch.dtype, impl: str, device: torch.device) -> None:
    inputs = random_inputs(2, 4, 70, 90, 24, key_heads=2, dtype=dtype, device=device)
    for heads in (1, 4):
        plan = random_plan(70, 90, q_block=16, k_block=4, heads=heads, repeats=True, device=device)
        bias = random_bias(4, 90, device=device).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        assert_within_budget(Call(*inputs, plan, bias), impl)


@pytest.mark.gpu
@every_implementation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("q_block", "k_block"), [(128, 128), (128, 64), (128, 192), (64, 16), (64, 1), (16, 16), (192, 64)]
)
def test_long_sequences(
    q_block: int, k_block: int, dtype: torch.dtype, impl: str, device: torch.device
) -> None:
    if impl == "gluon" and q_block % 64:
        pytest.skip("left to the plain kernels")
    for dim in (64, 128):
        inputs = random_inputs(2, 4, 1500, 2000, dim, key_heads=2, dtype=dtype, device=device)
        for heads in (1, 4):
            plan = random_plan(
                1500, 2000, q_block=q_block, k_block=k_block, heads=heads, share=0.3, device=device
            )
            assert_within_budget(Call(*inputs, plan), impl)


@every_size
def test_strided_views(impl: str, size: Size, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, N, H, D] projections are read in place, and results and gradients come back in the same layout."""
    num_queries, num_keys = size.tokens(40), size.tokens(50)
    inputs = size.inputs(2, 2, num_queries, num_keys, device=device)
    plan = random_plan(num_queries, num_keys, q_block=size.block, k_block=size.block, device=device)
    dense = Call(*inputs, plan)
    strided = Call(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs), plan)
    if impl in ("triton", "gluon"):
        for name in ("contiguous", "clone"):
            monkeypatch.setattr(Tensor, name, _no_copy(getattr(Tensor, name)))
    got = run(strided, impl)
    monkeypatch.undo()
    assert_within_budget(dense, impl, results=got)
    for name, like in zip(("out", "grad_query", "grad_key", "grad_value"), (0, 0, 1, 2), strict=True):
        assert got[name].stride() == (strided.query, strided.key, strided.value)[like].stride(), name


def _no_copy(copy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def checked(x: Tensor, *args: Any, **options: Any) -> Tensor:
        assert x.dim() != 4 or x.is_contiguous(), "an input is copied"
        return copy(x, *args, **options)

    return checked


@every_size
def test_inputs_with_odd_strides(impl: str, size: Size, device: torch.device) -> None:
    """A slice of a fused projection, an expanded key, an inner stride of two, an expanded cotangent."""
    dim, length = size.dim, size.tokens(40)
    plan = random_plan(length, length, q_block=size.block, k_block=size.block, device=device)
    fused = replace(size, dim=3 * dim).inputs(1, 1, length, device=device)[0].unflatten(-1, (3, dim))
    query, key, value = fused.unbind(-2)
    assert_within_budget(Call(query, key, value, plan), impl)
    leaf = query.detach().clone().requires_grad_()
    nearfield.attend(leaf, key, value, plan, impl=impl).out.sum().backward()  # type: ignore[arg-type]
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    if impl == "gluon":
        return  # the copy engine walks rows of consecutive elements alone
    wide = replace(size, dim=2 * dim).inputs(2, 1, length, device=device)
    query, value = wide[0][..., ::2], wide[2][..., 1::2]
    key = wide[1][:1, :, :, ::2].expand(2, -1, -1, -1)
    assert_within_budget(Call(query, key, value, plan), impl)


@every_size
def test_results_twice_are_bit_equal(impl: str, size: Size, device: torch.device) -> None:
    num_queries, num_keys = size.tokens(70), size.tokens(90)
    inputs = size.inputs(1, 2, num_queries, num_keys, device=device)
    sizes = {"q_block": size.block, "k_block": 16, "heads": 2}
    plan = random_plan(num_queries, num_keys, **sizes, repeats=True, device=device)
    call = Call(*inputs, plan, random_bias(2, num_keys, device=device))
    first, second = (run(call, impl) for _ in range(2))
    assert len(first) == 6
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_size
@pytest.mark.parametrize("k_block", [32, 1])
def test_everything_is_written(
    k_block: int, impl: str, size: Size, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uninitialised memory is NaN here; none of it may be left in a result, nor read into one."""
    num_queries, num_keys = size.tokens(70), size.tokens(90)
    inputs = size.inputs(1, 2, num_queries, num_keys, device=device)
    plan = random_plan(
        num_queries, num_keys, q_block=size.block, k_block=k_block, empty_rows=True, device=device
    )
    call = Call(*inputs, plan, random_bias(num_keys, device=device))
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    assert bool(torch.empty(1).isnan())
    got = run(call, impl)
    assert not [name for name, value in got.items() if bool(value.isnan().any())]
    monkeypatch.undo()
    assert_within_budget(call, impl, results=got)


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        memory = make(*args, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    return made


@every_size
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_in_nan_out(poisoned: str, impl: str, size: Size, device: torch.device) -> None:
    block = size.block
    query, key, value = inputs = size.inputs(1, 1, 2 * block, device=device)
    {"query": query, "key": key, "value": value}[poisoned][0, 0, 5, 3] = float("nan")
    plan = planning.full(2 * block, q_block=block, k_block=block, device=device)
    out = run(Call(*inputs, plan), impl, backward=False)["out"]
    if poisoned == "query":
        is_nan = out.isnan()[0, 0]
        assert bool(is_nan[5].all())
        assert int(is_nan.sum()) == size.dim
    else:
        assert bool(out[0, 0, :, 3].isnan().all())


@_cases([case for case in SIZES if case[0] != "reference"])
@pytest.mark.parametrize("k_block", [16, 1])
def test_nan_that_is_not_read_stays_out(k_block: int, impl: str, size: Size, device: torch.device) -> None:
    """Keys on no list are not touched. (The reference multiplies all values, if by zero.)"""
    num_queries, num_keys = size.tokens(40), size.tokens(90)
    query, key, value = size.inputs(1, 1, num_queries, num_keys, device=device)
    columns = -(-num_keys // k_block)
    times = torch.zeros(1, 1, 2, columns, dtype=torch.int32)
    times[..., 0, 1::2] = times[..., 1, 1::4] = 1
    plan = plan_of_counts(times, size.block, k_block, num_queries, num_keys, device)
    clean = run(Call(query, key, value, plan), impl)
    unread = ~plan.to_mask()[0, 0].any(0)
    assert bool(unread.any())
    for x in (key, value):
        x[:, :, unread] = float("nan")
    poisoned = run(Call(query, key, value, plan), impl)
    for name in ("out", "lse", "grad_query"):
        assert torch.equal(poisoned[name], clean[name]), name
    for name in ("grad_key", "grad_value"):
        assert torch.equal(poisoned[name][:, :, ~unread], clean[name][:, :, ~unread]), name


@every_size
@pytest.mark.parametrize("emptied_by", ["lists", "bias"])
def test_nan_gradient_of_empty_rows_stays_there(
    emptied_by: str, impl: str, size: Size, device: torch.device
) -> None:
    """The log of nothing has no gradient, whatever arrives for it: other rows and keys do not see it."""
    num_queries, num_keys = size.tokens(80), size.tokens(70)
    inputs = size.inputs(2, 1, num_queries, num_keys, device=device)
    blocks = {"q_block": size.block, "k_block": size.block}
    plan = random_plan(num_queries, num_keys, **blocks, empty_rows=emptied_by == "lists", device=device)
    bias = torch.zeros(2, 1, num_keys, device=device)
    if emptied_by == "bias":
        bias[1] = -INF
    call = Call(*inputs, plan, bias)
    gradients = []
    for filler in (0.0, float("nan")):
        leaves = [x.clone().requires_grad_() for x in (*inputs, bias)]
        out, lse = nearfield.attend(*leaves[:3], plan, key_bias=leaves[3], impl=impl)  # type: ignore[arg-type, misc]
        empty = lse.detach() == -INF
        assert bool(empty.any())
        grad_out, grad_lse = call.cotangents()
        grad_lse = grad_lse.masked_fill(empty, filler)
        gradients.append(torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse)))
    assert not bool(gradients[1][0][empty].any()), "a row that reads nothing has a gradient"
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@every_size
def test_gradient_checkpointing(impl: str, size: Size, device: torch.device) -> None:
    length = size.tokens(40)
    inputs = size.inputs(1, 1, length, device=device)
    plan = random_plan(length, length, q_block=size.block, k_block=size.block, device=device)
    gradients = []
    for wrap in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = wrap(lambda *x: nearfield.attend(*x, plan, impl=impl).out, *leaves)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_second_derivative_is_refused(device: torch.device) -> None:
    """Silence would be a wrong gradient: the backward has no derivative of its own."""
    query, key, value = random_inputs(1, 1, 32, dim=16, device=device)
    query.requires_grad_()
    out = nearfield.attend(query, key, value, planning.full(32, device=device), impl="reference").out
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(out.sum() + gradient.square().sum(), query)


# -- merging -----------------------------------------------------------------------------------------------------


def halves_of(plan: Plan) -> list[Plan]:
    """Two plans that share out the columns of one: every other, and the rest."""
    cells = plan.block_counts() > 0
    even = torch.arange(plan.num_columns) % 2 == 0
    sizes = dict(zip(("q_block", "k_block", "num_queries", "num_keys"), plan.layout[3:], strict=True))
    return [planning.from_mask(cells & side, **sizes) for side in (even, ~even)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_merging_reads_the_union(dtype: torch.dtype) -> None:
    """Rows that are empty in one part, in the other, or in both; the results keep their dtypes."""
    inputs = random_inputs(2, 2, 70, 90, 16, dtype=dtype)
    plan = random_plan(70, 90, q_block=16, k_block=8, share=0.2, empty_rows=True)
    parts = [nearfield.attend(*inputs, half) for half in halves_of(plan)]
    got = nearfield.merge_attended(*parts)
    whole = nearfield.attend(*inputs, plan)
    assert (got.out.dtype, got.lse.dtype) == (whole.out.dtype, whole.lse.dtype)
    results = {"out": got.out, "lse": got.lse}
    assert_within_budget(Call(*inputs, plan), "grouped", backward=False, results=results)
    nothing = whole.lse == -INF
    assert bool(nothing.any())
    assert bool((got.lse[nothing] == -INF).all())
    assert not bool(got.out[nothing].any())


def test_merging_with_nothing_changes_nothing() -> None:
    inputs = random_inputs(1, 2, 40, 50, 16)
    some = nearfield.attend(*inputs, random_plan(40, 50, q_block=16, k_block=8))
    sizes = {"q_block": 16, "k_block": 8, "num_queries": 40, "num_keys": 50}
    none = nearfield.attend(*inputs, planning.from_mask(torch.zeros(3, 7, dtype=torch.bool), **sizes))
    for merged in (nearfield.merge_attended(some, none), nearfield.merge_attended(none, some)):
        assert torch.equal(merged.out, some.out)
        assert torch.equal(merged.lse, some.lse)


def test_merging_is_differentiable() -> None:
    """Rows that are empty in one part included: the summaries of rows that have read everything."""
    query, key, value = (x.requires_grad_() for x in random_inputs(1, 1, 8, 12, 3, dtype=torch.float64))
    sizes = {"q_block": 4, "k_block": 4, "num_queries": 8, "num_keys": 12}
    masks = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[0, 0, 0], [0, 1, 1]]], dtype=torch.bool)
    plans = [planning.from_mask(mask, **sizes) for mask in masks]

    def merged(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return nearfield.merge_attended(*(nearfield.attend(query, key, value, plan) for plan in plans))

    assert torch.autograd.gradcheck(merged, (query, key, value))


# -- torch.compile and the operator ------------------------------------------------------------------------------


def operator_arguments(call: Call, impl: Any) -> tuple[Any, ...]:
    """What `attend` hands to `torch.ops.nearfield.attend`."""
    query, key, value = (x.clone().requires_grad_() for x in (call.query, call.key, call.value))
    bias = call.key_bias
    if bias is not None:
        bias = bias.expand(*call.query.shape[:2], -1).clone().requires_grad_()
    return flatten(query, [KeyValuePart(key, value, call.plan, bias, call.positions)], 0.25, impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_opcheck(with_bias: bool, impl: str, device: torch.device) -> None:
    query, key, value = random_inputs(1, 2, 20, 24, 16, device=device)
    query = query.transpose(1, 2).contiguous().transpose(1, 2)
    bias = random_bias(1, 2, 24, device=device) if with_bias else None
    call = Call(query, key, value, random_plan(20, 24, q_block=32, k_block=16, device=device), bias)
    torch.library.opcheck(torch.ops.nearfield.attend, operator_arguments(call, impl))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:3])
def test_compiles_once_for_all_lists(impl: str, device: torch.device) -> None:
    """One graph, no breaks, and no recompilation when only the contents of the lists change."""
    inputs = random_inputs(1, 2, 64, dim=16, device=device)
    scores = torch.rand(3, 2, 2, 4, generator=torch.Generator().manual_seed(0)).to(device)
    plans = [planning.topk(score, 2, q_block=32, k_block=16, num_queries=64, num_keys=64) for score in scores]

    def loss(query: Tensor, key: Tensor, value: Tensor, plan: nearfield.Plan) -> Tensor:
        out, lse = nearfield.attend(query, key, value, plan, impl=impl)  # type: ignore[arg-type]
        return out.square().sum() + lse.sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for plan in plans:
            gradients = []
            for function in (loss, compiled):
                leaves = [x.clone().requires_grad_() for x in inputs]
                gradients.append(torch.autograd.grad(function(*leaves, plan), leaves))
            for expected, got in zip(*gradients, strict=True):
                torch.testing.assert_close(got, expected)


def test_one_graph_serves_all_sizes_and_still_checks_them() -> None:
    """Lengths, lists and uniform rows may change; a plan for other lengths is refused when the graph runs."""
    plans = {n: planning.ring(n, 32, shift=16, q_block=16, k_block=16) for n in range(64, 160, 16)}
    graphs = CompileCounter()

    def out(query: Tensor, key: Tensor, value: Tensor, plan: nearfield.Plan) -> Tensor:
        return nearfield.attend(query, key, value, plan).out

    torch._dynamo.reset()
    compiled = torch.compile(out, fullgraph=True, backend=graphs)
    for length, plan in plans.items():
        inputs = random_inputs(1, 2, length, dim=8)
        torch.testing.assert_close(compiled(*inputs, plan), out(*inputs, plan))
    assert graphs.frame_count == 2  # one for the first size, one for all others
    with pytest.raises(ValueError, match="`plan` must be made for 144 queries and 144 keys; got 80 and 80"):
        compiled(*inputs, plans[80])


@pytest.mark.parametrize("impl", ["grouped"])
def test_plan_may_be_built_inside_a_compiled_function(impl: str, device: torch.device) -> None:
    query, key, value = random_inputs(1, 2, 64, dim=16, device=device)

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pooled = (x.unflatten(2, (4, 16)).mean(3) for x in (query, key))
        plan = planning.topk(
            torch.matmul(*(x if i == 0 else x.mT for i, x in enumerate(pooled))),
            2,
            q_block=16,
            k_block=16,
            num_queries=64,
            num_keys=64,
        )
        return nearfield.attend(query, key, value, plan, impl=impl).out  # type: ignore[arg-type]

    torch._dynamo.reset()
    compiled = torch.compile(attended, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value), attended(query, key, value))


# -- only on a GPU -----------------------------------------------------------------------------------------------

every_kernel = pytest.mark.parametrize(
    "impl", [pytest.param("triton", marks=pytest.mark.gpu), pytest.param("gluon", marks=NEEDS_HOPPER)]
)


def test_nothing_on_a_cpu_reads_keys_from_two_places() -> None:
    query = torch.randn(1, 2, 64, 16)
    plan = planning.full(64, 128)
    assert attend_continued(query, query, query, (query, query), plan) is None


@pytest.mark.parametrize("impl", [pytest.param("gluon", marks=NEEDS_HOPPER)])
@pytest.mark.parametrize(("k_block", "more"), [(64, 192), (128, 256), (128, 200), (16, 208)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_keys_in_two_places(
    impl: Impl, k_block: int, more: int, has_bias: bool, device: torch.device
) -> None:
    """The last keys in tensors of their own, as ranks receive them: tokens side by side, keys beside values."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 512, 128, device=device, dtype=torch.bfloat16)
    rows = torch.randn(more, 2, 1, 4, 128, device=device, dtype=torch.bfloat16)
    more_key, more_value = (side.movedim(0, 2) for side in rows.unbind(1))
    columns = -(-(512 + more) // k_block)
    mask = torch.rand(1, 4, 4, columns, device=device) < 0.5
    sizes = {"num_queries": 512, "num_keys": 512 + more}
    plan = planning.from_mask(mask, q_block=128, k_block=k_block, **sizes)
    bias = torch.randn(1, 4, 512 + more, device=device) if has_bias else None
    found = attend_continued(query, key, value, (more_key, more_value), plan, key_bias=bias, impl=impl)
    assert found is not None
    sides = (torch.cat(parts, dim=2) for parts in ((key, more_key), (value, more_value)))
    wanted = nearfield.attend(query, *sides, plan, key_bias=bias, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@every_kernel
def test_cuda_graph(impl: str, device: torch.device) -> None:
    """Forward and backward, captured once, replay with new inputs and new lists of the same sizes."""
    calls = [
        Call(
            *random_inputs(1, 2, 512, dim=128, dtype=torch.bfloat16, device=device, seed=seed),
            planning.topk(
                torch.rand(2, 4, 8, generator=torch.Generator().manual_seed(seed)).to(device),
                3,
                q_block=128,
                k_block=64,
                num_queries=512,
                num_keys=512,
            ),
            seed=seed,
        )
        for seed in range(2)
    ]
    expected = [run(call, impl) for call in calls]
    memory = [x.clone() for x in _contents(calls[0])]
    *leaves, offsets, blocks, grad_out, grad_lse = memory

    def step() -> list[Tensor]:
        # Made anew, so that what depends on the lists (the transpose, the order of the rows) is in the graph.
        plan = nearfield.Plan(offsets, blocks, 128, 64, 512, 512, check=False)
        inputs = [x.detach().requires_grad_() for x in leaves]
        results = nearfield.attend(*inputs, plan, impl=impl)  # type: ignore[arg-type, misc]
        return [*results, *torch.autograd.grad(results, inputs, (grad_out, grad_lse))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # kernels are compiled before they are captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for call, wanted in zip(calls[::-1], expected[::-1], strict=True):
        for target, source in zip(memory, _contents(call), strict=True):
            target.copy_(source)
        graph.replay()
        for name, got in zip(("out", "lse", "grad_query", "grad_key", "grad_value"), captured, strict=True):
            assert torch.equal(got, wanted[name]), name


def _contents(call: Call) -> list[Tensor]:
    return [call.query, call.key, call.value, call.plan.offsets, call.plan.blocks, *call.cotangents()]


@every_kernel
def test_more_than_two_billion_elements(impl: str, device: torch.device) -> None:
    """Addresses beyond 2^31: the far end of the last head of [B, N, H, D] projections, forward and backward."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    length, heads, dim, q_block, k_block = 70_000, 256, 128, 128, 64
    generator = torch.Generator(device).manual_seed(0)
    shape, kind = (1, length, heads, dim), {"device": device, "dtype": torch.bfloat16}
    query, key, value = (torch.randn(shape, generator=generator, **kind).transpose(1, 2) for _ in range(3))
    assert query.numel() > 2**31

    # Row r reads the two key blocks beside it; the first row reads the last block instead of its second.
    rows, columns = -(-length // q_block), -(-length // k_block)
    ids = torch.arange(columns, dtype=torch.int32).view(1, 1, rows, 2)
    ids[..., 0, 1] = columns - 1
    counts = torch.full((1, 1, rows), 2)
    sizes = {"q_block": q_block, "k_block": k_block, "num_queries": length, "num_keys": length}
    plan = planning.key_lists(ids, counts, **sizes).to(device)

    # The first and the last row of the last head, and the three blocks they read, as a call of their own.
    last_row, last_pair = (rows - 1) * q_block, (columns - 2) * k_block
    own_queries = torch.cat([torch.arange(q_block), torch.arange(last_row, length)]).to(device)
    own_keys = torch.cat([torch.arange(k_block), torch.arange(last_pair, length)]).to(device)
    times = torch.tensor([[1, 0, 1], [0, 1, 1]])[None, None]
    small = Call(
        query[:, -1:, own_queries],
        key[:, -1:, own_keys],
        value[:, -1:, own_keys],
        plan_of_counts(times, q_block, k_block, len(own_queries), len(own_keys), device),
    )
    leaves = [x.requires_grad_(impl == "triton") for x in (query, key, value)]
    out, lse = nearfield.attend(*leaves, plan, impl=impl)  # type: ignore[arg-type, misc]
    results = {"out": out.detach()[:, -1:, own_queries], "lse": lse.detach()[:, -1:, own_queries]}
    if impl == "triton":
        cotangents = [torch.zeros_like(out), torch.zeros_like(lse)]
        for grad, own in zip(cotangents, small.cotangents(), strict=True):
            grad[:, -1:, own_queries] = own
        gradients = torch.autograd.grad((out, lse), leaves, cotangents)
        for name, gradient, own in zip(
            ("query", "key", "value"), gradients, (own_queries, own_keys, own_keys), strict=True
        ):
            results[f"grad_{name}"] = gradient[:, -1:, own]
    assert_within_budget(small, impl, backward=impl == "triton", results=results)


@pytest.mark.gpu
def test_a_plan_that_is_there_is_not_moved() -> None:
    """The names cuda and cuda:0 are one device; a copy would lose what was derived from the lists."""
    plan = random_plan(40, 50).to("cuda")
    assert plan.to("cuda") is plan
    assert plan.to(plan.device) is plan
    assert plan.to(torch.device("cuda", torch.cuda.current_device())) is plan


# -- bad calls ---------------------------------------------------------------------------------------------------


def _good_call() -> dict[str, Any]:
    query, key, value = random_inputs(2, 4, 32, 48, 16, key_heads=2)
    return {"query": query, "key": key, "value": value, "plan": planning.full(32, 48, q_block=16, k_block=16)}


_OTHER_PLAN = planning.full(32, 32, q_block=16, k_block=16)
BAD_CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a list for query": (
        {"query": [1.0]},
        TypeError,
        "`query` must be a tensor; got list. Expected [batch, heads, tokens, head_dim].",
    ),
    "three dimensions": (
        {"key": torch.zeros(4, 48, 16)},
        ValueError,
        "`key` must have 4 dimensions; got shape [4, 48, 16]. Expected [batch, heads, tokens, head_dim].",
    ),
    "integers": (
        {"query": torch.zeros(2, 4, 32, 16, dtype=torch.int32)},
        TypeError,
        "`query` must be float16, bfloat16, float32 or float64; got torch.int32.",
    ),
    "mixed dtypes": (
        {"key": torch.zeros(2, 2, 48, 16, dtype=torch.float16)},
        TypeError,
        "`key` must have the dtype of `query` (torch.float32); got torch.float16.",
    ),
    "another device": (
        {"value": torch.zeros(2, 2, 48, 16, device="meta")},
        ValueError,
        "`value` must be on the device of `query` (cpu); got meta. Move it with `.to(device)`.",
    ),
    "fewer values than keys": (
        {"value": torch.zeros(2, 2, 47, 16)},
        ValueError,
        "`value` must have the shape of `key` ([2, 2, 48, 16]); got shape [2, 2, 47, 16].",
    ),
    "another batch": (
        {"key": torch.zeros(1, 2, 48, 16), "value": torch.zeros(1, 2, 48, 16)},
        ValueError,
        "`key` must have the batch (2) and head dimension (16) of `query`; got shape [1, 2, 48, 16]. "
        "Expected [batch, heads, tokens, head_dim].",
    ),
    "heads that do not divide": (
        {"key": torch.zeros(2, 3, 48, 16), "value": torch.zeros(2, 3, 48, 16)},
        ValueError,
        "`key` must have a number of heads that divides `query`'s (4); got 3.",
    ),
    "unknown implementation": (
        {"impl": "eager"},
        ValueError,
        "`impl` must be one of 'auto', 'gluon', 'triton', 'grouped', 'reference'; got 'eager'.",
    ),
    "a mask for a plan": (
        {"plan": torch.ones(32, 48)},
        TypeError,
        "`plan` must be a Plan; got Tensor. Build one with `nearfield.plan.builders`.",
    ),
    "a plan of other lengths": (
        {"plan": _OTHER_PLAN},
        ValueError,
        "`plan` must be made for 32 queries and 48 keys; got 32 and 32.",
    ),
    "a plan of other heads": (
        {"plan": random_plan(32, 48, heads=3)},
        ValueError,
        "`plan` must have heads 1 or 4 (that of `query`); got 3.",
    ),
    "a Boolean bias": (
        {"key_bias": torch.ones(48, dtype=torch.bool)},
        TypeError,
        "`key_bias` must be floating point; got torch.bool. For a mask use 0 and -inf.",
    ),
    "a bias of other length": (
        {"key_bias": torch.zeros(32)},
        ValueError,
        "`key_bias` must broadcast to [batch, heads, keys] = [2, 4, 48]; got shape [32].",
    ),
    "one tensor of positions": (
        {"positions": torch.arange(32)},
        TypeError,
        "`positions` must be a pair (query positions, key positions); got Tensor.",
    ),
    "fractional positions": (
        {"positions": Positions(torch.zeros(1, 32), torch.zeros(1, 48))},
        TypeError,
        "`positions.query` must be integers; got torch.float32.",
    ),
    "positions of other length": (
        {"positions": Positions(torch.zeros(1, 32).long(), torch.zeros(1, 32).long())},
        ValueError,
        "`positions.key` must have shape [1 or 2, 48]; got shape [1, 32].",
    ),
    "a word for scale": ({"scale": "1"}, TypeError, "`scale` must be a number; got str."),
    "infinite scale": ({"scale": float("inf")}, ValueError, "`scale` must be finite; got inf."),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(case: str) -> None:
    changes, kind, message = BAD_CALLS[case]
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        nearfield.attend(**(_good_call() | changes))


def test_good_call_is_good() -> None:
    """The table above changes one thing each."""
    nearfield.attend(**_good_call())


def test_an_explicit_implementation_never_falls_back() -> None:
    call = _good_call()
    call |= {name: call[name].double() for name in ("query", "key", "value")}
    with pytest.raises(NotImplementedError, match=r"^`impl` must be able to run this call; got 'triton'\."):
        nearfield.attend(**call, impl="triton")
