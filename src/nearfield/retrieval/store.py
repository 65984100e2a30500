"""Where chunks are kept: in memory, or as one safetensors file each, in a directory or in any store that fsspec knows.

A file is written under another name and then renamed, so a reader sees a whole file or none, whoever writes at the
same time and whenever a writer is killed. A checksum over all of its contents shows later damage.
"""

import hashlib
import json
import os
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield._files import replace_file
from nearfield.retrieval.chunks import Chunk
from nearfield.retrieval.fingerprint import differences

_SUFFIX, _PART = ".safetensors", ".part"
_ID = re.compile(r"[0-9a-f]{8,64}")
_NAMES = {"tokens", "keys", "values"}
_PATIENCE = (
    3600.0  # seconds after its last write when a part is that of a killed writer, if nothing else shows it
)


class MissingChunk(LookupError):
    """The chunk is not, or no longer, in the store."""


class DamagedChunk(OSError):
    """The file is not what was written, and is never used."""


class ForeignChunk(ValueError):
    """The chunk was made by another model, in another precision, or behind another prefix."""


class _Shelf(Protocol):
    """What holds the chunks."""

    def write(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None: ...

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]: ...

    def remove(self, identity: str) -> None: ...

    def has(self, identity: str) -> bool: ...

    def sizes(self) -> dict[str, int]:
        """Bytes of each chunk, the least recently used first."""

    def unfinished(self) -> int:
        """Bytes of files that are being written; those of killed writers are removed."""


class ChunkStore:
    """Chunks by their ids. Several processes, and with a URL several machines, may use one place.

    Args:
        location: a directory, or a URL of fsspec (`s3://bucket/chunks`); None keeps chunks in memory.
        max_bytes: when chunks and files that are being written exceed it together, the least recently used chunks are
            removed. Object stores do not note when something was read: there the oldest go first.
    """

    def __init__(self, location: str | Path | None = None, *, max_bytes: int | None = None) -> None:
        if max_bytes is not None:
            check_int("max_bytes", max_bytes, at_least=1)
        self.max_bytes = max_bytes
        self._shelf = _shelf(location)

    def put(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None:
        """Store a chunk with the facts of `fingerprint`. It replaces a chunk of the same id."""
        _check_id(identity)
        if self.max_bytes is not None and chunk.num_bytes > self.max_bytes:
            wrong_value("max_bytes", f"hold a chunk of {chunk.num_bytes} bytes", self.max_bytes)
        unfinished = self._shelf.unfinished()
        self._shelf.write(identity, chunk, facts)
        self._evict(identity, unfinished)

    def get(self, identity: str, facts: Mapping[str, str]) -> Chunk:
        """Read a chunk. Raises MissingChunk, DamagedChunk, or ForeignChunk if it was made under other facts."""
        _check_id(identity)
        chunk, theirs = self._shelf.read(identity)
        unlike = differences(facts, theirs)
        if unlike:
            name = unlike[0]
            raise ForeignChunk(
                f"`identity` must name a chunk of this model; got {identity}, which differs in {', '.join(unlike)} "
                f"({theirs.get(name)} instead of {facts.get(name)}). Add the document again."
            )
        return chunk

    def remove(self, identity: str) -> None:
        """Forget a chunk, if it is there."""
        _check_id(identity)
        self._shelf.remove(identity)

    def __contains__(self, identity: object) -> bool:
        return isinstance(identity, str) and bool(_ID.fullmatch(identity)) and self._shelf.has(identity)

    def __len__(self) -> int:
        return len(self._shelf.sizes())

    @property
    def num_bytes(self) -> int:
        return sum(self._shelf.sizes().values())

    def _evict(self, newest: str, unfinished: int) -> None:
        if self.max_bytes is None:
            return
        sizes = self._shelf.sizes()
        excess = sum(sizes.values()) + unfinished - self.max_bytes
        for identity, size in sizes.items():
            if excess <= 0:
                return
            # The newest chunk may exceed the limit by the header of its file. It stays until the next is written.
            if identity != newest:
                self._shelf.remove(identity)
                excess -= size


def _shelf(location: str | Path | None) -> _Shelf:
    if location is None:
        return _Memory()
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    is_url = "://" in str(location)
    files, root = url_to_fs(location) if is_url else (LocalFileSystem(), os.path.abspath(location))
    return (_Directory if isinstance(files, LocalFileSystem) else _Folder)(files, root)


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
        self._lock = threading.Lock()

    def write(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None:
        with self._lock:
            self._held[identity] = (chunk, dict(facts))
            self._held.move_to_end(identity)

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]:
        with self._lock:
            if identity not in self._held:
                _missing(identity)
            self._held.move_to_end(identity)
            return self._held[identity]

    def remove(self, identity: str) -> None:
        with self._lock:
            self._held.pop(identity, None)

    def has(self, identity: str) -> bool:
        return identity in self._held

    def sizes(self) -> dict[str, int]:
        with self._lock:
            return {identity: chunk.num_bytes for identity, (chunk, _) in self._held.items()}

    def unfinished(self) -> int:
        return 0


class _Folder:
    """Chunks as one file each, in a place that fsspec reaches.

    Object stores show an object when all of it is there; elsewhere it is there when it is renamed.
    """

    def __init__(self, files: Any, root: str) -> None:
        self._files, self._root = files, root.rstrip("/")
        files.makedirs(self._root, exist_ok=True)

    def write(self, identity: str, chunk: Chunk, facts: Mapping[str, str]) -> None:
        self._replace(self._path(identity), _packed(identity, chunk, facts))

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]:
        path = self._path(identity)
        try:
            data = self._files.cat_file(path)
        except FileNotFoundError:
            _missing(identity)
        return _unpacked(identity, data, path)

    def remove(self, identity: str) -> None:
        self._delete(self._path(identity))

    def has(self, identity: str) -> bool:
        self._files.invalidate_cache(self._root)  # other machines write, too
        return bool(self._files.isfile(self._path(identity)))

    def sizes(self) -> dict[str, int]:
        names = {path.rpartition("/")[2]: size for _, path, size in sorted(self._listed(_SUFFIX))}
        found = {name.removesuffix(_SUFFIX): size for name, size in names.items()}
        return {identity: size for identity, size in found.items() if _ID.fullmatch(identity)}

    def unfinished(self) -> int:
        total = 0
        for written, path, size in self._listed(_PART):
            if self._is_abandoned(written, path, size):
                self._delete(path)
            else:
                total += size
        return total

    def _is_abandoned(self, written: float, path: str, size: int) -> bool:
        """Whether a part is that of a killed writer. Nothing shows it but its age."""
        return bool(written) and time.time() - written > _PATIENCE

    def _path(self, identity: str) -> str:
        return f"{self._root}/{identity}{_SUFFIX}"

    def _replace(self, path: str, data: bytes) -> None:
        part = f"{self._root}/{uuid.uuid4().hex}{_PART}"
        try:
            self._files.pipe_file(part, data)
            self._files.mv(part, path)
        except BaseException:
            with suppress(Exception):
                self._files.rm_file(part)
            raise

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(path)

    def _listed(self, suffix: str) -> list[tuple[float, str, int]]:
        """When each file was written or used last (0 where nobody knows), its path, and its bytes."""
        self._files.invalidate_cache(self._root)
        try:
            entries = self._files.ls(self._root, detail=True)
        except FileNotFoundError:  # an empty folder of an object store
            return []
        found = [(entry["name"], entry["size"]) for entry in entries if entry["name"].endswith(suffix)]
        return [(self._modified(path), path, size) for path, size in found]

    def _modified(self, path: str) -> float:
        try:
            moment: float = self._files.modified(path).timestamp()
        except (NotImplementedError, FileNotFoundError):
            return 0.0
        return moment


