"""`nearfield bench model`: the model it builds, its judge, its figures and its errors."""

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
from tests.tiles import paper
from torch.overrides import TorchFunctionMode

from nearfield import Hilbert, cli, kernels
from nearfield.adapters import processor
from nearfield.bench import flux_model, model, model_report
from nearfield.bench.check import Checked, relative_error
from nearfield.bench.model import (
    CEILING,
    MERGING,
    OURS,
    REORDERING,
    SELECTING,
    ModelBench,
    ModelResult,
    WithoutAttention,
)
from nearfield.bench.model_cases import SIZES, ModelCase, Size
from nearfield.bench.timing import Effort, Timing, measure

pytest.importorskip("diffusers")

CPU = torch.device("cpu")
LITTLE = Effort(rounds=2, seconds=0.0, most=1)
TINY = ModelCase("flux1", (1, 2), tiny=True, fields={"tiles": 4})
SMALL = Size(128, 192)


@pytest.fixture(autouse=True)
def _plain_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "unsupported", lambda *_: "switched off by the test")


@pytest.fixture(scope="module")
def bench() -> ModelBench:
    return ModelBench(TINY, CPU, LITTLE)


# -- what is built -----------------------------------------------------------------------------------------------------


def test_the_whole_model_has_its_real_size() -> None:
    """Laid out without memory: 11.9 billion parameters."""
    case = ModelCase("flux1", None, tiny=False, fields={})
    with torch.device("meta"):
        whole = flux_model.require_diffusers()(**case.config)
    assert flux_model.num_parameters(whole) == pytest.approx(11.9e9, rel=0.01)
    assert not list(whole.buffers())  # nothing that random weights would leave unmade


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
        shape_only = flux_model.require_diffusers()(**case.config)
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
    monkeypatch.setattr(flux_model, "_free_memory", lambda: 1000)
    with pytest.raises(flux_model.TooLarge, match="of weights, where"):
        flux_model.build(TINY, CPU, torch.float32)


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
    paper = {"shared": "centre", "far": None}
    assert case.method_fields(size) == fields | paper | {"dense_layers": 0, "dense_steps": 0}
    assert Hilbert(**case.method_fields(size)).share == "keys"
    default = replace(case, fields={"shared": "none", "far": 16})
    assert Hilbert(**default.method_fields(size)).far == 16
    asked = replace(case, fields={"share": "two-way", "tiles": 4})
    assert asked.method_fields(size)["tiles"] == 4


def test_targets_are_for_the_whole_model_as_it_comes() -> None:
    case = ModelCase("flux1", None, tiny=False, fields={})
    assert [case.target(Size(*size)) for size in SIZES] == [1.10, 1.45, 3.05]
    assert case.target(Size(1024, 768)) is None
    for other in (replace(case, layers=(2, 4)), replace(case, tiny=True), replace(case, fields={"tiles": 4})):
        assert other.target(Size(1024, 1024)) is None


# -- what is timed -----------------------------------------------------------------------------------------------------


def test_without_attention_values_pass_unread() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4)
    attention = torch.nn.functional.scaled_dot_product_attention
    with WithoutAttention():
        assert attention(query, key, value) is value
        assert attention(query=query, key=key, value=value) is value
        assert (query + 1).shape == query.shape
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
    result = bench.run(SMALL)
    assert result.status == "ok", result.note
    assert set(result.timings) == {"sdpa", OURS, CEILING, REORDERING}
    assert result.tokens == 96 + 32
    assert 0 < result.density < 1
    assert "sparse" in result.summary
    assert [block.attn.processor for block in bench.model.single_transformer_blocks] == before


@pytest.fixture(scope="module", params=["merge", "merge+hilbert"])
def merging_bench(request: pytest.FixtureRequest) -> ModelBench:
    return ModelBench(
        replace(TINY, layers=(2, 2), method=request.param, merge_fields={"region_size": 16}), CPU, LITTLE
    )


def test_merging_is_measured_with_its_parts(merging_bench: ModelBench) -> None:
    assert merging_bench.check(SMALL).passed
    before = copy.deepcopy(merging_bench.model)
    result = merging_bench.run(SMALL)
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

    def wrongly(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        is_ours[0] = not is_ours[0]
        return turned(x, cos, sin if is_ours[0] else -sin)

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


def test_on_a_gpu_both_dense_attentions_are_measured(bench: ModelBench) -> None:
    on_gpu = copy.copy(bench)
    on_gpu.device = torch.device("cuda")
    assert list(on_gpu._contexts(paper())) == ["cudnn", "flash", OURS, CEILING]


def test_what_breaks_is_a_result(bench: ModelBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "measure", lost)
    result = bench.run(SMALL)
    assert (result.status, result.note) == ("broke", "RuntimeError: out of memory")
    assert "128x192: broke: RuntimeError: out of memory" in model_report.results_table([result])


def test_the_check_is_made_on_an_image_that_eager_attention_can_hold() -> None:
    assert model.check_size([Size(4096, 4096), Size(2048, 2048)]) == Size(1024, 1024)
    assert model.check_size([Size(4096, 4096), Size(512, 512)]) == Size(512, 512)


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
        "shared": "centre",
        "share": "keys",
        "far": None,
        "dense_layers": 0,
        "dense_steps": 0,
        "tiles": 4,
    }
    assert record["speed_up"] == record["speed_ups"]["sdpa"] > 0
    assert record["milliseconds"][CEILING]["median"] > 0


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
    monkeypatch.setattr(flux_model, "_free_memory", lambda: 2**30)
    assert cli.main(["bench", "model"]) == 2
    assert (
        "`--model` must fit into memory; got 44.3 GiB of weights, where 1.0 GiB are free. "
        "Use --layers 2+4 for fewer layers, or --tiny.\n"
    ) in capsys.readouterr().err


BAD_CALLS = {
    "--model flux3": "`--model` must be one of flux1; got 'flux3'.",
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
