"""Orderings: tokens enter in the order and leave as they came."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nearfield import Ordering, curves

ORDER = torch.tensor([2, 0, 3, 1])


@st.composite
def permutations(draw):
    length = draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    return torch.randperm(length, generator=generator)


@given(permutations(), st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_tokens_enter_in_the_order_and_leave_as_they_came(order, dim):
    ordering = Ordering(order)
    shape = [2, 3, 4]
    shape[dim] = len(order)
    tokens = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    entered = ordering.enter(tokens, dim)
    for place, raster in enumerate(order.tolist()):
        assert torch.equal(entered.select(dim, place), tokens.select(dim, raster))
    assert torch.equal(ordering.leave(entered, dim), tokens)
    assert torch.equal(ordering.enter(ordering.leave(tokens, dim), dim), tokens)


def test_the_token_axis_is_the_second_by_default():
    tokens = torch.arange(8).view(1, 4, 2)
    assert Ordering(ORDER).enter(tokens).tolist() == [[[4, 5], [0, 1], [6, 7], [2, 3]]]
    assert Ordering(ORDER).leave(tokens).tolist() == [[[2, 3], [6, 7], [0, 1], [4, 5]]]


def test_orders_may_be_of_any_integer_type():
    tokens = torch.randn(1, 4, 2)
    for dtype in (torch.int32, torch.int64):
        ordering = Ordering(ORDER.to(dtype))
        assert torch.equal(ordering.leave(ordering.enter(tokens)), tokens)


@given(st.lists(permutations(), min_size=1, max_size=4))
def test_joined_orders_keep_to_their_own_tokens(orders):
    joined = Ordering.joined(orders)
    start = 0
    for order in orders:
        part = joined.order[start : start + len(order)]
        assert torch.equal(part - start, order)
        start += len(order)
    assert len(joined) == start


def test_gradients_follow_the_tokens_back():
    tokens = torch.randn(1, 4, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(1, 4, 2, dtype=torch.float64)
    (Ordering(ORDER).enter(tokens) * weights).sum().backward()
    assert torch.equal(tokens.grad, Ordering(ORDER).leave(weights))


def test_moving_to_a_device_moves_both_ways():
    ordering = Ordering(ORDER)
    assert ordering.to("cpu") is ordering
    moved = ordering.to("meta")
    assert (moved.order.device.type, moved.inverse.device.type, len(moved)) == ("meta", "meta", 4)
    assert moved.enter(torch.empty(1, 4, 2, device="meta")).shape == (1, 4, 2)


BAD = [
    (lambda: Ordering([0, 1]), TypeError, "`order` must be a tensor; got list."),
    (lambda: Ordering(ORDER[None]), ValueError, "`order` must have 1 dimensions; got shape [1, 4]."),
    (
        lambda: Ordering(ORDER.float()),
        TypeError,
        "`order` must hold integers; got torch.float32. Pass what hilbert, morton or raster returned.",
    ),
    (
        lambda: Ordering(ORDER + 1),
        ValueError,
        "`order` must hold each of 0 ... 3 once; got repeated or missing ones. "
        "Pass what hilbert, morton or raster returned.",
    ),
    (lambda: Ordering.joined([]), ValueError, "`orders` must hold at least one order; got none."),
    (lambda: Ordering(ORDER).enter([1, 2]), TypeError, "`x` must be a tensor; got list."),
    (
        lambda: Ordering(ORDER).enter(torch.zeros(2, 5, 4)),
        ValueError,
        "`x` must have 4 tokens in dimension 1; got shape [2, 5, 4].",
    ),
    (
        lambda: Ordering(ORDER).leave(torch.zeros(2, 4, 5), dim=-1),
        ValueError,
        "`y` must have 4 tokens in dimension -1; got shape [2, 4, 5].",
    ),
    (
        lambda: Ordering(ORDER).enter(torch.zeros(4)),
        ValueError,
        "`dim` must be a dimension of `x` (shape [4]); got 1.",
    ),
    (
        lambda: Ordering(ORDER).enter(torch.zeros(2, 4, device="meta")),
        ValueError,
        "`x` must be on the device of `order` (cpu); got meta. Move it with `.to(device)`.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[message[:60] for _, _, message in BAD])
def test_bad_calls_are_refused(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_the_inverse_is_the_curves_own():
    order = curves.hilbert((5, 8))
    assert torch.equal(Ordering(order).inverse, curves.inverse(order))
