"""Measure attend beside dense attention on the same tensors; a wrong answer gets no figure."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import layouts
from benchmarks.cases import Case, Result
from nearfield._types import Attended, Impl
from nearfield.cli.check import Checked, Inputs, check_backward, check_forward, poisoned_memory
from nearfield.cli.presets import Preset
from nearfield.cli.timing import Effort, Function, measure
from nearfield.ops.attention.api import attend
from nearfield.ops.attention.dispatch import explain_choice
from nearfield.plan.plan import Plan
from nearfield_lab.dense import Dense, dense_attention, random_inputs

LAST_RESORT = "efficient"


class _Survey(NamedTuple):
    """The fastest dense implementation, and the milliseconds of all (none where there is only one)."""

    best: str
    function: Function
    times: dict[str, float]


class Bench:
    """Measures the cases of one preset on the same tensors; dense attention is surveyed once per direction."""

    def __init__(self, preset: Preset, device: torch.device, effort: Effort) -> None:
        self.device, self.effort = device, effort
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.inputs = random_inputs(preset, device, self.dtype)
        self.grad_out = random_inputs(preset, device, self.dtype, seed=1)[0]
        self._surveys: dict[bool, _Survey] = {}

    def run(self, case: Case) -> Result:
        """Check, then measure. What cannot run or breaks is a result too, so that the other cases still run."""
        empty = Result(case, str(self.dtype).removeprefix("torch."), "not run")
        try:
            plan = case.plan(self.device)
            ran = explain_choice(*self.inputs[:2], plan, backward=case.backward, impl=case.impl).impl
            if case.backward and ran == "gluon":
                ran = "triton"  # whose kernels are the backward of gluon too
        except (NotImplementedError, ValueError) as error:
            return replace(empty, note=str(error))
        try:
            return self._measured(replace(empty, ran=ran), plan)
        except Exception as error:  # whatever breaks is what its row says
            return replace(empty, ran=ran, status="broke", note=f"{type(error).__name__}: {error}")

    def _measured(self, result: Result, plan: Plan) -> Result:
        case = result.case
        function, checked = self._prepared(case, plan)
        result = replace(result, checked=checked, density=plan.density, pairs=self._pairs(plan))
        if not checked.passed:
            return replace(result, status="check failed", note=str(checked))
        survey = self._surveyed(case.backward)
        parts = self._parts(case, plan) if case.pattern == "ragged" else {}
        functions = {"dense": survey.function, "nearfield": function} | parts
        timings = measure(functions, self.device, self.effort)
        return replace(
            result,
            status="ok",
            timing=timings["nearfield"],
            dense_name=survey.best,
            dense_timing=timings["dense"],
            dense_survey=survey.times or {survey.best: timings["dense"].median},
            parts={name: timings[name].median for name in parts},
        )

    def _pairs(self, plan: Plan) -> int:
        batch, heads = self.inputs[0].shape[:2]
        return plan.num_pairs * (batch // plan.blocks.shape[0]) * (heads // plan.blocks.shape[1])

    def _prepared(self, case: Case, plan: Plan) -> tuple[Function, Checked]:
        """The function to time, and the verdict on what it returns."""
        if not case.backward:
            forward = _Call(self.inputs, plan, case.impl)
            with poisoned_memory():
                out, lse = forward()
            return forward, check_forward(self.inputs, plan, out, lse)
        with poisoned_memory():
            backward = _backward_of(
                lambda q, k, v: attend(q, k, v, plan, impl=case.impl).out, self.inputs, self.grad_out
            )
            gradients = backward()
        return backward, check_backward(self.inputs, plan, self.grad_out, gradients)

    def _parts(self, case: Case, plan: Plan) -> dict[str, Function]:
        """Rows that read everything and rows that read little, each as a call of its own."""
        full = int((plan.counts[0, 0] == plan.num_columns).sum())
        ends = {"rows that read all": (0, full), "rows that read tiles": (full, plan.num_rows)}
        query, key, value = self.inputs
        parts: dict[str, Function] = {}
        for name, (start, stop) in ends.items():
            part = layouts.rows_of(plan, start, stop)
            rows = query[:, :, start * plan.q_block : start * plan.q_block + part.num_queries]
            parts[name] = _Call((rows, key, value), part, case.impl)
        return parts

    def _surveyed(self, backward: bool) -> _Survey:
        """Every dense implementation that takes these tensors, timed where there is a choice; the best is kept."""
        if backward not in self._surveys:
            usable = usable_dense(self.device, lambda dense: self._dense_function(dense, backward)())
            functions = {name: self._dense_function(dense, backward) for name, dense in usable.items()}
            times = {}
            if len(functions) > 1:
                timings = measure(functions, self.device, self.effort)
                times = {name: timing.median for name, timing in timings.items()}
            best = min(functions, key=lambda name: times.get(name, 0.0))
            self._surveys[backward] = _Survey(best, functions[best], times)
        return self._surveys[backward]

    def _dense_function(self, dense: Callable[[Inputs], Tensor], backward: bool) -> Function:
        if backward:
            return _backward_of(lambda *inputs: dense(inputs), self.inputs, self.grad_out)
        return lambda: dense(self.inputs)


@dataclass(frozen=True)
class _Call:
    """A forward call kept for timing."""

    inputs: Inputs
    plan: Plan
    impl: Impl

    def __call__(self) -> Attended:
        return attend(*self.inputs, self.plan, impl=self.impl)


def usable_dense(device: torch.device, attempt: Callable[[Callable[[Inputs], Tensor]], object]) -> Dense:
    """Those that take certain tensors, which `attempt` calls them with; the last resort only where no other does."""
    usable: Dense = {}
    for name, dense in dense_attention(device).items():
        if name == LAST_RESORT and usable:
            continue
        try:
            attempt(dense)
        except RuntimeError:
            continue
        usable[name] = dense
    return usable


def _backward_of(forward: Callable[..., Tensor], inputs: Inputs, grad_out: Tensor) -> Callable[[], Inputs]:
    """A function that differentiates one forward call again and again."""
    leaves = tuple(x.detach().requires_grad_() for x in inputs)
    out = forward(*leaves)

    def backward() -> Inputs:
        query, key, value = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        return query, key, value

    return backward


def run_all(
    cases: list[Case], device: torch.device, effort: Effort, announce: Callable[[str], None]
) -> list[Result]:
    """Measure every case; the tensors of one preset are freed before the next one's are made."""
    results = []
    bench, of = None, None
    for case in cases:
        announce(str(case))
        if bench is None or of != case.preset:
            bench = None
            bench, of = Bench(case.preset, device, effort), case.preset
        results.append(bench.run(case))
    return results
