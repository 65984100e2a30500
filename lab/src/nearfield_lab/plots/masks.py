"""Matrices of who reads whom, queries down and keys across."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfield_lab.plots.style import BAR_COLOURS, MUTED, frame_without_ticks, label_beside, rgb


def draw_reads(
    axis: Any, reads: Tensor, colours: Tensor | None = None, borders: Sequence[float] = ()
) -> None:
    """Which columns each row reads, `[rows, columns]` bool, in the row's colour; with lines between columns."""
    colours = rgb(BAR_COLOURS[0]).expand(len(reads), 3) if colours is None else colours
    _draw_matrix(axis, torch.where(reads[..., None], colours[:, None], 1.0))
    for border in borders:
        axis.axvline(border, color=MUTED, linewidth=0.8)


def draw_shares(axis: Any, shares: Tensor) -> None:
    """A matrix of shares from 0, white, to 1."""
    _draw_matrix(axis, 1 - shares[..., None] * (1 - rgb(BAR_COLOURS[0])), "tokens", "merged tokens")


def _draw_matrix(axis: Any, cells: Tensor, across: str = "keys", down: str = "queries") -> None:
    """All of an axis in colours `[rows, columns, 3]`."""
    rows, columns, _ = cells.shape
    paint(axis, cells, columns, rows)
    mask_frame(axis, rows, columns, across, down)
    axis.set_box_aspect(None)


def paint(axis: Any, cells: Tensor, right: float, bottom: float, left: float = 0) -> None:
    """Colours `[rows, columns, 3]` from the top of an axis down to `bottom`."""
    extent = (left, right, bottom, 0)
    axis.imshow(cells.numpy(), interpolation="nearest", aspect="auto", extent=extent)


def mask_frame(
    axis: Any, num_queries: int, num_keys: float, across: str = "keys", down: str = "queries"
) -> None:
    axis.set_xlim(0, num_keys)
    axis.set_ylim(num_queries, 0)
    axis.set_box_aspect(1)
    label_beside(axis, across, down)
    frame_without_ticks(axis)
