"""Recipes, and the search that makes them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests import tiny_models
from tests.cats import CONFIG, lively_model
from tests.tiles import paper

from nearfield import Hilbert, LogLinear, Merge, apply, recipes, tuning
from nearfield.cli import main
from nearfield.demo.model import save_model
from nearfield.demo.sampler import DemoPipeline
from nearfield.recipes import Recipe
from nearfield.tuning import LADDERS, Figures, Search, Trial, as_records, from_records, front

LAYERS = 12
TOUCHY = (2, 7)


def bold(method: Hilbert) -> Figures:
    """A made-up model: bolder is faster and worse, and layers 2 and 7 stand nothing."""
    dense: Any = method.dense_layers
    sparse = [layer for layer in range(LAYERS) if layer not in dense]
    harm = sum(0.05 if layer in TOUCHY else 0.002 for layer in sparse)
    harm *= (method.tiles or 1) / 16 * (0.5 if method.far else 1.0) * (1 - method.dense_steps)
    read = 1 - (1 - method.dense_steps) * len(sparse) / LAYERS * (1 - 1 / (method.tiles or 1))
    return Figures(harm, read, 0.5)


def searched(limit: float, known: list[Trial] | None = None) -> tuple[Search, list[Trial]]:
    new: list[Trial] = []
    search = Search(bold, LAYERS, 1.0, limit, known=known or (), on_trial=new.append)
    assert search.run()
    return search, new


# -- the search ----------------------------------------------------------------------------------------------------


def test_the_result_reads_least_of_all_that_was_tried_within_the_limit() -> None:
    search, trials = searched(0.03)
    best = search.best
    assert best is not None
    assert best.lpips <= 0.03
    assert best.pairs_kept == min(trial.pairs_kept for trial in trials if trial.lpips <= 0.03)
    assert best.pairs_kept < 0.5
    assert best.speed_up == 2.0


def test_layers_that_stand_nothing_stay_dense() -> None:
    search, _ = searched(0.03)
    best = search.best
    assert best is not None
    assert set(TOUCHY) <= set(best.fields["dense_layers"])
    assert len(best.fields["dense_layers"]) <= LAYERS // 2


def test_a_wider_limit_leaves_less_to_read() -> None:
    kept = []
    for limit in (0.01, 0.03, 0.3):
        best = searched(limit)[0].best
        assert best is not None
        kept.append(best.pairs_kept)
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


def test_nothing_is_found_where_nothing_is_good_enough() -> None:
    search = Search(lambda method: Figures(0.5, 0.1, 1.0), LAYERS, 1.0, 0.1)
    assert search.run()
    assert search.best is None


def test_a_search_that_was_stopped_goes_on() -> None:
    _, whole = searched(0.03)
    left = 20
    new: list[Trial] = []

    def has_time() -> bool:
        return len(new) < left

    first = Search(bold, LAYERS, 1.0, 0.03, on_trial=new.append)
    assert not first.run(has_time)
    written = json.loads(json.dumps(as_records(first.trials)))
    second, more = searched(0.03, from_records(written))
    assert second.best is not None
    assert len(first.trials) + len(more) == len(whole), "nothing is tried twice"
    assert as_records(more) == as_records(whole[len(first.trials) :])


@pytest.mark.parametrize(("layers", "number"), [(1, 1), (12, 12), (13, 7), (57, 12)])
def test_groups_hold_every_layer_once(layers: int, number: int) -> None:
    groups = Search(bold, layers, 1.0, 0.1).groups()
    assert len(groups) == number
    assert [layer for group in groups for layer in group] == list(range(layers))


def test_the_front_has_what_nothing_beats() -> None:
    trials = [
        Trial({"tiles": number}, lpips, kept, 1.0, 1.0)
        for number, (lpips, kept) in enumerate([(0.1, 0.5), (0.2, 0.6), (0.05, 0.9), (0.3, 0.2), (0.1, 0.8)])
    ]
    assert [trial.fields["tiles"] for trial in front(trials)] == [2, 0, 3]


def test_ladders_are_fields_of_the_method() -> None:
    for name, values in LADDERS.items():
        if name != "dense":
            for value in values:
                assert getattr(paper(**{name: value}), name) == value


# -- recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        paper(tiles=8, dense_layers=(0, 3, -1), far=64),
        paper(),
        LogLinear(topk=5),
        Merge(ratio=0.3) | paper(tiles=4),
    ],
    ids=str,
)
def test_recipes_are_read_as_they_were_written(method: Any, tmp_path: Path) -> None:
    recipe = Recipe(method, "FluxTransformer2DModel", {"lpips": 0.05})
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.as_document()), encoding="utf-8")
    assert recipes.read(path) == recipe
    assert recipes.read(str(path)).method == method
    assert recipes.recipe_of(path).method == method


def test_a_recipe_may_merge_alone(tmp_path: Path) -> None:
    recipe = Recipe(Merge(ratio=0.3))
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.as_document()), encoding="utf-8")
    assert recipes.read(path) == recipe
    for given in (recipe, path, recipe.method):
        with apply(tiny_models.flux(), given) as handle:
            assert handle.summary().startswith("nearfield: Merge(ratio=0.3)\n")


def test_a_recipe_for_another_model_is_refused() -> None:
    recipe = Recipe(paper(), "FluxTransformer2DModel")
    with pytest.raises(ValueError, match="`recipe` must be one for dict; got one for FluxTransformer2DModel"):
        recipe.check_model({})
    Recipe(paper()).check_model({})


BAD: dict[str, tuple[Any, str]] = {
    "format": (
        {"format": 2, "method": "Hilbert"},
        "`recipe` must be a nearfield recipe of format 1; got format 2",
    ),
    "kind": ([1], "`recipe` must be a nearfield recipe of format 1; got list"),
    "method": ({"format": 1, "method": "Hilfiger"}, "`recipe` must name a method of Hilbert, "),
    "field": ({"format": 1, "method": "Hilbert", "fields": {"a": 1}}, "`recipe` must hold fields of Hilbert"),
    "value": (
        {"format": 1, "method": "Hilbert", "fields": {"tiles": 0}},
        "`tiles` must be at least 1; got 0",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_recipes(name: str, tmp_path: Path) -> None:
    document, message = BAD[name]
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError) as raised:
        recipes.read(path)
    assert str(raised.value).startswith(message)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`recipe` must name a file that can be read; got '.*' \(No such file"
    ):
        recipes.read(tmp_path / "none.json")
    (tmp_path / "text").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="`recipe` must be a JSON file"):
        recipes.read(tmp_path / "text")


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`method` must be a method such as nearfield\.Hilbert\(\)"):
        recipes.recipe_of(3)


# -- the command, and what takes a recipe --------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_model(path, lively_model(CONFIG))
    return path


def test_command_writes_a_recipe_that_apply_takes(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LADDERS", {name: values[:2] for name, values in LADDERS.items()})
    out, picture = tmp_path / "recipe.json", tmp_path / "front.png"
    command = [
        "tune",
        "--weights",
        str(weights),
        "--size",
        "64",
        "--steps",
        "2",
        "--num",
        "1",
        "--out",
        str(out),
    ]
    assert main([*command, "--max-lpips", "10", "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "0 trials are known" in told
    assert picture.stat().st_size > 1000
    recipe = recipes.read(out)
    assert recipe.model == "FluxTransformer2DModel"
    assert recipe.measured["lpips"] <= 10
    pipeline = DemoPipeline.load(weights)
    with apply(pipeline, out) as handle:
        assert handle.method == recipe.method
        assert handle.num_layers == 3
    assert main([*command, "--max-lpips", "10"]) == 0
    again = capsys.readouterr().out
    known = json.loads(Path(f"{out}.trials").read_text(encoding="utf-8"))["trials"]
    assert f"{len(known)} trials are known" in again
    assert main([*command[:-2], "--seed", "7", "--out", str(out)]) == 2
    assert "`--out` must name another file" in capsys.readouterr().err


def test_command_says_when_nothing_is_good_enough(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recipe.json"
    command = [
        "tune",
        "--weights",
        str(weights),
        "--size",
        "64",
        "--steps",
        "4",
        "--num",
        "1",
        "--out",
        str(out),
    ]
    assert main([*command, "--max-lpips", "1e-12", "--minutes", "5"]) == 1
    assert "no recipe: nothing keeps within LPIPS 1e-12" in capsys.readouterr().out
    assert not out.exists()


def test_apply_refuses_a_recipe_for_another_model(weights: Path) -> None:
    pipeline = DemoPipeline.load(weights)
    with pytest.raises(ValueError, match="`recipe` must be one for FluxTransformer2DModel; got one for"):
        apply(pipeline, Recipe(paper(), "WanTransformer3DModel"))
