"""`python -m benchmarks attention`: its table, its judge, its figures, and flex_attention with the same mask."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import attention_calls, layouts
from benchmarks.attention import Attention, usable_dense
from benchmarks.attention_calls import BACKWARD, BOTH, FORWARD, Call, made_plan, preset_of
from benchmarks.attention_cases import CASES, DEFAULTS, hilbert_fields
from benchmarks.cases import Case
from benchmarks.dense import dense_attention, random_inputs
from benchmarks.report import Record
from benchmarks.rivals import flex
from benchmarks.runner import Session, WrongAnswer
from benchmarks.special import loglinear
from tests import command_line as cli
from tests.tiles import paper
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Geometry, Hilbert, attend, planning
from nearfield._types import Attended
from nearfield.cli.check import check_forward
from nearfield.cli.presets import PRESETS, Preset
from nearfield.cli.timing import Effort
from nearfield.methods import PlanLayer, Summary
from nearfield.ops import _triton as kernels
from nearfield.ops.attention.dispatch import Choice

CPU = torch.device("cpu")
SMALL = Preset("small", 1, 2, 16, (10, 13), text=20, kept=1.0)
ON_SMALL = DEFAULTS | {"preset": {"batch": 1, "heads": 2, "head_dim": 16, "grid": [10, 13], "text": 20}}
LINE = DEFAULTS | {
    "preset": {"batch": 1, "heads": 2, "head_dim": 16, "grid": [600], "text": 0},
    "backward": True,
}
PLAN = Case("plan", ON_SMALL | {"plan": "random", "grain": 16, "q_block": 32})
TILES = Case("tiles", ON_SMALL, "Hilbert", hilbert_fields(3, "keys", 12))
FAR = Case("far", ON_SMALL, "Hilbert", hilbert_fields(3, far=16, near="around"))
LOGLINEAR = Case("loglinear", LINE, "LogLinear", {"levels": 1})
BLOCKS = Case("blocks", ON_SMALL, "BlockTopK", {"q_block": 16, "k_block": 16})


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "missing", lambda _: "switched off by the test")
    monkeypatch.setattr(Effort, "of", lambda *_: Effort(rounds=2, seconds=0.0, most=1))


def measured(case: Case, **options: Any) -> dict[str, Record]:
    """The records of a case by their work. Raises WrongAnswer."""
    given = {"impl": "auto", "rounds": None, "quick": True, "rivals": []} | options
    bench = Attention(Session(argparse.Namespace(**given), CPU))
    return {record["work"]: record for record in bench.measure(case)}


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
    case = CASES[f"hilbert-{name}"]
    assert case.targets.get(FORWARD) == target
    preset = PRESETS[case.on["preset"]]
    geometry = Geometry(preset.grid, text=preset.text)
    reader = case.made().layer(geometry, 1, q_block=128, k_block=64)
    assert geometry.num_tokens**2 / reader.num_pairs == pytest.approx(bound, rel=0.01)


def test_cases_are_for_some_machine() -> None:
    def names(where: str, start: str) -> set[str]:
        return {
            name.removeprefix(start)
            for name, case in CASES.items()
            if where in case.where and name.startswith(start)
        }

    kinds = {"two-way", "keys", "default", "text", "tiles", "around"}
    assert names("cpu", "hilbert-") == {f"1024-{kind}" for kind in kinds}
    assert len(names("cuda", "hilbert-")) == 22
    assert len(names("quick", "hilbert-")) == 6
    assert names("cuda", "flux-1024-") == {
        "random-64", "random-16", "random-1", "tiles", "ragged", "random-64-backward"
    }  # fmt: skip
    assert names("cuda", "wan-480p-") == {"random-64", "random-16", "random-1", "random-64-backward"}
    assert len(names("cuda", "loglinear-")) == 7


def test_what_is_called_default_is_the_default() -> None:
    sparse = Hilbert(dense_layers=0, dense_steps=0)
    for size in ("1024", "2048", "4096", "tiny"):
        assert CASES[f"hilbert-{size}-default"].made() == sparse
    for size in ("1024", "2048", "4096"):
        assert CASES[f"hilbert-{size}-text"].made() == replace(sparse, text_reads="summary")
        tiles = replace(sparse, tiles=16, near="tile", summary="mean")
        assert CASES[f"hilbert-{size}-tiles"].made() == tiles


def test_plans_suit_the_device() -> None:
    blocks = {
        name: made_plan(Call(CASES[name], CPU, "auto")) for name in ("cpu-small-random-64", "cpu-small-tiles")
    }
    assert [(plan.q_block, plan.k_block) for plan in blocks.values()] == [(64, 64), (16, 16)]
    assert [CASES[f"flux-1024-{kind}"].on["q_block"] for kind in ("tiles", "random-1")] == [128, None]


def test_targets_of_loglinear_are_half_of_what_was_released() -> None:
    released = {"4x6x16384x64": (0.583, 3.03), "1x6x65536x64": (0.780, 5.03)}
    for name, (forward, both) in released.items():
        target = loglinear.MILLISECONDS[f"loglinear-{name}"]
        assert target[0] <= forward / 1.99
        assert target[1] <= both / 2


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
    case = replace(FAR, fields={**FAR.fields, "summary": summary})
    assert measured(case)[FORWARD]["check"].passed

    def wrong(self: PlanLayer, *arguments, **options) -> Attended:
        other = replace(self, summary="weighted" if self.summary == "mean" else "mean")
        return exact(other, *arguments, **options)

    monkeypatch.setattr(PlanLayer, "attend", wrong)
    with pytest.raises(WrongAnswer, match="relative error"):
        measured(case)


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
    with pytest.raises(WrongAnswer, match="relative error"):
        measured(TILES)


@pytest.fixture
def wrong_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row in the last head reads a key too few."""
    right = attention_calls.attend

    def wrong(*tensors: Any, **options: Any) -> Attended:
        out, lse = right(*tensors, **options)
        return Attended(torch.cat([out[:, :, :-1], 0.99 * out[:, :, -1:]], 2), lse)

    for name, module in list(sys.modules.items()):
        if (
            name.startswith(("benchmarks.", "nearfield.methods."))
            and getattr(module, "attend", None) is right
        ):
            monkeypatch.setattr(module, "attend", wrong)


