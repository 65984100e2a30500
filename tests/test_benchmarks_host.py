"""`python -m benchmarks host`: every method is called in every way; what cannot be compiled says why."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.host import WORKS, Host
from tests import command_line as cli

SMALL = {"grid": [8, 8], "text": 8, "heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiling, which takes long."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.parametrize("name", Host.table)
def test_every_call_is_timed_in_every_way(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = {"name": name} | SMALL
    reason = Host.table[name].made().compile_reason if Host.table[name].method else None
    path = tmp_path / "host.json"
    assert cli.main(["bench", "host", "--quick", "--case", json.dumps(case), "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "without a GPU: the host computes, too, so this is no cost of launching" in text
    records = {record["work"]: record for record in json.loads(path.read_text())["results"]}
    assert tuple(records) == WORKS
    for work, record in records.items():
        if work == "compiled" and reason is not None:
            assert (record["status"], record["note"]) == ("not run", f"not compiled: {reason}")
            continue
        assert 0 < record["host_microseconds"] <= record["call_microseconds"]


def test_targets_are_of_cases() -> None:
    targets = {name: case.targets for name, case in Host.table.items() if case.targets}
    assert targets["default"] == {"inference": 200, "training": 800, "compiled": 80}
    assert all(set(each) <= set(WORKS) for each in targets.values())
