"""Flow matching on pixels: the model learns the velocity from pictures to noise that grows with their size.

At level t the model sees (1 - t) x + t s e, for a picture x, noise e and s = side / 64 above 64 pixels; it is asked for
s e - x. Levels are uniform. A model of one size may start from one of another.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from nearfield._checks import check_int, wrong_value
from nearfield_lab.embedded.pixel import (
    PixelConfig,
    PixelTransformer,
    compiled_body,
    load_pixel_model,
    noise_scale,
    sample,
    save_pixel_model,
)
from nearfield_lab.embedded.sampler import precision
from nearfield_lab.training.data import Pixels
from nearfield_lab.training.flow import mixed
from nearfield_lab.training.loop import Draws, Loop, Schedule
from nearfield_lab.training.runs import OnStep, RunRecipe, TrainingRun, seeded

_AT_ONCE = 16  # pictures of a sample sheet
_EVALUATION = 2**20 - 1  # a seed that no training is likely to have


@dataclass(frozen=True)
class PixelRecipe(RunRecipe):
    """What is learned from what.

    Args:
        config: of the model; its `size` is that of the pictures.
    """

    config: PixelConfig = field(kw_only=False)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"model": asdict(self.config)}


class PixelTraining(TrainingRun[Pixels]):
    """Model, pictures and loop.

    Args:
        start: a model file to start from, such as one of a smaller size or with full attention.
    """

    def __init__(
        self,
        pixels: Pixels,
        folder: Path,
        recipe: PixelRecipe,
        schedule: Schedule,
        *,
        start: Path | None = None,
        device: torch.device | str = "cpu",
        on_step: OnStep | None = None,
    ) -> None:
        size = recipe.config.size
        if tuple(pixels.values.shape[-2:]) != (size, size):
            wrong_value("pixels", f"have the size of the model ({size})", tuple(pixels.values.shape[-2:]))
        super().__init__(pixels, folder, recipe, schedule, device, on_step)
        self.recipe = recipe
        self.model = _first_model(recipe, start).to(self.device).train()
        self._body = compiled_body(self.model.body, recipe.dense_kernel) if recipe.compiled else None
        tokens, parameters = recipe.batch * size**2, dict(self.model.named_parameters())
        self.loop = Loop(parameters, self.loss, schedule, folder, recipe.facts(), tokens)

    def loss(self, step: int, part: int) -> Tensor:
        """The mean squared error of the velocity over one part of a step's batch."""
        clean, _, generator = self._batch(step, part)
        noise, level = _drawn(clean.shape, generator)
        return _velocity_error(self.model, clean, noise, level, self._body)

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        save_pixel_model(path, self.model, facts, self.recipe.packing)

    def samples(self) -> Tensor:
        number, steps = self.recipe.samples, self.recipe.sample_steps
        groups = (range(first, min(first + _AT_ONCE, number)) for first in range(0, number, _AT_ONCE))
        return torch.cat([sample(self.model, group, steps=steps) for group in groups])


def _drawn(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise for pictures of a shape, as strong as their size asks, and their levels."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    level = torch.rand(shape[0], generator=generator, device=generator.device)
    return noise * noise_scale(*shape[2:]), level


def _velocity_error(
    model: PixelTransformer, clean: Tensor, noise: Tensor, level: Tensor, body: Any = None
) -> Tensor:
    """The mean squared error of the velocity at pictures with noise."""
    with precision(clean.device):
        velocity = model(mixed(clean, noise, level), level, body)
    return mse_loss(velocity.float(), noise - clean)


@torch.no_grad()
def evaluated_loss(model: PixelTransformer, pixels: Pixels, num: int, *, batch: int = 16) -> float:
    """The mean loss of a model over `num` pictures, with noise and levels that are the same for all models.

    So models can be compared by far smaller differences than by the losses of their last steps.

    Args:
        batch: pictures at a time; what is drawn for a picture does not depend on it.
    """
    check_int("num", num, at_least=1)
    device = next(model.parameters()).device
    draws = Draws(_EVALUATION, torch.device("cpu"))
    total = 0.0
    for numbers in torch.arange(num).split(batch):
        indices = torch.cat([draws.indices(number, 0, 1, 1, len(pixels)) for number in numbers.tolist()])
        clean = pixels.take(indices).to(device)
        drawn = [_drawn(clean[:1].shape, draws.generator(number)) for number in numbers.tolist()]
        noise, level = (torch.cat(parts).to(device) for parts in zip(*drawn, strict=True))
        total += len(numbers) * float(_velocity_error(model, clean, noise, level))
    return total / num


def _first_model(recipe: PixelRecipe, start: Path | None) -> PixelTransformer:
    if start is not None:
        return load_pixel_model(start, recipe.config)[0]
    return seeded(recipe.seed, lambda: PixelTransformer(recipe.config))
