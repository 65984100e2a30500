"""The CPU path: how it groups, what it copies, and that pieces do not show in the result."""

import math
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attending import Call, eager, random_bias, random_inputs, random_plan, run
from torch import Tensor

import nearfield
from nearfield import planning
from nearfield._types import Positions
from nearfield.ops import KeyValuePart, attend_parts, merge_attended
from nearfield.ops.attention import cpu as grouped
from nearfield.ops.lists import runs as lists_as_runs

CPU = torch.device("cpu")


@st.composite
def calls(draw: st.DrawFn) -> Call:
    key_heads, repeats = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    batch, heads = draw(st.integers(1, 2)), key_heads * repeats
    num_queries, num_keys, seed = (
        draw(st.integers(1, 40)),
        draw(st.integers(1, 40)),
        draw(st.integers(0, 9)),
    )
    plan = random_plan(
        num_queries,
        num_keys,
        q_block=draw(st.sampled_from([1, 8, 16, 32])),
        k_block=draw(st.sampled_from([1, 2, 16, 32])),
        batch=draw(st.sampled_from([1, batch])),
        heads=draw(st.sampled_from([1, heads])),
        share=draw(st.floats(0, 1)),
        repeats=draw(st.booleans()),
        empty_rows=draw(st.booleans()),
        seed=seed,
    )
    inputs = random_inputs(
        batch, heads, num_queries, num_keys, 4, key_heads=key_heads, dtype=torch.float64, seed=seed
    )
    bias = random_bias(batch, heads, num_keys, seed=seed).double() if draw(st.booleans()) else None
    positions = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(seed)
        sizes = (
            (draw(st.sampled_from([1, batch])), num_queries),
            (draw(st.sampled_from([1, batch])), num_keys),
        )
        positions = Positions(*(torch.randint(0, 9, size, generator=generator) for size in sizes))
    return Call(*inputs, plan, bias, positions)


