"""`apply(..., mesh=)`: real processes that split the tokens of a real FLUX class among them."""

from collections.abc import Iterator

import pytest
import torch
from tests.split_models import METHODS, Ran, disagreeing, gradients, refused, run, run_kind
from tests.worlds import Failed, World, world_of


@pytest.fixture(scope="module", params=[2, 3], ids=lambda size: f"{size} ranks")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as running:
        yield running


@pytest.mark.parametrize("name", METHODS)
def test_split_model_gives_what_the_whole_one_does(world: World, name: str) -> None:
    wanted = run(None, name)
    ran: list[Ran] = world.run(run, name)
    for one in ran:
        assert torch.allclose(one.outs[0], wanted.outs[0], rtol=1e-9, atol=1e-9)
        assert torch.equal(one.outs[0], one.outs[1])
        assert torch.equal(one.outs[0], ran[0].outs[0])  # bit-equal on all ranks
        assert torch.equal(one.outs[2], wanted.outs[2])  # nothing stays behind
        assert one.bytes_sent > 0
    assert not torch.allclose(wanted.outs[0], wanted.outs[2])


def test_reference_images_are_split_too(world: World) -> None:
    wanted = run(None, "two-way", ((6, 8),))
    for one in world.run(run, "two-way", ((6, 8),)):
        assert torch.allclose(one.outs[0], wanted.outs[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["flux2", "qwen", "pixart"])
def test_other_models_are_split(world: World, kind: str) -> None:
    """Wrong by at most twice as much as one process in the same precision."""
    exact = run_kind(None, kind, torch.float64)
    budget = 2 * (run_kind(None, kind) - exact).norm()
    for out in world.run(run_kind, kind):
        assert (out - exact).norm() <= budget


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_gradients_averaged_over_ranks_are_those_of_one_process(world: World, is_checkpointed: bool) -> None:
    """Up to the rounding of float32, in which FLUX rotates queries and keys even here."""
    wanted = gradients(None, False)
    for found in world.run(gradients, is_checkpointed):
        for mine, one in zip(found, wanted, strict=True):
            assert (mine - one).norm() <= torch.finfo(torch.float32).eps * one.norm()


def test_summary_tells_about_the_split(world: World) -> None:
    ran: list[Ran] = world.run(run, "two-way")
    for rank, one in enumerate(ran):
        assert f"split: 127 tokens over {world.size} ranks:" in one.summary
        assert "7 on all" in one.summary
        assert f"rank {rank} sends" in one.summary


@pytest.mark.parametrize("about", ["target", "method", "tokens", "hidden_states"])
def test_ranks_that_were_started_differently_are_told(world: World, about: str) -> None:
    for answer in world.tell(disagreeing, about):
        assert isinstance(answer, Failed)
        assert answer[0] == "ValueError"
        assert f"`{about}` must be the same on every rank; got" in answer[1]


def test_what_cannot_be_split_is_refused(world: World) -> None:
    for messages in world.run(refused):
        assert len(messages) == 3
        assert "`target` must be, or have, one of FluxTransformer2DModel" in messages[0]
        assert "got UNet2DConditionModel" in messages[0]
        for message in messages[1:]:
            assert (
                "`method` must read one plan per layer, known beforehand (Hilbert without `far`)" in message
            )
