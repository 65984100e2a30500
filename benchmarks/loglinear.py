"""Measure log-linear attention, pooling and choosing included, beside dense attention: forward, and with the backward.

Everything runs on the same tensors, in turns; a wrong answer gets no figure. On a GPU both are timed as they are called
and as CUDA graphs: some twenty small kernels take the processor longer to launch than the GPU to run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.attend import usable_dense
from benchmarks.loglinear_cases import LogLinearCase
from nearfield import LogLinear, attend_with
from nearfield._types import Impl
from nearfield.cli.check import Checked, compare, keys_of, poisoned_memory, worst
from nearfield.cli.report import check_record, table
from nearfield.cli.timing import Effort, Function, Timing, captured, measure
from nearfield.methods.loglinear import Chosen, choose
from nearfield.ops.pool_select.api import pool

GRAPH = ", graph"
_MOST_DENSE = 140_000  # beyond so many tokens dense attention is not worth waiting for


@dataclass(frozen=True)
class LogLinearResult:
    """What one case gave. Figures are empty unless `status` is "ok".

    Args:
        timings: by name: the whole call ("forward", "forward + backward"), its parts, and dense attention.
        extra_bytes: the most memory that a forward and backward call needed beyond inputs and results.
    """

    case: LogLinearCase
    status: str
    note: str = ""
    keys_per_query: int = 0
    checked: Checked | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    extra_bytes: int | None = None

    def milliseconds(self, name: str) -> float | None:
        return self.timings[name].median if name in self.timings else None

    def over_dense(self, name: str) -> float | None:
        """How many times as fast as the best dense attention; as a graph, where it was captured."""
        mine = self.milliseconds(name + GRAPH) or self.milliseconds(name)
        dense = [timing.median for key, timing in self.timings.items() if key.startswith(f"dense {name}")]
        return min(dense) / mine if dense and mine else None


class LogLinearBench:
    """Measures one case."""

    def __init__(
        self, case: LogLinearCase, device: torch.device, effort: Effort, impl: Impl = "auto"
    ) -> None:
        self.case, self.device, self.effort, self.impl = case, device, effort, impl
        levels: Any = case.levels
        self.method = LogLinear(levels=levels)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        batch, heads, tokens, dim = case.shape
        generator = torch.Generator(device).manual_seed(0)
        # Neighbours are alike, as in an image: choosing among pure noise would choose nothing.
        rough = torch.randn(3, batch, heads, -(-tokens // 64), dim, generator=generator, device=device)
        fine = torch.randn(3, batch, heads, tokens, dim, generator=generator, device=device)
        made = (rough.repeat_interleave(64, 3)[:, :, :, :tokens] + fine).to(dtype)
        self.inputs: tuple[Tensor, Tensor, Tensor] = (made[0], made[1], made[2])
        self.gradient = torch.randn_like(made[0])

    def run(self) -> LogLinearResult:
        """Check, then measure. What breaks is a result too, so that the other cases still run."""
        result = LogLinearResult(
            self.case, "broke", keys_per_query=self.method.keys_per_query(self.case.shape[2])
        )
        try:
            result = replace(result, checked=self.check())
            if result.checked is not None and not result.checked.passed:
                return replace(result, status="check failed", note=str(result.checked))
            functions = self._functions()
            graphs, note = self._graphs(functions)
            timings = measure(functions | graphs, self.device, self.effort)
            extra_bytes = self._extra_bytes()
            return replace(result, status="ok", note=note, timings=timings, extra_bytes=extra_bytes)
        except Exception as error:  # whatever breaks is what its row says
            return replace(result, note=f"{type(error).__name__}: {error}")

    def check(self) -> Checked:
        """Some blocks of queries against float64, for what was chosen; gradients against plain torch."""
        with torch.no_grad(), poisoned_memory():
            out = self._forward()
        if not bool(torch.isfinite(out).all()):
            return Checked(float("nan"), 0.0, "out holds values that are not finite")
        chosen = choose(self.method, *self.inputs, impl=self.impl)
        samples = []
        for head in ((0, 0), (out.shape[0] - 1, out.shape[1] - 1)):
            for row in sorted({0, chosen.near.num_rows // 2, chosen.near.num_rows - 1}):
                exact, rough = (self._row(chosen, head, row, dtype) for dtype in (torch.float64, out.dtype))
                rows = slice(row * self.method.block, (row + 1) * self.method.block)
                samples.append(compare(out[head][rows], exact, rough, f"head {head[1]}, row {row}"))
        return worst(samples)

    def _row(self, chosen: Chosen, head: tuple[int, int], row: int, dtype: torch.dtype) -> Tensor:
        """What one block of queries should give, computed in `dtype`."""
        query, key, value = (x[head].to(dtype) for x in self.inputs)
        first = row * self.method.block
        near = keys_of(chosen.near, head, row)
        keys, values, bias = [key[near]], [value[near]], [key.new_zeros(len(near))]
        if chosen.far is not None and chosen.key is not None and chosen.value is not None:
            assert chosen.bias is not None
            far = keys_of(chosen.far, head, first // chosen.far.q_block)
            keys.append(chosen.key[head][far].to(dtype))
            values.append(chosen.value[head][far].to(dtype))
            bias.append(chosen.bias[0, 0, far].to(dtype))
        scores = query[first : first + self.method.block] @ torch.cat(keys).mT * query.shape[-1] ** -0.5
        return torch.softmax(scores + torch.cat(bias), -1) @ torch.cat(values)

    def _forward(self) -> Tensor:
        return attend_with(self.method, *self.inputs, impl=self.impl)

    def _backward(self, attention: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        return torch.autograd.grad(attention(*leaves), leaves, self.gradient)

    def _functions(self) -> dict[str, Function]:
        attention = partial(attend_with, self.method, impl=self.impl)
        functions: dict[str, Function] = {
            "forward": torch.no_grad()(self._forward),
            "forward + backward": lambda: self._backward(attention),
            "pooling": torch.no_grad()(self._pooled),
            "pooling, choosing and lists": torch.no_grad()(
                lambda: choose(self.method, *self.inputs, impl=self.impl)
            ),
        }
        if self.case.shape[2] > _MOST_DENSE:
            return functions
        usable = usable_dense(self.device, lambda dense: self._backward(lambda *leaves: dense(leaves)))
        for name, dense in usable.items():
            functions[f"dense forward {name}"] = partial(dense, self.inputs)
            functions[f"dense forward + backward {name}"] = partial(
                self._backward, lambda *leaves, dense=dense: dense(leaves)
            )
        return functions

    def _graphs(self, functions: Mapping[str, Function]) -> tuple[dict[str, Function], str]:
        """Both calls as CUDA graphs, and why there are none."""
        if self.device.type != "cuda":
            return {}, ""
        works = ("forward", "forward + backward")
        try:
            return {work + GRAPH: captured(functions[work], self.device) for work in works}, ""
        except RuntimeError as error:
            return {}, f"no graph: {error}"

    def _pooled(self) -> object:
        levels = self.method.num_levels(self.case.shape[2], self.case.shape[2])
        return [pool(x, self.method.block, levels, self.impl) for x in self.inputs]

    def _extra_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._backward(partial(attend_with, self.method, impl=self.impl))
        size = self.inputs[0].numel() * self.inputs[0].element_size()
        return torch.cuda.max_memory_allocated(self.device) - before - 4 * size


def run_all(
    cases: Sequence[LogLinearCase],
    device: torch.device,
    effort: Effort,
    impl: Impl,
    announce: Callable[[str], None],
) -> Iterator[LogLinearResult]:
    """Measure every case; the tensors of one are freed before the next one's are made."""
    for case in cases:
        announce(f"{case.name}: {case.levels} levels")
        yield LogLinearBench(case, device, effort, impl).run()


