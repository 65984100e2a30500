"""Training on pixels: real photographs, noise that grows with the size, exact resumption, the commands around it."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.cats import CATS
from tests.command_line import run
from torch import Tensor

from nearfield import LogLinear
from nearfield.methods import GatedBlocks, method_classes
from nearfield_lab.embedded.pixel import PixelConfig, PixelTransformer, load_pixel_model, save_pixel_model
from nearfield_lab.storage import BadFile, write_tensors
from nearfield_lab.training.data import Pixels, pictures, read_pixels
from nearfield_lab.training.loop import LOG, Draws, Schedule
from nearfield_lab.training.pixel import _EVALUATION, PixelRecipe, PixelTraining, evaluated_loss
from nearfield_lab.training.runs import MODEL

SIZE = 16
FIELDS: dict[str, dict[str, Any]] = {
    "full": {},
    "loglinear": {"block": 4, "topk": 2},
    "gatedblocks": {"block": 16, "topk": 2},
    "sparselinear": {"block": 16, "topk": 2},
}


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Pixels:
    return read_pixels(pictures(CATS), tmp_path_factory.mktemp("pixels"), SIZE)


def config(attention: Any = "full", size: int = SIZE) -> PixelConfig:
    return PixelConfig(
        layers=1, heads=2, head_dim=16, attention=attention, fields=FIELDS[attention], size=size
    )


def training(
    pixels: Pixels, folder: Path, steps: int, attention: str = "full", **fields: Any
) -> PixelTraining:
    start = fields.pop("start", None)
    recipe = PixelRecipe(config(attention, pixels.values.shape[-1]), **({"batch": 4, "samples": 0} | fields))
    schedule = Schedule(steps=steps, learning_rate=4e-3, warm_up=5, checkpoint_seconds=1e9)
    return PixelTraining(pixels, folder, recipe, schedule, start=start)


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


# -- data ----------------------------------------------------------------------------------------------------------


def test_pixels_are_kept_and_belong_to_their_pictures(tmp_path: Path) -> None:
    calls: list[int] = []
    source = pictures(CATS)
    first = read_pixels(source, tmp_path, SIZE, on_progress=lambda *_: calls.append(1))
    assert (first.values.shape, len(first), len(calls)) == ((6, 3, SIZE, SIZE), 12, 1)
    again = read_pixels(source, tmp_path, SIZE, on_progress=lambda *_: calls.append(1))
    assert torch.equal(again.values, first.values)
    assert len(calls) == 1
    with pytest.raises(BadFile, match="belongs to other pictures"):
        read_pixels(source[:3], tmp_path, SIZE)
    write_tensors(tmp_path / f"pixels-{SIZE}.safetensors", {"x": torch.zeros(1)}, {})
    with pytest.raises(BadFile, match="holds no pixels"):
        read_pixels(source, tmp_path, SIZE)


def test_odd_numbers_are_mirror_images(pixels: Pixels) -> None:
    plain, mirrored = pixels.take(torch.tensor([4, 5]))
    assert torch.equal(plain.flip(-1), mirrored)
    torch.testing.assert_close((plain + 1) * 127.5, pixels.values[2].float())
    assert float(plain.min()) >= -1
    assert float(plain.max()) <= 1


# -- the objective -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 128])
def test_the_loss_is_that_of_rescaled_noise(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that knows the noise has no loss, and sees (1 - t) x + t s e with s = 2 at 128 pixels."""
    values = torch.randint(0, 256, (3, 3, size, size), generator=torch.Generator().manual_seed(0)).byte()
    run = training(Pixels(values), tmp_path, 1, batch=3)
    seen: list[tuple[Tensor, Tensor]] = []

    def velocity(self: PixelTransformer, images: Tensor, level: Tensor, body: Any = None) -> Tensor:
        seen.append((images, level))
        return torch.zeros_like(images)

    monkeypatch.setattr(PixelTransformer, "forward", velocity)
    loss = run.loss(0, 0)
    images, level = seen[0]
    clean = run.data.take(run._draws.indices(0, 0, 3, 1, 6))
    share = level[:, None, None, None]
    noise = (images - (1 - share) * clean) / share
    assert float(noise.std()) == pytest.approx(max(1, size / 64), rel=0.05)
    torch.testing.assert_close(loss, (noise - clean).square().mean(), rtol=1e-3, atol=1e-3)
    assert float(level.min()) > 0
    assert float(level.max()) < 1


