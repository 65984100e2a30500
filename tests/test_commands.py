"""The commands around the embedded model: generate, train demo, distill; what long ones keep and say."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from PIL import Image
from tests import command_line as cli
from tests import tiny_models
from tests.cats import CATS, lively_model
from tests.command_line import run

from nearfield import Hilbert, LogLinear, Merge
from nearfield.cli import methods
from nearfield.cli.progress import Bar, time_for
from nearfield.methods import BlockTopK, method_class, method_classes
from nearfield_lab.commands import generating, training
from nearfield_lab.embedded import generate
from nearfield_lab.embedded.model import Packing, save_model
from nearfield_lab.storage import read_tensors, write_tensors
from nearfield_lab.training.loop import Diverged
from nearfield_lab.training.runs import Backend

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_model(path, lively_model())
    return path


BAD_CALLS = {
    "generate --size 100": "`--size` must be pixels or height x width, in multiples of 8; got '100'. "
    "Example: --size 512",
    "generate --method fast": "`--method` must be one of METHODS; got 'fast'.",
    "generate --method blocktopk --set tiles=4": "`--set` must be one of q_block, k_block, keep, top_p, "
    "min_similarity, order, dense_layers, dense_steps; got 'tiles'.",
    "generate --method stridedkeys --set tiles": "`--set` must be FIELD=VALUE; got 'tiles'. "
    "Example: --set dense_steps=0",
    "generate --method merge+hilbert+merge": "`--method` must be one, or two: one that merges and one that reads; "
    "got 'merge+hilbert+merge'.",
    "generate --option colour=red": "`--option` must be NAME=VALUE with one of lora, first, batch, device, engine, "
    "tries, workers, ray-address, minutes, compile, data, pixels; got 'colour=red'.",
    "generate --option first": "`--option` must be NAME=VALUE with one of lora, first, batch, device, engine, "
    "tries, workers, ray-address, minutes, compile, data, pixels; got 'first'.",
    "generate --option batch=0": "`batch` must be an integer of at least 1; got '0'.",
    "generate --option compile=yes": "`compile` must be true or false; got 'yes'.",
    "generate --option compile=true": "`compile` must be given with a model of `nearfield train pixel` only; got True."
    " Example: --weights run/model.safetensors",
    "generate --method dense --set tiles=4": "`--set` must be left out with `--method dense`; got 'tiles=4'.",
    "generate --method dense --compare": "`--compare` must compare dense with another `--method`; got dense.",
    "generate --weights none.safetensors": "`--weights` must name a file that is there; got 'none.safetensors'.",
    "generate --model x": "`--prompt` must be given with `--model`, and only there; got None.",
    "generate --model x --prompt y --option first=3": "`first` must be left out with `--model`; got 3. "
    "Use another --seed.",
    "generate --set shared=none --set shared-tokens=4": '`shared_tokens` must be left out where `shared` is "none"; '
    "got 4.",
    "generate --set dense_layers=x": "`dense_layers` must be an integer or numbers between commas; got 'x'.",
    "generate --set dense_steps=-1": "`dense_steps` must be a share from 0 to 1 or a whole number of steps; got -1.",
    "generate --option device=sofa": "`--device` must name a device; got 'sofa'. Example: --device cuda:1",
    "train demo --data . --out x": "`--steps` must be given, or `--minutes`; got None. Training has to end somewhere.",
    "train demo --data . --out x --minutes 0": "`--minutes` must be a number above 0; got '0'.",
    "train demo --data . --out x --steps 1 --start none": "`--start` must name a file that is there; got 'none'.",
    "train demo --out x --steps 1": "the following arguments are required: --data. See `nearfield train demo --help`.",
    "distill --out x": "`--data` must be given for the embedded model, or `--model` with `--prompts`; "
    "got both or none.",
    "distill --out x --data . --method dense": "`--method` must be sparse: dense needs no tuning; got dense.",
    "distill --out x --data . --option full=true --option rank=4": "`rank` must be left out with `full`, which trains "
    "no LoRA; got 4.",
    "distill --out x --model y --prompts pyproject.toml --option full=true": "`full` must be left out with `--model`; "
    "got y. Large models are tuned by a LoRA.",
    "distill --out x --model y": "`--prompts` must be given with `--model`, and only there; got None.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call: str, capsys: pytest.CaptureFixture[str], weights: Path) -> None:
    words = call.split()
    if words[-1] == "device=sofa":  # which is looked at once there is a model
        words += ["--weights", str(weights)]
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    told = BAD_CALLS[call].replace("METHODS", ", ".join(method_classes()))  # other tests define some, too
    assert captured.err == f"nearfield: error: {told}\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    "command",
    ["generate", "train", "train demo", "train pixel", "distill", "quality", "tune", "rag", "studio"],
)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split(), "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: nearfield {command}")
    assert command == "train" or "exit codes: 0 done" in text


def test_choices_are_those_of_the_library() -> None:
    assert get_args(Backend) == training.BACKENDS
    assert get_args(Packing) == training.PACKINGS


METHODS = {
    "": Hilbert(),
    "--set near=tile --set tiles=4 --set share=keys --set cycle=2 --set interleave=true": Hilbert(
        near="tile", tiles=4, share="keys", cycle=2, interleave=True
    ),
    "--set summary=mean --set tiles=4,16": Hilbert(summary="mean", tiles=(4, 16)),
    "--set text-reads=summary": Hilbert(text_reads="summary"),
    "--set dense_layers=0,-1 --set dense_steps=0.5": Hilbert(dense_layers=(0, -1), dense_steps=0.5),
    "--set dense_layers=2 --set dense_steps=3": Hilbert(dense_layers=2, dense_steps=3),
    "--set dense_steps=1,0.1": Hilbert(dense_steps=(1, 0.1)),
    "--set dense_layers=2, --set dense_steps=0": Hilbert(dense_layers=(2,), dense_steps=0),
    "--set far=0 --set shared=centre --set shared-tokens=64": Hilbert(
        far=None, shared="centre", shared_tokens=64
    ),
    "--set tiles=4 --set tiles=8": Hilbert(tiles=8),
    "--method dense": None,
    "--method loglinear": LogLinear(),
    "--method blocktopk --set dense_layers=2 --set dense_steps=1": BlockTopK(dense_layers=2, dense_steps=1),
    "--method merge": Merge(),
    "--method merge+hilbert --set ratio=0.3 --set hilbert.tiles=4": Merge(0.3) | Hilbert(tiles=4),
}


METHODS |= {f"--method {name}": kind() for name, kind in method_classes().items()}


@pytest.mark.parametrize("fields", METHODS)
def test_methods_are_read(fields: str) -> None:
    words = ["generate", *fields.split()]
    assert methods.method_of(cli.parser(words).parse_args(words)) == METHODS[fields]


def test_without_weights_generate_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(generate, "EMBEDDED", tmp_path / "none")
    assert cli.main(["generate"]) == 1
    assert "the embedded model's weights are not in this installation" in capsys.readouterr().err


def test_missing_packages_name_their_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, weights: Path, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert cli.main(["generate", "--weights", str(weights)]) == 2
    assert "Install it with `pip install nearfield-lab`." in capsys.readouterr().err


def test_generate_compares(capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path) -> None:
    sheet, document, images = tmp_path / "a.png", tmp_path / "a.json", tmp_path / "images"
    words = "--size 64x96 --steps 3 --num 3 --option batch=2 --set tiles=4 --set dense_steps=1 --compare"
    files = "--out", sheet, "--json", document, "--images", images
    printed = run(capsys, "generate --weights", weights, words, *files)
    assert printed.startswith(f"wrote 3 pictures each to {images}\ndense: ")
    assert "Hilbert(tiles=4, dense_steps=1): " in printed
    assert "steps: the first 1 of 3 dense" in printed
    assert "last call: 16 text + 8x12: 112 tokens" in printed
    with Image.open(sheet) as picture:
        assert picture.height > 2 * 64
    record = json.loads(document.read_text())
    assert [entry["name"] for entry in record["runs"]] == ["dense", "Hilbert(tiles=4, dense_steps=1)"]
    assert record["runs"][1].keys() == {"name", "seconds_per_step", "speed_up", "psnr", "lpips"}
    assert record["settings"]["size"] == [64, 96]
    for name in ("dense", "hilbert"):
        with Image.open(images / name / "000002.png") as picture:
            assert picture.size == (96, 64)


def test_unsteady_times_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    images = torch.zeros(1, 8, 8, 3, dtype=torch.uint8)
    for seconds, is_noted in (((9.0, 2.0, 2.5), False), ((9.0, 2.0, 8.0), True)):
        generating._note_unsteady(generate.Run("dense", images, seconds))
        noted = capsys.readouterr().err
        assert noted.startswith("note: dense steps took 2 to 8 s: something else was busy") == is_noted
        assert bool(noted) == is_noted


@pytest.mark.parametrize(
    ("words", "alike"),
    [
        ("--num 3 --option batch=4", True),
        ("--num 8 --option batch=4", True),
        ("--num 5 --option batch=4", False),
    ],
)
def test_times_of_a_smaller_last_batch_are_no_sign(words: str, alike: bool) -> None:
    arguments = cli.parser(["generate"]).parse_args(["generate", "--compare", *words.split()])
    assert generating._are_batches_alike(arguments) == alike


def test_generate_dense_alone(capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path) -> None:
    words = "--method dense --steps 1 --num 1 --out"
    printed = run(capsys, "generate --weights", weights, words, tmp_path / "b.png")
    assert printed.splitlines()[1:] == [f"wrote {tmp_path / 'b.png'}"]


@pytest.mark.parametrize("method", ["blocktopk", "merge"])
def test_generate_with_another_method(
    method: str, capsys: pytest.CaptureFixture[str], weights: Path, tmp_path: Path
) -> None:
    words = f"--method {method} --compare --steps 2 --size 64 --num 1"
    files = "--out", tmp_path / "b.png", "--images", tmp_path / "images"
    printed = run(capsys, "generate --weights", weights, words, *files)
    assert f"nearfield: {method_class(method).__name__}(" in printed
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(["dense", method])


def test_a_diffusers_pipeline_is_sampled(tmp_path: Path) -> None:
    pipe = tiny_models.flux_pipeline()
    call = tiny_models.flux_call()
    prompt = {name: call[name] for name in ("prompt_embeds", "pooled_prompt_embeds", "guidance_scale")}
    seen: list[int] = []
    sample = generate.pipeline_sampler(
        pipe, prompt, 2, size=(24, 32), steps=3, seed=0, on_step=lambda step, steps: seen.append(step)
    )
    dense = generate.run_dense(sample)
    sparse = generate.run_sparse(sample, pipe, Hilbert(tiles=2, shared="none", dense_steps=0))
    assert dense.images.shape == sparse.images.shape == (2, 24, 32, 3)
    assert dense.images.dtype == torch.uint8
    assert len(dense.seconds) == 4  # all but the first of each
    assert seen == [0, 1, 2] * 4


def test_the_whole_chain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Photographs, latents, training, resumption, distillation, and pictures with what was learned."""
    out = tmp_path / "run"
    train = "train demo --tiny --size 64 --batch 4 --option samples=1 --data", CATS, "--out", out
    printed = run(capsys, *train, "--steps 2")
    assert "parameters, 12 latents at 64 px" in printed
    assert "step 2: loss " in printed
    error = run(capsys, *train, "--steps 3", code=2)
    assert "`--out` must hold no checkpoint unless `--resume` is given" in error
    printed = run(capsys, *train, "--steps 3 --resume --json", tmp_path / "train.json")
    assert "resumed at step 2" in printed
    assert json.loads((tmp_path / "train.json").read_text())["steps_of_this_run"] == 1

    model, lora = out / "model.safetensors", tmp_path / "lora"
    distill = "distill --data", CATS, f"--option latents={out} --weights", model, "--out", lora
    printed = run(capsys, *distill, "--set tiles=2 --steps 2 --batch 2")
    learned, picture = lora / "pytorch_lora_weights.safetensors", tmp_path / "cats.png"
    assert f"wrote {learned}" in printed
    words = ["generate", "--weights", str(model), "--option", f"lora={learned}"]
    words += f"--steps 2 --num 1 --out {picture}".split()
    assert cli.main([*words, "--set", "tiles=2", "--compare"]) == 0
    printed = capsys.readouterr()
    assert "x as fast" in printed.out
    assert "was distilled for" not in printed.err
    assert picture.exists()
    assert cli.main([*words, "--set", "tiles=2", "--set", "near=tile"]) == 0
    assert f"note: {learned} was distilled for Hilbert(tiles=2, tile_size=None, near='around', " in (
        capsys.readouterr().err
    )
    tensors, facts = read_tensors(learned)
    recipe = facts["recipe"] | {"format": 99}
    write_tensors(tmp_path / "later.safetensors", tensors, facts | {"recipe": recipe})
    message = "`lora` must be for a method that is known. `recipe` must be a nearfield recipe of format 2;"
    later = f"lora={tmp_path / 'later.safetensors'}"
    assert f"nearfield: error: {message}" in run(capsys, *words, "--option", later, code=2)


