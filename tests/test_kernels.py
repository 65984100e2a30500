"""The smaller kernels beside their references: pooling, choosing, weights per block. Needs no hypothesis."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from tests.attending import NEEDS_TRITON, assert_budget, random_plan
from torch import Tensor

from nearfield import LogLinear, Plan, attend_with
from nearfield.cli.check import poisoned_memory
from nearfield.cli.timing import captured
from nearfield.layout.levels import level_starts
from nearfield.methods.loglinear import _attend
from nearfield.ops.lists import reference as lists_reference
from nearfield.ops.pool_select.reference import select as select_reference
from nearfield.ops.predict import api as predict
from nearfield.ops.predict.api import Blocks
from nearfield.ops.predict.reference import choose as choose_reference
from nearfield.ops.predict.reference import columns as columns_reference
from nearfield.ops.predict.reference import means as means_reference
from nearfield.ops.rotary.reference import rotate as rotate_reference
from nearfield.plan import PreparedPlan


def inputs(num_queries: int, num_keys: int, dim: int, *, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, num_queries, dim), *[(2, key_heads, num_keys, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def weights_of(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The map of full attention and the log of its sums."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * query.shape[3] ** -0.5
    return torch.softmax(logits, -1), torch.logsumexp(logits, -1)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("length", "block", "number", "dim"),
    [
        (64, 4, 2, 16),
        (70, 16, 2, 24),
        (300, 16, 1, 32),
        (37, 2, 3, 16),
        (300, 16, 3, 80),
        (600, 4, 4, 16),
        (300, 32, 2, 16),
    ],
)
def test_pooling_kernels_do_as_the_reference(
    length: int, block: int, number: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from nearfield.ops.pool_select.reference import pool as plain
    from nearfield.ops.pool_select.triton import pool as kernel

    x = torch.randn(2, length, 3, dim, device=device, dtype=dtype).transpose(1, 2)
    exact = plain.pool_forward(x.double(), block, number)
    with poisoned_memory():
        pooled = kernel.pool_forward(x, block, number)
    assert_budget("pooled", pooled, exact, plain.pool_forward(x, block, number))
    grad = torch.randn(2, 3, exact.shape[2], dim, device=device, dtype=dtype)
    exact = plain.pool_backward(grad.double(), length, block, number)
    low = plain.pool_backward(grad, length, block, number)
    assert_budget("spread", kernel.pool_backward(grad, length, block, number), exact, low)


@NEEDS_TRITON
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("tile", [64, 1024])
def test_lists_are_transposed(
    tile: int, repeats: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one program and by several, the last one short; entries that repeat, rows without any, unused slots."""
    from nearfield.ops.lists.triton import transpose as kernel

    monkeypatch.setattr(kernel, "_TILE", tile)
    plan = random_plan(
        330, 200, q_block=16, k_block=8, batch=2, heads=2, repeats=repeats, empty_rows=True, device=device
    )
    assert plan.blocks.shape[2] > int(plan.offsets[..., -1].min())  # some slots are unused
    with poisoned_memory():
        offsets, rows = kernel.transpose(plan.offsets, plan.blocks, plan.num_columns)
    assert Plan(offsets, rows, 8, 16, 200, 330) == plan.transpose()
    nothing = plan.blocks[:, :, :0]
    offsets, rows = kernel.transpose(torch.zeros_like(plan.offsets), nothing, plan.num_columns)
    assert not offsets.any()


@NEEDS_TRITON
def test_plans_are_transposed_by_one_sort(device: torch.device) -> None:
    """Of other sizes, one with unused slots, one without entries."""
    from nearfield.ops.lists.triton import transpose as kernel

    plans = [
        random_plan(330, 200, q_block=16, k_block=8, batch=2, heads=2, empty_rows=True, device=device),
        random_plan(330, 70, q_block=128, k_block=16, batch=2, heads=1, device=device, seed=1),
        random_plan(40, 70, q_block=32, k_block=1, heads=3, repeats=True, device=device, seed=2),
    ]
    with poisoned_memory():
        found = kernel.transpose_together(plans)
    assert found == [plan.transpose() for plan in plans]


