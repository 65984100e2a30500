"""`python -m benchmarks pixel`: real training steps, checked first; what is wrong or breaks gets no figure."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import pixel
from benchmarks.pixel_cases import ATTENTION, Variant, read_variant
from tests.command_line import main

from nearfield.cli.timing import Effort
from nearfield_lab.training.pixel import PixelTraining

TASK = pixel.PixelTask(16, 2, sizes={"layers": 1, "heads": 2, "head_dim": 16})
EFFORT = Effort(rounds=2, seconds=0.01, most=1)
CPU = torch.device("cpu")


def test_every_attention_is_timed_in_one_run() -> None:
    variants = [
        read_variant(name)
        for name in ("full", "loglinear:block=4:topk=2", "gatedblocks:topk=2", "sparselinear")
    ]
    results = pixel.PixelBench(TASK, CPU, EFFORT).run(variants, lambda _: None)
    assert [result.status for result in results] == ["ok"] * 4, [result.note for result in results]
    for result in results:
        assert result.timing is not None
        rate = result.tokens_per_second(TASK)
        assert rate == pytest.approx(2 * 256 * 1000 / result.timing.median)
    shown = pixel.results_table(results, TASK)
    assert "loglinear:block=4:topk=2" in shown
    assert "1.00x" in shown  # full over itself


def test_full_attention_is_timed_with_each_kernel_of_torch() -> None:
    bench = pixel.PixelBench(TASK, CPU, EFFORT, ("math", "flash"))
    results = bench.run([Variant("full", "full")], lambda _: None)
    assert [(result.name, result.status) for result in results] == [
        ("full, math", "ok"),
        ("full, flash", "ok"),
    ]


def test_what_breaks_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = PixelTraining.loss

    def failing(self: PixelTraining, step: int, part: int) -> torch.Tensor:
        if self.recipe.config.attention == "gatedblocks":
            raise torch.OutOfMemoryError("too much")
        if self.recipe.config.attention == "sparselinear":
            return loss(self, step, part) * float("nan")
        return loss(self, step, part)

    monkeypatch.setattr(PixelTraining, "loss", failing)
    variants = [Variant(name, name) for name in ("full", "gatedblocks", "sparselinear")]
    results = pixel.PixelBench(TASK, CPU, EFFORT).run(variants, lambda _: None)
    assert [result.status for result in results] == ["ok", "broke", "check failed"]
    shown = pixel.results_table(results, TASK)
    assert "gatedblocks: broke: OutOfMemoryError: too much" in shown
    assert "sparselinear: check failed: the loss is nan" in shown


def test_a_wrong_model_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant("loglinear", "loglinear")
    checked = pixel.check(variant, CPU)
    assert checked.passed, checked
    monkeypatch.setitem(pixel._EVERYTHING, "loglinear", {"topk": 2, "levels": 1, "enrich": 0})
    assert not pixel.check(variant, CPU).passed
    (result,) = pixel.PixelBench(TASK, CPU, EFFORT).run([variant], lambda _: None)
    assert result.status == "check failed"
    assert result.timing is None


def test_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "pixel", "--tiny", "--size", "16", "--batch", "1", "--rounds", "2", "--device", "cpu"]
    words += ["--attention", "full,loglinear:topk=2", "--dense-kernels", "math"]
    assert main([*words, "--dry-run"]) == 0
    assert "training steps at 16 px, 256 tokens x 1 on" in capsys.readouterr().out
    assert main([*words, "--json", str(tmp_path / "pixel.json")]) == 0
    assert "loglinear:topk=2" in capsys.readouterr().out
    document = json.loads((tmp_path / "pixel.json").read_text(encoding="utf-8"))
    assert document["benchmark"] == "pixel"
    assert document["task"]["tokens_per_step"] == 256
    assert [record["fields"] for record in document["results"]] == [{}, {"topk": 2}]
    assert [record["dense_kernel"] for record in document["results"]] == ["math", None]
    assert all(record["tokens_per_second"] > 0 for record in document["results"])


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("fast", "`--attention` must name any of full, loglinear, gatedblocks, sparselinear; got 'fast'."),
        ("full:topk=3", "`--attention` must give full its own fields (none) as name=value; got 'topk=3'."),
        (
            "gatedblocks:levels=2",
            "`--attention` must give gatedblocks its own fields (block, topk, order) as name=value; got ",
        ),
        ("gatedblocks:topk=0", "`topk` must be at least 1; got 0."),
    ],
)
def test_wrong_attention_is_named(attention: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pixel", "--attention", attention, "--dry-run"]) == 2
    assert f"nearfield: error: {message}" in capsys.readouterr().err


def test_variants_are_read() -> None:
    assert read_variant("loglinear:levels=auto:topk=4:order=raster").fields == {
        "levels": "auto",
        "topk": 4,
        "order": "raster",
    }
    assert read_variant("loglinear:weighted=no").fields == {"weighted": False}
    assert {read_variant(name).attention for name in ATTENTION} == set(ATTENTION)
