"""What the tests of `attend` share: random plans and inputs, the error budget, and the identities that must hold.

The budget comes from data. Plain eager attention is run twice, in float64 and in the precision of the inputs; an
implementation may be wrong by twice what eager attention in that precision is wrong by.

`IDENTITIES` are functions of (implementation, size, device) that raise AssertionError. test_attend.py runs each of
them, test_mutants.py proves that each can fail.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

import nearfield
from nearfield import Plan, planning
from nearfield._types import Positions
from nearfield.ops.attention.dispatch import explain_choice

Results = dict[str, Tensor]

INF = float("inf")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


# -- sizes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """What an implementation is tested at.

    Args:
        block: queries per row and keys per id, unless a test is about other blocks.
        fine: the fewest queries per row that the implementation takes.
        dim: head dimension.
        dtype: of query, key and value.
    """

    block: int
    fine: int
    dim: int
    dtype: torch.dtype

    def tokens(self, count: int) -> int:
        """A length that is written for blocks of 32."""
        return count * self.block // 32

    def inputs(
        self,
        batch: int,
        heads: int,
        num_queries: int,
        num_keys: int | None = None,
        *,
        key_heads: int | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return random_inputs(
            batch,
            heads,
            num_queries,
            num_keys,
            self.dim,
            key_heads=key_heads,
            dtype=self.dtype,
            device=device,
            seed=seed,
        )

    def __str__(self) -> str:
        return f"{self.dim}-{str(self.dtype).removeprefix('torch.')}"


SMALL = Size(block=32, fine=16, dim=16, dtype=torch.float32)
HOPPER = Size(block=64, fine=64, dim=64, dtype=torch.bfloat16)
"""The least that the Hopper kernels take: whole warpgroups, half precision."""


def why_no_gluon() -> str | None:
    """Why the Hopper kernels run nothing on this machine; None if they run, or if there is no GPU at all."""
    if not torch.cuda.is_available():
        return None
    query = torch.empty(1, 1, HOPPER.block, HOPPER.dim, dtype=HOPPER.dtype, device="cuda")
    plan = planning.full(HOPPER.block, q_block=HOPPER.block, k_block=HOPPER.block, device="cuda")
    try:
        explain_choice(query, query, plan, backward=True, impl="gluon")
    except NotImplementedError as reason:
        return str(reason)
    return None


NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_no_gluon() is not None, reason=f"no Hopper kernels here: {why_no_gluon()}"),
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


def run_merged(call: Call, plans: Sequence[Plan], impl: str) -> Results:
    """The same from two plans that share the call's pairs, merged by their sums."""

    def merged(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        parts = [
            nearfield.attend(query, key, value, plan, key_bias=key_bias, impl=impl)  # type: ignore[arg-type]
            for plan in plans
        ]
        return nearfield.merge_attended(*parts)

    return _differentiated(merged, call, call.query.dtype, True)


def eager(
    call: Call, dtype: torch.dtype, *, backward: bool = True, turned: bool = False, saved: bool = False
) -> Results:
    """The same by plain masked attention, every step in `dtype`, gradients by autograd.

    `turned` adds everything up in the opposite order; `saved` computes gradients with weights from a float32 `lse`.
    """

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
        if turned:
            query, key, value, mask = query.flip(2), key.flip(2), value.flip(2), mask.flip(2, 3)
        logits = query @ key.mT * scale + mask
        empty = (logits == -INF).all(-1, keepdim=True)
        logits = torch.where(empty, 0, logits)
        out = torch.where(empty, 0, torch.softmax(logits, -1) @ value)
        lse = torch.where(empty[..., 0], -INF, torch.logsumexp(logits, -1))
        return (out.flip(2), lse.flip(2)) if turned else (out, lse)

    return _differentiated(attend, call, dtype, backward, saved)


def _differentiated(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    call: Call,
    dtype: torch.dtype,
    backward: bool,
    saved: bool = False,
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
        if saved:
            # A rounded lse multiplies all weights of its row by one factor, and so all that the row adds to gradients.
            factor = (lse - lse.float().to(lse.dtype)).exp().detach().nan_to_num(1.0)
            cotangents = [cotangents[0] * factor[..., None], cotangents[1] * factor]
        gradients = torch.autograd.grad((out, lse), list(leaves.values()), cotangents)
        results |= {f"grad_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return results


# -- the error budget --------------------------------------------------------------------------------------------


def assert_within_budget(
    call: Call, impl: str, *, backward: bool = True, results: Results | None = None
) -> None:
    """Every result is at most twice as wrong as eager attention in the precision of the inputs."""
    got = run(call, impl, backward=backward) if results is None else results
    exact = eager(call, torch.float64, backward=backward)
    # Of float64 nothing more exact is known: what another order of additions changes is what eager is wrong by.
    is_exact = call.query.dtype == torch.float64
    low = eager(call, call.query.dtype, backward=backward, turned=is_exact)
    # Kernels compute the weights again from the `lse` they saved, a float32: what its rounding alone does is measured.
    saves_lse = backward and impl in ("triton", "gluon")
    saved = eager(call, torch.float64, saved=True) if saves_lse else exact
    for name, value in got.items():
        inherent = _largest(saved[name] - exact[name]) if name.startswith("grad_") else 0.0
        assert_budget(f"{impl}: {name}", value, exact[name], low[name], inherent)


def assert_budget(name: str, got: Tensor, exact: Tensor, low: Tensor, inherent: float = 0.0) -> None:
    """`inherent` is an error that the implementation cannot avoid."""
    assert got.shape == exact.shape, f"{name} has shape {list(got.shape)}, expected {list(exact.shape)}"
    assert torch.equal(got == -INF, exact == -INF), f"{name} is -inf in other places than the exact result"
    finite = exact != -INF
    # Sums in float32 are the best an implementation can do for half-precision inputs, too.
    epsilon = torch.finfo(got.dtype if got.dtype == torch.float64 else torch.float32).eps
    size = _largest(exact[finite])
    allowed = 2 * _largest(low[finite].double() - exact[finite]) + 8 * epsilon * max(1.0, size) + inherent
    error = _largest(got[finite].double() - exact[finite])
    assert error <= allowed, (
        f"{name} is wrong by {error:.3g} (largest value {size:.3g}), allowed {allowed:.3g}"
    )


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def assert_same(
    calls: Sequence[Call], impl: str, names: Sequence[str] = ("out", "lse", "grad_query")
) -> None:
    """The calls have one exact result, and every one of them is within its budget of it."""
    exact = [eager(call, torch.float64) for call in calls]
    for name in names:
        for other in exact[1:]:
            torch.testing.assert_close(other[name], exact[0][name], rtol=1e-9, atol=1e-9)
    for call in calls:
        assert_within_budget(call, impl)


def takes(impl: str, call: Call) -> bool:
    """Whether a call is for this implementation: the Hopper kernels leave positions to the plain ones.

    Whatever else they refuse at the size they are tested at is an error, not a reason to skip.
    """
    return impl != "gluon" or call.positions is None


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


def full_plan_is_dense(impl: str, size: Size, device: torch.device) -> None:
    num_queries, num_keys = size.tokens(80), size.tokens(100)
    inputs = size.inputs(1, 2, num_queries, num_keys, device=device)
    plan = planning.full(num_queries, num_keys, q_block=size.block, k_block=size.block, device=device)
    assert bool((plan.pair_counts() == 1).all())
    assert_within_budget(Call(*inputs, plan), impl)


def every_grain_reads_the_same(impl: str, size: Size, device: torch.device) -> None:
    """One set of keys, aligned to blocks, written with ids of a block, of 8 keys and of single keys."""
    block = size.block
    inputs = size.inputs(1, 1, 2 * block, 3 * block, device=device)
    columns = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool, device=device)
    calls = []
    for k_block in (block, 8, 1):
        mask = columns.repeat_interleave(block // k_block, 1)
        plan = planning.from_mask(
            mask, q_block=block, k_block=k_block, num_queries=2 * block, num_keys=3 * block
        )
        calls.append(Call(*inputs, plan))
    assert_same(calls, impl)


def ring_is_masked_dense(impl: str, size: Size, device: torch.device) -> None:
    """Text, a shared span, and runs of a shifted ring that wraps: the mask is written out token by token."""
    unit = size.fine
    length, run, shift, text, shared = 10 * unit, 2 * unit, unit, (0, 2 * unit), (6 * unit, 7 * unit)
    plan = planning.ring(
        length,
        run,
        shift=shift,
        ring=(text[1], length),
        both=(text, shared),
        q_block=unit,
        k_block=16,
        device=device,
    )
    token = torch.arange(length, device=device)
    on_ring = token >= text[1]
    run_of = torch.where(on_ring, (token - text[1] - shift) % (length - text[1]) // run, -1)
    two_way = ((token >= text[0]) & (token < text[1])) | ((token >= shared[0]) & (token < shared[1]))
    reads = two_way[:, None] | two_way[None, :] | (run_of[:, None] == run_of[None, :])
    assert int(run_of[text[1]]) == int(run_of[-1]), "the ring shall wrap inside a run"
    expected = planning.from_mask(reads, q_block=1, k_block=1, num_queries=length, num_keys=length)
    assert torch.equal(plan.pair_counts(), expected.pair_counts())
    assert_within_budget(Call(*size.inputs(1, 1, length, device=device), plan), impl)


def repeated_block_is_bias_log_2(impl: str, size: Size, device: torch.device) -> None:
    """The block that is read twice is the ragged one."""
    block, num_queries, num_keys = size.block, size.tokens(64), size.tokens(72)
    inputs = size.inputs(1, 2, num_queries, num_keys, device=device)
    once = torch.tensor([[1, 0, 1], [1, 1, 1]])[None, None]
    twice = torch.tensor([[1, 0, 2], [1, 1, 2]])[None, None]
    bias = torch.zeros(num_keys, device=device, dtype=torch.float64)
    bias[2 * block :] = math.log(2)
    plans = [plan_of_counts(times, block, block, num_queries, num_keys, device) for times in (twice, once)]
    calls = Call(*inputs, plans[0]), Call(*inputs, plans[1], bias)
    assert_same(calls, impl, ("out", "lse", "grad_query", "grad_key", "grad_value"))


def merged_key_is_repeated_key(impl: str, size: Size, device: torch.device) -> None:
    """A key that stands for s equal keys, with bias log s."""
    num_queries, num_keys = size.tokens(48), size.tokens(20)
    query, key, value = size.inputs(1, 2, num_queries, num_keys, device=device)
    times = torch.arange(num_keys, device=device) % 3 + 1
    blocks = {"q_block": size.block, "k_block": size.block, "device": device}
    merged = Call(query, key, value, planning.full(num_queries, num_keys, **blocks), times.double().log())
    separate_key, separate_value = (x.repeat_interleave(times, 2) for x in (key, value))
    plan = planning.full(num_queries, separate_key.shape[2], **blocks)
    assert_same((merged, Call(query, separate_key, separate_value, plan)), impl)


def two_levels_are_one_list(impl: str, size: Size, device: torch.device) -> None:
    """Near keys exactly, far ones as means that count as often as they have keys: two sums equal one list."""
    run = size.fine
    length = 4 * run
    query, key, value = size.inputs(1, 1, length, device=device)
    pooled_key, pooled_value = (torch.cat([x, x.unflatten(2, (4, run)).mean(3)], 2) for x in (key, value))
    near = torch.eye(4, dtype=torch.bool, device=device)
    mask = torch.cat([near.repeat_interleave(run, 1), ~near], 1)
    plan = planning.from_mask(mask, q_block=run, k_block=1, num_queries=length, num_keys=length + 4)
    bias = torch.zeros(length + 4, device=device, dtype=torch.float64)
    bias[length:] = math.log(run)
    call = Call(query, pooled_key, pooled_value, plan, bias)

    exact_query, exact_key, exact_value = (x.double() for x in (query, pooled_key, pooled_value))
    weights = torch.exp(size.dim**-0.5 * exact_query @ exact_key.mT)
    tokens = near.repeat_interleave(run, 0)
    fine = weights[..., :length] * tokens.repeat_interleave(run, 1)
    coarse = run * weights[..., length:] * ~tokens
    total = fine.sum(-1) + coarse.sum(-1)
    out = (fine @ exact_value[:, :, :length] + coarse @ exact_value[:, :, length:]) / total[..., None]
    exact = eager(call, torch.float64)
    torch.testing.assert_close(exact["out"], out)
    torch.testing.assert_close(exact["lse"], total.log())
    assert_within_budget(call, impl)


def padding_is_minus_infinity(impl: str, size: Size, device: torch.device) -> None:
    """Keys with bias -inf change nothing and get no gradient."""
    num_queries, num_keys, kept = size.tokens(48), size.tokens(70), size.tokens(50)
    query, key, value = size.inputs(2, 1, num_queries, num_keys, device=device)
    bias = torch.zeros(2, 1, num_keys, device=device)
    bias[0, :, kept:] = -INF
    bias[1, :, : size.tokens(40)] = -INF
    blocks = {"q_block": size.block, "k_block": size.block, "device": device}
    padded = Call(query, key, value, planning.full(num_queries, num_keys, **blocks), bias)
    got = run(padded, impl)
    assert_within_budget(padded, impl, results=got)
    short = Call(
        query[:1], key[:1, :, :kept], value[:1, :, :kept], planning.full(num_queries, kept, **blocks)
    )
    exact, low = (eager(short, dtype, backward=False)["out"] for dtype in (torch.float64, size.dtype))
    assert_budget(f"{impl}: out without padding", got["out"][:1], exact, low)
    for name in ("grad_key", "grad_value", "grad_key_bias"):
        assert not bool(got[name][0, :, kept:].any()), f"{name} of padding"


def plans_merge_by_lse(impl: str, size: Size, device: torch.device) -> None:
    """Two halves of a plan, read apart and merged by their sums, are the whole: results and gradients."""
    block = size.block
    inputs = size.inputs(1, 2, 2 * block, 3 * block, device=device)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool, device=device)
    left = torch.tensor([[1, 0, 1], [0, 1, 0]], dtype=torch.bool, device=device)
    sizes = {"q_block": block, "k_block": block, "num_queries": 2 * block, "num_keys": 3 * block}
    whole = Call(*inputs, planning.from_mask(mask, **sizes))
    plans = [planning.from_mask(part, **sizes) for part in (mask & left, mask & ~left)]
    assert_within_budget(whole, impl, results=run_merged(whole, plans, impl))


def empty_rows_in_both_plans_merge(impl: str, size: Size, device: torch.device) -> None:
    """Rows that read nothing in either plan, for want of a list or because the bias hides all keys of a batch: the
    gradient of the logaddexp of two -inf is NaN, and stays where it is."""
    block = size.block
    inputs = size.inputs(2, 2, 3 * block, 2 * block, device=device)
    left = torch.tensor([[1, 0], [0, 0], [0, 1]], dtype=torch.bool, device=device)
    right = torch.tensor([[0, 1], [0, 0], [1, 0]], dtype=torch.bool, device=device)
    sizes = {"q_block": block, "k_block": block, "num_queries": 3 * block, "num_keys": 2 * block}
    bias = torch.zeros(2, 1, 2 * block, device=device)
    bias[1] = -INF
    whole = Call(*inputs, planning.from_mask(left | right, **sizes), bias)
    got = run_merged(whole, [planning.from_mask(part, **sizes) for part in (left, right)], impl)
    assert not bool(got["grad_query"][got["lse"] == -INF].any()), "a row that reads nothing has a gradient"
    assert_within_budget(whole, impl, results=got)


def empty_rows_are_zero(impl: str, size: Size, device: torch.device) -> None:
    """Rows with no list, rows whose keys are all hidden by the bias, and rows that come before every key."""
    num_queries, num_keys = size.tokens(80), size.tokens(70)
    inputs = size.inputs(2, 1, num_queries, num_keys, device=device)
    blocks = {"q_block": size.block, "k_block": size.block}
    plan = random_plan(num_queries, num_keys, **blocks, empty_rows=True, device=device)
    hidden = torch.zeros(2, 1, num_keys, device=device)
    hidden[1] = -INF
    late = Positions(
        torch.arange(num_queries, device=device)[None] // size.tokens(20),
        (torch.arange(num_keys, device=device) % 3 + 1)[None],
    )
    for call in (Call(*inputs, plan), Call(*inputs, plan, hidden), Call(*inputs, plan, None, late)):
        if not takes(impl, call):
            continue
        got = run(call, impl)
        empty = eager(call, torch.float64, backward=False)["lse"] == -INF
        assert bool(empty.any())
        assert torch.equal(got["lse"] == -INF, empty)
        assert not bool(got["out"][empty].any())
        assert not any(bool(x.isnan().any()) for x in got.values())
        assert not bool(got["grad_query"][empty].any())
        assert_within_budget(call, impl, results=got)


def lists_per_head_and_batch(impl: str, size: Size, device: torch.device) -> None:
    """Different, ragged, repeating lists for every batch and head, with grouped-query heads."""
    num_queries, num_keys = size.tokens(70), size.tokens(90)
    for heads, key_heads in ((4, 2), (2, 2)):
        inputs = size.inputs(2, heads, num_queries, num_keys, key_heads=key_heads, device=device)
        plan = random_plan(
            num_queries,
            num_keys,
            q_block=size.block,
            k_block=16,
            batch=2,
            heads=heads,
            repeats=True,
            device=device,
            seed=heads,
        )
        assert_within_budget(Call(*inputs, plan, random_bias(2, heads, num_keys, device=device)), impl)


def grouped_query_heads(impl: str, size: Size, device: torch.device) -> None:
    num_queries, num_keys = size.tokens(40), size.tokens(56)
    for key_heads in (1, 2):
        inputs = size.inputs(2, 4, num_queries, num_keys, key_heads=key_heads, device=device)
        plan = random_plan(num_queries, num_keys, q_block=64, k_block=size.block, device=device)
        assert_within_budget(Call(*inputs, plan, random_bias(4, num_keys, device=device)), impl)


def positions_hide_later_keys(impl: str, size: Size, device: torch.device) -> None:
    inputs = size.inputs(2, 1, 50, 70, device=device)
    plan = random_plan(50, 70, q_block=32, k_block=32, share=0.7, repeats=True, device=device)
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2):
        query_positions = torch.randint(0, 70, (batch, 50), generator=generator).to(device)
        key_positions = torch.randperm(70, generator=generator).expand(batch, 70).to(device)
        call = Call(*inputs, plan, None, Positions(query_positions, key_positions))
        if not takes(impl, call):
            pytest.skip("positions are left to the plain kernels")
        assert_within_budget(call, impl)
    assert_within_budget(call.with_inputs(key_bias=random_bias(70, device=device)), impl)


def bias_broadcasts(impl: str, size: Size, device: torch.device) -> None:
    num_queries, num_keys = size.tokens(40), size.tokens(50)
    inputs = size.inputs(2, 2, num_queries, num_keys, device=device)
    plan = random_plan(num_queries, num_keys, q_block=64, k_block=size.block, device=device)
    for shape in ((), (2, 1), (1, 2), (2, 2)):
        assert_within_budget(Call(*inputs, plan, random_bias(*shape, num_keys, device=device)), impl)


def lse_alone_differentiates(impl: str, size: Size, device: torch.device) -> None:
    """The gradient of lse by a query is the mean of the keys it reads, times scale."""
    num_queries, num_keys = size.tokens(40), size.tokens(50)
    query, key, value = size.inputs(1, 2, num_queries, num_keys, device=device)
    plan = planning.full(num_queries, num_keys, q_block=size.block, k_block=size.block, device=device)
    leaf = query.clone().requires_grad_()
    attended = nearfield.attend(leaf, key, value, plan, impl=impl)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(attended.lse.sum(), leaf)

    def mean_key(dtype: torch.dtype) -> Tensor:
        scale = size.dim**-0.5
        return torch.softmax(query.to(dtype) @ key.to(dtype).mT * scale, -1) @ key.to(dtype) * scale

    assert_budget(f"{impl}: gradient of lse", gradient, mean_key(torch.float64), mean_key(size.dtype))


def odd_sizes(impl: str, size: Size, device: torch.device) -> None:
    """Neither length is a multiple of a block, and the ragged block is read more than once."""
    for num_queries, num_keys, q_block, k_block in (
        (1, 1, size.fine, 16),
        (2 * size.fine + 1, 65, size.fine, 64),
        (2 * size.block + 1, 33, size.block, 4),
        (size.fine + 1, 129, 2 * size.block, 128),
    ):
        inputs = size.inputs(1, 2, num_queries, num_keys, device=device)
        plan = random_plan(
            num_queries, num_keys, q_block=q_block, k_block=k_block, repeats=True, device=device
        )
        assert_within_budget(Call(*inputs, plan), impl)


IDENTITIES: dict[str, Callable[[str, Size, torch.device], None]] = {
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
        empty_rows_in_both_plans_merge,
        empty_rows_are_zero,
        lists_per_head_and_batch,
        grouped_query_heads,
        positions_hide_later_keys,
        bias_broadcasts,
        lse_alone_differentiates,
        odd_sizes,
    )
}