class _Directory(_Folder):
    """A folder of this machine, where files are synced to the disk and their times show when they were read."""

    def read(self, identity: str) -> tuple[Chunk, Mapping[str, str]]:
        found = super().read(identity)
        with suppress(OSError):  # a directory that may only be read, or another process's eviction
            os.utime(self._path(identity))
        return found

    def _replace(self, path: str, data: bytes) -> None:
        """A writer locks its part before the first byte, until the part has its name."""
        with ExitStack() as held:

            def write(part: Path) -> None:
                file, is_locked = held.enter_context(part.open("wb")), False
                with suppress(OSError):  # a file system without locks
                    is_locked = _lock(file)
                file.write(data)
                file.flush()
                if not is_locked:
                    file.close()  # Windows moves no open file

            replace_file(Path(path), write)

    def _is_abandoned(self, written: float, path: str, size: int) -> bool:
        """Whether nobody locks a part that has bytes. The system unlocks those of killed writers."""
        with suppress(OSError):
            if size:
                with open(path, "rb+") as file:
                    if _lock(file):
                        return True
        return super()._is_abandoned(written, path, size)

    def _listed(self, suffix: str) -> list[tuple[float, str, int]]:
        found = []
        for path in Path(self._root).iterdir():
            if path.name.endswith(suffix):
                with suppress(FileNotFoundError):  # removed by another process in between
                    facts = path.stat()
                    found.append((facts.st_mtime_ns / 1e9, path.as_posix(), facts.st_size))
        return found


def _lock(file: Any) -> bool:
    """Lock a file until it is closed. Returns False on systems without `fcntl`; raises where another has the lock."""
    try:
        import fcntl
    except ImportError:
        return False
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _packed(identity: str, chunk: Chunk, facts: Mapping[str, str]) -> bytes:
    tensors = {"tokens": chunk.tokens, "keys": chunk.keys, "values": chunk.values}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    contents = {"identity": identity, "prefix_length": chunk.prefix_length, "facts": dict(facts)}
    about = json.dumps(contents, sort_keys=True)
    return bytes(safetensors.torch.save(tensors, {"nearfield": about, "checksum": _checksum(tensors, about)}))


def _unpacked(identity: str, data: bytes, where: str) -> tuple[Chunk, Mapping[str, str]]:
    try:
        tensors = safetensors.torch.load(data)
        header = _header(data)
        about = header["nearfield"]
        intact = tensors.keys() == _NAMES and header["checksum"] == _checksum(tensors, about)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        _damaged(where, str(error))
    if not intact:
        _damaged(where, "contents that do not match their checksum")
    contents = json.loads(about)
    if contents["identity"] != identity:
        _damaged(where, f"the chunk {contents['identity']}")
    chunk = Chunk(tensors["tokens"], contents["prefix_length"], tensors["keys"], tensors["values"])
    return chunk, contents["facts"]


def _damaged(where: str, found: str) -> NoReturn:
    raise DamagedChunk(f"{where} must be a whole chunk; got {found}. Add the document again.")


def _header(data: bytes) -> dict[str, str]:
    """The metadata of a file: eight bytes give the length of the JSON that follows them."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return found


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
