"""`nearfield bench --model`: a model of the user's, dense and with a method; its arguments, its check, its messages."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.remembering import Remembering, registered

from nearfield import Geometry, Hilbert, apply
from nearfield.cli import main, steps
from nearfield.cli.bench import Dense, Measured
from nearfield.cli.timing import Timing
from nearfield.diffusers import open_model, step_arguments

MODELS = {**tiny_models.MODELS, **tiny_models.VIDEO_MODELS}


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pipeline with its transformer; nothing else of it is looked at."""
    tiny_models.flux().save_pretrained(tmp_path / "flux" / "transformer")
    return tmp_path / "flux"


def bench(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    call = ["bench", "--model", *map(str, words), "--quick"]
    assert main([*call, "--size", "256x192"] if "--size" not in call else call) == code
    captured = capsys.readouterr()
    return captured.out if code != 2 else captured.err


def test_a_step_and_a_call_of_it_are_timed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    words = ["--text", 16, "--set", "near=tile", "--set", "tiles=4", "--json", path]
    text = bench(capsys, folder, *words)
    found = json.loads(path.read_text())
    assert (found["class"], found["has_random_weights"]) == ("FluxTransformer2DModel", False)
    assert (found["images"], found["text"], found["num_layers"]) == ([[16, 12]], 16, 5)
    layer = Hilbert(near="tile", tiles=4).layer(Geometry((16, 12), text=16), 0)
    step, call = found["step"], found["call"]
    assert call["shape"] == {"B": 1, "H": 2, "N": 208, "D": 16}
    assert call["density"] == layer.num_pairs / 208**2
    assert (step["status"], call["status"], step["bound_by"]) == ("ok", "ok", None)
    assert step["check"]["passed"]
    median = step["milliseconds"]["median"]
    assert step["speed_up"] == pytest.approx(step["dense_milliseconds"]["sdpa"]["median"] / median)
    dense = Hilbert().num_dense_steps(20)[0] / 20
    reckoned = 1 / (dense + (1 - dense) / step["speed_up"])
    assert found["speed_up_over_generation"] == pytest.approx(reckoned)
    assert f"3 of 20 stay dense: a generation is {reckoned:.2f}x as fast (reckoned)" in text
    assert "everything read, compared with the stock model" in text
    assert "5 sparse, 0 dense" in text
    assert "grouped runs: " in text


def test_weights_are_random_where_a_folder_has_only_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that merges has no call that could be compared; one that remembers is timed between two decisions."""
    tiny_models.flux().save_config(tmp_path)
    text = bench(capsys, tmp_path, "--text", 16, "--method", "merge", "--set", "skip_blocks=1,1")
    assert ", random weights\n" in text
    assert "3 on merged tokens" in text
    assert "one attention call" not in text
    text = bench(capsys, tmp_path, "--text", 16, "--method", registered(Remembering, monkeypatch).name)
    assert "one attention call" in text


@pytest.mark.parametrize("name", MODELS)
def test_arguments_are_those_of_the_pipeline(name: str) -> None:
    """Of every model that `apply` knows: it runs, and the grid is that of the pixels."""
    model = MODELS[name][0]()
    is_video = name in tiny_models.VIDEO_MODELS
    arguments = step_arguments(model, (256, 192, 9 if is_video else 1), text=16)
    with apply(model, Hilbert(dense_steps=0)) as handle:
        assert bool(tiny_models.first(model(**arguments, return_dict=False)).isfinite().all())
        geometry = handle.geometry()
    assert geometry is not None
    side = 32 if name.startswith("ltx") else 16
    grid = (256 // side, 192 // side)
    frames = {"hunyuan_i2v": 2}.get(name, 2 if name.startswith("ltx") else 3)
    assert geometry.images[-1] == ((frames, *grid) if is_video else grid)
    spec_sees_text = not (name.startswith(("wan", "ltx")) or name in ("pixart", "sdxl"))
    assert geometry.text in ((16, 32) if spec_sees_text else (0,))


def test_arguments_that_only_a_pipeline_knows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.flux()

    def forward(self: Any, hidden_states: Any, secret: Any, return_dict: bool = True) -> None: ...

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(
        NotImplementedError, match="FluxTransformer2DModel needs secret, which only its pipeline"
    ):
        step_arguments(model, (256, 256, 1))


def test_a_model_alone_is_opened_with_its_weights(folder: Path) -> None:
    whole, alone = (
        open_model(str(path), torch.device("cpu"), torch.float32) for path in (folder, folder / "transformer")
    )
    for model, has_random_weights in (whole, alone):
        assert not has_random_weights
        for mine, theirs in zip(model.parameters(), tiny_models.flux().parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_wrong_model_gets_no_figure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token reads its tile alone, where all were to be read."""
    monkeypatch.setattr(
        steps.Everything,
        "layer",
        lambda self, geometry, index=0, **_: Hilbert(near="tile", far=None, tiles=4).layer(geometry),
    )
    path = tmp_path / "bench.json"
    text = bench(capsys, folder, "--text", 16, "--json", path, code=1)
    assert "no figures: the answer is wrong\n" in text
    found = json.loads(path.read_text())
    assert (found["step"]["status"], found["step"]["speed_up"], found["call"]) == ("check failed", None, None)


def test_the_host_bounds_what_it_takes_longer_to_launch() -> None:
    def measured(milliseconds: float, host: float | None) -> Measured:
        timing = Timing(milliseconds, milliseconds, milliseconds, 3)
        return Measured(None, timing, Dense("cudnn", timing, {"cudnn": timing}), 0.5, host, host)

    assert [measured(1.0, host).bound_by for host in (None, 200.0, 950.0, 2000.0)] == [
        None,
        "gpu",
        "host",
        "host",
    ]


def test_missing_diffusers_names_the_extra(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert "It needs `pip install 'nearfield[diffusers]'`." in bench(capsys, folder, code=2)


def test_calls_that_cannot_be_timed_say_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = str(folder)
    assert "`--grid` must be left out with `--model`; got (8, 8). Say --size, in pixels." in bench(
        capsys, name, "--grid", "8x8", code=2
    )
    assert "`--size` must be pixels or height x width, in multiples of 8; got '60'." in bench(
        capsys, name, "--size", 60, code=2
    )
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    assert "`model` must be, or have, one of FluxTransformer2DModel, " in bench(
        capsys, folder / "vae", code=2
    )
    assert "`--model` must name a folder or a model of diffusers; got " in bench(
        capsys, folder / "empty", code=2
    )
    assert main(["bench", "--size", "256"]) == 2
    assert "`--model` must be given with `--size` and `--frames`; got None." in capsys.readouterr().err


CONFIGURATIONS = {
    "{": "is not a valid JSON file",
    "[]": "; got None.",
    '{"_class_name": "logging"}': "; got logging.",
    '{"_class_name": "FluxTransformer2DModel", "num_layers": "x"}': (
        "`model` must have a configuration that FluxTransformer2DModel takes; got 'str' object"
    ),
}
"""What a `config.json` holds, and what is said about it."""


@pytest.mark.parametrize("text", CONFIGURATIONS)
def test_odd_configurations_are_one_error(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert CONFIGURATIONS[text] in bench(capsys, tmp_path, code=2)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_are_missing_are_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 3}))
    assert "`model` must have all its weights; got none for " in bench(capsys, folder, code=2)
