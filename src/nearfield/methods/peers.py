"""Baselines: simple ways to shorten sequences, for comparison with `Merge` and the sparse methods."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nearfield import blockwise, planning
from nearfield._checks import check_bool, check_int, check_number, wrong_value
from nearfield._types import Attended, Impl
from nearfield.attend import attend
from nearfield.dense_parts import DenseParts, DenseSteps
from nearfield.geometry import Geometry, Grid
from nearfield.keeping import device_name
from nearfield.merging import Assignment, Regions, matched
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering, along


@dataclass(frozen=True)
class BipartiteMerge:
    """ToMeSD (arXiv 2303.17604): random destinations, one in each cell of a grid, and the tokens most like them merged.

    Nothing is chosen by what the image holds but which tokens go; where in the image they go is not limited.

    Args:
        ratio: the share of image tokens that is merged away; at most what is not a destination.
        stride: sides of a cell.
        seed: of the random destinations.
        refresh, groups, skip_blocks, size_bias: as in `Merge`.
    """

    ratio: float = 0.5
    stride: int = 2
    seed: int = 0
    refresh: tuple[int, int] = (1, 1)
    groups: blockwise.Groups = "auto"
    skip_blocks: tuple[int, int] = (5, 5)
    size_bias: bool = False

    fids: ClassVar[dict[float, str]] = {0.25: "93", 0.5: "296", 0.75: "389"}
    """FIDs that were measured, by ratio."""

    def __post_init__(self) -> None:
        check_int("stride", self.stride, at_least=2)
        check_int("seed", self.seed, at_least=0)
        most = 1 - 1 / self.stride**2
        check_number("ratio", self.ratio)
        if not 0 <= self.ratio <= most:
            cell = f"{self.stride}x{self.stride}"
            wrong_value("ratio", f"be from 0 to {most:g} where one token of {cell} stays", self.ratio)
        pairs = {"refresh": (1, "(destinations, shares)"), "skip_blocks": (0, "(joint, single)")}
        for name, (least, meaning) in pairs.items():
            object.__setattr__(self, name, blockwise.checked_pair(name, getattr(self, name), least, meaning))
        blockwise.check_groups(self.groups)
        check_bool("size_bias", self.size_bias)

    @property
    def caution(self) -> str | None:
        """What `apply` warns of."""
        return blockwise.caution_of("BipartiteMerge", self.ratio, self.fids)

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """As tokens are: nothing has to lie together."""
        return along("raster", geometry, device_name(device))

    def regions(self, geometry: Geometry, pieces: Any = None) -> Regions:
        """Every image is one."""
        assert pieces is None  # `Merged` takes it alone
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
        pieces: Any = None,
        destinations: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Assignment:
        """The map for image tokens `[B, tokens, C]`: which tokens go, and where, is decided at once, so always anew."""
        del destinations, impl
        is_destination = _random_destinations(geometry.images, self.stride, self.seed)
        return matched(features, self.regions(geometry, pieces), is_destination)

    def block_group(self, kind: blockwise.Kind, block: int) -> int | None:
        return blockwise.group_of(kind, block, self.skip_blocks, self.groups)

    def refresh_phase(self, step: int) -> tuple[int, int]:
        return blockwise.phase_of(step, self.refresh)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        del device
        return self.describe_regions(geometry, self.regions(geometry))

    def describe_regions(self, geometry: Geometry, regions: Regions) -> str:
        cells = sum(_num_cells(grid, self.stride) for grid in geometry.images)
        return (
            f"{geometry}: {geometry.num_tokens} tokens; {regions.num_merged} of {regions.num_tokens} image tokens are"
            f" left\n  {cells} random destinations, one per {self.stride}x{self.stride}"
        )


@dataclass(frozen=True)
class StridedKeys(DenseParts):
    """ToDo (arXiv 2402.13573): all tokens ask, and read the text and every second token of every second row.

    Args:
        stride: every how many tokens, in rows and columns.
        dense_layers, dense_steps: as in `Hilbert`.
    """

    stride: int = 2
    dense_layers: int | tuple[int, ...] = 1
    dense_steps: DenseSteps = 0.2

    def __post_init__(self) -> None:
        check_int("stride", self.stride, at_least=1)
        self.check_dense_parts()

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        return along("raster", geometry, device_name(device))

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "StridedReader":
        """Which keys a layer reads, and who does."""
        del layer, heads  # all read alike
        return _strided_reader(geometry, self.stride, device_name(device))

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        keys = len(self.reader(geometry, device=device).keys)
        share = keys / geometry.num_tokens
        return (
            f"{geometry}: {geometry.num_tokens} tokens read {keys} keys\n  pairs kept: {share:.1%} "
            f"(at most {1 / share:.2f}x faster than dense)"
        )


class StridedReader(NamedTuple):
    """Some keys, `[M]`, and a plan by which everyone reads them."""

    keys: Tensor
    plan: Plan

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
def _strided_reader(geometry: Geometry, stride: int, device: str) -> StridedReader:
    kept = [torch.arange(*geometry.text_span, device="cpu")]
    for grid, (start, stop) in zip(geometry.images, geometry.image_spans, strict=True):
        tokens = torch.arange(start, stop, device="cpu").view(grid)
        steps = (slice(None),) * max(0, len(grid) - 2) + (slice(None, None, stride),) * min(2, len(grid))
        kept.append(tokens[steps].flatten())
    with torch.inference_mode(False):
        keys = torch.cat(kept).sort().values.to(device)
        return StridedReader(keys, planning.full(geometry.num_tokens, len(keys), device=device))


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
