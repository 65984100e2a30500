"""`nearfield bench --model`: one call of a user's model, dense and with a method, and one attention call of it."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from nearfield import Geometry, LayerAttention, Method, apply
from nearfield._types import Impl
from nearfield.cli import bench, machine
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.presets import Preset
from nearfield.cli.timing import Effort, measure
from nearfield.diffusers import Opened, step_arguments
from nearfield.methods import Composition, fields, full_layer

_CHECKED = (256, 256, 5)
"""Height, width and frames of the image on which outputs are compared: small enough for eager attention."""
_HOST_CALLS = 3


class Loop:
    """A denoising loop as far as `apply` asks for one: it stands at `step_index` of `timesteps`."""

    def __init__(self, total: int = bench.STEPS) -> None:
        self.step_index, self.timesteps = 0, range(total)


class Everything(Method):
    """Everyone reads everyone: what comes out must be what the model gives by itself."""

    def layer(self, geometry: Geometry, index: int = 0, **options: Any) -> LayerAttention:
        return full_layer(geometry.num_tokens, str(options.get("device", "cpu")))


class _Shapes(TorchFunctionMode):
    """Notes the shapes of queries that read as many keys."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Sequence[int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(zip(("query", "key"), args, strict=False)) | (kwargs or {})
        is_attention = func is torch.nn.functional.scaled_dot_product_attention
        if is_attention and given["query"].shape[2] == given["key"].shape[2]:
            self.found.append(tuple(given["query"].shape))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class MeasuredStep:
    """What a step came to, and the attention call in it that has most tokens.

    Args:
        summary: what `apply` changed, and what it did not.
        call: None where the method merges tokens, or the answer is wrong.
    """

    step: bench.Measured
    geometry: Geometry
    num_layers: int
    summary: str
    call: tuple[bench.Bench, bench.Measured] | None

    @property
    def passed(self) -> bool:
        return self.step.passed and (self.call is None or self.call[1].passed)


