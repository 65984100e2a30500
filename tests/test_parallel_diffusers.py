"""`apply` on models whose ranks diffusers' `enable_parallelism` was told, with real processes."""

from collections.abc import Iterator

import diffusers
import pytest
import torch
from tests import parallelised_models, split_models
from tests.parallelised_models import Ran, Rested, both_degrees, refused, rest, run_video
from tests.worlds import World, world_of

from nearfield.diffusers import Spec, all_specs


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as running:
        yield running


@pytest.mark.parametrize("name", ["two-way", "far", "merged and sparse"])
def test_ranks_of_enable_parallelism_split_the_model(world: World, name: str) -> None:
    wanted = split_models.run(None, name)
    ran: list[Ran] = world.run(parallelised_models.run, name)
    for one in ran:
        assert torch.allclose(one.out, wanted.outs[0], rtol=1e-9, atol=1e-9)
        assert torch.equal(one.out, ran[0].out)
        assert one.bytes_sent > 0
        assert f"split: 127 tokens over {world.size} ranks:" in one.summary
        assert "ranks are those of enable_parallelism, whose own split rests until remove()" in one.summary


@pytest.mark.parametrize("kind", ["wan", "wan_ti2v"])
def test_video_models_too(world: World, kind: str) -> None:
    """Wrong by at most twice as much as one process in the same precision."""
    exact = split_models.run_kind(None, kind, torch.float64)
    budget = 2 * (split_models.run_kind(None, kind) - exact).norm()
    for out in world.run(run_video, kind):
        assert (out - exact).norm() <= budget


@pytest.mark.parametrize("num_parallelised", [1, 2])
def test_pipeline_of_two_models_under_guidance(world: World, num_parallelised: int) -> None:
    wanted = parallelised_models.generate(None, 0)
    for video in world.run(parallelised_models.generate, num_parallelised):
        assert (video - wanted).norm() <= 1e-6 * wanted.norm()


def test_gradients_are_those_of_one_process(world: World) -> None:
    """Up to the rounding of float32, in which FLUX rotates queries and keys even here."""
    wanted = split_models.gradients(None, False)
    for found in world.run(parallelised_models.gradients):
        for mine, one in zip(found, wanted, strict=True):
            assert (mine - one).norm() <= torch.finfo(torch.float32).eps * one.norm()


@pytest.mark.parametrize("way", ["handle", "remove", "failure"])
def test_diffusers_goes_on_where_it_was_interrupted(world: World, way: str) -> None:
    ran: list[Rested] = world.run(rest, way)
    for one in ran:
        assert one.is_restored == [True, True]
        assert torch.equal(one.before, one.after)
        assert not torch.allclose(one.before, one.between, rtol=1e-3, atol=1e-3)


def test_what_does_not_go_together_is_refused(world: World) -> None:
    backwards = list(reversed(range(world.size)))
    expected = [
        f"`mesh` must have one dimension; got ({world.size}, 1).",
        f"`mesh` must hold the ranks {backwards[::-1]} that FluxTransformer2DModel was parallelised over; got "
        f"{backwards}. Leave out `mesh`, and call `enable_parallelism` with one mesh on all models of a pipeline.",
        "`method` must decide by the geometry alone who reads whom to be split over ranks; got LogLinear(",
        "`target` must be parallelised before nearfield is applied; got another since.",
    ]
    for messages in world.run(refused):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


def test_ring_and_ulysses_are_one_row_of_ranks() -> None:
    wanted = split_models.run(None, "keys")
    with world_of(4) as world:
        for out in world.run(both_degrees):
            assert torch.allclose(out, wanted.outs[0], rtol=1e-9, atol=1e-9)


# What diffusers' plans cut beyond images: the text, which nearfield keeps whole on every rank.
TEXT = {
    "encoder_hidden_states",
    "encoder_hidden_states_mask",
    "encoder_attention_mask",
    "txt_ids",
    ("pos_embed", 1),
}
# Moved further in, as what the model makes of it.
ELSEWHERE = {("WanTransformer3DModel", "timestep")}


@pytest.mark.parametrize(
    "spec", [spec for spec in all_specs() if spec.can_split], ids=lambda spec: spec.model
)
def test_all_that_diffusers_cuts_is_split(spec: Spec) -> None:
    """A tensor of image tokens that a release adds to its plan, and nearfield leaves whole, is noticed here."""
    moved = {(move.place, move.what) if isinstance(move.what, int) else move.what for move in spec.moves}
    plan = getattr(diffusers, spec.model)._cp_plan or {}
    cut = {
        (place, what) if isinstance(what, int) else what
        for place, inputs in plan.items()
        if isinstance(inputs, dict)
        for what in inputs
    }
    elsewhere = {what for model, what in ELSEWHERE if model == spec.model}
    assert cut - TEXT - elsewhere <= moved
    assert bool(cut - TEXT) == (spec.model != "PixArtTransformer2DModel")  # which has no plan
