"""The embedded model's pictures with patterns of attention, and how like the dense ones they are."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from benchmarks.masks import Masked
from benchmarks.quality_cases import Pattern
from nearfield import Geometry, Method, apply, recipes
from nearfield._files import write_json
from nearfield.cli import machine
from nearfield.diffusers.compiling import compiled_blocks
from nearfield.diffusers.handle import Handle
from nearfield_lab import quality
from nearfield_lab.embedded.lora import lora_on
from nearfield_lab.embedded.sampler import DemoPipeline, Sampled
from nearfield_lab.quality.results import as_document

DENSE = "dense"
_MASKS = ("window", "band")


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

    def settings(self, pattern: Pattern | None) -> dict[str, Any]:
        """What it takes to do it again, and to know that it was done."""
        own = {"num": self.num, "steps": self.steps, "size": self.size, "seed": self.seed}
        weights = Path(pattern.weights) if pattern and pattern.weights else self.weights
        chosen = asdict(pattern) | {"tuning": pattern.tuning} if pattern else {"name": DENSE}
        files = {"lora": Path(pattern.lora).name} if pattern and pattern.lora else {}
        # All fields: what they mean must not hang on the defaults of a version.
        fields = {"fields": _all_fields(pattern)} if pattern else {}
        return own | chosen | files | fields | {"weights": weights.name}

    def batches(self) -> Iterator[range]:
        """Numbers of the pictures that are made together."""
        for start in range(0, self.num, self.batch):
            yield range(start, min(start + self.batch, self.num))


class Measured(Protocol):
    """A row, of whatever benchmark, that says with which settings it was measured."""

    @property
    def settings(self) -> Mapping[str, Any]: ...


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
    """A model with a pattern in place; it makes pictures, and `facts` tells what they read.

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
        """The same pictures where the model is. Nothing is waited for, so a GPU is never without work."""
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
        """Of pictures like the last one."""
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
        methods: gives what `apply` is given for a pattern; by default `method_of`.
    """

    def __init__(
        self, task: Task, device: torch.device, methods: Callable[[Pattern], Any] | None = None
    ) -> None:
        self.task, self.device = task, device
        self._methods = methods or method_of
        self.not_compiled: dict[str, str] = {}
        """Patterns that could not be, and why."""
        self._pipelines: dict[Path, DemoPipeline] = {}

    def provide(self, path: Path, pipeline: DemoPipeline) -> None:
        """A model that is in no file, under the name of one."""
        self._pipelines[path] = pipeline.to(self.device)

    @contextmanager
    def using(self, pattern: Pattern | None) -> Iterator[Drawing]:
        """The model with a pattern, its weights and its LoRA; None: as it is."""
        pipeline = self._pipeline(pattern)
        if pattern is None:
            with self._compiled(pipeline):
                yield Drawing(pipeline, self.task, None, self.task.compiled)
            return
        with lora_on(pipeline, Path(pattern.lora) if pattern.lora else None) as lora:
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

    def _pipeline(self, pattern: Pattern | None) -> DemoPipeline:
        path = Path(pattern.weights) if pattern and pattern.weights else self.task.weights
        if path not in self._pipelines:
            self._pipelines[path] = DemoPipeline.load(path, self.device)
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


def likeness(
    images: Tensor, dense: Tensor, lpips: nn.Module, device: torch.device
) -> dict[str, float | None]:
    """Means over pairs."""
    values = likeness_values(images, dense, lpips, device)
    return {name: finite_mean(each) for name, each in values.items()}


def feature_distances(
    images: Tensor, dense: Tensor, networks: Mapping[str, nn.Module], device: torch.device
) -> dict[str, float]:
    """Means over pairs, by the names that `QualityRow` has for the networks' distances."""
    values = feature_distance_values(images, dense, networks, device)
    return {name: float(each.mean()) for name, each in values.items()}


def feature_distance_values(
    images: Tensor, dense: Tensor, networks: Mapping[str, nn.Module], device: torch.device
) -> dict[str, Tensor]:
    """The same of every pair, `[num]` float64."""
    found = {}
    for name, network in networks.items():
        features = [quality.features_of(batches(part, device), network) for part in (images, dense)]
        found[f"{name}_distance"] = quality.cosine_distance(*features)
    return found


def seams(
    method: Any, geometry: Geometry | None, images: Tensor, dense: Tensor, device: torch.device
) -> dict[str, float | None]:
    """The energy of a method's lines, beside that of the dense pictures; nothing where it draws none."""
    borders = borders_of(method, geometry, device)
    if borders is None:
        return {}
    return seam_figures(*(gradients(each, borders, device) for each in (images, dense)))


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


def add_row(rows: list[quality.QualityRow], row: quality.QualityRow, out: Path, about: str) -> None:
    """Write a file with one row more. Those of a file may come of several runs, so each says by itself of which; the
    file's facts are those of the last one."""
    facts = machine.facts()
    rows.append(replace(row, commit=facts["commit"], date=facts["date"]))
    write_json(out, as_document(rows, facts, about))


def is_known(settings: Mapping[str, Any], rows: Sequence[Measured]) -> bool:
    """Whether a row was measured with these settings."""
    wanted = _as_json_returns(settings)
    return any(_as_json_returns(row.settings) == wanted for row in rows)


def _as_json_returns(value: Any) -> Any:
    """The same values with lists in the place of tuples: what was written and read is compared with what is meant."""
    if isinstance(value, Mapping):
        return {name: _as_json_returns(part) for name, part in value.items()}
    return [_as_json_returns(part) for part in value] if isinstance(value, list | tuple) else value


# -- methods ---------------------------------------------------------------------------------------------------------


def method_of(pattern: Pattern) -> Any:
    """What `apply` is given."""
    if pattern.method in _MASKS:
        return Masked(pattern.method, **pattern.fields)
    name = "Hilbert" if pattern.method == "hilbert" else pattern.method
    return recipes.read({"format": recipes.FORMAT, "method": name, "fields": pattern.fields}).method


def _all_fields(pattern: Pattern) -> Mapping[str, Any]:
    """Those of a pattern's method."""
    if pattern.method in _MASKS:
        return pattern.fields
    fields: Mapping[str, Any] = recipes.Recipe(method_of(pattern)).as_document()["fields"]
    return fields


def check_patterns(patterns: Sequence[Pattern]) -> None:
    """Fields that are none, or do not go together, are told before anything takes time."""
    for pattern in patterns:
        try:
            method_of(pattern)
        except (TypeError, ValueError) as error:
            raise ValueError(f"pattern {pattern.name!r}: {error}") from None
