"""`python -m benchmarks model`: the model it builds, its judge, its figures and its errors."""

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
from benchmarks import fine_parts, flux_model, model, model_report, random_model, wan_model
from benchmarks.merging_parts import Parts
from benchmarks.model import (
    CEILING,
    MERGING,
    OURS,
    REFRESH,
    REORDERING,
    SELECTING,
    ModelBench,
    ModelResult,
    WithoutAttention,
)
from benchmarks.pareto_report import read_points
from tests import command_line as cli
from tests.tiles import paper
from torch.overrides import TorchFunctionMode

from nearfield import Hilbert
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.model_cases import ModelCase, Size
from nearfield.cli.timing import Effort, Timing, measure
from nearfield.diffusers import processor
from nearfield.layout.ordering import Ordering
from nearfield.ops import _triton as kernels
from nearfield.ops.merge.api import Merging

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
LITTLE = Effort(rounds=2, seconds=0.0, most=1)
TINY = ModelCase("flux1", (1, 2), tiny=True, fields={"tiles": 4})
SMALL = Size(128, 192)
TINY_VIDEO = ModelCase("wan21-1.3b", None, tiny=True, fields={}, method="fine", skipped=(0.7, 0.9))
CLIP = Size(64, 96, frames=9)


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "unsupported", lambda *_: "switched off by the test")


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return ModelBench(TINY, CPU, LITTLE)


# -- what is built -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "buffers"),
    [("flux1", 11.9e9, []), ("wan21-1.3b", 1.42e9, ["rope.freqs_cos", "rope.freqs_sin"])],
)
def test_the_whole_model_has_its_real_size(name: str, parameters: float, buffers: list[str]) -> None:
    """Laid out without memory."""
    case = ModelCase(name, None, tiny=False, fields={})
    with torch.device("meta"):
        whole = random_model.require_diffusers(case.architecture.class_name)(**case.config)
    assert random_model.num_parameters(whole) == pytest.approx(parameters, rel=0.01)
    # What random weights would leave unmade; that of Wan is made by `wan_model`.
    assert [name for name, _ in whole.named_buffers()] == buffers
    assert whole.config.attention_head_dim == 128


def test_videos_have_the_tokens_of_the_real_model() -> None:
    case = ModelCase("wan21-1.3b", None, tiny=False, fields={})
    assert [(str(size), size.grid, size.tokens) for size in case.sizes] == [
        ("480p, 81 frames", (21, 30, 52), 32760),
        ("720p, 81 frames", (21, 45, 80), 75600),
    ]
    assert case.text == 0


def test_a_model_of_videos_is_as_diffusers_makes_it() -> None:
    """Its rotary table is not left unmade, and what diffusers leaves in float32 is."""
    built = random_model.build(TINY_VIDEO, CPU, torch.bfloat16)
    stock = random_model.require_diffusers("WanTransformer3DModel")(**TINY_VIDEO.config)
    assert torch.equal(built.rope.freqs_cos, stock.rope.freqs_cos)
    assert torch.equal(built.rope.freqs_sin, stock.rope.freqs_sin)
    block = built.blocks[0]
    assert block.scale_shift_table.dtype == block.norm2.weight.dtype == torch.float32
    assert block.attn1.norm_q.weight.dtype == block.ffn.net[2].weight.dtype == torch.bfloat16
    inputs = wan_model.inputs(TINY_VIDEO, built, CLIP, CPU, torch.bfloat16)
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "hidden_states": [1, 16, 3, 8, 12],
        "timestep": [1],
        "encoder_hidden_states": [1, 32, 32],
    }
    with torch.no_grad():
        output = built(**inputs).sample
    assert output.shape == (1, 16, 3, 8, 12)
    assert output.isfinite().all()
    assert output.std() > 1e-3


