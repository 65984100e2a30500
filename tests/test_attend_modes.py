"""Attend under the modes of torch a user may be in, and with inputs laid out in unusual ways."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from tests.attending import NEEDS_TRITON, Call, assert_within_budget, random_inputs, random_plan, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nearfield
from nearfield import Geometry, Hilbert, LogLinear, Plan, explain_choice, planning
from nearfield._types import Attended, Positions
from nearfield.ops import KeyValuePart, attend_parts
from nearfield.ops._op import Operation, is_plain_eager

IMPLEMENTATIONS = ["reference", "grouped", pytest.param("triton", marks=NEEDS_TRITON)]


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", ["transposed", "slice of wider", "int64"])
def test_positions_of_any_strides(layout: str, impl: str, device: torch.device) -> None:
    query, key, value = random_inputs(2, 1, 40, dim=16, device=device)
    plan = random_plan(40, 40, q_block=32, k_block=16, share=0.8, device=device)
    wide = torch.randint(0, 40, (2, 60), generator=torch.Generator().manual_seed(0)).to(device)
    positions = {
        "transposed": wide[:, :40].int().t().contiguous().t(),
        "slice of wider": wide.int()[:, :40],
        "int64": wide[:, :40],
    }[layout]
    assert_within_budget(Call(query, key, value, plan, None, Positions(positions, positions)), impl)


def test_positions_beyond_32_bits_are_clamped() -> None:
    query, key, value = random_inputs(1, 1, 16, dim=16)
    now = torch.zeros(1, 16, dtype=torch.int64)
    never = torch.full((1, 16), torch.iinfo(torch.int64).max)
    out, lse = nearfield.attend(query, key, value, planning.full(16), positions=Positions(now, never))
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_lists_of_any_strides(impl: str, device: torch.device) -> None:
    inputs = random_inputs(1, 2, 40, dim=16, device=device)
    dense = random_plan(40, 40, q_block=32, k_block=16, device=device)
    strided = [torch.stack([x, x + 1], -1)[..., 0] for x in (dense.offsets, dense.blocks)]
    plan = Plan(*strided, 32, 16, 40, 40)
    assert plan == dense
    assert_within_budget(Call(*inputs, plan), impl)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_autocast_does_not_reach_inside(impl: str, device: torch.device) -> None:
    call = Call(*random_inputs(1, 2, 40, dim=16, device=device), planning.full(40, q_block=32, device=device))
    with torch.autocast(device.type, torch.bfloat16):
        inside = run(call, impl)
    for name, value in run(call, impl).items():
        assert inside[name].dtype == value.dtype
        assert torch.equal(inside[name], value), name


class _Seen(TorchDispatchMode):
    """Which of the library's operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "nearfield":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("is_together", [False, True])
def test_eager_inference_needs_no_operator(is_together: bool, impl: str, device: torch.device) -> None:
    """And gives what the operator gives, bit for bit."""
    query, key, value = random_inputs(1, 2, 40, dim=16, device=device)
    plan = random_plan(40, 40, q_block=32, k_block=16, device=device)
    bias = torch.randn(40, device=device)

    def call() -> Attended:
        if is_together:
            parts = [KeyValuePart(key, value, plan, bias), KeyValuePart(value, key, plan)]
            return attend_parts(query, parts, impl=impl)  # type: ignore[arg-type]
        return nearfield.attend(query, key, value, plan, key_bias=bias, impl=impl)  # type: ignore[arg-type]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for operation in Operation.known.values():
            patch.setattr(operation, "operator", lambda *_: pytest.fail("an operator was called"))
        at_once = call()
    with torch.no_grad(), _Seen() as seen:
        observed = call()
    assert seen.names == ["nearfield::attend_2_parts" if is_together else "nearfield::attend"]
    for one, other in zip(at_once, observed, strict=True):
        assert torch.equal(one, other)


def _gradients(call: Callable[..., Attended], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = call(*leaves)
    return [out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves)]


def _trained(name: str, impl: Any, device: torch.device) -> tuple[Callable[..., Attended], list[Tensor]]:
    """A call that is to be differentiated, and its inputs."""
    inputs = random_inputs(1, 2, 64, dim=16, device=device)
    plan = random_plan(64, 64, q_block=32, k_block=16, device=device)
    if name == "attend":
        bias = torch.randn(64, device=device)
        return lambda q, k, v, b: nearfield.attend(q, k, v, plan, key_bias=b, impl=impl), [*inputs, bias]
    if name == "attend_parts":
        return lambda q, k, v: attend_parts(
            q, [KeyValuePart(k, v, plan), KeyValuePart(v, k, plan)], impl=impl
        ), inputs
    if name == "LogLinear":
        method = LogLinear(block=16, topk=2, levels=1)
        return lambda q, k, v: method.layer(Geometry((8, 8))).attend(q, k, v, impl=impl), inputs
    method = Hilbert(tiles=4, far=4, near="tile", summary="weighted" if name == "weighted" else "mean")
    reader = method.layer(Geometry((8, 8)), device=device)
    return lambda q, k, v: reader.attend(q, k, v, impl=impl), inputs


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["attend", "attend_parts", "LogLinear", "means", "weighted"])
def test_eager_training_needs_no_operator(name: str, impl: str, device: torch.device) -> None:
    """Results and gradients are those that operators give, bit for bit; a second derivative is refused all the same."""
    call, inputs = _trained(name, impl, device)
    with _Seen() as seen:
        observed = _gradients(call, inputs)
    assert any(name.startswith("nearfield::attend") and name.endswith("_backward") for name in seen.names)
    with pytest.MonkeyPatch.context() as patch:
        for operation in Operation.known.values():
            patch.setattr(operation, "operator", lambda *_: pytest.fail("an operator was called"))
        at_once = _gradients(call, inputs)
        leaves = [x.clone().requires_grad_() for x in inputs]
    for one, other in zip(at_once, observed, strict=True):
        assert torch.equal(one, other)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = call(*leaves).out
    (gradient,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(out.sum() + gradient.square().sum(), leaves[0])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["attend", "attend_parts", "LogLinear", "means", "weighted"])
