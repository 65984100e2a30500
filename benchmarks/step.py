"""Measure one denoising step of a real architecture: dense, with a method applied, and with no attention at all.

Everything runs in one process, in turns, on the same random weights and inputs. Before a case is timed, a small image
is used to check that what will be timed is right; a wrong answer gets no figure.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from benchmarks import special, step_parts
from benchmarks.cases import Case
from benchmarks.report import Column, Record, error_cell, speed_figures, target_cell, times_cell
from benchmarks.runner import Benchmark, Session, WrongAnswer, require
from benchmarks.step_cases import CASES, DEFAULTS
from benchmarks.step_models import NAMED_SIZES, Arguments, Built, Size, architecture, read_sides
from benchmarks.step_parts import MERGING, REFRESH, SELECTING, Context, Loop, Step, Turn, Variant
from nearfield import Hilbert, Merge, Method, apply
from nearfield.cli import UsageError
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.timing import Timing, captured, measure
from nearfield.methods import Composition

OURS, CEILING, REORDERING = "nearfield", "no attention", "reordering"
STEP = "step"
STEPS = 50
"""Steps of the generation that is reckoned from steps that make lists and steps that find them."""
MERGING_SHARE = 0.03
"""The largest share of a step that making maps, merging and unmerging may take."""
_ROUNDS = 5
_CHECKED_TOKENS = 4096


class WithoutAttention(TorchFunctionMode):
    """Dense attention among tokens gives its values back unread: what a step costs without it.

    Everything around it stays, and so does cross-attention, which has other keys than queries.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            if given["query"].shape == given["key"].shape:
                return given["value"]
        return func(*args, **kwargs)


