"""A picture of several panels, each drawn by a function on an axis, for the documentation."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield_lab.plots.figures import row_of_axes, save
from nearfield_lab.plots.style import BAR_COLOURS, FAR, SHADE, frame_without_ticks, heading, label_beside


class Drawing(NamedTuple):
    """One panel of a picture: its words, its width over its height, and what draws it on an axis."""

    title: str
    subtitle: str
    shape: float
    draw: Callable[[Any], None]


def side_by_side(path: Path, drawings: Sequence[Drawing]) -> None:
    """One picture of several panels."""
    figure, axes = row_of_axes([drawing.shape for drawing in drawings])
    for axis, drawing in zip(axes, drawings, strict=True):
        drawing.draw(axis)
        heading(axis, drawing.title, drawing.subtitle)
    save(figure, path)


def draw_weights(axis: Any, dense: Tensor, sparse: Tensor, is_read: Tensor) -> None:
    """Weights of one query over all keys: dense in grey, sparse over it, and below which keys are read."""
    places = torch.arange(len(dense)).numpy()
    axis.bar(places, dense.numpy(), width=1.0, color=SHADE)
    axis.bar(places, sparse.numpy(), width=1.0, color=FAR, alpha=0.75)
    top = float(sparse.max()) * 1.08
    axis.fill_between(
        places, -0.09 * top, -0.03 * top, where=is_read.numpy(), color=BAR_COLOURS[0], step="mid", linewidth=0
    )
    axis.set_xlim(0, len(dense))
    axis.set_ylim(-0.11 * top, top)
    label_beside(axis, "keys; blue: in the list", "weight")
    frame_without_ticks(axis)
