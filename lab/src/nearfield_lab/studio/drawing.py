"""Pictures of the page: a method on an image, and where a sparse picture differs from the dense one."""

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield import Geometry, Method
from nearfield_lab.plots import show
from nearfield_lab.quality import Borders

_HEADS = 12
_NOTHING, _SOME, _MUCH = (1.0, 1.0, 1.0), (0.80, 0.33, 0.30), (0.25, 0.04, 0.10)
_LINE = (0.10, 0.35, 0.65)
_LEAST_SIDE, _LEAST_PEAK = 512, 8.0
_drawing = threading.Lock()  # pyplot keeps one list of figures for all threads


def drawn(draw: Callable[[Path], None]) -> Any:
    """What `draw` writes to a file, as a Pillow image."""
    from PIL import Image

    with _drawing, tempfile.TemporaryDirectory(prefix="nearfield-") as folder:
        path = Path(folder) / "picture.png"
        draw(path)
        with Image.open(path) as image:
            return image.convert("RGB")


def method_picture(
    geometry: Geometry, method: Method, first_layer: int, device: torch.device
) -> tuple[Any, str]:
    """The curve, the tiles of two consecutive layers and their masks, of one where layers read alike, with what blocks
    read; and what the fields come to, in words. No picture where queries and keys decide."""
    if not show.can_be_drawn(method):
        return None, method.describe(geometry, device="cpu")
    layers = [first_layer, first_layer + 1]
    show.require_drawable(geometry, layers)
    own = [method.layer(geometry, layer, heads=_HEADS, device=device).plans for layer in layers]
    if all(one is other for one, other in zip(*own, strict=True)):
        layers = layers[:1]
    shown = show.examine(geometry, method, layers, own[0][0].q_block)
    words = method.describe(geometry, device=device)
    return drawn(lambda path: show.draw(path, shown)), words


def gradient_difference(dense: Tensor, sparse: Tensor) -> Tensor:
    """How much steps between neighbouring pixels differ in two pictures `[height, width, 3]`: `[height, width]`.

    A pixel holds what lies between it and those to its right and below it, averaged over the colours.
    """
    change = sparse.double() - dense.double()
    found = torch.zeros(change.shape[:2], dtype=torch.float64)
    found[:, :-1] += (change[:, 1:] - change[:, :-1]).abs().mean(dim=2)
    found[:-1] += (change[1:] - change[:-1]).abs().mean(dim=2)
    return found / 2


def seam_map(dense: Tensor, sparse: Tensor, borders: Borders | None) -> Tensor:
    """The gradient difference as heat, white for none, with the borders of tiles over it: `[h, w, 3]` uint8, enlarged.

    Lines are as strong as neighbours often do not read each other.
    """
    difference = gradient_difference(dense, sparse)
    # A few outliers do not pale the rest, and what nobody could see stays pale.
    peak = max(float(difference.mean() + 4 * difference.std()), _LEAST_PEAK)
    cells = _heat((difference / peak).clamp(max=1))
    zoom = max(2, -(-_LEAST_SIDE // max(cells.shape[:2])))
    cells = cells.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
    if borders is not None:
        _draw_lines(cells, borders.right)
        _draw_lines(cells.transpose(0, 1), borders.below.T)
    return (cells * 255).round().to(torch.uint8)


def _heat(share: Tensor) -> Tensor:
    """Colours `[..., 3]` for shares from 0 to 1."""
    nothing, some, much = (torch.tensor(colour, dtype=share.dtype) for colour in (_NOTHING, _SOME, _MUCH))
    low, high = (2 * share).clamp(max=1)[..., None], (2 * share - 1).clamp(min=0)[..., None]
    return nothing + (some - nothing) * low + (much - some) * high


def _draw_lines(cells: Tensor, weight: Tensor) -> None:
    """Draw between columns of tokens, `weight` being `[rows, columns - 1]`, right of what the line cuts."""
    rows, columns = weight.shape[0], weight.shape[1] + 1
    pixels = cells.shape[1] // columns
    places = pixels * torch.arange(1, columns)
    strength = weight.to(cells).repeat_interleave(cells.shape[0] // rows, 0)[..., None]
    line = torch.tensor(_LINE, dtype=cells.dtype)
    cells[:, places] = cells[:, places] * (1 - strength) + line * strength


def as_array(picture: Tensor) -> Any:
    """A picture as NumPy has it."""
    return picture.contiguous().numpy()
