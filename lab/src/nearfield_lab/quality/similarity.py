"""How alike two pictures are, pixel by pixel: PSNR and SSIM. Pictures go from 0 to 255."""

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from nearfield._checks import check_tensor, shape_of, wrong_type, wrong_value

PEAK = 255.0
_WINDOW, _SIGMA = 11, 1.5
_STABLE = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2


def psnr(first: Tensor, second: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, `[B]`; infinite for equal images `[B, C, H, W]`."""
    check_images(first, second)
    error = (first.double() - second.double()).square().mean(dim=(1, 2, 3))
    return 10 * torch.log10(PEAK**2 / error)


def ssim(first: Tensor, second: Tensor) -> Tensor:
    """Structural similarity, `[B]`, as Wang et al. (2004) define it: a Gaussian window of 11 pixels with deviation 1.5.

    The mean over all places where the window fits, and over the channels.
    """
    check_images(first, second)
    if min(first.shape[2:]) < _WINDOW:
        wrong_value("first", f"have at least {_WINDOW} pixels per side", shape_of(first))
    x, y = first.double(), second.double()
    mean_x, mean_y = _windowed(x), _windowed(y)
    variance_x, variance_y = _windowed(x * x) - mean_x**2, _windowed(y * y) - mean_y**2
    covariance = _windowed(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + _STABLE[0]) / (mean_x**2 + mean_y**2 + _STABLE[0])
    structure = (2 * covariance + _STABLE[1]) / (variance_x + variance_y + _STABLE[1])
    return (luminance * structure).mean(dim=(1, 2, 3))


def _windowed(x: Tensor) -> Tensor:
    """Means weighted by the window, along one axis after the other."""
    place = torch.arange(_WINDOW, device=x.device, dtype=x.dtype) - _WINDOW // 2
    weights = torch.exp(-(place**2) / (2 * _SIGMA**2))
    weights = weights / weights.sum()
    flat = x.flatten(0, 1).unsqueeze(1)
    smooth = conv2d(conv2d(flat, weights.view(1, 1, -1, 1)), weights.view(1, 1, 1, -1))
    return smooth.view(*x.shape[:2], *smooth.shape[2:])


def check_images(first: Tensor, second: Tensor) -> None:
    """Two batches of images of one shape, uint8 or floating point."""
    for name, images in (("first", first), ("second", second)):
        check_tensor(name, images, dims=4, hint="Expected [batch, channels, height, width].")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            wrong_type(name, "be uint8 or floating point, from 0 to 255", images.dtype)
    if first.shape != second.shape:
        wrong_value("second", f"have the shape of the first ({shape_of(first)})", shape_of(second))
