"""The store: what is written comes back or is refused, with real processes, kills, damage and full disks."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.tiny_language_models import ROPE, language_model, random_tokens

from nearfield.retrieval import Chunk, ChunkStore, DamagedChunk, ForeignChunk, MissingChunk, prefill_chunk
from nearfield.retrieval.fingerprint import chunk_id, differences, fingerprint

ROOT = Path(__file__).resolve().parents[1]
PREFIX = torch.tensor([1])
FACTS = {"model": "a", "precision": "torch.float32"}


def small_chunk(seed: int = 0, dtype: torch.dtype = torch.float32, length: int = 6) -> Chunk:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, length, 4, generator=generator).to(dtype) for _ in range(2))
    return Chunk(random_tokens(length, seed), 1, keys, values)


def identity(number: int) -> str:
    return f"{number:08x}"


def assert_same(one: Chunk, two: Chunk) -> None:
    assert one.prefix_length == two.prefix_length
    for name in ("tokens", "keys", "values"):
        assert torch.equal(getattr(one, name), getattr(two, name))


@pytest.fixture(params=["memory", "directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "store" if request.param == "directory" else None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_put_comes_back(place: Path | None, dtype: torch.dtype) -> None:
    store = ChunkStore(place)
    store.put(identity(1), small_chunk(dtype=dtype), FACTS)
    assert_same(store.get(identity(1), FACTS), small_chunk(dtype=dtype))
    assert identity(1) in store
    assert identity(2) not in store
    assert len(store) == 1
    store.remove(identity(1))
    store.remove(identity(1))
    assert len(store) == 0


def test_another_store_finds_the_files(tmp_path: Path) -> None:
    ChunkStore(tmp_path).put(identity(1), small_chunk(), FACTS)
    assert_same(ChunkStore(tmp_path).get(identity(1), FACTS), small_chunk())


def test_missing_chunk_is_named(place: Path | None) -> None:
    with pytest.raises(MissingChunk, match="`identity` must name a chunk in the store; got 00000001"):
        ChunkStore(place).get(identity(1), FACTS)


def test_chunk_of_another_model_is_refused(place: Path | None) -> None:
    store = ChunkStore(place)
    store.put(identity(1), small_chunk(), FACTS)
    message = r"differs in precision \(torch.float32 instead of torch.bfloat16\)"
    with pytest.raises(ForeignChunk, match=message):
        store.get(identity(1), FACTS | {"precision": "torch.bfloat16"})


@pytest.mark.parametrize("bad", ["../escape", "", "xyz", "ABCDEF01", "a" * 65, 7])
def test_ids_cannot_name_other_files(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`identity` must be 8 to 64 hexadecimal digits"):
        ChunkStore(tmp_path).put(bad, small_chunk(), FACTS)


def test_what_was_not_used_for_longest_goes_first(place: Path | None) -> None:
    size = small_chunk().num_bytes + (700 if place else 0)
    store = ChunkStore(place, max_bytes=3 * size + 50)
    for number in (1, 2, 3):
        store.put(identity(number), small_chunk(number), FACTS)
        time.sleep(0.02)  # file systems may count time in jiffies
    assert len(store) == 3
    store.get(identity(1), FACTS)
    time.sleep(0.02)
    store.put(identity(4), small_chunk(4), FACTS)
    assert identity(2) not in store
    assert all(identity(number) in store for number in (1, 3, 4))
    assert store.num_bytes <= 3 * size + 50


def test_chunk_larger_than_the_limit_is_refused(place: Path | None) -> None:
    with pytest.raises(ValueError, match=r"`max_bytes` must hold a chunk of \d+ bytes; got 10"):
        ChunkStore(place, max_bytes=10).put(identity(1), small_chunk(), FACTS)


def test_truncated_file_is_reported(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    store.put(identity(1), small_chunk(), FACTS)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for length in (0, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedChunk, match=f"{path.name} must be a whole chunk; got"):
            store.get(identity(1), FACTS)
    store.put(identity(1), small_chunk(), FACTS)
    assert_same(store.get(identity(1), FACTS), small_chunk())


def test_no_flipped_bit_is_ever_used(tmp_path: Path) -> None:
    """Every byte of the file, header included: the chunk is refused, or is the one that was written."""
    store = ChunkStore(tmp_path)
    store.put(identity(1), small_chunk(length=2), FACTS)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    refused = 0
    for index in range(len(data)):
        path.write_bytes(data[:index] + bytes([data[index] ^ (1 << index % 8)]) + data[index + 1 :])
        try:
            found = store.get(identity(1), FACTS)
        except (DamagedChunk, ForeignChunk):
            refused += 1
        else:
            assert_same(found, small_chunk(length=2))
    assert refused > 0.95 * len(data)


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ChunkStore(tmp_path)
    store.put(identity(1), small_chunk(1), FACTS)

    def no_space(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", no_space)
        for number in (1, 2):
            with pytest.raises(OSError, match="No space left"):
                store.put(identity(number), small_chunk(number), FACTS)
    assert [path.name for path in tmp_path.iterdir()] == [f"{identity(1)}.safetensors"]
    assert_same(store.get(identity(1), FACTS), small_chunk(1))


WRITER = """
import sys
from pathlib import Path
import torch
from nearfield.retrieval import ChunkStore
from tests.test_retrieval_store import FACTS, identity, small_chunk
directory, first = Path(sys.argv[1]), int(sys.argv[2])
store = ChunkStore(directory / "store")
(directory / f"ready{first}").touch()
while not (directory / "go").exists():
    pass
