"""Measure one denoising step of a real architecture: dense, with a method applied, and with no attention at all.

Everything runs in one process, in turns, on the same random weights and inputs. Before anything is timed, the smallest
image is used to check that what will be timed is right; a wrong answer gets no figure.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from benchmarks import fine_parts, flux_model, merging_parts, random_model, wan_model
from benchmarks.denoising import Loop
from nearfield import FineGrained, Geometry, Hilbert, Merge, apply
from nearfield._types import Impl
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.model_cases import NAMED_SIZES, ModelCase, Size
from nearfield.cli.timing import Effort, Timing, captured, measure
from nearfield.plan.plan import Plan

OURS, CEILING, REORDERING = "nearfield", "no attention", "reordering"
SELECTING, MERGING = "making maps", "merging"
REFRESH = "making lists"
CACHED, ONLINE = "cached", "online"
PARTS = (CEILING, REORDERING, SELECTING, MERGING, REFRESH)
STEPS = 50
"""Of the generation that is reckoned from steps that make lists and steps that find them."""
_CHECKED_TOKENS = 4096
_MISFIT = 0.02
"""By how much of all keys the share that is skipped may differ from the one that was asked for."""
Context = Callable[[], AbstractContextManager[Any]]
Step = Callable[[], object]


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


@dataclass(frozen=True)
class ModelResult:
    """What one size gave. Figures are None or empty unless `status` is "ok".

    Args:
        variant: of a method that is measured in several ways, which of them.
        skipped: the share of the keys that was to be skipped, where that is fixed.
    """

    case: ModelCase
    size: Size
    status: str
    note: str = ""
    variant: str = ""
    skipped: float | None = None
    tokens: int = 0
    density: float | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    summary: str = ""
    peak_bytes: int | None = None

    @property
    def label(self) -> str:
        words = [str(self.size), self.variant]
        return "; ".join(word for word in words if word)

    @property
    def dense(self) -> dict[str, Timing]:
        others = (OURS, *PARTS)
        return {name: timing for name, timing in self.timings.items() if name not in others}

    @property
    def best_dense(self) -> str | None:
        return min(self.dense, key=lambda name: self.dense[name].median) if self.dense else None

    def over(self, name: str, of: str = OURS) -> float | None:
        """How many times as fast as the step called `name` the one called `of` is."""
        if name not in self.timings or of not in self.timings:
            return None
        return self.timings[name].median / (self.timings[of].median + self._selecting(of))

    def _selecting(self, step: str) -> float:
        """What making maps adds to a step, spread over the steps for which they serve; the timed ones find theirs."""
        if step != OURS or SELECTING not in self.timings:
            return 0.0
        every = Merge(**self.case.merging_fields()).refresh[1]
        return self.timings[SELECTING].median / every

    @property
    def merging_share(self) -> float | None:
        """Time spent on making maps, merging and parting, over the step."""
        if MERGING not in self.timings:
            return None
        merging, selecting = self.timings[MERGING].median, self._selecting(OURS)
        return (merging + selecting) / (self.timings[OURS].median + selecting)

    @property
    def over_generation(self) -> float | None:
        """The speed-up of a generation in which some steps make the lists that the others find. Reckoned."""
        if REFRESH not in self.timings or self.best_dense is None:
            return None
        dense, ours, anew = (self.timings[name].median for name in (self.best_dense, OURS, REFRESH))
        times = len(FineGrained().refreshes(STEPS))
        return STEPS * dense / (times * anew + (STEPS - times) * ours)

    @property
    def speed_up(self) -> float | None:
        return self.over(self.best_dense) if self.best_dense else None

    @property
    def ceiling(self) -> float | None:
        """The speed-up over the best dense step if attention cost nothing."""
        return self.over(self.best_dense, CEILING) if self.best_dense else None

    @property
    def reordering_share(self) -> float | None:
        """Time spent on moving tokens in and out, over the step."""
        return self.over(REORDERING)

    @property
    def reached(self) -> bool | None:
        target = self.target
        return None if target is None or self.speed_up is None else self.speed_up >= target

    @property
    def target(self) -> float | None:
        return self.case.target(self.size, self.skipped)


@dataclass(frozen=True)
class Variant:
    """One way to run a step by a method.

    Args:
        name: "" where there is only one.
        context: what is entered before its turn.
        density: asked after it has run: the share of all pairs that was read.
        skipped: as in ModelResult.
        parts: what it is made of, or needs at some steps: timed apart.
    """

    name: str
    method: Any
    context: Context
    step: Step
    density: Callable[[], float]
    skipped: float | None = None
    parts: tuple[str, ...] = ()


class ModelBench:
    """One model and what can be done to its attention."""

    def __init__(self, case: ModelCase, device: torch.device, effort: Effort, impl: Impl = "auto") -> None:
        self.case, self.device, self.effort, self.impl = case, device, effort, impl
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.made: Any = wan_model if case.architecture.is_video else flux_model
        self.model: Any = random_model.build(case, device, self.dtype)

    def run(self, size: Size) -> list[ModelResult]:
        """Time every variant in turns. What breaks is a result too, so that the other sizes still run."""
        result = ModelResult(self.case, size, "broke", tokens=size.tokens + self.case.text)
        try:
            return self._measured(result)
        except Exception as error:  # whatever breaks is what its row says
            note = f"{type(error).__name__}: {error}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # after the handler: the error held on to what was in use
        return [replace(result, note=note)]

    def check(self, size: Size) -> Checked:
        """Is what will be timed right? The budget is twice what eager attention changes in the stock model.

        With one tile (or lists of all keys) every token reads every other, so the output must be the stock model's:
        tokens, rotary table and text stand where they should. With the method itself it must be what plain torch makes
        of the same lists, and of the same destinations: rounding would change the choice. That one is compared by
        itself.
        """
        arguments = self._arguments(size)
        method, every, reads = self._checked_methods(size, arguments)
        stock = self._output(arguments, nullcontext)
        eager = self._output(arguments, partial(sdpa_kernel, SDPBackend.MATH))
        limit = 2 * relative_error(eager, stock) + torch.finfo(self.dtype).eps
        full = self._output(arguments, partial(apply, self.model, every, impl=self.impl))
        plain = self._output(arguments, partial(apply, self.model, method, impl="grouped"))
        ours = self._output(arguments, partial(apply, self.model, method, impl=self.impl))
        return max(
            _compared(full, stock, limit, f"{reads}, beside the stock model"),
            _compared(ours, plain, limit, "the method, beside plain torch on the same lists"),
            key=lambda checked: (not checked.passed, checked.error),
        )

    def _checked_methods(self, size: Size, arguments: dict[str, Tensor]) -> tuple[Any, Any, str]:
        """The method, with whatever rounding could change held fast; one that reads everything; and its name."""
        if self.case.is_fine:
            fields = self.case.method_fields(size)
            every = FineGrained(**fields | {"predict": "online", "mass": 1.0, "guard": None})
            lists = self._lists(fine_parts.Fitted(**fields, skipped=self.case.skipped[0]), arguments)
            return fine_parts.Given(**fields, lists=lists), every, "lists of all keys"
        method = self._method(size)
        if self.case.merges:
            merging_parts.check_choice(Merge(**self.case.merging_fields()), self._geometry(size), self.device)
            method = merging_parts.with_fixed_destinations(method)
        every_tile = Hilbert(tiles=1, near="tile", shared="none", far=None, dense_layers=0, dense_steps=0)
        return method, every_tile, "one tile that reads everything"

    def _lists(self, method: fine_parts.Fitted, arguments: dict[str, Tensor]) -> dict[int, Plan]:
        with apply(self.model, method, scheduler=Loop(), impl=self.impl):
            self._output(arguments, nullcontext)
            return method.lists()

    def _output(
        self, arguments: dict[str, Tensor], context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        with torch.no_grad(), context():
            output: Tensor = self.model(**arguments, return_dict=False)[0]
        return output

    def _measured(self, result: ModelResult) -> list[ModelResult]:
        size = result.size
        arguments = self._arguments(size)
        step: Step = partial(self.model, **arguments, return_dict=False)
        variants = self._variants(size, step)
        contexts, functions = self._dense(), dict[str, Step]()
        contexts |= {variant.name or OURS: variant.context for variant in variants}
        contexts[CEILING] = self._with_dense(WithoutAttention)
        functions |= dict.fromkeys(contexts, step) | {
            variant.name or OURS: variant.step for variant in variants
        }
        for name, (context, part) in self._parts(variants[0].method, size, arguments, step).items():
            contexts[name], functions[name] = context, part
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with torch.no_grad():
            timings = measure(functions, self.device, self.effort, contexts)
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        result = replace(result, peak_bytes=peak)
        return [self._result(result, variant, timings, arguments) for variant in variants]

    def _result(
        self,
        result: ModelResult,
        variant: Variant,
        timings: Mapping[str, Timing],
        arguments: dict[str, Tensor],
    ) -> ModelResult:
        """The figures of one variant, after a last look at its output."""
        density = variant.density()
        result = replace(result, variant=variant.name, skipped=variant.skipped, density=density)
        if variant.skipped is not None and abs(1 - density - variant.skipped) > _MISFIT:
            note = f"{1 - density:.1%} of the keys were skipped, not {variant.skipped:.0%}"
            return replace(result, status="check failed", note=note)
        with apply(self.model, variant.method, scheduler=Loop(), impl=self.impl) as handle:
            if not bool(torch.isfinite(self._output(arguments, nullcontext)).all()):
                note = "the output holds values that are not finite"
                return replace(result, status="check failed", note=note)
            summary = str(handle.summary())
        names = [*self._dense(), CEILING, REORDERING, *variant.parts]
        mine = {name: timings[name] for name in names} | {OURS: timings[variant.name or OURS]}
        return replace(result, status="ok", timings=mine, summary=summary)

    # -- what is timed ---------------------------------------------------------------------------------------------

    def _variants(self, size: Size, step: Step) -> list[Variant]:
        if self.case.is_fine:
            return [
                variant
                for skipped in self.case.skipped
                for variant in self._fine_variants(self.case.method_fields(size), skipped, step)
            ]
        method = self._method(size)
        density = partial(self._density, method, size)
        if not self.case.merges:
            return [Variant("", method, self._with_dense(self._applied(method)), step, density)]
        # In a loop in which maps never get old.
        loop = Loop()
        kept = merging_parts.with_kept_maps(method)
        context = self._with_dense(self._applied(kept, loop))
        return [Variant("", method, context, loop.later(step), density, parts=(SELECTING, MERGING))]

    def _fine_variants(self, fields: dict[str, Any], skipped: float, step: Step) -> Iterator[Variant]:
        loop = Loop()
        cached = fine_parts.Fitted(**fields, skipped=skipped, refresh=(0.0,))
        later = loop.later(step)
        context = self._with_dense(self._applied(cached, loop, first=later))
        yield Variant(
            f"{CACHED}, {skipped:.0%} skipped",
            cached,
            context,
            later,
            lambda: cached.kept,
            skipped,
            parts=(REFRESH,),
        )
        online = fine_parts.Fitted(**fields | {"predict": "online", "guard": None}, skipped=skipped)
        context = self._with_dense(self._applied(online))
        yield Variant(f"{ONLINE}, {skipped:.0%} skipped", online, context, step, lambda: online.kept, skipped)

    def _parts(
        self, method: Any, size: Size, arguments: dict[str, Tensor], step: Step
    ) -> dict[str, tuple[Context, Step]]:
        """What a step is made of, or needs at times, by itself."""
        moving = self.made.moving(self.model, arguments, size)
        ordering = method.ordering(self._geometry(size), device=self.device)
        found: dict[str, tuple[Context, Step]] = {
            REORDERING: (nullcontext, partial(moving.by, ordering)),
        }
        if self.case.is_fine:
            loop, same = Loop(), replace(method, readers={})  # the others tell what was kept
            found[REFRESH] = self._with_dense(self._applied(same, loop)), loop.anew(step)
        if self.case.merges:
            parts = merging_parts.Parts(method, self._geometry(size), self.model, self.device, self.dtype)
            # In a step the processor is far ahead of the GPU; here it would be the processor that is timed.
            on_gpu = self.device.type == "cuda"
            merge = captured(parts.merge, self.device) if on_gpu else parts.merge
            found[SELECTING], found[MERGING] = (nullcontext, parts.select), (nullcontext, merge)
        return found

    def _method(self, size: Size) -> Any:
        hilbert = Hilbert(**self.case.method_fields(size))
        if not self.case.merges:
            return hilbert
        merge = Merge(**self.case.merging_fields())
        return merge if self.case.method == "merge" else merge | hilbert

    def _geometry(self, size: Size) -> Geometry:
        return Geometry(size.grid, text=self.case.text)

    def _arguments(self, size: Size) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.made.inputs(self.case, self.model, size, self.device, self.dtype)
        return found

    def _dense(self) -> dict[str, Context]:
        """The stock model with every dense attention; of videos with cuDNN's alone, which is the fastest by far."""
        if self.device.type != "cuda":
            return {"sdpa": nullcontext}
        found: dict[str, Context] = {"cudnn": partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)}
        if not self.case.architecture.is_video:
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

    def _applied(self, method: Any, loop: Loop | None = None, first: Step | None = None) -> Context:
        """The method in a loop, of which the `first` step is done."""

        @contextmanager
        def context() -> Iterator[None]:
            with apply(self.model, method, scheduler=loop, impl=self.impl):
                if first is not None:
                    first()
                yield

        return context

    def _density(self, method: Any, size: Size) -> float:
        """Pairs that a sparse or merged layer reads, of all there are."""
        geometry = self._geometry(size)
        if self.case.merges:
            return merging_parts.density(method, geometry)
        heads = self.model.config.num_attention_heads
        readers = [
            method.layer(geometry, layer, heads=heads, device=self.device) for layer in range(method.phases)
        ]
        pairs: int = sum(reader.num_pairs for reader in readers)
        return pairs / (len(readers) * geometry.num_tokens**2)


def check_size(sizes: Sequence[Size]) -> Size:
    """The smallest, or one that is small enough for eager attention: of 1,024 pixels, or a few frames."""
    smallest = min(sizes, key=lambda size: size.tokens)
    if smallest.tokens <= _CHECKED_TOKENS:
        return smallest
    if smallest.frames == 1:
        return Size(1024, 1024)
    return Size(*NAMED_SIZES["480p"], frames=5)


def _compared(got: Tensor, want: Tensor, limit: float, where: str) -> Checked:
    if not bool(torch.isfinite(got).all()):
        return Checked(float("nan"), limit, f"{where}: the output holds values that are not finite")
    return Checked(relative_error(got, want), limit, where)
