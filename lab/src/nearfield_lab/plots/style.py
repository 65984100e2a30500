"""What all pictures share in looks: colours, frames, words."""

import colorsys
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

INK, MUTED, FAINT = "#22262e", "#6b7280", "#e3e6eb"
SHARED, SHARED_KEYS, SHADE, FAR = "#4b5563", "#8b93a1", "#d3d7de", "#b5545c"
BAR_COLOURS = ("#2f6f9f", "#c27a2c", "#5a9367", "#8a6fae", "#b5545c")
Colour = tuple[float, float, float]


def rgb(colour: str) -> Tensor:
    return torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in their order; from the first again where there are more names than colours."""
    return dict(zip(names, cycle(BAR_COLOURS), strict=False))


def wheel(turn: float, lightness: float = 0.48, saturation: float = 0.46) -> Colour:
    """A muted colour wheel that starts at blue."""
    return colorsys.hls_to_rgb((0.58 + turn) % 1.0, lightness, saturation)


def tile_colours(count: int) -> Tensor:
    """`[count, 3]`: the wheel again, lighter and darker in turn so that neighbours on the curve differ."""
    return torch.tensor([wheel(i / count, *((0.55, 0.40) if i % 2 else (0.73, 0.46))) for i in range(count)])


def heading(axis: Any, title: str, subtitle: str) -> None:
    """Words above an axis."""
    axis.annotate(title, (0, 1), (0, 21), xycoords="axes fraction", textcoords="offset points",
                  fontsize=11.5, fontweight="bold", color=INK)  # fmt: skip
    axis.annotate(subtitle, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points",
                  fontsize=9, color=MUTED)  # fmt: skip


def label_axes(axis: Any, across: str, up: str, **style: Any) -> None:
    axis.set_xlabel(across, color=MUTED, **style)
    axis.set_ylabel(up, color=MUTED, **style)


def label_beside(axis: Any, across: str, down: str) -> None:
    """Small words, close to an axis without ticks."""
    label_axes(axis, across, down, fontsize=9, labelpad=3)


def percent(value: float, _: object) -> str:
    """How ticks of shares are written."""
    return f"{value:.0%}"


def swatches(colours: Iterable[str]) -> list[Any]:
    """Squares for a legend."""
    from matplotlib.patches import Rectangle

    return [Rectangle((0, 0), 1, 1, color=colour) for colour in colours]


def legend(axis: Any, colours: dict[str, str], labels: Sequence[str]) -> None:
    """One line above an axis, at its right."""
    corner = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": max(1, len(labels))}
    axis.legend(swatches(colours.values()), labels, frameon=False, fontsize=8.5, **corner)


def light_grid(axis: Any) -> None:
    axis.grid(color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    thin_spines(axis)


def frame_without_ticks(axis: Any) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    thin_spines(axis)


def thin_spines(axis: Any) -> None:
    for spine in axis.spines.values():
        spine.set_color("#c4c9d2")
        spine.set_linewidth(0.8)