for repeat in range(15):
    for number in [*range(4), first, first + 1]:
        store.put(identity(number), small_chunk(number), FACTS)
"""

KILLED = """
import sys, time
from pathlib import Path
import safetensors.torch
from nearfield.retrieval import ChunkStore
from tests.test_retrieval_store import FACTS, identity, small_chunk
directory = Path(sys.argv[1])
def half(tensors, path, metadata):
    path.write_bytes(safetensors.torch.save(tensors, metadata)[:200])
    (directory / "ready99").touch()
    time.sleep(600)
store = ChunkStore(directory / "store")
store.put(identity(98), small_chunk(98), FACTS)
safetensors.torch.save_file = half
store.put(identity(98), small_chunk(97), FACTS)
"""


def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})


def wait_for(*paths: Path) -> None:
    limit = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < limit, "a process did not start"
        time.sleep(0.02)


def test_processes_that_write_at_once_and_one_that_is_killed(tmp_path: Path) -> None:
    """Two write the same and own chunks while this one reads; a third dies in the middle of a file."""
    store = ChunkStore(tmp_path / "store")
    killed = start(KILLED, tmp_path)
    writers = [start(WRITER, tmp_path, first) for first in (10, 20)]
    try:
        wait_for(tmp_path / "ready99", tmp_path / "ready10", tmp_path / "ready20")
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
        (tmp_path / "go").touch()
        seen = 0
        while any(writer.poll() is None for writer in writers):
            for number in range(4):
                if identity(number) in store:
                    assert_same(store.get(identity(number), FACTS), small_chunk(number))
                    seen += 1
        assert seen
        assert [writer.wait() for writer in writers] == [0, 0]
    finally:
        for process in (killed, *writers):
            process.kill()
            process.wait()
    for number in (0, 1, 2, 3, 10, 11, 20, 21, 98):
        assert_same(store.get(identity(number), FACTS), small_chunk(number))
    assert len(store) == 9
    (part,) = (tmp_path / "store").glob(".*.part")
    store.put(identity(1), small_chunk(1), FACTS)
    assert part.exists()  # it might still be written
    os.utime(part, (0, 0))
    store.put(identity(1), small_chunk(1), FACTS)
    assert not part.exists()


OTHERS = {
    "weights": {"seed": 1},
    "precision": {"dtype": torch.bfloat16},
    "configuration": {"rms_norm_eps": 1e-3},
    "rope": {"rope_parameters": {**ROPE, "rope_theta": 5000.0}},
}


@pytest.mark.parametrize("fact", OTHERS)
def test_fingerprint_tells_models_apart(fact: str) -> None:
    ours = fingerprint(language_model(dtype=torch.float32), PREFIX)
    theirs = fingerprint(language_model(**{"dtype": torch.float32} | OTHERS[fact]), PREFIX)
    assert fact in differences(ours, theirs)
    assert chunk_id(ours, PREFIX) != chunk_id(theirs, PREFIX)


def test_fingerprint_is_that_of_the_content() -> None:
    model = language_model()
    ours = fingerprint(model, PREFIX)
    assert ours == fingerprint(language_model(), PREFIX)
    assert differences(ours, fingerprint(model, torch.tensor([2]))) == ["prefix"]
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.add_(1e-3)
    assert differences(ours, fingerprint(model, PREFIX)) == ["weights"]


def test_real_chunk_comes_back(tmp_path: Path) -> None:
    model = language_model()
    chunk = prefill_chunk(model, random_tokens(20), PREFIX)
    facts = fingerprint(model, PREFIX)
    name = chunk_id(facts, chunk.tokens)
    store = ChunkStore(tmp_path)
    store.put(name, chunk, facts)
    assert_same(store.get(name, facts), chunk)
