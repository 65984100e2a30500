"""`python -m benchmarks step`: the models it builds, its judge, its figures and its errors."""

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import step, step_models
from benchmarks.cases import Case
from benchmarks.pareto import read_points
from benchmarks.report import Column, Record, plain, table
from benchmarks.runner import Session, WrongAnswer
from benchmarks.step import CEILING, OURS, REORDERING, StepBenchmark, WithoutAttention, figures_of, output
from benchmarks.step_cases import CASES, DEFAULTS
from benchmarks.step_models import ARCHITECTURES, Built, Size
from benchmarks.step_parts import MERGING, REFRESH, SELECTING, Parts
from tests import command_line as cli
from tests.tiles import paper
from torch.overrides import TorchFunctionMode

from nearfield import Hilbert
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.timing import Effort, Timing, measure
from nearfield.diffusers import processor
from nearfield.layout import Ordering
from nearfield.ops import Merging
from nearfield.ops import _triton as kernels

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
SMALL = Size(128, 192)
CLIP = Size(64, 96, frames=9)
TILES = {"tiles": 4, "near": "tile", "share": "keys", "shared": "centre", "far": None, "summary": "mean",
         "dense_layers": 0, "dense_steps": 0}  # fmt: skip
TINY = Case("tiny", DEFAULTS | {"size": "128x192", "layers": (1, 2), "tiny": True}, "Hilbert", TILES)
ON_CLIP = DEFAULTS | {"model": "wan21-1.3b", "size": "64x96", "tiny": True}


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "missing", lambda _: "switched off by the test")


def made(rounds: int = 2) -> StepBenchmark:
    options = argparse.Namespace(impl="auto", rounds=rounds, quick=True)
    return StepBenchmark(Session(options, CPU))


class Bench:
    """A benchmark with the model of one case."""

    def __init__(self, case: Case) -> None:
        self.case, self.all = case, made()
        self.built = self.all.built(case)
        self.size = self.built.size(case.on["size"])

    def check(self) -> Checked:
        return self.all.checked(self.case, self.built, self.size)

    def run(self) -> list[Record]:
        with torch.no_grad():
            return list(self.all._measured(self.case, self.built, self.size))

    def output(self, context: Any = nullcontext) -> torch.Tensor:
        return output(self.built, self.built.arguments(self.size), context)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TINY)


# -- what is built -----------------------------------------------------------------------------------------------------


def on_meta(name: str, **changed: Any) -> Any:
    """A model of real width, laid out without memory."""
    known = ARCHITECTURES[name]
    with torch.device("meta"):
        return step_models.require_diffusers(known.class_name)(**known.fields | known.layers | changed)


@pytest.mark.parametrize(
    ("name", "parameters", "buffers"),
    [("flux1", 11.9e9, []), ("wan21-1.3b", 1.42e9, ["rope.freqs_cos", "rope.freqs_sin"])],
)
def test_the_whole_model_has_its_real_size(name: str, parameters: float, buffers: list[str]) -> None:
    whole = on_meta(name)
    assert sum(parameter.numel() for parameter in whole.parameters()) == pytest.approx(parameters, rel=0.01)
    # What random weights would leave unmade; that of Wan is made apart.
    assert [name for name, _ in whole.named_buffers()] == buffers
    assert whole.config.attention_head_dim == 128


def test_videos_have_the_tokens_of_the_real_model() -> None:
    sizes = [Size(*step_models.read_sides(name), 81) for name in ("480p", "720p")]
    assert [(str(size), size.grid, size.tokens) for size in sizes] == [
        ("480p, 81 frames", (21, 30, 52), 32760),
        ("720p, 81 frames", (21, 45, 80), 75600),
    ]
    assert not ARCHITECTURES["wan21-1.3b"].joins_text


