"""Work of small kernels that runs beside large ones, on a stream of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType

import torch
from torch import Tensor


class SideStream:
    """A stretch of launches of which some run beside the others: those made inside of `branch`.

    Sorting lists takes a GPU a dozen launches that keep few of its processors busy, and the kernel that runs meanwhile
    hardly notices. The branch begins where the stretch does, however late it is launched; so what it runs beside is
    launched first, and the host loses no time before that. It is joined where the stretch ends, be it by an exception.

    What the branch writes for others is to be allocated before the stretch, and what it reads to be made there: then
    only its temporaries belong to its stream, and nothing else is freed before the join. So memory need not know of two
    streams, and what a call takes does not depend on when its kernels end.

    Without a GPU, or if it is not wanted, everything is done in turn.
    """

    def __init__(self, x: Tensor, wanted: bool = True) -> None:
        self._device = x.device if wanted and x.is_cuda else None
        self._side: torch.cuda.Stream | None = None  # from the branch to the join

    def __enter__(self) -> "SideStream":
        if self._device is not None:
            self._stream = torch.cuda.current_stream(self._device)
            self._start = self._stream.record_event()
        return self

    @contextmanager
    def branch(self) -> Iterator[None]:
        """Launch what stands inside on the branch; once in a stretch."""
        if self._device is None:
            yield
            return
        self._side = _side_stream(self._device, self._stream)
        self._side.wait_event(self._start)
        with torch.cuda.stream(self._side):
            yield

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A stream that waited for nothing is not part of a capture, and must not be waited for.
        if self._side is not None:
            self._stream.wait_stream(self._side)
            self._side = None


_sides: dict[tuple[torch.device, int], torch.cuda.Stream] = {}
_sides_lock = Lock()


def _side_stream(device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Of each stream its own: one that all shared would make them wait for each other, and be drawn into captures of
    others. (torch has 32 to give; beyond, some are shared.)"""
    key = device, stream.stream_id
    with _sides_lock:
        if key not in _sides:
            # Of high priority: its few programs are to start as soon as one of the large kernel ends, not after all.
            _sides[key] = torch.cuda.Stream(device, priority=-1)
        return _sides[key]
