"""Plan: its views, its transpose, its equality and its errors, against lists written out in plain Python."""

import dataclasses
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nearfield import planning
from nearfield.plan.plan import BLOCKS, Plan

GARBAGE = (-7, 0, 1_000_000)
"""What unused slots hold: nothing may read them."""

property_test = settings(max_examples=50)


class Example(NamedTuple):
    plan: Plan
    lists: list[list[list[list[int]]]]
    """The ids of every row, `[b][h][row]`."""


def plan_of(lists, num_queries, num_keys, q_block=64, k_block=64, slack=0, **options):
    """A plan from lists `[b][h][row]` of ids, with `slack` slots more than the longest list needs."""
    entries = [[[column for row in head for column in row] for head in batch] for batch in lists]
    capacity = slack + max(len(head) for batch in entries for head in batch)
    padded = [
        [head + [GARBAGE[slot % 3] for slot in range(capacity - len(head))] for head in batch]
        for batch in entries
    ]
    offsets = [
        [[sum(map(len, head[:row])) for row in range(len(head) + 1)] for head in batch] for batch in lists
    ]
    int32 = torch.int32
    blocks = torch.tensor(padded, dtype=int32).reshape(len(lists), len(lists[0]), capacity)
    return Plan(
        torch.tensor(offsets, dtype=int32), blocks, q_block, k_block, num_queries, num_keys, **options
    )


@st.composite
def examples(draw):
    """Any valid plan: ragged tails, empty rows, repeated ids, lists of their own per batch and head, slack."""
    q_block, k_block = draw(st.sampled_from(BLOCKS)), draw(st.sampled_from(BLOCKS))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_queries = rows * q_block - draw(st.integers(0, q_block - 1))
    num_keys = columns * k_block - draw(st.integers(0, k_block - 1))
    row = st.lists(st.integers(0, columns - 1), max_size=6).map(sorted)
    lists = [[[draw(row) for _ in range(rows)] for _ in range(heads)] for _ in range(batch)]
    slack = draw(st.integers(0, 3))
    return Example(plan_of(lists, num_queries, num_keys, q_block, k_block, slack), lists)


def oracle_pair_counts(example):
    """How often each query reads each key, one list entry at a time."""
    plan, lists = example
    counts = torch.zeros(len(lists), len(lists[0]), plan.num_queries, plan.num_keys, dtype=torch.int32)
    for b, batch in enumerate(lists):
        for h, head in enumerate(batch):
            for row, ids in enumerate(head):
                for column in ids:
                    queries = slice(row * plan.q_block, (row + 1) * plan.q_block)
                    keys = slice(column * plan.k_block, (column + 1) * plan.k_block)
                    counts[b, h, queries, keys] += 1
    return counts


# -- views -------------------------------------------------------------------------------------------------------------


@given(examples())
@property_test
def test_views_agree_with_the_lists(example):
    plan, lists = example
    expected = oracle_pair_counts(example)
    assert torch.equal(plan.pair_counts(), expected)
    assert torch.equal(plan.to_mask(), expected > 0)
    assert plan.num_pairs == int(expected.sum()) == int(plan.pair_counts().sum())
    assert plan.density == pytest.approx(float(expected.double().mean()))
    assert plan.counts.tolist() == [[[len(ids) for ids in head] for head in batch] for batch in lists]
    assert (plan.num_rows, plan.num_columns) == plan.block_counts().shape[2:]


@given(examples())
@property_test
def test_entry_rows_name_the_row_of_every_slot(example):
    plan, lists = example
    rows, used = plan.entry_rows()
    for b, batch in enumerate(lists):
        for h, head in enumerate(batch):
            expected = [row for row, ids in enumerate(head) for _ in ids]
            unused = plan.layout.capacity - len(expected)
            assert rows[b, h].tolist() == expected + [plan.num_rows] * unused
            assert used[b, h].tolist() == [True] * len(expected) + [False] * unused


def test_repeated_ids_are_counted():
    plan = plan_of([[[[0, 0, 2], [], [1]]]], num_queries=130, num_keys=192)
    assert plan.block_counts().tolist() == [[[[2, 0, 1], [0, 0, 0], [0, 1, 0]]]]
    assert plan.num_pairs == 64 * 64 * 3 + 2 * 64
    assert plan.to_mask().dtype == torch.bool


