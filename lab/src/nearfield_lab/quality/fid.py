"""Distances between two sets of images by the features of a network: FID, KID, precision and recall.

All are computed in float64. FID falls with the number of images: compare equal numbers only.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nearfield._checks import check_int, check_tensor, shape_of, wrong_value
from nearfield._files import check_fields
from nearfield_lab.storage import BadFile, read_tensors, write_tensors

_KIND = "feature statistics"
_MOST_DISTANCES = 2**24
"""Distances that are held at once."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """What is known of a set of images: the mean and covariance of its features, and, if kept, the features.

    Args:
        mean: `[d]` float64.
        covariance: `[d, d]` float64, unbiased.
        count: number of images.
        size: pixels per side at which the images were seen; 0 if unknown.
        features: `[count, d]` float32, or None. KID, precision and recall need them.
    """

    mean: Tensor
    covariance: Tensor
    count: int
    size: int = 0
    features: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensor("mean", self.mean, dims=1)
        if self.covariance.shape != (len(self.mean), len(self.mean)):
            wrong_value("covariance", f"have shape [{len(self.mean)}] * 2", shape_of(self.covariance))
        check_int("count", self.count, at_least=2)

    @classmethod
    def of(cls, features: Tensor, size: int = 0) -> "Statistics":
        """Statistics of features `[count, d]`, which are kept."""
        check_tensor("features", features, dims=2, hint="Expected [images, features].")
        if len(features) < 2:
            wrong_value("features", "hold at least two images", shape_of(features))
        exact = features.double()
        mean = exact.mean(dim=0)
        centred = exact - mean
        covariance = centred.T @ centred / (len(features) - 1)
        return cls(mean, covariance, len(features), size, features.float())

    def to(self, device: torch.device | str) -> "Statistics":
        """The same on another device."""
        features = None if self.features is None else self.features.to(device)
        return replace(
            self, mean=self.mean.to(device), covariance=self.covariance.to(device), features=features
        )

    def save(self, path: Path, *, with_features: bool = True) -> None:
        """Write a safetensors file with the number of images and their size in it."""
        tensors = {"mean": self.mean.cpu(), "covariance": self.covariance.cpu()}
        if with_features and self.features is not None:
            tensors["features"] = self.features.cpu()
        write_tensors(path, tensors, {"kind": _KIND, "format": 1, "count": self.count, "size": self.size})

    @classmethod
    def load(cls, path: Path) -> "Statistics":
        stored, facts = read_tensors(path)
        if facts.get("kind") != _KIND or not {"mean", "covariance"} <= stored.keys():
            raise BadFile(f"{path} does not hold feature statistics; `nearfield quality` writes such files")
        check_fields(path, facts, {"count": int, "size": int})
        return cls(
            stored["mean"], stored["covariance"], facts["count"], facts["size"], stored.get("features")
        )


def full_precision() -> AbstractContextManager[None]:
    """Inside, convolutions on a GPU multiply float32 as such, and do not round the factors to ten bits (TF32)."""
    context: AbstractContextManager[None] = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    return context


@torch.no_grad()
def features_of(batches: Iterable[Tensor], network: nn.Module) -> Tensor:
    """Features `[images, d]` float32 on the CPU of batches of images."""
    device = next(iter(network.state_dict().values())).device
    collected = []
    for images in batches:
        with full_precision():
            collected.append(network(images.to(device)).float().cpu())
    if not collected:
        wrong_value("batches", "hold at least one image", "none")
    return torch.cat(collected)


def frechet_distance(first: Statistics, second: Statistics) -> float:
    """FID: the Fréchet distance of two Gaussians.

    `|m1 - m2|^2 + tr C1 + tr C2 - 2 tr (C1 C2)^(1/2)`. The last trace is the sum of the square roots of the eigenvalues
    of the symmetric `A' C2 A` with `C1 = A A'`, where `A` are the eigenvectors of `C1` times the roots of their
    eigenvalues. Directions in which `C1` has no variance are left out, so that fewer images than features do no harm:
    no matrix is inverted and no complex root is taken.
    """
    if first.mean.shape != second.mean.shape:
        wrong_value("second", f"have features like the first ({shape_of(first.mean)})", shape_of(second.mean))
    offset = (first.mean - second.mean).square().sum()
    traces = first.covariance.trace() + second.covariance.trace()
    factor = _factor(first.covariance)
    product = factor.T @ second.covariance @ factor
    roots = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt()
    # Of equal sets rounding may leave a little below zero.
    return max(0.0, float(offset + traces - 2 * roots.sum()))


def _factor(covariance: Tensor) -> Tensor:
    """`A` of shape `[d, rank]` with `A A'` = covariance."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    rounding = values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    is_real = values > rounding
    factor: Tensor = vectors[:, is_real] * values[is_real].sqrt()
    return factor


