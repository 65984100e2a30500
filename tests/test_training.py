"""Training: latents of real photographs, exact resumption, flow matching and distillation on tiny models."""

import json
import math
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.cats import CATS, CONFIG, SIZE, autoencoder, latents, lively_model
from tests.remembering import Remembering
from tests.tiles import paper
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend

from nearfield import Hilbert, apply
from nearfield.diffusers.compiling import compiled_blocks
from nearfield_lab.embedded.lora import AdapterLora, FusedLora, suits
from nearfield_lab.embedded.model import load_model, save_model
from nearfield_lab.images import Picture
from nearfield_lab.storage import BadFile, read_tensors, write_tensors
from nearfield_lab.training import distill, recording
from nearfield_lab.training import loop as loop_module
from nearfield_lab.training.data import Latents, encode, pictures
from nearfield_lab.training.flow import FlowTraining, Recipe, mixed, noise_levels
from nearfield_lab.training.loop import CHECKPOINT, LOG, Diverged, Draws, Loop, Outcome, Schedule
from nearfield_lab.training.runs import MODEL

# -- data --------------------------------------------------------------------------------------------------------------


def test_pictures_of_a_tar_are_those_of_the_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for path in sorted(CATS.iterdir(), reverse=True):
            archive.add(path, arcname=path.name)
    inside, outside = pictures(tmp_path), pictures(CATS)
    assert [picture.name for picture in inside] == [picture.name for picture in outside]
    assert all(one.read() == other.read() for one, other in zip(inside, outside, strict=True))


def test_folders_without_pictures_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder"):
        pictures(tmp_path / "none")
    with pytest.raises(BadFile, match="holds neither tar files of pictures nor pictures"):
        pictures(tmp_path)
    (tmp_path / "a.tar").write_bytes(b"x" * 1024)
    with pytest.raises(BadFile, match="is not a tar archive, or not a whole one: file could not be opened"):
        pictures(tmp_path)
    (tmp_path / "a.tar").unlink()
    (tmp_path / "a.png").write_bytes(b"x")
    with pytest.raises(BadFile, match=r"a\.png in .* cannot be read"):
        encode(pictures(tmp_path), tmp_path, 16, autoencoder=autoencoder())


def encoded(source: list[Picture], folder: Path, calls: list[int] | None = None) -> Latents:
    note = None if calls is None else lambda done, total, words: calls.append(total)
    return encode(source, folder, 16, autoencoder=autoencoder(), on_progress=note)


def test_latents_are_kept_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield_lab.training.data._CHUNK", 2)
    source = pictures(CATS)
    calls: list[int] = []
    first = encoded(source, tmp_path, calls)
    whole = first.values.clone()
    assert (first.values.shape, len(first), calls) == ((6, 2, 32, 2, 2), 12, [6, 6, 6])
    assert torch.equal(encoded(source, tmp_path, calls).values, whole)
    assert len(calls) == 3  # nothing was encoded again
    first.values[3] = 0  # in the file, for it is mapped
    mended = encoded(source, tmp_path, calls)
    assert len(calls) == 4
    assert torch.equal(mended.values, whole)
    numbers = whole.float().transpose(0, 2).flatten(1)
    torch.testing.assert_close(mended.mean, numbers.mean(1))
    torch.testing.assert_close(mended.std, numbers.std(1, correction=0))