@settings(max_examples=40)
@given(calls(), st.sampled_from([2**8, 2**12, 2**24]), st.sampled_from([2, 16]))
def test_matches_eager_in_pieces_of_any_size(call: Call, piece: int, many: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_PIECE_BYTES", piece)
        patch.setattr(grouped, "_LEAST_QUERIES", 3)
        patch.setattr(grouped, "_MANY_RUNS", many)
        got = run(call, "grouped")
    for name, expected in eager(call, torch.float64).items():
        torch.testing.assert_close(got[name], expected, msg=name)


@settings(max_examples=20)
@given(calls())
def test_without_the_fused_operator(call: Call) -> None:
    """What other devices than the CPU run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_read_fused", grouped._read_plainly)
        got = run(call, "grouped", backward=False)
    for name, expected in eager(call, torch.float64, backward=False).items():
        torch.testing.assert_close(got[name], expected, msg=name)


class Reads:
    """Counts the calls of the operator, and what they read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[list[int], list[int]]] = []
        self.keys: list[Tensor] = []
        self._read = grouped._read_fused
        patch.setattr(grouped, "_read_fused", self)

    def __call__(self, query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        self.shapes.append((list(query.shape), list(key.shape)))
        self.keys.append(key)
        return self._read(query, key, *rest)


def test_one_call_per_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs of 32 and 16 tokens of text: five lists, though there are nine rows; text and runs in any order."""
    reads = Reads(monkeypatch)
    plan = planning.ring(144, 32, ring=(16, 144), both=((0, 16),), q_block=16, k_block=16)
    nearfield.attend(*random_inputs(2, 3, 144, dim=8), plan, impl="grouped")
    assert reads.shapes == [([6, 1, 16, 8], [6, 1, 144, 8]), *[([6, 1, 32, 8], [6, 1, 48, 8])] * 4]


def test_neighbouring_keys_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    query, key, value = random_inputs(1, 2, 64, dim=8)
    mask = torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).roll(1, 1)
    plan = planning.from_mask(mask, q_block=16, k_block=16, num_queries=64, num_keys=64)
    nearfield.attend(query, key, value, plan, impl="grouped")
    inside = [x.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() for x in reads.keys]
    assert inside == [True, True, True, False], "only the row that wraps needs a copy"


def test_key_heads_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    inputs = random_inputs(1, 6, 32, dim=8, key_heads=2)
    nearfield.attend(*inputs, planning.full(32, q_block=16, k_block=16), impl="grouped")
    assert reads.shapes == [([2, 3, 32, 8], [2, 1, 32, 8])]


def test_equal_lengths_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists per head: one call per number of keys, whatever the keys are; the ragged key block is trimmed."""
    reads = Reads(monkeypatch)
    scores = torch.tensor([[[3.0, 2, 1], [3, 2, 1]], [[3, 2, 1], [1, 2, 3]]])
    plan = planning.topk(scores, 2, q_block=16, k_block=16, num_queries=32, num_keys=40)
    nearfield.attend(*random_inputs(1, 2, 32, 40, 8), plan, impl="grouped")
    assert reads.shapes == [([3, 1, 16, 8], [3, 1, 32, 8]), ([1, 1, 16, 8], [1, 1, 24, 8])]


def test_store_copies_only_what_changed() -> None:
    store, x = grouped._Store(), torch.randn(1, 2, 64, 4)
    first = store.gather([x], [((0, 8), (16, 24))])
    torch.testing.assert_close(first, torch.cat([x[:, :, :8], x[:, :, 16:24]], 2))
    x[:, :, :8] = 0
    second = store.gather([x], [((0, 8), (40, 48))])
    assert bool(second[:, :, :8].any()), "the shared run was copied again"
    torch.testing.assert_close(second[:, :, 8:], x[:, :, 40:48])
    third = store.gather([x], [((40, 48), (0, 8), (0, 8))])
    torch.testing.assert_close(third, torch.cat([x[:, :, 40:48], x[:, :, :8], x[:, :, :8]], 2))


def test_store_tells_tensors_apart() -> None:
    """The same run of another tensor is another one."""
    store, x, y = grouped._Store(), torch.randn(1, 2, 64, 4), torch.randn(1, 2, 8, 4)
    for runs in ((((0, 8),), ((0, 4),)), ((), ((0, 8),)), (((0, 4),), ((0, 8),)), (((0, 8), (16, 24)), ())):
        wanted = [
            tensor[:, :, start:stop]
            for tensor, some in zip((x, y), runs, strict=True)
            for start, stop in some
        ]
        assert torch.equal(store.gather([x, y], runs), torch.cat(wanted, 2))


@st.composite
def several_parts(draw: st.DrawFn) -> tuple[Tensor, list[KeyValuePart]]:
    """Of one softmax, each with one set of lists, and rows of one size."""
    key_heads, repeats, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, num_queries, q_block = (
        key_heads * repeats,
        draw(st.integers(1, 40)),
        draw(st.sampled_from([8, 16])),
    )
    query, parts = None, []
    for number in range(draw(st.integers(1, 3))):
        num_keys, seed = draw(st.integers(1, 40)), 10 * number + draw(st.integers(0, 9))
        inputs = random_inputs(
            batch, heads, num_queries, num_keys, 4, key_heads=key_heads, dtype=torch.float64, seed=seed
        )
        plan = random_plan(
            num_queries,
            num_keys,
            q_block=q_block,
            k_block=draw(st.sampled_from([1, 2, 16])),
            share=draw(st.floats(0, 1)),
            repeats=draw(st.booleans()),
            empty_rows=draw(st.booleans()),
            seed=seed,
        )
        shape = draw(st.sampled_from([(batch, heads, num_keys), (1, 1, num_keys)]))
        bias = random_bias(*shape, seed=seed).double() if draw(st.booleans()) else None
        query = inputs[0] if query is None else query
        parts.append(KeyValuePart(*inputs[1:], plan, bias))
    assert query is not None
    return query, parts


@settings(max_examples=60)
@given(several_parts(), st.sampled_from([2, 16]))
def test_parts_read_in_one_pass_are_parts_that_are_merged(
    call: tuple[Tensor, list[KeyValuePart]], many: int
) -> None:
    query, parts = call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_MANY_RUNS", many)
        together = attend_parts(query, parts, impl="grouped")
    apart = [nearfield.attend(query, *part[:3], key_bias=part.key_bias, impl="reference") for part in parts]
    for got, wanted in zip(together, reduce(merge_attended, apart), strict=True):
        torch.testing.assert_close(got, wanted)


def test_one_call_for_all_parts_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    query, key, value = random_inputs(1, 2, 64, dim=8)
    near = planning.from_mask(
        torch.eye(4, dtype=torch.bool), q_block=16, k_block=16, num_queries=64, num_keys=64
    )
    far = planning.from_mask(
        ~torch.eye(4, dtype=torch.bool), q_block=16, k_block=1, num_queries=64, num_keys=4
    )
    parts = [
        KeyValuePart(key, value, near),
        KeyValuePart(key[:, :, :4], value[:, :, :4], far, torch.zeros(4)),
    ]
    attend_parts(query, parts, impl="grouped")
    assert reads.shapes == [([2, 1, 16, 8], [2, 1, 19, 8])] * 4


@pytest.mark.parametrize("change", ["rows", "heads"])
def test_parts_of_different_rows_are_read_apart(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    query, key, value = random_inputs(1, 2, 64, dim=8)
    plans = [planning.full(64, q_block=16, k_block=16), planning.full(64, q_block=16, k_block=16)]
    if change == "rows":
        plans[1] = planning.full(64, q_block=32, k_block=16)
    else:
        plans[1] = random_plan(64, 64, q_block=16, k_block=16, heads=2, share=1.0)
    parts = [KeyValuePart(key, value, plan) for plan in plans]
    out, lse = attend_parts(query, parts, impl="grouped")
    assert len(reads.shapes) > 1
    once = nearfield.attend(query, key, value, plans[0], impl="reference")
    torch.testing.assert_close(out, once.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, once.lse + math.log(2), rtol=1e-5, atol=1e-5)


def test_runs_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, plan = random_inputs(1, 2, 64, dim=8), planning.ring(64, 16, q_block=16, k_block=16)
    first = nearfield.attend(*inputs, plan, impl="grouped")
    kept = lists_as_runs.runs_of_rows(plan, 0)
    assert lists_as_runs.runs_of_rows(plan, 0) is kept
    assert torch.equal(nearfield.attend(*inputs, plan, impl="grouped").out, first.out)
    again = planning.ring(64, 16, q_block=16, k_block=16)
    monkeypatch.setattr(lists_as_runs, "_MOST_KEPT_RUNS", 0)
    assert lists_as_runs.runs_of_rows(again, 0) == kept
    assert not again.prepared.runs


@pytest.mark.parametrize("heads", [1, 2])
def test_bits_do_not_depend_on_other_groups(heads: int) -> None:
    """Equal inputs give equal bits however often, which index_add in a fixed order guarantees."""
    call = Call(
        *random_inputs(2, 2, 100, 120, 16),
        random_plan(100, 120, q_block=16, k_block=2, heads=heads, repeats=True),
        random_bias(120),
    )
    first = run(call, "grouped")
    for _ in range(3):
        again = run(call, "grouped")
        assert all(torch.equal(first[name], again[name]) for name in first)