def test_a_model_of_videos_is_as_diffusers_makes_it() -> None:
    """Its rotary table is not left unmade, and what diffusers leaves in float32 is."""
    built = Built("wan21-1.3b", None, True, CPU, torch.bfloat16)
    model = built.model
    stock = step_models.require_diffusers("WanTransformer3DModel")(**built.config_given)
    assert torch.equal(model.rope.freqs_cos, stock.rope.freqs_cos)
    assert torch.equal(model.rope.freqs_sin, stock.rope.freqs_sin)
    block = model.blocks[0]
    assert block.scale_shift_table.dtype == block.norm2.weight.dtype == torch.float32
    assert block.attn1.norm_q.weight.dtype == block.ffn.net[2].weight.dtype == torch.bfloat16
    inputs = built.arguments(CLIP)
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "hidden_states": [1, 16, 3, 8, 12],
        "timestep": [1],
        "encoder_hidden_states": [1, 32, 32],
    }
    found = output(built, inputs)
    assert found.shape == (1, 16, 3, 8, 12)
    assert found.isfinite().all()
    assert found.std() > 1e-3


def test_weights_are_random_and_the_output_is_finite(bench: Bench) -> None:
    model = bench.built.model
    weight = model.single_transformer_blocks[0].proj_mlp.weight
    assert weight.std() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)
    assert model.transformer_blocks[0].attn.norm_q.weight.eq(2).all()
    assert model.proj_out.bias.eq(0).all()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.get_default_dtype() == torch.float32
    found = bench.output()
    assert found.shape == (1, SMALL.tokens, 16)
    assert found.isfinite().all()
    assert found.std() > 1e-3


def test_inputs_have_the_shapes_of_the_pipeline(bench: Bench) -> None:
    whole = copy.copy(bench.built)
    whole.model, whole.prompt = on_meta("flux1", num_layers=1, num_single_layers=1), 512
    found = whole.arguments(Size(1024, 768))
    assert {name: list(x.shape) for name, x in found.items()} == {
        "hidden_states": [1, 3072, 64],
        "encoder_hidden_states": [1, 512, 4096],
        "pooled_projections": [1, 768],
        "timestep": [1],
        "guidance": [1],
        "img_ids": [3072, 3],
        "txt_ids": [512, 3],
    }
    assert found["img_ids"][49].tolist() == [0, 1, 1]


def test_weights_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_models, "_free_memory", lambda: 1000)
    with pytest.raises(step_models.TooLarge, match="of weights, where"):
        made().built(TINY)


def test_one_model_serves_case_after_case() -> None:
    bench = made()
    first = bench.built(TINY)
    assert bench.built(replace(TINY, on={**TINY.on, "size": "256"})) is first
    assert bench.built(replace(TINY, on={**TINY.on, "layers": (1, 1)})) is not first


def test_cases_are_what_was_measured() -> None:
    """The methods of the committed results, and their targets."""
    keys = {"near": "tile", "shared": "centre", "share": "keys", "far": None, "summary": "mean"}
    for size, more in (
        ("1024", {"tiles": 16}),
        ("2048", {"tiles": 16}),
        ("4096", {"tiles": 64, "shared_tokens": 256}),
    ):
        tiles = Hilbert(**keys, **more, dense_layers=0, dense_steps=0)
        assert CASES[f"flux1-{size}-tiles"].made() == tiles
        assert CASES[f"flux1-{size}-default"].made() == Hilbert(dense_layers=0, dense_steps=0)
    assert [CASES[f"flux1-{size}-tiles"].targets["step"] for size in (1024, 2048, 4096)] == [1.10, 1.45, 3.05]
    assert CASES["flux1-2048-merge-tiles"].targets["step"] == 2
    own = cli_case('{"name": "flux1-1024-tiles", "layers": [2, 4]}')
    assert (own.name, own.targets) == ("flux1-1024-tiles, changed", {})


def cli_case(text: str) -> Case:
    (case,) = StepBenchmark.cases(argparse.Namespace(case=[text], cases=None, quick=False), CPU)
    return case


# -- what is timed -----------------------------------------------------------------------------------------------------


def test_without_attention_values_pass_unread() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    with WithoutAttention():
        assert attention(query, key, value) is value
        assert attention(query=query, key=key, value=value) is value
        assert (query + 1).shape == query.shape
        # Cross-attention stays.
        across = attention(query, key[:, :, :3], value=value[:, :, :3])
    assert torch.equal(across, attention(query, key[:, :, :3], value[:, :, :3]))
    assert not torch.equal(attention(query, key, value), value)