def test_an_interrupted_encoding_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield_lab.training.data._CHUNK", 2)
    source = pictures(CATS)

    def stop(done: int, total: int, words: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(source, tmp_path, 16, autoencoder=autoencoder(), on_progress=stop)
    calls: list[int] = []
    encoded(source, tmp_path, calls)
    assert calls == [2]


def test_latents_of_other_pictures_are_refused(tmp_path: Path) -> None:
    encoded(pictures(CATS)[:2], tmp_path)
    with pytest.raises(BadFile, match="belongs to other pictures"):
        encoded(pictures(CATS)[:3], tmp_path)
    (tmp_path / "latents-16.json").write_text("{}")
    with pytest.raises(BadFile, match="is no index of latents"):
        encoded(pictures(CATS)[:2], tmp_path)


def test_mirror_images_are_encoded() -> None:
    """A mirrored latent is another: what is kept is the latent of the mirrored picture."""
    plain, mirrored = latents(64).values.float().unbind(1)
    assert (plain.flip(-1) - mirrored).norm() > 0.1 * mirrored.norm()
    with torch.no_grad():
        error = (autoencoder().decode(plain).flip(-1) - autoencoder().decode(mirrored)).square().mean()
    assert -10 * torch.log10(error) > 20


# -- the loop ----------------------------------------------------------------------------------------------------------


def small_loop(folder: Path, **fields: Any) -> Loop:
    torch.manual_seed(0)
    # Names whose order is not the alphabet's, which is a file's.
    parameters = {"z": nn.Parameter(torch.randn(4, 3)), "a": nn.Parameter(torch.randn(2, 4))}
    draws = Draws(3, torch.device("cpu"))

    def loss(step: int, part: int) -> torch.Tensor:
        x = torch.randn(5, 3, generator=draws.generator(step, part))
        return (torch.tanh(x @ parameters["z"].T) @ parameters["a"].T - 1).square().mean()

    settings = {"learning_rate": 1e-2, "warm_up": 5, "checkpoint_seconds": 1e9} | fields
    return Loop(parameters, loss, Schedule(**settings), folder, {"kind": "small"})


def logged(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_resumed_run_is_the_same_run(parts: int, tmp_path: Path) -> None:
    whole = small_loop(tmp_path / "whole", steps=50, parts=parts)
    losses = whole.run().losses
    assert losses[-1] < losses[0]
    small_loop(tmp_path / "cut", steps=23, parts=parts).run()
    cut = small_loop(tmp_path / "cut", steps=50, parts=parts)
    cut.resume()
    assert cut.step == 23
    cut.run()
    assert logged(tmp_path / "cut") == list(losses)
    for name in ("z", "a"):
        assert torch.equal(cut.parameters[name], whole.parameters[name])
        assert torch.equal(cut.averages[name], whole.averages[name])


def test_what_was_logged_after_the_checkpoint_is_done_again(tmp_path: Path) -> None:
    small_loop(tmp_path, steps=30).run()
    with (tmp_path / LOG).open("a") as file:
        file.write('{"step": 31, "loss": 9.0}\n{"step": 32, "lo')
    cut = small_loop(tmp_path, steps=40)
    cut.resume()
    cut.run()
    assert len(logged(tmp_path)) == 40
    assert max(logged(tmp_path)) < 9


def test_checkpoints_of_other_runs_are_refused(tmp_path: Path) -> None:
    loop = small_loop(tmp_path, steps=1)
    loop.run()
    other = small_loop(tmp_path, steps=2)
    other._facts["kind"] = "large"
    with pytest.raises(BadFile, match="was made with kind = small, not large; resume with the same settings"):
        other.resume()
    del loop.parameters["a"]
    with pytest.raises(BadFile, match="holds other parameters"):
        loop.resume()


def test_a_budget_of_time_ends_a_run(tmp_path: Path) -> None:
    loop = small_loop(tmp_path, minutes=0.01)
    outcome = loop.run()
    assert outcome.ending == "minutes"
    assert 0.5 < outcome.seconds < 10
    assert len(outcome.losses) == outcome.step > 0


def test_models_are_kept_at_equal_steps_and_at_equal_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on until both moments came, over several runs; compiling and keeping are no training."""
    clock = [0.0]
    monkeypatch.setattr(loop_module.time, "monotonic", lambda: clock[0])
    kept: list[tuple[str, int]] = []

    def trained(**schedule: Any) -> Outcome:
        loop = small_loop(tmp_path, keep_steps=7, keep_seconds=18.0, **schedule)
        if (tmp_path / CHECKPOINT).exists():
            loop.resume()
        loss, first = loop._loss, loop.step

        def timed(step: int, part: int) -> torch.Tensor:
            clock[0] += 100 if step == first else 1
            return loss(step, part)

        def keep(mark: str) -> None:
            clock[0] += 50
            kept.append((mark, loop.step))

        loop._loss = timed
        return loop.run(on_mark=keep)

    assert trained(steps=9).training_seconds == 9
    assert kept == [("steps", 7)]
    outcome = trained()
    # The eleventh and each fifth step after it are looked at; the tenth counts from then on.
    assert kept[1:] == [("seconds", 20)]
    assert (outcome.ending, outcome.step, outcome.training_seconds) == ("steps", 20, 20)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["seconds"] for line in lines[10:]] == list(range(11, 21))


def test_a_request_to_terminate_ends_with_a_checkpoint(tmp_path: Path) -> None:
    loop = small_loop(tmp_path, steps=10**9)

    def terminate(step: int, loss: float | None) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    outcome = loop.run(terminate)
    assert (outcome.ending, outcome.step) == ("stopped", 7)
    assert signal.getsignal(signal.SIGTERM) is before
    assert read_tensors(tmp_path / CHECKPOINT)[1]["step"] == 7


def test_a_loss_that_is_no_number_keeps_the_checkpoint(tmp_path: Path) -> None:
    small_loop(tmp_path, steps=3).run()
    loop = small_loop(tmp_path, steps=9)
    loop.resume()
    loop._loss = lambda step, part: loop.parameters["z"].sum() * math.nan
    with pytest.raises(Diverged, match="the loss is nan near step 4"):
        loop.run()
    assert read_tensors(tmp_path / CHECKPOINT)[1]["step"] == 3


def test_the_rate_warms_up_and_cools_down() -> None:
    schedule = Schedule(steps=100, learning_rate=1.0, warm_up=10, cool_down=20)
    assert [schedule.rate(step) for step in (0, 9, 50, 90, 99)] == [0.1, 1.0, 1.0, 0.5, 0.05]
    with pytest.raises(ValueError, match="`steps` must be given, or `minutes`; got None"):
        Schedule()
    with pytest.raises(ValueError, match="`cool_down` must be 0 where `steps` is not given; got 5"):
        Schedule(minutes=1, cool_down=5)


def test_every_sample_is_taken_once_per_epoch() -> None:
    draws = Draws(0, torch.device("cpu"))
    taken = torch.cat([draws.indices(step, part, 6, 2, 9) for step in range(3) for part in range(2)])
    assert sorted(taken[:9].tolist()) == sorted(taken[9:].tolist()) == list(range(9))
    assert taken[:9].tolist() != taken[9:].tolist()


def test_averages_are_put_in_and_taken_out(tmp_path: Path) -> None:
    loop = small_loop(tmp_path, steps=5)
    loop.run()
    weights = loop.parameters["z"].detach().clone()
    with loop.averaged():
        assert torch.equal(loop.parameters["z"], loop.averages["z"])
        assert not torch.equal(loop.parameters["z"], weights)
    assert torch.equal(loop.parameters["z"], weights)


# -- flow matching -----------------------------------------------------------------------------------------------------


def flow(folder: Path, steps: int, **fields: Any) -> FlowTraining:
    recipe = {"size": SIZE, "batch": 8, "samples": 0} | fields
    start = recipe.pop("start", None)
    schedule = Schedule(steps=steps, learning_rate=4e-3, warm_up=5, checkpoint_seconds=1e9)
    return FlowTraining(
        latents(recipe["size"]), folder, Recipe(**recipe), schedule, config=CONFIG, start=start
    )


def test_levels_are_logit_normal_and_exact_in_half_precision() -> None:
    levels = noise_levels(4000, 1.0, torch.Generator().manual_seed(0))
    assert torch.equal(levels, levels.bfloat16().float())
    assert abs(levels.mean() - 0.5) < 0.01
    assert abs(torch.logit(levels.clamp(1e-3, 1 - 1e-3)).std() - 1) < 0.05
    assert noise_levels(4000, 3.0, torch.Generator().manual_seed(0)).mean() > 0.65


def test_mixing_goes_from_picture_to_noise() -> None:
    picture, noise = torch.zeros(2, 1, 1, 1), torch.ones(2, 1, 1, 1)
    assert mixed(picture, noise, torch.tensor([0.0, 0.25])).flatten().tolist() == [0.0, 0.25]


def test_the_loss_falls_and_the_model_is_written(tmp_path: Path) -> None:
    training = flow(tmp_path, 60, samples=2)
    outcome = training.run()
    assert outcome.losses[0] == pytest.approx(2, abs=0.25)  # noise and picture, each of variance 1
    assert sum(outcome.losses[-10:]) < 0.93 * sum(outcome.losses[:10])
    model, facts = load_model(tmp_path / MODEL)
    assert (facts["step"], model.config.size) == (60, SIZE)
    assert (tmp_path / "samples-000060.png").stat().st_size > 500


PROGRAM = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.test_training import flow
training = flow(Path(sys.argv[1]), 10**6)
training.loop.schedule = training.loop.schedule.__class__(steps=10**6, learning_rate=4e-3, warm_up=5,
                                                          checkpoint_seconds=0.2)
training.run()
"""


def test_a_killed_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root / "src"), str(root / "lab" / "src"), str(root)])
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "cut")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    checkpoint = tmp_path / "cut" / CHECKPOINT
    deadline = time.monotonic() + 90
    while not (checkpoint.exists() and read_tensors(checkpoint)[1]["step"] >= 4):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    training = flow(tmp_path / "cut", 10**6)
    training.resume()
    steps = training.loop.step + 5
    training.loop.schedule = replace(training.loop.schedule, steps=steps)
    training.run()
    whole = flow(tmp_path / "whole", steps)
    assert list(whole.run().losses) == logged(tmp_path / "cut")


