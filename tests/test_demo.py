"""The embedded model: its autoencoder on real photographs, its files, its sampler, its pictures."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.cats import CATS, CONFIG, SIZE, autoencoder, latents, lively_model
from tests.remembering import Remembering
from tests.tiles import paper

from nearfield import Hilbert, Merge, _files, apply
from nearfield.methods import Composition
from nearfield.session import StepTracker
from nearfield_lab import storage
from nearfield_lab.embedded import generate, pictures
from nearfield_lab.embedded.autoencoder import WEIGHTS
from nearfield_lab.embedded.model import (
    EMBEDDED,
    ModelConfig,
    TinyFlux,
    load_model,
    num_parameters,
    packed,
    save_model,
    unpacked,
)
from nearfield_lab.embedded.sampler import DemoPipeline, noise
from nearfield_lab.training.data import decoded
from nearfield_lab.training.data import pictures as pictures_in
from nearfield_lab.training.flow import mixed

# -- autoencoder -------------------------------------------------------------------------------------------------------


def test_autoencoder_returns_photographs() -> None:
    """About 29 dB is what the published network reaches on such photographs."""
    images = torch.stack([decoded(picture, 128) for picture in pictures_in(CATS)]) / 255
    with torch.no_grad():
        encoded = autoencoder().encode(images)
        returned = autoencoder().decode(encoded)
    assert encoded.shape == (6, 32, 16, 16)
    assert abs(encoded.mean()) < 0.1
    assert 0.7 < encoded.std() < 1.0
    ratio = -10 * torch.log10((returned - images).square().mean(dim=(1, 2, 3)))
    assert ratio.min() > 25
    assert ratio.mean() > 28


def test_autoencoder_ships_with_its_licence() -> None:
    assert "MIT License" in (WEIGHTS / "LICENSE-TAEF2").read_text(encoding="utf-8")
    for half in ("encoder", "decoder"):
        assert (WEIGHTS / f"taef2_{half}.safetensors").stat().st_size < 3 * 2**20


def test_autoencoder_refuses_other_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"`images` must have 3 channels and sides of multiples of 8; got shape"
    ):
        autoencoder().encode(torch.zeros(1, 3, 20, 16))
    with pytest.raises(ValueError, match="`latents` must have 32 channels; got shape"):
        autoencoder().decode(torch.zeros(1, 16, 2, 2))


# -- model and files ---------------------------------------------------------------------------------------------------


def test_default_model_is_the_one_described() -> None:
    with torch.device("meta"):
        model = TinyFlux(ModelConfig())
    assert round(num_parameters(model) / 1e6, 1) == 33.6
    lengths = [side**2 + model.config.condition_tokens for side in (32, 64)]
    assert [length % 64 for length in lengths] == [0, 0]


def test_new_model_predicts_nothing_and_learns_everywhere() -> None:
    model = TinyFlux(CONFIG)
    x, level = torch.randn(2, 32, 4, 4), torch.tensor([0.3, 0.6])
    assert not model(x, level).any()


def test_positions_keep_their_place_at_other_sizes() -> None:
    """Twice the tokens stand at half the distances, around the same middle."""
    model = lively_model()
    small, _ = model._positions(4, 4, torch.device("cpu"))
    large, _ = model._positions(8, 8, torch.device("cpu"))
    assert torch.equal(large.view(4, 2, 4, 2, 3).mean(dim=(1, 3)).view(16, 3), small)


def test_packing_is_close_and_small(tmp_path: Path) -> None:
    model = lively_model()
    state = model.state_dict()
    stored = packed(state)
    assert stored["transformer.proj_out.weight"].dtype == torch.int8
    returned = unpacked(stored)
    assert returned.keys() == state.keys()
    for name, tensor in state.items():
        limit = tensor.abs().max() / 127 if tensor.dim() == 2 else 0
        assert (returned[name] - tensor).abs().max() <= limit * 0.51, name


@pytest.mark.parametrize(("packing", "limit"), [("int8", 0.02), ("bf16", 0.02), ("none", 0.0)])
def test_saved_model_comes_back(packing: str, limit: float, tmp_path: Path) -> None:
    model = lively_model()
    model.latent_mean.fill_(0.25)
    path = tmp_path / "model.safetensors"
    save_model(path, model, {"step": 7}, packing)  # type: ignore[arg-type]
    loaded, facts = load_model(path)
    assert (loaded.config, facts["step"], facts["packing"]) == (CONFIG, 7, packing)
    assert torch.equal(loaded.latent_mean, model.latent_mean)
    x, level = torch.randn(1, 32, 4, 4), torch.tensor([0.5])
    wanted = model(x, level)
    assert (loaded(x, level) - wanted).norm() <= limit * wanted.norm()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_model(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(storage.BadFile, match="is no whole safetensors file"):
        load_model(path)
    storage.write_tensors(path, {"a": torch.zeros(1)}, {})
    with pytest.raises(storage.BadFile, match="is no model of `nearfield train demo`"):
        load_model(path)
    save_model(path, lively_model())
    tensors, facts = storage.read_tensors(path)
    storage.write_tensors(path, tensors, facts | {"format": 99})
    with pytest.raises(storage.BadFile, match="has format 99; this version reads 1"):
        load_model(path)
    del tensors["condition"]
    storage.write_tensors(path, tensors, facts)
    with pytest.raises(storage.BadFile, match="does not hold the weights"):
        load_model(path)


# -- sampler -----------------------------------------------------------------------------------------------------------


def pipeline() -> DemoPipeline:
    return DemoPipeline(lively_model(), autoencoder())


def test_a_batch_does_not_change_a_picture() -> None:
    pipe = pipeline()
    together = pipe(3, steps=3, seed=5, batch=3).images
    apart = pipe(2, steps=3, seed=5, first=1, batch=1).images
    assert (together[1:].int() - apart.int()).abs().max() <= 1
    other = pipe(1, steps=3, seed=6).images
    assert not torch.equal(other, together[:1])


def test_noise_is_the_same_in_every_batch() -> None:
    assert torch.equal(noise(range(2, 5), (32, 40), 9)[1:], noise(range(3, 5), (32, 40), 9))
    assert noise(range(1), (32, 40), 0).shape == (1, 32, 4, 5)


def test_steps_follow_a_known_flow() -> None:
    """Where every velocity is noise minus image, any number of steps ends at the image."""
    pipe = pipeline()
    image = torch.randn(1, 32, 4, 4)
    start = noise(range(1), (32, 32), 0)
    pipe.model.forward = lambda latents, level: start - image  # type: ignore[method-assign]
    for steps in (1, 4):
        ended = pipe.sample(range(1), size=32, steps=steps, seed=0)
        torch.testing.assert_close(ended, image)


def test_sampler_times_steps_and_says_them() -> None:
    seen: list[tuple[int, int]] = []
    sampled = pipeline()(3, steps=2, batch=2, on_step=lambda step, steps: seen.append((step, steps)))
    assert sampled.images.shape == (3, SIZE, SIZE, 3)
    assert len(sampled.seconds) == 4
    assert seen == [(0, 2), (1, 2)] * 2


def test_half_precision_changes_little() -> None:
    plain, halved = pipeline().sample(range(1), steps=3), pipeline().halved().sample(range(1), steps=3)
    assert halved.dtype == torch.float32
    assert 0 < (halved - plain).norm() < 0.05 * plain.norm()


def test_sampler_refuses_odd_sizes() -> None:
    with pytest.raises(ValueError, match="`size` must be one or two multiples of 8 pixels; got 33"):
        pipeline()(1, size=33)


@pytest.mark.parametrize(
    "method",
    [
        Merge(ratio=0.5, region_size=16, refresh=(10, 10), skip_blocks=(0, 0)),
        Remembering(16, 4, refresh=(0.0,)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_methods_remember_from_step_to_step(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pipeline names its calls, though it makes their text anew. (Warnings are errors here.)"""
    calls, right = list[Any](), StepTracker.advance
    monkeypatch.setattr(StepTracker, "advance", lambda *given: calls.append(right(*given)) or calls[-1])
    pipe = pipeline()
    with warnings.catch_warnings(), apply(pipe, method):
        warnings.simplefilter("error")
        pipe.sample(range(1), size=64, steps=4)
        assert [call.is_new for call in calls] == [True, False, False, False], "only then it forgets"
        pipe.sample(range(1), size=64, steps=4)
        assert [call.is_new for call in calls[4:]] == [True, False, False, False]


