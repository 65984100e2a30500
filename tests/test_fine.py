"""Fine-grained attention: what is kept, when it is decided anew, and what is remembered in between."""

from typing import Any

import pytest
import torch
from torch import Tensor

import nearfield
from nearfield import Geometry, planning
from nearfield._types import Moment
from nearfield.methods import FineGrained
from nearfield.methods import fine as module

GEOMETRY = Geometry((8, 9), text=7)


def inputs(seed: int = 0, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, 79, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nearfield.attend(query, key, value, planning.full(79)).out


def masked(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, method: FineGrained) -> Tensor:
    """Full attention with a mask, written out."""
    reads = keep.repeat_interleave(method.query_block, 2)[:, :, :79].repeat_interleave(method.grain, 3)[
        ..., :79
    ]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=reads)


@pytest.mark.parametrize("grain", [1, 4, 8])
def test_kept_are_the_keys_that_some_query_of_the_block_weighs(grain: int) -> None:
    method = FineGrained(16, grain, threshold=0.05)
    query, key, value = inputs()
    reader = method.reader(GEOMETRY).at(Moment(0, 50))
    torch.testing.assert_close(reader.attend(query, key, value).out, dense(query, key, value))
    weights = torch.softmax(query @ key.mT / 4, -1)
    for row in range(5):
        for column in range(-(-79 // grain)):
            rows, columns = slice(row * 16, row * 16 + 16), slice(column * grain, column * grain + grain)
            cell = weights[:, :, rows, columns]
            best = weights[:, :, rows].amax((2, 3)) == cell.amax((2, 3))
            want = (cell >= 0.05).any(3).any(2) | best
            if row == 0 or column * grain < 7:  # a block that holds text
                want = torch.ones_like(want)
            assert torch.equal(reader.memory[""].prediction.keep[:, :, row, column], want)


def test_between_refreshes_lists_are_remembered_and_read() -> None:
    method = FineGrained(16, 2, threshold=0.08)
    reader = method.reader(GEOMETRY)
    first, later = inputs(0), inputs(1)
    reader.at(Moment(0, 50)).attend(*first)
    keep = reader.memory[""].prediction.keep
    assert not bool(keep.all())
    got = reader.at(Moment(3, 50)).attend(*later).out
    torch.testing.assert_close(got, masked(*later, keep, method))


def test_threshold_zero_is_dense() -> None:
    reader = FineGrained(16, 1, threshold=0).reader(GEOMETRY)
    reader.at(Moment(0, 50)).attend(*inputs(0))
    later = inputs(1)
    torch.testing.assert_close(reader.at(Moment(1, 50)).attend(*later).out, dense(*later))
    assert reader.last is not None
    assert float(reader.last.dropped.abs().max()) < 1e-12


@pytest.mark.parametrize(("total", "steps"), [(50, [0, 7, 15, 22, 30, 40]), (4, [0, 1, 2, 3]), (1, [0])])
def test_lists_are_made_anew_on_schedule(total: int, steps: list[int]) -> None:
    method = FineGrained(16, 4)
    assert method.refreshes(total) == steps
    reader = method.reader(GEOMETRY)
    made = []
    for place in range(total):
        reader.at(Moment(place, total)).attend(*inputs(place))
        if reader.memory[""].place == place:
            made.append(place)
    assert made == steps


def test_a_schedule_that_skips_a_refresh_makes_it_up() -> None:
    reader = FineGrained(16, 4).reader(GEOMETRY)
    for place, made in ((0, 0), (6, 0), (9, 9), (14, 9), (29, 29)):
        reader.at(Moment(place, 50)).attend(*inputs())
        assert reader.memory[""].place == made


def test_a_second_generation_starts_anew() -> None:
    reader = FineGrained(16, 4).reader(GEOMETRY)
    reader.at(Moment(45, 50)).attend(*inputs(0))
    before = reader.memory[""].plan
    reader.at(Moment(0, 50)).attend(*inputs(1))
    assert reader.memory[""].place == 0
    assert reader.memory[""].plan is not before


def test_branches_are_kept_apart_or_shared() -> None:
    for share, branches in ((False, {"cond", "uncond"}), (True, {""})):
        reader = FineGrained(16, 4, share_branches=share).reader(GEOMETRY)
        for branch in ("cond", "uncond"):
            reader.at(Moment(0, 50, branch)).attend(*inputs(len(branch)))
        assert set(reader.memory) == branches


def test_another_batch_makes_its_own_lists() -> None:
    reader = FineGrained(16, 4).reader(GEOMETRY)
    reader.at(Moment(0, 50)).attend(*inputs(0))
    query, key, value = inputs(1, batch=1)
    torch.testing.assert_close(
        reader.at(Moment(1, 50)).attend(query, key, value).out, dense(query, key, value)
    )


def test_online_needs_no_moment_and_reads_what_it_predicts() -> None:
    method = FineGrained(16, 4, predict="online", mass=0.5, guard=None)
    reader = method.reader(GEOMETRY)
    query, key, value = inputs()
    got = reader.attend(query, key, value).out
    assert reader.last is not None
    assert not bool(reader.last.keep.all())
    torch.testing.assert_close(got, masked(query, key, value, reader.last.keep, method))


def test_gradients_flow_through_remembered_lists() -> None:
    reader = FineGrained(16, 4, threshold=0.1).reader(GEOMETRY)
    reader.at(Moment(0, 50)).attend(*inputs(0))
    leaves = [x.requires_grad_() for x in inputs(1)]
    out = reader.at(Moment(1, 50)).attend(*leaves).out
    want = masked(*leaves, reader.memory[""].prediction.keep, FineGrained(16, 4))
    for mine, theirs in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_memory_is_told_beforehand() -> None:
    method, geometry = FineGrained(128, 4), Geometry((21, 30, 52))
    assert method.mask_bytes(geometry, 1, 12) == 12 * 256 * 1024
    assert "masks take at most 0.2 MiB per layer and head" in method.describe(geometry)
    assert "at steps 0, 7, 15, 22, 30, 40 of 50" in method.describe(geometry)
    assert "at every call" in FineGrained(predict="online").describe(geometry)


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: FineGrained(threshold="half"),
        ValueError,
        "`threshold` must be a weight, or one times that of equal keys, as \"0.5/N\"; got 'half'.",
    ),
    (lambda: FineGrained(threshold=-1), ValueError, "`threshold` must be at least 0; got -1."),
    (lambda: FineGrained(mass=0), ValueError, "`mass` must lie above 0, up to 1; got 0."),
    (
        lambda: FineGrained(refresh=()),
        TypeError,
        "`refresh` must be shares of the steps, at least one; got ().",
    ),
    (lambda: FineGrained(refresh=(0, 1)), ValueError, "`refresh` must hold shares from 0, below 1; got 1."),
    (
        lambda: FineGrained(predict="guess"),
        ValueError,
        "`predict` must be one of 'cached', 'online'; got 'guess'.",
    ),
    (
        lambda: FineGrained(16, 4).reader(GEOMETRY).attend(*inputs()),
        ValueError,
        '`moment` must be told before a call where prediction is "cached"; got None. '
        'Call `reader.at(Moment(step, total))` first, or use predict="online".',
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[bad[2][:40] for bad in BAD_CALLS])
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message


def test_thresholds_in_words_are_weights() -> None:
    assert module._weight_of("0.5/N", 100) == 0.005
    assert module._weight_of(0.25, 100) == 0.25