@pytest.mark.parametrize("attention", FIELDS)
def test_every_attention_learns_and_goes_on_as_if_never_stopped(
    attention: str, pixels: Pixels, tmp_path: Path
) -> None:
    losses = training(pixels, tmp_path / "whole", 24, attention).run().losses
    assert sum(losses[-8:]) < 0.95 * sum(losses[:8])
    training(pixels, tmp_path / "cut", 9, attention).run()
    cut = training(pixels, tmp_path / "cut", 24, attention)
    assert cut.can_resume
    cut.resume()
    cut.run()
    assert [line["loss"] for line in logged(tmp_path / "cut")] == list(losses)


def test_speed_sheets_and_the_model_are_written(pixels: Pixels, tmp_path: Path) -> None:
    run = training(pixels, tmp_path, 3, samples=2, sample_steps=2)
    outcome = run.run()
    assert all(line["tokens_per_second"] > 0 for line in logged(tmp_path))
    assert outcome.tokens_per_second is not None
    assert outcome.tokens_per_second >= 3 * 4 * SIZE**2 / outcome.seconds  # pauses do not count
    model, facts = load_pixel_model(tmp_path / MODEL)
    assert (facts["step"], model.config) == (3, config())
    with run.loop.averaged():
        expected = run.model.body.entrance.weight.detach().clone()
    torch.testing.assert_close(model.body.entrance.weight, expected, rtol=4e-3, atol=4e-3)
    with Image.open(tmp_path / "samples-000003.png") as sheet:
        assert sheet.size == (SIZE, 2 * SIZE + 4)


def test_a_better_model_has_less_loss_on_the_same_draws(pixels: Pixels, tmp_path: Path) -> None:
    run = training(pixels, tmp_path, 30)
    before = evaluated_loss(run.model, pixels, 24)
    assert before == evaluated_loss(run.model, pixels, 24)
    # A new model gives no velocity: what is left are the squares of noise and pictures.
    draws = Draws(_EVALUATION, torch.device("cpu"))
    noises = [torch.randn(1, 3, SIZE, SIZE, generator=draws.generator(number)) for number in range(24)]
    clean = [pixels.take(draws.indices(number, 0, 1, 1, 12)) for number in range(24)]
    assert before == pytest.approx(float((torch.cat(noises) - torch.cat(clean)).square().mean()), rel=1e-5)
    run.run()
    assert evaluated_loss(run.model, pixels, 24) < 0.9 * before


def test_other_settings_are_refused(pixels: Pixels, tmp_path: Path) -> None:
    training(pixels, tmp_path, 1).run()
    with pytest.raises(BadFile, match="was made with batch = 4, not 2; resume with the same settings"):
        training(pixels, tmp_path, 2, batch=2).resume()
    with pytest.raises(BadFile, match="was made with model = "):
        training(pixels, tmp_path, 2, "gatedblocks").resume()
    in_thirds = Schedule(steps=1, parts=3)
    with pytest.raises(ValueError, match="`batch` must be a multiple of `parts`"):
        PixelTraining(pixels, tmp_path, PixelRecipe(config(), batch=4), in_thirds)
    with pytest.raises(ValueError, match="`pixels` must have the size of the model"):
        PixelTraining(pixels, tmp_path, PixelRecipe(config(size=8)), Schedule(steps=1))


def test_another_size_and_attention_start_from_a_model(pixels: Pixels, tmp_path: Path) -> None:
    training(pixels, tmp_path / "small", 3, packing="none").run()
    larger = read_pixels(pictures(CATS), tmp_path, 2 * SIZE)
    start = tmp_path / "small" / MODEL
    run = training(larger, tmp_path / "large", 2, "sparselinear", start=start)
    assert torch.equal(run.model.body.entrance.weight, load_pixel_model(start)[0].body.entrance.weight)
    assert run.run().step == 2


def test_a_compiled_model_learns_the_same(
    pixels: Pixels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_model = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda model, fullgraph: compile_model(model, fullgraph=fullgraph, backend="eager")
    )
    torch._dynamo.reset()
    runs = [
        training(pixels, tmp_path / name, 2, "loglinear", compiled=name == "compiled").run()
        for name in ("compiled", "plain")
    ]
    torch.testing.assert_close(*(torch.tensor(run.losses) for run in runs))
    torch._dynamo.reset()


# -- commands ------------------------------------------------------------------------------------------------------


