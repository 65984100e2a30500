"""The models whose tokens are split over ranks, and what of their times was measured on one H200."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.attention_cases import DEFAULT, hilbert_fields
from benchmarks.cases import CPU, CUDA, QUICK, Case, named

BYTES, TIMES, PROCESSES = "bytes", "times", "processes"
DEFAULTS: dict[str, Any] = {
    "work": BYTES,
    "grid": [256, 256],
    "text": 512,
    "heads": 24,
    "head_dim": 128,
    "layers": 57,
    "ranks": [2, 4, 8, 16, 32, 64],
}
"""What is split: tokens, heads and layers of a model; over how many ranks; and whether the bytes are counted that each
sends, the times measured of what each computes, one after another, or real processes run that send them."""


class Measured(NamedTuple):
    """Milliseconds on one H200, from benchmarks/results.

    Args:
        sparse, dense: one attention call, by the method and by cuDNN.
        rest: a denoising step without attention.
    """

    sparse: float
    dense: float
    rest: float


MEASURED = {
    "flux-2048": Measured(sparse=0.6920799911022186, dense=5.244095802307129, rest=526.5941162109375),
    "flux-4096": Measured(sparse=2.7354559898376465, dense=85.29183959960938, rest=2013.6917724609375),
}
LIKE = {"flux-8192": "flux-4096"}
"""Cases without times of their own: those of another are scaled by pairs and tokens."""
LINKS = {"NVLink, 450 GB/s": 450e9, "400 Gbit/s network": 50e9}
"""Bytes per second that one GPU sends; stated, not measured."""
LATENCY = 20e-6
"""Seconds per exchange; stated, not measured."""

_TINY = {"grid": [24, 32], "text": 64, "heads": 4, "head_dim": 16, "layers": 4}
_TINY_FIELDS = hilbert_fields(8, "two-way", 32)
_FLUX = {
    "flux-2048": ([128, 128], hilbert_fields(16, "keys", 256)),
    "flux-4096": ([256, 256], hilbert_fields(64, "keys", 256)),
    "flux-4096-two-way": ([256, 256], hilbert_fields(64, "two-way", 256)),
    # The defaults of `Hilbert`; tiles of as many tokens; and smaller tiles with coarser summaries.
    "flux-4096-default": ([256, 256], DEFAULT),
    "flux-4096-tiles": ([256, 256], hilbert_fields(16, far=16)),
    "flux-4096-far-64": ([256, 256], hilbert_fields(64, far=64)),
    "flux-8192": ([512, 512], hilbert_fields(256, "keys", 256)),
}
_WAN = {"grid": [21, 45, 80], "text": 0, "heads": 40, "layers": 40}


def _cases() -> Iterator[Case]:
    both = (CPU, CUDA)
    for name, (grid, fields) in _FLUX.items():
        yield Case(name, {"grid": grid}, "Hilbert", fields, where=both)
    yield Case("wan-720p", _WAN, "Hilbert", hilbert_fields(64, "keys", 256), where=both)
    for ranks in (2, 3, 4):
        where = (QUICK,) if ranks == 2 else ()
        on = _TINY | {"work": PROCESSES, "ranks": [ranks]}
        yield Case(f"processes-{ranks}", on, "Hilbert", _TINY_FIELDS, where=where)
    timed = {"work": TIMES, "ranks": [8]}
    yield Case("flux-4096-times", timed, "Hilbert", _FLUX["flux-4096"][1], where=(CUDA,))
    yield Case("tiny-times", _TINY | timed | {"ranks": [2]}, "Hilbert", _TINY_FIELDS, where=(QUICK,))


CASES = named(_cases(), DEFAULTS)
