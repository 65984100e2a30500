"""The model that draws from captions: its text, its files, its training, its pictures, and its tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.drawn import CONFIG, collection, write_packages

from nearfield import Hilbert, apply
from nearfield.cli.main import main
from nearfield_lab.commands import add_commands
from nearfield_lab.commands import drawings as command
from nearfield_lab.drawings import probe
from nearfield_lab.drawings.captions import captions
from nearfield_lab.drawings.model import DrawingConfig, DrawingFlux, load_model, save_model
from nearfield_lab.drawings.packed import is_held_out
from nearfield_lab.drawings.prompts import PROMPTS, category_prompts
from nearfield_lab.drawings.sampler import DrawingPipeline
from nearfield_lab.drawings.sets import CATEGORIES
from nearfield_lab.drawings.text import PADDING, UNKNOWN, Vocabulary
from nearfield_lab.drawings.training import DrawingLatents, DrawingRecipe, DrawingTraining, encode, epoch_rows
from nearfield_lab.embedded.model import num_parameters
from nearfield_lab.training.loop import Schedule

WORDS = [caption for one in collection() for caption in captions(one)]


def vocabulary() -> Vocabulary:
    return Vocabulary.learn(WORDS, CONFIG.vocabulary)


def lively_model() -> DrawingFlux:
    """Random weights also where a new model has zeros, so that its output depends on everything."""
    torch.manual_seed(1)
    model = DrawingFlux(CONFIG)
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval().requires_grad_(False)


# -- text ----------------------------------------------------------------------------------------------------------


def test_the_most_frequent_pair_is_joined_first() -> None:
    known = Vocabulary.learn(["abab abab cd cd abab"] * 3, 20)
    assert known.pairs[0] == ("a", "b")
    assert ("_abab") in {first + second for first, second in known.pairs}
    assert known.tokens(["abab cd"], 4).count_nonzero() == 2


def test_a_joined_pair_overlaps_only_once() -> None:
    known = Vocabulary.learn(["aaa aaa aaa"], 5)
    assert known.pairs == (("a", "a"),)
    assert known.tokens(["aaa"], 4)[0].count_nonzero() == 3  # the start of the word, two letters, one


def test_vocabularies_keep_to_their_size_and_do_not_depend_on_order() -> None:
    known = vocabulary()
    assert len(known) <= CONFIG.vocabulary
    again = Vocabulary.learn(WORDS[::-1], CONFIG.vocabulary)
    assert known.document() == again.document()
    assert torch.equal(Vocabulary.of(known.document()).tokens(WORDS, 16), known.tokens(WORDS, 16))


def test_tokens_tell_captions_apart() -> None:
    different = sorted(set(WORDS))
    tokens = vocabulary().tokens(different, 32)
    assert len(tokens.unique(dim=0)) == len(different)
    assert int(tokens.max()) < CONFIG.vocabulary


def test_letters_that_nobody_knows() -> None:
    (row,) = vocabulary().tokens(["disc ß"], 8).tolist()
    assert UNKNOWN in row
    assert row[-1] == PADDING


def test_long_captions_are_cut_off() -> None:
    assert vocabulary().tokens(["disc " * 50], 4).shape == (1, 4)


# -- model ---------------------------------------------------------------------------------------------------------


def test_the_model_is_as_large_as_planned() -> None:
    with torch.device("meta"):
        model = DrawingFlux(DrawingConfig())
    assert 20e6 < num_parameters(model.transformer) < 28e6
    assert 4e6 < num_parameters(model.text) < 6e6


def call(model: DrawingFlux, **condition: Any) -> torch.Tensor:
    latents = torch.randn(2, 32, 4, 4, generator=torch.Generator().manual_seed(0))
    return model(latents, torch.tensor([0.3, 0.7]), **condition)


def test_an_empty_caption_is_none() -> None:
    model = lively_model()
    empty = torch.full((2, CONFIG.condition_tokens), PADDING)
    assert torch.equal(call(model, captions=empty), call(model))


def test_velocities_depend_on_captions() -> None:
    model, known = lively_model(), vocabulary()
    tokens = known.tokens(["disc, red on white", "square, red on white"], CONFIG.condition_tokens)
    changed = known.tokens(["disc, blue on white", "square, red on white"], CONFIG.condition_tokens)
    first, second = call(model, captions=tokens), call(model, captions=changed)
    assert not torch.allclose(first[0], second[0])
    torch.testing.assert_close(first[1], second[1])


def test_the_text_encoder_does_not_read_padding() -> None:
    model = lively_model()
    tokens = vocabulary().tokens(["disc"], CONFIG.condition_tokens)
    number = int(tokens.count_nonzero())
    before = model.text(tokens)
    model.text.words.weight[PADDING] += 1
    after = model.text(tokens)
    torch.testing.assert_close(after[:, :number], before[:, :number])
    assert not torch.allclose(after[:, number:], before[:, number:])


def test_models_return_from_files(tmp_path: Path) -> None:
    model, known = lively_model(), vocabulary()
    save_model(tmp_path / "model.safetensors", model, known, {"step": 3}, packing="none")
    again, words, facts = load_model(tmp_path / "model.safetensors")
    tokens = words.tokens(["disc", "square"], CONFIG.condition_tokens)
    assert facts["step"] == 3
    assert again.config == CONFIG
    assert torch.equal(call(again, captions=tokens), call(model, captions=tokens))


# -- training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> DrawingLatents:
    pytest.importorskip("resvg_py")
    found, kept = encode(collection(), tmp_path_factory.mktemp("latents"), 32, workers=1)
    assert kept == collection()
    return found


def training(latents: DrawingLatents, folder: Path, steps: int, **changes: Any) -> DrawingTraining:
    recipe = DrawingRecipe(
        size=32, batch=8, samples=2, sample_steps=2, packing="none", seed=changes.pop("seed", 0)
    )
    schedule = Schedule(steps=steps, learning_rate=5e-3, warm_up=2)
    return DrawingTraining(latents, collection(), folder, recipe, schedule, config=CONFIG, **changes)


def test_the_loss_falls_and_a_sheet_is_drawn(latents: DrawingLatents, tmp_path: Path) -> None:
    outcome = training(latents, tmp_path, steps=60).run()
    first, last = (sum(part) / len(part) for part in (outcome.losses[:10], outcome.losses[-10:]))
    assert last < 0.75 * first
    assert (tmp_path / "samples-000060.png").is_file()
    _, known, facts = load_model(tmp_path / "model.safetensors")
    assert (facts["step"], facts["earlier"]) == (60, [])
    assert known.document() == vocabulary().document()


def test_a_resumed_run_is_the_same_run(latents: DrawingLatents, tmp_path: Path) -> None:
    whole = training(latents, tmp_path / "whole", steps=6)
    whole.run()
    training(latents, tmp_path / "parts", steps=3).run()
    rest = training(latents, tmp_path / "parts", steps=6)
    rest.resume()
    rest.run()
    for one, other in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for name, average in whole.loop.averages.items():
        assert torch.equal(average, rest.loop.averages[name])
    logs = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    ]
    assert logs[0] == logs[1]


def test_a_model_is_gone_on_from(latents: DrawingLatents, tmp_path: Path) -> None:
    training(latents, tmp_path / "first", steps=2).run()
    start = tmp_path / "first" / "model.safetensors"
    second = training(latents, tmp_path / "second", steps=1, start=start, seed=1)
    first, known, _ = load_model(start)
    assert torch.equal(second.model.text.words.weight, first.text.words.weight)
    assert second.vocabulary.document() == known.document()
    second.run()
    _, _, facts = load_model(tmp_path / "second" / "model.safetensors")
    assert [(one["step"], one["recipe"]["seed"]) for one in facts["earlier"]] == [(2, 0)]


def test_a_model_is_trained_sparse(latents: DrawingLatents, tmp_path: Path) -> None:
    recipe = DrawingRecipe(size=32, batch=4, samples=0, method=Hilbert(dense_layers=0, dense_steps=0))
    sparse = DrawingTraining(latents, collection(), tmp_path, recipe, Schedule(steps=1), config=CONFIG)
    assert sparse.handle is not None
    assert sparse.run().step == 1


def test_latents_are_kept(latents: DrawingLatents, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    first, _ = encode(collection(4), tmp_path, 32, workers=1)
    written = (tmp_path / "latents-32.safetensors").stat().st_mtime_ns
    again, _ = encode(collection(4), tmp_path, 32, workers=1)
    assert (tmp_path / "latents-32.safetensors").stat().st_mtime_ns == written
    assert torch.equal(first.values, again.values)
    assert torch.equal(first.values[:, 0], latents.values[:4, 0])
    other, _ = encode(collection(5), tmp_path, 32, workers=1)
    assert len(other) == 5


def test_latents_have_the_mean_and_deviation_they_say(latents: DrawingLatents) -> None:
    values = latents.values.float()
    torch.testing.assert_close(latents.mean, values.mean(dim=(0, 1, 3, 4)), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(latents.std, values.std(dim=(0, 1, 3, 4), correction=0), atol=1e-3, rtol=1e-3)


def test_drawings_with_colours_of_their_own_come_twice() -> None:
    from tests.drawn import drawing

    assert epoch_rows([drawing(), drawing(colour="red")]).tolist() == [0, 0, 1]


# -- pictures ------------------------------------------------------------------------------------------------------


def pipeline(guidance: float = 4.0) -> DrawingPipeline:
    return DrawingPipeline(lively_model(), vocabulary(), guidance=guidance)


def test_a_batch_does_not_change_a_picture() -> None:
    asked = ["disc", "square", "disc, blue on white"]
    together = pipeline().draw(asked, steps=2, batch=3).images
    apart = pipeline().draw(asked, steps=2, batch=1).images
    assert (together.int() - apart.int()).abs().max() <= 1
    assert together.shape == (3, 32, 32, 3)


def test_guidance_goes_on_beyond_the_caption() -> None:
    latents, level = torch.randn(1, 32, 4, 4), torch.tensor(500.0)
    found = {}
    for guidance in (0, 1, 3):
        one = pipeline(guidance)
        one.ask(["disc"])
        one.begin(2)
        one.sample(range(1), steps=1)
        found[guidance] = one.velocity(latents, level)
    torch.testing.assert_close(found[3], found[0] + 3 * (found[1] - found[0]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[0], found[1])


def test_methods_apply_to_the_pipeline() -> None:
    one = pipeline()
    dense = one.draw(["disc"], steps=1).images
    with apply(one, Hilbert(dense_layers=0, dense_steps=0)):
        sparse = one.draw(["disc"], steps=1).images
    assert sparse.shape == dense.shape


def test_prompts_are_64_and_categories_come_in_order() -> None:
    assert len(set(PROMPTS)) == 64
    asked = category_prompts(3)
    assert [number for number, _ in asked] == [number for number in range(20) for _ in range(3)]
    assert all(caption.startswith(CATEGORIES[number]) for number, caption in asked)


# -- probe ---------------------------------------------------------------------------------------------------------


def test_a_probe_learns_what_can_be_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    answers = torch.arange(20).repeat(6)
    found = torch.nn.functional.one_hot(answers, 32).float() + 0.1 * torch.rand(120, 32, generator=generator)
    learned = probe.Probe.learn(found[:80], answers[:80])
    assert probe.score(learned, found[80:], answers[80:]).accuracy == 1
    wrong = probe.score(learned, found[80:], (answers[80:] + 1) % 20)
    assert (wrong.accuracy, wrong.pictures) == (0, 40)


def test_the_probe_sees_what_no_generator_saw() -> None:
    drawings = [one for number in range(60) for one in [_named(CATEGORIES[number % 20], number)]]
    parts = probe.split(drawings)
    both = [*parts.learned, *parts.tried]
    assert both
    assert all(is_held_out(one) for one in both)
    assert len(both) == len({one.number for one in both})
    assert probe.labels([_named("dog", 0)]).tolist() == [1]


def _named(name: str, number: int) -> Any:
    from tests.drawn import drawing

    return drawing(name, number=number)


# -- command -------------------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    return main([*words], others=[add_commands])


def test_from_packages_to_a_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resvg_py")
    monkeypatch.setattr(command, "TINY", {name: getattr(CONFIG, name) for name in command.TINY})
    data, out = tmp_path / "packed", tmp_path / "run"
    packages = write_packages(tmp_path / "packages")
    assert run("drawings", "pack", "--packages", str(packages), "--out", str(data)) == 0
    assert "mdi" in (data / "licences.md").read_text(encoding="utf-8")
    train = [
        "drawings",
        "train",
        "--data",
        str(data),
        "--out",
        str(out),
        "--tiny",
        "--size",
        "32",
        "--option",
        "batch=4",
    ]
    train += ["--option", "workers=1", "--option", "samples=2", "--device", "cpu"]
    assert run(*train, "--steps", "1") == 0
    assert run(*train, "--steps", "2", "--resume", "--json", str(tmp_path / "run.json")) == 0
    assert json.loads((tmp_path / "run.json").read_text())["steps_of_this_run"] == 1
    weights = str(out / "model.safetensors")
    drawn = ["drawings", "draw", "--weights", weights, "--steps", "1", "--device", "cpu"]
    assert run(*drawn, "--prompt", "a disc", "--out", str(tmp_path / "sheet.png")) == 0
    assert run(*drawn, "--ask", "categories", "--num", "1", "--out", str(tmp_path / "asked.tar")) == 0
    card = tmp_path / "card.md"
    assert run("drawings", "card", "--data", str(data), "--weights", weights, "--out", str(card)) == 0
    text = card.read_text(encoding="utf-8")
    assert "2 steps of batch 4 at 32 px (dense, seed 0)" in text
    assert "A. Painter" in text
    assert (tmp_path / "sheet.png").is_file()


def test_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("drawings", "train", "--data", str(tmp_path), "--out", str(tmp_path)) == 2
    assert "`--steps` must be given, or `--minutes`" in capsys.readouterr().err
    assert run("drawings", "train", "--data", str(tmp_path), "--out", str(tmp_path), "--steps", "1") == 2
    assert "drawings.json does not exist; `nearfield drawings pack` writes it" in capsys.readouterr().err
