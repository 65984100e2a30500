"""Measure fine-grained attention beside dense attention: with remembered lists, with a prediction at every call, and
what it costs to make the lists anew.

Everything runs on the same tensors, in turns; a wrong answer gets no figure. How much is skipped is fixed by the case:
the threshold and the mass are sought so that they skip that much of these tensors.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.attend import usable_dense
from benchmarks.fine_cases import FineCase
from nearfield import attend, planning
from nearfield._types import Attended, Impl
from nearfield.cli.check import Checked, check_forward, poisoned_memory, worst
from nearfield.cli.report import check_record, table
from nearfield.cli.timing import Effort, Function, Timing, measure
from nearfield.ops.predict import api as predict
from nearfield.ops.predict.api import Blocks
from nearfield.ops.predict.reference import columns
from nearfield.plan.plan import Plan

_SAMPLED_ROWS = 16
_HALVINGS = 8
_CLEARLY_SLOWER = 1.3
_AT_A_GLANCE = Effort(rounds=2, seconds=0.0, most=1)

WORKS = ("cached", "online", "refresh")


@dataclass(frozen=True)
class FineResult:
    """What one case gave. Figures are empty unless `status` is "ok".

    Args:
        kept: share of the keys that is read, by "cached" and "online".
        timings: by name: the calls ("cached", "online", "refresh"), their parts, and dense attention.
        list_bytes: of the remembered lists.
        seconds: that the case took, by what was done: kernels are compiled where they are called first.
    """

    case: FineCase
    status: str
    note: str = ""
    kept: dict[str, float] = field(default_factory=dict)
    checked: Checked | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    list_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def milliseconds(self, name: str) -> float | None:
        return self.timings[name].median if name in self.timings else None

    def dense(self) -> float | None:
        """Of the fastest dense attention."""
        times = [timing.median for name, timing in self.timings.items() if name.startswith("dense")]
        return min(times, default=None)

    def figure(self, name: str) -> float | None:
        """How many times as fast as dense attention; of a refresh, how many dense calls it takes."""
        mine, dense = self.milliseconds(name), self.dense()
        if mine is None or dense is None:
            return None
        return mine / dense if name == "refresh" else dense / mine


class FineBench:
    """Measures one case."""

    def __init__(self, case: FineCase, device: torch.device, effort: Effort, impl: Impl = "auto") -> None:
        self.case, self.device, self.effort, self.impl = case, device, effort, impl
        batch, heads, tokens, dim = case.shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        # Neighbours are alike, as in a video: of pure noise every key would be worth the same.
        rough = torch.randn(3, batch, heads, -(-tokens // 64), dim, generator=generator, device=device)
        fine = torch.randn(3, batch, heads, tokens, dim, generator=generator, device=device)
        made = (rough.repeat_interleave(64, 3)[:, :, :, :tokens] + fine).to(dtype)
        self.inputs: tuple[Tensor, Tensor, Tensor] = (made[0], made[1], made[2])
        self.blocks = Blocks(case.query_block, case.grain, tokens, tokens)
        self.full = planning.full(tokens, tokens, device=device)

    def run(self) -> FineResult:
        """Check, then measure. What breaks is a result too, so that the other cases still run."""
        result = FineResult(self.case, "broke")
        try:
            with torch.no_grad():
                return self._run(result)
        except Exception as error:  # whatever breaks is what its row says
            return replace(result, note=f"{type(error).__name__}: {error}")

    def _run(self, result: FineResult) -> FineResult:
        began = [time.perf_counter()]
        threshold, mass = self._threshold(), self._mass()
        plan, online = self._remembered(threshold), self._predicted(mass)
        kept = {"cached": plan.density, "online": online.density}
        began.append(time.perf_counter())
        with poisoned_memory():
            results = [(which, self._attend(which)) for which in (plan, online)]
        checked = worst([check_forward(self.inputs, which, *got) for which, got in results])
        began.append(time.perf_counter())
        result = replace(result, kept=kept, checked=checked, list_bytes=plan.blocks.nbytes)
        if not checked.passed:
            return replace(result, status="check failed", note=str(checked))
        functions: dict[str, Function] = {
            "cached": partial(self._attend, plan),
            "online": lambda: self._attend(self._predicted(mass)),
            "refresh": lambda: (self._attend(self.full), self._remembered(threshold)),
            "prediction online": partial(self._predicted, mass),
        }
        timings = measure(functions | self._dense(), self.device, self.effort)
        began.append(time.perf_counter())
        spans = [after - before for before, after in pairwise(began)]
        seconds = dict(zip(("seeking lists", "checking", "timing"), spans, strict=True))
        return replace(result, status="ok", timings=timings, seconds=seconds)

    def _attend(self, plan: Plan) -> Attended:
        return attend(*self.inputs, plan, impl=self.impl)

    def _remembered(self, threshold: float) -> Plan:
        """Lists by the weights of full attention; the pass that gave `lse` is not part of it."""
        query, key, _ = self.inputs
        keep = predict.by_weights(query, key, self._lse, self.blocks, threshold, impl=self.impl).keep
        return self.blocks.plan(keep, compact=True)

    def _predicted(self, mass: float) -> Plan:
        keep = predict.by_means(*self.inputs[:2], self.blocks, mass=mass, impl=self.impl).keep
        return self.blocks.plan(keep, compact=False)

    def _threshold(self) -> float:
        """The weight that the wanted share of keys falls below, in a few blocks of queries of one head."""
        query, key, _ = self.inputs
        self._lse = self._attend(self.full).lse
        rows = slice(0, _SAMPLED_ROWS * self.case.query_block)
        few = query[:1, :1, rows], key[:1, :1], self._lse[:1, :1, rows]
        scale = float(query.shape[-1] ** -0.5)
        maxima, _ = columns.column_statistics(*few, self.case.query_block, self.case.grain, scale)
        ranked = maxima.flatten().sort().values
        return float(ranked[int(self.case.skipped * (len(ranked) - 1))])

    def _mass(self) -> float:
        """The mass that keeps the wanted share, by halving."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            kept = predict.by_means(*self.inputs[:2], self.blocks, mass=middle, impl=self.impl).kept
            low, high = (low, middle) if float(kept) > 1 - self.case.skipped else (middle, high)
        return high

    def _dense(self) -> dict[str, Function]:
        """Dense attention as torch offers it, without what is clearly slower than another: it would take most of the
        time and change nothing."""
        usable = usable_dense(self.device, lambda dense: dense(self.inputs))
        functions: dict[str, Function] = {
            f"dense {name}": partial(dense, self.inputs) for name, dense in usable.items()
        }
        if len(functions) < 2:
            return functions
        rough = {name: seen.median for name, seen in measure(functions, self.device, _AT_A_GLANCE).items()}
        most = _CLEARLY_SLOWER * min(rough.values())
        return {name: function for name, function in functions.items() if rough[name] <= most}


