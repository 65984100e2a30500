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

from nearfield import Geometry, Hilbert, Merge, apply
from nearfield._types import Impl
from nearfield.bench import flux_model, merging_parts
from nearfield.bench.check import Checked, relative_error
from nearfield.bench.model_cases import ModelCase, Size
from nearfield.bench.timing import Effort, Timing, measure

OURS, CEILING, REORDERING = "nearfield", "no attention", "reordering"
SELECTING, MERGING = "making maps", "merging"
PARTS = (CEILING, REORDERING, SELECTING, MERGING)
_CHECKED_TOKENS = 4096
Contexts = Mapping[str, Callable[[], AbstractContextManager[Any]]]


class WithoutAttention(TorchFunctionMode):
    """Dense attention gives its values back unread: what a step costs without it. Everything around it stays."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return kwargs["value"] if "value" in kwargs else args[2]
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ModelResult:
    """What one size gave. Figures are None or empty unless `status` is "ok"."""

    case: ModelCase
    size: Size
    status: str
    note: str = ""
    tokens: int = 0
    density: float | None = None
    timings: dict[str, Timing] = field(default_factory=dict)
    summary: str = ""
    peak_bytes: int | None = None

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
        target = self.case.target(self.size)
        return None if target is None or self.speed_up is None else self.speed_up >= target


class ModelBench:
    """One model and what can be done to its attention."""

    def __init__(self, case: ModelCase, device: torch.device, effort: Effort, impl: Impl = "auto") -> None:
        self.case, self.device, self.effort, self.impl = case, device, effort, impl
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model: Any = flux_model.build(case, device, self.dtype)

    def run(self, size: Size) -> ModelResult:
        """Time every variant in turns. What breaks is a result too, so that the other sizes still run."""
        result = ModelResult(self.case, size, "broke", tokens=size.tokens + self.case.text)
        try:
            return self._measured(result)
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # after the handler: the error held on to what was in use
        return replace(result, note=note)

    def check(self, size: Size) -> Checked:
        """Is what will be timed right? The budget is twice what eager attention changes in the stock model.

        With one tile every token reads every other, so the output must be the stock model's: tokens, rotary table and
        text stand where they should. With the method itself it must be what plain torch makes of the same lists, and
        of the same destinations: rounding would change the choice. That one is compared by itself.
        """
        arguments = self._arguments(size)
        method = self._method(size)
        if self.case.merges:
            merging_parts.check_choice(Merge(**self.case.merging_fields()), self._geometry(size), self.device)
            method = merging_parts.with_fixed_destinations(method)
        every = Hilbert(tiles=1, shared="none", far=None, dense_layers=0, dense_steps=0)
        stock = self._output(arguments, nullcontext)
        eager = self._output(arguments, partial(sdpa_kernel, SDPBackend.MATH))
        limit = 2 * relative_error(eager, stock) + torch.finfo(self.dtype).eps
        full = self._output(arguments, partial(apply, self.model, every, impl=self.impl))
        plain = self._output(arguments, partial(apply, self.model, method, impl="grouped"))
        ours = self._output(arguments, partial(apply, self.model, method, impl=self.impl))
        return max(
            _compared(full, stock, limit, "one tile that reads everything, beside the stock model"),
            _compared(ours, plain, limit, "the method, beside plain torch on the same lists"),
            key=lambda checked: (not checked.passed, checked.error),
        )

    def _output(
        self, arguments: dict[str, Tensor], context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        with torch.no_grad(), context():
            output: Tensor = self.model(**arguments, return_dict=False)[0]
        return output

    def _measured(self, result: ModelResult) -> ModelResult:
        size, method = result.size, self._method(result.size)
        arguments = self._arguments(size)
        contexts = self._contexts(method)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with torch.no_grad():
            step = partial(self.model, **arguments, return_dict=False)
            functions: dict[str, Callable[[], object]] = dict.fromkeys(contexts, step)
            functions[REORDERING] = self._reordering(method, size, arguments)
            if self.case.merges:
                loop = merging_parts.Loop()
                contexts = {**contexts, OURS: self._merged(method, loop)}
                functions[OURS] = merging_parts.next_step(loop, step)
                parts = merging_parts.Parts(method, self._geometry(size), self.model, self.device, self.dtype)
                functions |= {SELECTING: parts.select, MERGING: parts.merge}
            timings = measure(functions, self.device, self.effort, contexts)
        with apply(self.model, method, impl=self.impl) as handle:
            if not bool(torch.isfinite(self._output(arguments, nullcontext)).all()):
                return replace(
                    result, status="check failed", note="the output holds values that are not finite"
                )
            summary = str(handle.summary())
        return replace(
            result,
            status="ok",
            density=self._density(method, size),
            timings=timings,
            summary=summary,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )

    def _method(self, size: Size) -> Any:
        hilbert = Hilbert(**self.case.method_fields(size))
        if not self.case.merges:
            return hilbert
        merge = Merge(**self.case.merging_fields())
        return merge if self.case.method == "merge" else merge | hilbert

    def _merged(self, method: Any, loop: Any) -> Callable[[], AbstractContextManager[Any]]:
        """The method in a loop in which maps never get old; where attention is dense, that of cuDNN."""

        @contextmanager
        def context() -> Iterator[None]:
            backend = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.device.type == "cuda" else nullcontext()
            kept = merging_parts.with_kept_maps(method)
            with backend, apply(self.model, kept, scheduler=loop, impl=self.impl):
                yield

        return context

    def _geometry(self, size: Size) -> Geometry:
        return Geometry(size.grid, text=self.case.text)

    def _arguments(self, size: Size) -> dict[str, Tensor]:
        return flux_model.inputs(self.case, self.model, size, self.device, self.dtype)

    def _contexts(self, method: Any) -> Contexts:
        """Every way to run the step."""
        dense: dict[str, Callable[[], AbstractContextManager[Any]]] = {"sdpa": nullcontext}
        if self.device.type == "cuda":
            backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
            dense = {name: partial(sdpa_kernel, backend) for name, backend in backends.items()}
        return {**dense, OURS: partial(apply, self.model, method, impl=self.impl), CEILING: WithoutAttention}

    def _reordering(
        self, method: Any, size: Size, arguments: dict[str, Tensor]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """What is moved in a step: latents and their places at the entrance, hidden states before the output."""
        ordering = method.ordering(self._geometry(size), device=self.device)
        latents, places = arguments["hidden_states"], arguments["img_ids"]
        width = self.model.config.num_attention_heads * self.model.config.attention_head_dim
        states = torch.randn(1, size.tokens, width, device=self.device, dtype=self.dtype)
        return lambda: (ordering.enter(latents), ordering.enter(places, dim=0), ordering.leave(states))

    def _density(self, method: Any, size: Size) -> float:
        """Pairs that a sparse or merged layer reads, of all there are."""
        geometry = self._geometry(size)
        if self.case.merges:
            return merging_parts.density(method, geometry)
        heads = self.model.config.num_attention_heads
        readers = [
            method.reader(geometry, layer, heads=heads, device=self.device) for layer in range(method.cycle)
        ]
        pairs: int = sum(reader.num_pairs for reader in readers)
        return pairs / (len(readers) * geometry.num_tokens**2)


def check_size(sizes: Sequence[Size]) -> Size:
    """The smallest image, or one of 1,024 pixels where that is too large for eager attention."""
    smallest = min(sizes, key=lambda size: size.tokens)
    return smallest if smallest.tokens <= _CHECKED_TOKENS else Size(1024, 1024)


def _compared(got: Tensor, want: Tensor, limit: float, where: str) -> Checked:
    if not bool(torch.isfinite(got).all()):
        return Checked(float("nan"), limit, f"{where}: the output holds values that are not finite")
    return Checked(relative_error(got, want), limit, where)
