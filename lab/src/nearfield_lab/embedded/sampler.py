"""From noise to pictures: Euler steps along the model's velocities, by a diffusers scheduler.

`DemoPipeline` has a `transformer` and a `scheduler`, as any diffusers pipeline, so `apply(pipeline, method)` works.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield_lab.embedded.autoencoder import CHANNELS, PIXELS_PER_TOKEN, Autoencoder
from nearfield_lab.embedded.model import TinyFlux, from_diffusers, load_model

OnStep = Callable[[int, int], None]
"""Called before each denoising step with its number, from 0, and the number of all."""


class Sampled(NamedTuple):
    """Pictures and how long they took.

    Args:
        images: `[num, height, width, 3]` uint8.
        seconds: of every denoising step, batch after batch; decoding is not part of it.
    """

    images: Tensor
    seconds: tuple[float, ...]


class DemoPipeline:
    """The model, its scheduler and the autoencoder."""

    def __init__(self, model: TinyFlux, autoencoder: Autoencoder | None = None) -> None:
        self.model = model.eval()
        self.autoencoder = autoencoder or Autoencoder()
        self.scheduler = from_diffusers("FlowMatchEulerDiscreteScheduler")(shift=model.config.shift)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> "DemoPipeline":
        """A model from its file; in bfloat16 where that is fast."""
        model, _ = load_model(path)
        pipeline = cls(model).to(device)
        return pipeline.halved() if pipeline.device.type == "cuda" else pipeline

    def halved(self) -> "DemoPipeline":
        """The transformer in bfloat16: norms and weights of one type are computed in one kernel."""
        for parameter in self.transformer.parameters():
            parameter.data = parameter.data.bfloat16()
        return self

    def to(self, device: torch.device | str) -> "DemoPipeline":
        self.model.to(device)
        self.autoencoder.to(device)
        return self

    @property
    def transformer(self) -> Any:
        return self.model.transformer

    @property
    def device(self) -> torch.device:
        return self.model.latent_mean.device

    def __call__(
        self,
        num: int = 1,
        *,
        size: int | tuple[int, int] | None = None,
        steps: int = 20,
        seed: int = 0,
        first: int = 0,
        batch: int = 8,
        on_step: OnStep | None = None,
    ) -> Sampled:
        """Make pictures number `first` to `first + num` of a seed.

        Picture `i` of a seed starts from the same noise in every batch and on every device.

        Args:
            size: pixels per side, or (height, width); by default what the model was trained at.
            batch: pictures at a time.
        """
        images, seconds = [], list[float]()
        for start in range(first, first + num, batch):
            indices = range(start, min(start + batch, first + num))
            latents = self.sample(
                indices, size=size, steps=steps, seed=seed, on_step=on_step, seconds=seconds
            )
            images.append(self.decode(latents))
        return Sampled(torch.cat(images), tuple(seconds))

    @torch.no_grad()
    def sample(
        self,
        indices: range,
        *,
        size: int | tuple[int, int] | None = None,
        steps: int = 20,
        seed: int = 0,
        on_step: OnStep | None = None,
        seconds: list[float] | None = None,
    ) -> Tensor:
        """Latents `[num, 32, h, w]` of one batch, as the autoencoder reads them."""
        check_int("steps", steps, at_least=1)
        height, width = _sides(size or self.model.config.size)
        latents = self._sent(noise(indices, (height, width), seed))
        for step, timestep in enumerate(self.begin(steps)):
            if on_step is not None:
                on_step(step, steps)
            started = 0.0 if seconds is None else self._now()
            velocity = self.velocity(latents, timestep)
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            if seconds is not None:
                seconds.append(self._now() - started)
        return self.model.denormalised(latents)

    def begin(self, steps: int, first: int = 0) -> Tensor:
        """Let the scheduler begin at step number `first` of some steps; returns the timesteps of all."""
        # Evenly from 1 to 0. The scheduler's own choice spends its last step on a thousandth of the way.
        self.scheduler.set_timesteps(sigmas=[1 - step / steps for step in range(steps)], device=self.device)
        self.scheduler.set_begin_index(first)  # or it would look for the timestep, and wait for the device
        timesteps: Tensor = self.scheduler.timesteps
        return timesteps

    def level(self, timestep: Tensor) -> Tensor:
        """The share of noise at a timestep of the scheduler, which counts timesteps of its training."""
        level: Tensor = timestep / self.scheduler.config.num_train_timesteps
        return level

    @torch.no_grad()
    def velocity(self, latents: Tensor, timestep: Tensor, context: str = "cond", **condition: Any) -> Tensor:
        """What the model says of normalised latents `[num, 32, h, w]` at one of the timesteps, in float32.

        Args:
            context: the name of the call, by which methods with memory tell calls of one step apart.
            condition: further arguments of the model.
        """
        level = self.level(timestep).expand(len(latents))
        exactly = precision(self.device) if self.transformer.dtype == torch.float32 else nullcontext()
        with exactly, self.transformer.cache_context(context):
            velocity: Tensor = self.model(latents, level, **condition)
        return velocity.float()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pictures `[num, height, width, 3]` uint8 on the CPU."""
        return self.pictures(latents).cpu()

    @torch.no_grad()
    def pictures(self, latents: Tensor) -> Tensor:
        """Latents to pictures on the device of the model; few at a time, for they grow 64-fold."""
        parts = latents.split(8 if self.device.type == "cuda" else 2)
        return torch.cat([_as_bytes(self.autoencoder.decode(part)) for part in parts])

    def _sent(self, tensor: Tensor) -> Tensor:
        """A tensor of the CPU where the model is. From pinned memory it goes while a GPU computes."""
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def noise(indices: range, sides: tuple[int, int], seed: int) -> Tensor:
    """Noise for latents of pictures with sides in pixels, by the numbers of the pictures."""
    return drawn(indices, (CHANNELS, sides[0] // PIXELS_PER_TOKEN, sides[1] // PIXELS_PER_TOKEN), seed)


def drawn(indices: range, shape: tuple[int, ...], seed: int) -> Tensor:
    """Noise `[num, *shape]` by numbers, made one by one on the CPU: a batch does not change a picture."""
    check_int("seed", seed, at_least=0)
    generators = (torch.Generator().manual_seed(seed * 1_000_003 + index) for index in indices)
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


def _as_bytes(images: Tensor) -> Tensor:
    """`[B, 3, height, width]` in [0, 1] as `[B, height, width, 3]` uint8."""
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


@contextmanager
def precision(device: torch.device) -> Iterator[None]:
    """bfloat16 where it is fast, float32 elsewhere."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        yield


def _sides(size: int | tuple[int, int]) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    if len(sides) != 2 or any(side < PIXELS_PER_TOKEN or side % PIXELS_PER_TOKEN for side in sides):
        wrong_value("size", f"be one or two multiples of {PIXELS_PER_TOKEN} pixels", size)
    return sides