class Estimate(NamedTuple):
    """A mean and its standard error (NaN where there is only one value)."""

    value: float
    error: float


def kernel_distance(first: Tensor, second: Tensor, *, blocks: int = 10, seed: int = 0) -> Estimate:
    """KID: the squared maximum mean discrepancy with the kernel `(x.y / d + 1)^3`, unbiased.

    Both sets of features `[n, d]` are shuffled and cut into blocks. The estimates of the blocks are independent, so
    their spread gives the standard error.
    """
    _check_features(first, second)
    check_int("blocks", blocks, at_least=1)
    if min(len(first), len(second)) < 2 * blocks:
        rule = f"be at most half the number of images ({min(len(first), len(second))})"
        wrong_value("blocks", rule, blocks)
    generator = torch.Generator().manual_seed(seed)
    parts = [
        features[torch.randperm(len(features), generator=generator).to(features.device)]
        .double()
        .chunk(blocks)
        for features in (first, second)
    ]
    values = torch.stack([_discrepancy(x, y) for x, y in zip(*parts, strict=False)])
    error = values.std() / math.sqrt(len(values)) if len(values) > 1 else torch.tensor(math.nan)
    return Estimate(float(values.mean()), float(error))


def _discrepancy(first: Tensor, second: Tensor) -> Tensor:
    within = [_off_diagonal_mean(_kernel(x, x)) for x in (first, second)]
    return within[0] + within[1] - 2 * _kernel(first, second).mean()


def _kernel(first: Tensor, second: Tensor) -> Tensor:
    return (first @ second.T / first.shape[1] + 1) ** 3


def _off_diagonal_mean(square: Tensor) -> Tensor:
    count = len(square)
    return (square.sum() - square.diagonal().sum()) / (count * (count - 1))


class PrecisionRecall(NamedTuple):
    """Precision: how many samples look like references. Recall: how many references the samples cover."""

    precision: float
    recall: float


def precision_recall(samples: Tensor, references: Tensor, *, neighbours: int = 3) -> PrecisionRecall:
    """Shares of one set that lie within reach of the other (Kynkäänniemi et al. 2019).

    A point's reach is the distance to its k-th nearest neighbour in its own set.
    """
    _check_features(samples, references)
    check_int("neighbours", neighbours, at_least=1)
    smaller = min(len(samples), len(references))
    if smaller <= neighbours:
        wrong_value("neighbours", f"be below the number of images ({smaller})", neighbours)
    samples, references = samples.double(), references.double()
    return PrecisionRecall(
        _share_within_reach(samples, references, _reach(references, neighbours)),
        _share_within_reach(references, samples, _reach(samples, neighbours)),
    )


def _reach(points: Tensor, neighbours: int) -> Tensor:
    # The nearest of all is the point itself.
    rows = [torch.cdist(part, points).kthvalue(neighbours + 1, dim=1)[0] for part in _parts(points, points)]
    return torch.cat(rows)


def _share_within_reach(points: Tensor, others: Tensor, reach: Tensor) -> float:
    inside = [(torch.cdist(part, others) <= reach).any(dim=1) for part in _parts(points, others)]
    return float(torch.cat(inside).double().mean())


def _parts(points: Tensor, others: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = points.split(max(1, _MOST_DISTANCES // len(others)))
    return parts


def cosine_distance(first: Tensor, second: Tensor) -> Tensor:
    """1 minus the cosine of the features `[n, d]` of images in pairs, `[n]` float64: 0 for equal ones."""
    _check_features(first, second)
    if len(first) != len(second):
        wrong_value("second", f"have as many images as the first ({len(first)})", len(second))
    return 1 - torch.cosine_similarity(first.double(), second.double())


def _check_features(first: Tensor, second: Tensor) -> None:
    check_tensor("first", first, dims=2, hint="Expected [images, features].")
    check_tensor("second", second, dims=2, hint="Expected [images, features].")
    if first.shape[1] != second.shape[1]:
        wrong_value("second", f"have {first.shape[1]} features like the first", shape_of(second))
