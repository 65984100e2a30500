"""The calls on which fine-grained attention is measured, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the cases before it knows what else it needs.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FineCase:
    """One line of the table.

    Args:
        shape: batch, heads, tokens, head dimension.
        skipped: share of the keys that is not read.
        targets: how many times as fast as dense a call shall be, by name ("cached", "online"), and how many dense calls
            a refresh may take at most ("refresh").
    """

    model: str
    shape: tuple[int, int, int, int]
    skipped: float
    query_block: int = 128
    grain: int = 8
    targets: dict[str, float] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.model}-{self.skipped:.0%}-{self.query_block}x{self.grain}".replace("%", "")


_TARGETS = {
    ("wan-480p", 0.7): {"cached": 3.1, "online": 2.8, "refresh": 1.6},
    ("wan-720p", 0.7): {"cached": 3.0},
    ("wan-480p", 0.9): {"cached": 9.0},
}
_SHAPES = {"wan-480p": (1, 12, 32760, 128), "wan-720p": (1, 40, 75600, 128)}
_TABLE = tuple(
    FineCase(model, _SHAPES[model], skipped, *blocks, _TARGETS.get((model, skipped), {}))
    for model, skipped, choices in (
        ("wan-480p", 0.7, ((128, 1), (128, 4), (128, 8), (192, 1), (192, 4), (192, 8))),
        ("wan-480p", 0.9, ((128, 8), (192, 8))),
        ("wan-720p", 0.7, ((128, 8), (192, 8))),
    )
    for blocks in choices
)
CASES = {case.name: case for case in _TABLE}
QUICK = {case.name: case for case in (FineCase("small", (1, 2, 900, 32), 0.7, 64, 4),)}