def test_another_size_starts_from_a_model(tmp_path: Path) -> None:
    flow(tmp_path / "small", 20).run()
    start = tmp_path / "small" / MODEL
    larger = flow(tmp_path / "large", 2, size=2 * SIZE, shift=2.0, start=start)
    assert (larger.model.config.size, larger.model.config.shift) == (2 * SIZE, 2.0)
    assert torch.equal(larger.model.latent_mean, load_model(start)[0].latent_mean)
    assert torch.equal(larger.model.condition, load_model(start)[0].condition)
    assert larger.run().step == 2


def test_training_may_be_sparse_from_the_start(tmp_path: Path) -> None:
    method = paper(tiles=4, shared="none", dense_layers=0, dense_steps=0)
    dense, sparse = flow(tmp_path / "a", 12, size=64), flow(tmp_path / "b", 12, size=64, method=method)
    assert "3 sparse, 0 dense" in sparse.handle.summary()
    losses = dense.run().losses, sparse.run().losses
    assert losses[0][0] == losses[1][0]  # a new model predicts nothing, whoever reads whom
    assert losses[0][-1] != losses[1][-1]
    with pytest.raises(BadFile, match="was made with method = Hilbert"):
        flow(tmp_path / "b", 12, size=64).resume()


def test_a_compiled_model_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_model(model, backend="eager"))
    runs = [
        flow(tmp_path / name, 3, size=64, compiled=name == "compiled").run() for name in ("compiled", "plain")
    ]
    torch.testing.assert_close(*(torch.tensor(run.losses) for run in runs))