def test_weights_are_random_and_the_output_is_finite(bench: ModelBench) -> None:
    weight = bench.model.single_transformer_blocks[0].proj_mlp.weight
    assert weight.std() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)
    assert bench.model.transformer_blocks[0].attn.norm_q.weight.eq(2).all()
    assert bench.model.proj_out.bias.eq(0).all()
    assert not any(parameter.requires_grad for parameter in bench.model.parameters())
    assert torch.get_default_dtype() == torch.float32
    with torch.no_grad():
        (output,) = bench.model(**bench._arguments(SMALL), return_dict=False)
    assert output.shape == (1, SMALL.tokens, 16)
    assert output.isfinite().all()
    assert output.std() > 1e-3


def test_inputs_have_the_shapes_of_the_pipeline() -> None:
    case = ModelCase("flux1", (1, 1), tiny=False, fields={})
    with torch.device("meta"):
        shape_only = random_model.require_diffusers("FluxTransformer2DModel")(**case.config)
    found = flux_model.inputs(case, shape_only, Size(1024, 768), CPU, torch.bfloat16)
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
    monkeypatch.setattr(random_model, "_free_memory", lambda: 1000)
    with pytest.raises(random_model.TooLarge, match="of weights, where"):
        random_model.build(TINY, CPU, torch.float32)


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (Size(1024, 1024), {"share": "keys"}),
        (Size(2048, 2048), {"share": "keys"}),
        (Size(4096, 4096), {"share": "keys", "tiles": 64, "shared_tokens": 256}),
    ],
)
def test_methods_suit_the_size(size: Size, fields: dict[str, object]) -> None:
    case = ModelCase("flux1", None, tiny=False, fields={})
    paper = {"near": "tile", "shared": "centre", "far": None, "summary": "mean"}
    assert case.method_fields(size) == fields | paper | {"dense_layers": 0, "dense_steps": 0}
    assert Hilbert(**case.method_fields(size)).share == "keys"
    default = replace(case, fields={"shared": "none", "far": 16})
    assert Hilbert(**default.method_fields(size)).far == 16
    asked = replace(case, fields={"share": "two-way", "tiles": 4})
    assert asked.method_fields(size)["tiles"] == 4
    around = replace(case, fields={"near": "around"})
    assert Hilbert(**around.method_fields(size)) == Hilbert(dense_steps=0)


def test_targets_are_for_the_whole_model_as_it_comes() -> None:
    case = ModelCase("flux1", None, tiny=False, fields={})
    assert [case.target(size) for size in case.sizes] == [1.10, 1.45, 3.05]
    assert case.target(Size(1024, 768)) is None
    for other in (replace(case, layers=(2, 4)), replace(case, tiny=True), replace(case, fields={"tiles": 4})):
        assert other.target(Size(1024, 1024)) is None
    video = ModelCase("wan21-1.3b", None, tiny=False, fields={}, method="fine")
    assert [video.target(size, 0.7) for size in video.sizes] == [1.6, 2.0]
    assert video.target(video.sizes[0], 0.9) is None
    assert video.target(video.size(480, 480), 0.7) is None


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


def test_the_ceiling_has_no_attention_in_it(bench: ModelBench) -> None:
    arguments = bench._arguments(SMALL)
    stock = bench._output(arguments, nullcontext)
    # Attention matters to the output, or the check would overlook its mistakes.
    assert relative_error(bench._output(arguments, WithoutAttention), stock) > 0.2
    calls: list[object] = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    attention = torch.nn.functional.scaled_dot_product_attention
    with Counting():
        bench._output(arguments, nullcontext)
    assert calls.count(attention) == 3
    calls.clear()
    with Counting():
        bench._output(arguments, WithoutAttention)
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


def test_right_outputs_pass_the_check(bench: ModelBench) -> None:
    checked = bench.check(SMALL)
    assert checked.passed, checked
    assert checked.error > 0


