"""Fine-grained attention: what is kept, when it is decided anew, and what is remembered in between."""

from typing import Any

import pytest
import torch
from torch import Tensor

import nearfield
from nearfield import Geometry, planning
from nearfield._types import Moment
from nearfield.methods import FineGrained
from nearfield.methods import finegrained as module
from nearfield.methods.finegrained import FineLayer
from nearfield.ops.predict import api as predict
from nearfield.ops.predict.api import Mask

GEOMETRY = Geometry((8, 9), text=7)


def inputs(seed: int = 0, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 2, 79, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


def kept(reader: FineLayer, branch: str = "", batch: int = 2) -> Tensor:
    """Which blocks a reader remembers, `[B, H, rows, columns]`."""
    lists = reader.known[branch, batch].lists
    plan = lists.plan(reader.blocks, torch.device("cpu")) if isinstance(lists, Mask) else lists
    return plan.block_counts() > 0


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
    reader = method.layer(GEOMETRY).set_step(Moment(0, 50))
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
            assert torch.equal(kept(reader)[:, :, row, column], want)


def test_between_refreshes_lists_are_remembered_and_read() -> None:
    method = FineGrained(16, 2, threshold=0.08)
    reader = method.layer(GEOMETRY)
    first, later = inputs(0), inputs(1)
    reader.set_step(Moment(0, 50)).attend(*first)
    keep = kept(reader)
    assert not bool(keep.all())
    got = reader.set_step(Moment(3, 50)).attend(*later).out
    torch.testing.assert_close(got, masked(*later, keep, method))


def test_threshold_zero_is_dense() -> None:
    reader = FineGrained(16, 1, threshold=0).layer(GEOMETRY)
    reader.set_step(Moment(0, 50)).attend(*inputs(0))
    later = inputs(1)
    torch.testing.assert_close(reader.set_step(Moment(1, 50)).attend(*later).out, dense(*later))
    assert abs(reader.stats.dropped) < 1e-12
    assert reader.stats.kept == 1


@pytest.mark.parametrize(("total", "steps"), [(50, [0, 7, 15, 22, 30, 40]), (4, [0, 1, 2, 3]), (1, [0])])
def test_lists_are_made_anew_on_schedule(total: int, steps: list[int]) -> None:
    method = FineGrained(16, 4)
    assert method.refreshes(total) == steps
    reader = method.layer(GEOMETRY)
    made = []
    for place in range(total):
        reader.set_step(Moment(place, total)).attend(*inputs(place))
        if reader.known["", 2].place == place:
            made.append(place)
    assert made == steps


def test_a_schedule_that_skips_a_refresh_makes_it_up() -> None:
    reader = FineGrained(16, 4).layer(GEOMETRY)
    for place, made in ((0, 0), (6, 0), (9, 9), (14, 9), (29, 29)):
        reader.set_step(Moment(place, 50)).attend(*inputs())
        assert reader.known["", 2].place == made


def test_a_second_generation_starts_anew() -> None:
    reader = FineGrained(16, 4).layer(GEOMETRY)
    reader.set_step(Moment(45, 50)).attend(*inputs(0))
    before = reader.known["", 2].lists
    reader.set_step(Moment(0, 50)).attend(*inputs(1))
    assert reader.known["", 2].place == 0
    assert reader.known["", 2].lists is not before


def test_branches_are_kept_apart_or_shared() -> None:
    for share, branches in ((False, {"cond", "uncond"}), (True, {""})):
        reader = FineGrained(16, 4, share_branches=share).layer(GEOMETRY)
        for branch in ("cond", "uncond"):
            reader.set_step(Moment(0, 50, branch)).attend(*inputs(len(branch)))
        assert {branch for branch, _ in reader.known} == branches


def test_another_batch_makes_its_own_lists() -> None:
    reader = FineGrained(16, 4).layer(GEOMETRY)
    reader.set_step(Moment(0, 50)).attend(*inputs(0))
    query, key, value = inputs(1, batch=1)
    torch.testing.assert_close(
        reader.set_step(Moment(1, 50)).attend(query, key, value).out, dense(query, key, value)
    )


def test_online_needs_no_moment_and_reads_what_it_predicts() -> None:
    method = FineGrained(16, 4, predict="online", top_p=0.5, min_similarity=None)
    reader = method.layer(GEOMETRY)
    query, key, value = inputs()
    got = reader.attend(query, key, value).out
    blocks = method.blocks(GEOMETRY)
    keep = predict.by_means(query, key, blocks, mass=0.5).keep
    assert not bool(keep.all())
    torch.testing.assert_close(got, masked(query, key, value, keep, method))
    assert reader.stats.num_sparse == 1
    assert reader.stats.kept == pytest.approx(float(keep.float().mean()))


def test_gradients_flow_through_remembered_lists() -> None:
    reader = FineGrained(16, 4, threshold=0.1).layer(GEOMETRY)
    reader.set_step(Moment(0, 50)).attend(*inputs(0))
    leaves = [x.requires_grad_() for x in inputs(1)]
    out = reader.set_step(Moment(1, 50)).attend(*leaves).out
    want = masked(*leaves, kept(reader), FineGrained(16, 4))
    for mine, theirs in zip(
        torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_memory_is_told_beforehand() -> None:
    method, geometry = FineGrained(128, 4), Geometry((21, 30, 52))
    assert method.mask_bytes(geometry, 1, 12) == 12 * (256 * 1024 + 257 * 4)
    assert "masks take 0.25 MiB per layer, head and branch as bits" in method.describe(geometry)
    assert "at steps 0, 7, 15, 22, 30, 40 of 50" in method.describe(geometry)
    assert "at every call" in FineGrained(predict="online").describe(geometry)


FORMS = ["lists", "bits", "bits in host memory"]


@pytest.mark.parametrize(("form", "grain"), [(form, grain) for form in FORMS for grain in (1, 4)])
def test_what_is_remembered_fits_the_memory_allowed(form: str, grain: int) -> None:
    """In every form it is what was found, and as large as was said before."""
    query, key, value = inputs()
    free = FineGrained(16, grain, threshold=0.05).layer(GEOMETRY).set_step(Moment(0, 50))
    free.attend(query, key, value)
    lists, bits = free.known["", 2].num_bytes, FineGrained(16, grain).mask_bytes(GEOMETRY, 2, 2)
    allowed = {"lists": lists, "bits": lists - 1, "bits in host memory": min(bits, lists) - 1}[form]
    # Two layers share what is allowed.
    method = FineGrained(16, grain, threshold=0.05, memory=2 * allowed / 2**30)
    reader = method.layer(GEOMETRY).set_num_layers(2).set_step(Moment(0, 50))
    reader.attend(query, key, value)
    memory = reader.known["", 2]
    assert memory.form == form
    assert memory.num_bytes == (lists if form == "lists" else bits)
    assert reader.most == {form: memory.num_bytes}
    assert torch.equal(kept(reader), kept(free))
    later = inputs(1)
    expected = free.set_step(Moment(1, 50)).attend(*later)
    assert torch.equal(reader.set_step(Moment(1, 50)).attend(*later).out, expected.out)
    reader.forget()
    assert not reader.known


def test_a_second_branch_takes_what_is_left_of_the_memory() -> None:
    query, key, value = inputs()
    free = FineGrained(16, 1, threshold=0.05).layer(GEOMETRY).set_step(Moment(0, 50))
    free.attend(query, key, value)
    bits = FineGrained(16, 1).mask_bytes(GEOMETRY, 2, 2)
    memory = (free.known["", 2].num_bytes + bits) / 2**30
    reader = FineGrained(16, 1, threshold=0.05, memory=memory).layer(GEOMETRY)
    for branch in ("cond", "uncond", "third"):
        reader.set_step(Moment(0, 50, branch)).attend(query, key, value)
    assert [known.form for known in reader.known.values()] == FORMS


def test_the_tally_says_what_was_read() -> None:
    reader = FineGrained(16, 1, threshold=0.05).layer(GEOMETRY)
    for place in range(3):
        query, key, value = inputs(place)
        reader.set_step(Moment(place, 50)).attend(query, key, value)
    keep = kept(reader)
    assert (reader.stats.num_full, reader.stats.num_sparse) == (1, 2)
    assert reader.stats.kept == pytest.approx(float(keep.float().mean()))
    query, key, _ = inputs(0)
    weights = torch.softmax(query @ key.mT / 4, -1)
    unread = ~keep.repeat_interleave(16, 2)[:, :, :79]
    assert reader.stats.dropped == pytest.approx(float((weights * unread).sum(-1).mean()))


def test_batches_of_two_sizes_in_turn_keep_lists_of_their_own() -> None:
    reader = FineGrained(16, 4, threshold=0.1).layer(GEOMETRY)
    for place in range(3):
        for batch in (1, 2):
            reader.set_step(Moment(place, 50)).attend(*inputs(place, batch=batch))
    assert [known.place for known in reader.known.values()] == [0, 0]


def test_hidden_keys_have_no_mass() -> None:
    """What a bias hides is not chosen for its weight, and what is left is chosen as if it were not there."""
    query, key, _ = inputs()
    bias = torch.zeros(2, 1, 79, dtype=torch.float64)
    bias[:, :, 40:] = -torch.inf
    blocks = predict.Blocks(16, 8, 79, 79)
    hidden = predict.by_means(query, key, blocks, mass=0.9, key_bias=bias)
    alone = predict.by_means(query, key[:, :, :40], predict.Blocks(16, 8, 79, 40), mass=0.9)
    assert torch.equal(hidden.keep[..., :5], alone.keep)
    assert not bool(hidden.keep[..., 5:].any())
    nothing = predict.by_means(query, key, blocks, mass=0.9, key_bias=torch.zeros_like(bias))
    assert torch.equal(nothing.keep, predict.by_means(query, key, blocks, mass=0.9).keep)


def test_what_is_remembered_counts_the_bias() -> None:
    """A key that counts a hundred times is kept, and one that is hidden is not."""
    query, key, value = inputs()
    bias = torch.zeros(2, 1, 79, dtype=torch.float64)
    bias[..., 30], bias[..., 40:] = 100, -torch.inf
    reader = FineGrained(16, 1, threshold=0.5).layer(Geometry((79,)))
    reader.set_step(Moment(0, 50)).attend(query, key, value, key_bias=bias)
    keep = kept(reader)
    assert bool(keep[..., 30].all())
    assert not bool(keep[..., 40:].any())
    later = reader.set_step(Moment(1, 50)).attend(query, key, value, key_bias=bias).out
    torch.testing.assert_close(later, value[:, :, 30:31].expand_as(later))


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: FineGrained(threshold="half"),
        ValueError,
        "`threshold` must be a weight, or one times that of equal keys, as \"0.5/N\"; got 'half'.",
    ),
    (lambda: FineGrained(threshold=-1), ValueError, "`threshold` must be at least 0; got -1."),
    (lambda: FineGrained(top_p=0), ValueError, "`top_p` must lie above 0, up to 1; got 0."),
    (
        lambda: FineGrained(refresh=()),
        TypeError,
        "`refresh` must be shares of the steps, at least one; got ().",
    ),
    (lambda: FineGrained(refresh=(0, 1)), ValueError, "`refresh` must hold shares from 0, below 1; got 1."),
    (
        lambda: FineGrained(memory=-1),
        ValueError,
        "`memory` must be at least 0 GiB; got -1. None is no bound.",
    ),
    (
        lambda: FineGrained(memory="1 GiB"),  # type: ignore[arg-type]
        TypeError,
        "`memory` must be GiB, or None for no bound; got '1 GiB'.",
    ),
    (
        lambda: FineGrained(predict="guess"),
        ValueError,
        "`predict` must be one of 'cached', 'online'; got 'guess'.",
    ),
    (
        lambda: FineGrained(16, 4).layer(GEOMETRY).attend(*inputs()),
        ValueError,
        '`moment` must be set before a call where prediction is "cached"; got None. '
        'Call `layer.set_step(Moment(step, total))` first, or use predict="online".',
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