def test_train_and_sample(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train = f"train pixel --data {CATS} --tiny --size {SIZE} --batch 2 --method loglinear --set block=4 --set topk=2"
    train += f" --option samples=0 --option pixels={tmp_path} --out {tmp_path / 'a'}"
    printed = run(capsys, train, "--steps 1")
    assert "12 pictures of 256 tokens, 16x16: 256 tokens in hilbert order" in printed
    assert "tokens/s without pauses" in printed
    printed = run(capsys, train, "--steps 2 --resume --json", tmp_path / "train.json")
    assert "resumed at step 1" in printed
    assert json.loads((tmp_path / "train.json").read_text())["tokens_per_second"] > 0

    sample = f"generate --weights {tmp_path / 'a' / MODEL} --images {tmp_path / 's'} --steps 2 --num 5"
    printed = run(capsys, sample, "--option batch=2")
    assert "made 5 pictures" in printed
    files = sorted((tmp_path / "s").glob("*.png"))
    assert len(files) == 5
    kept = files[3].read_bytes()
    for file in files[2:4]:
        file.unlink()
    printed = run(capsys, sample, "--json", tmp_path / "sample.json")
    assert "made 2 pictures" in printed
    assert f"5 of 5 pictures are in {tmp_path / 's'}" in printed
    assert files[3].read_bytes() == kept
    assert json.loads((tmp_path / "sample.json").read_text())["pictures_of_this_run"] == 2

    options = f"--option compile=true --option data={CATS} --option pixels={tmp_path} --json"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    files[0].unlink()
    printed = run(capsys, sample, options, tmp_path / "loss.json")
    torch._dynamo.reset()
    loss = json.loads((tmp_path / "loss.json").read_text())["loss"]
    assert f"loss with {CATS}: {loss:.5f}" in printed
    model, _ = load_pixel_model(tmp_path / "a" / MODEL)
    known = read_pixels(pictures(CATS), tmp_path, SIZE)
    assert loss == pytest.approx(evaluated_loss(model, known, 12, batch=5), rel=1e-5)
    error = run(capsys, sample, "--seed 1", code=2)
    assert "`--images` must hold pictures of the same settings, or none; got" in error
    assert "made with seed = 0 instead of 1. Name another folder." in error


BAD_CALLS = {
    "train pixel --data . --out x": "`--steps` must be given, or `--minutes`; got None. Training has to end somewhere.",
    "train pixel --data . --out x --steps 1 --set topk=3": "`--set` must be left out with `--method dense`; "
    "got 'topk=3'.",
    "train pixel --data . --out x --steps 1 --method gatedblocks --set levels=2": "`--set` must be one of block, topk, "
    "order, dense_layers, dense_steps; got 'levels'.",
    "train pixel --data . --out x --steps 1 --method fast": "`--method` must be one of METHODS; got 'fast'.",
    "train pixel --data . --out x --steps 1 --method sparselinear --set block=3": "`block` must be one of 1, 2, 4, 8, "
    "16, 32, 64, 128, 192; got 3.",
    "train pixel --data . --out x --steps 1 --method loglinear --set levels=9": "`levels` must be at most 3 for 4096 "
    "tokens in blocks of 16; got 9.",
    "train pixel --data . --out x --steps 1 --init none": "`--init` must name a file that is there; got 'none'.",
    "generate --option minutes=0": "`minutes` must be a number above 0; got '0'.",
}


@pytest.mark.parametrize("words", BAD_CALLS)
def test_wrong_usage_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = BAD_CALLS[words].replace("METHODS", ", ".join(method_classes()))  # other tests define some, too
    assert run(capsys, *words.split(), code=2) == f"nearfield: error: {told}\n"


def test_a_config_holds_every_field_of_its_method() -> None:
    for method in (None, LogLinear(topk=4, dense_layers=(0,)), GatedBlocks(block=16)):
        config = PixelConfig.of(method, size=16)
        assert config.method() == method
        stored = json.loads(json.dumps(dict(config.fields)))
        assert PixelConfig(attention=config.attention, fields=stored).method() == method


FOREIGN = {
    "--set topk=3": "`--method` must be left out with a model on pixels, which brings its own; got ['topk=3'].",
    "--method loglinear": "`--method` must be left out with a model on pixels, which brings its own; got loglinear.",
    "--compare": "`--compare` must be left out with a model on pixels; got True.",
    "--option lora=none": "`lora` must be left out with a model on pixels; got none.",
    "--recipe cats-close": "`--recipe` must be left out with a model on pixels; got cats-close.",
    "--size 16x24 --images a": "`--size` must be one number: pictures of a model on pixels are square; got 16x24.",
    "": "`--images` must name a folder for the pictures of a model on pixels; got None. Example: --images samples",
}


@pytest.mark.parametrize("words", FOREIGN)
def test_what_a_model_on_pixels_does_not_have_is_refused(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "model.safetensors"
    save_pixel_model(model, PixelTransformer(PixelConfig(layers=1, heads=1, head_dim=8, size=16)))
    error = run(capsys, "generate", "--weights", model, *words.split(), code=2)
    assert error == f"nearfield: error: {FOREIGN[words]}\n"
