"""`nearfield bench scaling`: bytes beside ring attention and Ulysses, and where its times come from."""

import json
from pathlib import Path

import pytest

from nearfield import cli
from nearfield.bench import scaling
from nearfield.bench.scaling_cases import CASES, LINKS, TINY

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def test_measured_times_are_those_of_the_results() -> None:
    calls = json.loads((RESULTS / "hilbert-h200.json").read_text(encoding="utf-8"))["results"]
    steps = json.loads((RESULTS / "model-h200.json").read_text(encoding="utf-8"))["results"]
    for size in ("2048", "4096"):
        case = CASES[f"flux-{size}"]
        assert case.measured is not None
        (call,) = (call for call in calls if call["case"] == f"{size}-keys-256")
        (step,) = (step for step in steps if step["pixels"] == size)
        assert case.fields == {name: call["method"][name] for name in case.fields}
        assert case.measured.sparse == call["milliseconds"]
        assert case.measured.dense == call["dense_milliseconds"]["cudnn"]["median"]
        assert case.measured.rest == step["milliseconds"]["no attention"]["median"]


def test_eight_ranks_send_less_than_a_twentieth_of_ring_attention() -> None:
    result = scaling.count(CASES["flux-4096"], 8)
    tokens, width = 256 * 256 + 512, 24 * 128 * 2
    assert result.ring == 2 * width * tokens * 7 // 8  # keys and values of the other ranks
    assert result.ulysses == 4 * width * tokens * 7 // 64  # of q, k, v and o all but an eighth of an eighth
    assert result.sent < 0.05 * result.ring
    assert result.exchanges == 3
    assert 1 <= result.pairs < 1.15
    for times in result.step_seconds.values():
        mine, ring = times["nearfield"], times["ring"]
        assert mine is not None
        assert ring is not None
        assert mine < ring


def test_committed_results_are_counted_and_hold_the_target() -> None:
    document = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    records = {(record["case"], record["ranks"]): record for record in document["results"]}
    assert {case for case, _ in records} == set(CASES)
    again = scaling.count(CASES["flux-2048"], 4)
    record = records["flux-2048", 4]
    assert (record["sent"], record["ring"], record["ulysses"]) == (again.sent, again.ring, again.ulysses)
    assert records["flux-4096", 8]["sent"] < 0.05 * records["flux-4096", 8]["ring"]
    assert [check["ranks"] for check in document["checks"]] == [2, 4]
    assert all(check["passed"] and check["sent"] == check["counted"] for check in document["checks"])


def test_times_of_an_unmeasured_size_are_scaled() -> None:
    times, like = scaling.measured(CASES["flux-4096"]), CASES["flux-4096"].measured
    assert times == like
    assert scaling.measured(CASES["wan-720p"]) is None


def test_command_writes_what_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    words = "bench scaling --cases flux-2048 --ranks 2,8"
    assert cli.main([*words.split(), "--json", str(report), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "flux-2048" in printed
    assert "Step times are computed, not measured." in printed
    document = json.loads(report.read_text(encoding="utf-8"))
    assert [record["ranks"] for record in document["results"]] == [2, 8]
    assert document["links"] == LINKS
    assert picture.stat().st_size > 10_000


def test_real_processes_send_what_is_counted() -> None:
    checked = scaling.check(TINY, 2)
    assert checked.passed
    assert min(checked.sent) > 0


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scaling", "--ranks", "1"]) == 2
    assert "`--ranks` must be an integer of at least 2; got '1'." in capsys.readouterr().err
    assert cli.main(["bench", "scaling", "--cases", "flux"]) == 2
    assert "`--cases` must be one of flux-2048, " in capsys.readouterr().err