@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_a_compiled_model_asks_for_its_kernel_itself(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else torch's cache would give the graph of one kernel for that of another."""
    found: list[str] = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(node.target) + str(node.args) for node in graph.graph.nodes)
        return graph.forward

    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_model(model, backend=kept))
    torch.compiler.reset()
    flow(tmp_path, 1, size=64, compiled=True, dense_kernel=kernel).run()
    asked = [words for words in found if "_backend_from_string" in words]
    assert found
    assert [SDPBackend.MATH.name in words for words in asked[:1]] == [True] * (kernel == "math")


@pytest.mark.parametrize("method", [Hilbert(dense_steps=0), Hilbert(tiles=4, near="tile", dense_steps=0)])
def test_compiled_blocks_learn_the_same(
    method: Hilbert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a method it is blocks that are compiled: one graph for each kind, and none for samples."""
    quick = partial(compiled_blocks, backend="aot_eager")
    monkeypatch.setattr("nearfield_lab.training.flow.compiled_blocks", quick)
    losses, made = list[Any](), list[int]()
    for is_compiled in (True, False):
        counters.clear()
        fields = {"size": 64, "method": method, "compiled": is_compiled, "samples": 1, "sample_steps": 1}
        losses.append(torch.tensor(flow(tmp_path / str(is_compiled), 3, **fields).run().losses))
        made.append(counters["stats"]["unique_graphs"])
    assert made == [3, 0]  # joint blocks, the first single one, whose tokens lie otherwise, and the others
    torch.testing.assert_close(*losses)
    with pytest.raises(
        ValueError, match="`compiled` must be False: its lists are remembered from step to step"
    ):
        Recipe(method=Remembering(), compiled=True)


# -- distillation ------------------------------------------------------------------------------------------------------

METHOD = paper(tiles=4, shared="none", dense_layers=0)


def distilled(folder: Path, steps: int, method: Hilbert = METHOD) -> tuple[distill.Distillation, Any]:
    model = lively_model()
    calls = distill.latent_calls(model, latents(64), 4)
    schedule = Schedule(steps=steps, learning_rate=5e-3, warm_up=2, average=0.9, checkpoint_seconds=1e9)
    return distill.Distillation(model.transformer, calls, folder, distill.Recipe(method), schedule), model


def test_the_teacher_is_the_model_itself(tmp_path: Path) -> None:
    distillation, model = distilled(tmp_path, 1)
    x, level = torch.randn(1, 32, 8, 8), torch.tensor([0.5])
    stock = lively_model()(x, level)
    with torch.no_grad():
        with distillation.teacher():
            torch.testing.assert_close(model(x, level), stock)
        assert not torch.allclose(model(x, level), stock, rtol=1e-3, atol=1e-3)
    distillation.close()
    assert torch.equal(model(x, level), stock)


def test_distillation_falls_resumes_and_loads(tmp_path: Path) -> None:
    whole, _ = distilled(tmp_path / "whole", 24)
    losses = whole.run().losses
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    distilled(tmp_path / "cut", 10)[0].run()
    cut, _ = distilled(tmp_path / "cut", 24)
    assert cut.can_resume
    cut.resume()
    cut.run()
    assert logged(tmp_path / "cut") == list(losses)

    tensors, facts = read_tensors(tmp_path / "whole" / distill.LORA)
    assert facts["rank"] == 4
    assert all(name.startswith("transformer.") and ".lora_" in name for name in tensors)
    model = lively_model()
    path = tmp_path / "whole" / distill.LORA
    beside, inside = AdapterLora(model.transformer, path), FusedLora(model.transformer, path)
    assert inside.method == METHOD
    assert suits(inside.method, replace(METHOD, dense_steps=3))
    assert suits(Hilbert(near="around"), Hilbert(near="around", cycle=2))
    assert not suits(Hilbert(near="around"), Hilbert(near="tile"))
    assert not suits(Hilbert(summary="weighted"), Hilbert(summary="mean"))
    assert not suits(Hilbert(near="around"), Hilbert(near="around", tiles=16))
    assert suits(Hilbert(near="around", tiles=16), Hilbert(near="around", tiles=16, dense_steps=3))
    assert not suits(inside.method, replace(METHOD, tiles=3))
    assert suits(Hilbert(near="tile"), Hilbert(near="tile", tiles=16))
    assert not suits(Hilbert(near="tile", tiles=(4, 16)), Hilbert(near="tile", tiles=16))
    assert not suits(Hilbert(tiles=(4, 16)), Hilbert(tiles=16))
    assert not suits(None, METHOD)
    call = distill.latent_calls(model, latents(64), 4)(99, 0)
    with torch.no_grad(), apply(model.transformer, METHOD):
        untuned = model.transformer(**call)[0]
        beside.switch(True)
        tuned = model.transformer(**call)[0]
        beside.switch(False)
        assert torch.equal(model.transformer(**call)[0], untuned)
        inside.switch(True)
        torch.testing.assert_close(model.transformer(**call)[0], tuned, rtol=1e-3, atol=1e-4)
        inside.switch(False)
        assert torch.equal(model.transformer(**call)[0], untuned)
    with torch.no_grad():
        wanted = model.transformer(**call)[0]
    assert (tuned - wanted).norm() < 0.95 * (untuned - wanted).norm()


def test_dense_steps_have_no_part_in_a_checkpoint(tmp_path: Path) -> None:
    distilled(tmp_path, 1, replace(METHOD, dense_steps=3))[0].run()
    checkpoint = tmp_path / CHECKPOINT
    other, _ = distilled(tmp_path, 2, replace(METHOD, dense_steps=(0, 3)))
    other.resume()
    assert other.loop.step == 1
    tensors, facts = read_tensors(checkpoint)
    for older in ("3", "0.2", "(1, 2)", "[1, 2]"):  # they were named once
        method = facts["recipe"]["method"].replace("dense_steps=0,", f"dense_steps={older},")
        assert f"dense_steps={older}, interleave" in method
        write_tensors(checkpoint, tensors, facts | {"recipe": facts["recipe"] | {"method": method}})
        distilled(tmp_path, 2, replace(METHOD, dense_steps=(0, 3)))[0].resume()
    with pytest.raises(BadFile, match=r"was made with method = Hilbert.*tiles=4.*, not .*tiles=3"):
        distilled(tmp_path, 2, replace(METHOD, tiles=3))[0].resume()


def test_all_weights_are_distilled(tmp_path: Path) -> None:
    """By a copy of the model, which stays as it was; what is written is a model, also of a step on the way."""
    model = lively_model()

    def whole(steps: int, folder: Path) -> distill.Distillation:
        return distill.Distillation(
            model.transformer,
            distill.latent_calls(model, latents(64), 4),
            folder,
            distill.Recipe(METHOD, rank=None),
            Schedule(steps=steps, keep_steps=5, learning_rate=1e-3, warm_up=2, average=0.5),
            write=lambda path, facts: save_model(path, model, facts, "none"),
        )

    call = distill.latent_calls(model, latents(64), 4)(99, 0)
    stock = lively_model().transformer
    distillation = whole(20, tmp_path)
    with torch.no_grad(), distillation.teacher() as teacher:
        wanted = teacher(**call)[0]
        torch.testing.assert_close(wanted, stock(**call)[0])
    losses = distillation.run().losses
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    with torch.no_grad(), distillation.teacher() as teacher:
        assert torch.equal(teacher(**call)[0], wanted)
    distillation.close()
    assert not any(weight.requires_grad for weight in model.parameters())
    errors = []
    for file in (None, "model-steps.safetensors", MODEL):
        student = stock if file is None else load_model(tmp_path / file)[0].transformer
        with torch.no_grad(), apply(student, METHOD):
            errors.append(float((student(**call)[0] - wanted).norm()))
    assert errors[0] > errors[1] > errors[2]
    assert load_model(tmp_path / MODEL)[1]["rank"] is None
    with pytest.raises(ValueError, match="`write` must be given where the recipe's `rank` is None"):
        distill.Distillation(
            model.transformer, lambda *_: call, tmp_path, distill.Recipe(METHOD, None), Schedule(1)
        )
    with pytest.raises(ValueError, match="`targets` must be left out where `rank` is None"):
        distill.Recipe(METHOD, None, ("to_q",))


def test_compiled_distillation_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the teacher is one graph and of the student another; no step but the first makes any."""
    quick = partial(compiled_blocks, backend="aot_eager")
    monkeypatch.setattr(distill, "compiled_blocks", quick)
    method, config = replace(METHOD, far=4), replace(CONFIG, joint_blocks=0, single_blocks=1)
    losses, made = list[Any](), list[int]()
    for is_compiled in (False, True):
        model = lively_model(config)
        distillation = distill.Distillation(
            model.transformer,
            distill.latent_calls(model, latents(64), 2),
            tmp_path / str(is_compiled),
            distill.Recipe(method, compiled=is_compiled, is_one_size=True),
            Schedule(steps=3, learning_rate=5e-3, warm_up=0, checkpoint_seconds=1e9),
            on_step=lambda *_: made.append(counters["stats"]["unique_graphs"]),
        )
        counters.clear()
        losses.append(torch.tensor(distillation.run().losses))
    assert not counters["graph_break"]
    assert made == 3 * [0] + 3 * [2]
    torch.testing.assert_close(*losses)
    assert losses[0][-1] != losses[0][0]
    with pytest.raises(
        ValueError, match="`compiled` must be False: its lists are remembered from step to step"
    ):
        distill.Recipe(Remembering(), compiled=True)


def test_a_lora_for_another_model_is_refused(tmp_path: Path) -> None:
    distilled(tmp_path, 1)[0].run()
    tensors, facts = read_tensors(tmp_path / distill.LORA)
    name = next(iter(tensors))
    for wrong, words in (
        ({name: tensors[name]}, "no LoRA of `nearfield distill`"),
        ({name.replace("blocks.0", "blocks.9"): x for name, x in tensors.items()}, "has no such layer"),
    ):
        write_tensors(tmp_path / "wrong.safetensors", wrong, facts)
        with pytest.raises(BadFile, match=words):
            FusedLora(lively_model().transformer, tmp_path / "wrong.safetensors")


def test_lora_stands_on_attention_and_feed_forward() -> None:
    names = distill.lora_targets(tiny_models.flux(1, 1))
    assert names == [
        *(f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"transformer_blocks.0.attn.{name}_proj" for name in ("add_q", "add_k", "add_v")),
        "transformer_blocks.0.attn.to_add_out",
        *(
            f"transformer_blocks.0.{name}.net.{part}"
            for name in ("ff", "ff_context")
            for part in ("0.proj", "2")
        ),
        *(f"single_transformer_blocks.0.{name}" for name in ("proj_mlp", "proj_out")),
        *(f"single_transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")),
    ]