class StepBench:
    """A model with a method.

    Args:
        name: what the user called the model.
        pixels: height, width and frames.
        text: tokens of text; None: what is usual for the model.
    """

    def __init__(
        self,
        name: str,
        opened: Opened,
        method: Method,
        pixels: tuple[int, int, int],
        text: int | None,
        device: torch.device,
        impl: Impl = "auto",
    ) -> None:
        self.name, self.opened, self.model, self.method = name, opened, opened.model, method
        self.pixels, self.text, self.device, self.impl = pixels, text, device, impl
        composition = Composition.of(method)
        self.num_dense = sum(composition.num_dense_steps(bench.STEPS))
        self.sparse: Method = composition.sparse_form() if self.num_dense else composition
        self.arguments = step_arguments(self.model, pixels, text)

    def run(self, effort: Effort) -> MeasuredStep:
        """Check, then measure."""
        shapes = _Shapes()
        with shapes:
            self._output()
        with self._applied(self.sparse) as handle:
            finite = bool(self._output().isfinite().all())
            about = handle.geometry(), handle.num_layers, handle.pairs_kept(), str(handle.summary())
        geometry, num_layers, density, summary = about
        if geometry is None or not shapes.found:
            raise NotImplementedError(f"no attention was taken over:\n{summary}")
        step = self._measured(effort, density, finite)
        call = (
            self._call(geometry, max(shapes.found, key=lambda shape: shape[2]), effort)
            if step.passed
            else None
        )
        return MeasuredStep(step, geometry, num_layers, summary, call)

    def _measured(self, effort: Effort, density: float | None, finite: bool) -> bench.Measured:
        checked = self._checked() if finite else Checked(float("nan"), 0.0, "the output is not finite")
        if not checked.passed:
            return bench.Measured(checked)
        contexts = bench.dense_contexts(self.device) | {bench.OURS: partial(self._applied, self.sparse)}
        timings = measure(dict.fromkeys(contexts, self._output), self.device, effort, contexts)
        ours, best = timings.pop(bench.OURS), bench.Dense.of(timings)
        hosts = [self._host(contexts[name]) for name in (bench.OURS, best.name)]
        return bench.Measured(checked, ours, best, density, *hosts)

    def _host(self, context: bench.Context) -> float | None:
        with context():
            self._output()
            return bench.host_microseconds(self._output, self.device, _HOST_CALLS)

    def _output(self) -> Tensor:
        return self._of(self.arguments)

    def _of(self, arguments: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            found = self.model(**arguments, return_dict=False)[0]
        return torch.stack(list(found)) if isinstance(found, list) else found

    @contextmanager
    def _applied(self, method: Method) -> Iterator[Any]:
        """The method at a step between two at which it decides anew."""
        loop = Loop()
        dense = next(iter(bench.dense_contexts(self.device).values()))
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # of what it does to pictures, which nobody sees here
            handle = apply(self.model, method, scheduler=loop, impl=self.impl)
        with dense(), handle:
            if method.is_stateful:
                self._output()
            loop.step_index = bench.usual_step(method)
            yield handle

    def _checked(self) -> Checked:
        """On a small image, with everything read, the output must be the stock model's.

        It may differ by twice what eager attention changes in that. So tokens, positions and text are where they
        should be; the call by itself is compared with float64.
        """
        small = tuple(min(side, most) for side, most in zip(self.pixels, _CHECKED, strict=True))
        arguments = step_arguments(self.model, small, self.text)  # type: ignore[arg-type]
        stock = self._of(arguments)
        with sdpa_kernel(SDPBackend.MATH):
            eager = self._of(arguments)
        with apply(self.model, Everything(), impl=self.impl):
            got = self._of(arguments)
        limit = 2 * relative_error(eager, stock) + torch.finfo(stock.dtype).eps
        return Checked(relative_error(got, stock), limit, "everything read, compared with the stock model")

    def _call(
        self, geometry: Geometry, shape: Sequence[int], effort: Effort
    ) -> tuple[bench.Bench, bench.Measured] | None:
        """The largest call. Methods that merge have none that could be compared."""
        composition = Composition.of(self.method)
        if composition.merge is not None or composition.attention is None:
            return None
        batch, heads, _, head_dim = shape
        preset = Preset("its largest", batch, heads, head_dim, geometry.grid, geometry.text, kept=1)
        call = bench.Bench(preset, composition.attention, 0, self.device, self.impl, geometry)
        return call, call.run(effort)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def over_generation(made: StepBench, measured: MeasuredStep) -> float | None:
    """How much faster a generation is with its dense steps, reckoned from one step of each kind."""
    if measured.step.speed_up is None:
        return None
    share = made.num_dense / bench.STEPS
    return 1 / (share + (1 - share) / measured.step.speed_up)


def document(made: StepBench, measured: MeasuredStep) -> dict[str, Any]:
    """Everything, as plain values."""
    call = measured.call
    return {
        "format": 1,
        "command": "bench",
        "machine": machine.facts(),
        "model": made.name,
        "class": type(made.model).__name__,
        "parameters": made.num_parameters,
        "has_random_weights": made.opened.has_random_weights,
        "dtype": str(made.model.dtype).removeprefix("torch."),
        "pixels": list(made.pixels),
        "images": [list(grid) for grid in measured.geometry.images],
        "text": measured.geometry.text,
        "num_layers": measured.num_layers,
        "method": fields.name_of(made.method),
        "fields": fields.texts_of(made.method),
        "step": bench.figures(measured.step),
        "dense_steps": made.num_dense,
        "num_steps": bench.STEPS,
        "speed_up_over_generation": over_generation(made, measured),
        "call": None if call is None else bench.record(*call),
        "summary": measured.summary,
    }


def text(made: StepBench, measured: MeasuredStep) -> str:
    """The same for people."""
    height, width, frames = made.pixels
    size = f"{height}x{width}" + (f", {frames} frames" if frames > 1 else "")
    weights = ", random weights" if made.opened.has_random_weights else ""
    dtype = str(made.model.dtype).removeprefix("torch.")
    lines = [
        f"{machine.device_name(made.device)}, {dtype}",
        f"{'model':<10}{type(made.model).__name__}, {made.num_parameters:,} parameters{weights}",
        f"{'image':<10}{size} pixels: {measured.geometry}, {measured.num_layers} attention layers",
        f"{'method':<10}{made.method.label}",
        "",
        "one call of the model, where the method is sparse:",
        *bench.figure_lines(measured.step),
    ]
    if measured.step.density:
        lines.append(f"{'pairs':<10}{measured.step.density:.1%} kept by its attention")
    lines.append(f"{'check':<10}{measured.step.checked}")
    whole = over_generation(made, measured)
    if whole is not None and made.num_dense:
        lines.append(
            f"{'steps':<10}{made.num_dense} of {bench.STEPS} stay dense: a generation is {whole:.2f}x as fast"
            " (reckoned)"
        )
    if measured.call is not None:
        lines += ["", "one attention call of it, on random tensors:", *bench.lines(*measured.call)]
    return "\n".join([*lines, "", measured.summary])
