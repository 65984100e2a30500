"""One line on stderr that counts images: rewritten in a terminal, in a log said again every few seconds."""

import sys
import time

_SECONDS_BETWEEN_LINES = 0.2, 10.0
"""In a terminal, in a log."""


class ImageProgress:
    """Counts images towards `total`; use as a context so that the line is cleared at the end."""

    def __init__(self, text: str, total: int) -> None:
        self.text = text
        self.total = total
        self.done = 0
        self._rewrites = sys.stderr.isatty()
        self._start = self._said = time.monotonic()

    def __enter__(self) -> "ImageProgress":
        self._say()
        return self

    def __exit__(self, *_: object) -> None:
        if self._rewrites:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        self.done += count
        wait = _SECONDS_BETWEEN_LINES[0 if self._rewrites else 1]
        if time.monotonic() - self._said >= wait or (self.done == self.total and not self._rewrites):
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        line = f"{self.text}: {self.done:,}/{self.total:,} images"
        if self.done:
            rate = self.done / max(1e-9, self._said - self._start)
            line += f", {rate:.1f}/s, {(self.total - self.done) / rate:.0f} s left"
        if self._rewrites:
            filled = round(20 * self.done / max(1, self.total))
            print(f"\r\x1b[K{'━' * filled}{'─' * (20 - filled)} {line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
