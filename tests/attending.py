"""What the tests of `attend` share: random plans and inputs, the error budget, and the identities that must hold.

The budget comes from data. Plain eager attention is run twice, in float64 and in the precision of the inputs; an
implementation may be wrong by twice what eager attention in that precision is wrong by.

`IDENTITIES` are functions of (implementation, device) that raise AssertionError. test_attend.py runs each of them,
test_mutants.py proves that each can fail.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import nearfield
from nearfield import Plan, Positions, planning
from nearfield.attend import explain_choice

Results = dict[str, Tensor]
Identity = Callable[[str, torch.device], None]

INF = float("inf")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# NumPy's remarks on Triton's interpreter, which makes loop bounds of arrays and takes the maximum of NaNs.
INTERPRETER_WARNINGS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


# -- calls -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of `attend`, with the cotangents of its results (drawn from the seed)."""

    query: Tensor
    key: Tensor
    value: Tensor
    plan: Plan
    key_bias: Tensor | None = None
    positions: Positions | None = None
    scale: float | None = None
    seed: int = field(default=0, kw_only=True)

    def cotangents(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        out = torch.randn(self.query.shape, generator=generator)
        lse = torch.randn(self.query.shape[:3], generator=generator)
        return out.to(self.query), lse.to(self.query.device)

    def with_inputs(self, **changes: object) -> "Call":
        return replace(self, **changes)


def run(call: Call, impl: str, *, backward: bool = True) -> Results:
    """Results and gradients of `nearfield.attend`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return nearfield.attend(
            query,
            key,
            value,
            call.plan,
            key_bias=key_bias,
            positions=call.positions,
            scale=call.scale,
            impl=impl,  # type: ignore[arg-type]
        )

    return _differentiated(attend, call, call.query.dtype, backward)


def eager(call: Call, dtype: torch.dtype, *, backward: bool = True) -> Results:
    """The same by plain masked attention, every step in `dtype`, gradients by autograd."""

    def attend(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        scale = query.shape[3] ** -0.5 if call.scale is None else call.scale
        mask = call.plan.pair_counts().to(dtype).log()
        if key_bias is not None:
            mask = mask + key_bias.to(dtype).expand(*query.shape[:2], key.shape[2])[:, :, None]
        if call.positions is not None:
            hidden = call.positions.key[:, None, None, :] > call.positions.query[:, None, :, None]
            mask = mask.masked_fill(hidden, -INF)
        logits = query @ key.mT * scale + mask
        empty = (logits == -INF).all(-1, keepdim=True)
        logits = torch.where(empty, 0, logits)
        out = torch.where(empty, 0, torch.softmax(logits, -1) @ value)
        return out, torch.where(empty[..., 0], -INF, torch.logsumexp(logits, -1))

    return _differentiated(attend, call, dtype, backward)


def _differentiated(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    call: Call,
    dtype: torch.dtype,
    backward: bool,
) -> Results:
    names = ("query", "key", "value", "key_bias")
    leaves = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for name, leaf in leaves.items():
        cast = leaf.detach().to(wide if name == "key_bias" else dtype)
        leaves[name] = cast.requires_grad_(backward)
    out, lse = attend(leaves["query"], leaves["key"], leaves["value"], leaves.get("key_bias"))
    results = {"out": out.detach(), "lse": lse.detach()}
    if backward:
        cotangents = [x.to(y.dtype) for x, y in zip(call.cotangents(), (out, lse), strict=True)]
        gradients = torch.autograd.grad((out, lse), list(leaves.values()), cotangents)
        results |= {f"grad_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return results


# -- the error budget --------------------------------------------------------------------------------------------


def assert_within_budget(
    call: Call, impl: str, *, backward: bool = True, results: Results | None = None
) -> None:
    """Every result is at most twice as wrong as eager attention in the precision of the inputs."""
    backward = skip_unless_supported(call, impl, backward)
    got = run(call, impl, backward=backward) if results is None else results
    exact = eager(call, torch.float64, backward=backward)
    low = eager(call, call.query.dtype, backward=backward)
    for name, value in got.items():
        _assert_budget(f"{impl}: {name}", value, exact[name], low[name])


def _assert_budget(name: str, got: Tensor, exact: Tensor, low: Tensor) -> None:
    assert got.shape == exact.shape, f"{name} has shape {list(got.shape)}, expected {list(exact.shape)}"
    assert torch.equal(got == -INF, exact == -INF), f"{name} is -inf in other places than the exact result"
    finite = exact != -INF
    # Sums in float32 are the best an implementation can do for half-precision inputs, too.
    epsilon = torch.finfo(got.dtype if got.dtype == torch.float64 else torch.float32).eps
    size = _largest(exact[finite])
    allowed = 2 * _largest(low[finite].double() - exact[finite]) + 8 * epsilon * max(1.0, size)
    error = _largest(got[finite].double() - exact[finite])
    assert error <= allowed, (
        f"{name} is wrong by {error:.3g} (largest value {size:.3g}), allowed {allowed:.3g}"
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def assert_same(
    call: Call, other: Call, impl: str, names: Sequence[str] = ("out", "lse", "grad_query")
) -> None:
    """Both calls are within budget and give the same results, up to both budgets: they have one exact result."""
    for name, value in eager(call, torch.float64).items():
        if name in names:
            torch.testing.assert_close(value, eager(other, torch.float64)[name], rtol=1e-9, atol=1e-9)
    assert_within_budget(call, impl)
    assert_within_budget(other, impl)


def skip_unless_supported(call: Call, impl: str, backward: bool = True) -> bool:
    """Skip the test if a specialised kernel says it cannot run the call; False if it can but not backwards.

    The other implementations run everything: they are never skipped.
    """
    if impl != "gluon":
        return backward
    for wanted in (False, True)[: 1 + backward]:
        try:
            explain_choice(
                call.query,
                call.key,
                call.plan,
                key_bias=call.key_bias,
                positions=call.positions,
                backward=wanted,
                impl=impl,
            )
        except NotImplementedError as reason:
            if not wanted:
                pytest.skip(str(reason))
            return False
    return backward


# -- random plans and inputs -------------------------------------------------------------------------------------


def random_inputs(
    batch: int = 1,
    heads: int = 2,
    num_queries: int = 96,
    num_keys: int | None = None,
    dim: int = 32,
    *,
    key_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_keys = num_queries if num_keys is None else num_keys
    key_shape = batch, heads if key_heads is None else key_heads, num_keys, dim
    shapes = (batch, heads, num_queries, dim), key_shape, key_shape
    query, key, value = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return query, key, value


def random_plan(
    num_queries: int,
    num_keys: int,
    *,
    q_block: int = 32,
    k_block: int = 32,
    batch: int = 1,
    heads: int = 1,
    share: float = 0.5,
    repeats: bool = False,
    empty_rows: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Plan:
    """Each row reads about `share` of the columns, the last one always; if asked, the last row and one id in three
    more often (the ragged block among them), and every third row nothing."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = -(-num_queries // q_block), -(-num_keys // k_block)
    shape = batch, heads, rows, columns
    times = (torch.rand(shape, generator=generator) < share).int()
    times[..., -1] = 1
    if repeats:
        times += times * torch.randint(0, 3, shape, generator=generator).clamp(min=1).sub(1)
        times[..., 0, -1] = 3
    if empty_rows:
        times[..., 1::3, :] = 0
    return plan_of_counts(times, q_block, k_block, num_queries, num_keys, device)


def plan_of_counts(
    times: Tensor,
    q_block: int,
    k_block: int,
    num_queries: int,
    num_keys: int,
    device: torch.device | str = "cpu",
) -> Plan:
    """The plan in which row r reads column c `times[..., r, c]` times."""
    batch, heads, rows, columns = times.shape
    counts = times.sum(-1)
    ids = torch.zeros(batch, heads, rows, max(1, int(counts.max())), dtype=torch.int32)
    for index in torch.cartesian_prod(*map(torch.arange, (batch, heads, rows))).reshape(-1, 3).tolist():
        row = torch.arange(columns, dtype=torch.int32).repeat_interleave(times[tuple(index)].long())
        ids[tuple(index)][: len(row)] = row
    return planning.key_lists(
        ids, counts, q_block=q_block, k_block=k_block, num_queries=num_queries, num_keys=num_keys
    ).to(device)


def random_bias(*shape: int, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 2)).to(device)


