"""Baselines: simple ways to shorten sequences, for comparison with `Merge` and the sparse methods."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearfield._checks import check_int, check_number, wrong_value
from nearfield._memo import device_name
from nearfield._types import Attended, Impl
from nearfield.layout import Geometry, Grid
from nearfield.methods.base import Method, Pieces
from nearfield.methods.composition import Groups, MergeMethod
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.layers import LayerAttention
from nearfield.ops import Assignment, Regions, attend, matched
from nearfield.plan import Plan
from nearfield.plan import builders as planning


@dataclass(frozen=True)
class BipartiteMerge(MergeMethod):
    """ToMeSD (arXiv 2303.17604): random destinations, one in each cell of a grid, and the tokens most like them merged.

    Nothing is chosen by what the image holds but which tokens go; where in the image they go is not limited.

    Args:
        ratio: the share of image tokens that is merged away; at most what is not a destination.
        stride: sides of a cell.
        seed: of the random destinations.
    """

    name: ClassVar[str] = "bipartitemerge"
    is_baseline: ClassVar[bool] = True
    order = "raster"  # nothing has to lie together

    ratio: float = 0.5
    stride: int = 2
    seed: int = 0
    refresh: tuple[int, int] = (1, 1)
    groups: Groups = "auto"
    skip_blocks: tuple[int, int] = (5, 5)
    size_bias: bool = False

    fids: ClassVar[dict[float, str]] = {0.25: "93", 0.5: "296", 0.75: "389"}

    def __post_init__(self) -> None:
        check_int("stride", self.stride, at_least=2)
        check_int("seed", self.seed, at_least=0)
        most = 1 - 1 / self.stride**2
        check_number("ratio", self.ratio)
        if not 0 <= self.ratio <= most:
            cell = f"{self.stride}x{self.stride}"
            wrong_value("ratio", f"be from 0 to {most:g} where one token of {cell} stays", self.ratio)
        self.check_merging()

    def regions(self, geometry: Geometry, pieces: Pieces | None = None) -> Regions:
        """Every image is one."""
        assert pieces is None  # it does not go together with attention
        lengths, counts = [], []
        for grid in geometry.images:
            tokens = math.prod(grid)
            lengths.append(tokens)
            counts.append(
                max(tokens - math.floor(round(self.ratio * tokens, 6)), _num_cells(grid, self.stride))
            )
        return Regions(tuple(lengths), tuple(counts))

    def merging(
        self,
        features: Tensor,
        geometry: Geometry,
        *,
        pieces: Pieces | None = None,
        destinations: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Assignment:
        """The map for image tokens `[B, tokens, C]`: which tokens go, and where, is decided at once, so always anew."""
        del destinations, impl
        is_destination = _random_destinations(geometry.images, self.stride, self.seed)
        return matched(features, self.regions(geometry, pieces), is_destination)

    def describe_regions(self, geometry: Geometry, regions: Regions) -> str:
        cells = sum(_num_cells(grid, self.stride) for grid in geometry.images)
        return (
            f"{geometry}: {geometry.num_tokens} tokens; {regions.num_merged} of {regions.num_tokens} image tokens are"
            f" left\n  {cells} random destinations, one per {self.stride}x{self.stride}"
        )


@dataclass(frozen=True)
class StridedKeys(Method):
    """ToDo (arXiv 2402.13573): all tokens ask, and read the text and every second token of every second row.

    Args:
        stride: every how many tokens, in rows and columns.
    """

    name: ClassVar[str] = "stridedkeys"
    is_baseline: ClassVar[bool] = True
    everything: ClassVar[Mapping[str, Any]] = {"stride": 1}
    order = "raster"

    stride: int = 2
    dense_layers: int | tuple[int, ...] = 1
    dense_steps: DenseSteps = 0.2

    def __post_init__(self) -> None:
        check_int("stride", self.stride, at_least=1)
        self.check_dense_parts()

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "StridedLayer":
        """Which keys a layer reads, and who does."""
        del index, heads  # all read alike
        return _strided_layer(geometry, self.stride, device_name(device))

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        keys = len(self.layer(geometry, device=device).keys)
        words = f"{geometry}: {geometry.num_tokens} tokens read {keys} keys"
        return "\n".join([words, *self.pair_lines(geometry, device)])


@dataclass(frozen=True, eq=False)
class StridedLayer(LayerAttention):
    """Some keys, `[M]`, and a plan by which everyone reads them."""

    keys: Tensor
    plan: Plan

    @property
    def plans(self) -> tuple[Plan, ...]:  # type: ignore[override]
        return (self.plan,)

    def lists(self) -> list[Tensor]:
        return [*super().lists(), self.keys]

    @property
    def num_pairs(self) -> int:
        return self.plan.num_queries * self.plan.num_keys

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
        """Attention among tokens in raster order, `[B, H, N, D]`."""
        if key_bias is not None:
            key_bias = key_bias.expand(*key_bias.shape[:-1], key.shape[2]).index_select(-1, self.keys)
        key, value = (x.index_select(2, self.keys) for x in (key, value))
        return attend(query, key, value, self.plan, key_bias=key_bias, scale=scale, impl=impl)


@lru_cache(maxsize=64)
def _strided_layer(geometry: Geometry, stride: int, device: str) -> StridedLayer:
    kept = [torch.arange(*geometry.text_span, device="cpu")]
    for grid, (start, stop) in zip(geometry.images, geometry.image_spans, strict=True):
        tokens = torch.arange(start, stop, device="cpu").view(grid)
        steps = (slice(None),) * max(0, len(grid) - 2) + (slice(None, None, stride),) * min(2, len(grid))
        kept.append(tokens[steps].flatten())
    with torch.inference_mode(False):
        keys = torch.cat(kept).sort().values.to(device)
        return StridedLayer(keys, planning.full(geometry.num_tokens, len(keys), device=device))


def _cells(grid: Grid, stride: int) -> Tensor:
    """Which cell each token is in: squares of one frame, smaller ones at the edges; numbered from 0."""
    cell = torch.zeros((), dtype=torch.int64, device="cpu")
    for axis, side in enumerate(grid):
        box = stride if axis >= len(grid) - 2 else 1
        cell = cell[..., None] * -(-side // box) + torch.arange(side, device="cpu") // box
    return cell.flatten()


def _num_cells(grid: Grid, stride: int) -> int:
    return math.prod(-(-side // stride) if axis >= len(grid) - 2 else side for axis, side in enumerate(grid))


@lru_cache(maxsize=64)
def _random_destinations(images: tuple[Grid, ...], stride: int, seed: int) -> Tensor:
    """One token of each cell, `[tokens]` bool, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for grid in images:
        cell = _cells(grid, stride)
        shuffled = torch.randperm(len(cell), generator=generator, device="cpu")
        order = shuffled[cell[shuffled].argsort(stable=True)]
        first = torch.cat([torch.ones(1, dtype=torch.bool, device="cpu"), cell[order].diff() != 0])
        is_destination = torch.zeros(len(cell), dtype=torch.bool, device="cpu")
        is_destination[order[first]] = True
        chosen.append(is_destination)
    return torch.cat(chosen)
