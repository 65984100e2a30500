"""The embedded model's pictures with patterns of attention, and how like the dense ones they are."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from nearfield import Geometry, Method, apply
from nearfield.diffusers import Handle, compiled_blocks
from nearfield_lab import quality
from nearfield_lab.embedded.lora import lora_on
from nearfield_lab.embedded.model import ModelConfig, TinyFlux
from nearfield_lab.embedded.sampler import DemoPipeline, Sampled
from nearfield_lab.storage import read_tensors

TINY = Path("tiny")
"""In place of a model file: an untrained model of a few narrow layers."""
_TINY = ModelConfig(joint_blocks=2, single_blocks=3, heads=2, head_dim=32, condition_tokens=16, size=128)


def tiny_pipeline() -> DemoPipeline:
    """An untrained model with random weights also where a new one has zeros: its pictures depend on everything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyFlux(_TINY)
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        return DemoPipeline(model.requires_grad_(False))


def trained_size(weights: Path) -> int:
    """Pixels per side that a model file was trained at last."""
    if weights == TINY:
        return _TINY.size
    _, facts = read_tensors(weights)
    return int(facts.get("config", {}).get("size", ModelConfig.size))


@dataclass(frozen=True)
class Task:
    """How pictures are made and measured.

    Args:
        weights: the model file.
        num, steps, size, seed, batch: of the pictures.
        compiled: let torch.compile make the model faster, with every pattern that allows it. Pictures are the same up
            to rounding, so it is none of the settings.
    """

    weights: Path
    num: int
    steps: int
    size: int
    seed: int = 0
    batch: int = 64
    compiled: bool = False

    def batches(self) -> Iterator[range]:
        """Numbers of the pictures that are made together."""
        for start in range(0, self.num, self.batch):
            yield range(start, min(start + self.batch, self.num))


class Facts(NamedTuple):
    """What a pattern reads of a picture.

    Args:
        pairs_kept: share of the dense pairs, over all layers and steps.
        tokens_kept: share of the image tokens that is left in blocks that merge; None where nothing merges.
        geometry: where the tokens stood.
    """

    pairs_kept: float
    tokens_kept: float | None = None
    geometry: Geometry | None = None


class Drawing:
    """A model with a pattern in place; it makes pictures, and `facts` says what they read.

    Args:
        is_compiled: whether the model's blocks are.
    """

    def __init__(
        self, pipeline: DemoPipeline, task: Task, handle: Handle | None, is_compiled: bool = False
    ) -> None:
        self._pipeline, self._task, self._handle = pipeline, task, handle
        self.is_compiled = is_compiled

    def draw(self, numbers: range) -> Sampled:
        """Pictures on the CPU, and the time of every step, for which each is waited for."""
        task = self._task
        made = self._pipeline(
            self._num_together(numbers),
            size=task.size,
            steps=task.steps,
            seed=task.seed,
            first=numbers.start,
            batch=self._num_together(numbers),
        )
        return made._replace(images=made.images[: len(numbers)])

    def pictures(self, numbers: range) -> Tensor:
        """The same pictures, left on the model's device. Nothing waits for a GPU, so that it always has work."""
        task = self._task
        together = range(numbers.start, numbers.start + self._num_together(numbers))
        latents = self._pipeline.sample(together, size=task.size, steps=task.steps, seed=task.seed)
        return self._pipeline.pictures(latents[: len(numbers)])

    def velocity(self, latents: Tensor, step: int) -> Tensor:
        """What the model says of noisy latents in one step, with which a sampling begins: nothing is remembered."""
        timesteps = self._pipeline.begin(self._task.steps, step)
        return self._pipeline.velocity(latents, timesteps[step])

    def _num_together(self, numbers: range) -> int:
        """Graphs are for one size of batch: a last, smaller one is filled up with pictures that nobody asked for."""
        if not self.is_compiled:
            return len(numbers)
        return max(len(numbers), min(self._task.batch, self._task.num))

    def facts(self) -> Facts:
        """What pictures like the last one read."""
        if self._handle is None:
            return Facts(1.0)
        kept, geometry = self._handle.pairs_kept(), self._handle.geometry()
        assert kept is not None  # pictures were made
        assert geometry is not None
        regions = self._handle.composition.regions(geometry)
        if regions is None:
            return Facts(kept, None, geometry)
        return Facts(kept, regions.num_merged / regions.num_tokens, geometry)