@pytest.mark.parametrize("kind", ["flux", "sd3", "pixart", "qwen", "z_image", "sdxl"])
def test_any_model_that_apply_supports_is_distilled(kind: str, tmp_path: Path) -> None:
    model = getattr(tiny_models, kind)()
    inputs = getattr(tiny_models, f"{kind}_inputs")((16, 16))
    schedule = Schedule(steps=8, learning_rate=1e-3, warm_up=0, average=0.5, checkpoint_seconds=1e9)
    recipe = distill.Recipe(METHOD, save_memory=kind == "flux")
    losses = distill.Distillation(model, lambda *_: inputs, tmp_path, recipe, schedule).run().losses
    assert 0 < losses[-1] < losses[0], losses
    prefix = "unet." if kind == "sdxl" else "transformer."
    assert all(name.startswith(prefix) for name in read_tensors(tmp_path / distill.LORA)[0])


def test_calls_are_recorded_and_given_back(tmp_path: Path) -> None:
    pipe = tiny_models.flux_pipeline()
    call = tiny_models.flux_call(steps=2)
    embeds = {name: call[name] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    options = {name: call[name] for name in ("height", "width", "num_inference_steps", "guidance_scale")}
    files = recording.record(pipe, [embeds, embeds], tmp_path, **options)
    assert [file.name for file in files] == [
        f"call-{n:05d}-{step:03d}.safetensors" for n in (0, 1) for step in (0, 1)
    ]
    assert recording.record(pipe, [embeds, embeds], tmp_path, **options) == files
    calls = recording.RecordedCalls(files, parts=2, device=torch.device("cpu"))
    given = calls(0, 0)
    assert given["hidden_states"].shape == (1, 24 * 20 // 4, 4)
    assert given["return_dict"] is False
    assert isinstance(pipe.transformer(**given)[0], torch.Tensor)
    seen = {float(calls(step, part)["timestep"]) for step in range(2) for part in range(2)}
    assert len(seen) == 2
    save_model(tmp_path / "model.safetensors", lively_model())
    with pytest.raises(BadFile, match="is no recorded call"):
        recording.read_call(tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match="`arguments` must hold tensors and plain values; got object"):
        recording.write_call(tmp_path / "x", {"a": object()})
