"""Recipes, and the search that makes them."""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests import tiny_models
from tests.cats import CONFIG, lively_model
from tests.command_line import main, run
from tests.tiles import paper

from nearfield import Hilbert, LogLinear, Merge, apply, recipes
from nearfield.methods import method_classes
from nearfield.methods.recipes import Recipe
from nearfield_lab import tuning
from nearfield_lab.embedded.model import save_model
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.tuning import (
    LADDERS,
    Figures,
    Search,
    Trial,
    as_records,
    changed,
    from_records,
    front,
    ladders_of,
)

ROOT = Path(__file__).resolve().parents[1]
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
    search = Search(Hilbert(), bold, LAYERS, 1.0, limit, known=known or (), on_trial=new.append)
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
    search = Search(Hilbert(), lambda method: Figures(0.5, 0.1, 1.0), LAYERS, 1.0, 0.1)
    assert search.run()
    assert search.best is None


def test_a_search_that_was_stopped_goes_on() -> None:
    _, whole = searched(0.03)
    left = 20
    new: list[Trial] = []

    def has_time() -> bool:
        return len(new) < left

    first = Search(Hilbert(), bold, LAYERS, 1.0, 0.03, on_trial=new.append)
    assert not first.run(has_time)
    written = json.loads(json.dumps(as_records(first.trials)))
    second, more = searched(0.03, from_records(written, Hilbert()))
    assert second.best is not None
    assert len(first.trials) + len(more) == len(whole), "nothing is tried twice"
    assert as_records(more) == as_records(whole[len(first.trials) :])


def test_trials_name_every_field() -> None:
    """So that a file of them means the same where a default has changed: what was tried of tiles is not known here."""
    _, trials = searched(0.03)
    assert all(set(trial.fields) == {field.name for field in fields(Hilbert)} for trial in trials)
    tiles = [replace(trial, fields={**trial.fields, "near": "tile"}) for trial in trials]
    _, again = searched(0.03, tiles)
    assert len(again) == len(trials)
    assert [trial.fields["near"] for trial in again] == ["around"] * len(again)


def test_fields_that_are_held_are_not_tried() -> None:
    base = Hilbert(far=64, dense_layers=(3,))
    ladders = ladders_of(base, held=("far", "dense_layers"))
    assert set(ladders) == {"tiles", "text_reads", "dense_steps"}
    new: list[Trial] = []
    search = Search(base, bold, LAYERS, 1.0, 10.0, ladders=ladders, on_trial=new.append)
    assert search.run()
    assert {trial.fields["far"] for trial in new} == {64}
    assert {trial.fields["dense_layers"] for trial in new if trial.purpose == "search"} == {(3,)}


def test_methods_that_do_not_say_what_to_try_are_refused() -> None:
    with pytest.raises(ValueError) as raised:
        Search(LogLinear(), bold, LAYERS, 1.0, 0.1)
    assert str(raised.value) == "`method` must say in `ladders` what to try (hilbert); got LogLinear."


@pytest.mark.parametrize(("layers", "number"), [(1, 1), (12, 12), (13, 7), (57, 12)])
def test_groups_hold_every_layer_once(layers: int, number: int) -> None:
    groups = Search(Hilbert(), bold, layers, 1.0, 0.1).groups()
    assert len(groups) == number
    assert [layer for group in groups for layer in group] == list(range(layers))


def test_the_front_has_what_nothing_beats() -> None:
    trials = [
        Trial({"tiles": number}, lpips, kept, 1.0, 1.0)
        for number, (lpips, kept) in enumerate([(0.1, 0.5), (0.2, 0.6), (0.05, 0.9), (0.3, 0.2), (0.1, 0.8)])
    ]
    assert [trial.fields["tiles"] for trial in front(trials)] == [2, 0, 3]


@pytest.mark.parametrize("kind", [kind for kind in method_classes().values() if kind.ladders])
def test_ladders_are_fields_of_the_method(kind: Any) -> None:
    for name, values in ladders_of(kind()).items():
        if name != "dense":
            for value in values:
                assert getattr(changed(kind(), {name: value}), name) == value


# -- recipes -------------------------------------------------------------------------------------------------------


