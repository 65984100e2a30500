"""`python -m benchmarks host`: every method is called in every way; what cannot be compiled says why."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.host import _LEAST, WORKS, Host
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
    case = {"name": name} | SMALL | ({"fields": {"query_block": 16}} if "fine" in name else {})
    path = tmp_path / "host.json"
    assert cli.main(["bench", "host", "--quick", "--case", json.dumps(case), "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "without a GPU: the host computes, too, so this is no cost of launching" in text
    records = {record["work"]: record for record in json.loads(path.read_text())["results"]}
    assert tuple(records) == WORKS
    for work, record in records.items():
        if work == "compiled" and name == "fine-cached":
            assert record["status"] == "not run"
            assert record["note"].startswith("not compiled: its lists are remembered")
            continue
        assert 0 < record["host_microseconds"] <= record["call_microseconds"]


def test_targets_are_of_cases() -> None:
    assert set(_LEAST) <= set(Host.table)
    assert all(set(each) <= set(WORKS) for each in _LEAST.values())