def test_several_gradients_at_once(name: str, impl: str, device: torch.device) -> None:
    call, inputs = _trained(name, impl, device)
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = call(*leaves).out
    grads = torch.randn(3, *out.shape, device=device)
    together = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for number, grad in enumerate(grads):
        alone = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        for one, many in zip(alone, together, strict=True):
            torch.testing.assert_close(many[number], one)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["attend", "attend_parts", "LogLinear", "weighted"])
@pytest.mark.parametrize("is_forward_seen", [True, False], ids=["forward", "backward"])
def test_what_is_computed_again_may_be_observed_when_the_first_was_not(
    is_forward_seen: bool, name: str, impl: str, device: torch.device
) -> None:
    """Both ways save the same, so that checkpoints do not mind."""
    call, inputs = _trained(name, impl, device)
    found = []
    for mode in (nullcontext(), _Seen()):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with mode if is_forward_seen else nullcontext():
            out = checkpoint(lambda *x: call(*x).out, *leaves, use_reentrant=False)
        with nullcontext() if is_forward_seen else mode:
            found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_positions_that_changed_in_between_are_noticed() -> None:
    query, key, value = (x.requires_grad_() for x in random_inputs(1, 2, 40, dim=16))
    place = torch.arange(40, dtype=torch.int32)[None].clone()
    out = nearfield.attend(
        query, key, value, planning.full(40, q_block=16), positions=Positions(place, place)
    ).out
    place += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_was_made_for_one_call_goes_with_its_graph() -> None:
    """Lists are freed by the backward, though the loss lives on."""
    call, inputs = _trained("LogLinear", "grouped", torch.device("cpu"))
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(weakref.ref(x)) or x, lambda x: x):
        loss = call(*(x.clone().requires_grad_() for x in inputs)).out.sum()
    # Four blocks of queries choose two each. (Where rows begin follows from sizes, and is kept for other calls; lists
    # are transposed in the backward pass.)
    lists = [x for x in kept if x().dtype == torch.int32 and x().shape == (1, 2, 8)]
    assert len(lists) == 1
    del call
    loss.backward()
    assert all(x() is None for x in lists), loss


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_tensors_that_are_negated_on_paper_alone(impl: str, device: torch.device) -> None:
    """The imaginary part of a conjugate has its memory's sign in a flag, which a kernel would not see."""
    query, key, value = (
        torch.randn(1, 2, 20, 16, 2, device=device, generator=torch.Generator(device).manual_seed(seed))
        for seed in range(3)
    )
    negated = [torch.view_as_complex(x).conj().imag for x in (query, key, value)]
    assert all(x.is_neg() for x in negated)
    plan = planning.full(20, q_block=16, device=device)
    with torch.no_grad():
        found = nearfield.attend(*negated, plan, impl=impl)  # type: ignore[arg-type]
        wanted = nearfield.attend(*(x.resolve_neg() for x in negated), plan, impl=impl)  # type: ignore[arg-type]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("negated", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_what_is_chosen_by_tensors_that_are_negated_on_paper_alone(
    impl: str, negated: int, needs_gradient: bool, device: torch.device
) -> None:
    call, found = _trained("LogLinear", impl, device)
    inputs = list(found)
    inputs[negated] = torch.view_as_complex(torch.randn(*inputs[0].shape, 2, device=device)).conj().imag
    assert inputs[negated].is_neg()
    wanted = call(*(x.resolve_neg() for x in inputs))
    for one, other in zip(call(*(x.requires_grad_(needs_gradient) for x in inputs)), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_tensors_without_data_give_shapes() -> None:
    x = torch.empty(1, 2, 20, 16, device="meta")
    plan = planning.full(20, q_block=16)
    with torch.no_grad():
        out, lse = nearfield.attend(x, x, x, plan.to("meta"))
    assert (out.shape, lse.shape, out.device.type) == (x.shape, x.shape[:3], "meta")


def test_what_observes_a_call_gets_an_operator() -> None:
    x = torch.randn(2, 1, 4, 8)
    assert is_plain_eager(x, None, torch.nn.Parameter(x, requires_grad=False))
    with torch.no_grad():
        assert is_plain_eager(x.clone().requires_grad_())
    assert not is_plain_eager(x, x.clone().requires_grad_())
    with _Seen():
        assert not is_plain_eager(x)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert not is_plain_eager(fake)
    assert not is_plain_eager(x.to("meta"))
    assert not is_plain_eager(torch.view_as_complex(torch.randn(4, 2)).conj().imag)
    found: list[bool] = []
    torch.func.vmap(lambda each: found.append(is_plain_eager(each)) or each)(x)
    torch.jit.trace(lambda each: found.append(is_plain_eager(each)) or each + 1, x, check_trace=False)
    assert found == [False, False]
    assert is_plain_eager(x)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_plan_first_used_in_inference_mode_can_train(impl: str, device: torch.device) -> None:
    call = Call(
        *random_inputs(1, 1, 40, dim=16, device=device),
        random_plan(40, 40, q_block=32, k_block=16, device=device),
    )
    with torch.inference_mode():
        nearfield.attend(call.query, call.key, call.value, call.plan, impl=impl)  # type: ignore[arg-type]
        call.plan.transpose()
        call.plan.longest_first(1, 1)
    assert_within_budget(call, impl)


def test_tracers_leave_nothing_in_a_plan() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        plan = planning.full(64)
        plan.transpose()
        plan.longest_first(1, 1)
    real = random_plan(64, 64, q_block=32, k_block=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        real.transpose()
    assert type(real.transpose().offsets) is torch.Tensor


def test_scale_may_vary_under_compile() -> None:
    inputs = random_inputs(1, 1, 32, dim=16)
    plan = planning.full(32)

    def out(scale: float) -> torch.Tensor:
        return nearfield.attend(*inputs, plan, scale=scale).out

    torch._dynamo.reset()
    compiled = torch.compile(out, backend="aot_eager", fullgraph=True)
    for scale in (0.1, 0.2, 0.3, 0.4):
        torch.testing.assert_close(compiled(scale), out(scale))
    torch._dynamo.reset()


def test_scale_may_be_any_real_number() -> None:
    inputs = random_inputs(1, 1, 16, dim=16)
    plan = planning.full(16)
    expected = nearfield.attend(*inputs, plan, scale=0.25).out
    assert torch.equal(nearfield.attend(*inputs, plan, scale=numpy.float32(0.25)).out, expected)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`scale` must be finite"):
        nearfield.attend(*inputs, plan, scale=10**400)


def test_forward_mode_is_refused() -> None:
    query, key, value = random_inputs(1, 1, 16, dim=16)
    plan = planning.full(16)
    with pytest.raises(NotImplementedError, match="`attend` must be differentiated backward"):
        torch.func.jvp(lambda x: nearfield.attend(x, key, value, plan).out, (query,), (query,))


@pytest.mark.parametrize("impl", ["reference", "grouped"])
@pytest.mark.parametrize("with_positions", [False, True])
def test_an_empty_batch_gives_an_empty_result(with_positions: bool, impl: str) -> None:
    query, key, value = (torch.zeros(0, 2, 16, 16, requires_grad=True) for _ in range(3))
    steps = torch.arange(16)[None]
    positions = Positions(steps, steps) if with_positions else None
    out, _ = nearfield.attend(query, key, value, planning.full(16), positions=positions, impl=impl)  # type: ignore[arg-type]
    out.sum().backward()
    assert out.shape == (0, 2, 16, 16)
    assert query.grad is not None


def test_explaining_an_unknown_implementation_is_an_error() -> None:
    query, key, _ = random_inputs(1, 1, 16, dim=16)
    with pytest.raises(ValueError, match="`impl` must be one of 'auto'"):
        explain_choice(query, key, planning.full(16), impl="tritn")  # type: ignore[arg-type]


def test_cpu_tensors_choose_without_asking_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("the kernels were asked")

    monkeypatch.setattr("nearfield.ops._triton.load", asked)
    query, key, _ = random_inputs(1, 1, 16, dim=16)
    choice = explain_choice(query, key, planning.full(16))
    assert choice.impl == "grouped"
    assert set(choice.rejected) == {"gluon", "triton"}


@pytest.mark.parametrize("block", [True, 64.0, "64", None])
def test_block_sizes_are_integers(block: object) -> None:
    with pytest.raises(TypeError, match="`q_block` must be an integer"):
        planning.full(64, q_block=block)  # type: ignore[arg-type]


def test_lists_too_long_for_32_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`q_block` must be large enough for lists below 2\^31 ids"):
        planning.full(2**20, q_block=16, k_block=1)


def test_gathering_scattered_keys_is_exact() -> None:
    """Many single keys in one list for all heads: the indices of thousands of runs."""
    inputs = random_inputs(1, 2, 128, 300, dim=16)
    plan = random_plan(128, 300, q_block=64, k_block=1, share=0.5)
    assert_within_budget(Call(*inputs, plan), "grouped")