# -- identities --------------------------------------------------------------------------------------------------


def full_plan_is_dense(impl: str, device: torch.device) -> None:
    inputs = random_inputs(1, 2, 80, 100, 32, device=device)
    plan = planning.full(80, 100, q_block=32, k_block=32, device=device)
    assert bool((plan.pair_counts() == 1).all())
    assert_within_budget(Call(*inputs, plan), impl)


def every_grain_reads_the_same(impl: str, device: torch.device) -> None:
    """One set of keys, aligned to 32, written with ids of 32 keys, of 8 and of single keys."""
    inputs = random_inputs(1, 1, 64, 96, 16, device=device)
    columns = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool, device=device)
    calls = []
    for k_block in (32, 8, 1):
        mask = columns.repeat_interleave(32 // k_block, 1)
        plan = planning.from_mask(mask, q_block=32, k_block=k_block, num_queries=64, num_keys=96)
        calls.append(Call(*inputs, plan))
    assert_same(calls[0], calls[1], impl)
    assert_same(calls[2], calls[1], impl)


def ring_is_masked_dense(impl: str, device: torch.device) -> None:
    """Text, a shared span, and runs of a shifted ring that wraps: the mask is written out token by token."""
    length, run, shift, text, shared = 160, 32, 16, (0, 32), (96, 112)
    plan = planning.ring(
        length,
        run,
        shift=shift,
        ring=(text[1], length),
        both=(text, shared),
        q_block=16,
        k_block=16,
        device=device,
    )
    token = torch.arange(length, device=device)
    on_ring = token >= text[1]
    run_of = torch.where(on_ring, (token - text[1] - shift) % (length - text[1]) // run, -1)
    two_way = ((token >= text[0]) & (token < text[1])) | ((token >= shared[0]) & (token < shared[1]))
    reads = two_way[:, None] | two_way[None, :] | (run_of[:, None] == run_of[None, :])
    assert int(run_of[text[1]]) == int(run_of[-1]), "the ring shall wrap inside a run"
    inputs = random_inputs(1, 1, length, dim=16, device=device)
    expected = planning.from_mask(reads, q_block=1, k_block=1, num_queries=length, num_keys=length)
    assert torch.equal(plan.pair_counts(), expected.pair_counts())
    assert_same(Call(*inputs, plan), Call(*inputs, expected), "reference")
    assert_within_budget(Call(*inputs, plan), impl)


def repeated_block_is_bias_log_2(impl: str, device: torch.device) -> None:
    query, key, value = random_inputs(1, 2, 64, 72, 32, device=device)
    once = torch.tensor([[1, 0, 1], [1, 1, 1]])[None, None]
    twice = torch.tensor([[1, 0, 2], [1, 1, 2]])[None, None]
    bias = torch.zeros(72, device=device, dtype=torch.float64)
    bias[64:] = math.log(2)
    repeated = Call(query, key, value, plan_of_counts(twice, 32, 32, 64, 72, device))
    biased = Call(query, key, value, plan_of_counts(once, 32, 32, 64, 72, device), bias)
    assert_same(repeated, biased, impl, ("out", "lse", "grad_query", "grad_key", "grad_value"))


def merged_key_is_repeated_key(impl: str, device: torch.device) -> None:
    """A key that stands for s equal keys, with bias log s."""
    query, key, value = random_inputs(1, 2, 48, 20, 32, device=device)
    sizes = torch.arange(20, device=device) % 3 + 1
    merged = Call(
        query, key, value, planning.full(48, 20, q_block=64, k_block=32, device=device), sizes.double().log()
    )
    separate_key, separate_value = (x.repeat_interleave(sizes, 2) for x in (key, value))
    num_keys = separate_key.shape[2]
    plan = planning.full(48, num_keys, q_block=64, k_block=32, device=device)
    assert_same(merged, Call(query, separate_key, separate_value, plan), impl)


def two_levels_are_one_list(impl: str, device: torch.device) -> None:
    """Near keys exactly, far ones as means of 16 that count 16 times: two dense sums equal one list with a bias."""
    query, key, value = random_inputs(1, 1, 64, dim=32, device=device)
    pooled_key, pooled_value = (torch.cat([x, x.unflatten(2, (4, 16)).mean(3)], 2) for x in (key, value))
    near = torch.eye(4, dtype=torch.bool, device=device)
    mask = torch.zeros(4, 68, dtype=torch.bool, device=device)
    mask[:, :64] = near.repeat_interleave(16, 1)
    mask[:, 64:] = ~near
    plan = planning.from_mask(mask, q_block=16, k_block=1, num_queries=64, num_keys=68)
    bias = torch.zeros(68, device=device, dtype=torch.float64)
    bias[64:] = math.log(16)
    call = Call(query, pooled_key, pooled_value, plan, bias)

    scale = 32**-0.5
    exact_query, exact_key, exact_value = (x.double() for x in (query, pooled_key, pooled_value))
    weights = torch.exp(scale * exact_query @ exact_key.mT)
    tokens = near.repeat_interleave(16, 0)
    fine = weights[..., :64] * tokens.repeat_interleave(16, 1)
    coarse = 16 * weights[..., 64:] * ~tokens
    total = fine.sum(-1) + coarse.sum(-1)
    out = (fine @ exact_value[:, :, :64] + coarse @ exact_value[:, :, 64:]) / total[..., None]
    exact = eager(call, torch.float64)
    torch.testing.assert_close(exact["out"], out)
    torch.testing.assert_close(exact["lse"], total.log())
    assert_within_budget(call, impl)


def padding_is_minus_infinity(impl: str, device: torch.device) -> None:
    """Keys with bias -inf change nothing and get no gradient."""
    query, key, value = random_inputs(2, 1, 48, 70, 32, device=device)
    bias = torch.zeros(2, 1, 70, device=device)
    bias[0, :, 50:] = -INF
    bias[1, :, :40] = -INF
    padded = Call(query, key, value, planning.full(48, 70, q_block=64, k_block=32, device=device), bias)
    assert_within_budget(padded, impl)
    backward = skip_unless_supported(padded, impl)
    got = run(padded, impl, backward=backward)
    short = Call(
        query[:1],
        key[:1, :, :50],
        value[:1, :, :50],
        planning.full(48, 50, q_block=64, k_block=32, device=device),
    )
    torch.testing.assert_close(
        got["out"][:1].double(), eager(short, torch.float64)["out"], rtol=1e-4, atol=1e-5
    )
    if backward:
        for name in ("grad_key", "grad_value"):
            assert not bool(got[name][0, :, 50:].any()), f"{name} of padding"
        assert not bool(got["grad_key_bias"][0, :, 50:].any()), "grad_key_bias of padding"


def plans_merge_by_lse(impl: str, device: torch.device) -> None:
    """Two halves of a plan, read apart and merged by their sums, are the whole: results and gradients."""
    query, key, value = random_inputs(1, 2, 64, 96, 32, device=device)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool, device=device)
    left = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool, device=device)
    sizes = {"q_block": 32, "k_block": 32, "num_queries": 64, "num_keys": 96}
    whole = Call(query, key, value, planning.from_mask(mask, **sizes))
    plans = [planning.from_mask(part, **sizes) for part in (mask & left, mask & ~left)]
    if not skip_unless_supported(whole, impl):
        return

    def merged(query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = [nearfield.attend(query, key, value, plan, impl=impl) for plan in plans]  # type: ignore[arg-type]
        lse = torch.logaddexp(parts[0].lse, parts[1].lse)
        return sum(part.out * torch.exp(part.lse - lse)[..., None] for part in parts), lse  # type: ignore[return-value]

    assert_within_budget(whole, impl, results=_differentiated(merged, whole, query.dtype, True))


def empty_rows_are_zero(impl: str, device: torch.device) -> None:
    """Rows with no list, rows whose keys are all hidden by the bias, and rows that come before every key."""
    query, key, value = random_inputs(2, 1, 80, 70, 16, device=device)
    plan = random_plan(80, 70, q_block=32, k_block=32, empty_rows=True, device=device)
    hidden = torch.zeros(2, 1, 70, device=device)
    hidden[1] = -INF
    late = Positions(
        torch.arange(80, device=device)[None] // 20, (torch.arange(70, device=device) % 3 + 1)[None]
    )
    for call in (
        Call(query, key, value, plan),
        Call(query, key, value, plan, hidden),
        Call(query, key, value, plan, None, late),
    ):
        backward = skip_unless_supported(call, impl)
        got = run(call, impl, backward=backward)
        empty = eager(call, torch.float64, backward=False)["lse"] == -INF
        assert bool(empty.any())
        assert torch.equal(got["lse"] == -INF, empty)
        assert not bool(got["out"][empty].any())
        assert not any(bool(x.isnan().any()) for x in got.values())
        if backward:
            assert not bool(got["grad_query"][empty].any())
        assert_within_budget(call, impl)


def lists_per_head_and_batch(impl: str, device: torch.device) -> None:
    """Different, ragged, repeating lists for every batch and head, with grouped-query heads."""
    for heads, key_heads in ((4, 2), (2, 2)):
        query, key, value = random_inputs(2, heads, 70, 90, 16, key_heads=key_heads, device=device)
        plan = random_plan(
            70, 90, q_block=32, k_block=16, batch=2, heads=heads, repeats=True, device=device, seed=heads
        )
        assert_within_budget(Call(query, key, value, plan, random_bias(2, heads, 90, device=device)), impl)


def grouped_query_heads(impl: str, device: torch.device) -> None:
    for key_heads in (1, 2):
        query, key, value = random_inputs(2, 4, 40, 56, 16, key_heads=key_heads, device=device)
        plan = random_plan(40, 56, q_block=64, k_block=32, device=device)
        assert_within_budget(Call(query, key, value, plan, random_bias(4, 56, device=device)), impl)


def positions_hide_later_keys(impl: str, device: torch.device) -> None:
    query, key, value = random_inputs(2, 1, 50, 70, 16, device=device)
    plan = random_plan(50, 70, q_block=32, k_block=32, share=0.7, repeats=True, device=device)
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2):
        query_positions = torch.randint(0, 70, (batch, 50), generator=generator).to(device)
        key_positions = torch.randperm(70, generator=generator).expand(batch, 70).to(device)
        positions = Positions(query_positions, key_positions)
        assert_within_budget(Call(query, key, value, plan, None, positions), impl)
    assert_within_budget(Call(query, key, value, plan, random_bias(70, device=device), positions), impl)


