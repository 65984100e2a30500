"""Time the shapes that LogLinear's kernels may be launched with, one kernel after another, then whole calls.

    PYTHONPATH=src python benchmarks/sweep_loglinear.py --compile-only --jobs 8   # fills Triton's cache, times nothing
    PYTHONPATH=src python benchmarks/sweep_loglinear.py 4x6x16384x64 1x6x65536x64 --json sweep.json
    PYTHONPATH=src python benchmarks/sweep_loglinear.py 4x6x16384x64 --kernels near-forward,near-key

Needs a GPU; for those who tune. The first shape of a kernel is the one in use (of pairs: both parts apart); the others
must give what it gives, up to rounding, or get no figure. What comes out belongs into the tables of launch.py, a line
into docs/performance.md, and the document that `--json` writes into benchmarks/results.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from nearfield import operators
from nearfield._files import write_json
from nearfield._types import Attended
from nearfield.attend import Part, attend_together
from nearfield.bench import machine
from nearfield.bench.check import poisoned_memory
from nearfield.bench.loglinear import LogLinearBench
from nearfield.bench.loglinear_cases import CASES
from nearfield.bench.timing import Effort, Function, Timing, captured, measure
from nearfield.kernels import backward, forward, hopper, launch, pair, pool, select
from nearfield.kernels.launch import Tiles
from nearfield.kernels.pack import rows_of
from nearfield.methods.loglinear import Chosen, choose
from nearfield.operators import merge
from nearfield.plan import Packed, Packing, Plan

NEAR_FORWARD = (
    Tiles(16, 32, 1, 2),
    Tiles(16, 32, 1, 3),
    Tiles(16, 32, 1, 4),
    Tiles(16, 16, 1, 3),
    Tiles(16, 64, 1, 3),
    Tiles(16, 64, 4, 3),
    Tiles(64, 64, 4, 2, pack=4),
)
FAR_FORWARD = (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, registers=128), Tiles(64, 64, 4, 2))
NEAR_QUERY = (
    Tiles(64, 64, 4, 2, registers=128, pack=4),
    Tiles(64, 64, 4, 3, registers=128, pack=4),
    Tiles(16, 64, 1, 3),
    Tiles(16, 32, 1, 3),
    Tiles(16, 32, 1, 2),
)
FAR_QUERY = (
    Tiles(64, 64, 4, 2, registers=128),
    Tiles(64, 64, 4, 3, registers=128),
    Tiles(64, 64, 4, 3),
)
NEAR_KEY = (
    Tiles(64, 32, 4, 2, pack=4),
    Tiles(64, 32, 4, 3, pack=4),
    Tiles(64, 32, 4, 3, registers=168, pack=4),
    Tiles(64, 64, 4, 2, pack=4),
    Tiles(16, 64, 2, 2),
    Tiles(16, 64, 1, 2),
    Tiles(16, 32, 1, 2),
    Tiles(16, 32, 1, 3),
)
FAR_KEY = (
    Tiles(16, 64, 2, 2),
    Tiles(16, 64, 1, 2),
    Tiles(16, 32, 1, 2),
    Tiles(16, 32, 1, 3),
    Tiles(16, 32, 2, 3),
    Tiles(16, 128, 2, 2),
    *(Tiles(16, 64, 2, 2, chunk=chunk) for chunk in (16, 32, 64)),
    Tiles(64, 64, 4, 2, pack=4),
)
PAIR = (
    Tiles(64, 64, 4, 2, pack=4),
    Tiles(64, 64, 4, 2, registers=128, pack=4),
    Tiles(64, 64, 4, 2, registers=168, pack=4),
    Tiles(64, 64, 4, 3, registers=128, pack=4),
    Tiles(64, 64, 4, 3, registers=168, pack=4),
    Tiles(64, 32, 4, 2, pack=4),
    Tiles(64, 32, 4, 3, registers=128, pack=4),
    Tiles(128, 64, 8, 2, registers=128, pack=8),
    Tiles(128, 32, 8, 3, registers=128, pack=8),
)
POOL = {
    f"{tokens} tokens, {loads} loads unrolled": {"_TOKENS": tokens, "_UNROLLED": loads}
    for tokens, loads in ((256, 16), (512, 16), (256, 8))
}
SELECT: dict[str, dict[str, int]] = {
    "128 candidates a warp": {"_PER_WARP": 128},
    "64 candidates a warp": {"_PER_WARP": 64},
    "64 candidates a warp, 128 registers": {"_PER_WARP": 64, "_REGISTERS": 128},
    "32 candidates a warp": {"_PER_WARP": 32},
}

GLUON = "gluon"
WHOLE = "whole calls, graphs"
PARTS = {(16, 16): "near", (128, 16): "far"}
"""Parts by their blocks of queries and keys."""

Variants = dict[str, Function]


class Call(NamedTuple):
    """One call of the method, taken apart: what it chose, and what a backward pass starts from."""

    query: Tensor
    key: Tensor
    value: Tensor
    chosen: Chosen
    gradient: Tensor
    lse_gradient: Tensor
    attended: Attended
    statistics: tuple[Tensor, Tensor]
    scale: float

    def part(self, is_near: bool) -> tuple[Tensor, Tensor, Plan, Tensor | None]:
        if is_near:
            return self.key, self.value, self.chosen.near, None
        chosen = self.chosen
        assert chosen.key is not None
        assert chosen.value is not None
        assert chosen.far is not None
        bias = chosen.bias
        assert bias is not None
        return chosen.key, chosen.value, chosen.far, bias.expand(*self.query.shape[:2], -1)

    def forward(self, is_near: bool, tiles: Tiles | None) -> Attended:
        """Either part alone; in whole calls the near one goes on from the far one's result."""
        key, value, plan, bias = self.part(is_near)
        return forward.attend_forward(self.query, key, value, plan, bias, None, self.scale, tiles)

    def hopper_forward(self) -> Attended:
        key, value, plan, bias = self.part(is_near=False)
        return hopper.attend_forward(self.query, key, value, plan, bias, None, self.scale)

    def together(self, tiles: Tiles | None, bench: LogLinearBench) -> Attended:
        """Both parts, by one kernel if its shape is given."""
        near = Part(*self.part(is_near=True), rows_alike=True)
        parts = [near, Part(*self.part(is_near=False))]
        with patch.object(launch, "PAIR", tiles), torch.no_grad():
            return attend_together(self.query, parts, impl=bench.impl)

    def query_gradients(self, tiles: Tiles) -> pair.PairGradient:
        near, far = self.part(is_near=True), self.part(is_near=False)
        given = (self.gradient, self.lse_gradient, self.query, near, far, *self.attended, self.scale)
        return pair.query_gradient_of_pair(*given, tiles)

    def query_gradients_apart(self) -> pair.PairGradient:
        statistics = backward.row_statistics(self.gradient, self.lse_gradient, *self.attended)
        total = None
        for is_near in (True, False):
            given = (self.gradient, *statistics, self.query, *self.part(is_near), None, self.scale)
            total = backward.query_gradient(*given, before=total, alike=is_near)
        assert total is not None
        return pair.PairGradient(total, *statistics)

    def query_gradient(self, is_near: bool, tiles: Tiles) -> Tensor:
        key, value, plan, bias = self.part(is_near)
        given = (self.gradient, *self.statistics, self.query, key, value, plan, bias, None, self.scale)
        return backward.query_gradient(*given, tiles)

    def key_gradient(self, is_near: bool, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor | None]:
        key, value, plan, bias = self.part(is_near)
        given = (self.gradient, *self.statistics, self.query, key, value, plan, bias, None, self.scale)
        return backward.key_gradient(*given, tiles)


