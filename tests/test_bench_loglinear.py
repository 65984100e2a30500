"""`python -m benchmarks loglinear`: checked first, then timed; a wrong answer gets no figure."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks import loglinear, loglinear_cases
from tests.command_line import main

from nearfield.cli.timing import Effort

CASE = loglinear_cases.LogLinearCase((1, 2, 300, 16), 1)
EFFORT = Effort(rounds=2, seconds=0.01, most=2)


def test_a_case_is_checked_and_timed() -> None:
    result = loglinear.LogLinearBench(CASE, torch.device("cpu"), EFFORT).run()
    assert result.status == "ok", result.note
    assert result.checked is not None
    assert result.checked.passed
    assert {"forward", "forward + backward", "pooling"} <= set(result.timings)
    assert result.keys_per_query == 8 * 16 + 19
    assert result.over_dense("forward") is not None


def test_a_wrong_answer_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = loglinear.attend_with
    monkeypatch.setattr(loglinear, "attend_with", lambda *x, **y: right(*x, **y) * 1.01)
    result = loglinear.LogLinearBench(CASE, torch.device("cpu"), EFFORT).run()
    assert result.status == "check failed"
    assert not result.timings
    assert "check failed" in loglinear.results_table([result])


def test_command_writes_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "loglinear.json"
    assert main(["bench", "loglinear", "--quick", "--json", str(path)]) == 0
    assert "1x2x1000x32-auto" in capsys.readouterr().out
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["benchmark"] == "loglinear"
    assert all(record["status"] == "ok" for record in document["results"])


def test_an_interruption_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: loglinear.LogLinearBench) -> loglinear.LogLinearResult:
        if self.case.name == "1x2x1000x32-auto":
            raise KeyboardInterrupt
        return right(self)

    right = loglinear.LogLinearBench.run
    monkeypatch.setattr(loglinear.LogLinearBench, "run", interrupted)
    path = tmp_path / "loglinear.json"
    assert main(["bench", "loglinear", "--quick", "--json", str(path)]) == 130
    (record,) = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert record["shape"] == [1, 2, 1024, 32]
    monkeypatch.setattr(loglinear.LogLinearBench, "run", lambda self: interrupted(self))
    path.unlink()
    assert main(["bench", "loglinear", "--cases", "1x2x1000x32-auto", "--json", str(path)]) == 130
    assert not path.exists()


def test_targets_are_half_of_what_was_released() -> None:
    released = {"4x6x16384x64": (0.583, 3.03), "1x6x65536x64": (0.780, 5.03)}
    for name, (forward, both) in released.items():
        target = loglinear_cases.CASES[name].targets
        assert target[0] is not None
        assert target[1] is not None
        assert target[0] <= forward / 1.99
        assert target[1] <= both / 2
