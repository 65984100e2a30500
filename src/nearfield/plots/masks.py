"""Matrices of who reads whom, queries down and keys across."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nearfield.plots.style import BAR_COLOURS, MUTED, rgb, thin_spines


def draw_reads(
    axis: Any, reads: Tensor, colours: Tensor | None = None, borders: Sequence[float] = ()
) -> None:
    """Which columns each row reads, `[rows, columns]` bool, in the row's colour; with lines between columns."""
    colours = rgb(BAR_COLOURS[0]).expand(len(reads), 3) if colours is None else colours
    cells = torch.where(reads[..., None], colours[:, None], 1.0)
    axis.imshow(
        cells.numpy(), interpolation="nearest", aspect="auto", extent=(0, reads.shape[1], len(reads), 0)
    )
    for border in borders:
        axis.axvline(border, color=MUTED, linewidth=0.8)
    mask_frame(axis, len(reads), reads.shape[1])
    axis.set_box_aspect(None)


def draw_shares(axis: Any, shares: Tensor) -> None:
    """A matrix of shares from 0, white, to 1."""
    cells = 1 - shares[..., None] * (1 - rgb(BAR_COLOURS[0]))
    axis.imshow(
        cells.numpy(), interpolation="nearest", aspect="auto", extent=(0, shares.shape[1], len(shares), 0)
    )
    mask_frame(axis, len(shares), shares.shape[1])
    axis.set_box_aspect(None)
    axis.set_xlabel("tokens", color=MUTED, fontsize=9, labelpad=3)
    axis.set_ylabel("merged tokens", color=MUTED, fontsize=9, labelpad=3)


def mask_frame(axis: Any, num_queries: int, num_keys: float) -> None:
    axis.set_xlim(0, num_keys)
    axis.set_ylim(num_queries, 0)
    axis.set_box_aspect(1)
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel("keys", color=MUTED, fontsize=9, labelpad=3)
    axis.set_ylabel("queries", color=MUTED, fontsize=9, labelpad=3)
    thin_spines(axis)
