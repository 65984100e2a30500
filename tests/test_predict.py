"""What full attention would read, predicted by its weights and by means; and the method that reads it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nearfield
from nearfield import Geometry
from nearfield.methods import BlockTopK
from nearfield.ops.predict import api as predict
from nearfield.ops.predict.api import Blocks
from nearfield.ops.predict.reference import columns as reference


def inputs(
    num_queries: int, num_keys: int, dim: int = 8, *, heads: int = 4, key_heads: int = 2, seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, num_queries, dim), *[(2, key_heads, num_keys, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def weights_of(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The map of full attention and the log of its sums."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * query.shape[3] ** -0.5
    return torch.softmax(logits, -1), torch.logsumexp(logits, -1)


def by_hand(weights: Tensor, q_block: int, k_block: int) -> tuple[Tensor, Tensor]:
    """Largest weight and mass per query of every block, one block after another."""
    rows = weights.split(q_block, dim=2)
    cells = [row.split(k_block, dim=3) for row in rows]
    maxima = torch.stack([torch.stack([cell.amax((2, 3)) for cell in row], -1) for row in cells], 2)
    masses = torch.stack([torch.stack([cell.sum(3).mean(2) for cell in row], -1) for row in cells], 2)
    return maxima, masses


# -- the map's statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "q_block", "k_block"),
    [(70, 90, 32, 1), (50, 130, 16, 4), (33, 40, 64, 8), (64, 64, 16, 16)],
)
def test_statistics_are_those_of_the_map(num_queries: int, num_keys: int, q_block: int, k_block: int) -> None:
    query, key, _ = inputs(num_queries, num_keys)
    weights, lse = weights_of(query, key)
    got = reference.column_statistics(query, key, lse, q_block, k_block, 8**-0.5)
    for mine, theirs in zip(got, by_hand(weights, q_block, k_block), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[1].sum(-1), torch.ones_like(got[1][..., 0]))


# -- predictions ---------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    threshold=st.sampled_from([0.0, 0.001, 0.02, 0.5, 2.0]),
    q_block=st.sampled_from([16, 32]),
    k_block=st.sampled_from([1, 4, 16]),
    text=st.sampled_from([0, 5, 20]),
)
def test_weights_decide_and_nothing_is_empty(threshold: float, q_block: int, k_block: int, text: int) -> None:
    query, key, _ = inputs(70, 70)
    weights, lse = weights_of(query, key)
    blocks = Blocks(q_block, k_block, 70, 70, ((0, text),))
    got = predict.by_weights(query, key, lse, blocks, threshold)
    maxima, _ = by_hand(weights, q_block, k_block)
    want = maxima >= threshold
    want |= maxima == maxima.amax(-1, keepdim=True)
    want[:, :, : -(-text // q_block)] = True
    want[..., : -(-text // k_block)] = True
    assert torch.equal(got.keep, want)
    assert bool(got.keep.any(-1).all())
    reads = got.keep.repeat_interleave(q_block, 2)[:, :, :70].repeat_interleave(k_block, 3)[..., :70]
    torch.testing.assert_close(got.dropped, (weights * ~reads).sum(-1).mean(-1))
    if threshold == 0:
        assert bool(got.keep.all())


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("k_block", [1, 4, 16])
def test_weights_count_the_bias_of_their_keys(
    k_block: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also head by head, and where a hidden key would weigh more than a number can hold."""
    monkeypatch.setattr(predict, "_MOST_CELLS", 1)
    query, key, _ = inputs(70, 70)
    key[:, :, 11] = 1e4 * query[:, ::2, 0]
    bias = torch.randn(1, heads, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bias[..., 5:20] = -torch.inf
    logits = query @ key.repeat_interleave(2, 1).mT * 8**-0.5 + bias[:, :, None]
    weights, lse = logits.softmax(-1), logits.logsumexp(-1)
    got = predict.by_weights(query, key, lse, Blocks(16, k_block, 70, 70), 0.05, key_bias=bias)
    maxima, _ = by_hand(weights, 16, k_block)
    assert torch.equal(got.keep, (maxima >= 0.05) | (maxima == maxima.amax(-1, keepdim=True)))
    assert not bool(got.keep.all())
    reads = got.keep.repeat_interleave(16, 2)[:, :, :70].repeat_interleave(k_block, 3)[..., :70]
    torch.testing.assert_close(got.dropped, (weights * ~reads).sum(-1).mean(-1))


def test_means_keep_the_fewest_blocks_that_hold_the_mass() -> None:
    query, key, _ = inputs(64, 90)
    blocks = Blocks(16, 8, 64, 90)
    means = torch.stack([part.mean(2) for part in query.split(16, 2)], 2)
    key_means = torch.stack([part.mean(2) for part in key.split(8, 2)], 2).repeat_interleave(2, 1)
    sizes = torch.tensor([8.0] * 11 + [2.0], dtype=torch.float64)
    weights = torch.softmax(means @ key_means.mT * 8**-0.5 + sizes.log(), -1)
    for mass in (0.3, 0.9, 1.0):
        keep = predict.by_means(query, key, blocks, mass=mass).keep
        held = (weights * keep).sum(-1)
        least = (weights.masked_fill(~keep, torch.inf)).amin(-1)
        assert bool((held >= mass - 1e-9).all())
        assert bool((held - least < mass).all()), "one block fewer would do"
        assert bool((weights.masked_fill(keep, 0).amax(-1) <= least).all()), "a better block was left out"


def test_blocks_unlike_their_mean_are_read_whole() -> None:
    query, key, _ = inputs(64, 64)
    query[:, :, 16:32] = query[:, :, 16:17]  # all alike
    key[:, :, :] = key[:, :, :1]
    keep = predict.by_means(query, key, Blocks(16, 8, 64, 64), topk=1, guard=0.99).keep
    assert keep.sum(-1).unique().tolist() == [1, 8]
    assert bool((keep[:, :, 1].sum(-1) == 1).all())


def test_masks_survive_packing() -> None:
    for columns in (1, 8, 13):
        keep = torch.rand(2, 3, 4, columns) > 0.5
        bits = predict.packed(keep)
        assert bits.shape[-1] == -(-columns // 8)
        assert torch.equal(predict.unpacked(bits, columns), keep)


@pytest.mark.parametrize("compact", [False, True])
def test_plans_of_a_prediction_read_what_it_keeps(compact: bool) -> None:
    keep = torch.rand(2, 3, 5, 9) > 0.6
    keep[..., 0] = True
    plan = Blocks(16, 8, 70, 70).plan(keep, compact=compact)
    assert torch.equal(plan.block_counts() > 0, keep)
    assert bool((plan.block_counts() <= 1).all())


# -- the method ----------------------------------------------------------------------------------------------------


def test_keeping_everything_is_full_attention() -> None:
    geometry = Geometry((8, 9), text=7)
    query, key, value = inputs(79, 79)
    got = BlockTopK(16, 8, top_p=1.0).layer(geometry).attend(query, key, value)
    full = nearfield.attend(query, key, value, nearfield.planning.full(79))
    torch.testing.assert_close(got.out, full.out)


def test_more_is_dropped_where_less_is_kept_and_the_truth_is_near_the_estimate() -> None:
    """Tokens that are alike inside blocks: there the means are right."""
    geometry = Geometry((8, 8))
    query, key, _ = (x[:, :, ::8].repeat_interleave(8, 2) for x in inputs(64, 64, heads=2))
    weights, _ = weights_of(query, key)
    dropped = []
    for keep in (0.25, 0.5, 1.0):
        prediction = BlockTopK(8, 8, keep=keep).layer(geometry).choose(query, key)
        reads = prediction.keep.repeat_interleave(8, 2).repeat_interleave(8, 3)
        torch.testing.assert_close(prediction.dropped, (weights * ~reads).sum(-1).mean(-1))
        dropped.append(float(prediction.dropped.mean()))
    assert dropped[0] > dropped[1] > dropped[2] == 0


def test_choosing_by_means_compiles_with_what_reads_it() -> None:
    geometry = Geometry((8, 9), text=7)
    query, key, value = (x.float() for x in inputs(79, 79))
    reader = BlockTopK(16, 8, top_p=0.8, min_similarity=0.2).layer(geometry)
    compiled = torch.compile(reader.attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value).out, reader.attend(query, key, value).out)


@pytest.mark.parametrize("mass", [0.8, None])
def test_choosing_by_means_is_a_proper_operator(mass: float | None) -> None:
    query, key, _ = inputs(40, 30)
    whole, always = torch.arange(3) == 1, torch.arange(4) == 2
    sizes = torch.tensor([8.0, 8, 8, 6], dtype=torch.float64).log()
    call = query, key, sizes, whole, always, 16, 8, mass, None if mass else 2, 0.3, 0.4, "auto"
    torch.library.opcheck(torch.ops.nearfield.keep_by_means, call)


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: BlockTopK(keep=0.5, top_p=0.5),
        ValueError,
        "`top_p` must be given instead of `keep`, not with it; got (0.5, 0.5).",
    ),
    (lambda: BlockTopK(keep=0.0), ValueError, "`keep` must lie above 0, up to 1; got 0.0."),
    (lambda: BlockTopK(top_p=1.5), ValueError, "`top_p` must lie above 0, up to 1; got 1.5."),
    (lambda: BlockTopK(min_similarity="a"), TypeError, "`min_similarity` must be a number; got 'a'."),
    (
        lambda: BlockTopK(k_block=3),
        ValueError,
        "`k_block` must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192; got 3.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[bad[2][:30] for bad in BAD_CALLS])
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message