@pytest.mark.parametrize(
    ("kind", "place"), [("demo", "flow.FlowTraining.run"), ("pixel", "pixel.PixelTraining.loss")]
)
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Diverged("the loss is nan"), 1, "the loss is nan"),
        (
            torch.OutOfMemoryError("x"),
            2,
            "`--batch` must fit into the device's memory; got 2. Compute it in pieces:",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_training_that_ends_badly_says_so(
    kind: str,
    place: str,
    error: Exception,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(f"nearfield_lab.training.{place}", fail)
    words = (
        f"train {kind} --data {CATS} --out {tmp_path} --tiny --size 32 --batch 2 --option samples=0 --steps 2"
    )
    assert f"nearfield: error: {message}" in run(capsys, words, code=code)


def test_a_terminated_training_exits_as_interrupted(tmp_path: Path) -> None:
    words = f"train demo --data {CATS} --out {tmp_path} --tiny --size 32 --batch 2 --option samples=0 --steps 100000"
    program = [sys.executable, "-u", "-m", "nearfield_lab", *words.split()]
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'lab' / 'src'}",
        "OMP_NUM_THREADS": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(program, env=environment, text=True, **pipes) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "/100,000 steps" in line:
                    break
            process.send_signal(signal.SIGTERM)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, printed
    assert "stopped; go on with --resume" in printed
    assert (tmp_path / "checkpoint.safetensors").exists()


def test_the_bar_counts_and_estimates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 20.0, 25.0])
    monkeypatch.setattr("nearfield.cli.progress.time.monotonic", lambda: next(clock))
    with Bar(100, "steps") as bar:
        bar.show(0)
        bar.show(40, "loss 1.0")
        bar.show(50)  # too soon to say so
    assert capsys.readouterr().err.splitlines() == ["0/100 steps", "40/100 steps, loss 1.0, 2.0/s, 0:30 left"]


def test_the_bar_forgets_what_it_counted_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 100.0, 200.0, 220.0])
    monkeypatch.setattr("nearfield.cli.progress.time.monotonic", lambda: next(clock))
    with Bar(2, "pictures") as bar:
        bar.show(0)
        bar.show(1, "dense")
        bar.show(0, "sparse")
        bar.show(1, "sparse")
    assert capsys.readouterr().err.splitlines()[2:] == [
        "0/2 pictures, sparse",
        "1/2 pictures, sparse, 20.0 s each, 0:20 left",
    ]


def test_time_for_some_minutes_ends_and_for_none_never(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("nearfield.cli.progress.time.monotonic", lambda: now)
    short, endless = time_for(0.5), time_for(None)
    assert short()
    now = 130.0
    assert not short()
    now = 1e12
    assert endless()
