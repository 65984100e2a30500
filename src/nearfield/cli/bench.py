"""`nearfield bench`: one attention call of a method, timed in turns with dense attention on this machine."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Geometry
from nearfield._types import Attended, Impl, Moment
from nearfield.cli import machine
from nearfield.cli.check import Checked, Inputs, check_forward, poisoned_memory
from nearfield.cli.doctor import choice_lines, choice_record
from nearfield.cli.presets import Preset
from nearfield.cli.reports import check_record
from nearfield.cli.timing import Effort, Timing, measure
from nearfield.methods import LayerAttention, Method, fields

Context = Callable[[], AbstractContextManager[Any]]
OURS = "method"
STEPS = 20
"""Of a denoising loop, for methods whose result depends on earlier steps."""
_CALLS = 20
_CUDA_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_NOT_CHECKED = "not checked beyond being finite: no plan says beforehand who reads whom"
_NO_CHOICE = "  every call makes its own lists, and the choice is made there"
_BOUNDS = {"gpu": "GPU", "host": "host"}
_NEARLY = 0.9
"""Where the host needs this share of the measured time, the GPU waits for it."""
_RANDOM = "note: queries and keys are random; of a model's own this method may read fewer, or more"
_FEW_TOKENS = 8192


class Dense(NamedTuple):
    """The dense attention that was fastest, and what all took."""

    name: str
    timing: Timing
    all: dict[str, Timing]

    @classmethod
    def of(cls, timings: dict[str, Timing]) -> "Dense":
        best = min(timings, key=lambda name: timings[name].median)
        return cls(best, timings[best], timings)


@dataclass(frozen=True)
class Measured:
    """What a call, or a step of a model, came to. Figures are None where the answer was wrong.

    Args:
        density: the share of pairs that is read.
        host_microseconds, dense_host_microseconds: what the host needs to launch it, and the fastest dense one; None
            without a GPU.
    """

    checked: Checked | None
    timing: Timing | None = None
    dense: Dense | None = None
    density: float | None = None
    host_microseconds: float | None = None
    dense_host_microseconds: float | None = None

    @property
    def passed(self) -> bool:
        return self.checked is None or self.checked.passed

    @property
    def speed_up(self) -> float | None:
        return (
            None
            if self.timing is None or self.dense is None
            else self.dense.timing.median / self.timing.median
        )

    @property
    def rate(self) -> float | None:
        """Pairs per second over dense attention's: what of the saved pairs is saved time."""
        return None if self.speed_up is None or self.density is None else self.speed_up * self.density

    @property
    def bound_by(self) -> str | None:
        """Whether the "host" or the "gpu" takes longer; None without a GPU."""
        if self.timing is None or self.host_microseconds is None:
            return None
        return "host" if self.host_microseconds >= _NEARLY * 1000 * self.timing.median else "gpu"


class Bench:
    """A layer of a method on random tensors of a preset's shape.

    Args:
        impl: which implementation reads.
        geometry: where text and image stand; by default text first.
    """

    def __init__(
        self,
        preset: Preset,
        method: Method,
        layer: int,
        device: torch.device,
        impl: Impl = "auto",
        geometry: Geometry | None = None,
    ) -> None:
        self.preset, self.method, self.index, self.device, self.impl = preset, method, layer, device, impl
        self.dtype = usual_dtype(device)
        geometry = geometry or Geometry(preset.grid, text=preset.text)
        self.layer: LayerAttention = method.layer(geometry, layer, heads=preset.heads, device=device)
        self.layer.prepare(preset.batch, preset.heads, training=False)
        generator = torch.Generator(device).manual_seed(0)
        self.inputs: Inputs = tuple(  # type: ignore[assignment]
            torch.randn(preset.shape, generator=generator, device=device, dtype=self.dtype) for _ in range(3)
        )

    def run(self, effort: Effort) -> Measured:
        """Check, then measure."""
        in_a_usual_step(self.method, self.layer, self.call)
        checked = self._check()
        if checked is not None and not checked.passed:
            return Measured(checked)
        dense = {name: partial(self._dense, context) for name, context in self._dense_contexts().items()}
        timings = measure({**dense, OURS: self.call}, self.device, effort)
        ours, best = timings.pop(OURS), Dense.of(timings)
        hosts = (host_microseconds(each, self.device) for each in (self.call, dense[best.name]))
        return Measured(checked, ours, best, density_of(self.layer, self.preset.tokens), *hosts)

    def call(self) -> Attended:
        """What is timed."""
        return self.layer.attend(*self.inputs, impl=self.impl)

    def _dense(self, context: Context) -> Tensor:
        with context():
            return scaled_dot_product_attention(*self.inputs)

    def _dense_contexts(self) -> dict[str, Context]:
        """The kernels of dense attention that take these tensors."""
        known, found = dense_contexts(self.device), dict[str, Context]()
        for name, context in known.items():
            with suppress(RuntimeError):
                self._dense(context)
                found[name] = context
        return found or {"sdpa": nullcontext}

    def _check(self) -> Checked | None:
        """Against float64, where plans say beforehand who reads whom; fresh memory holds NaN meanwhile."""
        with poisoned_memory():
            out, lse = self.call()
        if not bool(torch.isfinite(out).all()):
            return Checked(float("nan"), 0.0, "out holds values that are not finite")
        if not self.method.can_split:
            return None
        known: Any = self.layer  # a `PlanLayer`, where tokens may be split over ranks
        return check_forward(self.inputs, known.near, out, lse, far=known.far, summary=known.summary)

    def choices(self) -> list[dict[str, Any]]:
        """What runs each plan, and why."""
        query, key = self.inputs[:2]
        found = []
        for plan in self.layer.plans_like(self.device):
            keys = key[:, :, : plan.num_keys] if plan.num_keys <= key.shape[2] else key
            found.append(
                {
                    way: choice_record(query, keys, plan, backward=way == "backward")
                    for way in ("forward", "backward")
                }
            )
        return found


