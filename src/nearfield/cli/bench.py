"""`nearfield bench`: one attention call of a method beside dense attention, on this machine, in turns."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
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

OURS = "method"
STEPS = 20
"""Of a denoising loop, for methods whose result depends on earlier steps."""
_CALLS = 20
_CUDA_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_NOT_CHECKED = "not checked beyond being finite: no plan says beforehand who reads whom"
_RANDOM = "note: queries and keys are random; of a model's own this method may read fewer, or more"
_FEW_TOKENS = 8192


class Dense(NamedTuple):
    """The dense attention that was fastest, and what all took."""

    name: str
    timing: Timing
    all: dict[str, Timing]


@dataclass(frozen=True)
class Measured:
    """What one call came to. Figures are None where the answer was wrong."""

    checked: Checked | None
    timing: Timing | None = None
    dense: Dense | None = None
    density: float | None = None
    host_microseconds: float | None = None

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


class Bench:
    """A layer of a method on tensors of a preset's shape.

    Args:
        impl: which implementation reads.
    """

    def __init__(
        self, preset: Preset, method: Method, layer: int, device: torch.device, impl: Impl = "auto"
    ) -> None:
        self.preset, self.method, self.index, self.device, self.impl = preset, method, layer, device, impl
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        geometry = Geometry(preset.grid, text=preset.text)
        self.layer: LayerAttention = method.layer(geometry, layer, heads=preset.heads, device=device)
        self.layer.prepare(preset.batch, preset.heads, training=False)
        generator = torch.Generator(device).manual_seed(0)
        self.inputs: Inputs = tuple(  # type: ignore[assignment]
            torch.randn(preset.shape, generator=generator, device=device, dtype=self.dtype) for _ in range(3)
        )

    def run(self, effort: Effort) -> Measured:
        """Check, then measure."""
        self._bring_to_a_usual_step()
        checked = self._check()
        if checked is not None and not checked.passed:
            return Measured(checked)
        dense = dense_attention(self.inputs, self.device)
        timings = measure({**dense, OURS: self.call}, self.device, effort)
        ours = timings.pop(OURS)
        best = min(timings, key=lambda name: timings[name].median)
        host = host_microseconds(self.call, self.device)
        return Measured(checked, ours, Dense(best, timings[best], timings), self._density(), host)

    def call(self) -> Attended:
        """What is timed."""
        return self.layer.attend(*self.inputs, impl=self.impl)

    def _bring_to_a_usual_step(self) -> None:
        """What depends on earlier steps decides first; then comes a step between two at which it decides."""
        if not self.method.is_stateful:
            return
        self.layer.set_step(Moment(0, STEPS))
        self.call()
        usual = next(
            (step for step in range(1, STEPS) if step not in self.method.refreshes(STEPS)), STEPS - 1
        )
        self.layer.set_step(Moment(usual, STEPS))

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

    def _density(self) -> float | None:
        """The share of pairs that is read: known beforehand, or as calls have counted it."""
        if self.layer.num_pairs is not None:
            return self.layer.num_pairs / self.preset.tokens**2
        stats = self.layer.stats
        return stats.kept if stats is not None and stats.num_sparse else None

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


def dense_attention(inputs: Inputs, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Dense attention as torch offers it: on a GPU by cuDNN and by FlashAttention, where these take the tensors."""
    if device.type != "cuda":
        return {"sdpa": lambda: scaled_dot_product_attention(*inputs)}
    found = dict[str, Callable[[], Tensor]]()
    for name, backend in _CUDA_BACKENDS.items():

        def run(backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs)

        try:
            run()
        except RuntimeError:
            continue
        found[name] = run
    return found or {"sdpa": lambda: scaled_dot_product_attention(*inputs)}


def host_microseconds(call: Callable[[], object], device: torch.device) -> float | None:
    """What a call takes of the processor's time before the GPU has it; None without a GPU, where there is no other."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(_CALLS):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize(device)
    return seconds / _CALLS * 1e6


def document(bench: Bench, measured: Measured) -> dict[str, Any]:
    """Everything, as plain values."""
    dense = measured.dense
    return {
        "format": 1,
        "command": "bench",
        "machine": machine.facts(),
        "preset": bench.preset.name,
        "shape": dict(zip("BHND", bench.preset.shape, strict=True)),
        "grid": list(bench.preset.grid),
        "text": bench.preset.text,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "method": fields.name_of(bench.method),
        "fields": fields.texts_of(bench.method),
        "layer": bench.index,
        "status": "ok" if measured.passed else "check failed",
        "check": check_record(measured.checked),
        "milliseconds": asdict(measured.timing) if measured.timing else None,
        "dense_backend": dense.name if dense else None,
        "dense_milliseconds": {name: asdict(timing) for name, timing in dense.all.items()} if dense else None,
        "speed_up": measured.speed_up,
        "density": measured.density,
        "fraction_of_dense_rate": measured.rate,
        "host_microseconds": measured.host_microseconds,
        "choices": bench.choices(),
    }


def text(bench: Bench, measured: Measured) -> str:
    """The same for people."""
    batch, heads, tokens, dim = bench.preset.shape
    shape = f"batch {batch}, {heads} heads, {tokens:,} tokens, head dimension {dim}"
    lines = [
        f"{machine.device_name(bench.device)}, {str(bench.dtype).removeprefix('torch.')}, kernel only",
        f"{'call':<10}{bench.preset.name}: {shape} ({bench.preset.text} text)",
        f"{'method':<10}{bench.method.label}, layer {bench.index}",
        *_figures(measured),
        f"{'check':<10}{measured.checked or _NOT_CHECKED}",
    ]
    lines += _notes(bench, measured)
    choices = bench.choices()
    lines += (
        choice_lines(choices[0])
        if choices
        else ["  every call makes its own lists, and the choice is made there"]
    )
    return "\n".join(lines)


def _figures(measured: Measured) -> list[str]:
    if measured.timing is None or measured.dense is None:
        return ["no figures: the answer is wrong"]
    lines = [
        f"{'dense':<10}{timing.median:.3f} ms, {name}" for name, timing in sorted(measured.dense.all.items())
    ]
    lines.append(
        f"{'sparse':<10}{measured.timing.median:.3f} ms: {measured.speed_up:.2f}x as fast as {measured.dense.name}"
    )
    if measured.density:
        bound = f"at most {1 / measured.density:.2f}x; pairs are read at {measured.rate:.2f} of dense attention's rate"
        lines.append(f"{'pairs':<10}{measured.density:.1%} kept, {bound}")
    if measured.host_microseconds is not None:
        gpu = measured.timing.median * 1000
        lines.append(
            f"{'host':<10}{measured.host_microseconds:.0f} us per call, where the GPU takes {gpu:.0f} us"
        )
    return lines


def _notes(bench: Bench, measured: Measured) -> list[str]:
    """What a reader must know to judge the figures."""
    notes = [] if bench.method.can_split else [_RANDOM]
    if measured.speed_up is not None and measured.speed_up < 1 and bench.preset.tokens <= _FEW_TOKENS:
        notes.append(f"note: {bench.preset.tokens:,} tokens are few; larger images gain more")
    return notes
