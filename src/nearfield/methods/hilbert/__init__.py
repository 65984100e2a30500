"""HilbertA (arXiv 2509.26538), attention inside runs of a space-filling curve, and what goes beyond it.

Image tokens are ordered along a Hilbert curve, so a run of the sequence is a compact patch of the image. In the paper
every token reads the tile it is in, a long run. Tiles slide by a fraction of a tile per layer, so what two tiles could
not exchange in one layer they exchange in the next. The text is read by all, and reads all. So does a small shared
region of the image, where one is wanted (with `share="keys"` it reads only its tile).

Beyond the paper: each block of queries reads what is nearest to it in the image, instead of a tile, so that few
neighbours are parted; and a far field, which reads all the rest in summary. With as many pairs both keep far more of
the pictures (docs/results.md), so they are the default; `Hilbert(near="tile", shared="centre", far=None)` is the
paper's method. Also grids of any size and of three sides, closed curves, shared regions spread over the image, and
tiles that differ between heads.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, get_args

import torch

from nearfield._checks import check_bool, check_int, check_member, wrong_value
from nearfield._memo import device_name
from nearfield.layout import Curve, Geometry, Ordering, Shared, check_geometry
from nearfield.methods.base import Method, PlanMethod, Section
from nearfield.methods.borders import Borders, Reads, borders_of_reads
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.hilbert.describe import image_lines
from nearfield.methods.hilbert.far_field import far_field_of, interleaved_far_field
from nearfield.methods.hilbert.layout import (
    DEFAULT_TILES,
    Near,
    Pattern,
    Share,
    TextReads,
    block_sizes,
    layout_of,
    ordering_of,
    pieces_of,
)
from nearfield.methods.hilbert.plans import interleaved_near_plan, near_plan
from nearfield.methods.hilbert.view import view_of
from nearfield.methods.layers import PlanLayer, Summary
from nearfield.methods.view import View
from nearfield.plan import Plan

__all__ = ["DEFAULT_TILES", "Hilbert", "Near", "Share", "TextReads"]


@dataclass(frozen=True)
class Hilbert(PlanMethod):
    """Attention around blocks of a curve, or inside sliding tiles of it.

    Args:
        tiles: number of tiles per image; 16 unless `tile_size` is given, or, around blocks, as many as make tiles of
            512 tokens or more. Several numbers are of the layers from the first on, dense ones counted, too; the last
            is of all that follow.
        tile_size: tokens per tile, instead of `tiles`.
        near: what a token reads exactly: what is "around" its block of queries, as many tokens as a tile holds, those
            nearest to the block in the image; then there are no tiles, and nothing slides. Or the "tile" it is in.
        cycle: layers after which the tiles are back where they started; 1 means they do not slide.
        shared: image tokens that everyone reads: "none", the "centre" of the image, or small regions "distributed"
            over it.
        share: "two-way": shared tokens also read everything, as the text does; "keys": they read only their tile.
        shared_tokens: how many tokens are shared; by default a box with a quarter of each side. Rounded to whole
            blocks.
        curve: "auto" picks the Hilbert curve with the best locality for the grid, open or closed.
        far: tokens per summary of what lies outside the tile (their mean key and value, counted as often as there are
            tokens); None, or 0, for no far field.
        summary: "mean": of keys and of values, as if the tokens of a window were all alike; "weighted": tokens count as
            they do for the mean query, and windows whose keys differ weigh more; "sloped": weighted, and what windows
            give follows each query to first order, by one matrix a head. That is nearer to dense with the same pairs,
            takes more launches, and does not go over ranks.
        text_reads: what text reads of the images: "all" of their tokens; or the "summary", the far field of everything,
            which spares the most where an image is small beside its text.
        dense_layers: how many of the first layers stay dense, or the indices of those that do (negative ones count
            from the end).
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them; two numbers
            are of the first and of the last steps.
        interleave: heads slide, too: head `h` of layer `l` takes the tiles of layer `l + h`, so that no cut is common
            to all heads.
    """

    name: ClassVar[str] = "hilbert"
    example: ClassVar[Mapping[str, Any]] = {"tiles": 4}
    everything: ClassVar[Mapping[str, Any]] = {"tiles": 1}
    ladders: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tiles": (4, 8, 16, 32, 64),
        "far": (8, 16, 32, 64),
        "text_reads": ("all", "summary"),
    }

    tiles: int | tuple[int, ...] | None = None
    tile_size: int | None = None
    near: Near = "around"
    cycle: int = 4
    shared: Shared = "none"
    share: Share = "two-way"
    shared_tokens: int | None = None
    curve: Curve = "auto"
    far: int | None = 16
    summary: Summary = "weighted"
    text_reads: TextReads = "all"
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: DenseSteps = 0.15
    interleave: bool = False

    def __post_init__(self) -> None:
        if self.far == 0:  # how command lines and forms say None
            object.__setattr__(self, "far", None)
        if self.tiles is not None and self.tile_size is not None:
            wrong_value("tile_size", "be given instead of `tiles`, not with it", (self.tiles, self.tile_size))
        object.__setattr__(self, "tiles", _checked_tiles(self.tiles))
        for name, least in (("tile_size", 1), ("shared_tokens", 1), ("far", 2)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=least)
        check_member("near", self.near, get_args(Near))
        check_int("cycle", self.cycle, at_least=1)
        check_member("shared", self.shared, get_args(Shared))
        check_member("share", self.share, get_args(Share))
        check_member("curve", self.curve, get_args(Curve))
        check_member("summary", self.summary, get_args(Summary))
        check_member("text_reads", self.text_reads, get_args(TextReads))
        if self.text_reads == "summary" and self.far is None:
            wrong_value(
                "text_reads", 'be "all" where `far` is None', "'summary'", "There are no summaries to read."
            )
        if self.shared == "none" and self.shared_tokens is not None:
            wrong_value("shared_tokens", 'be left out where `shared` is "none"', self.shared_tokens)
        check_bool("interleave", self.interleave)
        if self.interleave and self.near == "around":
            hint = 'Nothing slides there; tiles do: near="tile".'
            wrong_value("interleave", 'be False where `near` is "around"', True, hint)
        self.check_dense_parts()

    # -- tiles by layer ------------------------------------------------------------------------------------------

    def tiles_in(self, layer: int) -> int | None:
        """The number of tiles in a layer; None where their size says it."""
        if isinstance(self.tiles, tuple):
            return self.tiles[min(layer, len(self.tiles) - 1)]
        is_by_size = self.tile_size is not None or self.near == "around"
        return DEFAULT_TILES if self.tiles is None and not is_by_size else self.tiles

    @property
    def tile_changes(self) -> tuple[int, ...]:
        """The layers from which on there is another number of tiles; the first layer is one of them."""
        named = self.tiles if isinstance(self.tiles, tuple) else (self.tiles,)
        return (0, *(layer for layer, (before, now) in enumerate(pairwise(named), 1) if before != now))

    @property
    def phases(self) -> int:
        """How many layers with one number of tiles differ in who reads whom."""
        return 1 if self.near == "around" else self.cycle

    @property
    def reads_alike(self) -> bool:
        """Whether all sparse layers read the same."""
        return self.phases == 1 and not isinstance(self.tiles, tuple)

    # -- who reads whom ------------------------------------------------------------------------------------------

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens (all images, one after another; the text stays where it is).

        It depends on the geometry alone, not on the blocks of a plan: the order is the same for every device.
        """
        check_geometry(geometry)
        return ordering_of(self._pattern(), geometry, device_name(device))

    def plan(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        q_block: int | None = None,
        k_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Plan:
        """Who reads whom in a layer, among tokens in the order of `ordering`.

        Tiles and shifts are rounded to `q_block`, what is around a block of queries to `k_block` (see `describe`).
        Plans are kept: a geometry has at most `phases` for each number of tiles.

        Args:
            heads: needed with `interleave`, where heads differ.
            q_block, k_block: sizes of the lists' blocks; by default those that suit the device and the tiles.
        """
        check_geometry(geometry)
        check_int("layer", layer, at_least=0)
        pattern, phase = self._pattern(layer), layer % self.phases
        sizes = *block_sizes(pattern, geometry, q_block, k_block, device), device_name(device)
        if not self.interleave:
            return near_plan(pattern, geometry, phase, *sizes)
        if heads is None:
            wrong_value("heads", "be given where heads are interleaved", None, "Pass the number of heads.")
        check_int("heads", heads, at_least=1)
        return interleaved_near_plan(pattern, geometry, phase, heads, *sizes)

    def sections(self, geometry: Geometry) -> tuple[Section, ...]:
        """Of each image the shared tokens, and its ring."""
        check_geometry(geometry)
        found, is_spread = [], self.share == "two-way"
        for segment in layout_of(self._pattern(), geometry, 1).segments:
            found.append(Section(segment.shared, is_spread=is_spread))
            found.append(Section(segment.ring, self.far or 1, is_spread))
        return tuple(section for section in found if section.span[0] < section.span[1])

    @property
    def can_split(self) -> bool:
        return self.far is None or self.summary != "sloped"

    def check_layers(self, num_layers: int) -> None:
        if self.tile_changes[-1] >= num_layers:
            wrong_value("tiles", f"change within the {num_layers} layers of the model", self.tiles)
        super().check_layers(num_layers)

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        q_block: int | None = None,
        k_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PlanLayer:
        """Everything a layer needs to attend, ready made: the plan, and the far field's."""
        near = self.plan(geometry, index, heads=heads, q_block=q_block, k_block=k_block, device=device)
        if self.far is None:
            return PlanLayer(near, None, self.summary)
        unit = math.lcm(near.q_block, self.far)
        if self.near == "tile" and unit % near.k_block:
            rule = f"divide lcm(q_block, far) = {unit}, on multiples of which tiles are cut"
            wrong_value("k_block", rule, near.k_block)
        sizes = near.q_block, near.k_block, device_name(device)
        pattern, phase = self._pattern(index), index % self.phases
        if self.interleave:
            assert heads is not None  # `plan` asked for it
            far = interleaved_far_field(pattern, geometry, phase, heads, *sizes)
        else:
            far = far_field_of(pattern, geometry, phase, *sizes)
        return PlanLayer(near, far, self.summary)

    # -- among merged tokens -------------------------------------------------------------------------------------

    def pieces(self, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
        """Of every image, how many tokens are shared and how many are not: the two are not to be merged."""
        check_geometry(geometry)
        return pieces_of(self._pattern(), geometry)

    @property
    def weighs_image_keys(self) -> bool:
        return self.far is None

    # -- in the picture ------------------------------------------------------------------------------------------

    def borders(
        self,
        geometry: Geometry,
        *,
        layers: Sequence[int] | None = None,
        heads: int | None = None,
        q_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Borders:
        """The borders of tiles, whatever the grid, the curve, and how far tiles slide.

        Around blocks nearly all neighbours read each other; what is read changes from one block of queries to the
        next, and the borders are those of blocks.
        """
        chosen = range(self.tile_changes[-1] + self.phases) if layers is None else layers
        sizes: dict[str, Any] = {"heads": heads or self.phases, "q_block": q_block, "device": device}
        read = [Reads.of(self.plan(geometry, layer, **sizes)) for layer in chosen]
        if self.near == "around":
            rows = [(reads.shares.shape[0], reads.q_block) for reads in read]
            read = [Reads(torch.eye(num, dtype=torch.float64), block, block) for num, block in rows]
        return borders_of_reads(self.ordering(geometry), geometry, read)

    def view(self, geometry: Geometry, index: int = 0, *, near: Plan | None = None) -> View:
        near = near or self.plan(geometry, index, heads=self.phases)
        return view_of(self._pattern(index), self.summary, geometry, index % self.phases, near)

    # -- words ---------------------------------------------------------------------------------------------------

    def describe(
        self, geometry: Geometry, *, q_block: int | None = None, device: torch.device | str = "cpu"
    ) -> str:
        """What the fields come to on a geometry: the curve, tiles after rounding, shared tokens, pairs."""
        check_geometry(geometry)
        lines = [f"{geometry}: {geometry.num_tokens} tokens"]
        layers = self._layers_by_tiles()
        for tiles, words in layers.items():
            if len(layers) > 1:
                lines.append(f"  layers {', '.join(words)}:")
            alone = replace(self, tiles=tiles)
            lines += alone._lines(geometry, *block_sizes(alone._pattern(), geometry, q_block, None, device))
        return "\n".join(lines)

    def sparse_form(self) -> Method:
        """Without dense steps, a number of tiles that is the default, and a cycle in which nothing slides."""
        tiles = self.tiles if isinstance(self.tiles, tuple) else self.tiles_in(0)
        return replace(self, dense_steps=0, tiles=tiles, cycle=self.phases)

    def _layers_by_tiles(self) -> dict[int | None, list[str]]:
        """The stretches of layers that have each number of tiles, in words."""
        found: dict[int | None, list[str]] = {}
        for first, beyond in pairwise(self.tile_changes):
            words = f"{first} to {beyond - 1}" if beyond - first > 1 else f"{first}"
            found.setdefault(self.tiles_in(first), []).append(words)
        last = self.tile_changes[-1]
        found.setdefault(self.tiles_in(last), []).append(f"from {last} on")
        return found

    def _lines(self, geometry: Geometry, q_block: int, k_block: int) -> Iterator[str]:
        """The words on one number of tiles."""
        layout = layout_of(self._pattern(), geometry, q_block)
        if self.text_reads == "summary" and geometry.text:
            yield "  text reads images in summary"
        yield from image_lines(self._pattern(), self.summary, geometry, layout, q_block, k_block)
        readers = [
            self.layer(geometry, layer, heads=self.phases, q_block=q_block, k_block=k_block)
            for layer in range(self.phases)
        ]
        density = sum(reader.num_pairs for reader in readers) / (self.phases * geometry.num_tokens**2)
        yield f"  pairs kept: {density:.1%} (at most {1 / density:.2f}x faster than dense)"

    def _pattern(self, layer: int = 0) -> Pattern:
        """What decides who reads whom in a layer. The order, and what is shared, are the same in all layers."""
        return Pattern(
            near=self.near,
            tiles=self.tiles_in(layer),
            tile_size=self.tile_size,
            cycle=self.phases,
            shared=self.shared,
            share=self.share,
            shared_tokens=self.shared_tokens,
            curve=self.curve,
            far=self.far,
            text_reads=self.text_reads,
        )


def _checked_tiles(tiles: Any) -> int | tuple[int, ...] | None:
    if tiles is None:
        return None
    is_by_layer = isinstance(tiles, Sequence) and not isinstance(tiles, str | bytes)
    numbers = tuple(tiles) if is_by_layer else (tiles,)
    if not numbers:
        wrong_value("tiles", "hold at least one number", tiles, "Write one for all layers: tiles=16.")
    for number in numbers:
        check_int("tiles", number, at_least=1)
    while len(numbers) > 1 and numbers[-1] == numbers[-2]:  # the last is of all that follow anyway
        numbers = numbers[:-1]
    return numbers if len(numbers) > 1 else numbers[0]
