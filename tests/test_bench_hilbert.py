"""`python -m benchmarks hilbert`: its table of cases, its judge, its figures, and flex_attention with the same mask."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import flex, hilbert, hilbert_report
from benchmarks.hilbert import HilbertBench, HilbertResult, Options
from benchmarks.hilbert_cases import CASES, ON_CPU, ON_CUDA, QUICK, HilbertCase
from tests import command_line as cli
from tests.tiles import paper
from torch.nn.attention.flex_attention import flex_attention

from nearfield import Geometry, Hilbert, attend, planning
from nearfield._types import Attended
from nearfield.cli.check import Checked, check_forward
from nearfield.cli.presets import Preset
from nearfield.cli.timing import Effort, Timing
from nearfield.methods import PlanLayer, Summary
from nearfield.ops import _triton as kernels
from nearfield_lab.dense import random_inputs

CPU = torch.device("cpu")
LITTLE = Effort(rounds=2, seconds=0.0, most=1)
SMALL = Preset("small", 1, 2, 16, (10, 13), text=20, kept=1.0)


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "unsupported", lambda *_: "switched off by the test")
    monkeypatch.setattr(Effort, "of", lambda *_: Effort(rounds=2, seconds=0.0, most=1))


# -- cases -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bound", "target"),
    [
        ("1024-two-way", 2.855, 2.5),
        ("1024-keys", 3.256, 2.85),
        ("2048-two-way", 4.436, 4.2),
        ("2048-keys", 5.747, 5.3),
        ("2048-keys-256", 7.56, 7.0),
        ("4096-keys-256", 28.89, 25.0),
        ("2048-far", 4.21, None),
    ],
)
def test_cases_have_the_known_bounds(name: str, bound: float, target: float | None) -> None:
    case = CASES[name]
    assert case.target == target
    geometry = Geometry(case.preset.grid, text=case.preset.text)
    reader = paper(**case.fields).layer(geometry, 1, q_block=128, k_block=64)
    assert geometry.num_tokens**2 / reader.num_pairs == pytest.approx(bound, rel=0.01)


def test_every_case_is_for_some_machine() -> None:
    assert set(ON_CUDA) | set(QUICK) == set(CASES)
    assert set(ON_CPU) <= set(ON_CUDA)
    assert str(CASES["2048-far"]) == "2048-far: 16 tiles, 1024 shared two-way, far 64"
    assert str(CASES["1024-around"]) == "1024-around: a 16th around, 0 shared two-way, far 16"
    assert str(CASES["1024-default"]) == "1024-default: what is around, 0 shared two-way, far 16"


def test_what_is_called_default_is_the_default() -> None:
    sparse = Hilbert(dense_layers=0, dense_steps=0)
    for size in ("1024", "2048", "4096", "tiny"):
        assert Hilbert(**CASES[f"{size}-default"].fields) == sparse
    assert str(CASES["1024-text"]).endswith(", far 16, text in summary")
    for size in ("1024", "2048", "4096"):
        assert Hilbert(**CASES[f"{size}-text"].fields) == replace(sparse, text_reads="summary")
        tiles = replace(sparse, tiles=16, near="tile", summary="mean")
        assert Hilbert(**CASES[f"{size}-tiles"].fields) == tiles


# -- the judge ---------------------------------------------------------------------------------------------------------


def far_call(summary: Summary = "mean") -> tuple[tuple[torch.Tensor, ...], PlanLayer]:
    geometry = Geometry(SMALL.grid, text=SMALL.text)
    method = paper(tiles=3, shared_tokens=12, far=16, summary=summary)
    return random_inputs(SMALL, CPU, torch.float32), method.layer(geometry, 1, q_block=16, k_block=16)


def test_the_far_field_is_checked() -> None:
    inputs, reader = far_call()
    out, lse = reader.attend(*inputs)
    assert check_forward(inputs, reader.near, out, lse, far=reader.far).passed
    without = attend(*inputs, reader.near)
    assert not check_forward(inputs, reader.near, *without, far=reader.far).passed


@pytest.mark.parametrize("summary", ["mean", "weighted"])
def test_summaries_of_another_kind_are_found(summary: Summary) -> None:
    inputs, reader = far_call(summary)
    call, options = (inputs, reader.near), {"far": reader.far, "summary": summary}
    assert check_forward(*call, *reader.attend(*inputs), **options).passed
    assert not check_forward(*call, *attend(*inputs, reader.near), **options).passed
    other = replace(reader, summary="weighted" if summary == "mean" else "mean")
    assert not check_forward(*call, *other.attend(*inputs), **options).passed


@pytest.mark.parametrize("summary", ["mean", "weighted"])
def test_a_case_is_judged_by_its_own_summaries(summary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the others gets no figure."""
    exact = PlanLayer.attend
    case = HilbertCase("case", SMALL, 3, "two-way", 0, far=16, near="around", summary=summary)
    assert HilbertBench(SMALL, CPU, LITTLE, Options()).run(case).status == "ok"

    def wrong(self: PlanLayer, *arguments, **options) -> Attended:
        other = replace(self, summary="weighted" if self.summary == "mean" else "mean")
        return exact(other, *arguments, **options)

    monkeypatch.setattr(PlanLayer, "attend", wrong)
    result = HilbertBench(SMALL, CPU, LITTLE, Options()).run(case)
    assert result.status == "check failed"
    assert result.speed_up is None


