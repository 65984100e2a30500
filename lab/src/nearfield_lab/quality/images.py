"""Images from folders, tar archives and contact sheets, as batches of uint8 at one size."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield_lab.images import (
    ARCHIVES,
    SUFFIXES,
    Picture,
    decode,
    in_archive,
    in_folder,
    is_archive,
    is_picture,
    square,
)

Reader = Callable[[], Any]
"""Gives one picture of Pillow, in colour."""


@dataclass(frozen=True)
class ImageSet:
    """Images that are read when they are asked for.

    Args:
        source: where they come from, in words.
        names: one per image, without folders and suffixes; images of two sets with equal names are a pair.
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
        return square(self.readers[index](), size)


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
    if source.is_dir():
        found = _set_of(source, _in_folder(source))
    elif is_archive(source) and source.exists():
        found = _set_of(source, in_archive(source))
    elif is_picture(source.name) and source.exists():
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


def _set_of(source: Path, pictures: Iterable[Picture]) -> ImageSet:
    known = list(pictures)
    names = tuple(Path(picture.name).stem for picture in known)
    return ImageSet(str(source), names, tuple(picture.decoded for picture in known))


def _in_folder(folder: Path) -> Iterator[Picture]:
    """Pictures in the order of their paths; archives count as folders."""
    loose = [(picture.file, [picture]) for picture in in_folder(folder)]
    archives = [(path, in_archive(path)) for path in folder.rglob("*") if is_archive(path)]
    for _, pictures in sorted(loose + archives):
        yield from pictures


def _on_sheet(sheet: Path, cell: int | None) -> ImageSet:
    if cell is None:
        raise ValueError(f"{sheet} is one picture: a sheet needs the size of the images on it.")
    whole = decode(str(sheet), sheet.read_bytes)
    if whole.width % cell or whole.height % cell:
        wrong_value("size", f"divide the sheet of {whole.width} x {whole.height} pixels into images", cell)
    readers = tuple(
        partial(whole.crop, (left, upper, left + cell, upper + cell))
        for upper in range(0, whole.height, cell)
        for left in range(0, whole.width, cell)
    )
    return ImageSet(str(sheet), tuple(f"{index:05}" for index in range(len(readers))), readers, is_sheet=True)