def packing_of(tiles: Tiles) -> Packing:
    """How its rows, of 16 queries and blocks of 16 keys, are merged."""
    return Packing(tiles.pack, tiles.other // 16)


def call_of(bench: LogLinearBench) -> Call:
    with torch.no_grad():
        chosen = choose(bench.method, *bench.inputs, impl=bench.impl)
    query, key, value = bench.inputs
    for tiles in PAIR:  # merged where they are chosen, not by these kernels
        rows = rows_of(chosen.near, tiles, *query.shape[:2])
        packing = packing_of(tiles)
        chosen.near._derived["packed", packing.rows, packing.multiple] = Packed(*rows[:2], *packing)
    scale = query.shape[-1] ** -0.5
    nothing = torch.zeros(query.shape[:3], device=query.device)
    unread = Attended(query, nothing)
    call = Call(query, key, value, chosen, bench.gradient, nothing, unread, (nothing, nothing), scale)
    both = merge(call.forward(is_near=False, tiles=None), call.forward(is_near=True, tiles=None))
    statistics = backward.row_statistics(bench.gradient, nothing, both.out, both.lse)
    for plan in (chosen.near, chosen.far):  # made once per call of the method, not per kernel
        assert plan is not None
        plan.transpose().longest_first(*query.shape[:2])
    return call._replace(attended=both, statistics=statistics)


def variants(kernel: str, call: Call, bench: LogLinearBench) -> Variants:
    """What is timed, by name; the one in use first."""
    is_near = kernel.startswith("near")
    if kernel == "pool":
        sizes = bench.method.block, bench.method.num_levels(call.query.shape[2], call.key.shape[2])
        three = (call.query, call.key, call.value)
        return {label: partial(_pooled, constants, three, *sizes) for label, constants in POOL.items()}
    if kernel == "select":
        return {label: partial(_chosen, constants, bench) for label, constants in SELECT.items()}
    if kernel == "pair":
        apart: Variants = {"apart": partial(call.together, None, bench)}
        return apart | {name(tiles): partial(call.together, tiles, bench) for tiles in PAIR}
    if kernel == "pair-query":
        apart = {"apart": call.query_gradients_apart}
        return apart | {name(tiles): partial(call.query_gradients, tiles) for tiles in PAIR}
    if kernel == "far-forward":
        known: Variants = {} if bench.device.type == "cpu" else {GLUON: call.hopper_forward}
        return known | {name(tiles): partial(call.forward, False, tiles) for tiles in FAR_FORWARD}
    run = {"forward": call.forward, "query": call.query_gradient, "key": call.key_gradient}[
        kernel.split("-")[1]
    ]
    return {name(tiles): partial(run, is_near, tiles) for tiles in SHAPES[kernel]}


@contextmanager
def constants_set(module: ModuleType, constants: Mapping[str, int]) -> Iterator[None]:
    with ExitStack() as stack:
        for constant, value in constants.items():
            stack.enter_context(patch.object(module, constant, value))
        yield


def _pooled(constants: dict[str, int], *given: Any) -> list[Tensor]:
    with constants_set(pool, constants):
        return pool.pool_together(*given)


def _chosen(constants: dict[str, int], bench: LogLinearBench) -> tuple[Tensor, Tensor]:
    """Pooling included: it gives what is chosen among."""
    with constants_set(select, constants), torch.no_grad():
        near = choose(bench.method, *bench.inputs, impl=bench.impl).near
    return near.offsets, near.blocks


SHAPES: dict[str, tuple[Tiles, ...]] = {
    "near-forward": NEAR_FORWARD,
    "far-forward": FAR_FORWARD,
    "near-query": NEAR_QUERY,
    "far-query": FAR_QUERY,
    "near-key": NEAR_KEY,
    "far-key": FAR_KEY,
}
KERNELS = ("pool", "select", "pair", "pair-query", *SHAPES)


def name(tiles: Tiles) -> str:
    """The fields that were given."""
    shown = [f"{tiles.own} x {tiles.other}, {tiles.warps} warps, {tiles.stages} stages"]
    if tiles.registers:
        shown.append(f"{tiles.registers} registers")
    if tiles.pack > 1:
        shown.append(f"{tiles.pack} rows packed")
    if tiles.chunk is not None:
        shown.append(f"chunks of {tiles.chunk}" if tiles.chunk else "no chunks")
    return ", ".join(shown)


def right_ones(functions: Variants) -> Variants:
    """Those that give what the first gives, within twice the precision of its dtype; the others are named."""
    first: list[Tensor] = []
    kept: Variants = {}
    for label, function in functions.items():
        try:
            with poisoned_memory():
                got = _tensors(function())
        except Exception as error:  # a shape that does not compile or fit is named, and has no figure
            print(f"           {label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        first = first or got
        errors = [_error(mine, theirs) for mine, theirs in zip(got, first, strict=True)]
        if all(error < 0.02 for error in errors):
            kept[label] = function
        else:
            print(f"           {label}: wrong, by {max(errors):.3f}", flush=True)
    return kept


def _tensors(result: object) -> list[Tensor]:
    every = (result,) if isinstance(result, Tensor) else result
    assert isinstance(every, Iterable)
    return [x for x in every if isinstance(x, Tensor)]


def _error(mine: Tensor, theirs: Tensor) -> float:
    error = (mine.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6)
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def sweep(
    bench: LogLinearBench, kernels: Iterable[str], effort: Effort | None
) -> Iterator[tuple[str, dict[str, Timing]]]:
    """The times of each kernel's shapes; none of what only had to be compiled."""
    call = call_of(bench)
    for kernel in kernels:
        functions = right_ones(variants(kernel, call, bench))
        yield kernel, measure(functions, bench.device, effort) if effort and functions else {}


@contextmanager
def chosen_shapes(best: Mapping[str, str]) -> Iterator[None]:
    """LogLinear's kernels in the given shapes, by kernel and name; all other plans in theirs."""

    def chooser(kind: str, usual: Callable[..., Tiles]) -> Callable[..., Tiles]:
        def tiles(*given: Any, **likeness: bool) -> Tiles:
            kernel = f"{PARTS.get(given[-2:])}-{kind}"
            found = [shape for shape in SHAPES.get(kernel, ()) if name(shape) == best.get(kernel)]
            return found[0] if found else usual(*given, **likeness)

        return tiles

    places = {
        "forward": (forward, "forward_tiles"),
        "query": (backward, "query_gradient_tiles"),
        "key": (backward, "key_gradient_tiles"),
    }
    with ExitStack() as stack:
        stack.enter_context(constants_set(pool, POOL.get(best.get("pool", ""), {})))
        stack.enter_context(constants_set(select, SELECT.get(best.get("select", ""), {})))
        if best.get("far-forward", GLUON) != GLUON:
            stack.enter_context(patch.object(hopper, "unsupported", lambda *_: "the plain kernel is faster"))
        for kernel, constant in (("pair", "PAIR"), ("pair-query", "PAIR_GRADIENT")):
            paired = [tiles for tiles in PAIR if name(tiles) == best.get(kernel)]
            stack.enter_context(patch.object(launch, constant, paired[0] if paired else None))
            if paired and kernel == "pair":
                stack.enter_context(patch.object(operators, "PACKING", packing_of(paired[0])))
        for kind, (module, function) in places.items():
            stack.enter_context(patch.object(module, function, chooser(kind, getattr(module, function))))
        yield


def whole_calls(bench: LogLinearBench, best: Mapping[str, str], effort: Effort) -> dict[str, Timing]:
    """Whole calls as CUDA graphs: as they are, in the best shapes, and in those with parts apart."""
    functions = bench._functions()
    works = ("forward", "forward + backward")
    graphs = {f"{work}, as it is": captured(functions[work], bench.device) for work in works}
    kinds = {
        "best shapes": best,
        "best shapes, parts apart": {**best, "pair": "apart", "pair-query": "apart"},
    }
    for kind, shapes in kinds.items():
        with chosen_shapes(shapes):
            graphs |= {f"{work}, {kind}": captured(functions[work], bench.device) for work in works}
    return measure(graphs, bench.device, effort)


def swept(case: str, kernels: Iterable[str], effort: Effort | None) -> dict[str, dict[str, Timing]]:
    """Every kernel's shapes, then whole calls in the best ones, said as they come; empty where nothing is timed."""
    bench = LogLinearBench(CASES[case], torch.device("cuda"), effort or Effort(1, 0.0))
    found: dict[str, dict[str, Timing]] = {}
    for kernel, timings in sweep(bench, kernels, effort):
        _say(case, kernel, timings)
        if timings:
            found[kernel] = timings
    if found and effort:
        best = {
            kernel: min(timings, key=lambda label, timings=timings: timings[label].median)
            for kernel, timings in found.items()
        }
        found[WHOLE] = whole_calls(bench, best, effort)
        _say(case, WHOLE, found[WHOLE])
    return found


def _say(case: str, kernel: str, timings: Mapping[str, Timing]) -> None:
    lines = [f"{timing.median:9.4f} ms  {label}" for label, timing in timings.items()]
    print("\n".join([f"{case}: {kernel}", *lines]), flush=True)


def as_json(found: Mapping[str, Mapping[str, Mapping[str, Timing]]]) -> dict[str, Any]:
    """A line for every shape of every kernel in every case, in milliseconds, with the machine's facts."""
    results = [
        {"case": case, "kernel": kernel, "shape": shape, **asdict(timing)}
        for case, kernels in found.items()
        for kernel, timings in kernels.items()
        for shape, timing in timings.items()
    ]
    return {"format": 1, "benchmark": "sweep-loglinear", "machine": machine.facts(), "results": results}


def compile_all(cases: Iterable[str], kernels: Iterable[str], jobs: int) -> None:
    """Every kernel of the first case in some process: what is compiled depends on sizes in little."""
    work = [(case, [kernel], None) for case in cases for kernel in kernels]
    with get_context("spawn").Pool(jobs) as pool:
        pool.starmap(swept, work, chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=["4x6x16384x64"], metavar="CASE")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile at once")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    kernels = options.kernels.split(",")
    for given, known in ((options.cases, CASES), (kernels, KERNELS)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"must be among {', '.join(known)}; got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        parser.error("`torch` must see a GPU; got none. The interpreter's times mean nothing.")
    if options.compile_only:
        compile_all(options.cases, kernels, options.jobs)
        return
    found = {}
    for case in options.cases:
        found[case] = swept(case, kernels, Effort(rounds=3, seconds=0.06))
        if options.json:
            write_json(options.json, as_json(found))


if __name__ == "__main__":
    main()
