"""The sweep over launch shapes of LogLinear's kernels, in the interpreter: what it runs, and what it refuses."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.attending import NEEDS_TRITON
from tests.scripts import load_script

from nearfield.bench.loglinear import LogLinearBench
from nearfield.bench.loglinear_cases import LogLinearCase
from nearfield.bench.timing import Effort

pytestmark = NEEDS_TRITON
EFFORT = Effort(rounds=1, seconds=0.0, most=1)


@pytest.fixture(scope="module")
def sweeping() -> ModuleType:
    return load_script("sweep_loglinear")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's part")
def test_every_kernel_runs_in_every_kind_of_shape(
    sweeping: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each kernel the shape in use, and the last with packed rows; nothing is wrong."""
    bench = LogLinearBench(LogLinearCase((1, 1, 96, 16), 1), torch.device("cpu"), EFFORT, "triton")
    for kernel, shapes in sweeping.SHAPES.items():
        packed = [tiles for tiles in shapes[1:] if tiles.pack > 1]
        monkeypatch.setitem(sweeping.SHAPES, kernel, (shapes[0], *packed[-1:]))
    monkeypatch.setattr(sweeping, "FAR_FORWARD", sweeping.FAR_FORWARD[:1])
    monkeypatch.setattr(sweeping, "PAIR", sweeping.PAIR[::8])
    assert [tiles.pack for tiles in sweeping.PAIR] == [4, 8]
    kernels = [kernel for kernel in sweeping.KERNELS if kernel != "select"]
    found = dict(sweeping.sweep(bench, kernels, None))
    assert list(found) == kernels
    assert capsys.readouterr().out == ""
    best = {kernel: sweeping.name(shapes[-1]) for kernel, shapes in sweeping.SHAPES.items()}
    query, key, _ = bench.inputs
    with sweeping.chosen_shapes(best):
        assert sweeping.forward.forward_tiles(query, key, 16, 16) == sweeping.SHAPES["near-forward"][-1]
        found = sweeping.backward.key_gradient_tiles(query, key, 128, 16, alike=False)
        assert found == sweeping.SHAPES["far-key"][-1]
        usual = sweeping.forward.forward_tiles(query, key, 128, 64)
    assert usual == sweeping.forward.forward_tiles(query, key, 128, 64)


def test_shapes_in_use_come_first(sweeping: ModuleType) -> None:
    """What the others are compared with is what a call runs."""
    half = torch.empty(4, 6, 16384, 64, dtype=torch.bfloat16, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping.launch, "compute_capability", lambda _: (9, 0))
        in_use = {
            "near-forward": sweeping.launch.forward_tiles(half, half, 16, 16),
            "near-query": sweeping.launch.query_gradient_tiles(half, 16, 16, alike=True),
            "far-query": sweeping.launch.query_gradient_tiles(half, 128, 16),
            "near-key": sweeping.launch.key_gradient_tiles(half, half, 16, 16, alike=True),
            "far-key": sweeping.launch.key_gradient_tiles(half, half[:, :, :1088], 128, 16),
        }
    assert {kernel: shapes[0] for kernel, shapes in sweeping.SHAPES.items() if kernel in in_use} == in_use
    assert sweeping.launch.PAIR in sweeping.PAIR
    assert sweeping.packing_of(sweeping.launch.PAIR) == sweeping.operators.PACKING
    assert sweeping.packing_of(sweeping.launch.PAIR_GRADIENT) == sweeping.operators.PACKING
    assert sweeping.launch.PAIR_GRADIENT in sweeping.PAIR


def test_figures_are_written_with_the_facts_of_the_machine(sweeping: ModuleType, tmp_path: Path) -> None:
    timings = {"a shape": sweeping.Timing.of([1.0, 2.0, 4.0])}
    sweeping.write_json(tmp_path / "sweep.json", sweeping.as_json({"a case": {"a kernel": timings}}))
    document = json.loads((tmp_path / "sweep.json").read_text())
    line = document["results"][0]
    assert (line["case"], line["kernel"], line["shape"]) == ("a case", "a kernel", "a shape")
    assert line["median"] == 2.0
    assert document["machine"]["versions"]["torch"] == torch.__version__


def test_a_wrong_or_broken_shape_gets_no_figure(
    sweeping: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("out of registers")

    functions = {
        "in use": lambda: torch.ones(3),
        "rounded": lambda: torch.full((3,), 1.001),
        "wrong": lambda: torch.full((3,), 1.1),
        "not a number": lambda: torch.full((3,), float("nan")),
        "broken": broken,
    }
    assert list(sweeping.right_ones(functions)) == ["in use", "rounded"]
    said = capsys.readouterr().out
    assert "wrong: wrong, by 0.100" in said
    assert "broken: RuntimeError: out of registers" in said
