"""Baselines: what they merge and read, against loops and masks."""

from typing import Any

import pytest
import torch
from tests import tiny_models
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import nearfield
from nearfield import Geometry
from nearfield.methods import BipartiteMerge, StridedKeys
from nearfield.methods.baselines import shortening as peers
from nearfield.ops.merge.api import Assignment, matched

GEOMETRY = Geometry((5, 7), 3, references=((4, 4),))


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(
        2, GEOMETRY.num_image_tokens, 6, generator=torch.Generator().manual_seed(seed)
    ).double()


@pytest.mark.parametrize("stride", [2, 3])
def test_every_cell_has_one_destination(stride: int) -> None:
    chosen = peers._random_destinations(((5, 7), (2, 6, 4)), stride, 1)
    first, video = chosen[:35].view(5, 7), chosen[35:].view(2, 6, 4)
    for image in (first, *video):
        cells = [cell for rows in image.split(stride) for cell in rows.split(stride, dim=1)]
        assert [int(cell.sum()) for cell in cells] == [1] * len(cells)
    assert not torch.equal(chosen, peers._random_destinations(((5, 7), (2, 6, 4)), stride, 2))


def test_all_destinations_stay_and_as_many_tokens_as_asked_for() -> None:
    method = BipartiteMerge(0.5)
    made, x = method.merging(tokens(), GEOMETRY), tokens()
    destinations = peers._random_destinations(GEOMETRY.images, 2, 0).nonzero().flatten().tolist()
    assert method.regions(GEOMETRY).counts == (35 - 17, 8)
    for sample in range(2):
        assert set(destinations) <= set(made.destinations[sample].tolist())
        assert made.destinations[sample].diff().gt(0).all()
    short = made.enter(x)
    assert short.shape == (2, 26, 6)
    torch.testing.assert_close(made.enter(made.leave(short)), short, rtol=1e-12, atol=1e-12)
    assert made.sizes.sum(1).tolist() == [51, 51]
    torch.testing.assert_close(made.key_bias[:, 0].exp(), made.sizes)
    # Every merged token is the mean of its own.
    for sample, slot in ((0, 3), (1, 11)):
        mine = x[sample][made.owners[sample] == slot]
        torch.testing.assert_close(short[sample, slot], mine.mean(0))


def test_ratio_zero_is_the_identity() -> None:
    x = tokens()
    made = BipartiteMerge(0).merging(x, GEOMETRY)
    assert torch.equal(made.enter(x), x)
    assert torch.equal(made.leave(x), x)


def test_no_token_leaves_its_image() -> None:
    made = BipartiteMerge(0.7).merging(tokens(), GEOMETRY)
    owner = made.destinations.gather(1, made.owners)
    assert owner[:, :35].max() < 35 <= owner[:, 35:].min()


def test_gradients_flow_through_tokens() -> None:
    x = tokens()[:1, :35].clone()
    made = matched(
        x, BipartiteMerge(0.5).regions(Geometry((5, 7))), peers._random_destinations(((5, 7),), 2, 0)
    )
    assert isinstance(made, Assignment)
    assert torch.autograd.gradcheck(lambda y: made.leave(made.enter(y) ** 2), (x.requires_grad_(),))


@pytest.mark.parametrize("text_first", [True, False])
def test_every_second_key_is_read(text_first: bool) -> None:
    geometry = Geometry((5, 7), 3, text_first, references=((4, 4),))
    query, key, value = torch.randn(3, 2, 2, geometry.num_tokens, 8, dtype=torch.float64)
    reads = [torch.zeros(grid, dtype=torch.bool) for grid in geometry.images]
    for image in reads:
        image[::2, ::2] = True
    words = torch.ones(3, dtype=torch.bool)
    images = torch.cat([image.flatten() for image in reads])
    mask = torch.cat([words, images] if text_first else [images, words])
    bias = torch.randn(2, 1, geometry.num_tokens, dtype=torch.float64)
    reader = StridedKeys().layer(geometry)
    found = reader.attend(query, key, value, key_bias=bias.float())
    logits = bias.float().double()[:, :, None].masked_fill(~mask, -torch.inf)
    expected = scaled_dot_product_attention(query, key, value, logits.expand(-1, 2, geometry.num_tokens, -1))
    torch.testing.assert_close(found.out, expected)
    assert reader.num_pairs == geometry.num_tokens * int(mask.sum())
    assert StridedKeys(stride=1).layer(geometry).num_pairs == geometry.num_tokens**2


def test_apply_says_what_they_do() -> None:
    model = tiny_models.flux()
    inputs = tiny_models.flux_inputs((6, 8), 2)
    with torch.no_grad():
        stock = model(**inputs)[0]
        for method, words in (
            (BipartiteMerge(skip_blocks=(0, 0)), "12 random destinations, one per 2x2"),
            (StridedKeys(dense_layers=0, dense_steps=0), "55 tokens read 19 keys"),
        ):
            with nearfield.apply(model, method) as handle:
                assert not torch.allclose(model(**inputs)[0], stock)
                assert words in handle.summary()
        with nearfield.apply(model, StridedKeys(stride=1, dense_layers=0, dense_steps=0)):
            assert (model(**inputs)[0] - stock).abs().max() <= 1e-5 * stock.abs().max()
        assert torch.equal(model(**inputs)[0], stock)


BAD: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: BipartiteMerge(0.8),
        ValueError,
        "`ratio` must be from 0 to 0.75 where one token of 2x2 stays; got 0.8.",
    ),
    (lambda: BipartiteMerge("half"), TypeError, "`ratio` must be a number; got 'half'."),
    (lambda: BipartiteMerge(stride=1), ValueError, "`stride` must be at least 2; got 1."),
    (lambda: BipartiteMerge(size_bias="no"), TypeError, "`size_bias` must be True or False; got 'no'."),
    (
        lambda: nearfield.methods.Composition(BipartiteMerge(), nearfield.Hilbert()),
        TypeError,
        "`merge` must merge inside runs of an order to go together with attention; got BipartiteMerge.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message
