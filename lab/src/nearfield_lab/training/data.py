"""Pictures to pixels of one size, or to latents, once.

Latents are a memory-mapped array, with an index of checksums in another file.

Every picture is encoded as it is and mirrored (mirroring a latent is not the latent of the mirrored picture). A cache
that was interrupted goes on where it stopped; a chunk whose checksum does not fit is made again.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield._files import read_json, write_json
from nearfield_lab.embedded.autoencoder import CHANNELS, PIXELS_PER_TOKEN, Autoencoder
from nearfield_lab.images import SUFFIXES, Picture, in_archive, in_folder, is_archive, square
from nearfield_lab.storage import BadFile, read_tensors, write_tensors

FORMAT = 1

OnProgress = Callable[[int, int, str], None]
"""Called with what is done, what there is to do, and a few words."""

_CHUNK = 64
_READERS = 16


def pictures(folder: Path) -> list[Picture]:
    """All pictures of the tar files in a folder, or, without any, of the folder itself, or of one tar file; sorted by
    name."""
    is_shard = folder.is_file() and is_archive(folder)
    if not is_shard and not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    shards = [folder] if is_shard else sorted(path for path in folder.iterdir() if is_archive(path))
    found = [picture for shard in shards for picture in in_archive(shard)] if shards else in_folder(folder)
    if not (known := sorted(found)):
        raise BadFile(f"{folder} holds neither tar files of pictures nor pictures ({', '.join(SUFFIXES)})")
    return known


def decoded(picture: Picture, size: int) -> Tensor:
    """The middle square of a picture at `size` pixels, `[3, size, size]` uint8."""
    return square(picture.decoded(), size)


def batches(
    source: Sequence[Picture], size: int, *, number: int = _CHUNK, on_progress: OnProgress | None = None
) -> Iterator[Tensor]:
    """Pictures `[B, 3, size, size]` uint8, read by several threads."""
    with ThreadPoolExecutor(_READERS) as readers:
        for start in range(0, len(source), number):
            if on_progress is not None:
                on_progress(start, len(source), "reading")
            some = source[start : start + number]
            yield torch.stack(list(readers.map(lambda one: decoded(one, size), some)))


# -- pixels --------------------------------------------------------------------------------------------------------


class Pixels:
    """Pictures and their mirror images, as they are.

    Args:
        values: `[pictures, 3, size, size]` uint8.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __len__(self) -> int:
        return 2 * len(self.values)

    def to(self, device: torch.device) -> "Pixels":
        return Pixels(self.values.to(device))

    def take(self, indices: Tensor) -> Tensor:
        """Pictures by number, `[B, 3, size, size]` float32 from -1 to 1, where they are kept; odd ones mirrored."""
        indices = indices.to(self.values.device)
        chosen = self.values[indices // 2].float() / 127.5 - 1
        is_mirrored = (indices % 2 == 1)[:, None, None, None]
        return torch.where(is_mirrored, chosen.flip(-1), chosen)


def read_pixels(
    source: Sequence[Picture], folder: Path, size: int, *, on_progress: OnProgress | None = None
) -> Pixels:
    """Pictures at `size` pixels, from `pixels-SIZE.safetensors` in `folder` if that was written before."""
    check_int("size", size, at_least=1)
    path, known = folder / f"pixels-{size}.safetensors", fingerprint(source)
    if path.exists():
        tensors, facts = read_tensors(path)
        if facts.get("kind") != "pixels" or "values" not in tensors:
            raise BadFile(f"{path} holds no pixels. Remove it to read the pictures anew")
        if facts.get("pictures") != known:
            raise BadFile(f"{path} belongs to other pictures. Remove it, or name another folder for pixels")
        return Pixels(tensors["values"])
    values = torch.cat(list(batches(source, size, on_progress=on_progress)))
    write_tensors(path, {"values": values}, {"format": FORMAT, "kind": "pixels", "pictures": known})
    return Pixels(values)


# -- the cache of latents ------------------------------------------------------------------------------------------


class Latents:
    """Latents of pictures and of their mirror images.

    Args:
        values: `[pictures, 2, 32, h, w]` float16.
        mean, std: per channel, of all of them.
    """

    def __init__(self, values: Tensor, mean: Tensor, std: Tensor) -> None:
        self.values, self.mean, self.std = values, mean, std

    def __len__(self) -> int:
        return 2 * len(self.values)

    def to(self, device: torch.device) -> "Latents":
        return Latents(self.values.to(device), self.mean, self.std)

    def take(self, indices: Tensor) -> Tensor:
        """Latents by number, `[B, 32, h, w]` float32, where they are kept."""
        return self.values.flatten(0, 1)[indices.to(self.values.device)].float()


def encode(
    source: Sequence[Picture],
    folder: Path,
    size: int,
    *,
    device: torch.device | str = "cpu",
    autoencoder: Autoencoder | None = None,
    on_progress: OnProgress | None = None,
) -> Latents:
    """The latents of pictures at `size` pixels, from the cache in `folder` as far as it goes."""
    check_int("size", size, at_least=PIXELS_PER_TOKEN)
    if size % PIXELS_PER_TOKEN:
        wrong_value("size", f"be a multiple of {PIXELS_PER_TOKEN} pixels", size)
    cache = _Cache(folder, source, size)
    missing = cache.missing()
    if missing:
        encoder = (autoencoder or Autoencoder()).to(device)
        done, total = 0, sum(chunk.stop - chunk.start for chunk in missing)
        with ThreadPoolExecutor(_READERS) as readers:
            for chunk in missing:
                if on_progress is not None:
                    on_progress(done, total, f"encoding at {size} px")
                images = torch.stack(list(readers.map(lambda one: decoded(one, size), source[chunk])))
                cache.write(chunk, _both_ways(encoder, images, torch.device(device)))
                done += len(images)
    return cache.latents()


@torch.no_grad()
def _both_ways(autoencoder: Autoencoder, images: Tensor, device: torch.device) -> Tensor:
    """Images `[B, 3, H, W]` uint8 to latents `[B, 2, 32, h, w]` float16, of them and their mirror images."""
    few = 16 if device.type == "cuda" else 2
    parts = []
    for part in images.split(few):
        plain = part.to(device).float() / 255
        both = torch.stack([plain, plain.flip(-1)], dim=1).flatten(0, 1)
        parts.append(autoencoder.encode(both).unflatten(0, (-1, 2)).half().cpu())
    return torch.cat(parts)


class _Cache:
    """The array `latents-SIZE.bin` and its index `latents-SIZE.json`."""

    def __init__(self, folder: Path, source: Sequence[Picture], size: int) -> None:
        self.path, self.index = folder / f"latents-{size}.bin", folder / f"latents-{size}.json"
        side = size // PIXELS_PER_TOKEN
        self.shape = len(source), 2, CHANNELS, side, side
        self.digests: dict[str, str] = {}
        self.statistics: dict[str, Any] = {}
        self.fingerprint = fingerprint(source)
        self._read_index()
        folder.mkdir(parents=True, exist_ok=True)
        size = torch.Size(self.shape).numel()
        if hasattr(
            os, "posix_fallocate"
        ):  # a full disk is an error here, and would end the process at a later write
            with self.path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, 2 * size)
        # A shared mapping of a file makes (and keeps) the file as large as the array.
        mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.float16)
        self.values = mapped.view(self.shape)

    def _read_index(self) -> None:
        if not self.index.exists():
            return
        try:
            fields = {"format": int, "pictures": str, "chunks": dict, "statistics": dict}
            document = read_json(self.index, fields)
        except BadFile as error:
            raise BadFile(f"{error} It is no index of latents: remove it to encode anew") from None
        if (document["format"], document["pictures"]) != (FORMAT, self.fingerprint):
            raise BadFile(
                f"{self.index} belongs to other pictures. Remove it, or name another folder for latents"
            )
        self.digests, self.statistics = document["chunks"], document["statistics"]

    def missing(self) -> list[slice]:
        """Chunks that were not written, or not whole."""
        chunks = [
            slice(start, min(start + _CHUNK, self.shape[0])) for start in range(0, self.shape[0], _CHUNK)
        ]
        return [chunk for chunk in chunks if not self._is_whole(chunk)]

    def _is_whole(self, chunk: slice) -> bool:
        known = self.digests.get(str(chunk.start))
        return known is not None and known == self._digest(chunk)

    def write(self, chunk: slice, values: Tensor) -> None:
        self.values[chunk] = values
        self.digests[str(chunk.start)] = self._digest(chunk)
        self.statistics = {}
        self._write_index()

    def latents(self) -> Latents:
        if not self.statistics:
            mean, std = _statistics(self.values)
            self.statistics = {"mean": mean.tolist(), "std": std.tolist()}
            self._write_index()
        mean, std = (torch.tensor(self.statistics[name]) for name in ("mean", "std"))
        return Latents(self.values, mean, std)

    def _digest(self, chunk: slice) -> str:
        # Through its numbers as bytes: NumPy shares the memory.
        return hashlib.sha256(self.values[chunk].view(torch.uint8).numpy().data).hexdigest()

    def _write_index(self) -> None:
        document = {
            "format": FORMAT,
            "pictures": self.fingerprint,
            "shape": list(self.shape),
            "dtype": "float16",
            "statistics": self.statistics,
            "chunks": self.digests,
        }
        write_json(self.index, document)


def fits(values: Tensor, device: torch.device) -> bool:
    """Whether all of them may live on the device: they then need not be sent there in every step."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return values.numel() * values.element_size() < free // 4


def fingerprint(source: Sequence[Picture]) -> str:
    """A digest of the names and sizes of pictures, by which sets of them are known."""
    digest = hashlib.sha256()
    for picture in source:
        digest.update(f"{picture.name}\0{picture.size}\n".encode())
    return digest.hexdigest()


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, a few pictures at a time."""
    total, squares = torch.zeros(CHANNELS, dtype=torch.float64), torch.zeros(CHANNELS, dtype=torch.float64)
    for part in values.split(_CHUNK):
        numbers = part.float()
        total += numbers.sum(dim=(0, 1, 3, 4), dtype=torch.float64)
        squares += numbers.square().sum(dim=(0, 1, 3, 4), dtype=torch.float64)
    count = values.numel() / CHANNELS
    mean = total / count
    return mean.float(), (squares / count - mean**2).clamp(min=1e-12).sqrt().float()
