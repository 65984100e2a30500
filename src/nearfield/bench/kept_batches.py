"""Batches of pictures that were made and measured, kept from run to run.

What is kept of a batch is what was measured of every picture, so that rows for any number of pictures follow without
making any again; and, of the dense model, the first pictures themselves, beside which others are held.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nearfield.demo.storage import read_tensors, write_tensors

FORMAT = 1


class Batch(NamedTuple):
    """Pictures with consecutive numbers.

    Args:
        values: tensors by what they are, of every picture from the first on; some of the first few alone.
        facts: of all of them.
    """

    values: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def first(self, number: int) -> "Batch":
        return Batch({name: value[:number] for name, value in self.values.items()}, self.facts)


class KeptBatches:
    """The batches of one way of making pictures.

    Args:
        folder: a file for each; None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._known: dict[int, Batch] = {}

    def get(self, numbers: range, wanted: Mapping[str, int]) -> Batch | None:
        """What is known of the pictures with these numbers; None where it is not all that is wanted.

        Args:
            wanted: of how many pictures, from the first on, which values.
        """
        batch = self._known.get(numbers.start) or self._read(numbers.start)
        if batch is None:
            return None
        self._known[numbers.start] = batch
        is_whole = all(len(batch.values.get(name, ())) >= number for name, number in wanted.items())
        return batch.first(len(numbers)) if is_whole else None

    def put(self, numbers: range, batch: Batch) -> None:
        self._known[numbers.start] = batch
        if self.folder is not None:
            facts = {"format": FORMAT, "kind": "pictures", "facts": dict(batch.facts)}
            write_tensors(self._file(numbers.start), batch.values, facts)

    def _read(self, start: int) -> Batch | None:
        if self.folder is None or not self._file(start).exists():
            return None
        values, header = read_tensors(self._file(start))
        is_known = (header.get("kind"), header.get("format")) == ("pictures", FORMAT)
        return Batch(values, header["facts"]) if is_known else None

    def _file(self, start: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{start:06d}.safetensors"


def digest(settings: Mapping[str, Any], *files: Path | None) -> str:
    """What tells ways of making pictures apart: their settings, and what stands in their files."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for file in files:
        found.update(b"-" if file is None else hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:12]