@NEEDS_TRITON
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 3)])
def test_rows_are_ordered_as_by_a_sort(batch: int, heads: int, device: torch.device) -> None:
    """Lengths from none to some hundred, many of them similar; lists of their own, or one for all heads."""
    from nearfield.ops.lists.triton import order as kernel

    for of_list in ((1, 1), (batch, heads)):
        counts = torch.randint(0, 300, (*of_list, 150), generator=torch.Generator().manual_seed(0)).to(device)
        offsets = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).to(torch.int32)
        blocks = torch.zeros(*of_list, int(offsets.max()), device=device, dtype=torch.int32)
        plan = Plan(offsets, blocks, 16, 16, 150 * 16, 16, check=False)
        with poisoned_memory():
            found = kernel.longest_first(plan, batch, heads)
        expected = plan.longest_first(batch, heads)
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
        assert kernel.longest_first(plan, batch, heads) is expected  # known by now


@NEEDS_TRITON
def test_an_order_of_many_rows_is_written_where_it_is_wanted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a sort then, of which the plan keeps nothing: it may have run on another stream."""
    from nearfield.ops.lists.triton import order as kernel

    monkeypatch.setattr(kernel, "_MOST_ROWS", 1)
    plan = random_plan(330, 200, q_block=16, k_block=8, heads=2, empty_rows=True, device=device)
    room = kernel.room_for_order(plan, 1, 2)
    assert room is not None
    kernel.order_into(room, plan, 1, 2)
    assert plan.prepared == PreparedPlan()
    assert torch.equal(room, plan.sorted_rows(1, 2))
    assert kernel.room_for_order(plan, 1, 4) is None  # a head of keys then has several lists


@NEEDS_TRITON
def test_transposing_is_a_proper_operator(device: torch.device) -> None:
    plan = random_plan(70, 50, q_block=16, k_block=8, heads=2, empty_rows=True, device=device)
    arguments = (plan.offsets, plan.blocks, plan.extent, 16, 8)
    torch.library.opcheck(torch.ops.nearfield.transpose.default, arguments)
    assert Plan(*torch.ops.nearfield.transpose(*arguments), 8, 16, 50, 70) == plan.transpose()


@NEEDS_TRITON
@pytest.mark.parametrize("lengths", [(70, 70, 70), (70, 37, 37)], ids=["alike", "other lengths"])
def test_three_are_pooled_as_each(lengths: tuple[int, int, int], device: torch.device) -> None:
    """In shared launches where they are alike, the sums of the second level included, which give the third."""
    from nearfield.ops.pool_select.triton import pool as kernel

    tensors = [torch.randn(2, length, 3, 24, device=device).transpose(1, 2) for length in lengths]
    with poisoned_memory():
        together = kernel.pool_together(tensors, 4, 3)
        two = kernel.pool_together(tensors[1:], 4, 3)
    for x, pooled in zip([*tensors, *tensors[1:]], [*together, *two], strict=True):
        assert torch.equal(pooled, kernel.pool_forward(x, 4, 3))


@NEEDS_TRITON
@pytest.mark.parametrize(("block", "levels"), [(32, 6), (2, 30)])
def test_shares_of_levels_far_above_all_tokens(block: int, levels: int, device: torch.device) -> None:
    """As many levels as fit in 32 bits: a level more would not."""
    from nearfield.ops.pool_select.triton import pool as kernel

    length = 70
    starts = level_starts(length, block, levels)
    grad = torch.randn(1, 2, starts[-1], 8, device=device)
    assert kernel.unsupported(grad, block, levels) is None
    assert kernel.unsupported(grad, block, levels + 1) is not None
    token, wanted = torch.arange(length, device=device), torch.zeros(1, 2, length, 8, device=device)
    for level, start in enumerate(starts[:-1], start=1):
        mean = token // block**level
        count = (length - mean * block**level).clamp(max=block**level)
        wanted += grad[:, :, start + mean] / count[:, None]
    torch.testing.assert_close(kernel.pool_backward(grad, length, block, levels), wanted)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("lengths", "block", "count", "width", "keep_own"),
    [
        ((40, 40), 16, 3, 2, True),
        ((33, 50), 8, 4, 3, False),
        ((7, 5), 16, 8, None, False),
        ((20, 70), 16, 5, None, True),
        ((64, 64), 32, 4, 1, False),
        ((100, 90), 64, 3, 2, False),
        ((5, 9), 2, 2, 4, False),
    ],
)
def test_kernel_chooses_as_the_reference(
    lengths: tuple[int, int], block: int, count: int, width: int | None, keep_own: bool, dtype: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    from nearfield.ops.pool_select.triton import select as kernel

    # Halves of small whole numbers: every product is exact, and many scores are equal.
    generator = torch.Generator().manual_seed(0)
    query, key = (
        (torch.randint(-4, 5, (2, heads, length, 24), generator=generator) / 2).to(device, dtype)
        for heads, length in zip((4, 2), lengths, strict=True)
    )
    parents = None
    if width is not None:
        groups, blocks = -(-lengths[0] // block), -(-lengths[1] // block)
        order = torch.rand(2, 4, groups, blocks, generator=generator).argsort(-1)[..., :width]
        parents = order.sort(-1).values.to(device, torch.int32)
        parents[..., -1:] = torch.where(
            parents[..., -1:] % 3 == 2, blocks, parents[..., -1:]
        )  # unused places
    with poisoned_memory():
        got = kernel.select(query, key, parents, block, count, keep_own)
    want = select_reference.select(query, key, parents, block, count, keep_own)
    assert torch.equal(got, want)
    pack, multiple = (4, 4) if dtype == torch.float16 else (2, 3)
    if block % pack:
        return
    call = (query, key, parents, block, count, keep_own, pack, multiple)
    with poisoned_memory():
        chosen, *packed = kernel.select_packed(*call)
    assert torch.equal(chosen, want)
    assert entries_of(*packed) == entries_of(*select_reference.select_packed(*call)[1:])


def entries_of(bounds: Tensor, packed: Tensor) -> list[list[int]]:
    """Each merged list, whatever is between them."""
    found = []
    for some, entries in zip(bounds.flatten(0, 1).tolist(), packed.flatten(0, 1).tolist(), strict=True):
        starts, lengths = some[::2], some[1::2]
        found += [entries[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return found


def test_choices_are_merged_as_lists_are() -> None:
    """By hand: ids that any of the queries chose, ascending, with a bit for each of those that did."""
    query, key = torch.randn(1, 2, 10, 4), torch.randn(1, 1, 30, 4)
    chosen, *packed = select_reference.select_packed(query, key, None, 16, 5, False, 4, 4)
    lists = iter(entries_of(packed[0], packed[1]))
    for head in range(2):
        for first in (0, 4, 8):
            rows = [set(row) for row in chosen[0, head, first : first + 4].tolist()]
            want = [
                id_ * 16 + sum(1 << number for number, row in enumerate(rows) if id_ in row)
                for id_ in sorted(set().union(*rows))
            ]
            want += [want[-1] // 16 * 16] * (-len(want) % 4)
            assert next(lists) == want


@NEEDS_TRITON
def test_kernel_takes_nan_and_strides(device: torch.device) -> None:
    from nearfield.ops.pool_select.triton import select as kernel

    query = torch.ones(1, 6, 2, 16, device=device).transpose(1, 2)
    key = torch.randint(-3, 4, (1, 7, 2, 16), device=device).float().transpose(1, 2)
    key[0, 0, 2, 3] = math.nan
    assert torch.equal(
        kernel.select(query, key, None, 4, 5, False), select_reference.select(query, key, None, 4, 5, False)
    )


@NEEDS_TRITON
def test_what_the_kernel_leaves_to_plain_torch_has_a_reason(device: torch.device) -> None:
    from nearfield.ops.pool_select.triton import select as kernel

    assert kernel.unsupported(torch.empty(1, 1, 1, 8, device=device), 64) is None
    assert "float64" in str(kernel.unsupported(torch.empty(1, 1, 1, 8, device=device).double(), 64))
    assert "129" in str(kernel.unsupported(torch.empty(1, 1, 1, 129, device=device), 64))
    assert "2048 candidates" in str(kernel.unsupported(torch.empty(1, 1, 1, 8, device=device), 2048))
    wide = torch.empty(1, 1, 1, 128, device=device)
    assert kernel.unsupported(wide, 128) is None
    assert "shared memory" in str(kernel.unsupported(wide, 129))
    assert kernel.unsupported(wide.half(), 1024) is None


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "dim", "q_block", "k_block"),
    [
        (70, 90, 16, 32, 1),
        (50, 130, 24, 16, 4),
        (200, 70, 32, 128, 64),
        (33, 40, 16, 64, 8),
        (100, 300, 16, 192, 128),
        (130, 70, 16, 48, 2),
        (150, 80, 16, 112, 8),
    ],
)
def test_kernel_computes_the_statistics_of_the_map(
    num_queries: int,
    num_keys: int,
    dim: int,
    q_block: int,
    k_block: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    from nearfield.ops.predict.triton import columns as kernel

    query, key, _ = (x.to(device, dtype) for x in inputs(num_queries, num_keys, dim))
    _, lse = weights_of(query.double(), key.double())
    call = q_block, k_block, dim**-0.5
    exact = columns_reference.column_statistics(query.double(), key.double(), lse, *call)
    low = columns_reference.column_statistics(query, key, lse.float(), *call)
    got = kernel.column_statistics(query, key, lse.float(), *call)
    for name, *values in zip(("maxima", "masses"), got, exact, low, strict=True):
        assert_budget(name, *values)


@NEEDS_TRITON
@pytest.mark.parametrize("shape", [(2, 3, 5, 9), (1, 1, 1, 1), (1, 2, 3, 2100), (1, 1, 4, 32)], ids=str)
def test_kernel_lists_what_a_mask_keeps(shape: tuple[int, ...], device: torch.device) -> None:
    from nearfield.ops.lists.triton import lists as kernel

    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.6
    mask[0, 0, 0] = False  # an empty row
    mask[-1, -1, -1] = True  # and a full one
    counts = mask.sum(-1)
    offsets = torch.nn.functional.pad(counts.cumsum(-1), (1, 0)).to(torch.int32)
    capacity = int(offsets[..., -1].max()) + 3
    want = torch.zeros(*shape[:2], capacity, dtype=torch.int32)
    for batch, head in itertools.product(range(shape[0]), range(shape[1])):
        kept = mask[batch, head].nonzero()[:, 1]
        want[batch, head, : len(kept)] = kept
    for lists_of in (kernel.lists_of, lists_reference.lists_of):
        got = lists_of(mask.to(device), offsets.to(device), capacity)
        assert got.dtype == torch.int32
        assert torch.equal(got.cpu(), want)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("length", "block", "dim"), [(70, 1, 16), (130, 4, 24), (37, 64, 32), (500, 192, 16), (256, 128, 128)]
)
def test_kernel_averages_blocks_and_compares_tokens_with_the_mean(
    length: int, block: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from nearfield.ops.predict.triton import means as kernel

    x = (torch.randn(2, length, 3, dim, device=device, dtype=dtype) + 1).transpose(1, 2)
    x[0, 0, :2] = 0
    exact, low = means_reference.block_means(x.double(), block), means_reference.block_means(x, block)
    for name, *values in zip(("means", "likeness"), kernel.block_means(x, block), exact, low, strict=True):
        assert_budget(name, *values)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "length", "dim"), [(5, 37, 16), (2, 16, 24), (4, 20, 128), (1, 1, 2)])
def test_kernel_turns_by_the_rows_of_each_sample(
    heads: int, length: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    from nearfield.ops.rotary.triton import rotate as kernel

    x = torch.randn(2, length, heads, dim, device=device, dtype=dtype).transpose(1, 2)
    cos, sin = torch.randn(2, 2, 1, length, dim, device=device)  # of any kind: no two are alike
    with poisoned_memory():
        turned = kernel.rotate(x, cos, sin)
    exact = rotate_reference.rotate(x.double(), cos.double(), sin.double())
    assert_budget("turned", turned, exact, rotate_reference.rotate(x, cos, sin))
    assert turned.stride() == x.stride()
    for_all = cos[:1], sin[:1]
    assert torch.equal(kernel.rotate(x, *for_all)[1:], kernel.rotate(x[1:], *for_all))
    far_apart = (rows.mT.contiguous().mT for rows in (cos, sin))
    assert torch.equal(kernel.rotate(x, *far_apart), turned)
    gaps = torch.randn(2, heads, length, 3 * dim, device=device, dtype=dtype)[..., dim : 2 * dim]
    assert_budget(
        "gaps",
        kernel.rotate(gaps, cos, sin),
        *(rotate_reference.rotate(y, cos, sin) for y in (gaps.double(), gaps)),
    )


@NEEDS_TRITON
def test_what_the_turning_kernel_leaves_to_plain_torch_has_a_reason(device: torch.device) -> None:
    from nearfield.ops.rotary.triton import rotate as kernel

    x = torch.empty(1, 2, 8, 16, device=device)
    assert kernel.unsupported(x) is None
    assert "float64" in str(kernel.unsupported(x.double()))
    assert "side by side" in str(kernel.unsupported(x.mT))


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("mass", "count"), [(0.3, 0), (0.9, 0), (0.999, 0), (None, 1), (None, 7), (None, 1000)]
)
@pytest.mark.parametrize("shape", [(2, 4, 2, 40), (1, 2, 1, 1), (1, 2, 1, 1100)], ids=str)
def test_kernel_chooses_the_columns_that_hold_the_mass(
    shape: tuple[int, ...], mass: float | None, count: int, device: torch.device
) -> None:
    from nearfield.ops.predict.triton import choose as kernel

    generator = torch.Generator().manual_seed(0)
    # Logs of whole numbers, many of them equal, some below zero; -0.0 and 0.0 are equal, too.
    scores = (torch.randint(1, 9, shape, generator=generator) / 4).log().to(device)
    scores[scores == 0] = torch.rand(int((scores == 0).sum()), device=device).sub(0.5).sign() * 0.0
    whole = torch.rand(shape[:3], generator=generator).to(device) > 0.8
    always = torch.rand(shape[0], shape[1] // 2, shape[3], generator=generator).to(device) > 0.9
    count = min(count, shape[3])
    keep, dropped = kernel.choose(scores, whole, always, mass=mass, count=count)
    want, want_dropped = choose_reference.choose(scores.double(), whole, always, mass=mass, count=count)
    differ = keep != want
    if mass is None:
        assert not bool(differ.any())
    # Rounding may decide about one column where the mass is reached exactly.
    weights = torch.softmax(scores.double(), -1)
    for row in differ.any(-1).nonzero():
        place = tuple(row.tolist())
        assert int(differ[place].sum()) == 1
        held = (weights[place] * (keep[place] & want[place])).sum()
        assert abs(float(held) - float(mass or 0)) < 1e-6
    torch.testing.assert_close(dropped.double(), (weights * ~keep).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(want_dropped, (weights * ~want).sum(-1))


@NEEDS_TRITON
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered"
)  # the interpreter computes with numpy, which warns
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_numbers_are_kept_whole(value: float, device: torch.device) -> None:
    from nearfield.ops.predict.triton import choose as kernel

    scores = torch.randn(1, 1, 3, 20, device=device)
    scores[0, 0, 1] = value
    whole, always = (torch.zeros(1, 1, size, device=device, dtype=torch.bool) for size in (3, 20))
    for choose in (kernel.choose, choose_reference.choose):
        keep, dropped = choose(scores, whole, always, mass=0.5, count=0)
        assert bool(keep[0, 0, 1].all())
        assert not bool(keep[0, 0, ::2].all())
        assert bool((dropped[0, 0, ::2] > 0).all())
    assert float(kernel.choose(scores, whole, always, mass=0.5, count=0)[1][0, 0, 1]) == 0


@NEEDS_TRITON
def test_predictions_of_kernels_and_of_plain_torch(device: torch.device) -> None:
    """The whole way from tokens to lists; scores far apart, so that rounding decides nothing."""
    query, key, _ = (3 * x.to(device, torch.float32) for x in inputs(100, 70, 16, heads=2, key_heads=1))
    _, lse = weights_of(query, key)
    blocks = Blocks(64, 4, 100, 70, ((0, 9),))
    bias = torch.linspace(-3, 3, 70, device=device).expand(1, 1, 70)
    bias = bias.index_fill(2, torch.arange(20, 40, device=device), -math.inf)
    biased = (query @ key.repeat_interleave(2, 1).mT * 16**-0.5 + bias[:, :, None]).logsumexp(-1)
    for plain, fused in (
        [
            predict.by_means(query, key, blocks, mass=0.8, guard=0.05, impl=impl)
            for impl in ("reference", "triton")
        ],
        [predict.by_means(query, key, blocks, topk=5, impl=impl) for impl in ("reference", "triton")],
        [predict.by_weights(query, key, lse, blocks, 0.05, impl=impl) for impl in ("reference", "triton")],
        [
            predict.by_weights(query, key, biased, blocks, 0.05, key_bias=bias, impl=impl)
            for impl in ("reference", "triton")
        ],
    ):
        assert torch.equal(plain.keep, fused.keep)
        assert not bool(plain.keep.all())
        torch.testing.assert_close(plain.dropped, fused.dropped, rtol=1e-4, atol=1e-6)


LOG_LINEAR: dict[str, tuple[LogLinear, tuple[int, int, int], torch.dtype]] = {
    "whole blocks": (LogLinear(topk=3, levels=1), (160, 160, 16), torch.float16),
    "a ragged block": (LogLinear(topk=3, levels=1), (150, 150, 16), torch.float16),
    "single precision": (LogLinear(topk=2, levels=1), (150, 150, 16), torch.float32),
    "wide heads": (LogLinear(topk=2, levels=1), (110, 110, 128), torch.float16),
    "an odd number of channels": (LogLinear(topk=2, levels=1), (150, 150, 24), torch.float16),
    "other lengths": (LogLinear(topk=2, levels=1), (150, 100, 16), torch.float16),
    "more than there are": (LogLinear(topk=99, levels=1), (110, 110, 16), torch.float16),
    "two levels": (LogLinear(block=4, topk=2, levels=2), (110, 110, 16), torch.float16),
    "excluded": (LogLinear(block=4, topk=2, levels=2, exclude_selected=True), (110, 110, 16), torch.float16),
    "own kept": (LogLinear(topk=1, levels=1, keep_own=True), (150, 150, 16), torch.float16),
    "not enriched": (LogLinear(topk=3, levels=1, enrich=0), (150, 150, 16), torch.float16),
    "not weighted": (LogLinear(topk=3, levels=1, weighted=False), (150, 150, 16), torch.float16),
}


def exactly(
    method: LogLinear, leaves: Sequence[Tensor], cotangent: Tensor
) -> tuple[list[Tensor], list[float]]:
    """Result and gradients in double precision, and what no kernel of the tensors' precision can avoid of their errors.

    A backward pass multiplies the gradient with the `out` that was saved. What its rounding takes from that product is
    as good as a gradient of `lse`, whose effect is known exactly.
    """
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    out, lse = _attend(method, *doubles, None, None, "grouped")
    gradients = torch.autograd.grad(out, doubles, cotangent.double(), retain_graph=True)
    taken = (cotangent.double() * (out.to(leaves[0].dtype) - out)).sum(-1).detach()
    of_rounding = torch.autograd.grad(lse, doubles, taken, allow_unused=True)
    inherent = [0.0] + [0.0 if x is None else float(x.abs().max()) for x in of_rounding]
    return [out.detach(), *gradients], inherent


@NEEDS_TRITON
@pytest.mark.parametrize("name", LOG_LINEAR)
def test_log_linear_attention_by_kernels_is_what_plain_torch_makes_of_the_same_picks(
    name: str, device: torch.device
) -> None:
    """In half precision, where rows are packed and one kernel reads both parts; equal bits from run to run."""
    method, (num_queries, num_keys, dim), dtype = LOG_LINEAR[name]
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, repeated over blocks: means and products are exact, so picks are equal.
    made = torch.randint(-2, 3, (3, 1, 1, 10, dim), generator=generator).repeat_interleave(16, 3)
    lengths = num_queries, num_keys, num_keys
    leaves = [x[:, :, :length].to(device, dtype) for x, length in zip(made, lengths, strict=True)]
    cotangent = torch.randn(leaves[0].shape, generator=generator).to(leaves[0])

    def results(impl: str) -> list[Tensor]:
        fresh = [x.detach().requires_grad_() for x in leaves]
        with poisoned_memory():
            out = attend_with(method, *fresh, impl=impl)  # type: ignore[arg-type]
            return [out.detach(), *torch.autograd.grad(out, fresh, cotangent)]

    got, again = (results("triton") for _ in range(2))
    assert all(map(torch.equal, got, again))
    exact, _ = exactly(method, leaves, cotangent)
    for part, *values in zip(("out", "query", "key", "value"), got, exact, results("grouped"), strict=True):
        assert_budget(part, *values)


@NEEDS_TRITON
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered"
)  # the interpreter computes with numpy, which warns
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_nan_comes_out_of_kernels_that_walk_several_rows(which: int, device: torch.device) -> None:
    """In its own batch, whatever rows are walked together; nothing is read where it must not be."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(2, 1, 150, 16, generator=generator).to(device, torch.float16) for _ in range(3)]
    tensors[which][0, 0, 35, 2] = math.nan
    with poisoned_memory():
        out = attend_with(LogLinear(topk=4, levels=1), *tensors, impl="triton")
    assert bool(out[0].isnan().any())
    assert bool(out[1].isfinite().all())


