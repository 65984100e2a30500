"""The attention calls on which the Hilbert method is measured, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the cases before it knows what else it needs.
"""

from dataclasses import dataclass, replace
from typing import Any

from nearfield.cli.presets import PRESETS, Preset


@dataclass(frozen=True)
class HilbertCase:
    """One line of the table.

    Args:
        tiles, share, shared_tokens, far, interleave, near, summary, text_reads: fields of the method; with no
            `shared_tokens` nothing is shared.
        target: speed-up over the best dense attention to be reached on one H200; None where none was set.
    """

    name: str
    preset: Preset
    tiles: int | None
    share: str
    shared_tokens: int
    far: int | None = None
    interleave: bool = False
    near: str = "tile"
    summary: str = "mean"
    text_reads: str = "all"
    target: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What to make the method from. Nothing is left dense: only the sparse call is timed."""
        names = ("tiles", "share", "shared_tokens", "far", "interleave", "near", "summary", "text_reads")
        region = {"shared": "centre"} if self.shared_tokens else {"shared": "none", "shared_tokens": None}
        return {name: getattr(self, name) for name in names} | region | {"dense_layers": 0, "dense_steps": 0}

    def __str__(self) -> str:
        more = f", far {self.far}" if self.far else ""
        more += ", text in summary" if self.text_reads == "summary" else ""
        more += ", interleaved" if self.interleave else ""
        around = "what is around" if self.tiles is None else f"a {self.tiles}th around"
        tiles = f"{self.tiles} tiles" if self.near == "tile" else around
        return f"{self.name}: {tiles}, {self.shared_tokens} shared {self.share}{more}"


def _default(name: str, preset: Preset, text_reads: str = "all") -> HilbertCase:
    """What `Hilbert()` reads in a sparse call."""
    case = HilbertCase(name, preset, None, "two-way", 0, far=16, near="around", summary="weighted")
    return replace(case, text_reads=text_reads)


def _table() -> tuple[HilbertCase, ...]:
    small, middle, large = (PRESETS[f"flux-{side}"] for side in (1024, 2048, 4096))
    tiny = PRESETS["cpu-small"]
    return (
        HilbertCase("1024-two-way", small, 16, "two-way", 256, target=2.5),
        HilbertCase("1024-keys", small, 16, "keys", 256, target=2.85),
        HilbertCase("2048-two-way", middle, 16, "two-way", 1024, target=4.2),
        HilbertCase("2048-keys", middle, 16, "keys", 1024, target=5.3),
        HilbertCase("2048-keys-256", middle, 16, "keys", 256, target=7.0),
        HilbertCase("4096-keys-256", large, 64, "keys", 256, target=25.0),
        HilbertCase("2048-far", middle, 16, "two-way", 1024, far=64),
        _default("1024-default", small),
        _default("2048-default", middle),
        _default("4096-default", large),
        _default("1024-text", small, "summary"),
        _default("2048-text", middle, "summary"),
        _default("4096-text", large, "summary"),
        HilbertCase("1024-tiles", small, 16, "two-way", 0, far=16),
        HilbertCase("2048-tiles", middle, 16, "two-way", 0, far=16),
        HilbertCase("4096-tiles", large, 16, "two-way", 0, far=16),
        HilbertCase("4096-far-64", large, 64, "two-way", 0, far=64),
        HilbertCase("1024-around", small, 16, "two-way", 0, far=16, near="around"),
        HilbertCase("2048-around", middle, 16, "two-way", 0, far=16, near="around"),
        HilbertCase("4096-around", large, 16, "two-way", 0, far=16, near="around"),
        HilbertCase("4096-around-64", large, 64, "two-way", 0, far=64, near="around"),
        HilbertCase("2048-interleave", middle, 16, "two-way", 1024, interleave=True),
        HilbertCase("tiny-two-way", tiny, 4, "two-way", 32),
        HilbertCase("tiny-keys", tiny, 4, "keys", 32),
        HilbertCase("tiny-far", tiny, 4, "two-way", 32, far=16),
        _default("tiny-default", tiny),
        HilbertCase("tiny-around", tiny, 4, "two-way", 0, far=16, near="around"),
        HilbertCase("tiny-interleave", tiny, 4, "keys", 32, interleave=True),
    )


CASES = {case.name: case for case in _table()}

QUICK = tuple(name for name in CASES if name.startswith("tiny-"))
ON_CUDA = tuple(name for name in CASES if name not in QUICK)
ON_CPU = tuple(name for name in CASES if name.startswith("1024-"))