def test_density_exceeds_one_only_for_repeated_ids():
    assert plan_of([[[[0, 1]]]], num_queries=64, num_keys=100).density == 1.0
    assert plan_of([[[[0, 0, 1, 1]]]], num_queries=64, num_keys=100).density == 2.0
    assert plan_of([[[[]]]], num_queries=64, num_keys=100).density == 0.0


def test_str_states_sizes_and_density():
    plan = plan_of([[[[0, 1], [0]]]], num_queries=128, num_keys=128)
    assert str(plan) == (
        "Plan: 128 queries x 128 keys, blocks 64 x 64, lists for 1 x 1 (batch x heads), "
        "density 0.7500, 12,288 pairs"
    )


# -- transpose ---------------------------------------------------------------------------------------------------------


@given(examples())
@property_test
def test_transpose_exchanges_the_roles(example):
    plan, _ = example
    transposed = plan.transpose()
    assert torch.equal(transposed.pair_counts(), plan.pair_counts().transpose(-1, -2))
    assert (transposed.q_block, transposed.k_block) == (plan.k_block, plan.q_block)
    Plan(transposed.offsets, transposed.blocks, *transposed.layout[3:], check=True)


@given(examples())
@property_test
def test_transpose_twice_is_the_same_plan(example):
    plan, _ = example
    assert plan.transpose().transpose() == plan


def test_transpose_of_lists_too_large_for_32_bits(monkeypatch):
    plans = [
        planning.topk(torch.rand(2, 3, 5, 7), 3, q_block=16, k_block=16, num_queries=70, num_keys=100)
        for _ in range(2)
    ]
    narrow = [plan.transpose() for plan in plans]
    monkeypatch.setattr("nearfield.plan.plan._INT32", 0)
    for plan, want in zip(plans, narrow, strict=True):
        plan.prepared.transpose = None
        assert plan.transpose() == want
        assert plan.transpose().blocks.dtype == torch.int32


def test_transpose_is_made_once():
    plan = plan_of([[[[0], [1]]]], num_queries=128, num_keys=128)
    assert plan.transpose() is plan.transpose()


# -- equality, device, immutability ------------------------------------------------------------------------------------


@given(examples(), st.integers(1, 5))
@property_test
def test_unused_capacity_does_not_tell_plans_apart(example, slack):
    plan, lists = example
    roomier = plan_of(lists, plan.num_queries, plan.num_keys, plan.q_block, plan.k_block, slack)
    assert plan == roomier
    assert roomier == plan
    assert hash(plan) == hash(roomier)


@pytest.mark.parametrize(
    "other",
    [
        plan_of([[[[0], [0]]]], 128, 128),
        plan_of([[[[0, 1], []]]], 128, 128),
        plan_of([[[[0], [1, 1]]]], 128, 128),
        plan_of([[[[0], [1]]]], 127, 128),
        plan_of([[[[0], [1]]]], 128, 127),
        plan_of([[[[0], [1]]]], 128, 256, k_block=128),
        plan_of([[[[0], [1]]]] * 2, 128, 128),
        plan_of([[[[0], [1]]] * 2], 128, 128),
    ],
    ids=["id", "row", "repeat", "queries", "keys", "grain", "batch", "heads"],
)
def test_different_plans_are_unequal(other):
    plan = plan_of([[[[0], [1]]]], 128, 128)
    assert plan != other
    assert other != plan


def test_a_plan_equals_no_other_kind():
    plan = plan_of([[[[0], [1]]]], 128, 128)
    assert plan != "plan"
    assert plan.__eq__("plan") is NotImplemented
    assert len({plan, plan_of([[[[0], [1]]]], 128, 128, slack=3)}) == 1


def test_moving_to_the_same_device_gives_the_plan_itself():
    plan = plan_of([[[[0], [1]]]], 128, 128)
    assert plan.to("cpu") is plan
    assert plan.to(torch.device("cpu")) is plan


def test_moving_to_another_device_keeps_sizes_and_uniformity():
    moved = plan_of([[[[0], [1]]]], 128, 128, uniform=True).to("meta")
    assert moved.device.type == moved.blocks.device.type == "meta"
    assert moved.layout == plan_of([[[[0], [1]]]], 128, 128).layout
    assert moved.uniform


