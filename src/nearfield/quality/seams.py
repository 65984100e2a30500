"""Seam energy: whether the borders of tiles show in a picture.

Two tokens side by side in the image that do not read each other leave a line between their pixels, and so may two that
read each other, but not the same of what is around them. The energy of the
lines is the mean absolute difference of the pixels on both sides of them, over the same at the pixels around them. It
is near 1 where nothing is to be seen. Pictures differ, and decoders leave lattices of their own: so the value of the
dense model on the same lines belongs beside it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._checks import check_tensor, shape_of, wrong_type, wrong_value
from nearfield.geometry import Geometry
from nearfield.methods.hilbert import Hilbert
from nearfield.methods.merging import Merge, Merged

_LEAST_PIXELS_PER_TOKEN = 4


class Borders(NamedTuple):
    """How often neighbouring tokens are apart (do not read each other, or are not merged together), from 0 to 1.

    Args:
        right: `[height, width - 1]`, between a token and the one to its right.
        below: `[height - 1, width]`, between a token and the one below it.
    """

    right: Tensor
    below: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        return self.right.shape[0], self.below.shape[1]


def tile_borders(
    method: Hilbert,
    geometry: Geometry,
    *,
    layers: Sequence[int] | None = None,
    heads: int | None = None,
    q_block: int | None = None,
    device: torch.device | str = "cpu",
) -> Borders:
    """The borders of a method's tiles, as its plans draw them: whatever the grid, the curve, and how far tiles slide.

    Where it has no tiles (`near="around"`), nearly all neighbours read each other; what is read changes from one block
    of queries to the next, and the borders are those of blocks.

    Args:
        layers: whose tiles, averaged; by default those of one cycle, and of the layers before it that differ in their
            number of tiles.
        heads: number of heads; asked for where the method's heads differ (by default those of one cycle).
        q_block: the block the images were made with, to which tiles are rounded; by default that of the device.
        device: where they were made.
    """
    if not isinstance(method, Hilbert):
        wrong_type("method", "be a Hilbert", type(method).__name__)
    _check_grid(geometry)
    order = method.ordering(geometry)
    count = math.prod(geometry.grid)
    position = (order.inverse[:count] + geometry.image_spans[0][0]).view(geometry.grid)
    chosen = range(method.tile_changes[-1] + method.phases) if layers is None else layers
    read = []
    for layer in chosen:
        plan = method.plan(geometry, layer, heads=heads or method.phases, q_block=q_block, device=device)
        reads = (plan.block_counts()[0] > 0).double().mean(dim=0).cpu()
        row, column = position // plan.q_block, position // plan.k_block
        if method.near == "around":
            reads, column = torch.eye(plan.num_rows, dtype=torch.float64), row
        read.append(Borders(_mutual(reads, row, column, 1), _mutual(reads, row, column, 0)))
    if not read:
        wrong_value("layers", "name at least one layer", "none")
    right, below = (1 - torch.stack(shares).mean(dim=0) for shares in zip(*read, strict=True))
    return Borders(right, below)


def region_borders(method: Merge | Merged, geometry: Geometry) -> Borders:
    """The borders of the regions in which a method merges tokens, 1 each: what is added to them differs across."""
    if not isinstance(method, Merge | Merged):
        wrong_type("method", "be a Merge, alone or with attention", type(method).__name__)
    _check_grid(geometry)
    lengths = torch.tensor(method.regions(geometry).lengths)
    along = torch.arange(len(lengths)).repeat_interleave(lengths)
    region = along[method.ordering(geometry).inverse[: math.prod(geometry.grid)]].view(geometry.grid)
    return Borders(*((region.diff(dim=axis) != 0).double() for axis in (1, 0)))


def _mutual(reads: Tensor, row: Tensor, column: Tensor, axis: int) -> Tensor:
    """How much of the two directions between neighbours along an axis is read."""
    length = row.shape[axis] - 1
    forward = reads[row.narrow(axis, 0, length), column.narrow(axis, 1, length)]
    backward = reads[row.narrow(axis, 1, length), column.narrow(axis, 0, length)]
    return (forward + backward) / 2


def _check_grid(geometry: Geometry) -> None:
    if len(geometry.grid) != 2:
        wrong_value(
            "geometry", "have a grid of two sides", geometry, "Measure the frames of a video one by one."
        )


class SeamEnergy(NamedTuple):
    """Energy of the lines of a set of images.

    Args:
        value: `across / around`.
        error: its standard error over the images (by leaving each out in turn); NaN for a single one.
        across: mean absolute difference of pixels across the lines.
        around: the same at the pixels around the lines.
    """

    value: float
    error: float
    across: float
    around: float


def line_gradients(images: Tensor, borders: Borders) -> Tensor:
    """For each image `[B, C, H, W]` the mean absolute pixel difference across the lines and around them, `[B, 2]`.

    Around are the differences, in the same direction, at up to half a token on either side of a line.
    """
    check_tensor("images", images, dims=4, hint="Expected [batch, channels, height, width].")
    pixels = _pixels_per_token(images, borders.grid)
    total = float(borders.right.sum() + borders.below.sum())
    if total == 0:
        wrong_value("borders", "cut the image somewhere", "none", "Neighbours always read each other here.")
    x = images.double() if images.device.type == "cpu" else images.float()
    sums = torch.zeros(len(x), 2, dtype=x.dtype, device=x.device)
    for picture, weight in ((x, borders.right), (x.transpose(2, 3), borders.below.T)):
        sums += _weighted(picture, weight.to(x), pixels)
    return (sums / total).double().cpu()


def _weighted(x: Tensor, weight: Tensor, pixels: int) -> Tensor:
    """Sums over the lines between columns of tokens, `weight` being `[rows, columns - 1]`."""
    reach = pixels // 2
    gradient = (x[..., 1:] - x[..., :-1]).abs().mean(dim=1)
    rows = gradient.unflatten(1, (-1, pixels)).mean(dim=2)
    windows = rows[..., pixels - 1 - reach :].unfold(2, 2 * reach + 1, pixels)
    across = windows[..., reach]
    around = (windows.sum(dim=-1) - across) / (2 * reach)
    return torch.stack([(part * weight).sum(dim=(1, 2)) for part in (across, around)], dim=1)


def _pixels_per_token(images: Tensor, grid: tuple[int, int]) -> int:
    height, width = images.shape[2:]
    pixels = height // grid[0]
    if (height, width) != (pixels * grid[0], pixels * grid[1]) or pixels < _LEAST_PIXELS_PER_TOKEN:
        tokens = f"{grid[0]} x {grid[1]} tokens"
        rule = f"have a whole number of pixels, at least {_LEAST_PIXELS_PER_TOKEN}, for each of {tokens}"
        wrong_value("images", rule, shape_of(images))
    return pixels


def seam_energy(gradients: Tensor) -> SeamEnergy:
    """Energy of a set of images by what `line_gradients` gave for them, `[images, 2]`."""
    check_tensor("gradients", gradients, dims=2, hint="Expected [images, 2].")
    across, around = gradients.double().mean(dim=0).tolist()
    if around == 0:
        wrong_value("gradients", "come from images with some contrast", "none")
    return SeamEnergy(across / around, _jackknife(gradients.double()), across, around)


def _jackknife(gradients: Tensor) -> float:
    """Standard error of the ratio of sums."""
    count = len(gradients)
    if count < 2:
        return math.nan
    without = gradients.sum(dim=0) - gradients
    ratios = without[:, 0] / without[:, 1]
    return float(((ratios - ratios.mean()).square().sum() * (count - 1) / count).sqrt())
