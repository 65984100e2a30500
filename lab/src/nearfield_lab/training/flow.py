"""Flow matching: the model learns the velocity from pictures to noise, at noise levels between.

At level s the model sees (1 - s) x + s e, for a picture x and noise e, and is asked for e - x. Levels are the logistic
function of normal numbers, so that the middle, where the picture is decided, is seen most.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from nearfield._checks import wrong_value
from nearfield.diffusers import apply, compiled_blocks
from nearfield.methods import Method
from nearfield_lab.embedded.autoencoder import PIXELS_PER_TOKEN
from nearfield_lab.embedded.dense_kernels import called_with
from nearfield_lab.embedded.model import ModelConfig, Packing, TinyFlux, load_model, reconfigured, save_model
from nearfield_lab.embedded.sampler import DemoPipeline, precision
from nearfield_lab.training.data import Latents
from nearfield_lab.training.loop import Loop, Outcome, Schedule
from nearfield_lab.training.runs import OnStep, RunRecipe, TrainingRun, seeded


@dataclass(frozen=True, kw_only=True)
class Recipe(RunRecipe):
    """What is learned from what.

    Args:
        size: pixels per side of the pictures.
        shift: of the noise levels: s becomes shift * s / (1 + (shift - 1) s).
        method: train with sparse attention; None is dense. Where the model is compiled it is then its blocks that are.
    """

    batch: int = 256
    sample_steps: int = 24
    packing: Packing = "int8"
    size: int = 256
    shift: float = 1.0
    method: Method | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift <= 0:
            wrong_value("shift", "be above 0", self.shift)
        check_compilable(self.method, self.compiled)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"size": self.size, "shift": self.shift, "method": str(self.method)}


def check_compilable(method: Method | None, is_compiled: bool) -> None:
    reason = method.compile_reason if is_compiled and method is not None else None
    if reason is not None:
        wrong_value("compiled", f"be False: {reason}", is_compiled)


class FlowTraining(TrainingRun[Latents]):
    """Model, latents and loop.

    Args:
        start: a model file to start from, such as a model of a smaller size; otherwise `config` with random weights.
    """

    def __init__(
        self,
        latents: Latents,
        folder: Path,
        recipe: Recipe,
        schedule: Schedule,
        *,
        config: ModelConfig | None = None,
        start: Path | None = None,
        device: torch.device | str = "cpu",
        on_step: OnStep | None = None,
    ) -> None:
        super().__init__(latents, folder, recipe, schedule, device, on_step)
        self.recipe = recipe
        model = reconfigured(self.first_model(latents, config, start), size=recipe.size, shift=recipe.shift)
        self.model = model.to(self.device).train().requires_grad_(True)
        self.handle = self._sparse(schedule.parts)
        is_whole = recipe.compiled and recipe.method is None
        self._network = self._compiled_network() if is_whole else None
        facts = recipe.facts() | {"model": asdict(self.model.config)}
        self.loop = Loop(dict(self.model.named_parameters()), self.loss, schedule, folder, facts)

    def first_model(self, latents: Latents, config: ModelConfig | None, start: Path | None) -> TinyFlux:
        """The model before the first step: that of a file, or one with random weights."""
        if start is not None:
            return load_model(start)[0]
        model = seeded(self.recipe.seed, lambda: self.new_model(config))
        model.latent_mean.copy_(latents.mean)
        model.latent_std.copy_(latents.std)
        return model

    def new_model(self, config: ModelConfig | None) -> TinyFlux:
        return TinyFlux(config or ModelConfig())

    def condition(self, indices: Tensor, generator: torch.Generator) -> dict[str, Any]:
        """Further arguments of the model for some pictures, by their numbers."""
        del indices, generator
        return {}

    def _sparse(self, parts: int) -> Any:
        if self.recipe.method is None:
            return None
        handle = apply(self.model.transformer, self.recipe.method)
        # The adapter thinks of FLUX, with 16 pixels per token.
        side = self.recipe.size * 16 // PIXELS_PER_TOKEN
        text = self.model.config.condition_tokens
        handle.prepare(height=side, width=side, text=text, batch=self.recipe.batch // parts)
        return handle

    def _compiled_network(self) -> Callable[..., Any]:
        return partial(torch.compile(called_with), self.recipe.dense_kernel, self.model.transformer)

    def run(self) -> Outcome:
        has_blocks = self.recipe.compiled and self.recipe.method is not None
        with compiled_blocks(self.model.transformer) if has_blocks else nullcontext():
            return super().run()

    def loss(self, step: int, part: int) -> Tensor:
        """The mean squared error of the velocity over one part of a step's batch."""
        latents, indices, generator = self._batch(step, part)
        clean = self.model.normalised(latents)
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        level = noise_levels(len(clean), self.recipe.shift, generator)
        condition = self.condition(indices, generator)
        with precision(self.device):
            velocity = self.model(mixed(clean, noise, level), level, self._network, **condition)
        return mse_loss(velocity.float(), noise - clean)

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        save_model(path, self.model, facts, self.recipe.packing)

    def samples(self) -> Tensor:
        pipeline = self.pipeline()
        pipeline.autoencoder.to(self.device)
        # Graphs of another size would take longer than they save.
        with torch.compiler.set_stance("force_eager"):
            sampled = pipeline(self.recipe.samples, steps=self.recipe.sample_steps, batch=16)
        self.model.train()
        return sampled.images

    def pipeline(self) -> DemoPipeline:
        """What draws the samples."""
        return DemoPipeline(self.model)


def noise_levels(number: int, shift: float, generator: torch.Generator) -> Tensor:
    """Logit-normal levels, rounded to bfloat16, because the transformer reads them in that type on a GPU."""
    return shifted(torch.randn(number, generator=generator, device=generator.device).sigmoid(), shift)


def shifted(level: Tensor, shift: float) -> Tensor:
    """Levels, more of them early for a shift above 1, rounded to bfloat16."""
    return (shift * level / (1 + (shift - 1) * level)).bfloat16().float()


def mixed(clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Pictures at noise levels `[B]`."""
    share = level[:, None, None, None]
    return (1 - share) * clean + share * noise
