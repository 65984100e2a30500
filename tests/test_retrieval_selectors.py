"""Selectors against the attention weights, keys and values that the model itself gives."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.test_retrieval import assert_refused, chunks_of, context_of, every_class, layers_of
from tests.tiny_language_models import full_prefill, language_model, random_tokens
from torch import Tensor

from nearfield.retrieval import (
    CacheBlend,
    Context,
    Epic,
    InfoFlow,
    Random,
    assemble,
    best_last,
    chunk_shares,
    score,
    select,
)

QUESTION = random_tokens(11, seed=7)


def stock_weights(model: Any, context: Context, question: Tensor) -> list[Tensor]:
    """Attention weights `[N, T]` of each layer, averaged over heads, as the model's eager attention gives them."""
    model.set_attn_implementation("eager")
    start = int(context.positions.max()) + 1
    with torch.no_grad():
        attentions = model(
            input_ids=question[None],
            position_ids=torch.arange(start, start + len(question))[None],
            past_key_values=copy.deepcopy(context.cache),
            output_attentions=True,
        ).attentions
    model.set_attn_implementation("sdpa")
    return [weights[0].double().mean(0)[:, : context.num_tokens] for weights in attentions]


@every_class
def test_infoflow_is_the_norm_of_the_models_own_weights(name: str) -> None:
    model = language_model(name)
    context = context_of(model)
    weights = stock_weights(model, context, QUESTION)
    expected = (weights[1].norm(dim=0) + weights[2].norm(dim=0)) / 2
    # The eager attention of transformers computes its softmax in single precision.
    torch.testing.assert_close(score(model, context, QUESTION).double(), expected, rtol=1e-5, atol=1e-8)


def test_infoflow_by_sums_of_all_layers() -> None:
    model = language_model()
    context = context_of(model)
    expected = torch.stack(stock_weights(model, context, QUESTION)).sum(1).mean(0)
    found = score(model, context, QUESTION, InfoFlow(depth=(0, 1), norm="sum"))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-8)


def test_infoflow_under_local_positions() -> None:
    model = language_model()
    context = assemble(model, chunks_of(model), geometry="local")
    expected = stock_weights(model, context, QUESTION)[0].norm(dim=0)
    found = score(model, context, QUESTION, InfoFlow(depth=(0, 0.25)))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(
        found, score(model, context_of(model), QUESTION, InfoFlow(depth=(0, 0.25))), rtol=0.01
    )


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [0]), (2, [0, 1]), (32, list(range(14, 21))), (4, [1, 2])]
)
def test_scoring_layers(count: int, expected: list[int]) -> None:
    assert list(InfoFlow().layers(count)) == expected


def test_scoring_stops_after_the_last_scoring_layer() -> None:
    model = language_model()
    context = context_of(model)
    ran = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_, layer=index: ran.append(layer))
        for index, layer in enumerate(model.model.layers)
    ]
    score(model, context, QUESTION)
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1, 2]


@pytest.mark.parametrize("name", ["infoflow", "cacheblend", "epic", "random", "all", "none"])
def test_scoring_changes_nothing(name: Any) -> None:
    model = language_model()
    context = context_of(model)
    before = copy.deepcopy(layers_of(context))
    scores = score(model, context, QUESTION, name)
    assert scores.shape == (context.num_tokens,)
    assert not scores.is_inference()
    assert torch.equal(scores, score(model, context, QUESTION, name))
    for found, expected in zip(layers_of(context), before, strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("of", ["key", "value"])
def test_cacheblend_is_the_deviation_from_full_prefill(of: Any) -> None:
    model = language_model()
    context = context_of(model, (150, 90))
    side = 0 if of == "key" else 1
    difference = full_prefill(model, context.tokens)[2][side] - layers_of(context)[2][side]
    found = score(model, context, QUESTION, CacheBlend(layer=2, of=of))
    torch.testing.assert_close(found, difference.square().sum((0, 1, 3)))
    assert found[152:].min() > 1e6 * found[:152].max()


def test_epic_takes_the_first_rows_of_each_chunk() -> None:
    model = language_model()
    context = context_of(model)
    rows = select(context, score(model, context, QUESTION, Epic()), ratio=0.08)
    assert rows.tolist() == [39, 40, 41, 42, 59, 60, 61]  # int(0.08 * 92) = 7 of two chunks


def test_random_depends_on_its_seed() -> None:
    model = language_model()
    context = context_of(model)
    one, two = (score(model, context, QUESTION, Random(seed)) for seed in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(("ratio", "count"), [(0, 0), (1e-6, 1), (0.15, 13), (0.5, 46), (1, 53)])
def test_budget(ratio: float, count: int) -> None:
    """The ratio counts all rows of the context; those of the first chunk are never taken."""
    context = context_of(language_model())
    rows = select(context, torch.rand(92), ratio)
    assert len(rows) == count
    assert (rows[1:] > rows[:-1]).all()
    assert (rows >= 39).all()


def test_select_takes_the_best() -> None:
    context = context_of(language_model())
    scores = torch.zeros(92)
    scores[[0, 50, 91, 60]] = torch.tensor([9.0, 3.0, 2.0, 1.0])
    assert select(context, scores, 2 / 92).tolist() == [50, 91]
    assert select(context, torch.zeros(92), 2 / 92).tolist() == [39, 40]


def test_chunks_are_ranked_by_the_share_that_is_selected() -> None:
    context = context_of(language_model())
    scores = torch.zeros(92)
    scores[[2, 3, 39, 40, 41, 42, 59]] = 1.0
    shares = chunk_shares(context, scores, 7 / 92)
    assert shares == pytest.approx([2 / 37, 4 / 20, 1 / 33])
    assert best_last(shares) == [2, 0, 1]


def test_one_chunk_needs_no_rows() -> None:
    context = context_of(language_model(), (30,))
    assert select(context, torch.rand(32), 1.0).tolist() == []


def test_bad_calls() -> None:
    model = language_model()
    context = context_of(model)
    names = "'infoflow', 'cacheblend', 'epic', 'random', 'all', 'none'"
    best: Any = "best"
    assert_refused(
        [
            (
                ValueError,
                f"`selector` must be one of {names}; got 'best'",
                lambda: score(model, context, QUESTION, best),
            ),
            (
                ValueError,
                r"`ratio` must lie between 0 and 1; got 1\.5",
                lambda: select(context, torch.zeros(92), 1.5),
            ),
            (
                ValueError,
                "`scores` must have one entry for each of 92 rows; got",
                lambda: select(context, torch.zeros(91)),
            ),
            (
                ValueError,
                "`layer` must be below 4, the model's layers; got 4",
                lambda: score(model, context, QUESTION, CacheBlend(layer=4)),
            ),
            (
                ValueError,
                "`depth` must ascend between 0 and 1; got",
                lambda: replace(InfoFlow(), depth=(0.5, 0.4)),
            ),
            (
                ValueError,
                "`question` must hold at least one token",
                lambda: score(model, context, QUESTION[:0]),
            ),
        ]
    )
