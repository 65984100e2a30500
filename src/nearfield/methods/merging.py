"""ToMA (arXiv 2509.10918): tokens that are alike are merged before a block of a model and parted again after it.

Nothing is trained. In every region of the image a few tokens are chosen that represent the others best (facility
location); all tokens are shared out among them, and the block runs on the shorter sequence. A region is by default a
run of a Hilbert curve: a compact patch of the image that lies in one piece, so that nothing is gathered or scattered.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nearfield import blockwise, curves, planning, tiling
from nearfield._checks import (
    check_bool,
    check_int,
    check_member,
    check_number,
    check_tensor,
    shape_of,
    wrong_type,
    wrong_value,
)
from nearfield._types import Attended, Impl
from nearfield.attend import attend
from nearfield.geometry import Geometry, Grid, Shortened, check_geometry
from nearfield.keeping import device_name
from nearfield.merging import Group, Merging, Regions, merging_of
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering

Region = Literal["run", "window", "global"]
Placement = Literal["block", "module"]
Pieces = tuple[tuple[int, ...], ...]
"""For each image, how many tokens of its order may be merged with each other, one piece after another."""


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
        skip_blocks: how many of the first joint blocks and of the first single blocks are not merged. Models that have
            neither (UNets, PixArt) merge in all.
        size_bias: merged keys count as often as they have tokens: the log of that is added to the logits.
        placement: tokens are merged once around a "block", or, as in the paper, around each "module" of it that is to
            run on few, after norms and modulation.
    """

    ratio: float = 0.5
    region: Region = "run"
    region_size: int = 64
    sharpness: float = 50.0
    refresh: tuple[int, int] = (10, 5)
    groups: blockwise.Groups = "auto"
    skip_blocks: tuple[int, int] = (5, 5)
    size_bias: bool = False
    placement: Placement = "block"

    fids: ClassVar[dict[float, str]] = {0.25: "56", 0.5: "155", 0.75: "286"}
    """FIDs that were measured, by ratio."""

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
        object.__setattr__(
            self, "refresh", blockwise.checked_pair("refresh", self.refresh, 1, "(destinations, shares)")
        )
        blockwise.check_groups(self.groups)
        object.__setattr__(
            self, "skip_blocks", blockwise.checked_pair("skip_blocks", self.skip_blocks, 0, "(joint, single)")
        )
        check_bool("size_bias", self.size_bias)
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

    # -- where and when --------------------------------------------------------------------------------------------

    def block_group(self, kind: blockwise.Kind, block: int) -> int | None:
        """Which group the n-th block of a kind belongs to; None: it is not merged.

        A map is made at the first block of a group and serves all of it.
        """
        return blockwise.group_of(kind, block, self.skip_blocks, self.groups)

    def refresh_phase(self, step: int) -> tuple[int, int]:
        """Counts the renewals of destinations and shares: what was made in the same phase may be used again."""
        return blockwise.phase_of(step, self.refresh)

    # -- words -----------------------------------------------------------------------------------------------------

    @property
    def caution(self) -> str | None:
        """What `apply` warns of."""
        return blockwise.caution_of("Merge", self.ratio, self.fids)

    def __or__(self, attention: Any) -> "Merged":
        """Merge, and let merged tokens read as another method says: `Merge() | Hilbert()`."""
        return Merged(self, attention)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry: regions, and how many tokens are left."""
        del device  # regions are the same on all
        return self.describe_regions(geometry, self.regions(geometry))

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


# -- together with sparse attention --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """Merge, then read: what `merge | attention` gives.

    Tokens stand in the order that the attention wants, and are merged inside its runs. What is left of an image is a
    shorter line in the same order, along which the attention reads; blocks that are not merged read among all tokens.

    Args:
        merge: which tokens become one: `Merge`, or a method like it.
        attention: who reads whom, a method such as `Hilbert()`; None: everyone reads everyone.
    """

    merge: Any
    attention: Any = None

    fids: ClassVar[dict[float, str]] = Merge.fids | {0.5: f"{Merge.fids[0.5]}, and of 252 to 306 with tiles,"}
    """The same with attention, where that was measured, and of `Merge` alone where it was not."""

    def __post_init__(self) -> None:
        if self.attention is None:
            return
        if not hasattr(self.attention, "reader") or isinstance(self.attention, type | Merged):
            wrong_type("attention", "be a method such as nearfield.Hilbert()", repr(self.attention))
        if not isinstance(self.merge, Merge):
            wrong_type("merge", "be a Merge to go together with attention", type(self.merge).__name__)
        if self.merge.region == "window":
            hint = 'Use region="run": a run of a curve is a compact patch, too.'
            wrong_value("region", "not be 'window' together with attention along a curve", "'window'", hint)
        if self.merge.size_bias and not getattr(self.attention, "weighs_image_keys", True):
            name = type(self.attention).__name__
            hint = "It goes by weights or summaries that do not count how many tokens were merged."
            wrong_value("size_bias", f"be False together with {name} as it is set", True, hint)

    @property
    def dense_layers(self) -> Any:
        return getattr(self.attention, "dense_layers", ())

    @property
    def caution(self) -> str | None:
        """What `apply` warns of: what merging loses, and what the attention says of itself."""
        own = getattr(self.merge, "caution", None)
        if self.attention is not None:
            own = blockwise.caution_of("Merge", self.merge.ratio, self.fids)
        cautions = (own, getattr(self.attention, "caution", None))
        return " ".join(caution for caution in cautions if caution) or None

    @property
    def needs_moment(self) -> bool:
        """Whether readers remember from call to call."""
        return getattr(self.attention, "needs_moment", False)

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens: that of the attention, if there is one."""
        ordering: Ordering = (self.attention or self.merge).ordering(geometry, device=device)
        return ordering

    def regions(self, geometry: Geometry) -> Regions:
        """How the image tokens are cut in that order, and how many of each region are left."""
        regions: Regions = self.merge.regions(geometry, self._pieces(geometry))
        return regions

    def pieces(self, geometry: Geometry) -> Pieces:
        """Of every image, the lengths of the runs of that order which regions do not cross."""
        return self._pieces(geometry) or _images(geometry)

    def _pieces(self, geometry: Geometry) -> Pieces | None:
        if self.attention is None:
            return None
        pieces: Pieces = getattr(self.attention, "pieces", _images)(geometry)
        return pieces

    def merging(
        self, features: Tensor, geometry: Geometry, *, destinations: Tensor | None = None, impl: Impl = "auto"
    ) -> Any:
        """The map for image tokens that hold `features`, in the order of `ordering`."""
        pieces = self._pieces(geometry)
        return self.merge.merging(features, geometry, pieces=pieces, destinations=destinations, impl=impl)

    def shortened(self, geometry: Geometry, regions: Regions | None = None) -> Shortened:
        """What is left of the tokens, as a geometry of its own."""
        regions = regions or self.regions(geometry)
        return Shortened.of(geometry, tuple(zip(regions.lengths, regions.counts, strict=True)))

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Any:
        """What a layer needs to attend, among all tokens or, for a geometry that is `shortened`, merged ones."""
        if self.attention is None:
            return full_reader(geometry.num_tokens, device_name(device))
        return self.attention.reader(geometry, layer, heads=heads, device=device)

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer reads everything there is, or None."""
        if self.attention is None:
            return "everyone reads everyone"
        reason: str | None = self.attention.dense_layer_reason(layer, num_layers)
        return reason

    def dense_ends(self, num_steps: int) -> tuple[int, int]:
        """How many of the first and of the last steps have dense attention. Tokens are merged in all."""
        if self.attention is None:
            return 0, 0
        ends: tuple[int, int] = self.attention.dense_ends(num_steps)
        return ends

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What is merged, and what the attention is among merged tokens."""
        regions = self.regions(geometry)
        merged: str = self.merge.describe_regions(geometry, regions)
        if self.attention is None:
            return merged
        return f"{merged}\n{self.attention.describe(self.shortened(geometry, regions), device=device)}"


def _images(geometry: Geometry) -> Pieces:
    """Every image in one piece."""
    return tuple((math.prod(grid),) for grid in geometry.images)


class FullReader(NamedTuple):
    """Everyone reads everyone: for keys that have a bias."""

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
        return attend(query, key, value, self.plan, key_bias=key_bias, scale=scale, impl=impl)


@lru_cache(maxsize=64)
def full_reader(num_tokens: int, device: str) -> FullReader:
    with torch.inference_mode(False):
        return FullReader(planning.full(num_tokens, num_tokens, device=device))


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
    for image in pieces or _images(geometry):
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
