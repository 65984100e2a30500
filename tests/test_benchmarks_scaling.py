"""`python -m benchmarks scaling`: bytes compared with ring attention and Ulysses, and where its times come from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import scaling_split, scaling_times
from benchmarks.report import Record
from benchmarks.scaling_cases import CASES, LINKS, MEASURED
from benchmarks.scaling_split import SplitCase
from tests import command_line as cli

from nearfield import Hilbert, Plan
from nearfield.cli.timing import Effort, Function, Timing
from nearfield.parallel import attention

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
CPU = torch.device("cpu")
TINY = SplitCase(CASES["tiny-times"])


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Effort, "of", lambda *_: Effort(rounds=2, seconds=0.0, most=1))


def count(name: str, ranks: int, **fields: Any) -> Record:
    """What a case of the table sends, with other fields of its method."""
    case = CASES[name]
    return scaling_split.count(SplitCase(replace(case, fields={**case.fields, **fields})), ranks)


def test_measured_times_are_those_of_the_results() -> None:
    calls = json.loads((RESULTS / "hilbert-h200.json").read_text(encoding="utf-8"))["results"]
    steps = json.loads((RESULTS / "model-h200.json").read_text(encoding="utf-8"))["results"]
    for size in ("2048", "4096"):
        times = MEASURED[f"flux-{size}"]
        (call,) = (call for call in calls if call["case"] == f"{size}-keys-256")
        (step,) = (step for step in steps if step["pixels"] == size)
        # The defaults of its day.
        of_then = {"shared": "centre", "near": "tile", "summary": "mean"} | call["method"]
        fields = CASES[f"flux-{size}"].fields
        assert fields == {name: of_then[name] for name in fields}
        assert times.sparse == call["milliseconds"]
        assert times.dense == call["dense_milliseconds"]["cudnn"]["median"]
        assert times.rest == step["milliseconds"]["no attention"]["median"]


def test_eight_ranks_send_less_than_a_twentieth_of_ring_attention() -> None:
    result = count("flux-4096", 8)
    tokens, width = 256 * 256 + 512, 24 * 128 * 2
    assert result["ring"] == 2 * width * tokens * 7 // 8  # keys and values of the other ranks
    assert (
        result["ulysses"] == 4 * width * tokens * 7 // 64
    )  # of q, k, v and o all but an eighth of an eighth
    assert result["sent"] < 0.05 * result["ring"]
    assert result["exchanges"] == 3
    assert 1 <= result["pairs"] < 1.15
    for times in result["step_seconds"].values():
        assert times["nearfield"] < times["ring"]


def test_a_far_field_sends_its_summaries_to_all() -> None:
    """Each rank's own, to 7 others: keys, values and biases of all but those that lie in what a reader's tiles hold."""
    near, both = count("flux-4096-far-64", 8, far=None), count("flux-4096-far-64", 8)
    most = 7 * (256 * 256 // 64 // 8) * 24 * (2 * 128 * 2 + 4)
    assert 0.9 * most < both["sent"] - near["sent"] < 1.3 * most
    assert both["exchanges"] == near["exchanges"] + 1  # text reads no summaries: nothing returns


def test_ranks_tell_each_other_the_mean_query_where_summaries_are_weighted() -> None:
    means, both = count("flux-4096-far-64", 8), count("flux-4096-far-64", 8, summary="weighted")
    # Two sums for each channel, in float32, to 7 others.
    assert both["sent"] - means["sent"] == 7 * 2 * 24 * 128 * 4
    assert both["exchanges"] == means["exchanges"] + 1
    without = count("flux-4096-far-64", 8, summary="weighted", far=None)
    assert without == count("flux-4096-far-64", 8, far=None)


def test_the_default_is_counted() -> None:
    sparse = Hilbert(dense_layers=0, dense_steps=0)
    assert CASES["flux-4096-default"].made() == sparse
    assert CASES["flux-4096-tiles"].made() == replace(sparse, tiles=16, near="tile", summary="mean")


def test_committed_results_are_counted_and_hold_the_target() -> None:
    document = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    records = {(record["case"], record["ranks"]): record for record in document["results"]}
    assert {case for case, _ in records} == {
        name for name, case in CASES.items() if case.on["work"] == "bytes"
    }
    again = count("flux-2048", 4)
    record = records["flux-2048", 4]
    assert [record[name] for name in ("sent", "ring", "ulysses")] == [
        again[name] for name in ("sent", "ring", "ulysses")
    ]
    assert records["flux-4096", 8]["sent"] < 0.05 * records["flux-4096", 8]["ring"]
    assert [check["ranks"] for check in document["checks"]] == [2, 3, 4]
    assert records["flux-4096-far-64", 8]["sent"] < 0.05 * records["flux-4096-far-64", 8]["ring"]
    assert len(document["machine"]["commit"]) == 12  # a clean state of the code
    assert all(check["passed"] and check["sent"] == check["counted"] for check in document["checks"])


def test_times_of_an_unmeasured_size_are_scaled() -> None:
    own, scaled = (scaling_split.measured(SplitCase(CASES[name])) for name in ("flux-4096", "flux-8192"))
    assert own == MEASURED["flux-4096"]
    assert scaled is not None
    share = (512**2 + 512) / (256**2 + 512)
    assert scaled.rest == pytest.approx(own.rest * share)
    assert scaled.dense == pytest.approx(own.dense * share**2)
    assert scaling_split.measured(SplitCase(CASES["wan-720p"])) is None


def test_command_writes_what_it_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    words = ["bench", "scaling", "--case", '{"name": "flux-2048", "ranks": [2, 8]}']
    assert cli.main([*words, "--json", str(report), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "flux-2048" in printed
    assert "Step times are computed, not measured." in printed
    document = json.loads(report.read_text(encoding="utf-8"))
    assert [record["ranks"] for record in document["results"]] == [2, 8]
    assert document["links"] == LINKS
    assert picture.stat().st_size > 10_000


def test_real_processes_send_what_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scaling_split.check(TINY, 2)
    assert found["sent_by_rank"] == found["counted"]
    assert min(found["counted"]) > 0
    monkeypatch.setattr("benchmarks.scaling.check", lambda *_: found | {"counted": [1, 2]})
    assert cli.main(["bench", "scaling", "--cases", "processes-2"]) == 1
    assert "processes-2: check failed: [" in capsys.readouterr().out


# -- kernel times ------------------------------------------------------------------------------------------------------


def test_losses_are_against_an_even_share() -> None:
    whole, *ranks = (Timing(median, median, median, 1) for median in (8.0, 2.0, 2.2, 1.0, 2.0))
    slower = [Timing(2 * time.median, 0.0, 0.0, 1) for time in ranks]
    result = scaling_times.losses(whole, ranks, slower, (10, 12, 8, 10))
    assert result["kernel_loss"] == pytest.approx(0.1)
    assert result["layer_loss"] == pytest.approx(1.2)
    assert result["pair_loss"] == pytest.approx(0.2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_timed_is_what_ranks_compute(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks' calls are timed on their own plans, and these are together the whole, pair by pair."""
    timed: dict[str, list[Plan]] = {}
    here = scaling_times.attend_here

    def run_once(functions: dict[str, Function], *_: object) -> dict[str, Timing]:
        for name, function in functions.items():
            plans = timed[name] = []
            with monkeypatch.context() as patch:
                for module in (scaling_times, attention):
                    patch.setattr(
                        module,
                        "attend_here",
                        lambda *given, plans=plans, **rest: _noted(plans, here, given, rest),
                    )
                function()
        return {name: Timing(1.0, 1.0, 1.0, 1) for name in functions}

    monkeypatch.setattr(scaling_times.timing, "measure", run_once)
    result = scaling_times.measure(TINY, num_ranks, 1, CPU, Effort(1, 0.0))
    (whole,) = timed["whole"]
    ranks = range(num_ranks)
    assert sum(result["pairs"]) == whole.num_pairs
    for rank in ranks:
        kernels, layer = timed[f"kernels {rank}"], timed[f"layer {rank}"]
        assert [id(plan) for plan in kernels] == [id(plan) for plan in layer]
        assert sum(plan.num_pairs for plan in kernels) == result["pairs"][rank]