# -- at size, where there is a GPU ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "levels"), [(4096, 2), (5000, 2), (65536, "auto")])
def test_log_linear_attention_is_what_plain_torch_makes_of_the_same_picks(
    length: int, levels: int | str, dtype: torch.dtype
) -> None:
    """Kernels and plain torch choose alike where scores are exact; then results and gradients must agree."""
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, repeated over blocks of 256: means and products are exact at every level, so picks are equal.
    made = torch.randint(-2, 3, (3, 1, 2, -(-length // 256), 64), generator=generator).repeat_interleave(
        256, 3
    )
    leaves = [x[:, :, :length].to("cuda", dtype).requires_grad_() for x in made]
    method = LogLinear(levels=levels)  # type: ignore[arg-type]
    out = attend_with(method, *leaves)
    cotangent = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, leaves, cotangent)]
    exact_results, inherent = exactly(method, leaves, cotangent)
    low_leaves = [x.detach().requires_grad_() for x in leaves]
    low = attend_with(method, *low_leaves, impl="grouped")
    low_results = [low, *torch.autograd.grad(low, low_leaves, cotangent)]
    names = ("out", "query", "key", "value")
    for name, error, *values in zip(names, inherent, got, exact_results, low_results, strict=True):
        assert_budget(name, *(x.detach() for x in values), error)


