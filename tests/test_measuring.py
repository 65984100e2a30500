"""What commands measure with: plans, the judge, the clock, and facts of the machine."""

import json
import math
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import layouts
from benchmarks.attention import too_small_note
from benchmarks.dense import random_inputs

from nearfield import planning
from nearfield._files import write_json
from nearfield.cli import machine
from nearfield.cli.check import check_backward, check_forward, poisoned_memory
from nearfield.cli.presets import PRESETS, Preset
from nearfield.cli.timing import Effort, measure
from nearfield.ops import attend
from nearfield.plan.plan import BLOCKS, Plan

CPU = torch.device("cpu")
SMALL = Preset("small", 2, 2, 16, (10, 13), text=20, kept=0.4, q_block=32)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("flux-1024", (1, 24, 4608, 128)),
        ("flux-2048", (1, 24, 16896, 128)),
        ("flux-4096", (1, 24, 66048, 128)),
        ("wan-480p", (1, 12, 32760, 128)),
        ("pixel-128", (4, 6, 16384, 64)),
        ("pixel-256", (1, 6, 65536, 64)),
    ],
)
def test_presets_have_the_shapes_of_their_models(name: str, shape: tuple[int, ...]) -> None:
    assert PRESETS[name].shape == shape


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", [1, 16, 64])
def test_random_lists_are_a_valid_plan_with_the_kept_share(grain: int) -> None:
    plan = layouts.random_lists(PRESETS["cpu-flux-1024"], grain, 128, CPU)
    sizes = plan.q_block, plan.k_block, plan.num_queries, plan.num_keys
    Plan(plan.offsets, plan.blocks, *sizes, check=True)
    assert plan.uniform
    assert plan.block_counts().max() == 1
    assert plan.density == pytest.approx(0.25)
    assert plan.blocks.shape[1] == (24 if grain >= 16 else 1)
    assert plan == layouts.random_lists(PRESETS["cpu-flux-1024"], grain, 128, CPU)


def test_random_lists_built_in_chunks_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_CHUNK_CELLS", 100)
    plan = layouts.random_lists(SMALL, 16, 32, CPU)
    Plan(plan.offsets, plan.blocks, 32, 16, SMALL.tokens, SMALL.tokens, check=True)


def test_few_kept_keys_still_give_a_list() -> None:
    assert layouts.kept_ids(replace(SMALL, kept=1e-9), 64) == 1
    assert layouts.kept_ids(replace(SMALL, kept=1.0), 1) <= SMALL.tokens


@pytest.mark.parametrize("grain", BLOCKS)
def test_kept_share_is_that_of_the_preset_at_every_grain(grain: int) -> None:
    preset = PRESETS["flux-2048"]
    assert layouts.kept_ids(preset, grain) * grain / preset.tokens == pytest.approx(preset.kept, abs=0.01)


def test_tiles_with_centre_have_the_known_bound() -> None:
    """1024 pixels, 16 tiles, text and two-way centre: 2.87 times fewer pairs than dense."""
    plan = layouts.tiles(PRESETS["flux-1024"], 16, centre=True, q_block=16, k_block=16)
    assert 1 / plan.density == pytest.approx(2.87, abs=0.005)


