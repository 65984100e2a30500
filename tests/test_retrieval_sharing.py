"""A context over real ranks, beside the same context in one process."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from tests.shared_contexts import LENGTHS, PREFIX, QUESTION, Outcome, answered, texts, unlike_prefixes
from tests.tiny_language_models import language_model
from tests.worlds import World, world_of

from nearfield.retrieval import Context, assemble, prefill_chunk, recompute, score, select
from nearfield.retrieval.fidelity import next_logits


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as running:
        yield running


def alone(name: str) -> Context:
    model = language_model(name)
    return assemble(model, [prefill_chunk(model, part, PREFIX) for part in texts()])


@pytest.mark.parametrize(("name", "ratio"), [("llama", 0.15), ("qwen3", 0.4), ("gemma3", 1.0)])
def test_ranks_do_what_one_process_does(world: World, name: str, ratio: float) -> None:
    outcomes: list[Outcome] = world.run(answered, name, ratio)
    model, context = language_model(name), alone(name)
    scores = score(model, context, QUESTION)
    rows = select(context, scores, ratio)
    recompute(model, context, rows)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.scores.double(), scores.double(), rtol=1e-5, atol=1e-9)
        assert torch.equal(outcome.rows, rows)
        assert torch.equal(outcome.tokens, context.tokens)
        assert torch.equal(outcome.offset, context.offset)
        for (keys, values), layer in zip(outcome.layers, context.cache.layers, strict=True):
            torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(values, layer.values, rtol=1e-9, atol=1e-9)
    expected = next_logits(model, QUESTION, context)
    for outcome in outcomes:
        torch.testing.assert_close(outcome.logits, expected, rtol=1e-9, atol=1e-9)
    for one, two in pairwise(outcomes):
        assert torch.equal(one.scores, two.scores)
        assert torch.equal(one.logits, two.logits)


def test_everything_recomputed_over_ranks_is_full_prefill(world: World) -> None:
    outcome: Outcome = world.run(answered, "llama", 1.0)[0]
    model = language_model()
    with torch.no_grad():
        expected = model(torch.cat([outcome.tokens, QUESTION])[None]).logits[0, -1]
    torch.testing.assert_close(outcome.logits, expected, rtol=1e-9, atol=1e-9)


def test_only_selected_rows_travel(world: World) -> None:
    """Three times the context and equally many rows: recomputing sends no more, scoring one number per row."""
    short: list[Outcome] = world.run(answered, "llama", 1.0, 1, 12)
    long: list[Outcome] = world.run(answered, "llama", 1.0, 3, 12)
    size, heads, width, layers = world.size, 4, 8, 4
    per_rank = len(LENGTHS) // size
    for rank, (one, two) in enumerate(zip(short, long, strict=True)):
        assert one.bytes_recomputed == two.bytes_recomputed
        own = LENGTHS[rank * per_rank :][:per_rank]
        scores = (two.bytes_scored - one.bytes_scored) / (size - 1)
        assert scores == pytest.approx(8 * 2 * sum(own), abs=16)
    # All rows are the last rank's: it sends their queries, and gets outputs and logs of sums, but in the last layer.
    row = 12 * heads * width * 8 * (layers - 1)
    assert short[-1].bytes_recomputed == (size - 1) * row
    assert all(outcome.bytes_recomputed == row + row // width for outcome in short[:-1])


def test_one_row_keeps_every_rank_in_step(world: World) -> None:
    """Ranks that hold no selected row still read for those that do."""
    outcomes: list[Outcome] = world.run(answered, "llama", 0.2, 1, 1)
    model, context = language_model(), alone("llama")
    recompute(model, context, outcomes[0].rows)
    for (keys, _), layer in zip(outcomes[-1].layers, context.cache.layers, strict=True):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-9, atol=1e-9)


def test_unlike_prefixes_are_refused_on_every_rank(world: World) -> None:
    for answer in world.tell(unlike_prefixes):
        assert answer[0] == "ValueError"
        assert "`prefix` must be the same on every rank" in answer[1]
