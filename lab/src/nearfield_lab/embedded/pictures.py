"""Pictures on one sheet, with captions, as PNG files."""

import io
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._files import replace_file
from nearfield_lab.missing import MissingExtra

_GAP, _MARGIN, _TEXT = 4, 12, 18
_PAPER, _INK, _GREY = (255, 255, 255), (24, 24, 24), (96, 96, 96)


class Row(NamedTuple):
    """Pictures `[num, height, width, 3]` uint8 under a title and a line of figures."""

    title: str
    figures: str
    images: Tensor


def grid_of(images: Tensor, columns: int | None = None) -> Tensor:
    """Pictures `[num, height, width, 3]` side by side in rows, as one."""
    number, height, width, _ = images.shape
    columns = columns or max(1, round(number**0.5))
    rows = -(-number // columns)
    sheet = torch.full(
        (rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), 255, dtype=torch.uint8
    )
    for place, image in enumerate(images):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = image
    return sheet


def write_picture(path: Path, image: Tensor) -> None:
    """`[height, width, 3]` uint8 to a PNG file."""
    _write(path, _as_pillow(image))


def write_pictures(folder: Path, images: Tensor, first: int = 0) -> None:
    """Every picture to a file of its own, named by its number; several at a time, for packing takes long."""
    names = [numbered(folder, number) for number in range(first, first + len(images))]
    with ThreadPoolExecutor() as writers:
        for _ in writers.map(write_picture, names, images):
            pass


def numbered(folder: Path, number: int) -> Path:
    """The file of the picture with a number."""
    return folder / f"{number:06d}.png"


def packed(image: Tensor) -> bytes:
    """`[height, width, 3]` uint8 as the content of a PNG file."""
    content = io.BytesIO()
    _save(_as_pillow(image), content)
    return content.getvalue()


def write_packed(path: Path, content: bytes) -> None:
    """What `packed` gave to its file."""
    replace_file(path, lambda part: part.write_bytes(content))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Rows of pictures, one above the other, with their captions."""
    pillow = _pillow()
    sheets = [grid_of(row.images, columns=len(row.images)) for row in rows]
    font = pillow.ImageFont.load_default(_TEXT)
    caption = 2 * (_TEXT + 6)
    words = [font.getlength(text) for row in rows for text in (row.title, row.figures)]
    width = math.ceil(max(*words, *(sheet.shape[1] for sheet in sheets))) + 2 * _MARGIN
    height = sum(sheet.shape[0] + caption + _MARGIN for sheet in sheets) + _MARGIN
    canvas = pillow.Image.new("RGB", (width, height), _PAPER)
    draw = pillow.ImageDraw.Draw(canvas)
    top = _MARGIN
    for row, sheet in zip(rows, sheets, strict=True):
        draw.text((_MARGIN, top), row.title, fill=_INK, font=font)
        draw.text((_MARGIN, top + _TEXT + 3), row.figures, fill=_GREY, font=font)
        canvas.paste(_as_pillow(sheet), (_MARGIN, top + caption))
        top += caption + sheet.shape[0] + _MARGIN
    _write(path, canvas)


def _as_pillow(image: Tensor) -> Any:
    height, width, _ = image.shape
    return _pillow().Image.frombytes("RGB", (width, height), image.contiguous().numpy().tobytes())


def _write(path: Path, image: Any) -> None:
    replace_file(path, lambda part: _save(image, part))


def _save(image: Any, target: Any) -> None:
    image.save(target, format="PNG", compress_level=2)


def _pillow() -> Any:
    try:
        import PIL
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageFont
    except ImportError as error:
        raise MissingExtra("pillow", error) from None
    return PIL
