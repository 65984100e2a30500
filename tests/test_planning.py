"""Builders of plans against oracles that decide one token, or one row, at a time."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nearfield import planning
from nearfield.plan.plan import BLOCKS, Plan

LARGE = 66_048
"""Tokens of a 4096 x 4096 image (65,536) and its text (512)."""

property_test = settings(max_examples=80)
small_blocks = st.sampled_from([1, 2, 4, 8, 16])


def assert_well_formed(plan):
    """What builders promise: lists that pass every check, on contiguous memory, unused slots zero."""
    Plan(plan.offsets, plan.blocks, *plan.layout[3:], check=True)
    assert plan.blocks.is_contiguous()
    _, used = plan.entry_rows()
    assert not plan.blocks[~used].any()
    if plan.uniform:
        assert (plan.counts == plan.counts[0, 0, 0]).all()


def block_cover(pairs, q_block, k_block):
    """The smallest block pattern over the token pattern `[queries, keys]`, as tokens again."""
    cover = torch.zeros_like(pairs)
    for query in range(0, len(pairs), q_block):
        for key in range(0, pairs.shape[1], k_block):
            cell = slice(query, query + q_block), slice(key, key + k_block)
            cover[cell] = pairs[cell].any()
    return cover


def sizes_of(scores, q_block=16, k_block=8):
    """Builder arguments for a tensor `[..., rows, columns]`, ragged on both sides."""
    rows, columns = scores.shape[-2:]
    return {
        "q_block": q_block,
        "k_block": k_block,
        "num_queries": rows * q_block - q_block // 2,
        "num_keys": columns * k_block - k_block // 2,
    }


def row_lists(plan):
    """The ids of every row, `[b][h][row]`."""
    return [
        [
            [ids[begin:end].tolist() for begin, end in itertools.pairwise(cuts)]
            for ids, cuts in zip(batch_ids, batch_cuts.tolist(), strict=True)
        ]
        for batch_ids, batch_cuts in zip(plan.blocks, plan.offsets, strict=True)
    ]


# -- full --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.none() | st.integers(1, 200), st.sampled_from(BLOCKS), st.sampled_from(BLOCKS))
@settings(max_examples=40)
def test_full_reads_every_pair_once(num_queries, num_keys, q_block, k_block):
    plan = planning.full(num_queries, num_keys, q_block=q_block, k_block=k_block)
    assert_well_formed(plan)
    assert plan.uniform
    assert (plan.num_queries, plan.num_keys) == (num_queries, num_keys or num_queries)
    assert (plan.block_counts() == 1).all()
    assert plan.num_pairs == plan.num_queries * plan.num_keys


# -- ring --------------------------------------------------------------------------------------------------------------


def ring_oracle(length, run, *, shift=0, ring=None, both=(), keys=(), num_keys=None):
    """Which token reads which key, `[length, num_keys]`, by the definition."""
    num_keys = num_keys or length
    start, stop = ring or (0, length)
    n = stop - start

    def run_of(token):
        return (token - start - shift) % n // run if start <= token < stop else None

    def within(token, spans):
        return any(first <= token < last for first, last in spans)

    def reads(query, key):
        if within(query, both):
            return key < length
        same_run = run_of(query) is not None and key < length and run_of(query) == run_of(key)
        return same_run or within(key, both) or within(key, keys)

    return torch.tensor([[reads(query, key) for key in range(num_keys)] for query in range(length)])


@st.composite
def ring_arguments(draw, unit=1):
    """Arguments of `ring` in multiples of `unit` tokens: overlapping spans, tails, extra keys, any shift."""
    before, n, after = draw(st.integers(0, 6)), draw(st.integers(1, 24)), draw(st.integers(0, 6))
    length = before + n + after
    extra = draw(st.integers(0, 5))

    def spans(limit):
        ends = st.tuples(st.integers(0, limit), st.integers(0, limit)).map(sorted).map(tuple)
        return draw(st.lists(ends, max_size=3))

    both, keys = spans(length), spans(length + extra)
    for span in [(0, before), (before + n, length)]:
        draw(st.sampled_from([both, keys])).append(span)
    keys.append((length, length + extra))
    arguments = {
        "length": length,
        "run": draw(st.integers(1, 30)),
        "shift": draw(st.integers(0, 60)),
        "ring": (before, before + n),
        "both": both,
        "keys": keys,
        "num_keys": length + extra,
    }
    scaled = {name: value * unit for name, value in arguments.items() if isinstance(value, int)}
    scaled["ring"] = tuple(end * unit for end in arguments["ring"])
    for name in ("both", "keys"):
        scaled[name] = [(start * unit, stop * unit) for start, stop in arguments[name]]
    return scaled


@given(ring_arguments(), small_blocks, small_blocks)
@settings(max_examples=200)
def test_ring_is_the_smallest_block_cover_of_the_pattern(arguments, q_block, k_block):
    plan = planning.ring(**arguments, q_block=q_block, k_block=k_block)
    assert_well_formed(plan)
    expected = block_cover(ring_oracle(**arguments), q_block, k_block)
    assert torch.equal(plan.pair_counts()[0, 0], expected.int())


@given(ring_arguments(unit=4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
@settings(max_examples=40)
def test_aligned_ring_is_exactly_the_pattern(arguments, q_block, k_block):
    plan = planning.ring(**arguments, q_block=q_block, k_block=k_block)
    assert torch.equal(plan.pair_counts()[0, 0], ring_oracle(**arguments).int())


def test_ring_without_shift_is_block_diagonal():
    plan = planning.ring(256, 128, q_block=64, k_block=64)
    assert row_lists(plan) == [[[[0, 1], [0, 1], [2, 3], [2, 3]]]]
    assert plan.uniform


def test_the_last_run_of_a_shifted_ring_wraps_round():
    plan = planning.ring(384, 128, shift=64, q_block=64, k_block=64)
    assert row_lists(plan) == [[[[0, 5], [1, 2], [1, 2], [3, 4], [3, 4], [0, 5]]]]


def test_the_wrap_stays_inside_the_ring():
    plan = planning.ring(384, 128, shift=64, ring=(64, 320), both=[(0, 64)], keys=[(320, 384)], q_block=64)
    text, far = 0, 5
    assert row_lists(plan) == [
        [
            [
                [0, 1, 2, 3, 4, 5],
                [text, 1, 4, far],
                [text, 2, 3, far],
                [text, 2, 3, far],
                [text, 1, 4, far],
                [0, 5],
            ]
        ]
    ]
    assert not plan.uniform


def test_a_run_that_does_not_divide_the_ring_leaves_a_shorter_last_one():
    assert row_lists(planning.ring(5, 2, q_block=1, k_block=1)) == [[[[0, 1], [0, 1], [2, 3], [2, 3], [4]]]]
    shifted = planning.ring(5, 2, shift=1, q_block=1, k_block=1)
    assert row_lists(shifted) == [[[[0], [1, 2], [1, 2], [3, 4], [3, 4]]]]


def test_shifting_by_the_whole_ring_changes_nothing():
    plan = planning.ring(300, 32, shift=7, ring=(20, 300), both=[(0, 20)], q_block=16, k_block=16)
    assert plan == planning.ring(
        300, 32, shift=7 + 280, ring=(20, 300), both=[(0, 20)], q_block=16, k_block=16
    )


def test_a_run_of_the_whole_ring_is_full():
    assert planning.ring(1000, 1000) == planning.full(1000)
    assert planning.ring(1000, 5000, shift=77) == planning.full(1000)
    assert planning.ring(1000, 10, both=[(0, 1000)]) == planning.full(1000)


def test_spans_may_repeat_overlap_and_be_empty():
    plan = planning.ring(
        64, 8, both=[(0, 16), (8, 16), (30, 30)], keys=[(0, 16), (40, 48), (40, 44)], q_block=8, k_block=8
    )
    assert plan == planning.ring(64, 8, both=[(0, 16)], keys=[(40, 48)], q_block=8, k_block=8)


def test_keys_without_queries_are_read_by_those_who_do_not_read_everything():
    plan = planning.ring(
        8, 4, ring=(2, 8), both=[(0, 2)], keys=[(8, 9)], num_keys=9, q_block=2, k_block=1, shift=0
    )
    assert row_lists(plan) == [
        [
            [
                [0, 1, 2, 3, 4, 5, 6, 7],
                [0, 1, 2, 3, 4, 5, 8],
                [0, 1, 2, 3, 4, 5, 8],
                [0, 1, 6, 7, 8],
            ]
        ]
    ]


def test_ring_knows_whether_its_rows_are_equally_long():
    assert planning.ring(512, 128, shift=64, keys=[(0, 512)], q_block=64).uniform
    assert not planning.ring(512, 128, both=[(0, 64)], q_block=64).uniform
    assert not planning.ring(512, 128, keys=[(0, 64)], q_block=64).uniform


# -- from_spans --------------------------------------------------------------------------------------------------------


@st.composite
def spans_of_rows(draw):
    """Starts and stops `[rows, spans]` in any order, overlapping, empty or backwards, and the sizes of a plan."""
    q_block, k_block = draw(small_blocks), draw(small_blocks)
    num_queries, num_keys = draw(st.integers(1, 40)), draw(st.integers(1, 60))
    rows, spans = -(-num_queries // q_block), draw(st.integers(1, 5))
    end = st.integers(0, num_keys)
    ends = st.lists(st.lists(end, min_size=spans, max_size=spans), min_size=rows, max_size=rows)
    sizes = {"q_block": q_block, "k_block": k_block, "num_queries": num_queries, "num_keys": num_keys}
    return torch.tensor(draw(ends)), torch.tensor(draw(ends)), sizes


@given(spans_of_rows())
@settings(max_examples=200)
def test_from_spans_reads_the_union_rounded_to_blocks(example):
    starts, stops, sizes = example
    plan = planning.from_spans(starts, stops, **sizes)
    assert_well_formed(plan)
    read = torch.zeros(sizes["num_queries"], sizes["num_keys"], dtype=torch.bool)
    for query in range(sizes["num_queries"]):
        row = query // sizes["q_block"]
        for start, stop in zip(starts[row].tolist(), stops[row].tolist(), strict=True):
            read[query, start:stop] = True
    expected = block_cover(read, sizes["q_block"], sizes["k_block"])
    assert torch.equal(plan.pair_counts()[0, 0], expected.int())


def test_from_spans_keeps_its_arguments():
    starts, stops = torch.tensor([[40, 0], [9, 9]]), torch.tensor([[50, 20], [30, 9]])
    copies = starts.clone(), stops.clone()
    plan = planning.from_spans(starts, stops, **SIZES)
    assert row_lists(plan) == [[[[0, 1, 2, 3], [0, 1]]]]
    assert torch.equal(starts, copies[0])
    assert torch.equal(stops, copies[1])


def test_from_spans_knows_whether_its_rows_are_equally_long():
    starts = torch.tensor([[0], [16]])
    assert planning.from_spans(starts, starts + 16, **SIZES).uniform
    assert not planning.from_spans(starts, starts * 0 + 32, **SIZES).uniform


# -- from_mask ---------------------------------------------------------------------------------------------------------


@st.composite
def masks(draw):
    shape = draw(st.tuples(*[st.integers(1, top) for top in (3, 3, 5, 6)]))
    share = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return torch.rand(shape, generator=generator) < share


@given(masks())
@property_test
def test_from_mask_gives_the_mask_back(mask):
    plan = planning.from_mask(mask, **sizes_of(mask))
    assert_well_formed(plan)
    assert torch.equal(plan.block_counts(), mask.int())
    assert plan.layout.capacity == int(mask.sum(dim=(2, 3)).max())
    assert plan.uniform == (len(mask.sum(dim=-1).unique()) == 1)


@given(masks())
@property_test
def test_every_block_mask_of_a_plan_rebuilds_it(mask):
    plan = planning.from_mask(mask, **sizes_of(mask))
    assert planning.from_mask(plan.block_counts() > 0, **sizes_of(mask)) == plan


def test_masks_may_lack_leading_dimensions():
    mask = torch.tensor([[True, False, True], [False, True, True]])
    plan = planning.from_mask(mask, **sizes_of(mask))
    assert row_lists(plan) == [[[[0, 2], [1, 2]]]]
    heads = torch.stack([mask, ~mask])
    assert row_lists(planning.from_mask(heads, **sizes_of(mask))) == [[[[0, 2], [1, 2]], [[1], [0]]]]


def test_masks_may_be_views():
    mask = torch.tensor([[True, False, True], [False, True, True]]).T
    assert row_lists(planning.from_mask(mask, **sizes_of(mask))) == [[[[0], [1], [0, 1]]]]
    shared = mask.expand(2, 2, 3, 2)
    assert torch.equal(planning.from_mask(shared, **sizes_of(mask)).block_counts(), shared.int())


# -- topk --------------------------------------------------------------------------------------------------------------


def topk_oracle(scores, k):
    """The ids of one row: best first by score then by id, unreadable ones never, then ascending."""
    readable = [(-score, column) for column, score in enumerate(scores) if score > -math.inf]
    return sorted(column for _, column in sorted(readable)[:k])


score_values = st.sampled_from([-math.inf, math.inf, math.nan, -1.5, -0.0, 0.0, 1.0, 2.0, 3.5])


@st.composite
def score_tensors(draw):
    batch, heads, rows, columns = draw(st.tuples(*[st.integers(1, top) for top in (2, 2, 4, 7)]))
    values = st.lists(score_values, min_size=columns, max_size=columns)
    lists = [[[draw(values) for _ in range(rows)] for _ in range(heads)] for _ in range(batch)]
    return torch.tensor(lists, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))


@given(score_tensors(), st.integers(1, 9))
@settings(max_examples=150)
def test_topk_picks_the_best_columns(scores, k):
    plan = planning.topk(scores, k, **sizes_of(scores))
    assert_well_formed(plan)
    assert row_lists(plan) == [
        [[topk_oracle(row, k) for row in head] for head in batch] for batch in scores.tolist()
    ]
    assert plan.layout.capacity == scores.shape[2] * min(k, scores.shape[3])


@pytest.mark.parametrize(
    ("row", "k", "ids"),
    [
        ([0.1, 0.9, 0.5], 2, [1, 2]),
        ([0.1, 0.9, 0.5], 99, [0, 1, 2]),
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),
        ([0.0, 1.0, 0.0, 1.0, 0.0], 3, [0, 1, 3]),
        ([-math.inf, 1.0, -math.inf], 2, [1]),
        ([-math.inf, -math.inf], 1, []),
        ([math.nan, 1.0, math.nan, 2.0], 3, [1, 3]),
        ([math.nan, math.nan], 2, []),
        ([math.inf, math.nan, 3.0], 1, [0]),
    ],
    ids=["best", "all", "ties", "ties behind", "-inf", "only -inf", "NaN", "only NaN", "+inf"],
)
def test_topk_of_one_row(row, k, ids):
    scores = torch.tensor([row])
    assert row_lists(planning.topk(scores, k, **sizes_of(scores))) == [[[ids]]]


def test_many_ties_go_to_the_lower_ids():
    scores = torch.zeros(3, 5000)
    assert row_lists(planning.topk(scores, 17, **sizes_of(scores))) == [[[list(range(17))] * 3]]


def test_topk_takes_no_part_in_differentiation():
    scores = torch.randn(1, 2, 3, 4, requires_grad=True)
    plan = planning.topk(scores, 2, **sizes_of(scores))
    assert not plan.blocks.requires_grad
    assert plan.layout[:2] == (1, 2)


# -- key_lists ---------------------------------------------------------------------------------------------------------


@st.composite
def padded_lists(draw, columns=9):
    """Lists `[b][h][row]`, and the same padded with garbage."""
    batch, heads, rows = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 4)))
    width = draw(st.integers(0, 6))
    row = st.lists(st.integers(0, columns - 1), max_size=width).map(sorted)
    lists = [[[draw(row) for _ in range(rows)] for _ in range(heads)] for _ in range(batch)]
    padding = draw(st.sampled_from([-1, 0, 10**6]))
    padded = [[[ids + [padding] * (width - len(ids)) for ids in head] for head in part] for part in lists]
    counts = [[[len(ids) for ids in head] for head in part] for part in lists]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    keys = torch.tensor(padded, dtype=dtype).reshape(batch, heads, rows, width)
    return lists, keys, torch.tensor(counts, dtype=dtype)


@given(padded_lists(), st.booleans(), st.sampled_from([1, 8]))
@property_test
def test_key_lists_close_the_gaps(example, check, k_block):
    lists, keys, counts = example
    plan = planning.key_lists(
        keys,
        counts,
        q_block=16,
        k_block=k_block,
        num_queries=16 * keys.shape[2] - 3,
        num_keys=9 * k_block - k_block // 2,
        check=check,
    )
    assert_well_formed(plan)
    assert row_lists(plan) == lists
    assert plan.layout.capacity == keys.shape[2] * keys.shape[3]


def test_key_lists_accept_any_memory_layout():
    keys = torch.arange(24).reshape(4, 3, 2, 1).permute(3, 2, 1, 0)
    counts = torch.tensor([4, 1, 0]).expand(1, 2, 3)
    plan = planning.key_lists(keys, counts, q_block=16, num_queries=48, num_keys=24)
    assert_well_formed(plan)
    assert row_lists(plan) == [[[[0, 6, 12, 18], [2], []], [[1, 7, 13, 19], [3], []]]]


# -- devices, and not waiting for them ---------------------------------------------------------------------------------


def test_topk_never_waits_for_the_device():
    scores = torch.randn(2, 3, 4, 5)
    planning.topk(
        scores, 3, **sizes_of(scores)
    ).transpose()  # what it keeps is real, and must not get in the way
    with FakeTensorMode():
        scores = torch.randn(2, 3, 4, 5)
        plan = planning.topk(scores, 3, **sizes_of(scores))
        transposed = plan.transpose()
    assert plan.layout.capacity == transposed.layout.capacity == 12


def test_key_lists_wait_for_the_device_only_to_check():
    with FakeTensorMode():
        keys, counts = torch.zeros(2, 3, 4, 5, dtype=torch.int32), torch.zeros(2, 3, 4, dtype=torch.int32)
        sizes = {"q_block": 16, "num_queries": 64, "num_keys": 100}
        plan = planning.key_lists(keys, counts, **sizes, check=False)
        with pytest.raises(DataDependentOutputException):
            planning.key_lists(keys, counts, **sizes)
    assert plan.layout.capacity == 20


def spans_build(length, device=None):
    starts = torch.zeros(-(-length // 64), 1, dtype=torch.int64, device="cpu")
    sizes = {"q_block": 64, "k_block": 64, "num_queries": length, "num_keys": length}
    return planning.from_spans(starts, starts + length, **sizes, device=device)


@pytest.mark.parametrize(
    "build",
    [planning.full, lambda length, device=None: planning.ring(length, 64, device=device), spans_build],
)
def test_layout_plans_read_nothing_back_from_the_device(build):
    """On the meta device nothing can be read back: what the host needs, the host must have computed."""
    assert build(500, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert build(500).device.type == "meta"
        assert build(500, device="cpu") == build(500, device="cpu")
    assert build(500).device == torch.get_default_device()


# -- size --------------------------------------------------------------------------------------------------------------


def test_a_large_ring_is_built():
    text, run = 512, 4096
    plan = planning.ring(LARGE, run, shift=1024, ring=(text, LARGE), both=[(0, text)])
    image_rows, text_rows = (LARGE - text) // 128, text // 128
    columns = LARGE // 64
    assert plan.layout.capacity == text_rows * columns + image_rows * (run + text) // 64
    assert plan.num_pairs == text * LARGE + (LARGE - text) * (run + text)


def test_a_large_full_plan_is_built():
    assert planning.full(LARGE).num_pairs == LARGE**2


def test_a_large_topk_is_built():
    scores = torch.randn(2, LARGE // 128, LARGE // 64, generator=torch.Generator().manual_seed(0))
    plan = planning.topk(scores, 100, q_block=128, k_block=64, num_queries=LARGE, num_keys=LARGE)
    assert plan.num_pairs == 2 * LARGE * 100 * 64


# -- errors ------------------------------------------------------------------------------------------------------------

SIZES = {"q_block": 16, "k_block": 16, "num_queries": 32, "num_keys": 50}
MASK = torch.ones(2, 4, dtype=torch.bool)
SPANS = torch.zeros(2, 1, dtype=torch.int64)
KEYS, COUNTS = torch.tensor([[[[0, 1], [2, 3]]]]), torch.tensor([[[2, 2]]])
BLOCK_RULE = "must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192"

BAD = [
    (lambda: planning.full(0), ValueError, "`num_queries` must be at least 1; got 0."),
    (lambda: planning.full(5, 0), ValueError, "`num_keys` must be at least 1; got 0."),
    (lambda: planning.full(5, q_block=0), ValueError, f"`q_block` {BLOCK_RULE}; got 0."),
    (lambda: planning.full(5, k_block="64"), TypeError, "`k_block` must be an integer; got str."),
    (lambda: planning.ring(0, 1), ValueError, "`length` must be at least 1; got 0."),
    (lambda: planning.ring(9.0, 1), TypeError, "`length` must be an integer; got float."),
    (lambda: planning.ring(9, 1, k_block=3), ValueError, f"`k_block` {BLOCK_RULE}; got 3."),
    (lambda: planning.ring(9, 0), ValueError, "`run` must be at least 1; got 0."),
    (lambda: planning.ring(9, 2.5), TypeError, "`run` must be an integer; got float."),
    (lambda: planning.ring(9, 3, shift=-1), ValueError, "`shift` must be at least 0; got -1."),
    (
        lambda: planning.ring(9, 3, num_keys=8),
        ValueError,
        "`num_keys` must be at least `length` (9); got 8.",
    ),
    (
        lambda: planning.ring(9, 3, ring=(0, 10)),
        ValueError,
        "`ring` must hold 0 <= start <= stop <= 9; got (0, 10).",
    ),
    (
        lambda: planning.ring(9, 3, ring=(4, 4)),
        ValueError,
        "`ring` must hold at least one token; got (4, 4).",
    ),
    (lambda: planning.ring(9, 3, ring=9), TypeError, "`ring` must hold integers (start, stop); got 9."),
    (
        lambda: planning.ring(9, 3, both=(0, 4)),
        TypeError,
        "`both` must hold integers (start, stop); got 0. Write ((start, stop),) for a single span.",
    ),
    (
        lambda: planning.ring(9, 3, both=[(0, 1.5)]),
        TypeError,
        "`both` must hold integers (start, stop); got (0, 1.5). Write ((start, stop),) for a single span.",
    ),
    (
        lambda: planning.ring(9, 3, both=[(5, 4)]),
        ValueError,
        "`both` must hold 0 <= start <= stop <= 9; got (5, 4).",
    ),
    (
        lambda: planning.ring(9, 3, both=[(9, 10)], num_keys=10),
        ValueError,
        "`both` must hold 0 <= start <= stop <= 9; got (9, 10).",
    ),
    (
        lambda: planning.ring(9, 3, keys=[(-1, 4)]),
        ValueError,
        "`keys` must hold 0 <= start <= stop <= 9; got (-1, 4).",
    ),
    (
        lambda: planning.ring(9, 3, keys=5),
        TypeError,
        "`keys` must be a sequence of spans (start, stop); got int.",
    ),
    (
        lambda: planning.ring(9, 3, ring=(2, 9), both=[(0, 1)]),
        ValueError,
        "`ring` must cover every token, together with `both` and `keys`; got token 1 in none of them. "
        "Put it on the ring, or name it in `both` or `keys`.",
    ),
    (
        lambda: planning.ring(9, 3, num_keys=12, keys=[(9, 11)]),
        ValueError,
        "`keys` must hold every key past `length` (9); got key 11 in none of its spans.",
    ),
    (
        lambda: planning.from_spans([[0]], SPANS, **SIZES),
        TypeError,
        "`starts` must be a tensor; got list.",
    ),
    (
        lambda: planning.from_spans(SPANS[0], SPANS, **SIZES),
        ValueError,
        "`starts` must have 2 dimensions; got shape [1].",
    ),
    (
        lambda: planning.from_spans(SPANS, SPANS.int(), **SIZES),
        TypeError,
        "`stops` must be int64; got torch.int32.",
    ),
    (
        lambda: planning.from_spans(SPANS[:1], SPANS, **SIZES),
        ValueError,
        "`starts` must be [2, at least 1]: a row for each of ceil(num_queries / q_block); got shape [1, 1].",
    ),
    (
        lambda: planning.from_spans(SPANS[:, :0], SPANS, **SIZES),
        ValueError,
        "`starts` must be [2, at least 1]: a row for each of ceil(num_queries / q_block); got shape [2, 0].",
    ),
    (
        lambda: planning.from_spans(SPANS, SPANS + 51, **SIZES),
        ValueError,
        "`stops` must lie from 0 to `num_keys` (50); got [51, 51].",
    ),
    (
        lambda: planning.from_spans(SPANS - 1, SPANS, **SIZES),
        ValueError,
        "`starts` must lie from 0 to `num_keys` (50); got [-1, -1].",
    ),
    (
        lambda: planning.from_spans(SPANS, SPANS.expand(2, 3), **SIZES),
        ValueError,
        "`stops` must have the shape of `starts` [2, 1]; got shape [2, 3].",
    ),
    (
        lambda: planning.from_spans(SPANS, SPANS, **{**SIZES, "k_block": 3}),
        ValueError,
        f"`k_block` {BLOCK_RULE}; got 3.",
    ),
    (lambda: planning.from_mask([[True]], **SIZES), TypeError, "`mask` must be a tensor; got list."),
    (
        lambda: planning.from_mask(MASK[0], **SIZES),
        ValueError,
        "`mask` must be [rows, columns], [h, rows, columns] or [b, h, rows, columns]; got shape [4].",
    ),
    (
        lambda: planning.from_mask(MASK.T, **SIZES),
        ValueError,
        "`mask` must end in [2, 4]; got shape [4, 2]. "
        "These are ceil(num_queries / q_block) rows and ceil(num_keys / k_block) columns.",
    ),
    (
        lambda: planning.from_mask(MASK.expand(0, 2, 4), **SIZES),
        ValueError,
        "`mask` must have at least one batch and one head; got shape [0, 2, 4].",
    ),
    (
        lambda: planning.from_mask(MASK.int(), **SIZES),
        TypeError,
        "`mask` must be bool; got torch.int32. Compare it first, as in `mask > 0`.",
    ),
    (
        lambda: planning.from_mask(MASK, **{**SIZES, "num_queries": 0}),
        ValueError,
        "`num_queries` must be at least 1; got 0.",
    ),
    (
        lambda: planning.topk(MASK.float()[:1], 2, **SIZES),
        ValueError,
        "`scores` must end in [2, 4]; got shape [1, 4]. "
        "These are ceil(num_queries / q_block) rows and ceil(num_keys / k_block) columns.",
    ),
    (
        lambda: planning.topk(MASK.int(), 2, **SIZES),
        TypeError,
        "`scores` must be floating point; got torch.int32. Convert it with `.float()`.",
    ),
    (lambda: planning.topk(MASK.float(), 0, **SIZES), ValueError, "`k` must be at least 1; got 0."),
    (
        lambda: planning.topk(MASK.float(), 0.5, **SIZES),
        TypeError,
        "`k` must be an integer; got float.",
    ),
    (
        lambda: planning.key_lists(KEYS[0], COUNTS, **SIZES),
        ValueError,
        "`keys` must have 4 dimensions; got shape [1, 2, 2].",
    ),
    (
        lambda: planning.key_lists(KEYS, COUNTS[0], **SIZES),
        ValueError,
        "`counts` must have 3 dimensions; got shape [1, 2].",
    ),
    (
        lambda: planning.key_lists(KEYS.float(), COUNTS, **SIZES),
        TypeError,
        "`keys` must be integers; got torch.float32.",
    ),
    (
        lambda: planning.key_lists(KEYS, COUNTS.bool(), **SIZES),
        TypeError,
        "`counts` must be integers; got torch.bool.",
    ),
    (
        lambda: planning.key_lists(KEYS[:, :, :1], COUNTS[:, :, :1], **SIZES),
        ValueError,
        "`keys` must have ceil(num_queries / q_block) = 2 rows; got shape [1, 1, 1, 2].",
    ),
    (
        lambda: planning.key_lists(KEYS, COUNTS.expand(1, 3, 2), **SIZES),
        ValueError,
        "`counts` must have the batch, heads and rows of `keys` [1, 1, 2]; got shape [1, 3, 2].",
    ),
    (
        lambda: planning.key_lists(KEYS, COUNTS.to("meta"), **SIZES),
        ValueError,
        "`counts` must be on the device of `keys` (cpu); got meta. Move it with `.to(device)`.",
    ),
    (
        lambda: planning.key_lists(KEYS, COUNTS + 1, **SIZES),
        ValueError,
        "`counts` must be from 0 to the width of `keys` (2); got 3.",
    ),
    (
        lambda: planning.key_lists(KEYS, COUNTS - 3, **SIZES),
        ValueError,
        "`counts` must be from 0 to the width of `keys` (2); got -1.",
    ),
    (
        lambda: planning.key_lists(KEYS + 1, COUNTS, **SIZES),
        ValueError,
        "`keys` must hold ids from 0 to 3 (ceil(num_keys / k_block) - 1); got 4.",
    ),
    (
        lambda: planning.key_lists(KEYS - 1, COUNTS, **SIZES),
        ValueError,
        "`keys` must hold ids from 0 to 3 (ceil(num_keys / k_block) - 1); got -1.",
    ),
    (
        lambda: planning.key_lists(KEYS.flip(-1), torch.tensor([[[1, 2]]]), **SIZES),
        ValueError,
        "`keys` must ascend inside each row; got a descent in row 1. "
        "Sort each row's ids; reading order does not change the result.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[message[:48] for _, _, message in BAD])
def test_bad_calls_are_refused(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_the_arguments_of_the_table_are_good():
    assert planning.from_mask(MASK, **SIZES).density == 1.0
    assert planning.from_spans(SPANS, SPANS + 50, **SIZES).density == 1.0
    assert planning.topk(MASK.float(), 4, **SIZES).density == 1.0
    assert planning.key_lists(KEYS, COUNTS, **SIZES).counts.tolist() == COUNTS.tolist()
    assert planning.ring(9, 3, both=[(0, 4)], keys=[(2, 9)], ring=(1, 9)).num_pairs == 81


def test_lists_of_a_mask_are_a_proper_operator() -> None:
    mask = torch.rand(2, 1, 3, 5) > 0.5
    offsets = torch.nn.functional.pad(mask.sum(-1).cumsum(-1), (1, 0)).to(torch.int32)
    torch.library.opcheck(torch.ops.nearfield.lists_of, (mask, offsets, 15))