@pytest.mark.parametrize("name", ["offsets", "blocks", "q_block", "num_keys", "uniform", "anything"])
def test_a_plan_is_frozen(name):
    plan = plan_of([[[[0], [1]]]], 128, 128)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(plan, name, None)


# -- preview -----------------------------------------------------------------------------------------------------------


def test_preview_draws_one_cell_per_block():
    plan = plan_of([[[[0], [1, 2], [], [0, 1, 2]]]], num_queries=250, num_keys=192)
    assert plan.preview() == "│█  │\n│ ██│\n│   │\n│███│"


def test_preview_shades_by_the_share_that_is_read():
    lists = [[0], [2, 3, 4, 5, 6, 7, 8, 9], [4, 6, 7, 8, 9], [6, 8, 9]]
    plan = plan_of([[lists]], num_queries=256, num_keys=640)
    assert plan.preview(width=5, height=2) == "│░▒▒▒▒│\n│  ░▓█│"


@given(examples(), st.integers(1, 6), st.integers(1, 6))
@property_test
def test_preview_fits_its_size_and_hides_nothing(example, width, height):
    plan, lists = example
    lines = plan.preview(width, height).split("\n")
    assert len(lines) == min(height, plan.num_rows)
    assert {len(line) for line in lines} == {min(width, plan.num_columns) + 2}
    assert set("".join(lines)) <= set("│ ░▒▓█")
    assert ("".join(lines).strip("│ ") == "") == (not any(lists[0][0]))


@pytest.mark.parametrize("blocks", [3, 7, 10, 11, 13])
def test_preview_of_a_full_plan_is_full(blocks):
    plan = plan_of([[[list(range(blocks))] * blocks]], 64 * blocks, 64 * blocks)
    for size in range(1, blocks + 1):
        assert set(plan.preview(size, size)) <= set("│█\n")


# -- the order of starting ---------------------------------------------------------------------------------------------


@given(examples(), st.integers(1, 2))
@property_test
def test_longest_first_is_a_permutation_in_which_no_long_row_comes_late(example, repeats):
    plan, lists = example
    batch, heads = len(lists) * (repeats if len(lists) == 1 else 1), len(lists[0])
    order = plan.longest_first(batch, heads)
    assert order.dtype == torch.int32
    assert sorted(order.tolist()) == list(range(batch * heads * plan.num_rows))
    counts = plan.counts.expand(batch, heads, -1).flatten()[order.long()].clamp(min=1).tolist()
    for earlier, later in itertools.pairwise(counts):
        assert later <= earlier * math.sqrt(2) + 1e-6


def test_longest_first_keeps_similar_rows_grouped_by_head():
    lists = [[[[0], [0] * 8, [0] * 7, []], [[0], [0] * 8, [0] * 8, [0]]]]
    plan = plan_of(lists, num_queries=256, num_keys=64)
    assert plan.longest_first(1, 2).tolist() == [1, 2, 5, 6, 0, 3, 4, 7]


def test_longest_first_serves_every_batch_and_head_of_a_broadcast_plan():
    plan = plan_of([[[[0], [0] * 8]]], num_queries=128, num_keys=64)
    assert plan.longest_first(1, 3).tolist() == [1, 3, 5, 0, 2, 4]
    assert plan.longest_first(2, 1).tolist() == [1, 3, 0, 2]
    assert plan.longest_first(2, 1) is plan.longest_first(2, 1)


def test_longest_first_has_nothing_to_say_about_a_uniform_plan():
    assert plan_of([[[[0], [0]]]], num_queries=128, num_keys=64, uniform=True).longest_first(1, 1) is None


# -- errors ------------------------------------------------------------------------------------------------------------


def int32(*values):
    return torch.tensor([[values]], dtype=torch.int32)


GOOD = {
    "offsets": int32(0, 2, 3),
    "blocks": int32(0, 1, 1),
    "q_block": 64,
    "k_block": 64,
    "num_queries": 128,
    "num_keys": 100,
}