def test_dense_steps_are_known_to_apply() -> None:
    """One tile that reads everything changes nothing; four tiles change the steps that are not dense."""
    pipe = pipeline()
    dense = pipe.sample(range(1), steps=4)
    with apply(pipe, paper(tiles=1, shared="none", dense_layers=0, dense_steps=0)):
        torch.testing.assert_close(pipe.sample(range(1), steps=4), dense, rtol=1e-4, atol=1e-4)
    method = paper(tiles=4, shared="none", dense_layers=0, dense_steps=4)
    with apply(pipe, method) as handle:
        assert torch.equal(pipe.sample(range(1), size=64, steps=4), pipe.sample(range(1), size=64, steps=4))
        assert "the first 4 of 4 dense" in handle.summary()
    with apply(pipe, paper(tiles=4, shared="none", dense_layers=0, dense_steps=1)):
        sparse = pipe.sample(range(1), size=64, steps=4)
    assert not torch.allclose(sparse, pipe.sample(range(1), size=64, steps=4), atol=1e-4)


# -- the main job ------------------------------------------------------------------------------------------------------


def test_embedded_model_knows_photographs() -> None:
    """Its velocities at photographs, with little and with much noise. Guessing zero is wrong by 2; the best guess from
    each number alone, were they normal, by 1.72."""
    model, _ = load_model(EMBEDDED)
    size = model.config.size
    images = torch.stack([decoded(picture, size) for picture in list(pictures_in(CATS))[:2]]) / 255
    with torch.no_grad():
        clean = model.normalised(autoencoder().encode(images))
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
        level = torch.tensor([0.3, 0.7])
        velocity = model(mixed(clean, noise, level), level)
    error = float((velocity - (noise - clean)).square().mean())
    assert error < 1.0


