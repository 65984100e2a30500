"""The denoising steps that are measured, and the speed-ups over the best dense step to be reached on one H200."""

from collections.abc import Iterator
from typing import Any

from benchmarks import special
from benchmarks.attention_cases import DEFAULT, hilbert_fields
from benchmarks.cases import CUDA, QUICK, Case, named

DEFAULTS: dict[str, Any] = {
    "model": "flux1",
    "size": "1024",
    "layers": None,
    "tiny": False,
    "skipped": None,
}
"""What is denoised: the model, pixels (1024, 768x1344, 480p), blocks of each kind, a few narrow layers instead of
the real width, and the share of keys that is to be skipped."""

_TINY = {"model": "flux1", "size": "256", "tiny": True}
_ALL_BUT_FIRST = {"skip_blocks": (1, 1)}  # of a model of few layers


def _tiles(size: int) -> dict[str, Any]:
    """Keys-only sharing; where there are many tokens, more tiles and a smaller share."""
    return (
        hilbert_fields(64, "keys", 256) if size >= 4096 else hilbert_fields(16, "keys") | {"shared": "centre"}
    )


def _both(hilbert: dict[str, Any], **merge: Any) -> dict[str, Any]:
    """Merged tokens that are then read by Hilbert."""
    return {
        "merge": {"method": "Merge", "fields": merge},
        "attention": {"method": "Hilbert", "fields": hilbert},
    }


def _cases() -> Iterator[Case]:
    for size, tiles, both in ((1024, 1.10, None), (2048, 1.45, 2.0), (4096, 3.05, 4.2)):
        on = {"size": str(size)}
        yield Case(f"flux1-{size}-tiles", on, "Hilbert", _tiles(size), {"step": tiles}, (CUDA,))
        yield Case(f"flux1-{size}-default", on, "Hilbert", DEFAULT, where=(CUDA,))
        if both:
            fields, targets = _both(_tiles(size)), {"step": both}
            yield Case(f"flux1-{size}-merge-tiles", on, "Composition", fields, targets, (CUDA,))
    yield Case("flux1-1024-merge", {}, "Merge", {}, {"step": 1 / 0.7}, (CUDA,))
    yield Case("flux1-1024-merge-module", {}, "Merge", {"placement": "module"}, {"step": 1 / 0.7})
    for name in ("480p", "720p"):
        yield Case(f"wan21-{name}-default", {"model": "wan21-1.3b", "size": name}, "Hilbert", DEFAULT)
    yield Case("tiny-tiles", _TINY, "Hilbert", _tiles(256), where=(QUICK,))
    yield Case("tiny-default", _TINY, "Hilbert", DEFAULT, where=(QUICK,))
    yield Case("tiny-merge", _TINY, "Merge", _ALL_BUT_FIRST | {"region_size": 16}, where=(QUICK,))
    both_fields = _both(_tiles(256), **_ALL_BUT_FIRST, region_size=16)
    yield Case("tiny-merge-tiles", _TINY, "Composition", both_fields, where=(QUICK,))


CASES = named((*_cases(), *special.cases("step")), DEFAULTS)
