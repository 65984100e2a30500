"""A newcomer's walk: a transformer of the FLUX family that no module of the package knows, made known by one spec."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxPosEmbed, FluxTransformerBlock
from tests.test_adapters import EVERYTHING, SPARSE, assert_differ, assert_same, double, oracle, run, trace
from tests.tiny_models import HEAD_DIM, HEADS, TEXT, Inputs, flux_inputs, settle
from torch import Tensor, nn

import nearfield
from nearfield import Geometry, Merge
from nearfield.diffusers import Move, Spec, define, models
from nearfield.diffusers.models import spec as registry

__all__ = ["oracle"]  # a fixture


class Meadow(nn.Module):
    """The tiny model: joint blocks of FLUX under other names, and a way in and out of its own."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.positions = FluxPosEmbed(10000, [4, 6, 6])
        self.pixels, self.words, self.time = nn.Linear(4, dim), nn.Linear(8, dim), nn.Linear(1, dim)
        self.trunk = nn.ModuleList(FluxTransformerBlock(dim, HEADS, HEAD_DIM) for _ in range(layers))
        self.exit_norm, self.exit = nn.LayerNorm(dim), nn.Linear(dim, 4)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
    ) -> Tensor:
        rotary = self.positions(torch.cat([txt_ids, img_ids]))
        image, text = self.pixels(hidden_states), self.words(encoder_hidden_states)
        time = self.time(timestep[:, None].to(image.dtype))
        for block in self.trunk:
            text, image = block(image, text, time, rotary)
        return self.exit(self.exit_norm(image))


def entry() -> Spec:
    return models.flux.FLUX.like(
        "Meadow",
        name="meadow",
        layers=("trunk.*.attn",),
        moves=(
            Move("", "hidden_states"),
            Move("", "img_ids", dim=-2),
            Move("exit_norm", None, "leave"),
        ),
        blocks=(),
    )


@pytest.fixture
def meadow() -> Iterator[Any]:
    define(entry())
    yield settle(Meadow())
    del registry.SPECS["Meadow"]


def meadow_inputs(grid: tuple[int, int], batch: int = 1) -> Inputs:
    names = tuple(inspect.signature(Meadow.forward).parameters)
    return {name: value for name, value in flux_inputs(grid, batch).items() if name in names}


def test_the_entry_is_short() -> None:
    body = inspect.getsource(entry).splitlines()[1:]
    assert len(body) < 20


def test_an_entry_must_say_how_large_the_image_is() -> None:
    with pytest.raises(ValueError) as error:
        models.flux.FLUX.like("Meadow", ids="")
    assert str(error.value) == (
        "`locate` must be given for Meadow where `ids` is not; got None. One of them says how large the image is."
    )


def test_it_was_not_known_before() -> None:
    with pytest.raises(ValueError, match=r"got Meadow\. One spec makes a class known") as error:
        nearfield.apply(Meadow(), SPARSE)
    assert "docs/models.md" in str(error.value)


@pytest.mark.parametrize("batch", [1, 2])
def test_reading_everything_is_the_stock_model(meadow: Any, batch: int) -> None:
    inputs = meadow_inputs((9, 14), batch)
    stock = run(meadow, inputs)
    with nearfield.apply(meadow, EVERYTHING):
        assert_same(run(meadow, inputs), stock)


def test_sparse_is_the_masked_stock_model(meadow: Any, oracle: Callable[..., Tensor]) -> None:
    grid = (9, 14)
    model, inputs = meadow.double(), double(meadow_inputs(grid))
    layout = Geometry(grid, TEXT)
    expected = oracle(model, inputs, SPARSE, {layout.num_tokens: layout})
    stock = run(model, inputs)
    with nearfield.apply(model, SPARSE) as handle:
        sparse = run(model, inputs)
        assert handle.geometry() == layout
    assert_same(sparse, expected)
    assert_differ(sparse, stock)


def test_summary_says_what_was_changed(meadow: Any) -> None:
    with nearfield.apply(meadow, SPARSE) as handle:
        words = handle.summary(height=144, width=224)
    assert (
        "Meadow\n  changed: 3 attention processors; tokens enter at hidden_states, img_ids and leave at"
        in words
    )
    assert "512 text + 9x14: 638 tokens" in words


def test_remove_leaves_no_trace(meadow: Any) -> None:
    before = trace(meadow)
    with nearfield.apply(meadow, SPARSE):
        assert trace(meadow) != before
    assert trace(meadow) == before


def test_what_the_entry_does_not_say_is_refused(meadow: Any) -> None:
    with pytest.raises(ValueError, match="to merge tokens in; got Meadow"):
        nearfield.apply(meadow, Merge())


def test_a_class_that_derives_from_it_is_known_too(meadow: Any) -> None:
    class Lawn(Meadow):
        pass

    inputs = meadow_inputs((9, 14))
    lawn = settle(Lawn())
    with nearfield.apply(lawn, EVERYTHING):
        assert_same(run(lawn, inputs), run(meadow, inputs))