class PictureMaker:
    """Makes pictures with any pattern; models are loaded once.

    Args:
        methods: gives what `apply` is given for a pattern; by default the case's method.
    """

    def __init__(
        self, task: Task, device: torch.device, methods: Callable[[Case], Any] | None = None
    ) -> None:
        self.task, self.device = task, device
        self._methods = methods or Case.made
        self.not_compiled: dict[str, str] = {}
        """Patterns that could not be, and why."""
        self._pipelines: dict[Path, DemoPipeline] = {}

    @contextmanager
    def using(self, pattern: Case | None) -> Iterator[Drawing]:
        """The model with a pattern, its weights and its LoRA; None: as it is."""
        pipeline = self.pipeline(pattern)
        if pattern is None:
            with self._compiled(pipeline):
                yield Drawing(pipeline, self.task, None, self.task.compiled)
            return
        lora_file = pattern.on.get("lora")
        with lora_on(pipeline, Path(lora_file) if lora_file else None) as lora:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # what it does to pictures is measured here
                handle = apply(pipeline, self._methods(pattern), lora=lora)
            reason = handle.method.compile_reason if self.task.compiled else None
            if reason is not None:
                self.not_compiled[pattern.name] = reason
            with handle, self._compiled(pipeline, reason is None):
                yield Drawing(pipeline, self.task, handle, self.task.compiled and reason is None)

    def _compiled(self, pipeline: DemoPipeline, is_possible: bool = True) -> AbstractContextManager[None]:
        return compiled_blocks(pipeline.transformer) if self.task.compiled and is_possible else nullcontext()

    def pipeline(self, pattern: Case | None) -> DemoPipeline:
        """The model that a pattern is for."""
        own = pattern.on.get("weights") if pattern else None
        path = Path(own) if own else self.task.weights
        if path not in self._pipelines:
            made = tiny_pipeline().to(self.device) if path == TINY else DemoPipeline.load(path, self.device)
            self._pipelines[path] = made
        return self._pipelines[path]


# -- figures ---------------------------------------------------------------------------------------------------------


def batches(images: Tensor, device: torch.device, size: int = 32) -> Iterator[Tensor]:
    """Pictures `[num, height, width, 3]` as `[B, 3, height, width]` on the device."""
    for part in images.split(size):
        yield part.to(device).permute(0, 3, 1, 2)


@torch.no_grad()
def likeness_values(
    images: Tensor, dense: Tensor, lpips: nn.Module, device: torch.device
) -> dict[str, Tensor]:
    """PSNR, LPIPS and SSIM of every pair, `[num]` float64."""
    found: dict[str, list[Tensor]] = {}
    for pair in zip(batches(images, device), batches(dense, device), strict=True):
        for name, measure in (("psnr", quality.psnr), ("lpips", lpips), ("ssim", quality.ssim)):
            found.setdefault(name, []).append(measure(*pair).double().cpu())
    return {name: torch.cat(values) for name, values in found.items()}


def finite_mean(values: Tensor) -> float | None:
    """Equal pictures, which are infinitely alike, are left out."""
    values = values[values.isfinite()]
    return float(values.mean()) if len(values) else None


def feature_distance_values(
    images: Tensor, dense: Tensor, networks: Mapping[str, nn.Module], device: torch.device
) -> dict[str, Tensor]:
    """Distances of features of every pair, `[num]` float64."""
    found = {}
    for name, network in networks.items():
        features = [quality.features_of(batches(part, device), network) for part in (images, dense)]
        found[f"{name}_distance"] = quality.cosine_distance(*features)
    return found


def gradients(images: Tensor, borders: quality.Borders, device: torch.device) -> Tensor:
    """Across the lines and around them, `[num, 2]`."""
    return torch.cat([quality.line_gradients(part, borders) for part in batches(images, device)])


def seam_figures(found: Tensor, dense: Tensor) -> dict[str, float | None]:
    """What a row says about the gradients of pictures and of dense ones."""
    energies = [quality.seam_energy(each) for each in (found, dense)]
    return {"seam": energies[0].value, "seam_error": energies[0].error, "dense_seam": energies[1].value}


def borders_of(method: Method, geometry: Geometry | None, device: torch.device) -> quality.Borders | None:
    """The lines that a method draws; None where there is none."""
    borders = None if geometry is None else method.borders(geometry, device=device)
    if borders is None or not float(borders.right.sum() + borders.below.sum()):
        return None
    return borders
