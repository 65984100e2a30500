"""`python -m benchmarks fine`: checked first, then timed; a wrong answer gets no figure."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import fine, fine_cases
from tests.command_line import main

from nearfield import Attended
from nearfield.cli.timing import Effort

CASE = fine_cases.FineCase("tiny", (1, 2, 600, 16), 0.7, 32, 4)
EFFORT = Effort(rounds=2, seconds=0.01, most=2)


def test_a_case_is_checked_and_timed() -> None:
    result = fine.FineBench(CASE, torch.device("cpu"), EFFORT).run()
    assert result.status == "ok", result.note
    assert {*fine.WORKS, "prediction online"} <= set(result.timings)
    for name, kept in result.kept.items():
        assert abs(kept - 0.3) < 0.06, f"{name} keeps {kept}"
    refresh, dense = result.figure("refresh"), result.dense()
    assert refresh is not None
    assert dense is not None
    assert refresh == pytest.approx(result.timings["refresh"].median / dense)
    assert result.figure("cached") == pytest.approx(dense / result.timings["cached"].median)
    assert list(result.seconds) == ["seeking lists", "checking", "timing"]
    assert all(seconds > 0 for seconds in result.seconds.values())


def test_a_wrong_answer_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fine.attend

    def wrong(*inputs: object, **options: object) -> Attended:
        out, lse = right(*inputs, **options)  # type: ignore[arg-type]
        return Attended(out * 1.01, lse)

    monkeypatch.setattr(fine, "attend", wrong)
    result = fine.FineBench(CASE, torch.device("cpu"), EFFORT).run()
    assert result.status == "check failed"
    assert not result.timings
    assert "check failed" in fine.results_table([result])


def test_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fine.json"
    assert main(["bench", "fine", "--quick", "--json", str(path)]) == 0
    assert "small-70-64x4" in capsys.readouterr().out
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["benchmark"] == "fine"
    assert all(record["status"] == "ok" for record in document["results"])


def test_what_was_measured_is_on_disk_whatever_stops_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cases = tmp_path / "fine.json", {"one": CASE, "two": replace(CASE, grain=8)}
    monkeypatch.setattr(fine_cases, "QUICK", cases)
    run = fine.FineBench.run

    def killed(self: fine.FineBench) -> fine.FineResult:
        if self.case.grain == 8:
            raise SystemExit
        return run(self)

    monkeypatch.setattr(fine.FineBench, "run", killed)
    with pytest.raises(SystemExit):
        main(["bench", "fine", "--quick", "--json", str(path)])
    (record,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert record["case"] == CASE.name
    assert record["figures"]["cached"] > 0


def test_dense_attention_that_is_clearly_slower_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(inputs: object) -> None:
        time.sleep(0.05)

    both = {"fast": lambda inputs: None, "slow": slow}
    offered = "benchmarks.attend.dense_attention"
    monkeypatch.setattr(offered, lambda device: both)
    bench = fine.FineBench(CASE, torch.device("cpu"), EFFORT)
    assert list(bench._dense()) == ["dense fast"]
    monkeypatch.setattr(offered, lambda device: {"slow": slow, "as slow": slow})
    assert list(bench._dense()) == ["dense slow", "dense as slow"]


def test_on_a_gpu_ten_cases_take_minutes() -> None:
    effort = fine.effort(torch.device("cuda"), quick=False)
    assert (effort.rounds, effort.seconds) == (5, 0.3)
    assert fine.effort(torch.device("cuda"), quick=True) == Effort.of(torch.device("cuda"), quick=True)


def test_cases_have_names_of_their_own() -> None:
    assert len(fine_cases.CASES) == 10
    assert fine_cases.CASES["wan-480p-70-128x8"].targets["cached"] == 3.1