def effort(device: torch.device, quick: bool) -> Effort:
    """Half of what is usual: a call at size takes milliseconds, so there are many of them all the same."""
    usual = Effort.of(device, quick)
    return usual if quick or device.type == "cpu" else replace(usual, rounds=5, seconds=usual.seconds / 2)


def run_all(
    cases: Sequence[FineCase],
    device: torch.device,
    effort: Effort,
    impl: Impl,
    announce: Callable[[str], None],
) -> Iterator[FineResult]:
    """Measure every case; the tensors of one are freed before the next one's are made."""
    for case in cases:
        announce(case.name)
        yield FineBench(case, device, effort, impl).run()


def results_table(results: Sequence[FineResult]) -> str:
    """Every result as a line; what was wrong is named below, without figures."""
    headings = ["case", "kept", "dense ms"]
    for work in WORKS:
        headings += [f"{work} ms", "dense calls" if work == "refresh" else "speed-up", "to reach"]
    lines = [[*headings, "predict ms", "lists", "error / limit"]]
    for result in results:
        cells = [result.case.name, " / ".join(f"{share:.1%}" for share in result.kept.values()) or "-"]
        cells.append(_shown(result.dense()))
        for work in WORKS:
            figure, target = result.figure(work), result.case.targets.get(work)
            cells += [_shown(result.milliseconds(work)), f"{figure:.2f}x" if figure else "-"]
            cells.append(f"{target:.1f}x" if target else "-")
        cells += [_shown(result.milliseconds("prediction online")), f"{result.list_bytes / 2**20:.0f} MiB"]
        checked = result.checked
        lines.append([*cells, f"{checked.error:.1e} / {checked.limit:.1e}" if checked else "-"])
    notes = [
        f"{result.case.name}: {result.status}: {result.note}" for result in results if result.status != "ok"
    ]
    return "\n".join([table(lines), *notes])


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def as_json(results: Sequence[FineResult], machine: dict[str, Any]) -> dict[str, Any]:
    """A document with the machine's facts and every case's figures (null where there are none)."""
    return {"format": 1, "benchmark": "fine", "machine": machine, "results": [_record(r) for r in results]}


def _record(result: FineResult) -> dict[str, Any]:
    case = result.case
    return {
        "case": case.name,
        "shape": list(case.shape),
        "query_block": case.query_block,
        "grain": case.grain,
        "skipped": case.skipped,
        "status": result.status,
        "note": result.note,
        "kept": result.kept,
        "milliseconds": {name: asdict(timing) for name, timing in result.timings.items()},
        "figures": {name: result.figure(name) for name in WORKS},
        "targets": case.targets,
        "list_bytes": result.list_bytes,
        "seconds": result.seconds,
        "check": check_record(result.checked),
    }