BAD = [
    ({"q_block": 48}, ValueError, "`q_block` must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192; got 48."),
    ({"k_block": 0}, ValueError, "`k_block` must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192; got 0."),
    ({"num_queries": 0}, ValueError, "`num_queries` must be at least 1; got 0."),
    ({"num_queries": True}, TypeError, "`num_queries` must be an integer; got bool."),
    ({"num_keys": 99.0}, TypeError, "`num_keys` must be an integer; got float."),
    ({"offsets": [0, 2, 3]}, TypeError, "`offsets` must be a tensor; got list."),
    ({"offsets": int32(0, 2, 3)[0]}, ValueError, "`offsets` must have 3 dimensions; got shape [1, 3]."),
    ({"blocks": int32(0, 1, 1)[0, 0]}, ValueError, "`blocks` must have 3 dimensions; got shape [3]."),
    (
        {"blocks": int32(0, 1, 1).long()},
        TypeError,
        "`blocks` must be int32; got torch.int64. Convert it with `.to(torch.int32)`.",
    ),
    (
        {"offsets": int32(0, 2, 3).repeat(2, 1, 1)},
        ValueError,
        "`offsets` must have the batch and heads of `blocks`; got [2, 1, 3] and [1, 1, 3].",
    ),
    (
        {"offsets": int32(0, 3)},
        ValueError,
        "`offsets` must end in ceil(num_queries / q_block) + 1 = 3; got [1, 1, 2].",
    ),
    (
        {"offsets": int32(0, 2, 3).to("meta")},
        ValueError,
        "`offsets` must be on the device of `blocks` (cpu); got meta.",
    ),
    (
        {"offsets": int32(1, 2, 3)},
        ValueError,
        "`offsets` must ascend from 0; got [1, 2, 3]. First values shown.",
    ),
    (
        {"offsets": int32(0, 3, 2)},
        ValueError,
        "`offsets` must ascend from 0; got [0, 3, 2]. First values shown.",
    ),
    ({"offsets": int32(0, 2, 4)}, ValueError, "`offsets` must end within `blocks` (capacity 3); got 4."),
    (
        {"blocks": int32(0, 2, 1)},
        ValueError,
        "`blocks` must hold ids from 0 to 1 (ceil(num_keys / k_block) - 1); got 2.",
    ),
    (
        {"blocks": int32(0, 1, -1)},
        ValueError,
        "`blocks` must hold ids from 0 to 1 (ceil(num_keys / k_block) - 1); got -1.",
    ),
    (
        {"offsets": int32(0, 1, 3), "blocks": int32(1, 1, 0)},
        ValueError,
        "`blocks` must ascend inside each row; got a descent in row 1. "
        "Sort each row's ids; reading order does not change the result.",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), BAD)
def test_bad_plans_are_refused(change, kind, message):
    with pytest.raises(kind) as caught:
        Plan(**{**GOOD, **change})
    assert str(caught.value) == message


def test_the_good_call_of_the_table_is_good():
    assert Plan(**GOOD).num_pairs == 64 * 100 + 64 * 36


def test_lists_are_not_read_where_check_is_off():
    meta = {name: GOOD[name].to("meta") for name in ("offsets", "blocks")}
    assert Plan(**{**GOOD, **meta}, check=False).layout == Plan(**GOOD).layout


@pytest.mark.parametrize("uniform", [False, True])
def test_a_plan_of_known_lists_is_what_checks_would_have_given(uniform):
    plan, known = Plan(**GOOD, uniform=uniform), Plan.of_known(**GOOD, uniform=uniform)
    assert known == plan
    assert vars(known).keys() == vars(plan).keys()
    assert (known.uniform, known.layout) == (plan.uniform, plan.layout)
    assert (known.extent.shape, known.extent.dtype) == (plan.extent.shape, plan.extent.dtype)


def test_a_plan_of_known_lists_steps_through_them_by_one():
    apart = {name: GOOD[name].repeat_interleave(2, -1)[..., ::2] for name in ("offsets", "blocks")}
    assert not any(lists.is_contiguous() for lists in apart.values())
    known = Plan.of_known(**{**GOOD, **apart})
    assert known == Plan(**GOOD)
    assert known.offsets.is_contiguous()
    assert known.blocks.is_contiguous()