def written(recipe: Recipe, path: Path) -> Path:
    path.write_text(json.dumps(recipe.as_document()), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "method",
    [
        paper(tiles=8, dense_layers=(0, 3, -1), far=64),
        paper(tiles=(4, 8, 16)),
        paper(),
        LogLinear(topk=5),
        Merge(ratio=0.3) | paper(tiles=4),
    ],
    ids=str,
)
def test_recipes_are_read_as_they_were_written(method: Any, tmp_path: Path) -> None:
    recipe = Recipe(method, "FluxTransformer2DModel", {"lpips": 0.05})
    path = written(recipe, tmp_path / "recipe.json")
    assert recipes.read(path) == recipe
    assert recipes.read(str(path)).method == method
    assert recipes.recipe_of(path).method == method


def test_a_recipe_may_merge_alone(tmp_path: Path) -> None:
    recipe = Recipe(Merge(ratio=0.3))
    path = written(recipe, tmp_path / "recipe.json")
    assert recipes.read(path) == recipe
    for given in (recipe, path, recipe.method):
        with apply(tiny_models.flux(), given) as handle:
            assert handle.summary().startswith("nearfield: Merge(ratio=0.3)\n")


def test_a_recipe_for_another_model_is_refused() -> None:
    recipe = Recipe(paper(), "FluxTransformer2DModel")
    with pytest.raises(ValueError, match="`recipe` must be one for dict; got one for FluxTransformer2DModel"):
        recipe.check_model({})
    Recipe(paper()).check_model({})


def test_a_recipe_names_every_field(tmp_path: Path) -> None:
    """So that it means the same where a default has changed."""
    document = Recipe(Merge() | Hilbert()).as_document()
    nested = document["fields"]["attention"]
    assert set(nested["fields"]) == {part.name for part in fields(Hilbert)}
    assert nested["fields"]["tiles"] == Hilbert().tiles


NESTED = {"method": "Merge", "fields": {"ratio": 0.3}}


def test_recipes_of_today_have_the_defaults() -> None:
    assert (Hilbert().near, Hilbert().summary) == ("around", "weighted")
    hilbert = {"method": "Hilbert", "fields": {"tiles": 8}}
    assert recipes.read({"format": 2, **hilbert}).method == Hilbert(tiles=8)
    assert recipes.read({"format": 2, "method": "Hilbert"}).method == Hilbert()
    document = {"format": 2, "method": "Composition", "fields": {"merge": NESTED, "attention": hilbert}}
    assert recipes.read(document).method == Merge(ratio=0.3) | Hilbert(tiles=8)


BAD: dict[str, tuple[Any, str]] = {
    "format": (
        {"format": 3, "method": "Hilbert"},
        "`recipe` must be a nearfield recipe of format 2; got format 3",
    ),
    "older": (
        {"format": 1, "method": "Hilbert"},
        "`recipe` must be a nearfield recipe of format 2; got format 1",
    ),
    "switch": (
        {"format": True, "method": "Hilbert"},
        "`recipe` must be a nearfield recipe of format 2; got format True",
    ),
    "none": ({"method": "Hilbert"}, "`recipe` must be a nearfield recipe of format 2; got "),
    "kind": ([1], "`recipe` must be a nearfield recipe of format 2; got list"),
    "method": ({"format": 2, "method": "Hilfiger"}, "`recipe` must name a method of "),
    "field": ({"format": 2, "method": "Hilbert", "fields": {"a": 1}}, "`recipe` must hold fields of Hilbert"),
    "value": (
        {"format": 2, "method": "Hilbert", "fields": {"tiles": 0}},
        "`tiles` must be at least 1; got 0",
    ),
    "lora": (
        {"format": 2, "method": "Hilbert", "lora": "mine"},
        "`lora` must be one of '', 'none', 'embedded'; got 'mine'",
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
        ValueError,
        match=r"`recipe` must name a file that can be read, or one that ships \(cats-close, .*\); got '.*' \(No such",
    ):
        recipes.read(tmp_path / "none.json")
    (tmp_path / "text").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="`recipe` must be a JSON file"):
        recipes.read(tmp_path / "text")


def test_what_is_no_method_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`method` must be a method such as nearfield\.Hilbert\(\)"):
        recipes.recipe_of(3)