def _noted(plans: list[Plan], attend: Any, given: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    plans.append(given[3])
    found = attend(*given, **rest)
    assert found.out.isfinite().all()
    return found


TIMED = ["bench", "scaling", "--cases", "tiny-times", "--device", "cpu", "--quick"]


def test_command_times_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "times.json"
    assert cli.main([*TIMED, "--json", str(report)]) == 0
    assert "kernels: of the slowest rank" in capsys.readouterr().out
    document = json.loads(report.read_text(encoding="utf-8"))
    assert [record["layer"] for record in document["results"]] == [0, 1, 2, 3]
    for record in document["results"]:
        slowest = max(time["median"] for time in record["kernels"])
        assert record["kernel_loss"] == pytest.approx(slowest / (record["whole"]["median"] / 2) - 1)
        assert len(record["layers"]) == record["ranks"] == 2


def test_a_wrong_kernel_gets_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = scaling_times.attend_here

    def wrong(*given: Any, **rest: Any) -> Any:
        found = right(*given, **rest)
        return found._replace(out=1.01 * found.out)

    monkeypatch.setattr(scaling_times, "attend_here", wrong)
    assert cli.main(TIMED) == 1
    assert "tiny-times: check failed: relative error 1.0" in capsys.readouterr().out


def test_layers_that_were_timed_are_kept_when_the_rest_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the case is measured again."""
    right, report = scaling_times.measure, tmp_path / "times.json"

    def stopped(case: Any, num_ranks: int, layer: int, *rest: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return right(case, num_ranks, layer, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(scaling_times, "measure", stopped)
        assert cli.main([*TIMED, "--json", str(report)]) == 130
    assert [record["layer"] for record in json.loads(report.read_text())["results"]] == [0]
    assert cli.main([*TIMED, "--json", str(report)]) == 0
    assert [record["layer"] for record in json.loads(report.read_text())["results"]] == [0, 1, 2, 3]


def test_on_a_gpu_calls_are_timed_as_graphs_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: dict[str, Function] = {"whole": lambda: 1}
    monkeypatch.setattr(scaling_times.timing, "captured", lambda function, device: lambda: 2)
    graphs, is_graph = scaling_times._graphs(functions, torch.device("cuda"))
    assert (graphs["whole"](), is_graph) == (2, True)
    assert scaling_times._graphs(functions, CPU) == (functions, False)

    def refused(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(scaling_times.timing, "captured", refused)
    assert scaling_times._graphs(functions, torch.device("cuda")) == (functions, False)


BAD_CASES = {
    '{"name": "flux-4096-far-64", "work": "times"}': "`far` must be None where times are measured; got 64.",
    '{"work": "time", "method": "Hilbert"}': "`work` must be one of bytes, times, processes; got 'time'.",
    '{"method": "LogLinear"}': "`method` must be one whose tokens can be split; got 'LogLinear'.",
    '{"name": "flux-2048", "ranks": [1]}': "`ranks` must be at least 2; got [1].",
}


@pytest.mark.parametrize("case", BAD_CASES)
def test_bad_cases_say_what_is_wrong(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scaling", "--case", case]) == 2
    assert capsys.readouterr().err.endswith(f": {BAD_CASES[case]}\n")
