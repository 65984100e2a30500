"""Measure one attention call of the Hilbert method, text and shared rows included, beside dense attention.

Everything runs on the same tensors, in turns; a wrong answer gets no figure.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.attend import usable_dense
from benchmarks.hilbert_cases import HilbertCase
from nearfield import Geometry, Hilbert, explain_choice
from nearfield._types import Attended, Impl
from nearfield.cli.check import Checked, check_forward, poisoned_memory
from nearfield.cli.presets import Preset
from nearfield.cli.timing import Effort, Function, Timing, captured, measure
from nearfield.methods import PlanLayer
from nearfield_lab.dense import random_inputs

MODEL_LAYERS = 57
"""Attention layers of FLUX.1: tokens are reordered once for all of them."""


@dataclass(frozen=True)
class Options:
    """What holds for every case. Block sizes of None are those that suit the device.

    Args:
        layers: whose tiles to read; times are averaged over them.
        flex: also time flex_attention with the pattern of the first of these layers.
    """

    layers: tuple[int, ...] = (1,)
    q_block: int | None = None
    k_block: int | None = None
    impl: Impl = "auto"
    flex: bool = False


@dataclass(frozen=True)
class HilbertResult:
    """What one case gave. Figures are None or empty unless `status` is "ok"."""

    case: HilbertCase
    dtype: str
    status: str
    note: str = ""
    ran: str | None = None
    blocks: tuple[int, int] | None = None
    density: float | None = None
    checked: Checked | None = None
    layers: dict[int, Timing] = field(default_factory=dict)
    dense: dict[str, Timing] = field(default_factory=dict)
    graph: Timing | None = None  # of the first layer, on a GPU
    flex: Timing | None = None
    flex_note: str = ""
    reordering: Timing | None = None

    @property
    def milliseconds(self) -> float | None:
        """The median, averaged over layers."""
        return (
            sum(timing.median for timing in self.layers.values()) / len(self.layers) if self.layers else None
        )

    @property
    def best_dense(self) -> str | None:
        return min(self.dense, key=lambda name: self.dense[name].median) if self.dense else None

    @property
    def speed_ups(self) -> dict[str, float]:
        """Over every dense implementation, and over flex (which ran the first layer only), from the same turns."""
        if self.milliseconds is None:
            return {}
        found = {name: timing.median / self.milliseconds for name, timing in self.dense.items()}
        if self.flex:
            found["flex"] = self.flex.median / next(iter(self.layers.values())).median
        return found

    @property
    def speed_up(self) -> float | None:
        """Over the best dense implementation."""
        return self.speed_ups[self.best_dense] if self.best_dense else None

    @property
    def bound(self) -> float | None:
        """All pairs over those read: the speed-up of a kernel as efficient as the dense one."""
        return 1 / self.density if self.density else None

    @property
    def fraction_of_bound(self) -> float | None:
        return self.speed_up / self.bound if self.speed_up and self.bound else None

    @property
    def reached(self) -> bool | None:
        """Whether the target was reached; None where there is none. Targets are meant over attention on a GPU."""
        if self.case.target is None or self.speed_up is None or "sdpa" in self.dense:
            return None
        return self.speed_up >= self.case.target

    @property
    def reordering_share(self) -> float | None:
        """Time to reorder hidden states once and back, over the attention of a model's layers."""
        if self.reordering is None or self.milliseconds is None:
            return None
        return self.reordering.median / (MODEL_LAYERS * self.milliseconds)


@dataclass(frozen=True)
class _Call:
    """One layer's attention, kept for timing."""

    inputs: tuple[Tensor, Tensor, Tensor]
    reader: PlanLayer
    impl: Impl

    def __call__(self) -> Attended:
        return self.reader.attend(*self.inputs, impl=self.impl)

    def implementation(self) -> str:
        """What runs it; the far field may be a call of its own, and run by another."""
        query, key, _ = self.inputs
        names = [explain_choice(query, key, self.reader.near, impl=self.impl).impl]
        if (far := self.reader.far) is not None:
            bias = far.bias.expand(*key.shape[:2], -1)
            choice = explain_choice(query, far.pooled(key), far.plan, key_bias=bias, impl=self.impl)
            names.append(choice.impl)
        return " + ".join(dict.fromkeys(names))


