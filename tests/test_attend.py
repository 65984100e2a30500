"""Every implementation of `nearfield.attend` against plain attention and against each other. Needs pytest alone."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.attending import (
    IDENTITIES,
    INTERPRETER_WARNINGS,
    NEEDS_TRITON,
    Call,
    assert_within_budget,
    random_bias,
    random_inputs,
    random_plan,
    run,
    skip_unless_supported,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nearfield
from nearfield import Positions, planning

pytestmark = INTERPRETER_WARNINGS
IMPLEMENTATIONS = [
    "reference",
    "grouped",
    pytest.param("triton", marks=NEEDS_TRITON),
    pytest.param("gluon", marks=pytest.mark.gpu),
]
every_implementation = pytest.mark.parametrize("impl", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@every_implementation
@pytest.mark.parametrize("identity", IDENTITIES)
def test_identity(identity: str, impl: str, device: torch.device) -> None:
    IDENTITIES[identity](impl, device)


def dtypes() -> list[torch.dtype]:
    """On a GPU also bfloat16, whose dot products Triton's interpreter gets wrong."""
    return [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@every_implementation
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
@pytest.mark.parametrize("dim", [16, 40, 64, 72, 96, 128])
def test_head_dimensions(dim: int, dtype: torch.dtype, impl: str, device: torch.device) -> None:
    inputs = random_inputs(1, 1, 40, 70, dim, dtype=dtype, device=device)
    plan = random_plan(40, 70, q_block=64, k_block=64, device=device)
    assert_within_budget(Call(*inputs, plan, random_bias(70, device=device)), impl)


@every_implementation
@pytest.mark.parametrize("scale", [-0.3, 0.0, 2.0])
def test_scale(scale: float, impl: str, device: torch.device) -> None:
    inputs = random_inputs(1, 1, 40, 70, 16, device=device)
    assert_within_budget(Call(*inputs, random_plan(40, 70, device=device), scale=scale), impl)


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
    ("q_block", "k_block"), [(128, 128), (128, 64), (64, 16), (64, 1), (16, 16), (192, 64)]
)
def test_long_sequences(
    q_block: int, k_block: int, dtype: torch.dtype, impl: str, device: torch.device
) -> None:
    for dim in (64, 128):
        inputs = random_inputs(2, 4, 1500, 2000, dim, key_heads=2, dtype=dtype, device=device)
        for heads in (1, 4):
            plan = random_plan(
                1500, 2000, q_block=q_block, k_block=k_block, heads=heads, share=0.3, device=device
            )
            assert_within_budget(Call(*inputs, plan), impl)


