"""Numbers of tiles by layer: whose tiles a layer has, what is said of them, and what takes such a method."""

import json
from typing import Any

import pytest
import torch
from tests import command_line as cli
from tests import tiny_models
from tests.tiles import paper

import nearfield
from nearfield import Geometry, Hilbert, Merge
from nearfield_lab.quality.results import pairs_kept

GEOMETRY = Geometry((12, 16), text=7)
BY_LAYER = (2, 2, 5, 3)
IN_LAYERS = (2, 2, 5, 3, 3, 3, 3)
"""The last number goes on."""


@pytest.mark.parametrize(
    "fields", [{}, {"far": 8}, {"far": 8, "interleave": True, "share": "keys"}, {"shared": "none"}], ids=str
)
def test_a_layer_has_the_tiles_of_its_number(fields: dict[str, Any]) -> None:
    method = paper(tiles=BY_LAYER, **fields)
    for layer, tiles in enumerate(IN_LAYERS):
        alone = paper(tiles=tiles, **fields)
        assert method.tiles_in(layer) == tiles
        assert method.plan(GEOMETRY, layer, heads=4) is alone.plan(GEOMETRY, layer, heads=4)
        assert method.layer(GEOMETRY, layer, heads=4).far is alone.layer(GEOMETRY, layer, heads=4).far
    assert torch.equal(method.ordering(GEOMETRY).order, alone.ordering(GEOMETRY).order)
    assert method.sections(GEOMETRY) == alone.sections(GEOMETRY)
    assert method.pieces(GEOMETRY) == alone.pieces(GEOMETRY)


@pytest.mark.parametrize(
    ("tiles", "changes"),
    [(None, (0,)), (4, (0,)), ((4,), (0,)), ((4, 4), (0,)), (BY_LAYER, (0, 2, 3)), ((4, 2, 2, 4), (0, 1, 3))],
)
def test_layers_in_which_the_number_changes(tiles: Any, changes: tuple[int, ...]) -> None:
    assert Hilbert(tiles=tiles).tile_changes == changes


def test_a_list_is_a_tuple() -> None:
    assert Hilbert(tiles=[4, 16]) == Hilbert(tiles=(4, 16))  # type: ignore[arg-type]
    assert len({Hilbert(tiles=[4, 16]), Hilbert(tiles=(4, 16)), Hilbert(tiles=(16, 4))}) == 2  # type: ignore[arg-type]


def test_describe_speaks_of_every_number() -> None:
    words = paper(tiles=(4, 4, 2, 4, 8), shared="none").describe(Geometry((32, 32)))
    parts = [
        paper(tiles=tiles, shared="none").describe(Geometry((32, 32))).split("\n")[1:] for tiles in (4, 2, 8)
    ]
    assert words.split("\n") == [
        "32x32: 1024 tokens",
        "  layers 0 to 1, 3:",
        *parts[0],
        "  layers 2:",
        *parts[1],
        "  layers from 4 on:",
        *parts[2],
    ]


def test_pairs_are_those_of_every_layer() -> None:
    method = paper(tiles=(2, 4, 8), far=8, dense_layers=(-1,), dense_steps=0)
    alone = [
        paper(tiles=tiles, far=8).layer(GEOMETRY, layer).num_pairs for layer, tiles in enumerate((2, 4, 8, 8))
    ]
    counted = (sum(alone) / GEOMETRY.num_tokens**2 + 1) / 5
    assert pairs_kept(method, GEOMETRY, layers=5, steps=4) == pytest.approx(counted, rel=1e-12)


def test_borders_are_those_of_all_numbers_and_of_a_cycle_of_the_last() -> None:
    method = paper(tiles=BY_LAYER)
    numbers = [2, 2, 5, 3, 3, 3, 3]  # up to layer 3, which is the last that differs, and with it a cycle of 4
    layers = [paper(tiles=tiles).borders(GEOMETRY, layers=[layer]) for layer, tiles in enumerate(numbers)]
    for name in ("right", "below"):
        wanted = torch.stack([getattr(layer, name) for layer in layers]).mean(dim=0)
        torch.testing.assert_close(getattr(method.borders(GEOMETRY), name), wanted)


# -- in a model --------------------------------------------------------------------------------------------------------


def run(method: Any) -> torch.Tensor:
    model = tiny_models.flux()
    with nearfield.apply(model, method), torch.no_grad():
        return tiny_models.first(model(**tiny_models.flux_inputs((12, 16))))


@pytest.mark.parametrize(
    "merge", [None, Merge(0.5, region_size=8, skip_blocks=(0, 0))], ids=["alone", "merged"]
)
def test_a_layer_of_one_tile_is_a_dense_one(merge: Merge | None) -> None:
    """Layers 1 and 4 of five: those between have numbers of their own, and the last goes on."""

    def method(**fields: Any) -> Any:
        attention = paper(dense_steps=0, far=8, **fields)
        return attention if merge is None else merge | attention

    by_layer = run(method(tiles=(4, 1, 4, 4, 1), dense_layers=0))
    torch.testing.assert_close(by_layer, run(method(tiles=4, dense_layers=(1, 4))), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(by_layer, run(method(tiles=4, dense_layers=0)), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("merge", [None, Merge(0.5)], ids=["alone", "merged"])
def test_numbers_for_more_layers_than_there_are(merge: Merge | None) -> None:
    method = Hilbert(tiles=(4, 4, 4, 4, 4, 16))
    with pytest.raises(ValueError) as error:
        nearfield.apply(tiny_models.flux(), method if merge is None else merge | method)
    assert str(error.value) == (
        "`tiles` must change within the 5 layers of the model; got (4, 4, 4, 4, 4, 16)."
    )


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near", ["tile", "around"])
def test_explain_takes_numbers_by_layer(near: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"explain --set near={near} --grid 16x16 --text 0 --set tiles=2,4,8 --layer 0..3 --json"
    assert cli.main(words.split()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fields"]["tiles"] == "2,4,8"
    first, second, third, last = (layer["density"] for layer in report["layers"])
    assert first > second > third == last


@pytest.mark.parametrize(("near", "numbers"), [("tile", [2, 4, 8, 8]), ("around", [8, 16, 16, 16])])
def test_numbers_by_layer_are_drawn(near: Any, numbers: list[int]) -> None:
    """Tiles, or blocks of queries: of 32 tokens where what is around them is 128, and of 16."""
    views = [Hilbert(near=near, tiles=(2, 4, 8)).view(Geometry((16, 16)), layer) for layer in range(4)]
    assert [len(view.group.unique()) for view in views] == numbers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "explain --set tiles=4,,16",
            "`tiles` must be an integer, numbers between commas or none; got '4,,16'.",
        ),
        ("explain --set tiles=4,0", "`tiles` must be at least 1; got 0."),
        (
            "generate --set tiles=4,x",
            "`tiles` must be an integer, numbers between commas or none; got '4,x'.",
        ),
    ],
)
def test_bad_numbers_are_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err == f"nearfield: error: {message}\n"
