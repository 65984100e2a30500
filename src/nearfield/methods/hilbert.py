"""HilbertA (arXiv 2509.26538): attention inside the tiles of a space-filling curve that slide from layer to layer.

Image tokens are ordered along a Hilbert curve, so a run of the sequence is a compact patch of the image. Every token
reads the tile it is in. Tiles slide by a fraction of a tile per layer, so what two tiles could not exchange in one
layer they exchange in the next. The text is read by all, and reads all. So does a small shared region of the image,
where one is wanted (with `share="keys"` it reads only its tile).

Beyond the paper: a far field, which reads what lies outside the tile in summary. It keeps far more of the pictures than
a shared region of as many pairs (docs/quality.md), so it is the default; `Hilbert(shared="centre", far=None)` is the
paper's method. Also grids of any size and of three sides, closed curves, shared regions spread over the image, and
tiles that differ between heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from nearfield import curves, planning, tiling
from nearfield._checks import (
    check_int,
    check_member,
    check_same_device,
    check_tensor,
    shape_of,
    wrong_type,
    wrong_value,
)
from nearfield._types import Attended, Impl
from nearfield.attend import Part, attend, attend_together
from nearfield.dense_parts import DenseParts
from nearfield.geometry import Geometry, Shortened, Span
from nearfield.plan import Plan, check_block
from nearfield.tiling import Curve, Segment, Shared
from nearfield.tokenmap import Ordering
from nearfield.windows import WeightedWindows, weighted_windows, window_means

Share = Literal["two-way", "keys"]
Summary = Literal["mean", "weighted"]

DEFAULT_TILES = 16


@dataclass(frozen=True)
class Hilbert(DenseParts):
    """Attention inside sliding tiles of a curve.

    Args:
        tiles: number of tiles per image; 16 unless `tile_size` is given.
        tile_size: tokens per tile, instead of `tiles`.
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
            they do for the mean query, and windows whose keys differ weigh more.
        dense_layers: how many of the first layers stay dense, or the indices of those that do (negative ones count
            from the end).
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them.
        interleave: heads slide, too: head `h` of layer `l` takes the tiles of layer `l + h`, so that no cut is common
            to all heads.
    """

    tiles: int | None = None
    tile_size: int | None = None
    cycle: int = 4
    shared: Shared = "none"
    share: Share = "two-way"
    shared_tokens: int | None = None
    curve: Curve = "auto"
    far: int | None = 16
    summary: Summary = "mean"
    dense_layers: int | tuple[int, ...] = 1
    dense_steps: int | float = 0.2
    interleave: bool = False

    def __post_init__(self) -> None:
        if self.far == 0:  # how command lines and forms say None
            object.__setattr__(self, "far", None)
        if self.tiles is not None and self.tile_size is not None:
            wrong_value("tile_size", "be given instead of `tiles`, not with it", (self.tiles, self.tile_size))
        for name, least in (("tiles", 1), ("tile_size", 1), ("shared_tokens", 1), ("far", 2)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=least)
        check_int("cycle", self.cycle, at_least=1)
        check_member("shared", self.shared, get_args(Shared))
        check_member("share", self.share, get_args(Share))
        check_member("curve", self.curve, get_args(Curve))
        check_member("summary", self.summary, get_args(Summary))
        if self.shared == "none" and self.shared_tokens is not None:
            wrong_value("shared_tokens", 'be left out where `shared` is "none"', self.shared_tokens)
        if not isinstance(self.interleave, bool):
            wrong_type("interleave", "be True or False", repr(self.interleave))
        self.check_dense_parts()

    # -- who reads whom ------------------------------------------------------------------------------------------

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens (all images, one after another; the text stays where it is).

        It depends on the geometry alone, not on the blocks of a plan: the order is the same for every device.
        """
        _check_geometry(geometry)
        return _ordering(_geometric(self), geometry, _named(device))

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

        Tiles and shifts are rounded to `q_block` (see `describe`). Plans are kept: a geometry has at most `cycle`.

        Args:
            heads: needed with `interleave`, where heads differ.
            q_block, k_block: sizes of the lists' blocks; by default those that suit the device and the tiles.
        """
        _check_geometry(geometry)
        check_int("layer", layer, at_least=0)
        q_block, k_block = _blocks(self, geometry, q_block, k_block, device)
        if not self.interleave:
            return _plan(_geometric(self), geometry, layer % self.cycle, q_block, k_block, _named(device))
        if heads is None:
            wrong_value("heads", "be given where heads are interleaved", None, "Pass the number of heads.")
        check_int("heads", heads, at_least=1)
        sizes = q_block, k_block, _named(device)
        return _interleaved_plan(_geometric(self), geometry, layer % self.cycle, heads, *sizes)

    def spans(self, geometry: Geometry) -> tuple[Span, ...]:
        """Where the images' tokens stand in the sequence: of each image the shared ones, and its ring."""
        _check_geometry(geometry)
        segments = _layout(_geometric(self), geometry, 1).segments
        spans = (span for segment in segments for span in (segment.shared, segment.ring))
        return tuple((start, stop) for start, stop in spans if start < stop)

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        q_block: int | None = None,
        k_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "HilbertReader":
        """Everything a layer needs to attend, ready made: the plan, and the far field's."""
        near = self.plan(geometry, layer, heads=heads, q_block=q_block, k_block=k_block, device=device)
        if self.far is None:
            return HilbertReader(near, None, self.summary)
        unit = math.lcm(near.q_block, self.far)
        if unit % near.k_block:
            rule = f"divide lcm(q_block, far) = {unit}, on multiples of which tiles are cut"
            wrong_value("k_block", rule, near.k_block)
        sizes = near.q_block, near.k_block, _named(device)
        if self.interleave:
            assert heads is not None  # `plan` asked for it
            far = _interleaved_far(_geometric(self), geometry, layer % self.cycle, heads, *sizes)
        else:
            far = _far_field(_geometric(self), geometry, layer % self.cycle, *sizes)
        return HilbertReader(near, far, self.summary)

    # -- among merged tokens -------------------------------------------------------------------------------------

    def pieces(self, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
        """Of every image, how many tokens are shared and how many are not: the two are not to be merged."""
        _check_geometry(geometry)
        return _pieces(_geometric(self), geometry)

    @property
    def weighs_image_keys(self) -> bool:
        """Whether a bias on image tokens counts wherever they are read: summaries know nothing of it."""
        return self.far is None

    # -- words ---------------------------------------------------------------------------------------------------

    def describe(
        self, geometry: Geometry, *, q_block: int | None = None, device: torch.device | str = "cpu"
    ) -> str:
        """What the fields come to on a geometry: the curve, tiles after rounding, shared tokens, pairs."""
        _check_geometry(geometry)
        q_block, k_block = _blocks(self, geometry, q_block, None, device)
        layout = _layout(_geometric(self), geometry, q_block)
        lines = [f"{geometry}: {geometry.num_tokens} tokens"]
        for grid, segment in zip(geometry.images, layout.segments, strict=True):
            sides = "x".join(map(str, grid))
            is_line = isinstance(geometry, Shortened)
            lines.append(f"  {sides} along {'what was merged' if is_line else self._curve_words(grid)}")
            lines.append(f"    shared: {self._shared_words(None if is_line else grid, segment)}")
            lines.append(f"    tiles: {_tile_words(layout, segment, self.cycle)}")
            if self.far is not None:
                lines.append(f"    far field: {self._far_words(geometry, layout, segment, k_block)}")
        readers = [
            self.reader(geometry, layer, heads=self.cycle, q_block=q_block, k_block=k_block)
            for layer in range(self.cycle)
        ]
        density = sum(reader.num_pairs for reader in readers) / (self.cycle * geometry.num_tokens**2)
        lines.append(f"  pairs kept: {density:.1%} (at most {1 / density:.2f}x faster than dense)")
        return "\n".join(lines)

    def _curve_words(self, grid: tuple[int, ...]) -> str:
        if self.curve in ("morton", "raster"):
            return f"the {self.curve} order"
        return str(curves.choose(grid, closed={"auto": None, "hilbert": False}.get(self.curve, True)))

    def _far_words(self, geometry: Geometry, layout: "_Layout", segment: Segment, k_block: int) -> str:
        assert self.far is not None
        spans = [span for span in _far_spans(layout, geometry, k_block) if span[0] in range(*segment.ring)]
        number = sum(len(_windows(span, self.far)) for span in spans)
        weighted = ", weighted" if self.summary == "weighted" else ""
        return f"{number} summaries of {self.far} tokens{weighted}"

    def _shared_words(self, grid: tuple[int, ...] | None, segment: Segment) -> str:
        """`grid` is None where tokens are merged: nobody asked for so many."""
        if self.shared == "none":
            return "none"
        wanted = segment.num_shared if grid is None else self.shared_tokens or tiling.default_shared(grid)
        rounded = "" if wanted == segment.num_shared else f" (asked for {wanted}; rounded to whole blocks)"
        manner = "read all and are read by all" if self.share == "two-way" else "are read by all"
        return f"{segment.num_shared} tokens, {self.shared}, {manner}{rounded}"


class FarField(NamedTuple):
    """Summaries of the rings, and who reads them.

    Args:
        spans: the tokens that are summarised, as consecutive ones as possible.
        window: tokens per summary; windows lie on multiples of it in the sequence, and end where a span does.
        starts: `[windows]` int64, the first token of each.
        sizes: `[windows]` int32, how many tokens each holds.
        bias: `[windows]`, the log of that.
        plan: which rows read which windows.
    """

    spans: tuple[Span, ...]
    window: int
    starts: Tensor
    sizes: Tensor
    bias: Tensor
    plan: Plan

    def pooled(self, x: Tensor, impl: Impl = "auto") -> Tensor:
        """The mean of every window, `[B, G, M, D]` to `[B, G, windows, D]`."""
        return window_means(x, self.starts, self.sizes, self.window, impl)

    def weighted(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, impl: Impl = "auto"
    ) -> WeightedWindows:
        """Keys, values and biases of all windows, weighted."""
        windows = self.starts, self.sizes, self.window
        return weighted_windows(query, key, value, *windows, scale=scale, impl=impl)


class HilbertReader(NamedTuple):
    """What one layer reads: its tiles, and the summaries of the rest."""

    near: Plan
    far: FarField | None
    summary: Summary = "mean"

    @property
    def num_pairs(self) -> int:
        """Pairs read per batch element and head, on average over heads."""
        pairs = self.near.num_pairs / self.near.blocks.shape[1]
        if self.far is not None:
            pairs += self.far.plan.num_pairs / self.far.plan.blocks.shape[1]
        return round(pairs)

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
        """Attention among tokens in the method's order, `[B, H, N, D]`.

        `key_bias` may hide text; bias on image tokens is not carried over into the far field.
        """
        if self.far is None:
            return attend(query, key, value, self.near, key_bias=key_bias, scale=scale, impl=impl)
        near = Part(key, value, self.near, key_bias)
        if self.summary == "weighted":
            keys, values, bias = self.far.weighted(query, key, value, scale, impl)
        else:
            keys, values = (self.far.pooled(x, impl) for x in (key, value))
            bias = self.far.bias
        far = Part(keys, values, self.far.plan, bias)
        return attend_together(query, [near, far], scale=scale, impl=impl)


def hilbert_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: Geometry,
    layer: int,
    *,
    method: Hilbert | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention of one layer for tokens that already stand in the order of `method.ordering(geometry)`.

    Order the tokens (and their rotary table) once before the first layer and bring them back after the last:
    `ordering.enter(x)`, `ordering.leave(y)`. `dense_layers` and `dense_steps` are the model's affair and not looked at.

    Args:
        query, key, value: `[B, H, N, D]`, with `N = geometry.num_tokens`.
        layer: which layer this is; the tiles slide with it.
        method: its fields; the defaults of `Hilbert` if left out.
        key_mask: `[B, N]` bool, False for keys that nobody may read (padded text). Summaries of a far field hold
            image tokens whatever it says.
    """
    _check_geometry(geometry)
    check_tensor("query", query, dims=4, hint="Expected [batch, heads, tokens, head_dim].")
    if query.shape[2] != geometry.num_tokens:
        wrong_value(
            "query", f"have the {geometry.num_tokens} tokens of the geometry ({geometry})", query.shape[2]
        )
    bias = None if key_mask is None else _checked_mask_bias(key_mask, query)
    reader = (method or Hilbert()).reader(geometry, layer, heads=query.shape[1], device=query.device)
    return reader.attend(query, key, value, key_bias=bias, scale=scale, impl=impl).out


def _mask_bias(key_mask: Tensor) -> Tensor:
    """A bias `[B, 1, N]` that hides the keys where a mask `[B, N]` is False."""
    check_tensor("key_mask", key_mask, dims=2, hint="Expected [batch, tokens].")
    if key_mask.dtype != torch.bool:
        wrong_type("key_mask", "be bool", key_mask.dtype, "True marks keys that may be read.")
    bias = torch.zeros(key_mask.shape, dtype=torch.float32, device=key_mask.device)
    return bias.masked_fill(~key_mask, float("-inf")).unsqueeze(1)


def _checked_mask_bias(key_mask: Tensor, query: Tensor) -> Tensor:
    bias = _mask_bias(key_mask)
    batch, tokens = query.shape[0], query.shape[2]
    if key_mask.shape[0] not in (1, batch) or key_mask.shape[1] != tokens:
        wrong_value("key_mask", f"have shape [1 or {batch}, {tokens}]", shape_of(key_mask))
    check_same_device("key_mask", key_mask, "query", query.device)
    return bias


class HilbertAttention(nn.Module):
    """A self-attention layer for models of one's own: projections around `hilbert_attention`.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        layer: which layer of the model this is; the tiles slide with it.
        method: fields of the method.
    """

    def __init__(
        self, dim: int, heads: int, layer: int, method: Hilbert | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        check_int("dim", dim, at_least=1)
        check_int("heads", heads, at_least=1)
        if dim % heads:
            wrong_value("dim", f"be a multiple of `heads` ({heads})", dim)
        check_int("layer", layer, at_least=0)
        self.heads, self.layer, self.method = heads, layer, method or Hilbert()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, geometry: Geometry, key_mask: Tensor | None = None) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        query, key, value = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = hilbert_attention(
            query, key, value, geometry, self.layer, method=self.method, key_mask=key_mask
        )
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected


# -- building the plan ---------------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    segments: tuple[Segment, ...]
    tiles: int
    unit: int


@lru_cache(maxsize=256)
def _geometric(method: Hilbert) -> Hilbert:
    """The method without the fields that do not change a plan, so that caches are shared."""
    return replace(method, dense_layers=0, dense_steps=0, interleave=False)


def _named(device: torch.device | str) -> str:
    """A device as the key of a cache: "cuda" is the one that is current."""
    name = str(device)
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" and torch.cuda.is_available() else name


def _blocks(
    method: Hilbert,
    geometry: Geometry,
    q_block: int | None,
    k_block: int | None,
    device: torch.device | str,
) -> tuple[int, int]:
    """Block sizes that suit a device: whole warpgroups on a GPU; small ones, which follow tiles closely, elsewhere.

    Tiles are cut at multiples of a block. Where they are small, so are the blocks: a tile of less than one and a half
    could not slide.
    """
    if q_block is None:
        largest = 128 if torch.device(device).type == "cuda" else 16
        tile = method.tile_size or math.prod(geometry.grid) / (method.tiles or DEFAULT_TILES)
        q_block = max(block for block in (16, 32, 64, 128) if block <= max(16, min(largest, tile / 1.5)))
    if k_block is None:
        k_block = q_block
    check_block("q_block", q_block)
    check_block("k_block", k_block)
    return q_block, k_block


@lru_cache(maxsize=64)
def _pieces(method: Hilbert, geometry: Geometry) -> tuple[tuple[int, ...], ...]:
    segments = tiling.segments_of(geometry, method.curve, method.shared, method.shared_tokens)
    lengths = ((segment.num_shared, len(segment.order) - segment.num_shared) for segment in segments)
    return tuple(tuple(length for length in pair if length) for pair in lengths)


@lru_cache(maxsize=64)
def _layout(method: Hilbert, geometry: Geometry, q_block: int) -> _Layout:
    unit = q_block if method.far is None else math.lcm(q_block, method.far)
    segments = tiling.segments_of(geometry, method.curve, method.shared, method.shared_tokens)
    tiles = method.tiles or DEFAULT_TILES
    if method.tile_size is not None:
        whole = geometry.whole if isinstance(geometry, Shortened) else None
        # Tiles of merged tokens cover as much of the image.
        start, stop = segments[0].ring if whole is None else _layout(method, whole, q_block).segments[0].ring
        tiles = max(1, round((stop - start) / method.tile_size))
    return _Layout(segments, tiles, unit)


@lru_cache(maxsize=64)
def _ordering(method: Hilbert, geometry: Geometry, device: str) -> Ordering:
    with torch.inference_mode(False):
        segments = tiling.segments_of(geometry, method.curve, method.shared, method.shared_tokens)
        return Ordering.joined([segment.order for segment in segments]).to(device)


class _Membership(NamedTuple):
    """Which tiles the tokens of each row are in, `[rows, tiles]`, and which rows read everything, `[rows]`."""

    tiles: Tensor
    reads_all: Tensor


def _membership(
    method: Hilbert, geometry: Geometry, layout: _Layout, phase: int, q_block: int
) -> _Membership:
    """Tile 0 is a token of no tile; it is cut off at the end."""
    rows = -(-geometry.num_tokens // q_block)
    tile = torch.zeros(rows * q_block, dtype=torch.int64, device="cpu")
    everything = torch.zeros(rows * q_block, dtype=torch.bool, device="cpu")
    everything[slice(*geometry.text_span)] = True
    for segment in layout.segments:
        start, stop = segment.ring
        begins = _cuts(method, layout, segment, phase)
        tile[start:stop] = tiling.tile_at(torch.arange(stop - start, device="cpu"), begins) + 1
        if method.share == "two-way" or start == stop:
            everything[slice(*segment.shared)] = True
        else:
            tile[slice(*segment.shared)] = tiling.tile_at(segment.places, begins) + 1
    in_tile = torch.zeros(rows, layout.tiles + 1, dtype=torch.bool, device="cpu")
    in_tile.scatter_(1, tile.view(rows, q_block), True)
    return _Membership(in_tile[:, 1:], everything.view(rows, q_block).any(dim=1))


def _cuts(method: Hilbert, layout: _Layout, segment: Segment, phase: int) -> Tensor:
    return tiling.cuts(segment.ring, layout.tiles, (phase, method.cycle), layout.unit)


@lru_cache(maxsize=256)
def _plan(method: Hilbert, geometry: Geometry, phase: int, q_block: int, k_block: int, device: str) -> Plan:
    """Rows read the text, the shared tokens of every image, and of every image the tiles they are in."""
    layout = _layout(method, geometry, q_block)
    member = _membership(method, geometry, layout, phase, q_block)
    always = [geometry.text_span, *(segment.shared for segment in layout.segments)]
    spans = [
        tiling.tile_spans(segment.ring, _cuts(method, layout, segment, phase)).flatten(0, 1)
        for segment in layout.segments
    ]
    in_tile = member.tiles.repeat_interleave(2, dim=1).repeat(1, len(spans))
    everyone = torch.ones(len(in_tile), len(always), dtype=torch.bool, device="cpu")
    reads = torch.cat([member.reads_all[:, None], everyone, in_tile], dim=1)
    read = torch.cat([torch.tensor([(0, geometry.num_tokens), *always], device="cpu"), *spans])
    starts, stops = (torch.where(reads, ends, 0) for ends in read.unbind(-1))
    with torch.inference_mode(False):
        return planning.from_spans(
            starts,
            stops,
            q_block=q_block,
            k_block=k_block,
            num_queries=geometry.num_tokens,
            num_keys=geometry.num_tokens,
            device=device,
        )


@lru_cache(maxsize=64)
def _interleaved_plan(
    method: Hilbert, geometry: Geometry, phase: int, heads: int, q_block: int, k_block: int, device: str
) -> Plan:
    plans = [_plan(method, geometry, turn, q_block, k_block, device) for turn in range(method.cycle)]
    return _per_head([plans[(phase + head) % method.cycle] for head in range(heads)])


def _per_head(plans: Sequence[Plan]) -> Plan:
    """One plan whose heads read as the given plans do."""
    capacity = max(plan.blocks.shape[2] for plan in plans)
    with torch.inference_mode(False):
        offsets = torch.cat([plan.offsets for plan in plans], dim=1)
        blocks = [nn.functional.pad(plan.blocks, (0, capacity - plan.blocks.shape[2])) for plan in plans]
        first = plans[0]
        sizes = first.q_block, first.k_block, first.num_queries, first.num_keys
        return Plan(offsets, torch.cat(blocks, dim=1), *sizes, check=False)


# -- the far field -------------------------------------------------------------------------------------------------


def _far_spans(layout: _Layout, geometry: Geometry, k_block: int) -> tuple[Span, ...]:
    """The tokens that are summarised, in pieces of which a row reads all or nothing exactly.

    A ring need not begin and end on a multiple of `k_block`. The block of keys that it shares with its neighbour is
    read whole by whoever reads the neighbour, so its part of that block is a piece of its own; where the neighbour is
    the text or a shared region, everyone reads that part, and it needs no summary.
    """
    always = [geometry.text_span, *(segment.shared for segment in layout.segments)]
    pieces = []
    for start, stop in (segment.ring for segment in layout.segments):
        head = min(-(-start // k_block) * k_block, stop)
        tail = stop if stop == geometry.num_tokens else max(stop // k_block * k_block, head)
        pieces += [(start, head), (head, tail), (tail, stop)]
    return tuple(
        (start, stop)
        for start, stop in pieces
        if start < stop and not any(_meet((start, stop), span, k_block) for span in always)
    )


def _meet(first: Span, second: Span, block: int) -> bool:
    """Whether two spans have tokens in one block."""
    if first[0] == first[1] or second[0] == second[1]:
        return False
    return first[0] // block <= (second[1] - 1) // block and second[0] // block <= (first[1] - 1) // block


def _windows(span: Span, window: int) -> Tensor:
    """The first token of each window of a span, `[windows]`. Windows end at multiples of `window` in the sequence."""
    start, stop = span
    inner = torch.arange(start // window + 1, -(-stop // window), device="cpu") * window
    return torch.cat([torch.tensor([start], device="cpu"), inner])


@lru_cache(maxsize=256)
def _far_field(
    method: Hilbert, geometry: Geometry, phase: int, q_block: int, k_block: int, device: str
) -> FarField | None:
    """Every row reads the windows of what it does not read exactly. None where nothing is left to summarise."""
    assert method.far is not None
    spans = _far_spans(_layout(method, geometry, q_block), geometry, k_block)
    if not spans:
        return None
    near = _plan(method, geometry, phase, q_block, k_block, device)
    # A graph of training saves these: they must not be made in inference mode.
    with torch.inference_mode(False):
        begins = [_windows(span, method.far) for span in spans]
        ends = [torch.tensor([stop], device="cpu") for _, stop in spans]
        sizes = torch.cat([torch.cat(pair).diff() for pair in zip(begins, ends, strict=True)])
        starts = torch.cat(begins).to(device)
        plan = planning.from_mask(
            near.block_counts()[0, 0].index_select(1, starts // k_block) == 0,
            q_block=q_block,
            k_block=1,
            num_queries=geometry.num_tokens,
            num_keys=len(sizes),
        )
        bias = sizes.double().log().float()
        return FarField(spans, method.far, starts, sizes.int().to(device), bias.to(device), plan)


@lru_cache(maxsize=64)
def _interleaved_far(
    method: Hilbert, geometry: Geometry, phase: int, heads: int, q_block: int, k_block: int, device: str
) -> FarField | None:
    turns = [(phase + head) % method.cycle for head in range(heads)]
    fields = [_far_field(method, geometry, turn, q_block, k_block, device) for turn in turns]
    plans = [field.plan for field in fields if field is not None]
    return fields[0]._replace(plan=_per_head(plans)) if fields[0] is not None else None


# -- words and checks ----------------------------------------------------------------------------------------------


def _tile_words(layout: _Layout, segment: Segment, cycle: int) -> str:
    """How many tiles there are after rounding, how large they are, and how far they slide."""
    start, stop = segment.ring
    if start == stop:
        return "none: every token is shared"
    sizes, shifts = [], []
    for phase in range(cycle):
        begins = tiling.cuts(segment.ring, layout.tiles, (phase, cycle), layout.unit)
        sizes.append(begins.diff())
        shifts.append(int(begins[0]))
    real = torch.cat(sizes)
    real = real[real > 0]
    number = int((sizes[0] > 0).sum())
    span = f"{int(real.min())}" if real.min() == real.max() else f"{int(real.min())} to {int(real.max())}"
    exact = (stop - start) / layout.tiles
    slides = "" if cycle == 1 or len(set(shifts)) > 1 else "; too small to slide"
    return (
        f"{number} of {span} tokens, shifted by {', '.join(map(str, shifts))} in turn"
        f" (exactly: {layout.tiles} of {exact:g}, shifted by {exact / cycle:g};"
        f" cuts lie on multiples of {layout.unit}){slides}"
    )


def _check_geometry(geometry: object) -> None:
    if not isinstance(geometry, Geometry):
        hint = "Write Geometry(grid=(64, 64), text=512)."
        wrong_type("geometry", "be a Geometry", type(geometry).__name__, hint)
