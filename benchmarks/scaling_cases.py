"""The models whose tokens are split over ranks, and what of their times was measured on one H200.

This file imports nothing of weight, so the command line can name the cases before it knows what else it needs.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """Milliseconds on one H200, from benchmarks/results.

    Args:
        sparse, dense: one attention call, by the method and by cuDNN.
        rest: a denoising step without attention.
    """

    sparse: float
    dense: float
    rest: float


@dataclass(frozen=True)
class ScalingCase:
    """One model at one size.

    Args:
        grid, text, heads, head_dim, layers: of the model.
        tiles, share, shared_tokens, far, near, summary: fields of the method; no `shared_tokens`, nothing is shared.
        measured: None where nothing was measured.
        like: the case whose measured times are scaled by pairs and tokens, where there are none of its own.
    """

    name: str
    grid: tuple[int, ...]
    text: int
    heads: int
    layers: int
    tiles: int | None
    share: str = "keys"
    shared_tokens: int | None = 256
    far: int | None = None
    near: str = "tile"
    summary: str = "mean"
    head_dim: int = 128
    measured: Measured | None = None
    like: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        region = {"shared": "centre", "share": self.share, "shared_tokens": self.shared_tokens}
        read = {"tiles": self.tiles, "near": self.near, "far": self.far, "summary": self.summary}
        return read | (region if self.shared_tokens else {"shared": "none"})

    def __str__(self) -> str:
        sides = "x".join(map(str, self.grid))
        shared = f"{self.shared_tokens} shared {self.share}" if self.shared_tokens else "nothing shared"
        tiles = f"{self.tiles} tiles" if self.near == "tile" else "what is around"
        return f"{self.name}: {sides} tokens, {tiles}, {shared}" + (
            f", a far field of {self.far}" if self.far else ""
        )


_2048 = Measured(sparse=0.6920799911022186, dense=5.244095802307129, rest=526.5941162109375)
_4096 = Measured(sparse=2.7354559898376465, dense=85.29183959960938, rest=2013.6917724609375)

_TABLE = (
    ScalingCase("flux-2048", (128, 128), 512, 24, 57, 16, measured=_2048),
    ScalingCase("flux-4096", (256, 256), 512, 24, 57, 64, measured=_4096),
    ScalingCase("flux-4096-two-way", (256, 256), 512, 24, 57, 64, share="two-way"),
    # The defaults of `Hilbert`; tiles of as many tokens; and smaller tiles beside coarser summaries.
    ScalingCase(
        "flux-4096-default",
        (256, 256),
        512,
        24,
        57,
        tiles=None,
        shared_tokens=None,
        far=16,
        near="around",
        summary="weighted",
    ),
    ScalingCase("flux-4096-tiles", (256, 256), 512, 24, 57, 16, shared_tokens=None, far=16),
    ScalingCase("flux-4096-far-64", (256, 256), 512, 24, 57, 64, shared_tokens=None, far=64),
    ScalingCase("flux-8192", (512, 512), 512, 24, 57, 256, like="flux-4096"),
    ScalingCase("wan-720p", (21, 45, 80), 0, 40, 40, 64),
)
CASES = {case.name: case for case in _TABLE}
TINY = ScalingCase("tiny", (24, 32), 64, 4, 4, 8, share="two-way", shared_tokens=32, head_dim=16)
"""What real processes run, to see that they send what is counted."""

RANKS = (2, 4, 8, 16, 32, 64)

LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gbit/s network": 50e9}
"""Bytes per second that one GPU sends; stated, not measured."""

LATENCY = 20e-6
"""Seconds per exchange; stated, not measured."""
