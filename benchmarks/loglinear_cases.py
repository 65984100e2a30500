"""The calls on which log-linear attention is measured, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the cases before it knows what else it needs.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LogLinearCase:
    """One line of the table.

    Args:
        shape: batch, heads, tokens, head dimension.
        targets: milliseconds to reach on one H200, forward and forward with backward; None where none was set.
    """

    shape: tuple[int, int, int, int]
    levels: int | str = 2
    targets: tuple[float | None, float | None] = (None, None)

    @property
    def name(self) -> str:
        return "x".join(map(str, self.shape)) + ("-auto" if self.levels == "auto" else "")


_TABLE = (
    LogLinearCase((4, 6, 16384, 64), 2, (0.29, 1.3)),
    LogLinearCase((1, 6, 65536, 64), 2, (0.39, 2.0)),
    LogLinearCase((4, 6, 65536, 64), 2, (1.45, 6.5)),
    LogLinearCase((1, 6, 131072, 64), 2, (0.95, 5.0)),
    LogLinearCase((1, 6, 16384, 64), "auto"),
    LogLinearCase((1, 6, 65536, 64), "auto"),
    LogLinearCase((1, 6, 262144, 64), "auto"),
)
CASES = {case.name: case for case in _TABLE}
QUICK = {
    case.name: case for case in (LogLinearCase((1, 2, 1024, 32), 1), LogLinearCase((1, 2, 1000, 32), "auto"))
}
