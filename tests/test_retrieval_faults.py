"""The store under faults, with real processes: kills in mid-write, full disks, writers and readers at once."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import store_workers
from tests.store_workers import FACTS, identity, same, some_chunk
from tests.tiny_language_models import DOCUMENTS
from tests.worlds import CONTEXT as PROCESSES

from nearfield.retrieval import ChunkStore, MissingChunk

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and limits")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(3, PROCESSES, torch.set_num_threads, (1,)) as executor:
        executor.submit(len, "").result(120)  # the server that forks them has started
        yield executor


@pytest.fixture(scope="module")
def manager(pool: ProcessPoolExecutor) -> Iterator[Any]:
    with PROCESSES.Manager() as made:
        yield made


def parts_of(directory: Path) -> list[Path]:
    return list(directory.glob(".*.part"))


def killed_while_writing(directory: Path, length: int) -> None:
    """Start a writer and kill it at the moment when part of a file is on the disk."""
    process = PROCESSES.Process(target=store_workers.write_large, args=(directory, length))
    process.start()
    limit = time.monotonic() + 60
    while not any(size_of(part) for part in parts_of(directory)):
        assert time.monotonic() < limit, "the writer did not start"
        time.sleep(0.001)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_kill_in_mid_write(tmp_path: Path, pool: ProcessPoolExecutor) -> None:
    """Whenever it comes, a reader finds the whole chunk or none. The rest of the file counts until it is removed."""
    length = 100_000
    store = ChunkStore(tmp_path)
    store.put(identity(2), some_chunk(2), FACTS)
    for _ in range(10):  # the kill may come just after the file was moved to its place
        killed_while_writing(tmp_path, length)
        if parts_of(tmp_path):
            break
    (part,) = parts_of(tmp_path)
    try:
        assert same(store.get(identity(1), FACTS), some_chunk(length=length))
    except MissingChunk:
        assert identity(1) not in store
    assert same(store.get(identity(2), FACTS), some_chunk(2))
    assert len(store) <= 2
    limited = ChunkStore(tmp_path, max_bytes=store.num_bytes + 10_000)
    with part.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as its writer did
        limited.put(identity(3), some_chunk(3), FACTS)
        assert part.exists()
        assert len(limited) == 1  # of chunks and part together more does not fit
    limited.put(identity(2), some_chunk(2), FACTS)
    assert not part.exists()
    assert len(limited) == 2


def test_full_disk_leaves_the_old_chunk_and_no_rest(tmp_path: Path, pool: ProcessPoolExecutor) -> None:
    """The system refuses to let the file grow, in the middle of it. In a process of its own: limits stay."""
    store = ChunkStore(tmp_path)
    store.put(identity(1), some_chunk(1), FACTS)
    with ProcessPoolExecutor(1, PROCESSES, torch.set_num_threads, (1,)) as limited:
        told = limited.submit(store_workers.write_limited, tmp_path, 500).result(60)
    assert "File too large" in told
    assert [path.name for path in tmp_path.iterdir()] == [f"{identity(1)}.safetensors"]
    assert same(store.get(identity(1), FACTS), some_chunk(1))


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)], ids=["same weights", "other weights"])
def test_processes_that_add_the_same_documents(
    seeds: tuple[int, int], tmp_path: Path, pool: ProcessPoolExecutor, manager: Any
) -> None:
    """Each finds the chunks of its own weights, whoever wrote last."""
    gate = manager.Barrier(2)
    jobs = [pool.submit(store_workers.add_documents, tmp_path, gate, seed) for seed in seeds]
    added = dict(zip(seeds, (job.result(120) for job in jobs), strict=True))
    found = {identity for ids in added.values() for identity in ids}
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(found)
    assert len(found) == len(DOCUMENTS) * len(added)
    for seed, ids in added.items():
        here, alone = store_workers.reusing(tmp_path, seed), store_workers.reusing(None, seed)
        assert [alone.add(text) for text in DOCUMENTS for _ in range(3)] == ids
        assert all(map(same, here.chunks(ids), alone.chunks(ids)))


def written_and_read(
    directory: Path, max_bytes: int | None, pool: ProcessPoolExecutor, manager: Any
) -> tuple[int, int, int]:
    gate, done = manager.Barrier(3), manager.Event()
    reader = pool.submit(store_workers.read_many, directory, gate, done)
    writers = [pool.submit(store_workers.write_many, directory, first, max_bytes, gate) for first in (10, 20)]
    try:
        assert [writer.result(120) for writer in writers] == [60, 60]
    finally:
        done.set()
    found: tuple[int, int, int] = reader.result(120)
    return found


def test_writers_and_a_reader_at_once(tmp_path: Path, pool: ProcessPoolExecutor, manager: Any) -> None:
    found, _, wrong = written_and_read(tmp_path, None, pool, manager)
    assert found
    assert not wrong
    store = ChunkStore(tmp_path)
    assert len(store) == 8
    for number in (0, 1, 2, 3, 10, 11, 20, 21):
        assert same(store.get(identity(number), FACTS), some_chunk(number))
    assert not parts_of(tmp_path)


def test_eviction_under_readers(tmp_path: Path, pool: ProcessPoolExecutor, manager: Any) -> None:
    """Two writers keep room for three chunks; what a reader gets is right or missing."""
    ChunkStore(tmp_path).put(identity(1), some_chunk(1), FACTS)
    limit = 3 * ChunkStore(tmp_path).num_bytes
    found, missing, wrong = written_and_read(tmp_path, limit, pool, manager)
    assert found
    assert missing
    assert not wrong
    assert ChunkStore(tmp_path).num_bytes <= limit
