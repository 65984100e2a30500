"""What all pictures share in looks: colours, frames, words."""

import colorsys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INK, MUTED, FAINT = "#22262e", "#6b7280", "#e3e6eb"
SHARED, SHARED_KEYS, SHADE, FAR = "#4b5563", "#8b93a1", "#d3d7de", "#b5545c"
BAR_COLOURS = ("#2f6f9f", "#c27a2c", "#5a9367", "#8a6fae", "#b5545c")
Colour = tuple[float, float, float]


def rgb(colour: str) -> Tensor:
    return torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def wheel(turn: float, lightness: float = 0.48, saturation: float = 0.46) -> Colour:
    """A muted colour wheel that starts at blue."""
    return colorsys.hls_to_rgb((0.58 + turn) % 1.0, lightness, saturation)


def tile_colours(count: int) -> list[Colour]:
    """The wheel again, lighter and darker in turn so that neighbours on the curve differ."""
    return [wheel(i / count, *((0.55, 0.40) if i % 2 else (0.73, 0.46))) for i in range(count)]


def heading(axis: Any, title: str, subtitle: str) -> None:
    axis.annotate(title, (0, 1), (0, 21), xycoords="axes fraction", textcoords="offset points",
                  fontsize=11.5, fontweight="bold", color=INK)  # fmt: skip
    axis.annotate(subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points",
                  fontsize=9, color=MUTED)  # fmt: skip


def legend(pyplot: Any, axis: Any, colours: dict[str, str], labels: Sequence[str]) -> None:
    swatches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    corner = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": max(1, len(labels))}
    axis.legend(swatches, labels, frameon=False, fontsize=8.5, **corner)


def thin_spines(axis: Any) -> None:
    for spine in axis.spines.values():
        spine.set_color("#c4c9d2")
        spine.set_linewidth(0.8)
