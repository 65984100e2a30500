"""Where chunks are kept: in memory, or as one safetensors file each in a directory that processes share.

A file is written beside its place and then moved there, so a reader sees a whole file or none, whoever writes at the
same time and whenever a writer is killed. A checksum over everything in it tells later damage.
"""

import hashlib
import json
import os
import re
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield.retrieval.chunks import Chunk
from nearfield.retrieval.fingerprint import differences

_SUFFIX, _PART = ".safetensors", ".part"
_STALE_SECONDS = 3600.0
_ID = re.compile(r"[0-9a-f]{8,64}")


class MissingChunk(LookupError):
    """A chunk that is not, or no longer, in the store."""


class DamagedChunk(OSError):
    """A file that is not what was written; it is never used."""


class ForeignChunk(ValueError):
    """A chunk that another model made, or the same in another precision or behind another prefix."""


class _Shelf(Protocol):
    """What holds the chunks: in memory or in a directory."""

    def write(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None: ...

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]: ...

    def remove(self, identity: str) -> None: ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each chunk, the one that was not used for longest first."""


class ChunkStore:
    """Chunks by their ids.

    Args:
        directory: where the files are; None keeps chunks in memory. Several processes may use one directory.
        max_bytes: when the chunks together exceed it, those that were not used for longest are removed.
    """

    def __init__(self, directory: str | Path | None = None, *, max_bytes: int | None = None) -> None:
        if max_bytes is not None:
            check_int("max_bytes", max_bytes, at_least=1)
        self.max_bytes = max_bytes
        self._shelf: _Shelf = _Memory() if directory is None else _Directory(Path(directory))

    def put(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None:
        """Keep a chunk, together with the facts of `fingerprint`; one of the same id is replaced."""
        _check_id(identity)
        if self.max_bytes is not None and chunk.num_bytes > self.max_bytes:
            wrong_value("max_bytes", f"hold a chunk of {chunk.num_bytes} bytes", self.max_bytes)
        self._shelf.write(identity, chunk, facts)
        self._evict(identity)

    def get(self, identity: str, facts: Mapping[str, str]) -> Chunk:
        """The chunk; raises MissingChunk, DamagedChunk, or ForeignChunk if `facts` are not those it was made under."""
        _check_id(identity)
        chunk, theirs = self._shelf.read(identity)
        unlike = differences(facts, theirs)
        if unlike:
            name = unlike[0]
            raise ForeignChunk(
                f"`identity` must name a chunk of this model; got {identity}, which differs in {', '.join(unlike)} "
                f"({theirs.get(name)} instead of {facts[name]}). Add the document again."
            )
        return chunk

    def remove(self, identity: str) -> None:
        """Forget a chunk, if it is there."""
        _check_id(identity)
        self._shelf.remove(identity)

    def __contains__(self, identity: object) -> bool:
        return identity in self._shelf.sizes()

    def __len__(self) -> int:
        return len(self._shelf.sizes())

    @property
    def num_bytes(self) -> int:
        return sum(self._shelf.sizes().values())

    def _evict(self, newest: str) -> None:
        if self.max_bytes is None:
            return
        sizes = self._shelf.sizes()
        excess = sum(sizes.values()) - self.max_bytes
        for identity, size in sizes.items():
            if excess <= 0:
                return
            # The newest may exceed the limit by the header of its file; it stays until the next is written.
            if identity != newest:
                self._shelf.remove(identity)
                excess -= size


def _check_id(identity: str) -> None:
    # Ids become names of files: nothing else may.
    if not isinstance(identity, str) or not _ID.fullmatch(identity):
        wrong_value("identity", "be 8 to 64 hexadecimal digits", repr(identity))


def _missing(identity: str) -> NoReturn:
    raise MissingChunk(
        f"`identity` must name a chunk in the store; got {identity}. Add the document again: it may have been removed."
    )


class _Memory:
    def __init__(self) -> None:
        self._held: OrderedDict[str, tuple[Chunk, dict[str, str]]] = OrderedDict()

    def write(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None:
        self._held[identity] = (chunk, dict(facts))
        self._held.move_to_end(identity)

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]:
        if identity not in self._held:
            _missing(identity)
        self._held.move_to_end(identity)
        return self._held[identity]

    def remove(self, identity: str) -> None:
        self._held.pop(identity, None)

    def sizes(self) -> dict[str, int]:
        return {identity: chunk.num_bytes for identity, (chunk, _) in self._held.items()}


class _Directory:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None:
        self._clear_stale_parts()
        tensors = {"tokens": chunk.tokens, "keys": chunk.keys, "values": chunk.values}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        about = json.dumps({"prefix_length": chunk.prefix_length, "facts": dict(facts)}, sort_keys=True)
        header = {"nearfield": about, "checksum": _checksum(tensors, about)}
        handle, name = tempfile.mkstemp(dir=self._directory, prefix=f".{identity[:8]}-", suffix=_PART)
        os.close(handle)
        part = Path(name)
        try:
            safetensors.torch.save_file(tensors, part, metadata=header)
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            part.chmod(0o644)
            part.replace(self._path(identity))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]:
        path = self._path(identity)
        try:
            tensors, header = _loaded(path)
            intact = header["checksum"] == _checksum(tensors, header["nearfield"])
        except FileNotFoundError:
            _missing(identity)
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DamagedChunk(
                f"{path} must be a whole chunk; got {error}. Add the document again."
            ) from None
        if not intact:
            raise DamagedChunk(
                f"{path} must be a whole chunk; got contents that do not match their checksum. Add the document again."
            )
        about = json.loads(header["nearfield"])
        with suppress(OSError):  # a directory that may only be read, or another process's eviction
            os.utime(path)
        return Chunk(tensors["tokens"], about["prefix_length"], tensors["keys"], tensors["values"]), about[
            "facts"
        ]

    def remove(self, identity: str) -> None:
        self._path(identity).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        found = []
        for path in self._directory.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # removed by another process in between
                facts = path.stat()
                found.append((facts.st_mtime_ns, path.name.removesuffix(_SUFFIX), facts.st_size))
        return {identity: size for _, identity, size in sorted(found)}

    def _path(self, identity: str) -> Path:
        return self._directory / f"{identity}{_SUFFIX}"

    def _clear_stale_parts(self) -> None:
        """Remove what killed writers left. A part that is still being written is younger."""
        for part in self._directory.glob(f".*{_PART}"):
            with suppress(FileNotFoundError):
                if time.time() - part.stat().st_mtime > _STALE_SECONDS:
                    part.unlink()


def _loaded(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    # Cloned: safetensors maps the file, and pages of a file that changes later would change under us.
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
