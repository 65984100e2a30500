"""What other processes do to a store in test_retrieval_faults.py. Started by name, so it stands in a module."""

import random
import resource
from pathlib import Path
from typing import Any

import torch
from tests.tiny_language_models import DOCUMENTS, language_model, random_tokens, tiny_tokenizer

from nearfield.retrieval import Chunk, ChunkStore, MissingChunk, Reuse

FACTS = {"model": "a", "precision": "torch.float32"}


def some_chunk(seed: int = 0, dtype: torch.dtype = torch.float32, length: int = 6) -> Chunk:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(2, 2, length, 4, generator=generator).to(dtype) for _ in range(2))
    return Chunk(random_tokens(length, seed), 1, keys, values)


def identity(number: int) -> str:
    return f"{number:08x}"


def same(one: Chunk, two: Chunk) -> bool:
    return one.prefix_length == two.prefix_length and all(
        torch.equal(getattr(one, name), getattr(two, name)) for name in ("tokens", "keys", "values")
    )


def write_large(directory: Path, length: int) -> None:
    """Write the same large chunk again and again, until killed."""
    torch.set_num_threads(1)  # threads do not survive the fork that made this process
    store, chunk = ChunkStore(directory), some_chunk(length=length)
    while True:
        store.put(identity(1), chunk, FACTS)


def write_limited(directory: Path, most_bytes: int) -> str:
    """Write where a file may have only so many bytes, as on a full disk; returns what went wrong."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        ChunkStore(directory).put(identity(1), some_chunk(7), FACTS)
    except OSError as error:
        return str(error)
    return "nothing"


def reusing(directory: Path | None, seed: int) -> Reuse:
    model = language_model(dtype=torch.float32, vocab_size=160, seed=seed)
    return Reuse(model, tiny_tokenizer(), ChunkStore(directory))


def add_documents(directory: Path, gate: Any, seed: int) -> list[str]:
    """Add the same documents as others do at the same time."""
    reuse = reusing(directory, seed)
    gate.wait()
    return [reuse.add(text) for text in DOCUMENTS for _ in range(3)]


def write_many(directory: Path, first: int, max_bytes: int | None, gate: Any) -> int:
    """Write chunks that all writers have and some of its own."""
    store = ChunkStore(directory, max_bytes=max_bytes)
    gate.wait()
    numbers = [*range(4), first, first + 1] * 10
    for number in numbers:
        store.put(identity(number), some_chunk(number), FACTS)
    return len(numbers)


def read_many(directory: Path, gate: Any, done: Any) -> tuple[int, int, int]:
    """Read what is being written and evicted: how often it was there, was not, and was something else."""
    store, draw = ChunkStore(directory), random.Random(0)
    gate.wait()
    found = missing = wrong = 0
    while not done.is_set():
        for number in draw.sample(range(4), 4):
            try:
                chunk = store.get(identity(number), FACTS)
            except MissingChunk:
                missing += 1
            else:
                found += 1
                wrong += not same(chunk, some_chunk(number))
    return found, missing, wrong