def test_more_rows_are_checked_on_request() -> None:
    inputs, reader = far_call()
    out, lse = attend(*inputs, reader.near)
    out[0, 0, 16:32] *= 1.01
    assert check_forward(inputs, reader.near, out, lse).passed
    assert check_forward(inputs, reader.near, out, lse, rows=[1]).where == "out, head 0, row 1"
    assert check_forward(inputs, reader.near, out, None, rows=[2]).passed


@pytest.mark.parametrize("place", [0, 20, 36, -1])
def test_rows_of_every_kind_are_compared(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text, the shared rows, the first row of the tiles and the last."""
    exact = PlanLayer.attend

    def wrong(*arguments, **options) -> Attended:
        out, lse = exact(*arguments, **options)
        out[-1, -1, place] *= 0.9
        return Attended(out, lse)

    monkeypatch.setattr(PlanLayer, "attend", wrong)
    case = HilbertCase("case", SMALL, 3, "keys", 12)
    result = HilbertBench(SMALL, CPU, LITTLE, Options()).run(case)
    assert result.status == "check failed"
    assert result.note.startswith("layer 1: relative error")
    assert result.speed_up is None


def test_what_breaks_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_, **__) -> Attended:
        raise RuntimeError("the kernel is lost")

    monkeypatch.setattr(PlanLayer, "attend", lost)
    (result,) = hilbert.run_all([CASES["tiny-keys"]], Options(), CPU, LITTLE, lambda text: None)
    assert (result.status, result.note) == ("broke", "RuntimeError: the kernel is lost")


# -- figures -----------------------------------------------------------------------------------------------------------


def measured_result() -> HilbertResult:
    timing = Timing(2.0, 1.9, 2.1, 5)
    return HilbertResult(
        HilbertCase("case", SMALL, 4, "keys", 32, target=2.5),
        "bfloat16",
        "ok",
        ran="gluon",
        blocks=(128, 64),
        density=0.25,
        checked=Checked(1e-7, 3e-7, "out"),
        layers={0: timing, 1: replace(timing, median=3.0)},
        dense={"cudnn": replace(timing, median=6.0), "flash": replace(timing, median=10.0)},
        flex=replace(timing, median=5.0),
        reordering=replace(timing, median=0.57),
    )


def test_figures_follow_from_the_times() -> None:
    result = measured_result()
    assert result.milliseconds == pytest.approx(2.5)
    assert result.best_dense == "cudnn"
    assert result.speed_ups == pytest.approx({"cudnn": 2.4, "flash": 4.0, "flex": 2.5})
    assert result.speed_up == pytest.approx(2.4)
    assert result.fraction_of_bound == pytest.approx(0.6)
    assert result.reached is False
    assert result.reordering_share == pytest.approx(0.57 / (57 * 2.5))
    assert replace(result, dense={"flash": result.dense["flash"]}).reached is True
    assert replace(result, dense={"sdpa": result.dense["flash"]}).reached is None


def test_table_has_every_ratio_and_names_what_did_not_run() -> None:
    broken = HilbertResult(CASES["2048-far"], "bfloat16", "not run", note="there is no GPU")
    text = hilbert_report.results_table([measured_result(), broken])
    heading, _, first, *_, last = text.splitlines()
    assert heading.split()[:3] == ["case", "blocks", "impl"]
    for cell in (
        "6.000",
        "10.000",
        "5.000",
        "2.40x",
        "4.00x",
        "2.50x",
        "0.60",
        "2.50x missed",
        "0.570 (0.40%)",
    ):
        assert cell in first
    assert last == f"{CASES['2048-far']}: not run: there is no GPU"


# -- flex --------------------------------------------------------------------------------------------------------------


UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@UNCOMPILED
@pytest.mark.parametrize(("q_block", "k_block"), [(16, 16), (128, 64), (192, 32)])
@pytest.mark.parametrize("interleave", [False, True])
def test_flex_reads_what_the_plan_reads(q_block: int, k_block: int, interleave: bool) -> None:
    preset = Preset("medium", 1, 2, 16, (24, 25), text=70, kept=1.0)
    method = paper(tiles=3, shared_tokens=40, share="keys", interleave=interleave)
    geometry = Geometry(preset.grid, text=preset.text)
    plan = method.plan(geometry, 1, heads=2, q_block=q_block, k_block=k_block)
    inputs = random_inputs(preset, CPU, torch.float32)
    mask = flex.block_mask(plan)
    out = flex_attention(*inputs, block_mask=mask)
    assert check_forward(inputs, plan, out, None).passed
    torch.testing.assert_close(out, attend(*inputs, plan).out)
    held = blocks_of(plan.to_mask())
    assert torch.equal(held.any(5).any(3), mask.to_dense().bool())
    assert torch.equal(held.all(5).all(3).sum(dim=-1).int(), mask.full_kv_num_blocks)


def blocks_of(mask: torch.Tensor) -> torch.Tensor:
    """A mask in blocks of 128 x 128; past the end nothing is read."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 128, 0, -mask.shape[-2] % 128))
    return padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))