def in_a_usual_step(method: Method, layer: LayerAttention, call: Callable[[], object]) -> None:
    """Bring a layer whose result depends on earlier steps to a step between two at which it decides anew."""
    if not method.is_stateful:
        return
    layer.set_step(Moment(0, STEPS))
    call()
    layer.set_step(Moment(usual_step(method), STEPS))


def usual_step(method: Method) -> int:
    """The first step at which a method decides nothing anew."""
    return next((step for step in range(1, STEPS) if step not in method.refreshes(STEPS)), STEPS - 1)


def density_of(layer: LayerAttention, num_tokens: int) -> float | None:
    """The share of pairs that a layer reads, known beforehand or counted by its calls; None where nobody knows."""
    if layer.num_pairs is not None:
        return layer.num_pairs / num_tokens**2
    stats = layer.stats
    return stats.kept if stats is not None and stats.num_sparse else None


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def dense_contexts(device: torch.device) -> dict[str, Context]:
    """Dense attention as torch offers it: on a GPU by cuDNN and by FlashAttention."""
    if device.type != "cuda":
        return {"sdpa": nullcontext}
    return {name: partial(sdpa_kernel, backend) for name, backend in _CUDA_BACKENDS.items()}


def host_microseconds(call: Callable[[], object], device: torch.device, calls: int = _CALLS) -> float | None:
    """What a call takes of the host's time before the GPU has it; None without a GPU, where there is no other."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return seconds / calls * 1e6


def document(bench: Bench, measured: Measured) -> dict[str, Any]:
    """Everything, as plain values."""
    return {"format": 1, "command": "bench", "machine": machine.facts(), **record(bench, measured)}


def record(bench: Bench, measured: Measured) -> dict[str, Any]:
    """One call, as plain values."""
    return {
        "preset": bench.preset.name,
        "shape": dict(zip("BHND", bench.preset.shape, strict=True)),
        "grid": list(bench.preset.grid),
        "text": bench.preset.text,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "method": fields.name_of(bench.method),
        "fields": fields.texts_of(bench.method),
        "layer": bench.index,
        **figures(measured),
        "fraction_of_dense_rate": measured.rate,
        "choices": bench.choices(),
    }


def figures(measured: Measured) -> dict[str, Any]:
    """What was measured of a call or of a step."""
    dense = measured.dense
    return {
        "status": "ok" if measured.passed else "check failed",
        "check": check_record(measured.checked),
        "milliseconds": asdict(measured.timing) if measured.timing else None,
        "dense_backend": dense.name if dense else None,
        "dense_milliseconds": {name: asdict(timing) for name, timing in dense.all.items()} if dense else None,
        "speed_up": measured.speed_up,
        "density": measured.density,
        "host_microseconds": measured.host_microseconds,
        "dense_host_microseconds": measured.dense_host_microseconds,
        "bound_by": measured.bound_by,
    }


def text(bench: Bench, measured: Measured) -> str:
    """The same for people."""
    head = f"{machine.device_name(bench.device)}, {str(bench.dtype).removeprefix('torch.')}, kernel only"
    return "\n".join([head, *lines(bench, measured)])


def lines(bench: Bench, measured: Measured) -> list[str]:
    """One call for people."""
    batch, heads, tokens, dim = bench.preset.shape
    shape = f"batch {batch}, {heads} heads, {tokens:,} tokens, head dimension {dim}"
    choices = bench.choices()
    return [
        f"{'call':<10}{bench.preset.name}: {shape} ({bench.preset.text} text)",
        f"{'method':<10}{bench.method.label}, layer {bench.index}",
        *figure_lines(measured),
        *_pair_lines(measured),
        f"{'check':<10}{measured.checked or _NOT_CHECKED}",
        *_notes(bench, measured),
        *(choice_lines(choices[0]) if choices else [_NO_CHOICE]),
    ]


def figure_lines(measured: Measured) -> list[str]:
    """What was measured of a call or of a step, for people."""
    if measured.timing is None or measured.dense is None:
        return ["no figures: the answer is wrong"]
    found = [
        f"{'dense':<10}{timing.median:.3f} ms, {name}" for name, timing in sorted(measured.dense.all.items())
    ]
    found.append(
        f"{'sparse':<10}{measured.timing.median:.3f} ms: {measured.speed_up:.2f}x as fast as {measured.dense.name}"
    )
    if measured.host_microseconds is not None:
        gpu = measured.timing.median * 1000
        found.append(
            f"{'host':<10}{measured.host_microseconds:.0f} us (dense {measured.dense_host_microseconds:.0f}), where the"
            f" GPU takes {gpu:.0f} us: the {_BOUNDS[measured.bound_by or 'gpu']} bounds it"
        )
    return found


def _pair_lines(measured: Measured) -> list[str]:
    if measured.timing is None or not measured.density:
        return []
    bound = f"at most {1 / measured.density:.2f}x; pairs are read at {measured.rate:.2f} of dense attention's rate"
    return [f"{'pairs':<10}{measured.density:.1%} kept, {bound}"]


def _notes(bench: Bench, measured: Measured) -> list[str]:
    """What a reader must know to judge the figures."""
    notes = [] if bench.method.can_split else [_RANDOM]
    if measured.speed_up is not None and measured.speed_up < 1 and bench.preset.tokens <= _FEW_TOKENS:
        notes.append(f"note: {bench.preset.tokens:,} tokens are few; larger images gain more")
    return notes
