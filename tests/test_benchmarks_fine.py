"""FineGrained in benchmarks: its cases, the share that is skipped, its judge, and its lists in steps and pictures."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import special
from benchmarks.attention_calls import Call
from benchmarks.attention_cases import CASES as CALLS
from benchmarks.cases import CUDA, Case
from benchmarks.pareto import read_points
from benchmarks.patterns import GROUPS
from benchmarks.runner import WrongAnswer
from benchmarks.special.finegrained import Fitted, FittedLayer
from benchmarks.step import CEILING, OURS, REORDERING, figures_of
from benchmarks.step_cases import CASES as STEPS
from benchmarks.step_parts import REFRESH
from tests import command_line as cli
from tests.test_benchmarks_attention import CPU, LINE, _plain_cpu, measured, wrong_attend
from tests.test_benchmarks_pictures import facts_of
from tests.test_benchmarks_step import ON_CLIP, Bench, timings, told

from nearfield import FineGrained
from nearfield.methods import PlanLayer
from nearfield.methods.finegrained import FineLayer

FINE = Case("fine", LINE, "FineGrained", {"query_block": 32, "grain": 4})
VIDEO = Case("clip", ON_CLIP | {"skipped": 0.7}, "FineGrained", {"query_block": 16})

__all__ = ["_plain_cpu", "wrong_attend"]


def test_cases_are_what_was_measured() -> None:
    """Those of the committed results, and their targets."""
    on_gpu = [name for name, case in CALLS.items() if name.startswith("fine-") and CUDA in case.where]
    assert len(on_gpu) == 10
    assert CALLS["fine-wan-480p-70-128x8"].targets["cached"] == 3.1
    assert [STEPS[f"wan21-{size}-fine-70"].targets["cached"] for size in ("480p", "720p")] == [1.6, 2.0]
    assert not STEPS["wan21-480p-fine-90"].targets


# -- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("wrong_attend")
def test_a_wrong_answer_gets_no_figure() -> None:
    with pytest.raises(WrongAnswer, match="relative error"):
        measured(FINE)


def test_lists_are_found_predicted_and_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(FINE)
    assert list(found) == ["cached", "online", "refresh"]
    for name in ("cached", "online"):
        assert found[name]["density"] == pytest.approx(0.3, abs=0.02)
        assert found[name]["list_bytes"] > 0
    assert found["refresh"]["density"] == 1
    monkeypatch.setattr(FittedLayer, "_sought", lambda *_, **__: 1e-30)
    with pytest.raises(WrongAnswer, match=r"0\.0% of the keys were skipped, not 70%"):
        measured(FINE)


def test_a_refresh_makes_the_lists_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    remember = FineLayer._remember
    monkeypatch.setattr(FineLayer, "_remember", lambda *given: made.append(1) or remember(*given))
    works = Call(FINE, CPU, "auto").works()
    made.clear()
    works["cached"].run()
    works["online"].run()
    assert not made
    works["refresh"].run()
    works["refresh"].run()
    assert len(made) == 2


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fine_bench() -> Bench:
    return Bench(VIDEO)


@pytest.mark.parametrize("skipped", [0.7, 0.9])
def test_the_share_is_skipped_that_was_asked_for(
    fine_bench: Bench, skipped: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[FittedLayer] = []
    monkeypatch.setattr(Fitted, "layer", _telling(Fitted.layer, made))
    monkeypatch.setattr(fine_bench, "case", replace(VIDEO, on={**VIDEO.on, "skipped": skipped}))
    blocks = fine_bench.built.model.blocks
    before = [block.attn1.processor for block in blocks]
    results = {result["variant"]: result for result in fine_bench.run()}
    assert list(results) == ["cached", "online"]
    for name, result in results.items():
        assert result["density"] == pytest.approx(1 - skipped, abs=0.02)
        assert result["skipped"] == skipped
        parts = {REFRESH} if name == "cached" else set()
        assert set(result["milliseconds"]) == {"sdpa", OURS, CEILING, REORDERING} | parts
        assert (result["speed_up_over_generation"] is not None) == bool(parts)
        assert "nearfield: Fitted(method=FineGrained(query_block=16" in result["summary"]
        assert "object at" not in result["summary"]
    assert [block.attn1.processor for block in blocks] == before
    # A timed call finds its lists, but for those whose making is timed.
    calls = {(reader.stats.num_full, reader.stats.num_sparse) for reader in made}
    cached = {(full, sparse) for full, sparse in calls if full == 1 and sparse > 1}
    assert cached
    assert all(full == 0 or sparse == 0 or (full, sparse) in cached for full, sparse in calls)


def _telling(make: Any, made: list[Any]) -> Any:
    def reader(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    return reader


def test_a_share_that_was_not_met_gets_no_figure(fine_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FittedLayer, "_sought", lambda *_, **__: 1e-30)
    with pytest.raises(WrongAnswer, match=r"0\.0% of the keys were skipped, not 70%"):
        fine_bench.run()


def test_right_lists_pass_the_check_and_wrong_ones_do_not(
    fine_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = fine_bench.check()
    assert checked.passed, checked
    right = PlanLayer.attend

    def wrong(self: Any, query: Any, key: Any, value: Any, **options: Any) -> Any:
        return right(self, query, key.roll(int(options["impl"] == "auto"), 2), value, **options)

    monkeypatch.setattr(PlanLayer, "attend", wrong)
    checked = fine_bench.check()
    assert not checked.passed
    assert "plain torch" in checked.where


def test_lists_that_are_made_count_in_a_generation() -> None:
    found = timings(cudnn=550.0, ours=320.0, ceiling=200.0, reordering=0.5, lists=800.0)
    case = STEPS["wan21-480p-fine-70"]
    result = figures_of(found, ["cudnn"], case, "cached", 0.3) | {"skipped": 0.7}
    assert result["speed_up_over_generation"] == pytest.approx(50 * 550 / (6 * 800 + 44 * 320))
    assert result["target_reached"]
    shown = told(result)
    assert "1.60x reached" in shown
    assert "fixed: the share of keys that is skipped" in shown
    assert "takes 800.0 ms, as 1.45 dense ones" in shown
    slow = found | timings(ours=550.0, ceiling=400.0)
    assert "1.60x above the ceiling" in told(figures_of(slow, ["cudnn"], case, "cached", 0.3))


def test_the_command_measures_a_video_in_both_ways(tmp_path: Path) -> None:
    document = tmp_path / "step.json"
    own = ON_CLIP | {"layers": [1], "skipped": 0.7, "method": "FineGrained", "fields": {"query_block": 16}}
    assert (
        cli.main(["bench", "step", "--case", json.dumps(own), "--rounds", "2", "--json", str(document)]) == 0
    )
    cached, online = json.loads(document.read_text())["results"]
    assert (cached["variant"], online["variant"]) == ("cached", "online")
    assert cached["frames"] == 9
    assert cached["milliseconds"][REFRESH]["median"] > 0
    assert cached["speed_up_over_generation"] > 0
    assert {point.family for point in read_points(document)} == {"FineGrained"}


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_lists_that_are_remembered_are_not_compiled() -> None:
    assert FineGrained(predict="online").compile_reason is None
    assert "remembered from step to step" in str(FineGrained().compile_reason)


def test_patterns_are_among_those_that_choose() -> None:
    """In two steps lists are only made, by full attention; random tokens are so unlike that all are read."""
    patterns = special.cases("pictures")
    assert len(patterns) == 5
    for pattern in patterns:
        assert pattern in GROUPS["chosen"]
        facts = facts_of(pattern)
        assert 0 < facts.pairs_kept <= 1, pattern.name
        assert facts.tokens_kept is None
