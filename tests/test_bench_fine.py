"""`nearfield bench fine`: checked first, then timed; a wrong answer gets no figure."""

import json
from pathlib import Path

import pytest
import torch

from nearfield import Attended
from nearfield.bench import fine, fine_cases
from nearfield.bench.timing import Effort
from nearfield.cli import main

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


def test_cases_have_names_of_their_own() -> None:
    assert len(fine_cases.CASES) == 10
    assert fine_cases.CASES["wan-480p-70-128x8"].targets["cached"] == 3.1
