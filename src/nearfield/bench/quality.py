"""What patterns of attention do to the embedded model's pictures: FID and likeness beside the share of pairs read.

One process for many patterns: the networks are loaded once, pictures stay in memory, and results are written after
every pattern, so that a sweep that is stopped goes on with the next.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Attended, Geometry, Hilbert, Impl, Ordering, apply, quality
from nearfield.bench import machine
from nearfield.bench.quality_cases import Pattern
from nearfield.demo.autoencoder import PIXELS_PER_TOKEN
from nearfield.demo.generate import load_lora
from nearfield.demo.sampler import DemoPipeline
from nearfield.quality.results import QualityRow, as_document, read_rows, write_json

_FEW = 200  # pairs for LPIPS and SSIM, which are slow and settle early
_DENSE = "dense"


@dataclass(frozen=True)
class Task:
    """How pictures are made and measured.

    Args:
        weights: the model file.
        num, steps, size, seed, batch: of the pictures.
    """

    weights: Path
    num: int
    steps: int
    size: int
    seed: int = 0
    batch: int = 64

    def settings(self, pattern: Pattern | None) -> dict[str, Any]:
        """What it takes to do it again, and to know that it was done."""
        own = {"num": self.num, "steps": self.steps, "size": self.size, "seed": self.seed}
        weights = Path(pattern.weights) if pattern and pattern.weights else self.weights
        chosen = asdict(pattern) | {"tuning": pattern.tuning} if pattern else {"name": _DENSE}
        return own | chosen | {"weights": weights.name}


class Sweep:
    """Measures patterns one by one into a JSON file.

    Args:
        references: statistics of the photographs' features.
        network: what gives features of pictures.
        on_picture: called with the number of pictures made and what they are.
    """

    def __init__(
        self,
        task: Task,
        references: quality.Statistics,
        network: nn.Module,
        out: Path,
        *,
        device: torch.device | str = "cpu",
        on_picture: Callable[[int, str], None] | None = None,
    ) -> None:
        self.task, self.references, self.network, self.out = task, references, network, out
        self.device = torch.device(device)
        self.rows = read_rows(out) if out.exists() else []
        self._on_picture = on_picture
        self._pipelines: dict[Path, DemoPipeline] = {}
        self._dense: Tensor | None = None
        self._lpips = quality.load_lpips(device=self.device)

    def run(self, patterns: Sequence[Pattern], has_time: Callable[[], bool] = lambda: True) -> bool:
        """Measure the dense model and what of the patterns is missing; returns whether all of it was."""
        dense = self._pictures(None)
        if not self._is_known(None):
            self._add(QualityRow(_DENSE, 1.0, self.task.num, settings=self.task.settings(None)), dense)
        for pattern in patterns:
            if self._is_known(pattern):
                continue
            if not has_time():
                return False
            self._measure(pattern)
        return True

    def _is_known(self, pattern: Pattern | None) -> bool:
        wanted = self.task.settings(pattern)
        # As JSON returns it: tuples are lists there.
        return any(_plain(row.settings) == _plain(wanted) for row in self.rows)

    def _measure(self, pattern: Pattern) -> None:
        images = self._pictures(pattern)
        dense = self._pictures(None)
        method = method_of(pattern)
        pipeline = self._pipeline(pattern)
        config = pipeline.model.config
        side = self.task.size // PIXELS_PER_TOKEN
        geometry = Geometry((side, side), text=config.condition_tokens)
        layers = config.joint_blocks + config.single_blocks
        kept = pairs_kept(method, geometry, layers, config.heads, self.task.steps, self.device)
        found: dict[str, Any] = self._likeness(images, dense)
        if isinstance(method, Hilbert):
            found |= self._seams(method, geometry, images, dense)
        row = QualityRow(pattern.name, kept, self.task.num, settings=self.task.settings(pattern), **found)
        self._add(row, images)

    def _add(self, row: QualityRow, images: Tensor) -> None:
        """Complete a row by what the features say, and write it."""
        features = quality.features_of(_batches(images, self.device), self.network)
        found = quality.Statistics.of(features, self.task.size)
        record = asdict(row) | {"fid": quality.frechet_distance(found, self.references)}
        if self.references.features is not None:
            shares = quality.precision_recall(features, self.references.features)
            blocks = max(1, min(10, min(len(features), self.references.count) // 100))
            kernel = quality.kernel_distance(features, self.references.features, blocks=blocks)
            record |= {"precision": shares.precision, "recall": shares.recall}
            record |= {"kid": kernel.value, "kid_error": kernel.error}
        self.rows.append(QualityRow(**record))
        write_json(self.out, as_document(self.rows, machine.facts(), "the embedded model's pictures"))

    # -- pictures ------------------------------------------------------------------------------------------------

    def _pictures(self, pattern: Pattern | None) -> Tensor:
        """`[num, height, width, 3]` uint8; the dense model's are kept."""
        if pattern is None and self._dense is not None:
            return self._dense
        pipeline = self._pipeline(pattern)
        context = apply(pipeline, method_of(pattern)) if pattern else nullcontext()
        name = pattern.name if pattern else _DENSE
        parts = []
        with context:
            for start in range(0, self.task.num, self.task.batch):
                if self._on_picture is not None:
                    self._on_picture(start, name)
                some = min(self.task.batch, self.task.num - start)
                made = pipeline(
                    some,
                    size=self.task.size,
                    steps=self.task.steps,
                    seed=self.task.seed,
                    first=start,
                    batch=some,
                )
                parts.append(made.images)
        if pattern and pattern.lora:
            pipeline.transformer.unload_lora()
        images = torch.cat(parts)
        if pattern is None:
            self._dense = images
        return images

    def _pipeline(self, pattern: Pattern | None) -> DemoPipeline:
        path = Path(pattern.weights) if pattern and pattern.weights else self.task.weights
        if path not in self._pipelines:
            self._pipelines[path] = DemoPipeline.load(path, self.device)
        pipeline = self._pipelines[path]
        if pattern and pattern.lora and not getattr(pipeline.transformer, "peft_config", None):
            load_lora(pipeline.transformer, Path(pattern.lora))
        return pipeline

    # -- figures -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _likeness(self, images: Tensor, dense: Tensor) -> dict[str, float | None]:
        """Means over pairs; equal pictures, which are infinitely alike, are left out of the PSNR."""
        measures: dict[str, tuple[Callable[..., Tensor], int]] = {
            "psnr": (quality.psnr, len(images)),
            "lpips": (self._lpips, _FEW),
            "ssim": (quality.ssim, _FEW),
        }
        found: dict[str, float | None] = {}
        for name, (measure, most) in measures.items():
            pairs = zip(
                _batches(images[:most], self.device), _batches(dense[:most], self.device), strict=True
            )
            values = torch.cat([measure(*pair).double().cpu() for pair in pairs])
            values = values[values.isfinite()]
            found[name] = float(values.mean()) if len(values) else None
        return found

    def _seams(
        self, method: Hilbert, geometry: Geometry, images: Tensor, dense: Tensor
    ) -> dict[str, float | None]:
        q_block = 128 if self.device.type == "cuda" else 16
        borders = quality.tile_borders(method, geometry, q_block=q_block)
        if not float(borders.right.sum() + borders.below.sum()):  # everything is shared
            return {}
        energies = [
            quality.seam_energy(
                torch.cat([quality.line_gradients(part, borders) for part in _batches(each, self.device)])
            )
            for each in (images, dense)
        ]
        return {"seam": energies[0].value, "seam_error": energies[0].error, "dense_seam": energies[1].value}