@pytest.mark.usefixtures("wrong_attend")
@pytest.mark.parametrize("case", [PLAN, replace(PLAN, on={**PLAN.on, "backward": True}), BLOCKS], ids=str)
def test_a_wrong_answer_gets_no_figure(case: Case) -> None:
    with pytest.raises(WrongAnswer, match="relative error"):
        measured(case)


def test_what_was_never_written_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention_calls.attend

    def unwritten(*tensors: Any, **options: Any) -> Attended:
        out, lse = right(*tensors, **options)
        out[0, 0, 100] = torch.empty_like(out[0, 0, 100])
        return Attended(out, lse)

    monkeypatch.setattr(attention_calls, "attend", unwritten)
    with pytest.raises(WrongAnswer, match="out holds values that are not finite"):
        measured(PLAN)


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_answer_of_loglinear_gets_no_figure(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its result, or in its gradients alone."""
    right = loglinear.attend_with

    def wrong(*given: Any, **options: Any) -> torch.Tensor:
        out = right(*given, **options)
        if backward:
            out = out + 0.01 * (out - out.detach())
            return out
        return out * 1.01

    monkeypatch.setattr(loglinear, "attend_with", wrong)
    with pytest.raises(WrongAnswer, match="relative error"):
        measured(LOGLINEAR)


def test_what_nobody_can_judge_is_not_run() -> None:
    with pytest.raises(NotImplementedError, match="nothing here can judge what SparseLinear chooses"):
        measured(replace(LOGLINEAR, method="SparseLinear", fields={}))


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_measured_with_what_it_consists_of() -> None:
    record = measured(Case("ragged", ON_SMALL | {"plan": "ragged", "grain": 16, "q_block": 16}))[FORWARD]
    parts = record["parts_milliseconds"]
    assert list(parts) == ["rows that read all", "rows that read tiles"]
    whole = record["milliseconds"].median
    assert record["overhead_over_parts"] == pytest.approx(
        whole / sum(part.median for part in parts.values()) - 1
    )
    assert (record["q_block"], record["k_block"], record["impl"]) == (16, 16, "grouped")
    assert record["tflops"] == pytest.approx(4 * 16 * 2 * 150**2 * record["density"] / whole / 1e9)
    assert record["fraction_of_bound"] == pytest.approx(record["tflops"] / record["dense_tflops"])


def test_the_backward_of_gluon_is_recorded_as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run by the plain Triton kernels, whichever of the two was asked for."""
    monkeypatch.setattr(attention_calls, "explain_choice", lambda *_, **__: Choice("gluon", "", {}))
    backward = replace(PLAN, on={**PLAN.on, "backward": True})
    works = [next(iter(Call(case, CPU, "auto").works().values())) for case in (PLAN, backward)]
    assert [work.facts["impl"] for work in works] == ["gluon", "triton"]


def test_a_method_is_measured_with_its_reordering() -> None:
    record = measured(FAR)[FORWARD]
    share = record["parts_milliseconds"]["reordering"].median / (57 * record["milliseconds"].median)
    assert record["reordering_share"] == pytest.approx(share)
    assert record["bound"] == pytest.approx(1 / record["density"])
    assert record["impl"] == "grouped"


def test_loglinear_is_measured_with_its_parts() -> None:
    found = measured(LOGLINEAR)
    assert list(found) == [FORWARD, BOTH]
    assert list(found[FORWARD]["parts_milliseconds"]) == ["pooling", "pooling, choosing and lists"]
    assert found[FORWARD]["keys_per_query"] == 8 * 16 + 38
    for record in found.values():
        assert record["speed_up"] == pytest.approx(
            record["dense_milliseconds"]["sdpa"].median / record["milliseconds"].median
        )


def test_every_dense_implementation_that_takes_the_tensors_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusing(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        raise RuntimeError("no kernel for these tensors")

    dense = dense_attention(CPU)["sdpa"]
    offered = {"cudnn": dense, "flash": dense, "other": refusing, "efficient": dense}
    monkeypatch.setattr("benchmarks.attention.dense_attention", lambda device: offered)
    record = measured(PLAN)[FORWARD]
    assert set(record["speed_ups"]) == {"cudnn", "flash"}
    assert record["dense_backend"] in ("cudnn", "flash")
    monkeypatch.setattr(
        "benchmarks.attention.dense_attention", lambda device: {"cudnn": refusing, "efficient": dense}
    )
    assert list(usable_dense(CPU, lambda dense: dense(random_inputs(SMALL, CPU, torch.float32)))) == [
        "efficient"
    ]


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
def test_flex_is_measured_with_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiling, which takes long; the far field, which no mask can say, is left out."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    assert set(measured(TILES, rivals=["flex"])[FORWARD]["speed_ups"]) == {"sdpa", "flex"}
    assert set(measured(PLAN, rivals=["flex"])[FORWARD]["speed_ups"]) == {"sdpa", "flex"}

    def note(case: Case) -> str:
        record = next(iter(measured(case, rivals=["flex"]).values()))
        assert "flex" not in record["speed_ups"]
        return str(record["rival_notes"]["flex"])

    for case in (FAR, LOGLINEAR):
        assert note(case) == "only a plan without a far field says what others are to read"
    backward = replace(PLAN, on={**PLAN.on, "backward": True})
    assert note(backward) == "NotImplementedError: its backward is not timed"
    monkeypatch.setattr(flex, "compiled", lambda inputs, plan: lambda: inputs[0] * 0)
    assert note(TILES).startswith("relative error")
    monkeypatch.setattr(flex, "compiled", None)
    assert note(TILES) == "TypeError: 'NoneType' object is not callable"


@pytest.mark.parametrize("name", ["fa4", "bsa"])
def test_packages_that_are_not_there_say_how_to_bring_them(name: str) -> None:
    note = measured(PLAN, rivals=[name])[FORWARD]["rival_notes"][name]
    assert note.startswith(f"NotImplementedError: the package of '{name}' is not installed (No module named ")
    assert note.endswith("; benchmarks/rivals/README.md says how to bring its wheels")


def mask_of(lists: Tensor, blocks: tuple[int, int], tokens: int) -> Tensor:
    """`[1, heads, tokens, tokens]`, of lists of blocks of keys."""
    shape = *lists.shape[:3], -(-tokens // blocks[1])
    cells = torch.zeros(shape, dtype=torch.bool).scatter_(3, lists.long(), True)
    whole = cells.repeat_interleave(blocks[0], 2).repeat_interleave(blocks[1], 3)
    return whole[:, :, :tokens, :tokens]


def test_lists_reach_flash_attention_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that computes from what it is given, by tokens before heads and, backward, by blocks of keys."""

    def forward(query: Tensor, key: Tensor, value: Tensor, block_sparse_tensors: Any = None, **_: Any) -> Any:
        tensors = [x.transpose(1, 2) for x in (query, key, value)]
        mask = None
        if block_sparse_tensors is not None:
            given = block_sparse_tensors
            assert (given.full_block_cnt == given.full_block_idx.shape[3]).all()
            mask = mask_of(given.full_block_idx, given.block_size, query.shape[1])
        return scaled_dot_product_attention(*tensors, attn_mask=mask).transpose(1, 2), None

    def backward(
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad: Tensor, lse: None, **lists: Any
    ) -> Any:
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (query, key, value)]
        mask = None
        if lists:
            given = lists["block_sparse_tensors"]
            mask = torch.zeros(1, query.shape[2], query.shape[1], query.shape[1], dtype=torch.bool)
            for head, counts in enumerate(given.full_block_cnt[0].tolist()):
                for column, count in enumerate(counts):
                    keys = slice(column * given.block_size[1], (column + 1) * given.block_size[1])
                    for row in given.full_block_idx[0, head, column, :count].tolist():
                        mask[0, head, row * given.block_size[0] : (row + 1) * given.block_size[0], keys] = (
                            True
                        )
        found = scaled_dot_product_attention(*leaves, attn_mask=mask)
        return [x.transpose(1, 2) for x in torch.autograd.grad(found, leaves, grad.transpose(1, 2))]

    interface = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    sparsity = SimpleNamespace(BlockSparseTensorsTorch=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.fa4", raising=False)
    for case in (PLAN, replace(PLAN, on={**PLAN.on, "backward": True})):
        (record,) = measured(case, rivals=["fa4"]).values()
        assert record["rival_notes"] == {}
        assert set(record["speed_ups"]) == {"sdpa", "fa4 dense", "fa4"}
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.fa4")


def test_lists_reach_cudnn_as_it_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(
        query: Tensor, key: Tensor, value: Tensor, lists: Tensor, count: int, sparse_block_size: int
    ) -> Any:
        assert lists.shape[3] == count
        mask = mask_of(lists, (sparse_block_size, sparse_block_size), query.shape[2])
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return {"o_tensor": out, "lse_tensor": out}

    def backward(grad: Tensor, *given: Any, sparse_block_size: int) -> Any:
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        out = forward(*leaves, *given[5:], sparse_block_size=sparse_block_size)["o_tensor"]
        return dict(zip("qkv", torch.autograd.grad(out, leaves, grad), strict=True))

    package = SimpleNamespace(
        block_sparse_attention_forward=forward,
        block_sparse_attention_backward=backward,
        block_sparse_attention_fp8_forward=lambda *given, **blocks: {
            "o_tensor": 1.05 * forward(*given, **blocks)["o_tensor"]
        },
    )
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", package)
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.bsa", raising=False)
    square = Case("square", LINE | {"plan": "random", "grain": 64, "q_block": 64, "backward": False,
                                    "preset": LINE["preset"] | {"grid": [640], "kept": 0.4}})  # fmt: skip
    record = measured(square, rivals=["bsa"])[FORWARD]
    assert set(record["speed_ups"]) == {"sdpa", "bsa", "bsa fp8"}
    assert record["rival_notes"]["bsa fp8"].startswith("relative error 5.00e-02 exceeds")
    record = measured(replace(square, on={**square.on, "backward": True}), rivals=["bsa"])[BACKWARD]
    assert (set(record["speed_ups"]), record["rival_notes"]) == ({"sdpa", "bsa"}, {})
    note = measured(PLAN, rivals=["bsa"])[FORWARD]["rival_notes"]["bsa"]
    assert note == "NotImplementedError: it reads an even number of square blocks of a whole number of them"
    monkeypatch.delitem(sys.modules, "benchmarks.rivals.bsa")


def test_rivals_have_lists_that_all_can_read() -> None:
    cases = {name: case for name, case in CASES.items() if name.startswith("lists-")}
    assert len(cases) == 18
    for case in cases.values():
        preset = preset_of(case)
        count = layouts.kept_ids(preset, case.on["grain"])
        assert count * case.on["grain"] / preset.tokens == pytest.approx(preset.kept, rel=0.1)
        assert preset.tokens % 64 == 0
    shapes = [case for name, case in CASES.items() if name.startswith("shape-")]
    assert len(shapes) == 18
    assert {preset_of(case).head_dim for case in shapes} == {64, 72, 128}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_json_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document, picture = tmp_path / "results.json", tmp_path / "results.png"
    words = ["bench", "attention", "--quick", "--json", str(document), "--plot", str(picture)]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "over the sum of its parts" in text
    assert "reordering: hidden states in and back" in text
    records = json.loads(document.read_text())["results"]
    assert {record["case"] for record in records} == {
        name for name, case in CASES.items() if "quick" in case.where
    }
    for record in records:
        assert record["status"] == "ok"
        assert record["check"]["passed"]
        assert record["milliseconds"]["median"] > 0
        assert record["speed_up"] == record["speed_ups"]["sdpa"] > 0
        assert record["fraction_of_bound"] == pytest.approx(record["speed_up"] * record["density"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_implementation_that_cannot_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(
            ["bench", "attention", "--quick", "--impl", "triton", "--cases", "cpu-small-*,hilbert-tiny-*"]
        )
        == 1
    )
    assert "not run: `impl` must be able to run this call" in capsys.readouterr().out


def test_wrong_tensors_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "attention", "--case", '{"plan": "tiles", "preset": "flux"}']) == 2
    assert "case 'case': `preset` must be one of flux-1024, " in capsys.readouterr().err
    assert cli.main(["bench", "attention", "--case", '{"preset": "cpu-small"}']) == 1
    assert (
        "`plan` must be one of random, tiles, ragged where there is no method; got ''"
        in capsys.readouterr().out
    )
