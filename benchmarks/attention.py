"""Measure one attention call of a plan or a method, compared with dense attention on the same tensors, in turns.

Before anything is timed, sampled rows are compared with float64; a wrong answer gets no figure.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import rivals
from benchmarks.attention_calls import BACKWARD, BOTH, FORWARD, Call, Work, preset_of
from benchmarks.attention_cases import CASES, DEFAULTS
from benchmarks.cases import Case
from benchmarks.dense import Dense, dense_attention
from benchmarks.report import Column, Record, error_cell, speed_figures, target_cell, times_cell
from benchmarks.runner import Benchmark, require
from nearfield.cli import UsageError, comma_list, member
from nearfield.cli.check import Checked, Inputs, check_backward, check_forward
from nearfield.cli.timing import Function, Timing, captured, measure

MODEL_LAYERS = 57
"""Attention layers of FLUX.1: tokens are reordered once for all of them."""
_OPERATIONS = {FORWARD: 4, BACKWARD: 10, BOTH: 14}
"""Floating-point operations per pair and head dimension: two products forward, five backward."""
_MOST_DENSE = 140_000  # with more tokens the backward of dense attention takes too long
_GRAPH = ", graph"
_LAST_RESORT = "efficient"
_FEW_TOKENS = 8192


class Attention(Benchmark):
    name = "attention"
    examples = (
        "  python -m benchmarks attention --quick\n"
        "  python -m benchmarks attention --cases 'hilbert-*' --rivals flex --json hilbert.json --plot hilbert.png\n"
        "  python -m benchmarks attention --cases 'flux-2048-random-*,loglinear-4x6x16384x64'\n"
        '  python -m benchmarks attention --case \'{"method": "Hilbert", "preset": "flux-2048"}\''
    )
    table = CASES
    defaults = DEFAULTS
    drawing = "nearfield_lab.plots.bars:call_bars"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--rivals",
            type=comma_list(member("--rivals", rivals.KERNELS)),
            default=[],
            metavar="A,B",
            help="also time other packages on the same lists: any of flex (torch's flex_attention, compiled),"
            " fa4 (FlashAttention-4) and bsa (cuDNN's block-sparse attention)",
        )

    def settings(self, case: Case) -> Record:
        return super().settings(case) | {"rivals": self.options.rivals}

    def measure(self, case: Case) -> Iterator[Record]:
        call = Call(case, self.device, self.session.impl)
        works = call.works()
        checks = {name: require(work.judged()) for name, work in works.items()}
        others, rival_notes = self._rivals(call, works)
        dense = {
            way: self._dense(call, way) for way in dict.fromkeys(work.direction for work in works.values())
        }
        graphs, notes = self._graphs(works)
        functions = {name: work.run for name, work in works.items()} | graphs | others
        for work in works.values():
            functions |= work.parts
        for way, each in dense.items():
            functions |= {f"{name} {way}": function for name, function in each.items()}
        timings = measure(functions, self.device, self.session.effort())
        for name, work in works.items():
            others_dense = {each: timings[f"{each} {work.direction}"] for each in dense[work.direction]}
            rival = {each: timings[each] for each in others}
            note = notes.get(name, "; ".join(rival_notes.values()))
            own = {"work": name, "check": checks[name], "note": note, "rival_notes": rival_notes}
            figures = self._figures(case, call, name, work, timings, others_dense, rival)
            yield self._shape(call) | own | {"rival_milliseconds": rival} | figures

    def _shape(self, call: Call) -> Record:
        return {
            "preset": call.preset.name,
            "shape": dict(zip("BHND", call.preset.shape, strict=True)),
            "dtype": str(call.dtype).removeprefix("torch."),
            "impl_asked": call.impl,
        }

    def _figures(
        self,
        case: Case,
        call: Call,
        name: str,
        work: Work,
        timings: Mapping[str, Timing],
        dense: Mapping[str, Timing],
        others: Mapping[str, Timing],
    ) -> Record:
        graph, parts = timings.get(name + _GRAPH), {part: timings[part] for part in work.parts}
        mine = graph if graph and work.by_graph else timings[name]
        found = speed_figures(mine.median, dense, work.kept, case.targets.get(name))
        found["speed_ups"] |= {each: timing.median / mine.median for each, timing in others.items()}
        batch, heads, tokens, dim = call.preset.shape
        operations = _OPERATIONS[work.direction] * dim * batch * heads * tokens**2 / 1e9
        best = dense[found["dense_backend"]].median if dense else None
        found |= {
            "density": work.kept,
            "milliseconds": timings[name],
            "graph_milliseconds": graph,
            "parts_milliseconds": parts,
            "tflops": operations * work.kept / mine.median,
            "dense_tflops": operations / best if best else None,
            "overhead_over_parts": _overhead(case, mine, parts),
            "reordering_share": _reordering_share(mine, parts),
            "extra_bytes": self._extra_bytes(call, work),
        }
        return found | dict(work.facts)

    # -- what is timed ---------------------------------------------------------------------------------------------

    def _dense(self, call: Call, way: str) -> dict[str, Function]:
        """Every dense implementation that takes these tensors, in a direction."""
        inputs = call.tensors
        if way != FORWARD and call.preset.tokens > _MOST_DENSE:
            return {}

        def function(dense: Any) -> Function:
            if way == FORWARD:
                return partial(dense, inputs)
            if way == BACKWARD:
                return call.gradients(lambda *leaves: dense(leaves), inputs)
            return partial(call.differentiated, lambda *leaves: dense(leaves), inputs)

        usable = usable_dense(self.device, lambda dense: function(dense)())
        return {name: function(dense) for name, dense in usable.items()}

    def _graphs(self, works: Mapping[str, Work]) -> tuple[dict[str, Function], dict[str, str]]:
        """Works as CUDA graphs, and of which there is none, and why."""
        found: dict[str, Function] = {}
        notes: dict[str, str] = {}
        for name, work in works.items() if self.device.type == "cuda" else ():
            if work.in_graph:
                try:
                    found[name + _GRAPH] = captured(work.run, self.device)
                except RuntimeError as error:
                    notes[name] = f"no graph: {error}"
        return found, notes

    def _rivals(self, call: Call, works: Mapping[str, Work]) -> tuple[dict[str, Function], dict[str, str]]:
        """Calls of other packages that give the right answer; and of those without a figure, why."""
        work = next(iter(works.values()))
        found: dict[str, Function] = {}
        notes: dict[str, str] = {}
        for name in self.options.rivals:
            if work.plan is None:
                notes[name] = "only a plan without a far field says what others are to read"
                continue
            is_backward = work.direction == BACKWARD
            try:
                made = rivals.calls(name, call.tensors, work.plan, call.grad_out if is_backward else None)
                for each, rival in made.items():
                    checked = self._judged_rival(call, rival, is_backward)
                    if checked.passed or "fp8" in each:  # of which the error is part of the result
                        found[each] = rival.run
                    if not checked.passed:
                        notes[each] = str(checked)
            except Exception as error:  # whatever breaks is what its record says
                notes[name] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return found, notes

    def _judged_rival(self, call: Call, rival: rivals.Rival, is_backward: bool) -> Checked:
        result: Any = rival.run()
        if is_backward:
            return check_backward(call.tensors, rival.plan, call.grad_out, result)
        return check_forward(call.tensors, rival.plan, result, None)

    def _extra_bytes(self, call: Call, work: Work) -> int | None:
        """The most memory that a forward and backward call needed beyond inputs and results."""
        if self.device.type != "cuda" or work.direction != BOTH:
            return None
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work.run()
        size = call.alike[0].numel() * call.alike[0].element_size()
        return torch.cuda.max_memory_allocated(self.device) - before - 4 * size

    # -- report ----------------------------------------------------------------------------------------------------

    def columns(self, records: Sequence[Record]) -> list[Column]:
        dense = dict.fromkeys(name for record in records for name in record.get("dense_milliseconds", {}))
        others = dict.fromkeys(name for record in records for name in record.get("speed_ups", {}))
        other_packages = [name for name in others if name not in dense]
        rates = (record.get("tflops") or 0 for record in records)
        unit, scale = ("TFLOP/s", 1) if max(rates, default=0) >= 1 else ("GFLOP/s", 1000)
        return [
            Column("work", "work"),
            Column("blocks", lambda record: _blocks(record)),
            Column("impl", "impl"),
            Column("kept", "density", ".1%"),
            *(Column(f"{name} ms", f"dense_milliseconds/{name}/median", ".3f") for name in dense),
            *(Column(f"{name} ms", f"rival_milliseconds/{name}/median", ".3f") for name in other_packages),
            Column("ms", "milliseconds/median", ".3f"),
            Column("graph ms", "graph_milliseconds/median", ".3f"),
            Column("pool ms", "parts_milliseconds/pooling/median", ".3f"),
            Column("choose ms", "parts_milliseconds/pooling, choosing and lists/median", ".3f"),
            Column(unit, lambda record: f"{record['tflops'] * scale:.0f}" if "tflops" in record else None),
            *(Column(f"over {name}", times_cell(f"speed_ups/{name}")) for name in others),
            Column("bound", times_cell("bound")),
            Column("of bound", "fraction_of_bound", ".2f"),
            Column("target", target_cell),
            Column("target ms", "target_milliseconds", ".2f"),
            Column("reordering", "reordering_share", ".2%"),
            Column("error / limit", error_cell),
        ]

    def notes(self, records: Sequence[Record]) -> list[str]:
        lines = []
        if any(record["reordering_share"] for record in records):
            lines.append(
                f"reordering: hidden states in and back, over the attention of {MODEL_LAYERS} layers"
            )
        for record in records:
            if record["overhead_over_parts"] is not None:
                parts = " + ".join(
                    f"{name} {ms['median']:.3f} ms" for name, ms in record["parts_milliseconds"].items()
                )
                over = record["overhead_over_parts"]
                lines.append(f"{record['case']}: {over:+.1%} over the sum of its parts ({parts})")
            if record["note"]:
                lines.append(f"{record['case']}: {record['note']}")
        return lines + self._too_small(records)

    def _too_small(self, records: Sequence[Record]) -> list[str]:
        for record in records if self.options.quick else ():
            note = too_small_note(record["shape"]["N"], record["speed_up"] or 1, record["density"])
            if note:
                return [note]
        return []

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        super().check(cases, options)
        for case in cases:
            try:
                preset_of(case)
            except (TypeError, ValueError) as error:
                raise UsageError(f"case {case.name!r}: {error}") from None


def usable_dense(device: torch.device, attempt: Callable[[Callable[[Inputs], Tensor]], object]) -> Dense:
    """The dense implementations that take certain tensors, which `attempt` calls them with.

    The last resort is there only where no other is.
    """
    usable: Dense = {}
    for name, dense in dense_attention(device).items():
        if name == _LAST_RESORT and usable:
            continue
        try:
            attempt(dense)
        except RuntimeError:
            continue
        usable[name] = dense
    return usable


def too_small_note(tokens: int, speed_up: float, density: float) -> str | None:
    """None unless dense attention wins on few tokens although a good part of the pairs is left out."""
    if speed_up >= 1 or density >= 0.9 or tokens > _FEW_TOKENS:
        return None
    return f"note: where dense is faster here, the problem ({tokens:,} tokens) is too small to gain"


def _blocks(record: Record) -> str | None:
    return f"{record['q_block']} x {record['k_block']}" if "q_block" in record else None


def _overhead(case: Case, mine: Timing, parts: Mapping[str, Timing]) -> float | None:
    """Time over the sum of the parts, less one, where the parts are all of it."""
    if case.on["plan"] != "ragged":
        return None
    return mine.median / sum(part.median for part in parts.values()) - 1


def _reordering_share(mine: Timing, parts: Mapping[str, Timing]) -> float | None:
    """Time to reorder hidden states once and back, over the attention of a model's layers."""
    return parts["reordering"].median / (MODEL_LAYERS * mine.median) if "reordering" in parts else None
