"""Images from folders, tar archives and contact sheets, as batches of uint8 at one size."""

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield_lab.missing import MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".avif", ".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
ARCHIVES = (".tar", ".tar.gz", ".tgz")

Opener = Callable[[], IO[bytes]]
Reader = Callable[[], "Image"]


@dataclass(frozen=True)
class ImageSet:
    """Images that are read when they are asked for.

    Args:
        source: where they come from, in words.
        names: one per image, without folders and suffixes; they tell pairs of images apart.
        readers: each gives one image, decoded.
        is_sheet: whether the images stand on a sheet, where they have numbers for names.
    """

    source: str
    names: tuple[str, ...]
    readers: tuple[Reader, ...]
    is_sheet: bool = False

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, part: slice) -> "ImageSet":
        return self.chosen(range(len(self))[part])

    def chosen(self, places: Iterable[int]) -> "ImageSet":
        """The images at some places."""
        chosen = [(self.names[place], self.readers[place]) for place in places]
        return replace(
            self, names=tuple(name for name, _ in chosen), readers=tuple(reader for _, reader in chosen)
        )

    def batches(self, batch: int, size: int | None) -> Iterator[Tensor]:
        """Batches `[b, 3, size, size]` uint8, in order. With `size=None` all images must be of one size already."""
        check_int("batch", batch, at_least=1)
        workers = min(16, os.cpu_count() or 1)
        # Decoders let other threads run. One batch is decoded while the one before it is used.
        with ThreadPoolExecutor(workers) as pool:
            pending = [pool.submit(self._read, index, size) for index in range(min(batch, len(self)))]
            for start in range(0, len(self), batch):
                following = range(min(start + batch, len(self)), min(start + 2 * batch, len(self)))
                ready = pending
                pending = [pool.submit(self._read, index, size) for index in following]
                yield _stacked([future.result() for future in ready], self.source)

    def _read(self, index: int, size: int | None) -> Tensor:
        from PIL import UnidentifiedImageError

        try:
            return _pixels(self.readers[index](), size)
        except (UnidentifiedImageError, OSError) as error:
            raise OSError(f"{self.source}: {self.names[index]} cannot be read as an image: {error}") from None


def _decoder(opener: Opener) -> Reader:
    def read() -> "Image":
        from PIL import Image

        with opener() as file, Image.open(file) as opened:
            return opened.convert("RGB")

    return read


def _pixels(image: "Image", size: int | None) -> Tensor:
    """A centred square at a size, by Lanczos; `[3, height, width]`."""
    from PIL.Image import Resampling

    if size is not None and image.size != (size, size):
        side = min(image.size)
        left, upper = ((length - side) // 2 for length in image.size)
        # First cropped: with a box, the filter would reach beyond the box.
        image = image.crop((left, upper, left + side, upper + side))
        image = image.resize((size, size), Resampling.LANCZOS)
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


def _stacked(images: Sequence[Tensor], source: str) -> Tensor:
    sizes = {tuple(image.shape) for image in images}
    if len(sizes) > 1:
        raise ValueError(f"{source} holds images of several sizes; give a size to bring them to.")
    return torch.stack(list(images))


def open_images(source: Path, sheet_cell: int | None = None) -> ImageSet:
    """The images of a folder (and the folders in it), a tar archive, or a contact sheet.

    Args:
        source: a folder of images and archives, an archive, or one picture, which is a sheet.
        sheet_cell: pixels per side of the images on a sheet, which stand in rows without gaps.
    """
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra("pillow", error, purpose="to read images") from None
    if source.is_dir():
        found = _in_folder(source)
    elif source.name.lower().endswith(ARCHIVES):
        found = _in_archive(source)
    elif source.suffix.lower() in SUFFIXES:
        found = _on_sheet(source, sheet_cell)
    elif not source.exists():
        raise FileNotFoundError(f"{source} does not exist")
    else:
        raise ValueError(
            f"{source} is neither a folder, nor an archive ({', '.join(ARCHIVES)}), nor a picture."
        )
    if not len(found):
        raise ValueError(f"{source} holds no images ({', '.join(SUFFIXES)}).")
    return found


def _in_folder(folder: Path) -> ImageSet:
    """Pictures in the order of their paths; archives count as folders."""
    sets = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.name.lower().endswith(ARCHIVES):
            sets.append(_in_archive(path))
        elif path.suffix.lower() in SUFFIXES and not path.name.startswith("."):
            sets.append(ImageSet(str(path), (path.stem,), (_decoder(_file_opener(path)),)))
    return ImageSet(
        str(folder),
        tuple(name for part in sets for name in part.names),
        tuple(reader for part in sets for reader in part.readers),
    )


def _file_opener(path: Path) -> Opener:
    return lambda: path.open("rb")


def _in_archive(archive: Path) -> ImageSet:
    """Members in the order of their names. Each is read by its place in the file, so threads do not disturb others."""
    try:
        with tarfile.open(archive) as opened:
            members = sorted(
                (member for member in opened if member.isfile() and _is_picture(member.name)),
                key=lambda member: member.name,
            )
            is_plain = archive.name.lower().endswith(".tar")
            readers = [
                _span_opener(archive, member.offset_data, member.size)
                if is_plain
                else _bytes_opener(_content(opened, member))
                for member in members
            ]
    except tarfile.TarError as error:
        raise ValueError(f"{archive} is not a tar archive: {error}") from None
    names = tuple(Path(member.name).stem for member in members)
    return ImageSet(str(archive), names, tuple(map(_decoder, readers)))


def _is_picture(name: str) -> bool:
    path = Path(name)
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return file.read() if file is not None else b""


def _span_opener(path: Path, start: int, length: int) -> Opener:
    def opener() -> IO[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            return io.BytesIO(file.read(length))

    return opener


def _bytes_opener(content: bytes) -> Opener:
    return lambda: io.BytesIO(content)


def _on_sheet(sheet: Path, cell: int | None) -> ImageSet:
    from PIL import Image

    if cell is None:
        raise ValueError(f"{sheet} is one picture: a sheet needs the size of the images on it.")
    with Image.open(sheet) as opened:
        whole = opened.convert("RGB")
    if whole.width % cell or whole.height % cell:
        wrong_value("size", f"divide the sheet of {whole.width} x {whole.height} pixels into images", cell)
    corners = [
        (left, upper) for upper in range(0, whole.height, cell) for left in range(0, whole.width, cell)
    ]
    readers = tuple(_cropper(whole, (left, upper, left + cell, upper + cell)) for left, upper in corners)
    return ImageSet(str(sheet), tuple(f"{index:05}" for index in range(len(readers))), readers, is_sheet=True)


def _cropper(sheet: "Image", box: tuple[int, int, int, int]) -> Reader:
    return lambda: sheet.crop(box)
