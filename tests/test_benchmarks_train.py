"""`python -m benchmarks train`: real training steps, checked first; what is wrong or breaks gets no figure."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import train
from benchmarks.cases import Case
from benchmarks.report import Record
from benchmarks.runner import Session, WrongAnswer
from benchmarks.train import DEFAULTS, Train
from tests.command_line import main

from nearfield_lab.training.pixel import PixelTraining

CPU = torch.device("cpu")
TINY = DEFAULTS | {"size": 16, "batch": 2, "compiled": False, "tiny": True}
LOGLINEAR = Case("loglinear", TINY, "LogLinear", {"block": 4, "topk": 2})


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def made(*kernels: str) -> Train:
    options = argparse.Namespace(dense_kernels=list(kernels) or None, rounds=2, quick=True, impl="auto")
    return Train(Session(options, CPU))


def measured(case: Case, *kernels: str) -> Record:
    (record,) = made(*kernels).measure(case)
    return record


@pytest.mark.parametrize("method", ["LogLinear", "GatedBlocks", "SparseLinear"])
def test_every_attention_is_timed_in_turns_with_the_full_one(method: str) -> None:
    record = measured(replace(LOGLINEAR, method=method, fields={"topk": 2}))
    full = record["dense_milliseconds"]["sdpa"].median
    assert record["speed_up"] == pytest.approx(full / record["milliseconds"].median)
    assert record["tokens_per_second"] == pytest.approx(2 * 256 * 1000 / record["milliseconds"].median)
    assert record["full_tokens_per_second"]["sdpa"] == pytest.approx(2 * 256 * 1000 / full)
    assert record["check"].passed
    assert record["check"].error > 0


def test_full_attention_is_timed_with_each_kernel_of_torch() -> None:
    assert list(measured(LOGLINEAR, "math", "flash")["speed_ups"]) == ["math", "flash"]


def test_the_full_model_is_made_once_for_cases_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    right = Train._trained

    def noted(self: Train, case: Case, config: Any, kernel: Any) -> Any:
        seen.append(config.attention)
        return right(self, case, config, kernel)

    monkeypatch.setattr(Train, "_trained", noted)
    bench = made()
    for case in (
        LOGLINEAR,
        replace(LOGLINEAR, fields={"topk": 4}),
        replace(LOGLINEAR, on=TINY | {"batch": 1}),
    ):
        list(bench.measure(case))
    assert seen == ["full", "loglinear", "loglinear", "full", "loglinear"]


def test_full_attention_that_breaks_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = PixelTraining.loss

    def failing(self: PixelTraining, step: int, part: int) -> torch.Tensor:
        if self.recipe.config.attention == "full":
            raise torch.OutOfMemoryError("too much")
        return loss(self, step, part)

    monkeypatch.setattr(PixelTraining, "loss", failing)
    record = measured(LOGLINEAR)
    assert (record["speed_up"], record["note"]) == (
        None,
        "full attention by sdpa: OutOfMemoryError: too much",
    )
    assert record["tokens_per_second"] > 0


def test_a_loss_that_is_no_number_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = PixelTraining.loss
    monkeypatch.setattr(PixelTraining, "loss", lambda self, *given: loss(self, *given) * float("nan"))
    with pytest.raises(WrongAnswer, match="the loss is nan"):
        measured(LOGLINEAR)


def test_a_wrong_model_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train.compared(LOGLINEAR, CPU).passed
    monkeypatch.setitem(train._EVERYTHING, "LogLinear", {"topk": 2, "levels": 1, "enrich": 0})
    with pytest.raises(WrongAnswer, match="compared with the full model"):
        measured(LOGLINEAR)


def test_cases_are_what_was_measured() -> None:
    for size, batch, target in ((128, 16, 4.0), (256, 4, 10.0)):
        case = Train.table[f"pixel-{size}-loglinear"]
        assert (case.on["batch"], case.on["compiled"], case.targets) == (batch, True, {"training": target})
        assert not Train.table[f"pixel-{size}-sparselinear"].targets


def test_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = json.dumps({"method": "LogLinear", "fields": {"topk": 2}, **TINY, "batch": 1})
    words = ["bench", "train", "--case", own, "--rounds", "2", "--device", "cpu", "--dense-kernels", "math"]
    assert main([*words, "--json", str(tmp_path / "train.json")]) == 0
    assert "full by math, ms" in capsys.readouterr().out
    (record,) = json.loads((tmp_path / "train.json").read_text(encoding="utf-8"))["results"]
    assert record["tokens_per_step"] == 256
    assert record["settings"]["fields"]["topk"] == 2
    assert record["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            {"method": "Hilbert"},
            "`method` must be one of LogLinear, GatedBlocks, SparseLinear; got 'Hilbert'.",
        ),
        ({}, "`method` must be one of LogLinear, GatedBlocks, SparseLinear; got ''."),
        ({"method": "GatedBlocks", "fields": {"levels": 2}}, "`recipe` must hold fields of GatedBlocks ("),
        ({"method": "GatedBlocks", "fields": {"topk": 0}}, "`topk` must be at least 1; got 0."),
    ],
)
def test_wrong_cases_are_named(
    case: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "train", "--case", json.dumps(case)]) == 2
    assert message in capsys.readouterr().err