@pytest.mark.parametrize(
    ("name", "shared", "run", "tiles"),
    [("flux-1024", 768, 256, 15), ("flux-2048", 1536, 1024, 15), ("flux-4096", 4608, 3840, 16)],
)
def test_tiles_on_a_gpu_are_whole_blocks(name: str, shared: int, run: int, tiles: int) -> None:
    """Every row reads exactly its tile, the text and the centre, or everything: blocks round nothing up."""
    plan = layouts.tiles(PRESETS[name], 16, centre=True, q_block=128, k_block=64)
    assert shared + run * tiles == plan.num_keys
    counts = plan.counts[0, 0] * plan.k_block
    assert counts[: shared // plan.q_block].unique().tolist() == [plan.num_keys]
    assert counts[shared // plan.q_block :].unique().tolist() == [shared + run]
    assert plan.num_pairs == shared * plan.num_keys + run * tiles * (shared + run)


def test_layers_slide_by_a_quarter_tile_over_a_cycle_of_four() -> None:
    assert [layouts.layer_shift(256, layer) for layer in range(6)] == [0, 64, 128, 192, 0, 64]


def test_rows_of_cuts_a_plan_without_losing_pairs() -> None:
    plan = layouts.tiles(SMALL, 4, q_block=16, k_block=16)
    parts = [layouts.rows_of(plan, 0, 2), layouts.rows_of(plan, 2, plan.num_rows)]
    assert torch.equal(torch.cat([part.to_mask() for part in parts], dim=2), plan.to_mask())
    assert sum(part.num_queries for part in parts) == SMALL.tokens


# -- the judge ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def call() -> tuple[tuple[torch.Tensor, ...], Plan, torch.Tensor]:
    grad_out = random_inputs(SMALL, CPU, torch.float32, seed=1)[0]
    return random_inputs(SMALL, CPU, torch.float32), layouts.random_lists(SMALL, 16, 32, CPU), grad_out


def test_right_answers_pass(call) -> None:
    inputs, plan, grad_out = call
    leaves = [x.clone().requires_grad_() for x in inputs]
    with poisoned_memory():
        out, lse = attend(*leaves, plan, impl="reference")
        gradients = torch.autograd.grad(out, leaves, grad_out)
    assert check_forward(inputs, plan, out.detach(), lse.detach()).passed
    assert check_backward(inputs, plan, grad_out, gradients).passed


def test_wrong_outputs_fail_and_are_named(call) -> None:
    inputs, plan, _ = call
    out, lse = attend(*inputs, plan, impl="reference")
    assert "out, head" in check_forward(inputs, plan, out * 1.001, lse).where
    assert "lse, head" in check_forward(inputs, plan, out, lse + 0.01).where
    last = out.clone()
    last[-1, -1, -1, -1] = math.nan
    checked = check_forward(inputs, plan, last, lse)
    assert not checked.passed
    assert checked.where == "out holds values that are not finite"


def test_a_lost_list_entry_fails(call) -> None:
    inputs, plan, _ = call
    reads = plan.block_counts() > 0
    first = reads[:, :, 0].float().argmax(dim=-1)
    reads[:, torch.arange(2), 0, first[0]] = False
    sizes = {"q_block": 32, "k_block": 16, "num_queries": SMALL.tokens, "num_keys": SMALL.tokens}
    wrong = attend(*inputs, planning.from_mask(reads, **sizes), impl="reference")
    assert not check_forward(inputs, plan, *wrong).passed


@pytest.mark.parametrize("index", [0, 1, 2])
def test_wrong_gradients_fail_and_are_named(call, index: int) -> None:
    inputs, plan, grad_out = call
    leaves = [x.clone().requires_grad_() for x in inputs]
    gradients = list(torch.autograd.grad(attend(*leaves, plan, impl="reference").out, leaves, grad_out))
    gradients[index] = gradients[index] * 0.999
    checked = check_backward(inputs, plan, grad_out, tuple(gradients))
    assert not checked.passed
    assert checked.where.startswith(("query", "key", "value")[index])


def test_fresh_memory_is_poisoned_and_the_mode_restored() -> None:
    with poisoned_memory():
        assert torch.empty(7).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# -- clock and files ---------------------------------------------------------------------------------------------------


def test_functions_are_measured_in_turns() -> None:
    seen: list[str] = []
    functions = {name: (lambda name=name: seen.append(name)) for name in ("dense", "ours")}
    timings = measure(functions, CPU, Effort(rounds=3, seconds=1.0, most=2))
    assert seen[-12:] == ["dense", "dense", "ours", "ours"] * 3
    assert timings["ours"].samples == 6
    assert timings["ours"].low <= timings["ours"].median <= timings["ours"].high


def test_lists_of_wide_heads_and_whole_tiles_hold_fewer_queries() -> None:
    blocks = {name: PRESETS[name].queries_per_list(64) for name in ("flux-2048", "pixel-256", "cpu-small")}
    assert blocks == {"flux-2048": 128, "pixel-256": 192, "cpu-small": 64}
    assert PRESETS["flux-2048"].queries_per_list(16) == 192


def test_a_small_problem_that_loses_is_noted() -> None:
    note = "note: where dense is faster here, the problem (150 tokens) is too small to gain"
    assert too_small_note(150, 0.5, 0.25) == note
    assert too_small_note(150, 1.5, 0.25) is None
    assert too_small_note(100_000, 0.5, 0.1) is None
    assert too_small_note(100, 0.5, 0.9) is None


def test_the_system_is_named_without_its_release() -> None:
    assert machine.facts()["system"] == f"{platform.system()} {platform.machine()}"


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write_json(path, {"speed_up": 3.0})
    assert json.loads(path.read_text()) == {"speed_up": 3.0}
    with pytest.raises(ValueError):
        write_json(path, {"figure": math.nan})
    assert json.loads(path.read_text()) == {"speed_up": 3.0}
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]
