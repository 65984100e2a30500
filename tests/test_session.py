"""A host in plain torch works with a session: no framework, no hooks, one call of attention per layer."""

import math

import pytest
import torch
from tests.remembering import Remembering
from tests.tiles import paper
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nearfield.methods import Composition, Method, Moment
from nearfield.session import Layer, Pairs, Session, StepTracker, TokenLayout, find, key_bias

GRID = (9, 14)
LAYOUT = TokenLayout((GRID,), text=7)
CPU = torch.device("cpu")
SPARSE = paper(tiles=4, shared="none", dense_layers=0, dense_steps=0)


def session_of(method: Method, layers: int = 2, heads: int = 2, **options: bool) -> Session:
    reasons = [method.dense_layer_reason(index, layers) for index in range(layers)]
    found = [Layer(index, heads, True, reason, None) for index, reason in enumerate(reasons)]
    return Session(Composition.of(method), found, **options)


def tensors(tokens: int = math.prod(GRID) + 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, tokens, 16, generator=generator, dtype=torch.float64) for _ in range(3)]


def moved(x: Tensor, state: object, way: str) -> Tensor:
    """The text stays, image tokens change their order."""
    text, image = x[:, :, :7], x[:, :, 7:]
    return torch.cat([text, getattr(state.ordering, way)(image, dim=2)], dim=2)  # type: ignore[attr-defined]


def test_a_host_reads_what_the_plans_say() -> None:
    session = session_of(SPARSE)
    state = session.prepare(LAYOUT, CPU, 1)
    geometry = session.geometry(LAYOUT)
    order = torch.cat([torch.arange(7), 7 + SPARSE.ordering(geometry).order])
    query, key, value = tensors()
    for index, attention in enumerate(state.attentions):
        assert attention is not None
        out = attention.attend(*(moved(x, state, "enter") for x in (query, key, value))).out
        is_read = torch.zeros(len(order), len(order), dtype=torch.bool)
        is_read[order[:, None], order[None]] = SPARSE.plan(geometry, index).to_mask()[0, 0]
        expected = scaled_dot_product_attention(query, key, value, is_read)
        assert not is_read.all()
        assert torch.allclose(moved(out, state, "leave"), expected, rtol=0, atol=1e-12)


def test_states_are_made_once_and_few_are_kept() -> None:
    session = session_of(SPARSE)
    first = session.prepare(LAYOUT, "cpu", 1)
    assert session.prepare(LAYOUT, CPU, 2) is first is session.state
    for side in range(4, 12):
        assert session.is_known(LAYOUT, CPU)
        session.prepare(TokenLayout(((side, 4),)), CPU, 1)
    assert not session.is_known(LAYOUT, CPU)
    assert session.prepare(LAYOUT, CPU, 1) is not first
    session.close()
    assert session.state is None
    assert not session.is_known(LAYOUT, CPU)


def test_a_step_that_lies_back_begins_another_generation() -> None:
    session = session_of(Remembering())
    (attention, _) = session.prepare(LAYOUT, CPU, 1).attentions
    assert attention is not None
    inputs = tensors()
    for step in (0, 1):
        session.begin(Moment(step, 4))
        attention.attend(*inputs)
    kept = list(attention.known.values())  # type: ignore[attr-defined]
    assert kept
    session.begin(Moment(2, 4))
    assert list(attention.known.values()) == kept  # type: ignore[attr-defined]
    session.begin(Moment(0, 4))
    assert not attention.known  # type: ignore[attr-defined]


def test_dense_steps_are_the_first_and_last() -> None:
    session = session_of(paper(dense_steps=(0.5, 1)))
    assert session.has_dense_steps
    assert [session.is_dense_step(Moment(step, 6)) for step in range(6)] == [True] * 3 + [False] * 2 + [True]
    assert not session.is_dense_step(None)
    assert not session_of(SPARSE).has_dense_steps


def test_heads_may_be_said_late() -> None:
    session = session_of(SPARSE, heads=0)
    session.set_heads(2)
    assert [layer.heads for layer in session.layers] == [2, 2]
    state = session.prepare(LAYOUT, CPU, 1)
    session.set_heads(2)
    assert session.state is state
    session.set_heads(4)
    assert session.state is None


def test_one_order_for_all_layers_or_one_for_each() -> None:
    """A shared region in the centre stands elsewhere where there is no text."""
    method = paper(tiles=4, shared="centre")
    layers = [Layer(index, 2, sees_text, None, None) for index, sees_text in enumerate((True, False))]
    with pytest.raises(ValueError, match="`method` must order images alike with and without text"):
        Session(Composition.of(method), layers).prepare(LAYOUT, CPU, 1)
    apart = Session(Composition.of(method), layers, is_ordered_once=False).prepare(LAYOUT, CPU, 1)
    with_text, alone = apart.orders[True], apart.orders[False]
    assert not torch.equal(with_text.order, alone.order)  # type: ignore[attr-defined]


def test_pairs_are_those_of_the_plans() -> None:
    method = paper(tiles=4, shared="none", dense_layers=(1,), dense_steps=0.5)
    session = session_of(method)
    pairs = session.pairs(session.prepare(LAYOUT, CPU, 1))
    tokens = session.geometry(LAYOUT).num_tokens
    read = method.layer(session.geometry(LAYOUT)).num_pairs
    assert pairs == Pairs(2 * read, 2 * tokens**2, 4 * tokens**2, 4 * tokens**2)
    assert pairs.kept == (read + tokens**2) / (2 * tokens**2)
    assert pairs.kept_over(4, method) == pytest.approx((1 + pairs.kept) / 2)
    assert pairs.kept_over(None, method) == pairs.kept
    assert Pairs.sum([pairs, Pairs(None, 1, 1, 1)]).kept is None


def test_branches_are_known_by_name_or_by_text() -> None:
    tracker, schedule = StepTracker(), object()
    one, other = torch.zeros(1), torch.zeros(1)
    branches = []
    for step in range(2):
        for text in (one, other):
            tracker.set_text(text)
            branches.append(tracker.advance(Moment(step, 2), schedule).step.branch)
    assert branches == ["text 1", "text 2"] * 2
    assert tracker.advance(Moment(1, 2), schedule, "cond").step == Moment(1, 2, "cond")


def test_generations_end_with_their_schedule() -> None:
    tracker, schedule = StepTracker(), object()
    first, second = (tracker.advance(Moment(step, 2), schedule) for step in range(2))
    assert (first.is_first, second.is_first, second.is_new) == (True, False, False)
    assert tracker.advance(Moment(1, 2), object()).is_first
    assert tracker.advance(Moment(0, 2), schedule).is_first
    again = tracker.advance(Moment(0, 2), schedule)
    assert (again.is_first, again.is_new) == (False, True), "two images in one step"


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("blocks.*", ["blocks.0", "blocks.1", "blocks.2"]),
        ("blocks.*.a|b", [f"blocks.{index}.{name}" for index in range(3) for name in "ab"]),
        ("blocks.-1.b", ["blocks.2.b"]),
        ("blocks.*.c", []),
        ("", [""]),
    ],
)
def test_paths_name_modules(path: str, names: list[str]) -> None:
    blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()}) for _ in range(3))
    assert [name for name, _ in find(nn.ModuleDict({"blocks": blocks}), path)] == names


def test_masks_are_biases_on_keys() -> None:
    mask = torch.tensor([True, False, True])[None, None, None]
    assert key_bias(mask).tolist() == [[[0.0, -math.inf, 0.0]]]
    added = torch.randn(1, 2, 1, 3)
    assert torch.equal(key_bias(added), added[:, :, 0])
