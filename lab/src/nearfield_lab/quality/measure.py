"""Everything the command `quality` measures between two sets of images, as one record."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.cli import Bar
from nearfield.methods import Borders
from nearfield_lab.quality import fid, lpips, seams, similarity
from nearfield_lab.quality.images import ImageSet, open_images
from nearfield_lab.quality.inception import load_inception

BY_FEATURES = ("fid", "kid", "precision")
BY_PAIRS = ("lpips", "psnr", "ssim")
METRICS = (*BY_FEATURES, *BY_PAIRS, "seams")

_FEWEST_PER_BLOCK = 20


@dataclass(frozen=True)
class Task:
    """What to measure.

    Args:
        metrics: any of METRICS.
        size: pixels per side to which images are brought.
        num: how many images of each set are taken, evenly spaced; None for all.
        inception: file of the FID network; None for the installed one.
        borders: lines of the seams; asked for where these are measured.
    """

    metrics: tuple[str, ...]
    size: int
    batch: int
    device: torch.device
    num: int | None = None
    inception: Path | None = None
    borders: Borders | None = None

    @property
    def needs_features(self) -> bool:
        return any(name in BY_FEATURES for name in self.metrics)


class Source:
    """Images, or the statistics of images that are no longer needed."""

    def __init__(self, path: Path, size: int, num: int | None) -> None:
        self.path = path
        self.images: ImageSet | None = None
        self.statistics: fid.Statistics | None = None
        if path.suffix.lower() == ".safetensors":
            self.statistics = _thinned(fid.Statistics.load(path), num, path)
        else:
            images = open_images(path, sheet_cell=size)
            self.images = images.chosen(_places(len(images), num))

    def __len__(self) -> int:
        if self.images is not None:
            return len(self.images)
        return self.statistics.count if self.statistics is not None else 0


def _places(count: int, num: int | None) -> list[int]:
    """So many of `count` places, evenly spaced: the first of a sorted set may be of one kind."""
    if num is None or num >= count:
        return list(range(count))
    return [index * count // num for index in range(num)]


def _thinned(statistics: fid.Statistics, num: int | None, path: Path) -> fid.Statistics:
    if num is None or num >= statistics.count:
        return statistics
    if statistics.features is None:
        raise ValueError(
            f"{path} holds no features, so {num} of its {statistics.count} images cannot be taken."
        )
    return fid.Statistics.of(statistics.features[_places(statistics.count, num)], statistics.size)


def measure(first: Source, second: Source | None, task: Task) -> dict[str, Any]:
    """A record of figures; fills in the statistics of the sources on the way."""
    if second is not None:
        _require(first, second, task)
    record: dict[str, Any] = {"images": len(first), "references": len(second) if second else None}
    if task.needs_features:
        _collect([source for source in (first, second) if source is not None], task)
        if second is not None:
            record |= _by_features(_statistics(first), _statistics(second), task.metrics)
    if second is not None and any(name in (*BY_PAIRS, "seams") for name in task.metrics):
        record |= _by_pixels(first, second, task)
    return record


def _require(first: Source, second: Source, task: Task) -> None:
    """What will be needed is there: said before anything takes time."""
    for source in (first, second):
        if source.images is None and any(name not in BY_FEATURES for name in task.metrics):
            raise ValueError(f"{source.path} holds statistics and no images: pairs and seams need images.")
        has_features = source.statistics is None or source.statistics.features is not None
        if not has_features and {"kid", "precision"} & set(task.metrics):
            raise ValueError(f"{source.path} holds no features: leave `kid` and `precision` out.")


def _statistics(source: Source) -> fid.Statistics:
    assert source.statistics is not None  # `_collect` made them
    return source.statistics


def _collect(sources: Sequence[Source], task: Task) -> None:
    """Statistics of the sources that are images."""
    waiting = [source for source in sources if source.statistics is None]
    if not waiting:
        return
    network = load_inception(task.inception, task.device)
    for source in waiting:
        assert source.images is not None
        batches = _counted(source.images, task.batch, task.size, f"features of {source.path.name}")
        source.statistics = fid.Statistics.of(fid.features_of(batches, network), task.size)


def _counted(images: ImageSet, batch: int, size: int | None, text: str) -> Iterator[Tensor]:
    """The images in batches, counted on stderr."""
    done = 0
    with Bar(len(images), "images") as bar:
        for part in images.batches(batch, size):
            bar.show(done, text)
            yield part
            done += len(part)


def _by_features(first: fid.Statistics, second: fid.Statistics, metrics: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "fid" in metrics:
        found["fid"] = fid.frechet_distance(first, second)
    if "kid" in metrics and first.features is not None and second.features is not None:
        blocks = max(1, min(10, min(first.count, second.count) // _FEWEST_PER_BLOCK))
        kid = fid.kernel_distance(first.features, second.features, blocks=blocks)
        found |= {"kid": kid.value, "kid_error": _finite(kid.error)}
    if "precision" in metrics and first.features is not None and second.features is not None:
        shares = fid.precision_recall(first.features, second.features)
        found |= {"precision": shares.precision, "recall": shares.recall}
    return found


def _by_pixels(first: Source, second: Source, task: Task) -> dict[str, Any]:
    """Pairs of images side by side; seams need no pairs, but both sets."""
    assert first.images is not None  # `_require` saw to it
    assert second.images is not None
    in_pairs = [name for name in task.metrics if name in BY_PAIRS]
    found: dict[str, Any] = {}
    if in_pairs:
        found |= _pairs(first.images, second.images, in_pairs, task)
    if "seams" in task.metrics:
        assert task.borders is not None  # the command asked for them
        energies = [_seam_energy(source.images, task) for source in (first, second) if source.images]
        found |= {
            "seam": energies[0].value,
            "seam_error": _finite(energies[0].error),
            "dense_seam": energies[1].value,
            "dense_seam_error": _finite(energies[1].error),
        }
    return found


@torch.no_grad()
def _pairs(first: ImageSet, second: ImageSet, metrics: Sequence[str], task: Task) -> dict[str, Any]:
    network = lpips.load_lpips(device=task.device) if "lpips" in metrics else None
    values: dict[str, list[Tensor]] = {name: [] for name in metrics}
    others = second.batches(task.batch, task.size)
    for pair in zip(_counted(first, task.batch, task.size, "pairs"), others, strict=True):
        one, other = (images.to(task.device) for images in pair)
        if network is not None:
            with fid.full_precision():
                values["lpips"].append(network(one, other).cpu())
        for name, function in (("psnr", similarity.psnr), ("ssim", similarity.ssim)):
            if name in metrics:
                values[name].append(function(one, other).cpu())
    found: dict[str, Any] = {}
    for name, parts in values.items():
        whole = torch.cat(parts)
        finite = whole[whole.isfinite()]
        found[name] = float(finite.mean()) if len(finite) else None
        if name == "psnr":
            # Equal images have an infinite PSNR: they are counted, not averaged.
            found["equal_images"] = len(whole) - len(finite)
    return found


@torch.no_grad()
def _seam_energy(images: ImageSet, task: Task) -> seams.SeamEnergy:
    assert task.borders is not None
    parts = []
    # As they are: scaling would smooth the lines, and move them.
    for batch in _counted(images, task.batch, None, f"seams of {Path(images.source).name}"):
        height, width = batch.shape[2:]
        if (height, width) != (task.size, task.size):
            rule = "be that of the images where seams are measured"
            wrong_value("--size", rule, f"{task.size} for {width} x {height} pixels")
        parts.append(seams.line_gradients(batch.to(task.device), task.borders))
    return seams.seam_energy(torch.cat(parts))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
