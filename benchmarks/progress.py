"""One line on stderr that says what is being done: rewritten in a terminal, appended in a log."""

import sys


class Progress:
    """Counts steps towards `total`; use as a context so that the line is cleared at the end."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._rewrites = sys.stderr.isatty()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._rewrites:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        """Announce the next step before it starts."""
        self.done += 1
        width = len(str(self.total))
        filled = round(20 * (self.done - 1) / max(1, self.total))
        bar = "━" * filled + "─" * (20 - filled)
        line = f"{bar} {self.done:{width}}/{self.total} {text}"
        if self._rewrites:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{self.done:{width}}/{self.total} {text}", file=sys.stderr, flush=True)