def test_the_ceiling_has_no_attention_in_it(bench: Bench) -> None:
    stock = bench.output()
    # Attention matters to the output, or the check would overlook its mistakes.
    assert relative_error(bench.output(WithoutAttention), stock) > 0.2
    calls: list[object] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    attention = torch.nn.functional.scaled_dot_product_attention
    with Counting():
        bench.output()
    assert calls.count(attention) == 3
    calls.clear()
    with Counting():
        bench.output(WithoutAttention)
    assert calls.count(attention) == 0


def test_contexts_surround_each_turn_and_are_not_timed() -> None:
    seen: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    functions = {"ours": lambda: seen.append("ours"), "dense": lambda: seen.append("dense")}
    timings = measure(functions, CPU, Effort(rounds=2, seconds=0.0, most=1), {"ours": context})
    assert seen[-10:] == ["in", "ours", "ours", "out", "dense"] * 2
    assert timings["ours"].samples == 2


def test_right_outputs_pass_the_check(bench: Bench) -> None:
    checked = bench.check()
    assert checked.passed, checked
    assert checked.error > 0


@pytest.mark.parametrize("tiles", [1, 4])
def test_wrong_outputs_fail_the_check(bench: Bench, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that reads other tokens than it says: in the one tile that must equal the stock model, or in its own."""
    right = step.apply

    def wrong(target, method, *, impl):
        if method.tiles == tiles and impl == "auto":
            method = paper(tiles=2, shared="none", dense_layers=0, dense_steps=0)
        return right(target, method, impl=impl)

    monkeypatch.setattr(step, "apply", wrong)
    checked = bench.check()
    assert not checked.passed
    assert ("stock model" if tiles == 1 else "plain torch") in checked.where
    with pytest.raises(WrongAnswer):
        list(bench.all.measure(TINY))


def test_every_variant_is_measured_and_the_model_left_as_it_was(bench: Bench) -> None:
    blocks = bench.built.model.single_transformer_blocks
    before = [block.attn.processor for block in blocks]
    (result,) = bench.run()
    assert set(result["milliseconds"]) == {"sdpa", OURS, CEILING, REORDERING}
    assert 0 < result["density"] < 1
    assert "sparse" in result["summary"]
    assert [block.attn.processor for block in blocks] == before


def test_pairs_of_layers_that_differ_are_those_that_apply_counts() -> None:
    """Where queries and keys decide, nobody knows them."""
    (result,) = Bench(replace(TINY, fields=TILES | {"tiles": (4, 2)})).run()
    assert 0 < result["density"] < 1
    fields = {"k_block": 16, "q_block": 16, "top_p": 0.5}
    (chosen,) = Bench(replace(TINY, method="BlockTopK", fields=fields)).run()
    assert (chosen["density"], chosen["bound"]) == (None, None)
    assert chosen["speed_up"] > 0


@pytest.fixture(
    scope="module", params=[("merge", "block"), ("merge", "module"), ("merge+tiles", "block")], ids=str
)
def merging_bench(request: pytest.FixtureRequest) -> Bench:
    kind, placement = request.param
    merge = {"region_size": 16, "placement": placement, "skip_blocks": (1, 1)}
    parts = {
        "merge": {"method": "Merge", "fields": merge},
        "attention": {"method": "Hilbert", "fields": TILES},
    }
    on = {**TINY.on, "layers": (2, 2)}
    if kind == "merge":
        return Bench(Case("merge", on, "Merge", merge))
    return Bench(Case("both", on, "Composition", parts))


def test_what_is_merged_apart_is_what_the_blocks_merge(
    merging_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as in a step, in both directions, with as many tokens."""
    seen: list[tuple[str, int]] = []
    for name in ("enter", "leave", "update"):
        right = getattr(Merging, name)

        def counted(self: Merging, x: torch.Tensor, *others: Any, right=right, name=name) -> torch.Tensor:
            seen.append((name, x.shape[1]))
            return right(self, x, *others)

        monkeypatch.setattr(Merging, name, counted)
    method, built = merging_bench.case.made(), merging_bench.built
    with step.apply(built.model, method):
        merging_bench.output()
    in_step = sorted(seen)
    seen.clear()
    parts = Parts(method, built.geometry(SMALL), built.model, CPU, torch.float32)
    parts.merge()
    assert sorted(seen) == in_step
    assert len(parts.select()) == 2


def test_merging_is_measured_with_its_parts(merging_bench: Bench) -> None:
    assert merging_bench.check().passed
    before = copy.deepcopy(merging_bench.built.model)
    (result,) = merging_bench.run()
    assert set(result["milliseconds"]) == {"sdpa", OURS, CEILING, REORDERING, SELECTING, MERGING}
    assert "blocks: 2 on merged tokens, which share 2 maps; 2 on all" in result["summary"]
    if merging_bench.case.method == "Merge":
        assert result["density"] == pytest.approx((48 + 32) ** 2 / (96 + 32) ** 2)
    else:  # a few more shared tokens, so that the curve begins on a whole block
        assert 0 < result["density"] < 0.5
    inputs = merging_bench.built.arguments(SMALL)
    with torch.no_grad():
        assert torch.equal(before(**inputs).sample, merging_bench.output())


def test_wrong_merging_fails_the_check(merging_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = processor._rotated
    is_ours = [False]

    def wrongly(x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], impl: Any) -> torch.Tensor:
        is_ours[0] = not is_ours[0]
        return turned(x, (rows[0], rows[1] if is_ours[0] else -rows[1]), impl)

    monkeypatch.setattr(processor, "_rotated", wrongly)
    runs, right = iter(range(10)), step.output

    def run_last_one_wrongly(*args: Any) -> torch.Tensor:
        if next(runs) < 4:  # stock, eager, everything, plain
            with monkeypatch.context() as patch:
                patch.setattr(processor, "_rotated", turned)
                return right(*args)
        return right(*args)

    monkeypatch.setattr(step, "output", run_last_one_wrongly)
    assert not merging_bench.check().passed


def timings(**milliseconds: float) -> dict[str, Timing]:
    """By the words of `step`, of which those of several have an underscore."""
    names = {"ours": OURS, "ceiling": CEILING, "maps": SELECTING, "lists": REFRESH}
    return {names.get(name, name): Timing(time, time, time, 3) for name, time in milliseconds.items()}


def told(*records: Record) -> str:
    """What the benchmark prints of measured records."""
    common = {"case": "x", "status": "ok", "pixels": "1024", "tokens": 4608, "check": None}
    whole = [json.loads(json.dumps(common | plain(record))) for record in records]
    bench = made()
    return "\n".join([table([Column("case", "case"), *bench.columns(whole)], whole), *bench.notes(whole)])


def test_time_for_maps_is_spread_over_the_steps_they_serve() -> None:
    found = timings(cudnn=100.0, ours=60.0, ceiling=90.0, reordering=0.1, maps=5.0, merging=1.0)
    result = figures_of(found, ["cudnn"], CASES["flux1-1024-merge"], "step", 0.3)
    assert result["speed_up"] == pytest.approx(100 / 61)
    assert result["merging_share"] == pytest.approx(2 / 61)
    assert result["target_reached"]
    assert "3.3% of a step (target: at most 3%, missed)" in told(result)


def test_on_a_gpu_both_dense_attentions_are_measured(bench: Bench) -> None:
    on_gpu = made()
    on_gpu.device = torch.device("cuda")
    assert list(on_gpu._dense(bench.built)) == ["cudnn", "flash"]
    assert list(on_gpu._dense(Bench(Case("clip", ON_CLIP)).built)) == ["cudnn"]


@pytest.mark.parametrize("name", ["flux1", "wan21-1.3b"])
def test_what_is_moved_apart_is_what_moves_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on = DEFAULTS | {"model": name, "size": "128x192", "tiny": True}
    bench = Bench(Case("tiles", on, "Hilbert", TILES))
    method, built, size = bench.case.made(), bench.built, bench.size
    seen: list[tuple[Any, ...]] = []
    right = Ordering._moved

    def noted(self: Ordering, way: str, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        seen.append((way, tuple(x.shape), x.dtype))
        return right(self, way, x, dim, index)

    monkeypatch.setattr(Ordering, "_moved", noted)
    with step.apply(built.model, method):
        bench.output()
    in_step = sorted(seen, key=str)
    seen.clear()
    built.moving(built.arguments(size), size).by(method.ordering(built.geometry(size)))
    assert sorted(seen, key=str) == in_step


def test_the_check_is_made_on_an_image_that_eager_attention_can_hold() -> None:
    assert step.check_size(Size(2048, 2048)) == Size(1024, 1024)
    assert step.check_size(Size(512, 512)) == Size(512, 512)
    clip = step.check_size(Size(720, 1280, frames=81))
    assert clip.grid == (2, 30, 52)
    assert clip.tokens <= 4096


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_follow_from_the_times() -> None:
    found = timings(cudnn=170.0, flash=190.0, ours=150.0, ceiling=145.0, reordering=0.3)
    result = figures_of(found, ["cudnn", "flash"], CASES["flux1-1024-tiles"], "step", 0.3)
    assert result["dense_backend"] == "cudnn"
    assert result["speed_ups"] == pytest.approx({"cudnn": 170 / 150, "flash": 190 / 150})
    assert result["ceiling"] == pytest.approx(170 / 145)
    assert result["reordering_share"] == pytest.approx(0.002)
    assert result["target_reached"] is True
    line = told(result).splitlines()[2]
    for cell in ("1024", "4,608", "30.0%", "170.0", "190.0", "145.0", "150.0", "1.13x", "1.27x", "1.17x"):
        assert cell in line
    assert "1.10x reached" in line


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_measures_a_tiny_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document, picture = tmp_path / "step.json", tmp_path / "step.png"
    own = {
        "size": "128",
        "layers": [1, 1],
        "tiny": True,
        "method": "Hilbert",
        "fields": TILES,
        "name": "mine",
    }
    words = ["bench", "step", "--case", json.dumps(own), "--rounds", "2", "--json", str(document)]
    assert cli.main([*words, "--plot", str(picture)]) == 0
    (record,) = json.loads(document.read_text())["results"]
    assert (record["case"], record["status"], record["tokens"]) == ("mine", "ok", 96)
    assert record["check"]["passed"]
    assert record["blocks"] == [1, 1]
    assert record["settings"]["fields"]["share"] == "keys"
    assert record["speed_up"] == record["speed_ups"]["sdpa"] > 0
    assert record["milliseconds"][CEILING]["median"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    (point,) = read_points(document)
    assert (point.name, point.family) == ("128 px, mine", "Hilbert")
    assert point.milliseconds == record["milliseconds"][OURS]["median"]


def test_missing_diffusers_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert cli.main(["bench", "step", "--cases", "tiny-tiles"]) == 2
    error = capsys.readouterr().err
    assert "`diffusers` must be installed to build the model; got " in error
    assert "Install it with `pip install 'nearfield[diffusers]'`." in error


def test_a_model_that_does_not_fit_is_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_models, "_free_memory", lambda: 2**30)
    assert cli.main(["bench", "step", "--cases", "flux1-1024-default"]) == 1
    assert "not run: 44.3 GiB of weights, where 1.0 GiB are free" in capsys.readouterr().out


BAD_CASES = {
    '{"model": "flux3", "method": "Merge"}': "`model` must be one of flux1, wan21-1.3b; got 'flux3'.",
    '{"size": "1000", "method": "Merge"}': "`size` must be pixels, or height x width, in multiples of 16; got '1000'. "
    "Example: 768x1344",
    '{"size": "16x16x16", "method": "Merge"}': "`size` must be pixels, or height x width, in multiples of 16; got "
    "'16x16x16'. Example: 768x1344",
    '{"tiny": true}': "`method` must be given.",
    '{"name": "flux1-1024-tiles", "fields": {"text_reads": "summary"}}': '`text_reads` must be "all" where `far` is '
    "None; got 'summary'. There are no summaries to read.",
}


@pytest.mark.parametrize("case", BAD_CASES)
def test_bad_cases_say_what_is_wrong(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "step", "--case", case]) == 2
    assert capsys.readouterr().err.endswith(f": {BAD_CASES[case]}\n")


def test_wrong_numbers_of_blocks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    own = json.dumps({"tiny": True, "layers": [1, 2, 3], "method": "Hilbert"})
    assert cli.main(["bench", "step", "--case", own]) == 1
    assert "`layers` must be 2 numbers of blocks; got [1, 2, 3]." in capsys.readouterr().out
