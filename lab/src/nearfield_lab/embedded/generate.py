"""The main job: pictures by the dense model and by the sparse one, from the same noise, with times and likeness."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nearfield.diffusers import Switch, apply
from nearfield.layout import Geometry
from nearfield.methods import Method
from nearfield_lab.embedded.model import EMBEDDED, from_diffusers
from nearfield_lab.embedded.pictures import Row
from nearfield_lab.embedded.sampler import DemoPipeline, OnStep, Sampled

Sampler = Callable[[], Sampled]
Measure = Callable[[Tensor, Tensor], float]


class NoWeights(FileNotFoundError):
    """The embedded model's weights are not part of this installation."""


class Run(NamedTuple):
    """Pictures made in one way.

    Args:
        summary: what `apply` changed; empty for the dense model.
        geometry: where the tokens stood, as `apply` found; None for the dense model.
    """

    name: str
    images: Tensor
    seconds: tuple[float, ...]
    summary: str = ""
    geometry: Geometry | None = None

    @property
    def seconds_per_step(self) -> float:
        """The mean over all steps, without the first: that one warms up. Not the median, which dense steps among sparse
        ones would have no part in."""
        return statistics.fmean(self._timed)

    @property
    def extremes(self) -> tuple[float, float]:
        """The shortest and the longest of these steps; of the dense model they should be much the same."""
        return min(self._timed), max(self._timed)

    @property
    def _timed(self) -> tuple[float, ...]:
        return self.seconds[1:] or self.seconds


def embedded_weights() -> Path:
    """The file of the shipped model."""
    if not EMBEDDED.exists():
        raise NoWeights(
            "the embedded model's weights are not in this installation. Train them with `nearfield train demo`,"
            " and name the file with `--weights FILE`"
        )
    return EMBEDDED


def run_dense(sample: Sampler) -> Run:
    """Pictures by the model as it is."""
    return Run("dense", *sample())


def run_sparse(
    sample: Sampler,
    pipeline: Any,
    method: Method,
    mesh: DeviceMesh | None = None,
    lora: str | Switch | None = None,
) -> Run:
    """Pictures with the attention that a method says; each over all ranks of a mesh, if there is one.

    Args:
        lora: one that is switched on, and rests in dense steps.
    """
    with apply(pipeline, method, mesh=mesh, lora=lora) as handle:
        sampled = sample()
        return Run(method.label, *sampled, handle.summary(), handle.geometry())


def demo_sampler(pipeline: DemoPipeline, num: int, on_step: OnStep | None = None, **options: Any) -> Sampler:
    """Pictures of the embedded model; `options` are those of its pipeline."""
    return lambda: pipeline(num, on_step=on_step, **options)


# -- other models --------------------------------------------------------------------------------------------------


def open_pipeline(name: str, device: torch.device) -> Any:
    """A diffusers pipeline by its id on the Hub, or from a folder. Raises OSError where there is none."""
    kind = from_diffusers("DiffusionPipeline")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with warnings.catch_warnings():
        # The name that the oldest supported diffusers knows.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        try:
            pipeline = kind.from_pretrained(name, torch_dtype=dtype)
        except ValueError as error:
            # A path that is not there, a name that cannot be an id, or parts that are not known.
            raise OSError(f"{name!r} cannot be opened as a pipeline of diffusers: {error}") from None
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def pipeline_sampler(
    pipeline: Any,
    prompt: str | Mapping[str, Any],
    num: int,
    *,
    size: int | tuple[int, int],
    steps: int,
    seed: int,
    on_step: OnStep | None = None,
) -> Sampler:
    """Pictures of a diffusers pipeline, one by one, each from a seed of its own.

    Args:
        prompt: a text, or arguments of the pipeline instead (`prompt_embeds` ...).
    """
    given = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    height, width = (size, size) if isinstance(size, int) else size

    def sample() -> Sampled:
        images, seconds = [], list[float]()
        for index in range(num):
            watch = _Watch(seconds, steps, on_step)
            made = pipeline(
                **given,
                height=height,
                width=width,
                num_inference_steps=steps,
                generator=torch.Generator().manual_seed(seed + index),
                callback_on_step_end=watch,
                output_type="pt",
            )
            images.append((made.images[0].float() * 255).round().to(torch.uint8).permute(1, 2, 0).cpu())
        return Sampled(torch.stack(images), tuple(seconds))

    return sample


class _Watch:
    """Times steps by the calls a pipeline makes after each. The first, which encodes the prompt too, is not counted."""

    def __init__(self, seconds: list[float], steps: int, on_step: OnStep | None) -> None:
        self._seconds, self._steps, self._on_step = seconds, steps, on_step
        self._last: float | None = None

    def __call__(self, pipeline: Any, step: int, timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if self._on_step is not None:
            self._on_step(step, self._steps)
        return values


# -- likeness ------------------------------------------------------------------------------------------------------


def compared(runs: Sequence[Run], measures: Mapping[str, Measure]) -> list[dict[str, Any]]:
    """Figures of every run; from the second on also compared with the first, by measures of two batches of pictures."""
    records = []
    for run in runs:
        record: dict[str, Any] = {"name": run.name, "seconds_per_step": run.seconds_per_step}
        if run is not runs[0]:
            record["speed_up"] = runs[0].seconds_per_step / run.seconds_per_step
            for name, measure in measures.items():
                value = measure(runs[0].images, run.images)
                record[name] = value if math.isfinite(value) else None  # equal pictures: infinitely alike
        records.append(record)
    return records


def rows(runs: Sequence[Run], records: Sequence[dict[str, Any]]) -> list[Row]:
    """The runs as they stand on a sheet."""
    return [Row(run.name, figures(record), run.images) for run, record in zip(runs, records, strict=True)]


def figures(record: dict[str, Any]) -> str:
    """A record in words."""
    seconds = record["seconds_per_step"]
    words = [f"{seconds:.2f} s per step" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms per step"]
    if record.get("speed_up") is not None:
        words.append(f"{record['speed_up']:.2f}x as fast")
    if record.get("psnr") is not None:
        words.append(f"PSNR {record['psnr']:.1f} dB to dense")
    if record.get("lpips") is not None:
        words.append(f"LPIPS {record['lpips']:.3f}")
    return ", ".join(words)