class StepBenchmark(Benchmark):
    name = "step"
    examples = (
        "  python -m benchmarks step --quick\n"
        "  python -m benchmarks step --cases 'flux1-*-default' --json step.json --plot step.png\n"
        "  python -m benchmarks step --cases 'wan21-480p-fine-*' --rounds 3\n"
        '  python -m benchmarks step --case \'{"size": "768x1344", "layers": [2, 4], "method": "Hilbert"}\''
    )
    table = CASES
    defaults = DEFAULTS
    drawing = "nearfield_lab.plots.bars:step_bars"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._built: tuple[object, Built] | None = None

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        super().check(cases, options)
        for case in cases:
            try:
                architecture(case.on["model"])
                read_sides(case.on["size"])
                if not case.method:
                    raise ValueError("`method` must be given.")
            except ValueError as error:
                raise UsageError(f"case {case.name!r}: {error}") from None

    def measure(self, case: Case) -> Iterator[Record]:
        built = self.built(case)
        size = built.size(case.on["size"])
        self.session.say(f"{case.name}: checking outputs")
        checked = require(self.checked(case, built, check_size(size)))
        self.session.say(f"{case.name}: {size.tokens + built.text:,} tokens")
        about = {
            "name": f"{size} px, {case.name}",
            "check": checked,
            "model": built.name,
            "blocks": built.blocks,
            "parameters": built.parameters,
            "pixels": str(size),
            "frames": size.frames,
            "grid": size.grid,
            "tokens": size.tokens + built.text,
        }
        for record in self._measured(case, built, size):
            yield about | record

    def built(self, case: Case) -> Built:
        """The model of a case; it stays as long as the next case needs it."""
        layers = None if case.on["layers"] is None else tuple(case.on["layers"])
        key = case.on["model"], layers, bool(case.on["tiny"])
        if self._built is None or self._built[0] != key:
            self._built = None  # before the next is made: two may not fit
            self.session.say(f"making {case.on['model']} with random weights")
            self._built = key, Built(*key, self.device, self.dtype)
        return self._built[1]

    # -- is it right -----------------------------------------------------------------------------------------------

    def checked(self, case: Case, built: Built, size: Size) -> Checked:
        """Is what will be timed right? The budget is twice what eager attention changes in the stock model.

        With one tile (or lists of all keys) every token reads every other, so the output must be the stock model's:
        tokens, rotary table and text stand where they should. With the method itself it must be what plain torch makes
        of the same lists, and of the same destinations: rounding would change the choice. That one is compared by
        itself.
        """
        arguments = built.arguments(size)
        method, every, reads = self._checked_methods(case, built, size, arguments)
        stock = output(built, arguments)
        eager = output(built, arguments, partial(sdpa_kernel, SDPBackend.MATH))
        limit = 2 * relative_error(eager, stock) + torch.finfo(self.dtype).eps
        impl = self.session.impl
        full = output(built, arguments, partial(apply, built.model, every, impl=impl))
        plain = output(built, arguments, partial(apply, built.model, method, impl="grouped"))
        ours = output(built, arguments, partial(apply, built.model, method, impl=impl))
        return max(
            _compared(full, stock, limit, f"{reads}, compared with the stock model"),
            _compared(ours, plain, limit, "the method, compared with plain torch on the same lists"),
            key=lambda checked: (not checked.passed, checked.error),
        )

    def _checked_methods(
        self, case: Case, built: Built, size: Size, arguments: Arguments
    ) -> tuple[Any, Any, str]:
        """The method, with whatever rounding could change held fast; one that reads everything; and its name."""
        if compared := special.of(case.method).compared:
            return compared(self, case, built, _step(built, arguments))
        method: Any = case.made()
        if merge := _merge_of(method):
            step_parts.check_choice(merge, built.geometry(size), self.device)
            method = step_parts.with_fixed_destinations(method)
        every = Hilbert(tiles=1, near="tile", shared="none", far=None, dense_layers=0, dense_steps=0)
        return method, every, "one tile that reads everything"

    # -- what is timed ---------------------------------------------------------------------------------------------

    def _measured(self, case: Case, built: Built, size: Size) -> Iterator[Record]:
        arguments = built.arguments(size)
        step = _step(built, arguments)
        variants = list(self._variants(case, built, size, step))
        dense = self._dense(built)
        turns: dict[str, Turn] = {name: (context, step) for name, context in dense.items()}
        turns |= {f"{OURS}, {variant.name}": variant.turn for variant in variants}
        turns[CEILING] = self._with_dense(WithoutAttention), step
        ordering = variants[0].method.ordering(built.geometry(size), device=self.device)
        turns[REORDERING] = nullcontext, partial(built.moving(arguments, size).by, ordering)
        for variant in variants:
            turns |= variant.parts
        contexts = {name: context for name, (context, _) in turns.items()}
        functions = {name: function for name, (_, function) in turns.items()}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with torch.no_grad():
            timings = measure(functions, self.device, self.session.effort(_ROUNDS), contexts)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        for variant in variants:
            density, summary = self._last_look(variant, built, arguments)
            names = [*dense, CEILING, REORDERING, *variant.parts]
            mine = {name: timings[name] for name in names} | {OURS: timings[f"{OURS}, {variant.name}"]}
            figures = figures_of(mine, list(dense), case, variant.name, density)
            yield figures | {"peak_bytes": peak, "summary": summary} | dict(variant.facts)

    def _last_look(self, variant: Variant, built: Built, arguments: Arguments) -> tuple[float | None, str]:
        """What a variant has read, where that is known, and its summary.

        Raises WrongAnswer where its output is not finite, or it did not read the share that was asked for.
        """
        density = None if variant.density is None else variant.density()
        with apply(built.model, variant.method, scheduler=Loop(), impl=self.session.impl) as handle:
            if not bool(torch.isfinite(output(built, arguments)).all()):
                raise WrongAnswer("the output holds values that are not finite")
            counted = handle.pairs_kept() if density is None else density
            return counted, str(handle.summary())

    def _variants(self, case: Case, built: Built, size: Size, step: Step) -> Iterator[Variant]:
        method: Any = case.made()
        if variants := special.of(case.method).variants:
            yield from variants(self, case, built, step)
        elif _merge_of(method):  # in a loop in which maps never get old
            loop, kept = Loop(), step_parts.with_kept_maps(method)
            turn = self.applied(built, kept, loop), loop.later(step)
            merged = partial(step_parts.density, method, built.geometry(size))
            yield Variant(STEP, method, turn, merged, self._merging(method, built, size))
        else:
            layers_differ = isinstance(getattr(method, "tiles", None), tuple)
            is_counted = layers_differ or self._layer(method, built, size).num_pairs is None
            density = None if is_counted else partial(self._density, method, built, size)
            yield Variant(STEP, method, (self.applied(built, method), step), density)

    def _merging(self, method: Any, built: Built, size: Size) -> dict[str, Turn]:
        """Making maps, and merging, by themselves."""
        parts = step_parts.Parts(method, built.geometry(size), built.model, self.device, self.dtype)
        # In a step the processor is far ahead of the GPU; here it would be the processor that is timed.
        merge = captured(parts.merge, self.device) if self.device.type == "cuda" else parts.merge
        return {SELECTING: (nullcontext, parts.select), MERGING: (nullcontext, merge)}

    def _dense(self, built: Built) -> dict[str, Context]:
        """The stock model with every dense attention; of videos with cuDNN's alone, which is the fastest by far."""
        if self.device.type != "cuda":
            return {"sdpa": nullcontext}
        found: dict[str, Context] = {"cudnn": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)}
        if not built.is_video:
            found["flash"] = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        return found

    def _with_dense(self, context: Context) -> Context:
        """With cuDNN wherever attention stays dense."""
        if self.device.type != "cuda":
            return context

        @contextmanager
        def both() -> Iterator[None]:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context():
                yield

        return both

    def applied(
        self, built: Built, method: Any, loop: Loop | None = None, first: Step | None = None
    ) -> Context:
        """The method in a loop, of which the `first` step is done."""

        @contextmanager
        def context() -> Iterator[None]:
            with apply(built.model, method, scheduler=loop, impl=self.session.impl):
                if first is not None:
                    first()
                yield

        return self._with_dense(context)

    def _density(self, method: Any, built: Built, size: Size) -> float:
        """Pairs that a sparse layer reads, of all there are; over the layers that differ."""
        count: int = getattr(method, "phases", getattr(method, "period", 1))
        pairs: int = sum(self._layer(method, built, size, layer).num_pairs for layer in range(count))
        return pairs / (count * built.geometry(size).num_tokens ** 2)

    def _layer(self, method: Any, built: Built, size: Size, layer: int = 0) -> Any:
        heads = built.config.num_attention_heads
        return method.layer(built.geometry(size), layer, heads=heads, device=self.device)

    # -- report ----------------------------------------------------------------------------------------------------

    def columns(self, records: Sequence[Record]) -> list[Column]:
        dense = dict.fromkeys(name for record in records for name in record.get("speed_ups", {}))
        return [
            Column("work", "variant"),
            Column("pixels", "pixels"),
            Column("tokens", "tokens", ","),
            Column("kept", "density", ".1%"),
            *(Column(f"{name} ms", f"milliseconds/{name}/median", ".1f") for name in (*dense, CEILING)),
            Column("ms", f"milliseconds/{OURS}/median", ".1f"),
            *(Column(f"over {name}", times_cell(f"speed_ups/{name}")) for name in dense),
            Column("ceiling", times_cell("ceiling")),
            Column("target", _target),
            Column("reordering", "reordering_share", ".2%"),
            Column("error / limit", error_cell),
        ]

    def notes(self, records: Sequence[Record]) -> list[str]:
        lines = (
            ["ceiling: the speed-up over the best dense step if attention cost nothing"] if records else []
        )
        if any(record["skipped"] for record in records):
            lines.append(
                "fixed: the share of keys that is skipped. Weights are random, so thresholds and masses were sought for"
                " it, layer by layer, and blocks that are unlike their mean are not kept whole.\n"
                "real: all that is timed, by the method's own code: predictions, lists, attention, moving of tokens."
            )
        for record in records:
            milliseconds = {name: timing["median"] for name, timing in record["milliseconds"].items()}
            if record["merging_share"] is not None:
                verdict = "reached" if record["merging_share"] <= MERGING_SHARE else "missed"
                lines.append(
                    f"{record['case']}: maps take {milliseconds[SELECTING]:.2f} ms where they are made, merging and"
                    f" parting {milliseconds[MERGING]:.2f} ms: {record['merging_share']:.1%} of a step"
                    f" (target: at most {MERGING_SHARE:.0%}, {verdict})"
                )
            if record["speed_up_over_generation"] is not None:
                dense_steps = milliseconds[REFRESH] / milliseconds[record["dense_backend"]]
                lines.append(
                    f"{record['case']}: a step that makes the lists takes {milliseconds[REFRESH]:.1f} ms, as"
                    f" {dense_steps:.2f} dense ones; with the few of {STEPS} steps that do, a generation is"
                    f" {record['speed_up_over_generation']:.2f}x as fast (reckoned)"
                )
        return lines


