"""What all training shares around its loop: going on from a checkpoint, batches, and writing what was learned."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

import nearfield
from nearfield._checks import check_int, check_member, wrong_value
from nearfield_lab.embedded.dense_kernels import DENSE_KERNELS, DenseKernel
from nearfield_lab.embedded.model import Packing
from nearfield_lab.embedded.pictures import grid_of, write_picture
from nearfield_lab.training.data import Latents, Pixels, fits
from nearfield_lab.training.loop import CHECKPOINT, Draws, Loop, Mark, Outcome, Schedule

Backend = DenseKernel
MODEL = "model.safetensors"
OnStep = Callable[[int, float | None], None]
"""Called with the number of steps done and the last known loss."""
Data = TypeVar("Data", Latents, Pixels)


class Run(ABC):
    """One training in a folder. Subclasses set `loop`.

    Args:
        result: name of the file that is written.
    """

    loop: Loop

    def __init__(self, folder: Path, result: str, on_step: OnStep | None) -> None:
        self.folder, self.result = folder, result
        self._on_step = on_step

    @property
    def can_resume(self) -> bool:
        return (self.folder / CHECKPOINT).exists()

    def resume(self) -> None:
        self.loop.resume()

    @abstractmethod
    def run(self) -> Outcome:
        """Train and write what was learned."""

    @abstractmethod
    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write what was learned as it is."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the file says about itself."""

    def _trained(self, pause_seconds: float) -> Outcome:
        return self.loop.run(self._on_step, self.publish, pause_seconds, self.keep)

    def publish(self) -> None:
        """Write the averaged result."""
        with self.loop.averaged():
            self.save(self.folder / self.result, self.facts())

    def keep(self, mark: Mark) -> None:
        """Write the averaged result of a moment to a file that stays as it is: `model-steps`, `model-seconds`."""
        path = self.folder / self.result
        with self.loop.averaged():
            self.save(path.with_name(f"{path.stem}-{mark}{path.suffix}"), self.facts())


@dataclass(frozen=True, kw_only=True)
class RunRecipe:
    """What is learned from what, as far as it is said of latents and of pixels alike.

    Args:
        batch: pictures per step.
        seed: of the weights, the batches, the noise and the levels.
        dense_kernel: which of torch's kernels computes dense attention.
        compiled: let torch.compile make the model faster; the first step then takes longer.
        samples: pictures on a sample sheet, 0 for none.
        sample_steps, sample_seconds: denoising steps per picture, and time between sheets.
        packing: how the model is written: in 8 bits, in bfloat16, or as it is.
    """

    batch: int = 16
    seed: int = 0
    dense_kernel: Backend = "auto"
    compiled: bool = False
    samples: int = 16
    sample_steps: int = 20
    sample_seconds: float = 180.0
    packing: Packing = "bf16"

    def __post_init__(self) -> None:
        check_int("batch", self.batch, at_least=1)
        check_int("seed", self.seed, at_least=0)
        check_int("samples", self.samples, at_least=0)
        check_member("dense_kernel", self.dense_kernel, get_args(Backend))
        check_member("packing", self.packing, get_args(Packing))

    def facts(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        return {"batch": self.batch, "seed": self.seed}


class TrainingRun(Run, Generic[Data]):
    """Training of a model. `run` trains, draws sample sheets and writes `model.safetensors`."""

    def __init__(
        self,
        data: Data,
        folder: Path,
        recipe: RunRecipe,
        schedule: Schedule,
        device: torch.device | str,
        on_step: OnStep | None,
    ) -> None:
        if recipe.batch % schedule.parts:
            wrong_value("batch", f"be a multiple of `parts` ({schedule.parts})", recipe.batch)
        super().__init__(folder, MODEL, on_step)
        self._common, self.device = recipe, torch.device(device)
        self.data: Data = data.to(self.device) if fits(data.values, self.device) else data
        self._draws = Draws(recipe.seed, self.device)

    def run(self) -> Outcome:
        with attention_backend(self._common.dense_kernel), quiet_compiling():
            return self._trained(self._common.sample_seconds)

    def publish(self) -> None:
        """Write the averaged model, and a sheet of samples."""
        super().publish()
        if self._common.samples:
            with self.loop.averaged():
                sheet = grid_of(self.samples())
            write_picture(self.folder / f"samples-{self.loop.step:06d}.png", sheet)

    @abstractmethod
    def samples(self) -> Tensor:
        """Pictures by the model as it is."""

    def _batch(self, step: int, part: int) -> tuple[Tensor, Tensor, torch.Generator]:
        """The data of one part of a step, their numbers, and what noise is drawn from."""
        parts = self.loop.schedule.parts
        indices = self._draws.indices(step, part, self._common.batch, parts, len(self.data))
        return self.data.take(indices).to(self.device), indices, self._draws.generator(step, part)

    def facts(self) -> dict[str, Any]:
        return {"step": self.loop.step, "recipe": self._common.facts(), "nearfield": nearfield.__version__}


Model = TypeVar("Model", bound=nn.Module)


def seeded(seed: int, make: Callable[[], Model]) -> Model:
    """A model whose random weights depend on the seed alone; torch's own generator stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


@contextmanager
def quiet_compiling() -> Iterator[None]:
    """torch.compile looks for gradients of what it is given, and torch then warns of looking."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        yield


@contextmanager
def attention_backend(name: Backend) -> Iterator[None]:
    """Dense attention by one of torch's kernels."""
    with sdpa_kernel(DENSE_KERNELS[name]) if name != "auto" else nullcontext():
        yield