# -- recipes that ship ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recipes.names())
def test_shipped_recipes_say_everything(name: str) -> None:
    """Every field, what was measured and where, so that no default and no memory is needed to understand them."""
    recipe = recipes.read(name)
    document = json.loads((recipes._shipped()[name]).read_text(encoding="utf-8"))
    assert json.loads(json.dumps(recipe.as_document())) == document
    measured = recipe.measured
    rows = json.loads((ROOT / measured["source"]).read_text(encoding="utf-8"))["results"]
    alike = {"num": measured["pictures"]} | {key: measured[key] for key in ("size", "steps", "seed")}
    figures = {row["pattern"]: row for row in rows if row["settings"].items() >= alike.items()}
    row, dense = figures[measured["pattern"]], figures["dense"]
    assert row["samples"] == dense["samples"] == measured["pictures"]
    assert measured["dense_fid"] == round(dense["fid"], 2)
    assert measured["dense_kid"] == round(dense["kid"], 4)
    for figure, digits in {"fid": 2, "kid": 4, "lpips": 4, "psnr": 2, "pairs_kept": 4}.items():
        assert measured[figure] == round(row[figure], digits)
    assert recipes.read(document | {"fields": row["settings"]["fields"]}).method == recipe.method
    assert (row["settings"]["lora"] is None) == (recipe.lora == "none")
    if recipe.lora == "embedded":
        (without,) = (
            each
            for each in figures.values()
            if each["settings"].get("fields") == row["settings"]["fields"] and not each["settings"]["lora"]
        )
        assert measured["fid_without_lora"] == round(without["fid"], 2)
    assert row["commit"] == measured["commit"]
    assert row["date"].startswith(measured["date"])
    assert 0 < measured["pairs_kept"] < 1
    assert measured["dense_fid"] < measured["fid"]
    assert {"pictures", "size", "steps", "source", "pattern", "device", "torch", "date", "commit"} <= set(
        measured
    )
    assert recipe.lora in ("none", "embedded")


def test_shipped_recipes_are_listed_where_one_looks() -> None:
    page = (ROOT / "docs" / "tuning.md").read_text(encoding="utf-8")
    for name in recipes.names():
        figures = recipes.read(name).measured
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        fid = f"{figures['fid']:.1f} (dense {figures['dense_fid']:.1f})"
        shown = f"| {100 * figures['pairs_kept']:.1f} % | {fid} | {figures['lpips']:.3f} |"
        assert row.endswith(shown), "the page shows what the file says"


@pytest.mark.parametrize("name", recipes.names())
def test_apply_takes_shipped_recipes_by_name(name: str) -> None:
    with apply(tiny_models.flux(), name) as handle:
        assert handle.method == recipes.read(name).method


def test_a_file_called_like_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cats-fast").write_text(json.dumps(Recipe(Hilbert(tiles=3)).as_document()), encoding="utf-8")
    assert recipes.read("./cats-fast").method == Hilbert(tiles=3)
    assert recipes.read("cats-fast").method != Hilbert(tiles=3)


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
    monkeypatch.setattr(Hilbert, "ladders", {name: values[:2] for name, values in Hilbert.ladders.items()})
    out, picture = tmp_path / "recipe.json", tmp_path / "front.png"
    command = f"tune --weights {weights} --size 64 --steps 2 --num 1 --out {out}"
    told = run(capsys, command, "--max-lpips 10 --plot", picture)
    assert "0 trials are known" in told
    assert picture.stat().st_size > 1000
    recipe = recipes.read(out)
    assert recipe.model == "FluxTransformer2DModel"
    assert recipe.measured["lpips"] <= 10
    assert recipe.lora == "none"
    pipeline = DemoPipeline.load(weights)
    with apply(pipeline, out) as handle:
        assert handle.method == recipe.method
        assert handle.num_layers == 3
    again = run(capsys, command, "--max-lpips 10")
    known = json.loads(Path(f"{out}.trials").read_text(encoding="utf-8"))["trials"]
    assert f"{len(known)} trials are known" in again
    assert "`--out` must name another file" in run(capsys, command, "--seed 7", code=2)


