"""The store: what is written comes back or is refused. What processes do to it is in test_retrieval_faults.py."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.store_workers import FACTS, identity, same, some_chunk
from tests.tiny_language_models import ROPE, language_model, random_tokens

from nearfield.retrieval import Chunk, ChunkStore, DamagedChunk, ForeignChunk, MissingChunk, prefill_chunk
from nearfield.retrieval.fingerprint import chunk_id, differences, fingerprint

PREFIX = torch.tensor([1])


def assert_same(one: Chunk, two: Chunk) -> None:
    assert same(one, two)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of an S3 server in this process, where the packages moto (with its server) and s3fs are installed."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    import fsspec

    server.start()
    host, port = server.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "key", "secret": "secret"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", options)
        fsspec.filesystem("s3").mkdir("chunks")
        yield "s3://chunks"
    server.stop()


@pytest.fixture(params=["memory", "directory", "url", "remote", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str | None:
    """Where chunks may be: `memory://` is fsspec's own object store, within this process."""
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}{tmp_path}/store"
    return {
        "memory": None,
        "directory": tmp_path / "store",
        "url": (tmp_path / "store").as_uri(),
        "remote": f"memory:/{tmp_path}/store",
    }[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_put_comes_back(place: Path | str | None, dtype: torch.dtype) -> None:
    store = ChunkStore(place)
    store.put(identity(1), some_chunk(dtype=dtype), FACTS)
    assert_same(store.get(identity(1), FACTS), some_chunk(dtype=dtype))
    assert identity(1) in store
    assert identity(2) not in store
    assert len(store) == 1
    store.remove(identity(1))
    store.remove(identity(1))
    assert len(store) == 0


def test_another_store_finds_the_files(place: Path | str | None) -> None:
    other = ChunkStore(place)
    assert identity(1) not in other
    ChunkStore(place).put(identity(1), some_chunk(), FACTS)
    assert (identity(1) in other) == (len(other) == 1) == (place is not None)  # memory is each store's own
    if place is not None:
        assert_same(other.get(identity(1), FACTS), some_chunk())


def test_missing_chunk_is_named(place: Path | str | None) -> None:
    with pytest.raises(MissingChunk, match="`identity` must name a chunk in the store; got 00000001"):
        ChunkStore(place).get(identity(1), FACTS)


def test_chunk_of_another_model_is_refused(place: Path | str | None) -> None:
    store = ChunkStore(place)
    store.put(identity(1), some_chunk(), FACTS)
    message = r"differs in precision \(torch.float32 instead of torch.bfloat16\)"
    with pytest.raises(ForeignChunk, match=message):
        store.get(identity(1), FACTS | {"precision": "torch.bfloat16"})


@pytest.mark.parametrize("bad", ["../escape", "", "xyz", "ABCDEF01", "a" * 65, 7])
def test_ids_cannot_name_other_files(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`identity` must be 8 to 64 hexadecimal digits"):
        ChunkStore(tmp_path).put(bad, some_chunk(), FACTS)


def test_what_was_not_used_for_longest_goes_first(place: Path | str | None) -> None:
    size = some_chunk().num_bytes + (700 if place else 0)
    store = ChunkStore(place, max_bytes=3 * size + 50)
    for number in (1, 2, 3):
        store.put(identity(number), some_chunk(number), FACTS)
        time.sleep(0.02)  # file systems may count time in jiffies
    assert len(store) == 3
    store.get(identity(1), FACTS)
    time.sleep(0.02)
    store.put(identity(4), some_chunk(4), FACTS)
    is_remote = str(place).startswith(("memory:", "s3:"))  # object stores do not note when something is read
    gone = 1 if is_remote else 2
    assert identity(gone) not in store
    assert all(identity(number) in store for number in {1, 2, 3, 4} - {gone})
    assert store.num_bytes <= 3 * size + 50


def test_chunk_larger_than_the_limit_is_refused(place: Path | str | None) -> None:
    with pytest.raises(ValueError, match=r"`max_bytes` must hold a chunk of \d+ bytes; got 10"):
        ChunkStore(place, max_bytes=10).put(identity(1), some_chunk(), FACTS)


def test_chunk_under_the_name_of_another_is_refused(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    store.put(identity(1), some_chunk(), FACTS)
    (tmp_path / f"{identity(1)}.safetensors").rename(tmp_path / f"{identity(2)}.safetensors")
    with pytest.raises(DamagedChunk, match="must be a whole chunk; got the chunk 00000001"):
        store.get(identity(2), FACTS)


def test_rests_of_killed_writers_in_an_object_store_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    store, files = ChunkStore(f"memory:/{tmp_path}"), fsspec.filesystem("memory")
    files.pipe_file(f"{tmp_path}/{identity(1)}-0.part", b"half")
    store.put(identity(2), some_chunk(), FACTS)
    assert len(store) == 1
    assert len(files.ls(str(tmp_path))) == 2
    later = time.time() + 4000
    monkeypatch.setattr(time, "time", lambda: later)
    store.put(identity(2), some_chunk(), FACTS)
    assert len(files.ls(str(tmp_path))) == 1


def test_failed_upload_leaves_the_old_chunk_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    store, files = ChunkStore(f"memory:/{tmp_path}"), fsspec.filesystem("memory")
    store.put(identity(1), some_chunk(1), FACTS)

    def breaks(path: str, data: bytes) -> None:
        with files.open(path, "wb") as file:
            file.write(data[:100])
        raise OSError("connection lost")

    with monkeypatch.context() as patch:
        patch.setattr(files, "pipe_file", breaks)
        with pytest.raises(OSError, match="connection lost"):
            store.put(identity(1), some_chunk(2), FACTS)
    assert len(files.ls(str(tmp_path))) == 1
    assert_same(store.get(identity(1), FACTS), some_chunk(1))


@pytest.mark.parametrize("place", ["url", "remote", "s3"], indirect=True)
def test_truncated_object_is_reported(place: str) -> None:
    import fsspec

    store = ChunkStore(place)
    store.put(identity(1), some_chunk(), FACTS)
    files, path = fsspec.core.url_to_fs(f"{place}/{identity(1)}.safetensors")
    files.pipe_file(path, files.cat_file(path)[:-5])
    with pytest.raises(DamagedChunk, match="must be a whole chunk; got"):
        store.get(identity(1), FACTS)
    store.put(identity(1), some_chunk(), FACTS)
    assert_same(store.get(identity(1), FACTS), some_chunk())


def test_truncated_file_is_reported(tmp_path: Path) -> None:
    store = ChunkStore(tmp_path)
    store.put(identity(1), some_chunk(), FACTS)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    for length in (0, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(DamagedChunk, match=f"{path.name} must be a whole chunk; got"):
            store.get(identity(1), FACTS)
    store.put(identity(1), some_chunk(), FACTS)
    assert_same(store.get(identity(1), FACTS), some_chunk())


def test_no_flipped_bit_is_ever_used(tmp_path: Path) -> None:
    """Every byte of the file, header included: the chunk is refused, or is the one that was written."""
    store = ChunkStore(tmp_path)
    store.put(identity(1), some_chunk(length=2), FACTS)
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
            assert_same(found, some_chunk(length=2))
    assert refused > 0.95 * len(data)


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