def _batches(images: Tensor, device: torch.device, size: int = 32) -> Iterator[Tensor]:
    """Pictures `[num, height, width, 3]` as `[B, 3, height, width]` on the device."""
    for part in images.split(size):
        yield part.to(device).permute(0, 3, 1, 2)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def photograph_statistics(
    batches: Iterable[Tensor], network: nn.Module, size: int, kept: Path
) -> quality.Statistics:
    """Of photographs `[B, 3, size, size]`, from a file where they were measured before."""
    if kept.exists():
        return quality.Statistics.load(kept)
    found = quality.Statistics.of(quality.features_of(batches, network), size)
    found.save(kept)
    return found


def pairs_kept(
    method: Any, geometry: Geometry, layers: int, heads: int, steps: int, device: torch.device
) -> float:
    """The share of the dense pairs that are read, over all layers and steps."""
    shares = []
    for layer in range(layers):
        if method.dense_layer_reason(layer, layers) is not None:
            shares.append(1.0)
            continue
        reader = method.reader(geometry, layer, heads=heads, device=device)
        shares.append(reader.num_pairs / geometry.num_tokens**2)
    dense: float = method.num_dense_steps(steps) / steps
    return dense + (1 - dense) * sum(shares) / layers


def method_of(pattern: Pattern) -> Any:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in pattern.fields.items()
    }
    return Hilbert(**fields) if pattern.method == "hilbert" else Masked(pattern.method, **fields)


# -- rivals ----------------------------------------------------------------------------------------------------------


class MaskReader(NamedTuple):
    """Dense attention under a mask: slow, and exact for any pattern."""

    mask: Tensor

    @property
    def num_pairs(self) -> int:
        return int(self.mask.sum())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended:
        assert key_bias is None  # nothing is padded here
        out = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scale)
        return Attended(out, torch.full(out.shape[:-1], math.nan, device=out.device))


@dataclass(frozen=True)
class Masked:
    """Windows around each token, in raster order; text is read by all and reads all.

    Args:
        kind: "window": tokens within `radius`; "band": the `width` tokens around it in the sequence.
    """

    kind: str
    radius: float = 8
    width: int = 256
    dense_steps: int | float = 0

    def ordering(self, geometry: Geometry, *, device: torch.device | str) -> Ordering:
        return Ordering(torch.arange(geometry.num_image_tokens, device=device))

    def reader(
        self, geometry: Geometry, layer: int, *, heads: int | None, device: torch.device | str
    ) -> MaskReader:
        mask = torch.ones(geometry.num_tokens, geometry.num_tokens, dtype=torch.bool)
        start, stop = geometry.image_spans[0]
        mask[start:stop, start:stop] = self._image_mask(geometry.grid)
        return MaskReader(mask.to(device))

    def _image_mask(self, grid: tuple[int, ...]) -> Tensor:
        tokens = torch.arange(math.prod(grid))
        if self.kind == "band":
            return (tokens[:, None] - tokens).abs() <= self.width // 2
        rows, columns = tokens // grid[1], tokens % grid[1]
        squares = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
        return squares <= self.radius**2

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        return None

    def num_dense_steps(self, num_steps: int) -> int:
        return round(self.dense_steps * num_steps) if self.dense_steps < 1 else int(self.dense_steps)

    def describe(self, geometry: Geometry, *, device: torch.device | str) -> str:
        kept = self.reader(geometry, 0, heads=None, device="cpu").num_pairs / geometry.num_tokens**2
        return f"{geometry}: {self.kind}, pairs kept: {kept:.1%}"