@pytest.mark.gpu
def test_log_linear_attention_is_captured_by_a_graph() -> None:
    """New contents, other picks, the same graph: forward and backward, to the last bit."""
    leaves = [torch.randn(1, 2, 3000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    cotangent = torch.randn_like(leaves[0])

    def both() -> list[Tensor]:
        fresh = [x.detach().requires_grad_() for x in leaves]
        out = attend_with(LogLinear(), *fresh)
        return [out.detach(), *torch.autograd.grad(out, fresh, cotangent)]

    replay = captured(both, torch.device("cuda"))
    for x in leaves:
        x.normal_()
    got = replay()
    torch.cuda.synchronize()
    assert isinstance(got, list)
    assert all(map(torch.equal, got, both()))


@pytest.mark.gpu
@pytest.mark.parametrize("q_block", [128, 192])
@pytest.mark.parametrize("k_block", [1, 4, 64])
def test_statistics_of_a_long_map(k_block: int, q_block: int) -> None:
    query, key, _ = (x.to("cuda", torch.bfloat16) for x in inputs(3000, 5000, 128))
    from nearfield.ops.predict.triton import columns as kernel

    _, lse = weights_of(query.double(), key.double())
    call = q_block, k_block, 128**-0.5
    exact = columns_reference.column_statistics(query.double(), key.double(), lse, *call)
    low = columns_reference.column_statistics(query, key, lse.float(), *call)
    got = kernel.column_statistics(query, key, lse.float(), *call)
    for name, *values in zip(("maxima", "masses"), got, exact, low, strict=True):
        assert_budget(name, *values)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "dim", "size"), [(37, 16, 16), (16, 24, 24), (5, 32, 8)])
