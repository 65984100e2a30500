"""Work of small kernels that runs beside large ones, on a stream of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


class Beside:
    """A branch of what is launched: it begins where it was made, and ends where it is joined.

    Sorting lists takes a GPU a dozen launches that keep few of its processors busy, and the kernel that runs meanwhile
    hardly notices. Without a GPU everything is done in turn.
    """

    def __init__(self, x: Tensor) -> None:
        self._device = x.device if x.is_cuda else None

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Launch what stands inside on the branch."""
        if self._device is None:
            yield
            return
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            yield

    def join(self, *results: Tensor | None) -> None:
        """Wait, on the device, for the branch; `results` are the tensors it made that are used from here on."""
        if self._device is None:
            return
        current: Any = torch.cuda.current_stream(self._device)
        current.wait_stream(_side_stream(self._device))
        for x in results:
            if x is not None:
                x.record_stream(current)


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    # Of high priority: its few programs are to start as soon as one of the large kernel ends, not after all of them.
    return torch.cuda.Stream(device, priority=-1)