def results_table(results: Sequence[LogLinearResult]) -> str:
    """Every result as a line; what was wrong is named below, without figures."""
    works = ("forward", "forward + backward")
    headings = ["B x H x N x D", "keys per query", "pool ms", "choose ms"]
    for work in works:
        headings += [f"{work} ms", "graph ms", "over dense", "to reach"]
    lines = [[*headings, "beyond inputs", "error / limit"]]
    for result in results:
        cells = [result.case.name, str(result.keys_per_query)]
        cells += [_shown(result.milliseconds(name)) for name in ("pooling", "pooling, choosing and lists")]
        for work, target in zip(works, result.case.targets, strict=True):
            over = result.over_dense(work)
            cells += [_shown(result.milliseconds(name)) for name in (work, work + GRAPH)]
            cells += [f"{over:.1f}x" if over else "-", _shown(target)]
        checked = result.checked
        cells.append(f"{result.extra_bytes / 2**20:.0f} MiB" if result.extra_bytes is not None else "-")
        cells.append(f"{checked.error:.1e} / {checked.limit:.1e}" if checked else "-")
        lines.append(cells)
    notes = [f"{result.case.name}: {result.status}: {result.note}" for result in results if result.note]
    return "\n".join([table(lines), *notes])


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.3f}"


def as_json(results: Sequence[LogLinearResult], machine: dict[str, Any]) -> dict[str, Any]:
    """A document with the machine's facts and every case's figures (null where there are none)."""
    return {
        "format": 1,
        "benchmark": "loglinear",
        "machine": machine,
        "results": [_record(r) for r in results],
    }


def _record(result: LogLinearResult) -> dict[str, Any]:
    return {
        "shape": list(result.case.shape),
        "levels": result.case.levels,
        "status": result.status,
        "note": result.note,
        "keys_per_query": result.keys_per_query,
        "milliseconds": {name: asdict(timing) for name, timing in result.timings.items()},
        "over_dense": {name: result.over_dense(name) for name in ("forward", "forward + backward")},
        "targets": list(result.case.targets),
        "extra_bytes": result.extra_bytes,
        "check": check_record(result.checked),
    }