def test_missing_weights_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate, "EMBEDDED", tmp_path / EMBEDDED.name)
    with pytest.raises(generate.NoWeights, match="not in this installation"):
        generate.embedded_weights()


def test_runs_are_compared() -> None:
    images = torch.zeros(2, 8, 8, 3, dtype=torch.uint8)
    dense, sparse = (
        generate.Run("dense", images, (9.0, 2.0, 2.0)),
        generate.Run("x", images + 1, (9.0, 0.5, 0.5)),
    )

    def largest(first: torch.Tensor, second: torch.Tensor) -> float:
        return float((first.int() - second.int()).abs().max())

    first, second = generate.compared([dense, sparse], {"psnr": largest, "lpips": lambda *_: math.inf})
    assert first == {"name": "dense", "seconds_per_step": 2.0}
    assert second == {"name": "x", "seconds_per_step": 0.5, "speed_up": 4.0, "psnr": 1.0, "lpips": None}
    assert generate.figures(second) == "0.50 s per step, 4.00x as fast, PSNR 1.0 dB to dense"
    assert generate.Run("dense", images, (9.0, 2.0, 3.0)).extremes == (2.0, 3.0)


def test_models_that_are_not_there_are_said(tmp_path: Path) -> None:
    """A path, and a folder without a pipeline: both are errors of the file system, in one line."""
    for name, words in (
        (str(tmp_path / "none"), "cannot be opened as a pipeline of diffusers"),
        (str(tmp_path), "model_index.json"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(OSError, match=words):
                generate.open_pipeline(name, torch.device("cpu"))


def test_method_is_named_by_what_was_set() -> None:
    assert (Hilbert(tiles=4, far=None)).label == "Hilbert(tiles=4, far=None)"
    assert (Composition(Merge())).label == "Merge()"
    assert (Merge(ratio=0.25) | Hilbert(tiles=4)).label == "Merge(ratio=0.25) | Hilbert(tiles=4)"


def test_sheets_are_drawn(tmp_path: Path) -> None:
    images = torch.randint(0, 255, (3, 16, 16, 3), dtype=torch.uint8)
    assert pictures.grid_of(images, columns=2).shape == (36, 36, 3)
    assert torch.equal(pictures.grid_of(images, columns=2)[20:, :16], images[2])
    path = tmp_path / "new" / "sheet.png"
    pictures.write_rows(path, [pictures.Row("dense", "1 s", images), pictures.Row("sparse", "2 s", images)])
    with Image.open(path) as sheet:
        assert sheet.mode == "RGB"
    pictures.write_pictures(tmp_path / "all", images, first=5)
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == [
        "000005.png",
        "000006.png",
        "000007.png",
    ]


def test_latents_are_normalised_and_back() -> None:
    model = TinyFlux(CONFIG)
    model.latent_mean.copy_(latents().mean)
    model.latent_std.copy_(latents().std)
    some = latents().values.flatten(0, 1).float()
    normal = model.normalised(some)
    assert normal.mean(dim=(0, 2, 3)).abs().max() < 1e-2
    assert (normal.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-2
    torch.testing.assert_close(model.denormalised(normal), some)


def test_facts_are_json(tmp_path: Path) -> None:
    _files.write_json(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
