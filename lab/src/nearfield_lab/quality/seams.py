"""Seam energy: whether the borders of tiles show in a picture.

Two tokens side by side in the image that do not read each other leave a line between their pixels, and so may two that
read each other, but not the same of what is around them. The energy of the
lines is the mean absolute difference of the pixels on both sides of them, over the same at the pixels around them. It
is near 1 where nothing is to be seen. Pictures differ, and decoders leave lattices of their own: so the value of the
dense model on the same lines is needed to judge it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._checks import check_tensor, shape_of, wrong_value
from nearfield.methods import Borders

_LEAST_PIXELS_PER_TOKEN = 4


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
