"""ToMA (arXiv 2509.10918): tokens that are alike are merged before a block of a model and parted again after it.

Nothing is trained. In every region of the image a few tokens are chosen that represent the others best (facility
location); all tokens are shared out among them, and the block runs on the shorter sequence. A region is by default a
run of a Hilbert curve: a compact patch of the image that lies in one piece, so that nothing is gathered or scattered.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from nearfield._checks import (
    check_int,
    check_member,
    check_number,
    check_tensor,
    shape_of,
    wrong_value,
)
from nearfield._memo import device_name
from nearfield._types import Impl
from nearfield.layout import Geometry, Grid, Ordering, check_geometry, curves, tiling
from nearfield.methods.base import Pieces
from nearfield.methods.composition import Groups, MergeMethod
from nearfield.ops import Group, Merging, Regions, merging_of

Region = Literal["run", "window", "global"]
Placement = Literal["block", "module"]


@dataclass(frozen=True)
class Merge(MergeMethod):
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
        skip_blocks: how many of the first joint blocks and of the first single blocks are not merged. Models that have
            neither (UNets, PixArt) merge in all.
        size_bias: merged keys count as often as they have tokens: the log of that is added to the logits.
        placement: tokens are merged once around a "block", or, as in the paper, around each "module" of it that is to
            run on few, after norms and modulation.
    """

    name: ClassVar[str] = "merge"
    example: ClassVar[Mapping[str, Any]] = {"region_size": 16}

    ratio: float = 0.5
    region: Region = "run"
    region_size: int = 64
    sharpness: float = 50.0
    refresh: tuple[int, int] = (10, 5)
    groups: Groups = "auto"
    skip_blocks: tuple[int, int] = (5, 5)
    size_bias: bool = False
    placement: Placement = "block"

    fids: ClassVar[dict[float, str]] = {0.25: "56", 0.5: "155", 0.75: "286"}
    fids_with_attention: ClassVar[dict[float, str]] = {0.5: "155, and of 252 to 306 with tiles,"}

    def __post_init__(self) -> None:
        check_number("ratio", self.ratio)
        if not 0 <= self.ratio < 1:
            wrong_value("ratio", "be at least 0 and below 1", self.ratio)
        check_member("region", self.region, get_args(Region))
        check_int("region_size", self.region_size, at_least=1)
        if self.region == "window" and math.isqrt(self.region_size) ** 2 != self.region_size:
            hint = f"Use {math.isqrt(self.region_size) ** 2}, or runs."
            wrong_value("region_size", "be a square number for windows", self.region_size, hint)
        check_number("sharpness", self.sharpness)
        if not self.sharpness > 0:
            wrong_value("sharpness", "be above 0", self.sharpness)
        self.check_merging()
        check_member("placement", self.placement, get_args(Placement))

    # -- which tokens become one -----------------------------------------------------------------------------------

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens in which regions lie in one piece: the curve, window by window, or raster."""
        check_geometry(geometry)
        return _ordering(self.region, self.region_size, geometry, device_name(device))

    def regions(self, geometry: Geometry, pieces: Pieces | None = None) -> Regions:
        """How the image tokens are cut in that order, each image by itself, and how many of each region are left.

        Args:
            pieces: of another order of the tokens, the runs that are not to be mixed. All but the last piece of an
                image keep as many tokens as let the next one begin on a multiple of a block.
        """
        check_geometry(geometry)
        if pieces is not None and self.region == "window":
            hint = 'Use region="run": a run of a curve is a compact patch, too.'
            wrong_value("region", "not be 'window' in an order made for attention", repr(self.region), hint)
        return _regions(self.region, self.region_size, self.ratio, geometry, pieces)

    def merging(
        self,
        features: Tensor,
        geometry: Geometry,
        *,
        pieces: Pieces | None = None,
        destinations: Tensor | None = None,
        impl: Impl = "auto",
    ) -> Merging:
        """The map for image tokens that hold `features`. Never waits for the device.

        Args:
            features: `[B, image tokens, C]`, without the text, in the order of `ordering(geometry)`, or of `pieces`.
            pieces: as in `regions`.
            destinations: those of an earlier map, where only the shares are to be renewed.
        """
        regions = self.regions(geometry, pieces)
        check_tensor("features", features, dims=3, hint="Expected [batch, image tokens, channels].")
        if features.shape[1] != regions.num_tokens:
            rule = f"have the {regions.num_tokens} image tokens of the geometry ({geometry})"
            wrong_value("features", rule, shape_of(features))
        return self.merging_in(features, regions, destinations=destinations, impl=impl)

    def merging_in(
        self, features: Tensor, regions: Regions, *, destinations: Tensor | None = None, impl: Impl = "auto"
    ) -> Merging:
        """The same for some of the regions, or all: they know nothing of each other."""
        sharpness = float(self.sharpness)
        return merging_of(features, regions, sharpness=sharpness, destinations=destinations, impl=impl)

    def key_bias(self, merging: Merging) -> Tensor | None:
        """What is added to the logits of merged keys, `[B, 1, merged]`, or None."""
        return merging.key_bias if self.size_bias else None

    # -- where it applies --------------------------------------------------------------------------------------------

    @property
    def merges_modules(self) -> bool:
        return self.placement == "module"

    @property
    def can_split(self) -> bool:
        """Ranks merge inside of regions, each by itself."""
        return self.region != "global"

    @property
    def compile_reason(self) -> str | None:
        return 'with placement="module" tokens are merged inside of blocks' if self.merges_modules else None

    def check_goes_with_attention(self) -> None:
        if self.region == "window":
            hint = 'Use region="run": a run of a curve is a compact patch, too.'
            wrong_value("region", "not be 'window' together with attention along a curve", "'window'", hint)

    def describe_regions(self, geometry: Geometry, regions: Regions) -> str:
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
def _regions(region: Region, size: int, ratio: float, geometry: Geometry, pieces: Pieces | None) -> Regions:
    if region == "window":
        lengths = [length for grid in geometry.images for length in _windows(grid, size)[1]]
        return Regions(tuple(lengths), tuple(_num_left(length, ratio) for length in lengths))
    lengths, counts = [], list[int]()
    start = geometry.text if geometry.text_first else 0
    for image in pieces or tuple((math.prod(grid),) for grid in geometry.images):
        for number, tokens in enumerate(image):
            step = tokens if region == "global" else size
            runs = [min(step, tokens - begin) for begin in range(0, tokens, step)]
            left = [_num_left(length, ratio) for length in runs]
            if ratio and number < len(image) - 1:
                unit = tiling.shared_unit(sum(left))
                left = _adjusted(left, runs, tiling.aligned_count(sum(left), start, start + tokens, unit))
            lengths, counts, start = lengths + runs, counts + left, start + sum(left)
    return Regions(tuple(lengths), tuple(counts))


def _adjusted(counts: list[int], lengths: list[int], total: int) -> list[int]:
    """Counts as even as before that add up to `total`, or come as close as they can."""
    counts = list(counts)
    step = 1 if total > sum(counts) else -1
    while sum(counts) != total:
        before = sum(counts)
        for number, length in enumerate(lengths):
            if sum(counts) != total and 1 <= counts[number] + step <= length:
                counts[number] += step
        if sum(counts) == before:
            break
    return counts


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
