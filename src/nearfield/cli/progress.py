"""Progress of long work on stderr: a bar in a terminal, a line every few seconds in a log; and limits of time."""

import sys
import time
from collections.abc import Callable

_IN_TERMINAL, _IN_LOG = 0.2, 10.0


def time_for(minutes: float | None) -> Callable[[], bool]:
    """A function that returns whether time is left; with None there always is."""
    ends = float("inf") if minutes is None else time.monotonic() + 60 * minutes
    return lambda: time.monotonic() < ends


class Bar:
    """Shows what is done of `total` (None: nobody knows); use as a context so that the line is cleared at the end."""

    def __init__(self, total: int | None, unit: str) -> None:
        self.total, self.unit = total, unit
        self._rewrites = sys.stderr.isatty()
        self._first: tuple[int, float] | None = None
        self._last = 0
        self._said = float("-inf")

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._rewrites:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, done: int, text: str = "", total: int | None = None) -> None:
        """Say how far it is, if it was not said a moment ago."""
        self.total = self.total if total is None else total
        now = time.monotonic()
        if self._first is None or done < self._last:  # the next of several works counts from the start
            self._first = done, now
        self._last = done
        if now - self._said < (_IN_TERMINAL if self._rewrites else _IN_LOG):
            return
        self._said = now
        line = ", ".join(filter(None, [self._count(done), text, self._rate(done, now)]))
        if self._rewrites:
            print(f"\r\x1b[K{self._bar(done)}{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def _count(self, done: int) -> str:
        return f"{done:,} {self.unit}" if self.total is None else f"{done:,}/{self.total:,} {self.unit}"

    def _bar(self, done: int) -> str:
        if not self.total:
            return ""
        filled = round(20 * min(1, done / self.total))
        return "━" * filled + "─" * (20 - filled) + " "

    def _rate(self, done: int, now: float) -> str:
        """Speed since the first call, and the time that is left at it."""
        assert self._first is not None
        count, seconds = done - self._first[0], now - self._first[1]
        if count <= 0 or seconds <= 0:
            return ""
        rate = f"{count / seconds:.1f}/s" if count >= seconds else f"{seconds / count:.1f} s each"
        if self.total is None:
            return rate
        left = round((self.total - done) * seconds / count)
        return f"{rate}, {left // 60}:{left % 60:02} left"
