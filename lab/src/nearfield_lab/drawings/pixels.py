"""Drawings to pixels, by resvg, in several processes."""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nearfield_lab.drawings.captions import Drawing
from nearfield_lab.drawings.sets import BACKGROUNDS, COLOURS
from nearfield_lab.embedded.storage import BadFile
from nearfield_lab.missing import MissingExtra

_MARGIN = 0.06  # of a side, around a drawing
_CHUNK = 32

Pixels = Tensor
"""`[3, size, size]` uint8."""


def rendered(
    drawings: Sequence[Drawing], size: int, workers: int, together: int = 512
) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of drawings and their pictures `[number, 3, size, size]` uint8, some together.

    A drawing that resvg does not understand is left out.
    """
    with ProcessPoolExecutor(workers) as pool:
        pictures = pool.map(partial(_tried, size=size), drawings, chunksize=_CHUNK)
        numbers, kept = list[int](), list[Tensor]()
        for number, content in enumerate(pictures):
            if content is not None:
                numbers.append(number)
                kept.append(torch.frombuffer(bytearray(content), dtype=torch.uint8).view(size, size, 3))
            if len(kept) == together or (kept and number == len(drawings) - 1):
                yield numbers, torch.stack(kept).permute(0, 3, 1, 2).contiguous()
                numbers, kept = [], []


def picture_of(drawing: Drawing, size: int) -> Tensor:
    """A drawing as `[3, size, size]` uint8."""
    content = _tried(drawing, size)
    if content is None:
        raise BadFile(f"drawing {drawing.number} of {drawing.set} cannot be rendered")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def document_of(drawing: Drawing) -> str:
    """The drawing as an SVG file: in the middle of a square, with a margin, on its background."""
    left, top, width, height = drawing.box
    side = max(width, height) * (1 + 2 * _MARGIN)
    view = (left - (side - width) / 2, top - (side - height) / 2, side, side)
    box = " ".join(f"{value:.6g}" for value in view)
    colour = COLOURS.get(drawing.colour, "#1c1c1e")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{box}"'
        f' color="{colour}">{drawing.body}</svg>'
    )


def _tried(drawing: Drawing, size: int) -> bytes | None:
    try:
        content = _resvg()(
            svg_string=document_of(drawing),
            width=size,
            height=size,
            background=BACKGROUNDS[drawing.background],
            skip_system_fonts=True,
        )
    except ValueError:
        return None
    pillow = _pillow()
    with pillow.open(io.BytesIO(bytes(content))) as image:
        pixels: bytes = image.convert("RGB").tobytes()
    return pixels if len(pixels) == 3 * size * size else None


def _resvg() -> Callable[..., Any]:
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise MissingExtra("resvg-py", error, purpose="to render drawings") from None
    draw: Callable[..., Any] = svg_to_bytes
    return draw


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", error) from None
    return Image
