"""Drawings to pixels, by resvg, in several processes."""

import importlib
import io
import multiprocessing
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._files import replace_file
from nearfield_lab.drawings.captions import Box, Drawing
from nearfield_lab.drawings.sets import BACKGROUNDS, COLOURS
from nearfield_lab.missing import MissingExtra
from nearfield_lab.storage import BadFile

_MARGIN = 0.06  # of a side, around a drawing
_CHUNK = 32
_QUALITY = 92
_LOOK = 100  # pixels, where only the extent of a drawing is wanted


def rendered(
    drawings: Sequence[Drawing], size: int, workers: int, together: int = 512
) -> Iterator[tuple[list[int], Tensor]]:
    """Numbers of drawings and their pictures `[number, 3, size, size]` uint8, some together.

    A drawing that resvg does not understand is left out.
    """
    # Processes of their own, not copies of this one, which may hold threads and a GPU.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, context) as pool:
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


def document_of(body: str, box: Box, colour: str = "", margin: float = _MARGIN) -> str:
    """An SVG file with a drawing in the middle of a square."""
    view = " ".join(f"{value:.6g}" for value in _square(box, margin))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{view}"'
        f' color="{COLOURS.get(colour, COLOURS["black"])}">{body}</svg>'
    )


def drawn_box(body: str, page: Box) -> Box | None:
    """Where a drawing is, which may be outside of its page, to a hundredth of its size; None where nothing is."""
    box = page
    for margin in (1.0, 0.1):  # once in all around the page, then more closely
        try:
            content = _resvg()(
                svg_string=document_of(body, box, margin=margin),
                width=_LOOK,
                height=_LOOK,
                skip_system_fonts=True,
            )
        except ValueError:
            return None
        with _pillow().open(io.BytesIO(bytes(content))) as image:
            found = image.convert("RGBA").getchannel("A").getbbox()
        if found is None:
            return None
        left, top, side, _ = _square(box, margin)
        start, above, end, below = (place * side / _LOOK for place in found)
        box = (left + start, top + above, end - start, below - above)
    return box


def _square(box: Box, margin: float) -> Box:
    left, top, width, height = box
    side = max(width, height) * (1 + 2 * margin)
    return left - (side - width) / 2, top - (side - height) / 2, side, side


def write_archive(path: Path, batches: Iterable[Tensor]) -> None:
    """Pictures `[B, height, width, 3]` uint8 to a tar file of numbered WebP pictures.

    They are coded with small losses, and equally, whoever drew them: thousands then fit where a few hundred would.
    """

    def write(part: Path) -> None:
        with tarfile.open(part, "w") as archive:
            for number, picture in enumerate(picture for batch in batches for picture in batch):
                content = io.BytesIO()
                height, width, _ = picture.shape
                image = _pillow().frombytes("RGB", (width, height), picture.contiguous().numpy().tobytes())
                image.save(content, "WEBP", quality=_QUALITY, method=2)
                entry = tarfile.TarInfo(f"{number:06d}.webp")
                entry.size = content.tell()
                content.seek(0)
                archive.addfile(entry, content)

    replace_file(path, write)


def _tried(drawing: Drawing, size: int) -> bytes | None:
    try:
        content = _resvg()(
            svg_string=document_of(drawing.body, drawing.box, drawing.colour),
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
        draw: Callable[..., Any] = importlib.import_module("resvg_py").svg_to_bytes
    except ImportError as error:
        raise MissingExtra("resvg-py", error, extra="drawings", purpose="to render drawings") from None
    return draw


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", error) from None
    return Image
