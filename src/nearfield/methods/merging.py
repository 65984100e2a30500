"""ToMA (arXiv 2509.10918): tokens that are alike are merged before a block of a model and parted again after it.

Nothing is trained. In every region of the image a few tokens are chosen that represent the others best (facility
location); all tokens are shared out among them, and the block runs on the shorter sequence. A region is by default a
run of a Hilbert curve: a compact patch of the image that lies in one piece, so that nothing is gathered or scattered.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from nearfield import curves
from nearfield._checks import check_int, check_member, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Impl
from nearfield.geometry import Geometry, Grid
from nearfield.merging import Group, Merging, Regions, merging_of
from nearfield.tokenmap import Ordering

Region = Literal["run", "window", "global"]
Kind = Literal["joint", "single"]


@dataclass(frozen=True)
class Merge:
    """Merge alike tokens inside regions.

    Args:
        ratio: the share of image tokens that is merged away, below 1; 0 changes nothing.
        region: tokens are merged inside "run"s of a Hilbert curve, square "window"s, or each image as a whole
            ("global").
        region_size: tokens per run or window; a square number for windows.
        sharpness: how strongly a token prefers destinations that are more alike: about 50 spreads it over several,
            infinity gives it to one.
        refresh: after how many denoising steps destinations are chosen anew, and after how many the shares.
        groups: how many consecutive blocks use one map; "auto": all of a kind.
        skip_blocks: how many of the first joint blocks and of the first single blocks are not merged.
        size_bias: merged keys count as often as they have tokens: the log of that is added to the logits.
    """

    ratio: float = 0.5
    region: Region = "run"
    region_size: int = 64
    sharpness: float = 50.0
    refresh: tuple[int, int] = (10, 5)
    groups: int | Literal["auto"] = "auto"
    skip_blocks: tuple[int, int] = (5, 5)
    size_bias: bool = False

    def __post_init__(self) -> None:
        _check_number("ratio", self.ratio)
        if not 0 <= self.ratio < 1:
            wrong_value("ratio", "be at least 0 and below 1", self.ratio)
        check_member("region", self.region, get_args(Region))
        check_int("region_size", self.region_size, at_least=1)
        if self.region == "window" and math.isqrt(self.region_size) ** 2 != self.region_size:
            hint = f"Use {math.isqrt(self.region_size) ** 2}, or runs."
            wrong_value("region_size", "be a square number for windows", self.region_size, hint)
        _check_number("sharpness", self.sharpness)
        if not self.sharpness > 0:
            wrong_value("sharpness", "be above 0", self.sharpness)
        object.__setattr__(
            self, "refresh", _checked_pair("refresh", self.refresh, 1, "(destinations, shares)")
        )
        if self.groups != "auto":
            check_int("groups", self.groups, at_least=1)
        object.__setattr__(
            self, "skip_blocks", _checked_pair("skip_blocks", self.skip_blocks, 0, "(joint, single)")
        )
        if not isinstance(self.size_bias, bool):
            wrong_type("size_bias", "be True or False", repr(self.size_bias))

    # -- which tokens become one -----------------------------------------------------------------------------------

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens in which regions lie in one piece: the curve, window by window, or raster."""
        _check_geometry(geometry)
        return _ordering(self.region, self.region_size, geometry, str(device))

    def regions(self, geometry: Geometry) -> Regions:
        """How the image tokens are cut in that order, each image by itself, and how many of each region are left."""
        _check_geometry(geometry)
        return _regions(self.region, self.region_size, self.ratio, geometry)

    def merging(
        self,
        features: Tensor,
        geometry: Geometry,
        *,
        destinations: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Merging:
        """The map for image tokens that hold `features`. Never waits for the device.

        Args:
            features: `[B, image tokens, C]`, without the text, in the order of `ordering(geometry)`.
            destinations: those of an earlier map, where only the shares are to be renewed.
        """
        regions = self.regions(geometry)
        check_tensor("features", features, dims=3, hint="Expected [batch, image tokens, channels].")
        if features.shape[1] != regions.num_tokens:
            rule = f"have the {regions.num_tokens} image tokens of the geometry ({geometry})"
            wrong_value("features", rule, shape_of(features))
        sharpness = float(self.sharpness)
        return merging_of(features, regions, sharpness=sharpness, destinations=destinations, impl=impl)

    def key_bias(self, merging: Merging) -> Tensor | None:
        """What is added to the logits of merged keys, `[B, 1, merged]`, or None."""
        return merging.key_bias if self.size_bias else None

    # -- where and when --------------------------------------------------------------------------------------------

    def block_group(self, kind: Kind, block: int) -> int | None:
        """Which group the n-th joint or single block belongs to; None: it is not merged.

        A map is made at the first block of a group and serves all of it.
        """
        check_member("kind", kind, get_args(Kind))
        check_int("block", block, at_least=0)
        place = block - self.skip_blocks[get_args(Kind).index(kind)]
        if place < 0:
            return None
        return 0 if self.groups == "auto" else place // self.groups

    def refresh_phase(self, step: int) -> tuple[int, int]:
        """Counts the renewals of destinations and shares: what was made in the same phase may be used again."""
        check_int("step", step, at_least=0)
        destinations, shares = self.refresh
        return step // destinations, step // shares

    # -- words -----------------------------------------------------------------------------------------------------

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry: regions, and how many tokens are left."""
        del device  # regions are the same on all
        regions = self.regions(geometry)
        left = f"{regions.num_merged} of {regions.num_tokens} image tokens are left"
        lines = [f"{geometry}: {geometry.num_tokens} tokens; {left}"]
        lines += [f"  {_group_words(self.region, group)}" for group in regions.groups]
        manner = (
            f"shared out with sharpness {self.sharpness:g}"
            if math.isfinite(self.sharpness)
            else "given whole"
        )
        lines.append(
            f"  tokens are {manner}; {'log(size) on' if self.size_bias else 'no bias on'} merged keys"
        )
        return "\n".join(lines)


def _group_words(region: Region, group: Group) -> str:
    noun = {"run": "run", "window": "window", "global": "image"}[region]
    tokens = "1 token" if group.length == 1 else f"{group.length} tokens"
    if group.num_regions == 1:
        return f"1 {noun} of {tokens}: {group.num_left} left"
    return f"{group.num_regions} {noun}s of {tokens}: {group.num_left} left of each"


# -- checks --------------------------------------------------------------------------------------------------------


def _check_geometry(geometry: object) -> None:
    if not isinstance(geometry, Geometry):
        wrong_type(
            "geometry", "be a Geometry", type(geometry).__name__, "Write Geometry(grid=(64, 64), text=512)."
        )


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(name, "be a number", repr(value))


def _checked_pair(name: str, pair: object, least: int, meaning: str) -> tuple[int, int]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        wrong_type(name, f"be a pair {meaning}", repr(pair))
    for value in pair:
        check_int(name, value, at_least=least)
    return pair[0], pair[1]


# -- layouts -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _ordering(region: Region, size: int, geometry: Geometry, device: str) -> Ordering:
    with torch.inference_mode(False):
        if region == "window":
            orders = [_windows(grid, size)[0] for grid in geometry.images]
        else:
            make = curves.hilbert if region == "run" else curves.raster
            orders = [make(grid) for grid in geometry.images]
        return Ordering.joined(orders).to(device)


@lru_cache(maxsize=64)
def _regions(region: Region, size: int, ratio: float, geometry: Geometry) -> Regions:
    lengths: list[int] = []
    for grid in geometry.images:
        if region == "window":
            lengths += _windows(grid, size)[1]
        else:
            tokens = math.prod(grid)
            step = tokens if region == "global" else size
            lengths += [min(step, tokens - start) for start in range(0, tokens, step)]
    return Regions(tuple(lengths), tuple(_num_left(length, ratio) for length in lengths))


def _num_left(length: int, ratio: float) -> int:
    removed = math.floor(round(ratio * length, 6))  # 0.29 * 100 is a little below 29
    return max(1, length - removed)


def _windows(grid: Grid, size: int) -> tuple[Tensor, list[int]]:
    """The tokens of a grid window by window, and the tokens of each.

    A window is flat: two equal sides in the image, one frame deep. Those at the edges may be smaller; larger ones stand
    first, so that windows of one size are neighbours.
    """
    side = math.isqrt(size)
    boxes = (size,) if len(grid) == 1 else (1,) * (len(grid) - 2) + (side, side)
    window = torch.zeros((), dtype=torch.int64, device="cpu")
    for length, box in zip(grid, boxes, strict=True):
        place = torch.arange(length, device="cpu") // box
        window = window[..., None] * -(-length // box) + place
    window = window.flatten()
    sizes = window.bincount()
    by_size = sizes.argsort(descending=True, stable=True)
    order = curves.inverse(by_size)[window].argsort(stable=True)
    return order, sizes[by_size].tolist()