class HilbertBench:
    """Measures the cases of one preset on the same tensors."""

    def __init__(self, preset: Preset, device: torch.device, effort: Effort, options: Options) -> None:
        self.preset, self.device, self.effort, self.options = preset, device, effort, options
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.inputs = random_inputs(preset, device, self.dtype)
        self.geometry = Geometry(preset.grid, text=preset.text)
        self.dense = self._dense_functions()

    def run(self, case: HilbertCase) -> HilbertResult:
        """Check, then measure. What cannot run or breaks is a result too, so that the other cases still run."""
        result = HilbertResult(case, str(self.dtype).removeprefix("torch."), "not run")
        try:
            calls = self._calls(Hilbert(**case.fields))
            result = replace(result, ran=calls[self.options.layers[0]].implementation())
        except (NotImplementedError, ValueError) as error:
            return replace(result, note=str(error))
        try:
            return self._measured(result, calls)
        except Exception as error:  # whatever breaks is what its row says
            return replace(result, status="broke", note=f"{type(error).__name__}: {error}")

    def _calls(self, method: Hilbert) -> dict[int, _Call]:
        heads, options = self.inputs[0].shape[1], self.options
        blocks = {"q_block": options.q_block, "k_block": options.k_block}
        readers = {
            layer: method.layer(self.geometry, layer, heads=heads, device=self.device, **blocks)
            for layer in options.layers
        }
        return {layer: _Call(self.inputs, reader, options.impl) for layer, reader in readers.items()}

    def _measured(self, result: HilbertResult, calls: dict[int, _Call]) -> HilbertResult:
        near = next(iter(calls.values())).reader.near
        pairs = sum(call.reader.num_pairs for call in calls.values()) / len(calls)
        density = pairs / self.geometry.num_tokens**2
        result = replace(result, blocks=(near.q_block, near.k_block), density=density)
        for layer, call in calls.items():
            result = replace(result, checked=self._check(call, result.case))
            if result.checked is not None and not result.checked.passed:
                return replace(result, status="check failed", note=f"layer {layer}: {result.checked}")
        flex, flex_note = self._flex(next(iter(calls.values())))
        functions: dict[str, Function] = {**self.dense, **flex, "reordering": self._reordering(result.case)}
        functions |= {f"layer {layer}": call for layer, call in calls.items()}
        if self.device.type == "cuda":  # nothing left to do for the processor, which small images wait for
            functions |= {"graph": captured(next(iter(calls.values())), self.device)}
        timings = measure(functions, self.device, self.effort)
        return replace(
            result,
            status="ok",
            layers={layer: timings[f"layer {layer}"] for layer in calls},
            dense={name: timings[name] for name in self.dense},
            flex=timings.get("flex"),
            graph=timings.get("graph"),
            flex_note=flex_note,
            reordering=timings["reordering"],
        )

    def _check(self, call: _Call, case: HilbertCase) -> Checked:
        """Compare rows of every kind: text, shared, the first of the tiles, and some of the others."""
        near = call.reader.near
        rows = [first // near.q_block for first in (self.preset.text, self.preset.text + case.shared_tokens)]
        rows = [min(row, near.num_rows - 1) for row in rows]
        with poisoned_memory():
            out, lse = call()
        return check_forward(
            self.inputs, near, out, lse, rows=rows, far=call.reader.far, summary=call.reader.summary
        )

    def _flex(self, call: _Call) -> tuple[dict[str, Function], str]:
        """flex_attention with the same pattern if asked for, once its answer was right, or why it has no figure."""
        if not self.options.flex:
            return {}, ""
        if call.reader.far is not None:
            return {}, "a mask has no far field"
        from benchmarks import flex

        try:
            function = flex.compiled(self.inputs, call.reader.near)
            checked = check_forward(self.inputs, call.reader.near, function(), None)
        except Exception as error:  # whatever breaks is what its row says
            return {}, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        return ({"flex": function}, "") if checked.passed else ({}, f"check failed: {checked}")

    def _reordering(self, case: HilbertCase) -> Function:
        """Hidden states into the method's order and back."""
        method = Hilbert(**case.fields)
        ordering = method.ordering(self.geometry, device=self.device)
        width = self.preset.heads * self.preset.head_dim
        states = torch.randn(self.preset.batch, len(ordering), width, device=self.device, dtype=self.dtype)
        return lambda: ordering.leave(ordering.enter(states))

    def _dense_functions(self) -> dict[str, Function]:
        """Every dense implementation that takes these tensors."""
        usable = usable_dense(self.device, lambda dense: dense(self.inputs))
        return {name: partial(dense, self.inputs) for name, dense in usable.items()}


def run_all(
    cases: list[HilbertCase],
    options: Options,
    device: torch.device,
    effort: Effort,
    announce: Callable[[str], None],
) -> list[HilbertResult]:
    """Measure every case; the tensors of one preset are freed before the next one's are made."""
    results = []
    bench = None
    for case in cases:
        announce(str(case))
        if bench is None or bench.preset != case.preset:
            bench = None
            bench = HilbertBench(case.preset, device, effort, options)
        results.append(bench.run(case))
    return results