def bias_broadcasts(impl: str, device: torch.device) -> None:
    query, key, value = random_inputs(2, 2, 40, 50, 16, device=device)
    plan = random_plan(40, 50, q_block=64, k_block=32, device=device)
    for shape in ((50,), (2, 1, 50), (1, 2, 50), (2, 2, 50)):
        assert_within_budget(Call(query, key, value, plan, random_bias(*shape, device=device)), impl)


def lse_alone_differentiates(impl: str, device: torch.device) -> None:
    """The gradient of lse by a query is the mean of the keys it reads, times scale."""
    query, key, value = random_inputs(1, 2, 40, 50, 16, device=device)
    plan = planning.full(40, 50, q_block=64, k_block=64, device=device)
    if not skip_unless_supported(Call(query, key, value, plan), impl):
        return
    leaf = query.clone().requires_grad_()
    attended = nearfield.attend(leaf, key, value, plan, impl=impl)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(attended.lse.sum(), leaf)
    weights = torch.softmax(query @ key.mT / 4, -1)
    torch.testing.assert_close(gradient, weights @ key / 4, rtol=1e-4, atol=1e-5)


def odd_sizes(impl: str, device: torch.device) -> None:
    """Neither length is a multiple of a block, and the ragged block is read more than once."""
    for num_queries, num_keys, q_block, k_block in (
        (1, 1, 16, 16),
        (33, 65, 16, 64),
        (65, 33, 32, 4),
        (17, 129, 64, 128),
    ):
        inputs = random_inputs(1, 2, num_queries, num_keys, 16, device=device)
        plan = random_plan(
            num_queries, num_keys, q_block=q_block, k_block=k_block, repeats=True, device=device
        )
        assert_within_budget(Call(*inputs, plan), impl)


IDENTITIES: dict[str, Identity] = {
    function.__name__: function
    for function in (
        full_plan_is_dense,
        every_grain_reads_the_same,
        ring_is_masked_dense,
        repeated_block_is_bias_log_2,
        merged_key_is_repeated_key,
        two_levels_are_one_list,
        padding_is_minus_infinity,
        plans_merge_by_lse,
        empty_rows_are_zero,
        lists_per_head_and_batch,
        grouped_query_heads,
        positions_hide_later_keys,
        bias_broadcasts,
        lse_alone_differentiates,
        odd_sizes,
    )
}