def output(built: Built, arguments: Arguments, context: Context = nullcontext) -> Tensor:
    with torch.no_grad(), context():
        found: Tensor = built.model(**arguments, return_dict=False)[0]
    return found


def figures_of(
    timings: Mapping[str, Timing], dense: Sequence[str], case: Case, work: str, density: float | None
) -> Record:
    """What follows from the times of one variant. Making maps is spread over the steps for which they serve."""
    medians = {name: timing.median for name, timing in timings.items()}
    selecting = 0.0
    if SELECTING in medians:
        merge = _merge_of(case.made())
        assert merge is not None
        selecting = medians[SELECTING] / merge.refresh[1]
    ours = medians[OURS] + selecting
    found = speed_figures(ours, {name: timings[name] for name in dense}, density, case.targets.get(work))
    best = medians[found["dense_backend"]]
    over_generation = None
    if REFRESH in medians:
        times = len(case.made().refreshes(STEPS))
        over_generation = STEPS * best / (times * medians[REFRESH] + (STEPS - times) * ours)
    return found | {
        "variant": work,
        "method_name": case.method,
        "skipped": None,
        "density": density,
        "milliseconds": dict(timings),
        "ceiling": best / medians[CEILING],
        "reordering_share": medians[REORDERING] / ours,
        "merging_share": (medians[MERGING] + selecting) / ours if MERGING in medians else None,
        "speed_up_over_generation": over_generation,
    }


def _target(record: Record) -> str | None:
    shown = target_cell(record)
    if shown and shown.endswith("missed") and record["ceiling"] < record["target"]:
        return f"{record['target']:.2f}x above the ceiling"
    return shown


def _merge_of(method: Method) -> Merge | None:
    merge = Composition.of(method).merge
    return merge if isinstance(merge, Merge) else None


def _step(built: Built, arguments: Arguments) -> Step:
    return partial(built.model, **arguments, return_dict=False)


def check_size(size: Size) -> Size:
    """This one, or one that is small enough for eager attention: of 1,024 pixels, or a few frames."""
    if size.tokens <= _CHECKED_TOKENS:
        return size
    if size.frames == 1:
        return Size(1024, 1024)
    return Size(*NAMED_SIZES["480p"], frames=5)


def _compared(got: Tensor, want: Tensor, limit: float, where: str) -> Checked:
    if not bool(torch.isfinite(got).all()):
        return Checked(float("nan"), limit, f"{where}: the output holds values that are not finite")
    return Checked(relative_error(got, want), limit, where)
