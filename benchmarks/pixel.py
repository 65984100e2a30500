"""Measure training on pixels: tokens per second of whole training steps, for every attention in turns.

What is timed is the step that `nearfield train pixel` makes: forward, backward, clipping, AdamW, moving average.
"""

import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pixel_cases import TARGETS, Variant
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.report import table
from nearfield.cli.timing import Effort, Timing, measure
from nearfield_lab.embedded.model import num_parameters
from nearfield_lab.embedded.pixel import PixelConfig, PixelTransformer
from nearfield_lab.embedded.sampler import precision
from nearfield_lab.training.data import Pixels
from nearfield_lab.training.loop import Schedule
from nearfield_lab.training.pixel import PixelRecipe, PixelTraining
from nearfield_lab.training.runs import Backend, attention_backend, quiet_compiling

_CHECKED_SIDE = 24
_EVERYTHING: dict[str, dict[str, Any]] = {
    "loglinear": {"topk": 2**20, "levels": 1, "enrich": 0},
    "gatedblocks": {"topk": 2**20},
    "sparselinear": {"topk": 2**20},
}


@dataclass(frozen=True)
class PixelTask:
    """What is trained.

    Args:
        size, batch: of the pictures.
        compiled: by torch.compile.
        sizes: fields of the model, where they are not the paper's.
    """

    size: int = 128
    batch: int = 16
    compiled: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Per step."""
        return self.batch * self.size**2

    def config(self, variant: Variant) -> PixelConfig:
        attention: Any = variant.attention
        return PixelConfig(attention=attention, fields=variant.fields, size=self.size, **self.sizes)


@dataclass(frozen=True)
class PixelResult:
    """What one line gave. Figures are None unless `status` is "ok"."""

    variant: Variant
    kernel: Backend
    status: str
    note: str = ""
    timing: Timing | None = None
    peak_bytes: int | None = None
    parameters: int = 0

    @property
    def name(self) -> str:
        return self.variant.name if self.kernel == "auto" else f"{self.variant.name}, {self.kernel}"

    def tokens_per_second(self, task: PixelTask) -> float | None:
        return None if self.timing is None else 1000 * task.tokens / self.timing.median


class PixelBench:
    """Measures all lines of one task.

    Args:
        dense_kernels: torch's kernels that full attention is measured with; by default those that are fast there.
    """

    def __init__(
        self,
        task: PixelTask,
        device: torch.device,
        effort: Effort,
        dense_kernels: Sequence[Backend] | None = None,
    ) -> None:
        self.task, self.device, self.effort = task, device, effort
        fast: tuple[Backend, ...] = ("cudnn", "flash") if device.type == "cuda" else ("auto",)
        self.dense_kernels = fast if dense_kernels is None else tuple(dense_kernels)
        generator = torch.Generator().manual_seed(0)
        self.pixels = Pixels(
            torch.randint(
                0, 256, (task.batch, 3, task.size, task.size), generator=generator, dtype=torch.uint8
            )
        )

    def run(self, variants: Sequence[Variant], announce: Callable[[str], None]) -> list[PixelResult]:
        """Make one step with each, then time those that could. What breaks is a result, too."""
        with tempfile.TemporaryDirectory() as folder, quiet_compiling():
            steps: dict[str, Callable[[], object]] = {}
            contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
            results = list[PixelResult]()
            for result in self.lines(variants):
                announce(f"{result.name}: first step")
                tried, training = self._tried(result, Path(folder))
                results.append(tried)
                if training is not None:
                    steps[tried.name] = training.loop.advance
                    contexts[tried.name] = partial(attention_backend, tried.kernel)
            announce(f"timing {len(steps)} in turns")
            timings = measure(steps, self.device, self.effort, contexts) if steps else {}
        return [
            replace(result, status="ok", timing=timings[result.name]) if result.name in timings else result
            for result in results
        ]

    def lines(self, variants: Sequence[Variant]) -> list[PixelResult]:
        """Full attention once per kernel of torch."""
        return [
            PixelResult(variant, kernel, "broke")
            for variant in variants
            for kernel in (self.dense_kernels if variant.attention == "full" else ("auto",))
        ]

    def _tried(self, result: PixelResult, folder: Path) -> tuple[PixelResult, PixelTraining | None]:
        try:
            checked = check(result.variant, self.device)
            if not checked.passed:
                return replace(result, status="check failed", note=str(checked)), None
            recipe = PixelRecipe(
                self.task.config(result.variant),
                batch=self.task.batch,
                dense_kernel=result.kernel,
                compiled=self.task.compiled,
                samples=0,
            )
            training = PixelTraining(self.pixels, folder, recipe, Schedule(steps=1), device=self.device)
            with attention_backend(result.kernel):
                training.loop.advance()  # compiles
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
                loss = float(training.loop.advance())
        except Exception as error:
            note = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            is_cuda = self.device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(self.device) if is_cuda else None
            made = replace(result, peak_bytes=peak, parameters=num_parameters(training.model))
            if math.isfinite(loss):
                return made, training
            return replace(made, status="check failed", note=f"the loss is {loss}"), None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # after the handler: the error held on to what was in use
        return replace(result, note=note), None


def check(variant: Variant, device: torch.device) -> Checked:
    """With everything chosen, and its second branch closed, a model must give what the full one gives.

    It may differ by twice what eager attention changes in the full model.
    """
    if variant.attention == "full":
        return Checked(0.0, 0.0, "the full model")
    full = _lively(Variant("full", "full"), device)
    everything = dict(variant.fields) | _EVERYTHING[variant.attention]
    sparse = _lively(replace(variant, fields=everything), device)
    weights = {name: torch.zeros_like(value) for name, value in sparse.state_dict().items()}
    sparse.load_state_dict(weights | full.state_dict())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, _CHECKED_SIDE, _CHECKED_SIDE, generator=generator).to(device)
    want, eager = (_output(full, images, kernel) for kernel in ("auto", "math"))
    limit = 2 * relative_error(eager, want) + torch.finfo(_precision(device)).eps
    error = relative_error(_output(sparse, images, "auto"), want)
    return Checked(error, limit, f"{variant.name} with everything chosen, beside the full model")


def _lively(variant: Variant, device: torch.device) -> PixelTransformer:
    """Random weights also where a new model has zeros, so that its output depends on everything."""
    attention: Any = variant.attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PixelTransformer(PixelConfig(layers=2, heads=2, attention=attention, fields=variant.fields))
        for parameter in model.parameters():
            if not bool(parameter.any()):
                nn.init.normal_(parameter, std=0.3)
    return model.to(device)


@torch.no_grad()
def _output(model: PixelTransformer, images: Tensor, kernel: Backend) -> Tensor:
    with attention_backend(kernel), precision(images.device):
        out: Tensor = model(images, torch.full((1,), 0.5, device=images.device))
    return out


def _precision(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def best_full(results: Sequence[PixelResult], task: PixelTask) -> float | None:
    """Tokens per second of the fastest full attention."""
    rates = [result.tokens_per_second(task) for result in results if result.variant.attention == "full"]
    return max((rate for rate in rates if rate is not None), default=None)


def results_table(results: Sequence[PixelResult], task: PixelTask) -> str:
    """Every attention as a line; what was wrong is named below, without figures."""
    full = best_full(results, task)
    lines = [["attention", "ms per step", "tokens/s", "over full", "to reach", "peak memory"]]
    for result in results:
        rate = result.tokens_per_second(task)
        target = TARGETS.get(task.size) if result.variant.attention == "loglinear" else None
        lines.append(
            [
                result.name,
                f"{result.timing.median:.1f}" if result.timing else "-",
                f"{rate:,.0f}" if rate else "-",
                f"{rate / full:.2f}x" if rate and full else "-",
                f"{target:.0f}x" if target else "-",
                f"{result.peak_bytes / 2**30:.1f} GiB" if result.peak_bytes else "-",
            ]
        )
    notes = [f"{result.name}: {result.status}: {result.note}" for result in results if result.status != "ok"]
    return "\n".join([table(lines), *notes])


def as_json(results: Sequence[PixelResult], task: PixelTask, machine: dict[str, Any]) -> dict[str, Any]:
    """A document with the machine's facts and every line's figures (null where there are none)."""
    full = best_full(results, task)
    return {
        "format": 1,
        "benchmark": "pixel",
        "machine": machine,
        "task": asdict(task) | {"tokens_per_step": task.tokens},
        "results": [_record(result, task, full) for result in results],
    }


def _record(result: PixelResult, task: PixelTask, full: float | None) -> dict[str, Any]:
    rate = result.tokens_per_second(task)
    return {
        "name": result.name,
        "attention": result.variant.attention,
        "fields": dict(result.variant.fields),
        "dense_kernel": result.kernel if result.variant.attention == "full" else None,
        "status": result.status,
        "note": result.note,
        "milliseconds": asdict(result.timing) if result.timing else None,
        "tokens_per_second": rate,
        "over_full": rate / full if rate and full else None,
        "target": TARGETS.get(task.size) if result.variant.attention == "loglinear" else None,
        "peak_bytes": result.peak_bytes,
        "parameters": result.parameters,
    }