def test_turning_kernel_does_as_the_reference(
    length: int, dim: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Keys behind a prefix, into the middle of a longer cache, of which the rest stays."""
    from nearfield.ops.rotary.reference import keys as plain
    from nearfield.ops.rotary.triton import keys as kernel

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(5, 4, 3 + length, dim, generator=generator).to(device, dtype)[:, :, 3:]
    cos, sin = torch.randn(2, length, size, generator=generator).to(device)
    partner = torch.randperm(size, generator=generator).to(device)
    exact = torch.full((5, 4, length + 9, dim), 7.0, device=device, dtype=torch.float64)
    low, found = exact.to(dtype), exact.to(dtype)
    plain.turn(keys.double(), exact[:, :, 4:-5], cos, sin, partner)
    plain.turn(keys, low[:, :, 4:-5], cos, sin, partner)
    kernel.turn(keys, found[:, :, 4:-5], cos, sin, partner)
    assert_budget("keys", found, exact, low)
    assert torch.equal(found[..., size:], low[..., size:])
    wanted = keys.double() * 1
    wanted[..., :size] = keys[..., :size].double() * cos + keys[..., partner].double() * sin
    torch.testing.assert_close(exact[:, :, 4:-5], wanted)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("parts", "heads", "tokens", "dim"), [(8, 3, 13, 16), (3, 1, 8, 72), (1, 2, 1, 128)])
def test_the_merging_kernel_does_as_the_reference(
    parts: int, heads: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Parts as ranks receive them, token by token; with rows that read nothing in one part, and in all."""
    from nearfield.ops.attention import partials_reference as plain
    from nearfield.ops.attention.triton import partials as kernel

    rows = torch.randn(parts, tokens, 2, heads, dim + 8, device=device).to(dtype)
    out, lse = (
        rows[..., :dim].movedim(1, 3),
        3 * torch.randn(parts, tokens, 2, heads, device=device).movedim(1, 3),
    )
    lse[0, 0, 0, 0] = lse[:, 1, -1, -1] = -torch.inf
    out[0, 0, 0, 0] = out[:, 1, -1, -1] = 0
    exact, low = plain.merge_partials(out.double(), lse.double()), plain.merge_partials(out, lse)
    with poisoned_memory():
        merged = kernel.merge_partials(out, lse)
    assert (merged.out[1, -1, -1] == 0).all()
    assert merged.lse[1, -1, -1] == -torch.inf
    is_read = exact.lse.isfinite()
    assert torch.equal(merged.lse.isfinite(), is_read)
    assert_budget("out", merged.out, exact.out, low.out)
    torch.testing.assert_close(merged.lse[is_read], exact.lse[is_read].float())