@every_implementation
def test_strided_views(impl: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """[B, N, H, D] projections are read in place, and results and gradients come back in the same layout."""
    dense = Call(*random_inputs(2, 2, 40, 50, 32, device=device), random_plan(40, 50, device=device))
    strided = dense.with_inputs(
        **{
            name: getattr(dense, name).transpose(1, 2).contiguous().transpose(1, 2)
            for name in ("query", "key", "value")
        }
    )
    backward = skip_unless_supported(strided, impl)
    if impl in ("triton", "gluon"):
        monkeypatch.setattr(Tensor, "contiguous", _no_copy(Tensor.contiguous, strided.query.shape))
    got = run(strided, impl, backward=backward)
    assert_within_budget(dense, impl, results=got)
    assert got["out"].stride() == strided.query.stride()
    if backward:
        assert got["grad_query"].stride() == strided.query.stride()


def _no_copy(contiguous: Callable[..., Tensor], shape: torch.Size) -> Callable[..., Tensor]:
    def checked(x: Tensor, *args: Any, **options: Any) -> Tensor:
        assert x.dim() != 4 or x.shape[-1] != shape[-1] or x.is_contiguous(), "an input is copied"
        return contiguous(x, *args, **options)

    return checked


@every_implementation
def test_inputs_with_odd_strides(impl: str, device: torch.device) -> None:
    """A slice of a fused projection, an expanded key, an inner stride of two, an expanded cotangent."""
    fused = random_inputs(1, 1, 40, dim=3 * 32, device=device)[0].unflatten(-1, (3, 32))
    query, key, value = fused.unbind(-2)
    plan = random_plan(40, 40, device=device)
    assert_within_budget(Call(query, key, value, plan), impl)
    wide = random_inputs(2, 1, 40, dim=64, device=device)
    query, value = wide[0][..., ::2], wide[2][..., 1::2]
    key = wide[1][:1, :, :, ::2].expand(2, -1, -1, -1)
    call = Call(query, key, value, plan)
    if skip_unless_supported(call, impl):
        leaf = query.detach().clone().requires_grad_()
        nearfield.attend(leaf, key, value, plan, impl=impl).out.sum().backward()
        assert leaf.grad is not None
        assert bool(leaf.grad.isfinite().all())
    assert_within_budget(call, impl)


@every_implementation
def test_backward_twice_is_bit_equal(impl: str, device: torch.device) -> None:
    inputs = random_inputs(1, 2, 70, 90, 32, device=device)
    plan = random_plan(70, 90, q_block=32, k_block=16, heads=2, repeats=True, device=device)
    call = Call(*inputs, plan, random_bias(2, 90, device=device))
    backward = skip_unless_supported(call, impl)
    first, second = (run(call, impl, backward=backward) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@every_implementation
def test_everything_is_written(impl: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is NaN here; none of it may be left in a result, nor read into one."""
    inputs = random_inputs(1, 2, 70, 90, 40, device=device)
    plan = random_plan(70, 90, q_block=32, k_block=32, empty_rows=True, device=device)
    call = Call(*inputs, plan, random_bias(90, device=device))
    backward = skip_unless_supported(call, impl)
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    assert bool(torch.empty(1).isnan())
    got = run(call, impl, backward=backward)
    assert not [name for name, value in got.items() if bool(value.isnan().any())]
    monkeypatch.undo()
    assert_within_budget(call, impl, results=got)


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **options: Any) -> Tensor:
        memory = make(*args, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    return made


@every_implementation
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
def test_nan_in_nan_out(poisoned: str, impl: str, device: torch.device) -> None:
    query, key, value = inputs = random_inputs(1, 1, 32, 32, 16, device=device)
    {"query": query, "key": key, "value": value}[poisoned][0, 0, 5, 3] = float("nan")
    call = Call(*inputs, planning.full(32, q_block=32, k_block=32, device=device))
    skip_unless_supported(call, impl)
    out = run(call, impl, backward=False)["out"]
    if poisoned == "query":
        assert bool(out[0, 0, 5].isnan().all())
        assert not bool(out[0, 0, :5].isnan().any())
    else:
        assert bool(out[0, 0, :, 3].isnan().all())


@every_implementation
def test_gradient_checkpointing(impl: str, device: torch.device) -> None:
    inputs = random_inputs(1, 1, 40, dim=16, device=device)
    plan = random_plan(40, 40, q_block=64, k_block=32, device=device)
    if not skip_unless_supported(Call(*inputs, plan), impl):
        pytest.skip(f"{impl} has no backward here")
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
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.sum(), query)


# -- torch.compile and the operator ------------------------------------------------------------------------------


def operator_arguments(call: Call, impl: str) -> tuple[Any, ...]:
    """What `attend` hands to `torch.ops.nearfield.attend`."""
    plan = call.plan
    transposed = plan.transpose()
    leaves = [x.clone().requires_grad_() for x in (call.query, call.key, call.value)]
    bias = call.key_bias
    if bias is not None:
        bias = bias.expand(*call.query.shape[:2], -1).clone().requires_grad_()
    positions = call.positions or (None, None)
    lists = plan.offsets, plan.blocks, None, transposed.offsets, transposed.blocks, None
    return *leaves, *lists, bias, *positions, plan.q_block, plan.k_block, plan.uniform, 0.25, impl


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


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
def test_cuda_graph(impl: str, device: torch.device) -> None:
    """A captured call replays with new inputs and new lists of the same sizes."""
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
        )
        for seed in range(2)
    ]
    skip_unless_supported(calls[0], impl, backward=False)
    expected = [run(call, impl, backward=False)["out"] for call in calls]
    query, key, value, offsets, blocks = memory = [x.clone() for x in _contents(calls[0])]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Made anew, so that the starting order of its rows, which depends on the lists, belongs to the graph.
        plan = nearfield.Plan(offsets, blocks, 128, 64, 512, 512, check=False)
        out = nearfield.attend(query, key, value, plan, impl=impl).out  # type: ignore[arg-type]
    for call, wanted in zip(calls[::-1], expected[::-1], strict=True):
        for target, source in zip(memory, _contents(call), strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(out, wanted)


def _contents(call: Call) -> list[Tensor]:
    return [call.query, call.key, call.value, call.plan.offsets, call.plan.blocks]


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
        "`plan` must be a Plan; got Tensor. Build one with `nearfield.planning`.",
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
