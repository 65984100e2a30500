"""What training on latents and on pixels share: going on from a checkpoint, running, publishing."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.attention import sdpa_kernel

import nearfield
from nearfield._checks import wrong_value
from nearfield_lab.embedded.dense_kernels import DENSE_KERNELS, DenseKernel
from nearfield_lab.embedded.pictures import grid_of, write_picture
from nearfield_lab.training.loop import CHECKPOINT, Loop, Mark, Outcome, Schedule

Backend = DenseKernel
MODEL = "model.safetensors"


class TrainingRun(ABC):
    """`run` trains, draws sample sheets and writes `model.safetensors`. Who derives from it sets `loop`.

    Args:
        backend: which of torch's kernels computes dense attention.
        facts: what the model file says of its recipe.
        sample_seconds: time between sheets.
        on_step: called with the number of steps done and the last known loss.
    """

    loop: Loop

    def __init__(
        self,
        folder: Path,
        backend: Backend,
        facts: dict[str, Any],
        sample_seconds: float,
        on_step: Callable[[int, float | None], None] | None,
    ) -> None:
        self.folder = folder
        self._backend, self._facts = backend, facts
        self._sample_seconds, self._on_step = sample_seconds, on_step

    @property
    def can_resume(self) -> bool:
        return (self.folder / CHECKPOINT).exists()

    def resume(self) -> None:
        self.loop.resume()

    def run(self) -> Outcome:
        with attention_backend(self._backend), quiet_compiling():
            return self.loop.run(self._on_step, self.publish, self._sample_seconds, self.keep)

    def publish(self) -> None:
        """Write the averaged model, and a sheet of samples."""
        with self.loop.averaged():
            self.save(self.folder / MODEL, self._written_facts())
            images = self.samples()
            if images is not None:
                write_picture(self.folder / f"samples-{self.loop.step:06d}.png", grid_of(images))

    def keep(self, mark: Mark) -> None:
        """Write the averaged model of a moment to a file that stays as it is: `model-steps`, `model-seconds`."""
        with self.loop.averaged():
            self.save(self.folder / f"model-{mark}.safetensors", self._written_facts())

    def _written_facts(self) -> dict[str, Any]:
        return {"step": self.loop.step, "recipe": self._facts, "nearfield": nearfield.__version__}

    @abstractmethod
    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Write the model as it is."""

    @abstractmethod
    def samples(self) -> Tensor | None:
        """Pictures by the model as it is, None where none are wanted."""


def check_parts(batch: int, schedule: Schedule) -> None:
    if batch % schedule.parts:
        wrong_value("batch", f"be a multiple of `parts` ({schedule.parts})", batch)


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
