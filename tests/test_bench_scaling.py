"""`python -m benchmarks scaling`: bytes beside ring attention and Ulysses, and where its times come from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import scaling, scaling_times
from benchmarks.scaling_cases import CASES, LINKS, TINY
from benchmarks.scaling_times import KernelTimes
from tests import command_line as cli

from nearfield import Hilbert, Plan
from nearfield.cli.timing import Effort, Function, Timing
from nearfield.parallel import attention

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def test_measured_times_are_those_of_the_results() -> None:
    calls = json.loads((RESULTS / "hilbert-h200.json").read_text(encoding="utf-8"))["results"]
    steps = json.loads((RESULTS / "model-h200.json").read_text(encoding="utf-8"))["results"]
    for size in ("2048", "4096"):
        case = CASES[f"flux-{size}"]
        assert case.measured is not None
        (call,) = (call for call in calls if call["case"] == f"{size}-keys-256")
        (step,) = (step for step in steps if step["pixels"] == size)
        measured = {"shared": "centre", "near": "tile", "summary": "mean"} | call[
            "method"
        ]  # the defaults of its day
        assert case.fields == {name: measured[name] for name in case.fields}
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


def test_a_far_field_sends_its_summaries_to_all() -> None:
    """Each rank's own, to 7 others: keys, values and biases of all but those that lie in what a reader's tiles hold."""
    near = scaling.count(replace(CASES["flux-4096-far-64"], far=None), 8)
    both = scaling.count(CASES["flux-4096-far-64"], 8)
    most = 7 * (256 * 256 // 64 // 8) * 24 * (2 * 128 * 2 + 4)
    assert 0.9 * most < both.sent - near.sent < 1.3 * most
    assert both.exchanges == near.exchanges + 1  # text reads no summaries: nothing returns


def test_ranks_tell_each_other_the_mean_query_where_summaries_are_weighted() -> None:
    weighted = replace(CASES["flux-4096-far-64"], summary="weighted")
    means, both = (scaling.count(case, 8) for case in (CASES["flux-4096-far-64"], weighted))
    assert (
        both.sent - means.sent == 7 * 2 * 24 * 128 * 4
    )  # two sums for each channel, in float32, to 7 others
    assert both.exchanges == means.exchanges + 1
    without = scaling.count(replace(weighted, far=None), 8)
    assert without == scaling.count(replace(CASES["flux-4096-far-64"], far=None), 8)


def test_the_default_is_counted() -> None:
    assert Hilbert(**CASES["flux-4096-default"].fields) == Hilbert()
    tiles = replace(Hilbert(), tiles=16, near="tile", summary="mean")
    assert Hilbert(**CASES["flux-4096-tiles"].fields) == tiles
    assert str(CASES["flux-4096-default"]).endswith("what is around, nothing shared, a far field of 16")


def test_committed_results_are_counted_and_hold_the_target() -> None:
    document = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    records = {(record["case"], record["ranks"]): record for record in document["results"]}
    assert {case for case, _ in records} == set(CASES)
    again = scaling.count(CASES["flux-2048"], 4)
    record = records["flux-2048", 4]
    assert (record["sent"], record["ring"], record["ulysses"]) == (again.sent, again.ring, again.ulysses)
    assert records["flux-4096", 8]["sent"] < 0.05 * records["flux-4096", 8]["ring"]
    assert [check["ranks"] for check in document["checks"]] == [2, 3, 4]
    assert records["flux-4096-far-64", 8]["sent"] < 0.05 * records["flux-4096-far-64", 8]["ring"]
    assert len(document["machine"]["commit"]) == 12  # a clean state of the code
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


# -- kernel times ------------------------------------------------------------------------------------------------------


def test_losses_are_against_an_even_share() -> None:
    whole, *ranks = (Timing(median, median, median, 1) for median in (8.0, 2.0, 2.2, 1.0, 2.0))
    slower = tuple(Timing(2 * time.median, 0.0, 0.0, 1) for time in ranks)
    result = KernelTimes("x", 4, 0, whole, tuple(ranks), slower, (10, 12, 8, 10))
    assert result.kernel_loss == pytest.approx(0.1)
    assert result.layer_loss == pytest.approx(1.2)
    assert result.pair_loss == pytest.approx(0.2)


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
    result = scaling_times.measure(TINY, num_ranks, 1, torch.device("cpu"), Effort(1, 0.0))
    (whole,) = timed["whole"]
    ranks = range(num_ranks)
    assert sum(result.pairs) == whole.num_pairs
    for rank in ranks:
        kernels, layer = timed[f"kernels {rank}"], timed[f"layer {rank}"]
        assert [id(plan) for plan in kernels] == [id(plan) for plan in layer]
        assert sum(plan.num_pairs for plan in kernels) == result.pairs[rank]


def _noted(plans: list[Plan], attend: Any, given: tuple[Any, ...], rest: dict[str, Any]) -> Any:
    plans.append(given[3])
    found = attend(*given, **rest)
    assert found.out.isfinite().all()
    return found


def test_command_times_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "times.json"
    words = "bench scaling --kernel-time --quick --ranks 2 --device cpu --json"
    assert cli.main([*words.split(), str(report)]) == 0
    assert "kernels: of the slowest rank" in capsys.readouterr().out
    document = json.loads(report.read_text(encoding="utf-8"))
    assert (document["benchmark"], document["device"]) == ("scaling-kernel-time", "cpu")
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
    assert cli.main(["bench", "scaling", "--kernel-time", "--quick", "--ranks", "2", "--device", "cpu"]) == 1
    assert capsys.readouterr().out.startswith("no figures: relative error 1.0")


def test_layers_that_were_timed_are_kept_when_the_rest_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, report = scaling_times.measure, tmp_path / "times.json"

    def stopped(case: Any, num_ranks: int, layer: int, *rest: Any) -> Any:
        if layer == 1:
            raise KeyboardInterrupt
        return right(case, num_ranks, layer, *rest)

    monkeypatch.setattr(scaling_times, "measure", stopped)
    words = "bench scaling --kernel-time --quick --ranks 2 --device cpu --json"
    assert cli.main([*words.split(), str(report)]) == 130
    assert [record["layer"] for record in json.loads(report.read_text())["results"]] == [0]


def test_on_a_gpu_calls_are_timed_as_graphs_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    functions: dict[str, Function] = {"whole": lambda: 1}
    monkeypatch.setattr(scaling_times.timing, "captured", lambda function, device: lambda: 2)
    graphs, is_graph = scaling_times._graphs(functions, torch.device("cuda"))
    assert (graphs["whole"](), is_graph) == (2, True)
    assert scaling_times._graphs(functions, torch.device("cpu")) == (functions, False)

    def refused(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(scaling_times.timing, "captured", refused)
    assert scaling_times._graphs(functions, torch.device("cuda")) == (functions, False)


BAD_KERNEL_TIMES = {
    "--quick": "`--quick` must be given with `--kernel-time` only; got True.",
    "--device cpu": "`--device` must be given with `--kernel-time` only; got cpu.",
    "--kernel-time --processes 2": "`--processes` must be left out with `--kernel-time`; got [2].",
    "--kernel-time --quick --cases flux-2048": "`--cases` must be left out with `--quick`; got flux-2048.",
    "--kernel-time --cases flux-4096-far-64": "`--cases` must have no far field with `--kernel-time`; got "
    "flux-4096-far-64.",
}


@pytest.mark.parametrize("call", BAD_KERNEL_TIMES)
def test_arguments_that_do_not_go_together_are_refused(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scaling", *call.split()]) == 2
    assert capsys.readouterr().err == f"nearfield: error: {BAD_KERNEL_TIMES[call]}\n"


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scaling", "--ranks", "1"]) == 2
    assert "`--ranks` must be an integer of at least 2; got '1'." in capsys.readouterr().err
    assert cli.main(["bench", "scaling", "--cases", "flux"]) == 2
    assert "`--cases` must be one of flux-2048, " in capsys.readouterr().err
