"""Flow matching: the model learns the velocity from pictures to noise, at noise levels between.

At level s the model sees (1 - s) x + s e, for a picture x and noise e, and is asked for e - x. Levels are the logistic
function of normal numbers, so that the middle, where the picture is decided, is seen most.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from nearfield._checks import check_int, check_member, wrong_value
from nearfield.diffusers import apply, compiled_blocks
from nearfield.methods import Method
from nearfield_lab.embedded.autoencoder import PIXELS_PER_TOKEN
from nearfield_lab.embedded.dense_kernels import called_with
from nearfield_lab.embedded.model import ModelConfig, Packing, TinyFlux, load_model, reconfigured, save_model
from nearfield_lab.embedded.sampler import DemoPipeline, precision
from nearfield_lab.training.data import Latents, fits
from nearfield_lab.training.loop import Draws, Loop, Outcome, Schedule
from nearfield_lab.training.runs import Backend, TrainingRun, check_parts


@dataclass(frozen=True)
class Recipe:
    """What is learned from what.

    Args:
        size: pixels per side of the pictures.
        batch: pictures per step.
        shift: of the noise levels: s becomes shift * s / (1 + (shift - 1) s).
        seed: of the weights, the batches, the noise and the levels.
        method: train with sparse attention; None is dense.
        attention: which of torch's kernels computes dense attention.
        compiled: let torch.compile make the model faster, as a whole; with a method its blocks. The first step then
            takes a minute.
        samples: pictures on a sample sheet, 0 for none.
        sample_steps, sample_seconds: denoising steps per picture, and time between sheets.
        packing: how the model is written: in 8 bits, in bfloat16, or as it is.
    """

    size: int = 256
    batch: int = 256
    shift: float = 1.0
    seed: int = 0
    method: Method | None = None
    attention: Backend = "auto"
    compiled: bool = False
    samples: int = 16
    sample_steps: int = 24
    sample_seconds: float = 180.0
    packing: Packing = "int8"

    def __post_init__(self) -> None:
        check_int("batch", self.batch, at_least=1)
        check_int("seed", self.seed, at_least=0)
        check_int("samples", self.samples, at_least=0)
        check_member("attention", self.attention, get_args(Backend))
        check_member("packing", self.packing, get_args(Packing))
        if self.shift <= 0:
            wrong_value("shift", "be above 0", self.shift)
        reason = self.method.compile_reason if self.compiled and self.method is not None else None
        if reason is not None:
            wrong_value("compiled", f"be False: {reason}", self.compiled)

    def facts(self) -> dict[str, Any]:
        """What must not change when a run is gone on with."""
        return {
            "size": self.size,
            "batch": self.batch,
            "shift": self.shift,
            "seed": self.seed,
            "method": str(self.method),
        }


class FlowTraining(TrainingRun):
    """Model, latents and loop.

    Args:
        start: a model file to start from, such as a model of a smaller size; otherwise `config` with random weights.
        on_step: called with the number of steps done and the last known loss.
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
        on_step: Callable[[int, float | None], None] | None = None,
    ) -> None:
        check_parts(recipe.batch, schedule)
        super().__init__(folder, recipe.attention, recipe.facts(), recipe.sample_seconds, on_step)
        self.recipe, self.device = recipe, torch.device(device)
        self.model = _first_model(recipe, latents, config, start).to(self.device).train().requires_grad_(True)
        self.latents = latents.to(self.device) if fits(latents.values, self.device) else latents
        self._draws = Draws(recipe.seed, self.device)
        self.handle = self._sparse(schedule.parts)
        self._network = self._compiled_network() if recipe.compiled and recipe.method is None else None
        facts = recipe.facts() | {"model": asdict(self.model.config)}
        self.loop = Loop(dict(self.model.named_parameters()), self.loss, schedule, folder, facts)

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
        return partial(torch.compile(called_with), self.recipe.attention, self.model.transformer)

    def run(self) -> Outcome:
        with self._compiled_blocks():
            return super().run()

    def _compiled_blocks(self) -> AbstractContextManager[None]:
        is_wanted = self.recipe.compiled and self.recipe.method is not None
        return compiled_blocks(self.model.transformer) if is_wanted else nullcontext()

    def loss(self, step: int, part: int) -> Tensor:
        """The mean squared error of the velocity over one part of a step's batch."""
        parts = self.loop.schedule.parts
        indices = self._draws.indices(step, part, self.recipe.batch, parts, len(self.latents))
        clean = self.model.normalised(self.latents.take(indices).to(self.device))
        generator = self._draws.generator(step, part)
        noise = torch.randn(clean.shape, generator=generator, device=self.device)
        level = noise_levels(len(clean), self.recipe.shift, generator)
        with precision(self.device):
            velocity = self.model(mixed(clean, noise, level), level, self._network)
        return mse_loss(velocity.float(), noise - clean)

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        save_model(path, self.model, facts, self.recipe.packing)

    def samples(self) -> Tensor | None:
        if not self.recipe.samples:
            return None
        pipeline = DemoPipeline(self.model)
        pipeline.autoencoder.to(self.device)
        # Graphs of another size would take longer than they save.
        with torch.compiler.set_stance("force_eager"):
            sampled = pipeline(self.recipe.samples, steps=self.recipe.sample_steps, batch=16)
        self.model.train()
        return sampled.images


def noise_levels(number: int, shift: float, generator: torch.Generator) -> Tensor:
    """Logit-normal levels, rounded to bfloat16: on a GPU the transformer reads them so, and what it is told is true."""
    level = torch.randn(number, generator=generator, device=generator.device).sigmoid()
    level = shift * level / (1 + (shift - 1) * level)
    return level.bfloat16().float()


def mixed(clean: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """Pictures at noise levels `[B]`."""
    share = level[:, None, None, None]
    return (1 - share) * clean + share * noise


def _first_model(
    recipe: Recipe, latents: Latents, config: ModelConfig | None, start: Path | None
) -> TinyFlux:
    if start is not None:
        model, _ = load_model(start)
        return reconfigured(model, size=recipe.size, shift=recipe.shift)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = TinyFlux(config or ModelConfig())
    model.latent_mean.copy_(latents.mean)
    model.latent_std.copy_(latents.std)
    return reconfigured(model, size=recipe.size, shift=recipe.shift)