@pytest.mark.parametrize("tiles", [1, 4])
def test_wrong_outputs_fail_the_check(bench: ModelBench, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that reads other tokens than it says: in the one tile that must equal the stock model, or in its own."""
    right = model.apply

    def wrong(target, method, *, impl):
        if method.tiles == tiles and impl == "auto":
            method = paper(tiles=2, shared="none", dense_layers=0, dense_steps=0)
        return right(target, method, impl=impl)

    monkeypatch.setattr(model, "apply", wrong)
    checked = bench.check(SMALL)
    assert not checked.passed
    assert ("stock model" if tiles == 1 else "plain torch") in checked.where


def test_every_variant_is_measured_and_the_model_left_as_it_was(bench: ModelBench) -> None:
    before = [block.attn.processor for block in bench.model.single_transformer_blocks]
    (result,) = bench.run(SMALL)
    assert result.status == "ok", result.note
    assert set(result.timings) == {"sdpa", OURS, CEILING, REORDERING}
    assert result.tokens == 96 + 32
    assert 0 < result.density < 1
    assert "sparse" in result.summary
    assert [block.attn.processor for block in bench.model.single_transformer_blocks] == before


@pytest.fixture(
    scope="module", params=[("merge", "block"), ("merge", "module"), ("merge+hilbert", "block")], ids=str
)
def merging_bench(request: pytest.FixtureRequest) -> ModelBench:
    method, placement = request.param
    fields = {"region_size": 16, "placement": placement}
    return ModelBench(replace(TINY, layers=(2, 2), method=method, merge_fields=fields), CPU, LITTLE)


def test_what_is_merged_apart_is_what_the_blocks_merge(
    merging_bench: ModelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as in a step, in both directions, with as many tokens."""
    seen: list[tuple[str, int]] = []
    for name in ("enter", "leave", "update"):
        right = getattr(Merging, name)

        def counted(self: Merging, x: torch.Tensor, *others: Any, right=right, name=name) -> torch.Tensor:
            seen.append((name, x.shape[1]))
            return right(self, x, *others)

        monkeypatch.setattr(Merging, name, counted)
    method = merging_bench._method(SMALL)
    with model.apply(merging_bench.model, method):
        merging_bench._output(merging_bench._arguments(SMALL), nullcontext)
    in_step = sorted(seen)
    seen.clear()
    parts = Parts(method, merging_bench._geometry(SMALL), merging_bench.model, CPU, torch.float32)
    parts.merge()
    assert sorted(seen) == in_step
    assert len(parts.select()) == 2


def test_merging_is_measured_with_its_parts(merging_bench: ModelBench) -> None:
    assert merging_bench.check(SMALL).passed
    before = copy.deepcopy(merging_bench.model)
    (result,) = merging_bench.run(SMALL)
    assert result.status == "ok", result.note
    assert set(result.timings) == {"sdpa", OURS, CEILING, REORDERING, SELECTING, MERGING}
    assert "blocks: 2 on merged tokens, which share 2 maps; 2 on all" in result.summary
    assert result.density is not None
    if merging_bench.case.method == "merge":
        assert result.density == pytest.approx((48 + 32) ** 2 / (96 + 32) ** 2)
    else:  # a few more shared tokens, so that the curve begins on a whole block
        assert 0 < result.density < 0.5
    inputs = merging_bench._arguments(SMALL)
    with torch.no_grad():
        assert torch.equal(before(**inputs).sample, merging_bench.model(**inputs).sample)


def test_wrong_merging_fails_the_check(merging_bench: ModelBench, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = processor._rotated
    is_ours = [False]

    def wrongly(x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor], impl: Any) -> torch.Tensor:
        is_ours[0] = not is_ours[0]
        return turned(x, (rows[0], rows[1] if is_ours[0] else -rows[1]), impl)

    monkeypatch.setattr(processor, "_rotated", wrongly)
    output = merging_bench._output
    runs = iter(range(10))

    def run_last_one_wrongly(*args: Any) -> torch.Tensor:
        if next(runs) < 4:  # stock, eager, everything, plain
            with monkeypatch.context() as patch:
                patch.setattr(processor, "_rotated", turned)
                return output(*args)
        return output(*args)

    monkeypatch.setattr(merging_bench, "_output", run_last_one_wrongly)
    assert not merging_bench.check(SMALL).passed


def test_time_for_maps_is_spread_over_the_steps_they_serve() -> None:
    case = ModelCase("flux1", None, tiny=False, fields={}, method="merge")
    times = {"cudnn": 100.0, OURS: 60.0, CEILING: 90.0, REORDERING: 0.1, SELECTING: 5.0, MERGING: 1.0}
    timings = {name: Timing(time, time, time, 3) for name, time in times.items()}
    result = ModelResult(case, Size(1024, 1024), "ok", tokens=4608, density=0.3, timings=timings)
    assert result.speed_up == pytest.approx(100 / 61)
    assert result.merging_share == pytest.approx(2 / 61)
    assert result.reached
    assert "3.3% of a step (target: at most 3%, missed)" in model_report.results_table([result])


# -- single keys that are skipped --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fine_bench() -> ModelBench:
    return ModelBench(TINY_VIDEO, CPU, LITTLE)


def test_the_share_is_skipped_that_was_asked_for(
    fine_bench: ModelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[fine_parts.FittedReader] = []
    monkeypatch.setattr(fine_parts.Fitted, "layer", _telling(fine_parts.Fitted.layer, made))
    before = [block.attn1.processor for block in fine_bench.model.blocks]
    results = fine_bench.run(CLIP)
    assert [result.variant for result in results] == [
        "cached, 70% skipped",
        "online, 70% skipped",
        "cached, 90% skipped",
        "online, 90% skipped",
    ]
    for result in results:
        assert result.status == "ok", result.note
        assert result.density == pytest.approx(1 - result.skipped, abs=0.02)
        parts = {REFRESH} if result.variant.startswith("cached") else set()
        assert set(result.timings) == {"sdpa", OURS, CEILING, REORDERING} | parts
        assert (result.over_generation is not None) == bool(parts)
        assert "nearfield: Fitted(query_block=16, " in result.summary
        assert "object at" not in result.summary
    assert [block.attn1.processor for block in fine_bench.model.blocks] == before
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


def test_a_share_that_was_not_met_gets_no_figure(
    fine_bench: ModelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fine_parts.FittedReader, "_threshold", lambda *_: 0.0)
    result = fine_bench.run(CLIP)[0]
    assert (result.status, result.timings) == ("check failed", {})
    assert result.note == "0.0% of the keys were skipped, not 70%"


def test_right_lists_pass_the_check_and_wrong_ones_do_not(
    fine_bench: ModelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = fine_bench.check(CLIP)
    assert checked.passed, checked
    right = fine_parts.attend

    def wrong(query: Any, key: Any, value: Any, plan: Any, **options: Any) -> Any:
        return right(query, key.roll(int(options["impl"] == "auto"), 2), value, plan, **options)

    monkeypatch.setattr(fine_parts, "attend", wrong)
    checked = fine_bench.check(CLIP)
    assert not checked.passed
    assert "plain torch" in checked.where


def test_lists_that_are_made_count_in_a_generation() -> None:
    case = ModelCase("wan21-1.3b", None, tiny=False, fields={}, method="fine")
    times = {"cudnn": 550.0, OURS: 320.0, CEILING: 200.0, REORDERING: 0.5, REFRESH: 800.0}
    timings = {name: Timing(time, time, time, 3) for name, time in times.items()}
    result = ModelResult(
        case, case.sizes[0], "ok", "", "cached, 70% skipped", 0.7, 32760, density=0.3, timings=timings
    )
    assert result.over_generation == pytest.approx(50 * 550 / (6 * 800 + 44 * 320))
    assert result.reached
    shown = model_report.results_table([result])
    assert "1.60x reached" in shown
    assert "fixed: the share of keys that is skipped" in shown
    assert "takes 800.0 ms, as 1.45 dense ones" in shown
    slow = replace(result, timings=timings | {OURS: timings["cudnn"], CEILING: Timing(400, 400, 400, 3)})
    assert "1.60x above the ceiling" in model_report.results_table([slow])


def test_on_a_gpu_both_dense_attentions_are_measured(bench: ModelBench) -> None:
    on_gpu = copy.copy(bench)
    on_gpu.device = torch.device("cuda")
    assert list(on_gpu._dense()) == ["cudnn", "flash"]
    on_gpu.case = TINY_VIDEO
    assert list(on_gpu._dense()) == ["cudnn"]


@pytest.mark.parametrize("name", ["flux1", "wan21-1.3b"])
def test_what_is_moved_apart_is_what_moves_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ModelCase(name, None, tiny=True, fields={"tiles": 4})
    size = case.size(128, 192)
    bench, method = ModelBench(case, CPU, LITTLE), Hilbert(**case.method_fields(size))
    seen: list[tuple[Any, ...]] = []
    right = Ordering._moved

    def noted(self: Ordering, way: str, x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        seen.append((way, tuple(x.shape), x.dtype))
        return right(self, way, x, dim, index)

    monkeypatch.setattr(Ordering, "_moved", noted)
    arguments = bench._arguments(size)
    with model.apply(bench.model, method):
        bench._output(arguments, nullcontext)
    in_step = sorted(seen, key=str)
    seen.clear()
    bench.made.moving(bench.model, arguments, size).by(method.ordering(bench._geometry(size)))
    assert sorted(seen, key=str) == in_step


def test_what_breaks_is_a_result(bench: ModelBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "measure", lost)
    (result,) = bench.run(SMALL)
    assert (result.status, result.note) == ("broke", "RuntimeError: out of memory")
    assert "128x192: broke: RuntimeError: out of memory" in model_report.results_table([result])


def test_the_check_is_made_on_an_image_that_eager_attention_can_hold() -> None:
    assert model.check_size([Size(4096, 4096), Size(2048, 2048)]) == Size(1024, 1024)
    assert model.check_size([Size(4096, 4096), Size(512, 512)]) == Size(512, 512)
    clip = model.check_size([Size(720, 1280, frames=81)])
    assert clip.grid == (2, 30, 52)
    assert clip.tokens <= 4096


# -- figures -----------------------------------------------------------------------------------------------------------


def measured_result() -> ModelResult:
    timing = Timing(100.0, 99.0, 101.0, 5)
    medians = {"cudnn": 170.0, "flash": 190.0, OURS: 150.0, CEILING: 145.0, REORDERING: 0.3}
    return ModelResult(
        ModelCase("flux1", None, tiny=False, fields={}),
        Size(1024, 1024),
        "ok",
        tokens=4608,
        density=0.3,
        timings={name: replace(timing, median=median) for name, median in medians.items()},
    )


def test_figures_follow_from_the_times() -> None:
    result = measured_result()
    assert result.best_dense == "cudnn"
    assert result.speed_up == pytest.approx(170 / 150)
    assert result.over("flash") == pytest.approx(190 / 150)
    assert result.ceiling == pytest.approx(170 / 145)
    assert result.reordering_share == pytest.approx(0.002)
    assert result.reached is True
    line = model_report.results_table([result]).splitlines()[2]
    for cell in ("1024", "4,608", "30.0%", "170.0", "190.0", "145.0", "150.0", "1.13x", "1.27x", "1.17x"):
        assert cell in line
    assert "1.10x reached" in line


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_measures_a_tiny_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = tmp_path / "model.json"
    arguments = ["--tiny", "--layers", "1+1", "--sizes", "128", "--tiles", "4", "--rounds", "2"]
    assert cli.main(["bench", "model", *arguments, "--json", str(document)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("flux1: 1 + 1 blocks, 0.")
    assert "checked: relative error" in captured.out
    assert "3/3 128: 96 tokens" in captured.err
    written = json.loads(document.read_text())
    assert written["benchmark"] == "model"
    assert written["check"]["passed"]
    (record,) = written["results"]
    assert record["status"] == "ok"
    assert record["method"] == {
        "near": "tile",
        "shared": "centre",
        "share": "keys",
        "far": None,
        "summary": "mean",
        "dense_layers": 0,
        "dense_steps": 0,
        "tiles": 4,
    }
    assert record["speed_up"] == record["speed_ups"]["sdpa"] > 0
    assert record["milliseconds"][CEILING]["median"] > 0


def test_the_command_measures_a_video_and_what_was_done_before_it_was_stopped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, run = tmp_path / "model.json", ModelBench.run

    def stopped(self: ModelBench, size: Size) -> list[ModelResult]:
        if size.height == 96:
            raise KeyboardInterrupt
        return run(self, size)

    monkeypatch.setattr(ModelBench, "run", stopped)
    call = ["--model", "wan21-1.3b", "--tiny", "--layers", "1", "--sizes", "64x96,96x96", "--rounds", "2"]
    assert cli.main(["bench", "model", *call, "--json", str(document)]) == 130
    assert "interrupted; what was measured until then:\nwan21-1.3b: 1 blocks" in capsys.readouterr().out
    cached, online = json.loads(document.read_text())["results"]
    assert (cached["variant"], online["variant"]) == ("cached, 70% skipped", "online, 70% skipped")
    assert cached["frames"] == 9
    assert cached["milliseconds"][REFRESH]["median"] > 0
    assert cached["speed_up_over_generation"] > 0
    points = read_points(document)
    assert [(point.name, point.family) for point in points] == [
        ("64x96, 9 frames; cached, 70% skipped", "FineGrained"),
        ("64x96, 9 frames; online, 70% skipped", "FineGrained"),
    ]


def test_a_wrong_answer_gets_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBench, "check", lambda *_: Checked(1.0, 0.1, "the method"))
    assert cli.main(["bench", "model", "--tiny", "--layers", "1+1"]) == 1
    assert capsys.readouterr().out == "no figures: relative error 1.00e+00 exceeds 1.00e-01 (the method)\n"


def test_missing_diffusers_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert cli.main(["bench", "model", "--tiny"]) == 2
    error = capsys.readouterr().err
    assert "`diffusers` must be installed to build the model; got " in error
    assert "Install it with `pip install 'nearfield[diffusers]'`." in error


def test_a_model_that_does_not_fit_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_model, "_free_memory", lambda: 2**30)
    assert cli.main(["bench", "model"]) == 2
    assert (
        "`--model` must fit into memory; got 44.3 GiB of weights, where 1.0 GiB are free. "
        "Use --layers 2+3 for fewer layers, or --tiny.\n"
    ) in capsys.readouterr().err


BAD_CALLS = {
    "--model flux3": "`--model` must be one of flux1, wan21-1.3b; got 'flux3'.",
    "--model wan21-1.3b --method merge": "`--method` must go with `--model wan21-1.3b`; got 'merge'. "
    "Methods for wan21-1.3b: fine, hilbert.",
    "--model wan21-1.3b --layers 2+4": "`--layers` must be one number of blocks; got '2+4'. Example: --layers 4",
    "--text-reads summary": "`text_reads` must be \"all\" where `far` is None; got 'summary'. "
    "There are no summaries to read.",
    "--near around --interleave": '`interleave` must be False where `near` is "around"; got True. '
    'Nothing slides there; tiles do: near="tile".',
    "--skipped 0.7": "`--skipped` must be left out with `--method hilbert`; got [0.7].",
    "--grain 4": "`--grain` must be left out with `--method hilbert`; got 4.",
    "--placement module": "`--placement` must be left out with `--method hilbert`; got module.",
    "--method merge --tiles 4": "`--tiles` must be left out with `--method merge`; got 4.",
    "--sizes 1000": "`--sizes` must be pixels or height x width, in multiples of 16; got '1000'. "
    "Example: --sizes 1024,768x1344",
    "--sizes 16x16x16": "`--sizes` must be pixels or height x width, in multiples of 16; got '16x16x16'. "
    "Example: --sizes 1024,768x1344",
    "--layers 3": "`--layers` must be two numbers of blocks joined by +; got '3'. Example: --layers 2+4",
    "--share both": "`--share` must be one of two-way, keys; got 'both'.",
    "--rounds 1": "`--rounds` must be an integer of at least 2; got '1'.",
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "model", *call.split()]) == 2
    assert capsys.readouterr().err == f"nearfield: error: {BAD_CALLS[call]}\n"