def test_whole_blocks_carry_no_mask() -> None:
    plan = planning.full(512, 512, q_block=128, k_block=64)
    mask = flex.block_mask(plan)
    assert mask.kv_num_blocks.sum() == 0
    assert mask.full_kv_num_blocks.tolist() == [[[4, 4, 4, 4]]]


@UNCOMPILED
def test_flex_is_measured_beside_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiling, which takes long; the far field, which no mask can say, is left out."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run = HilbertBench(CASES["tiny-keys"].preset, CPU, LITTLE, Options(flex=True)).run
    result = run(CASES["tiny-keys"])
    assert set(result.speed_ups) == {"sdpa", "flex"}
    assert run(CASES["tiny-far"]).flex_note == "a mask has no far field"
    monkeypatch.setattr(flex, "compiled", lambda inputs, plan: lambda: inputs[0] * 0)
    assert run(CASES["tiny-keys"]).flex_note.startswith("check failed: relative error")
    monkeypatch.setattr(flex, "compiled", None)
    assert run(CASES["tiny-keys"]).flex_note == "TypeError: 'NoneType' object is not callable"


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_json_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document, picture = tmp_path / "results.json", tmp_path / "results.png"
    arguments = ["--quick", "--layers", "0..3", "--json", str(document), "--plot", str(picture)]
    assert cli.main(["bench", "hilbert", *arguments]) == 0
    text = capsys.readouterr().out
    assert "mean over layers 0, 1, 2, 3" in text
    written = json.loads(document.read_text())
    assert written["benchmark"] == "hilbert"
    assert [record["case"] for record in written["results"]] == list(QUICK)
    for record in written["results"]:
        assert record["status"] == "ok"
        assert record["impl"] == "grouped"
        assert record["check"]["passed"]
        assert set(record["layers_milliseconds"]) == set("0123")
        assert record["speed_up"] == record["speed_ups"]["sdpa"] > 0
        assert record["reordering_milliseconds"]["median"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_dry_run_lists_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "hilbert", "--dry-run"]) == 0
    first, *cases = capsys.readouterr().out.splitlines()
    assert first.startswith("6 measurements on ")
    assert cases == [f"  {CASES[name]}" for name in ON_CPU]
    assert ON_CPU == ("1024-two-way", "1024-keys", "1024-default", "1024-text", "1024-tiles", "1024-around")


BAD_CALLS = {
    "--cases 4097": f"`--cases` must be one of {', '.join(CASES)}; got '4097'.",
    "--layers 3..1": "`--layers` must run from the smaller to the larger layer; got '3..1'. Example: --layers 0..3",
    "--layers x": "`--layers` must be an integer of at least 0; got 'x'.",
    "--json a.png --plot a.png": "`--plot` must be another file than `--json`; got 'a.png'.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "hilbert", *call.split()]) == 2
    assert capsys.readouterr().err == f"nearfield: error: {BAD_CALLS[call]}\n"


def test_an_implementation_that_cannot_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "hilbert", "--quick", "--impl", "triton"]) == 1
    assert "not run: `impl` must be able to run this call" in capsys.readouterr().out