def test_command_says_when_nothing_is_good_enough(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recipe.json"
    words = f"tune --weights {weights} --size 64 --steps 4 --num 1 --out {out} --max-lpips 1e-12 --minutes 5"
    assert main(words.split()) == 1
    assert "no recipe: nothing keeps within LPIPS 1e-12" in capsys.readouterr().out
    assert not out.exists()


def test_apply_refuses_a_recipe_for_another_model(weights: Path) -> None:
    pipeline = DemoPipeline.load(weights)
    with pytest.raises(ValueError, match="`recipe` must be one for FluxTransformer2DModel; got one for"):
        apply(pipeline, Recipe(paper(), "WanTransformer3DModel"))


# -- pictures by a recipe ------------------------------------------------------------------------------------------


def generated(weights: Path, tmp_path: Path, *words: str) -> int:
    few = ["--weights", str(weights), "--steps", "2", "--num", "1", "--size", "32"]
    return main(["generate", *few, "--out", str(tmp_path / "sheet.png"), *words])


def test_generate_takes_a_recipe(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = tmp_path / "images"
    assert generated(weights, tmp_path, "--recipe", "cats-close", "--images", str(images)) == 0
    assert f"{recipes.read('cats-close').method.label}: " in capsys.readouterr().out
    assert [path.name for path in images.iterdir()] == ["cats-close"]


def test_generate_takes_a_recipe_with_an_engine(weights: Path, tmp_path: Path) -> None:
    few = f"--weights {weights} --steps 1 --num 1 --size 32 --option engine=process"
    assert main(f"generate {few} --recipe cats-close --images {tmp_path / 'images'}".split()) == 0
    folder = tmp_path / "images" / "cats-close"
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    assert settings["method"] == repr(recipes.read("cats-close").method)
    assert len(list(folder.glob("*.png"))) == 1


BAD_RECIPES = {
    "--recipe cats-fats": "`--recipe` must name a file that can be read, or one that ships (cats-close, cats-fast); "
    "got 'cats-fats' (No such file or directory).",
    "--recipe cats-close --set tiles=4": "`--set` must be left out with `--recipe`; got 'tiles=4'.",
    "--recipe cats-close --method dense": "`--method` must be left out with `--recipe`; got dense.",
    "--recipe cats-fast": "`--recipe` must be used with the embedded model, whose LoRA it was measured with; "
    "got cats-fast. Add `--option lora=none` for its fields alone.",
}


@pytest.mark.parametrize("words", BAD_RECIPES)
def test_recipes_that_generate_refuses(
    words: str, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generated(weights, tmp_path, *words.split()) == 2
    assert capsys.readouterr().err == f"nearfield: error: {BAD_RECIPES[words]}\n"


def test_generate_refuses_a_recipe_for_another_model(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Recipe(Hilbert(), "WanTransformer3DModel", lora="none")
    path = written(recipe, tmp_path / "recipe.json")
    assert generated(weights, tmp_path, "--recipe", str(path)) == 2
    assert (
        "must be one for FluxTransformer2DModel; got one for WanTransformer3DModel" in capsys.readouterr().err
    )


@pytest.mark.parametrize("lora", ["none", "embedded", ""])
def test_the_recipe_says_which_lora_is_used(lora: Any) -> None:
    """Without a word of it the embedded one, where it is for the method."""
    from nearfield_lab.commands import generating
    from nearfield_lab.embedded.lora import method_of_lora
    from nearfield_lab.embedded.model import EMBEDDED_LORA

    given = argparse.Namespace(model=None, weights=None, lora=None, recipe="a")
    recipe = Recipe(method_of_lora(EMBEDDED_LORA), lora=lora)
    assert generating._lora(given, recipe) == (None if lora == "none" else EMBEDDED_LORA)
    off = argparse.Namespace(**vars(given) | {"lora": "none"})
    assert generating._lora(off, recipe) is None


def test_the_embedded_lora_is_for_the_recipe_that_says_so() -> None:
    from nearfield_lab.embedded.lora import method_of_lora, suits
    from nearfield_lab.embedded.model import EMBEDDED_LORA

    method = method_of_lora(EMBEDDED_LORA)
    embedded = [name for name in recipes.names() if recipes.read(name).lora == "embedded"]
    assert embedded == ["cats-fast"]
    assert all(suits(method, recipes.read(name).method) for name in embedded)
    # Dense steps have no part in a LoRA, so it would suit this one, too, which was measured without it.
    close = recipes.read("cats-close")
    assert close.lora == "none"
    assert replace(close.method, dense_steps=0) == method
    assert not suits(method, Hilbert(near="tile", summary="mean", dense_layers=0))


def test_the_model_may_stand_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nearfield tune MODEL` is `nearfield tune --model MODEL`; both at once are refused."""
    asked: list[Any] = []

    def opened(arguments: Any) -> Any:
        asked.append((arguments.model, arguments.prompt))
        raise OSError("no such pipeline")

    monkeypatch.setattr("nearfield_lab.commands.tuning.opened", opened)
    for call in (["nobody/nothing"], ["--model", "nobody/nothing"]):
        assert main(["tune", *call, "--prompt", "a cat"]) == 1
    assert asked == [("nobody/nothing", "a cat")] * 2
    assert main(["tune", "one", "--model", "two", "--prompt", "a cat"]) == 2
    assert "`--model` must be left out where MODEL is given; got 'two'." in capsys.readouterr().err
    assert main(["tune", "one"]) == 2
    assert "`--prompt` must be given with `--model`" in capsys.readouterr().err
