"""A method on one image, as a picture: its curve, what one colour stands for, who reads whom.

What is drawn is asked of the method (`Method.view`) and of its plans, so every method that decides by the geometry can
be drawn.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nearfield import Geometry, Method
from nearfield._checks import wrong_value
from nearfield.methods import Composition, PlanLayer, View
from nearfield_lab.plots.cells import canvas_of
from nearfield_lab.plots.method import LayerPicture, MethodPicture, Reading, method_overview

MOST_TOKENS, MOST_LAYERS = 2**16, 8
_FINE, _COARSE, _FINE_TOKENS = 16, 64, 20_000
"""Keys per block of a mask, and up to how many tokens blocks are fine. Pairs are counted in the method's own."""
_HEADS = 12
"""The number of heads that is drawn where heads differ."""


class Shown(NamedTuple):
    """A method on a geometry, with everything that is drawn about it."""

    geometry: Geometry
    q_block: int
    layers: dict[int, PlanLayer]
    views: dict[int, View]
    density: dict[int, float]

    @property
    def view(self) -> View:
        """Of the first of the layers."""
        return next(iter(self.views.values()))

    @property
    def start(self) -> int:
        """Where the image begins in the sequence."""
        return self.geometry.image_spans[0][0]


def can_be_drawn(method: Method) -> bool:
    """Whether the geometry alone decides who reads whom."""
    known = Composition.of(method)
    return known.merge is None and known.can_split


def require_drawable(geometry: Geometry, layers: Sequence[int]) -> None:
    """Refuse what nobody could see."""
    sides, tokens = geometry.grid, math.prod(geometry.grid)
    if len(sides) == 1:
        wrong_value("grid", "have two or three sides to be drawn", sides[0])
    if tokens > MOST_TOKENS:
        wrong_value("grid", f"hold at most {MOST_TOKENS:,} tokens to be drawn", f"{tokens:,}")
    if len(layers) > MOST_LAYERS:
        wrong_value("layer", f"name at most {MOST_LAYERS} layers to be drawn", len(layers))


def examine(geometry: Geometry, method: Method, layers: Sequence[int], q_block: int | None = None) -> Shown:
    """Plans and views of the chosen layers, on the CPU.

    Args:
        q_block: by default what the method chooses on a CPU for the first of the layers.
    """
    reading: Any = Composition.of(method).attention
    if not can_be_drawn(method):
        wrong_value("method", "decide by the geometry to be drawn", method.label)
    first = reading.layer(geometry, layers[0], heads=_HEADS, q_block=q_block).near
    coarse = max(first.k_block, _drawn_block(reading, geometry, layers[0]))
    readers, views, density = {}, {}, {}
    for layer in layers:
        own, readers[layer] = (
            reading.layer(geometry, layer, heads=_HEADS, q_block=first.q_block, k_block=k_block)
            for k_block in (first.k_block, coarse)
        )
        density[layer] = own.num_pairs / geometry.num_tokens**2
        views[layer] = reading.view(geometry, layer, near=readers[layer].near)
    return Shown(geometry, first.q_block, readers, views, density)


def _drawn_block(reading: Any, geometry: Geometry, layer: int) -> int:
    """Keys per block of a mask: of many tokens, as many as a block of tiles that are cut for a far field has."""
    if geometry.num_tokens <= _FINE_TOKENS:
        return _FINE
    own = reading.layer(geometry, layer, heads=_HEADS)
    if own.far is None or not reading.view(geometry, layer).reads_group:
        return _COARSE
    return math.gcd(_COARSE, math.lcm(own.near.q_block, own.far.window))


def draw(path: Path, shown: Shown) -> None:
    method_overview(path, picture(shown))


def picture(shown: Shown) -> MethodPicture:
    view = shown.view
    return MethodPicture(
        shown.geometry,
        view,
        num_tiles=1 + max(int(each.group.max()) for each in shown.views.values()),
        q_block=shown.q_block,
        k_block=next(iter(shown.layers.values())).near.k_block,
        layers=[_layer_picture(shown, layer) for layer in shown.layers],
        facts=_facts(shown),
        readings=[] if view.reads_group else _readings(shown),
    )


def _layer_picture(shown: Shown, layer: int) -> LayerPicture:
    near, far, view = shown.layers[layer].near, shown.layers[layer].far, shown.views[layer]
    head = "head 0: " if near.blocks.shape[1] > 1 else ""
    words = f"{view.subtitle}; " if view.subtitle else ""
    return LayerPicture(
        layer,
        view.group,
        near.block_counts()[0, 0] > 0,
        far.plan.block_counts()[0, 0] > 0 if far is not None else None,
        f"{head}{words}{shown.density[layer]:.1%} of the pairs",
    )


def _readings(shown: Shown) -> list[Reading]:
    """What the block in the middle of the picture reads in the first of the layers, and the one in its first corner."""
    first, corner = _reading(shown, _middle(shown)), _reading(shown, 0)
    pictures = [first._replace(title="What a block reads")]
    if corner.block != first.block:
        pictures.append(corner._replace(subtitle=f"in the corner: {corner.subtitle}"))
    return pictures


def _middle(shown: Shown) -> int:
    """The token nearest to the middle of a frame that is drawn, of those that are not shared, by its raster index."""
    canvas = canvas_of(shown.geometry.grid)
    height, width = shown.geometry.grid[-2:]
    start = canvas.frames[len(canvas.frames) // 2] * canvas.frame_size
    cells = torch.arange(canvas.frame_size)
    distance = (cells // width - height // 2) ** 2 + (cells % width - width // 2) ** 2
    distance[shown.view.is_shared[start : start + canvas.frame_size]] += height**2 + width**2
    return start + int(distance.argmin())


def _reading(shown: Shown, cell: int) -> Reading:
    """Of the block that a token is in, by its raster index."""
    reader, order = next(iter(shown.layers.values())), shown.view.sequence
    near, far = reader.near, reader.far
    tokens = torch.arange(len(order)) + shown.start
    place = torch.empty_like(order).scatter_(0, order, tokens)  # in the sequence, of tokens in raster order
    row = int(place[cell]) // near.q_block
    exactly = near.block_counts()[0, 0, row] > 0
    summary, words = torch.full_like(place, -1), ""
    if far is not None:
        is_read = far.plan.block_counts()[0, 0, row] > 0
        window = (torch.searchsorted(far.starts, place, right=True) - 1).clamp(min=0)
        inside = (place >= far.starts[window]) & (place < (far.starts + far.sizes)[window])
        summary = torch.where(inside & is_read[window], window, -1)
        words = f", {int(is_read.sum()):,} summaries"
    exactly = exactly[place // near.k_block]
    words = f"{int(exactly.sum()):,} tokens exactly{words}"
    return Reading(int(shown.view.group[cell]), exactly, summary, "", words)


def _facts(shown: Shown) -> list[str]:
    density = sum(shown.density.values()) / len(shown.density)
    text = f", {shown.geometry.text} of text" if shown.geometry.text else ""
    return [
        f"{shown.geometry.num_tokens:,} tokens{text}",
        *shown.view.facts,
        f"{density:.1%} of the pairs: at most {1 / density:.2f}x",
    ]
