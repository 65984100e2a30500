"""Pictures in folders and tar files, found, and decoded behind one gate.

Decoders meet what others have sent. Whatever they raise becomes a `BadFile` of one line, and a picture of more pixels
than anybody would train on or compare is refused before it is decoded.
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nearfield._files import BadFile
from nearfield_lab.missing import MissingExtra

SUFFIXES = (".avif", ".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
ARCHIVES = (".tar", ".tar.gz", ".tgz")
MOST_PIXELS, MOST_BYTES = 2**26, 2**28
Found = TypeVar("Found")


class Picture(NamedTuple):
    """A picture in a folder, or inside a tar file.

    Args:
        name: its path there.
        content: what is in it, where its file is packed.
    """

    name: str
    file: Path
    offset: int
    size: int
    content: bytes | None = None

    def read(self) -> bytes:
        if self.size > MOST_BYTES:
            raise BadFile(
                f"{self.name} in {self.file} must have at most {MOST_BYTES:,} bytes; got {self.size:,}"
            )
        if self.content is not None:
            return self.content
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def decoded(self) -> Any:
        """As a picture of Pillow, in colour."""
        return decode(f"{self.name} in {self.file if self.offset else self.file.parent}", self.read)


def is_picture(name: str) -> bool:
    """By the end of its name; hidden files are none."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVES)


def in_archive(archive: Path) -> list[Picture]:
    """The pictures of a tar file by their names. Of a plain one each is read by its place, so threads may share it."""
    is_plain = archive.name.lower().endswith(".tar")
    try:
        with tarfile.open(archive) as opened:
            members = [member for member in opened if member.isfile() and is_picture(member.name)]
            return sorted(
                Picture(member.name, archive, member.offset_data, member.size)
                if is_plain
                else Picture(member.name, archive, 1, member.size, _content(opened, member))
                for member in members
            )
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise BadFile(f"{archive} is not a tar archive, or not a whole one: {_said(error)}") from None


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member) if member.size <= MOST_BYTES else None
    return file.read() if file is not None else b""


def in_folder(folder: Path) -> Iterator[Picture]:
    """The pictures of a folder and the folders in it, by their paths; tar files are passed over."""
    for path in sorted(folder.rglob("*")):
        if is_picture(path.name) and path.is_file():
            yield Picture(path.relative_to(folder).as_posix(), path, 0, path.stat().st_size)


def decode(where: str, read: Callable[[], bytes]) -> Any:
    """A picture of Pillow, in colour, from the content of a file."""
    return _opened(where, read, lambda image: image.convert("RGB"))


def is_whole(path: Path) -> bool:
    """Whether a file is there and is a picture from its first byte to its last, by its checksums."""
    try:
        _opened(str(path), path.read_bytes, lambda image: image.verify())
    except OSError:
        return False
    return True


def _opened(where: str, read: Callable[[], bytes], use: Callable[[Any], Found]) -> Found:
    pillow = _pillow()
    content = read()
    try:
        with pillow.open(io.BytesIO(content)) as image:
            if image.width * image.height > MOST_PIXELS:
                sides = f"{image.width} x {image.height}"
                raise BadFile(f"it must have at most {MOST_PIXELS:,} pixels; got {sides}")
            return use(image)
    except Exception as error:  # each format raises errors of its own, and its packers raise others
        raise BadFile(f"{where} cannot be read as a picture: {_said(error)}") from None


def _said(error: Exception) -> str:
    """The first line of an error, without the addresses in memory that Pillow puts there."""
    lines = str(error).partition(" <_io.")[0].splitlines()
    return lines[0] if lines else type(error).__name__


def square(image: Any, size: int | None) -> Tensor:
    """The middle square of a picture of Pillow at `size` pixels, by Lanczos, or all of it; `[3, height, width]`."""
    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, upper = ((length - side) // 2 for length in image.size)
        # First cropped: with a box, the filter would reach beyond the box.
        image = image.crop((left, upper, left + side, upper + side))
        if side != size:
            image = image.resize((size, size), _pillow().Resampling.LANCZOS)
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, 3).permute(2, 0, 1)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("pillow", error, purpose="to read pictures") from None
    return Image
