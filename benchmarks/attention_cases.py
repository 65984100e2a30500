"""The attention calls that are measured, and what is to be reached on one H200."""

from collections.abc import Iterator
from typing import Any

from benchmarks import special
from benchmarks.attention_calls import line
from benchmarks.cases import CPU, CUDA, QUICK, Case, named
from nearfield.cli import presets

DEFAULTS: dict[str, Any] = {
    "preset": "cpu-small",
    "layer": 1,
    "plan": "",
    "grain": 64,
    "q_block": None,
    "k_block": None,
    "backward": False,
    "skipped": None,
}
"""What a call is: the tensors (a preset's name, or batch, heads, head_dim, grid and text), the layer of a method, or
instead of a method a plan ("random" lists with `grain` keys per id, "tiles", or "ragged": tiles and the parts they
consist of), blocks, whether the backward is timed, and the share of keys that is to be skipped."""


def _plans() -> Iterator[Case]:
    """Lists of several grains, tiles, and the backward, for every preset."""
    for name, preset in presets.PRESETS.items():
        on_cpu = name.startswith("cpu-")
        where = (CPU,) if name in presets.ON_CPU else () if on_cpu else (CUDA,)
        if name in (*presets.QUICK_ON_CPU,):
            where = (QUICK,)
        for grain in (64, 16, 1):
            yield Case(
                f"{name}-random-{grain}", {"preset": name, "plan": "random", "grain": grain}, where=where
            )
        if preset.text:
            # On the CPU small blocks cost nothing and fit tiles of any length; kernels want whole compute tiles. Text,
            # centre and tiles are multiples of 128 tokens, not of 192.
            rows, grain = (16, 16) if on_cpu else (128, 64)
            for plan in ("tiles", "ragged"):
                on = {"preset": name, "plan": plan, "grain": grain, "q_block": rows}
                yield Case(f"{name}-{plan}", on, where=where)
        on = {"preset": name, "plan": "random", "grain": 64, "backward": True}
        yield Case(f"{name}-random-64-backward", on, where=where)


def hilbert_fields(
    tiles: int | None,
    share: str = "two-way",
    shared_tokens: int = 0,
    far: int | None = None,
    near: str = "tile",
    summary: str = "mean",
    **others: Any,
) -> dict[str, Any]:
    """Nothing is left dense; with no `shared_tokens` nothing is shared."""
    region = {"shared": "centre", "shared_tokens": shared_tokens} if shared_tokens else {"shared": "none"}
    own = {"tiles": tiles, "share": share, "far": far, "near": near, "summary": summary}
    return own | region | {"dense_layers": 0, "dense_steps": 0} | others


DEFAULT = hilbert_fields(None, far=16, near="around", summary="weighted")
"""What `Hilbert()` reads in a sparse call."""
_HILBERT: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "1024-two-way": ("flux-1024", hilbert_fields(16, "two-way", 256), 2.5),
    "1024-keys": ("flux-1024", hilbert_fields(16, "keys", 256), 2.85),
    "2048-two-way": ("flux-2048", hilbert_fields(16, "two-way", 1024), 4.2),
    "2048-keys": ("flux-2048", hilbert_fields(16, "keys", 1024), 5.3),
    "2048-keys-256": ("flux-2048", hilbert_fields(16, "keys", 256), 7.0),
    "4096-keys-256": ("flux-4096", hilbert_fields(64, "keys", 256), 25.0),
    "2048-far": ("flux-2048", hilbert_fields(16, "two-way", 1024, 64), None),
    **{
        f"{size}-{kind}": (f"flux-{size}", fields, None)
        for kind, fields in {
            "default": DEFAULT,
            "text": DEFAULT | {"text_reads": "summary"},
            "tiles": hilbert_fields(16, far=16),
            "around": hilbert_fields(16, far=16, near="around"),
        }.items()
        for size in (1024, 2048, 4096)
    },
    "4096-far-64": ("flux-4096", hilbert_fields(64, far=64), None),
    "4096-around-64": ("flux-4096", hilbert_fields(64, far=64, near="around"), None),
    "2048-interleave": ("flux-2048", hilbert_fields(16, "two-way", 1024, interleave=True), None),
    "tiny-two-way": ("cpu-small", hilbert_fields(4, "two-way", 32), None),
    "tiny-keys": ("cpu-small", hilbert_fields(4, "keys", 32), None),
    "tiny-far": ("cpu-small", hilbert_fields(4, "two-way", 32, 16), None),
    "tiny-default": ("cpu-small", DEFAULT, None),
    "tiny-around": ("cpu-small", hilbert_fields(4, far=16, near="around"), None),
    "tiny-interleave": ("cpu-small", hilbert_fields(4, "keys", 32, interleave=True), None),
}


def _hilbert() -> Iterator[Case]:
    for name, (preset, fields, target) in _HILBERT.items():
        where = (QUICK,) if name.startswith("tiny") else (CUDA, CPU) if name.startswith("1024") else (CUDA,)
        targets = {"forward": target} if target else {}
        yield Case(f"hilbert-{name}", {"preset": preset}, "Hilbert", fields, targets, where)


_LISTS: dict[str, tuple[tuple[int, int, int], float, tuple[tuple[int, int], ...]]] = {
    "flux-2048": ((24, 16896, 128), 0.121, ((128, 128), (128, 64), (64, 64))),
    "wan-480p": ((12, 32768, 128), 0.297, ((128, 128), (64, 64))),
    "flux-1024": ((24, 4608, 128), 0.25, ((128, 128),)),
    "pixel-256": ((6, 65536, 64), 0.02, ((128, 128),)),
    "long": ((7, 109632, 128), 64 * 64 / 109632, ((64, 64), (128, 64))),
}
"""Heads, tokens and head dimension; the share of keys; queries and keys per block: what others read, too."""
_SHAPES: dict[str, tuple[int, int, tuple[int, ...], int]] = {
    "qwen-image-1328": (24, 128, (83, 83), 200),
    "flux-1536x640": (24, 128, (40, 96), 512),
    "sd35-2048": (38, 64, (128, 128), 333),
    "pixart-2048": (16, 72, (128, 128), 0),
    "hunyuan-720p": (24, 128, (33, 45, 80), 256),
    "wan-720p": (40, 128, (21, 45, 80), 0),
    "ltx-704x1216": (32, 64, (16, 22, 38), 0),
    "z-image-1024": (30, 128, (64, 64), 128),
    "flux-3072": (24, 128, (192, 192), 512),
}
"""Heads, head dimension, grid and text of models whose shapes nothing was tuned to."""


def _rivals() -> Iterator[Case]:
    """Lists that other packages read, too (`--rivals`), and shapes that are in no preset."""
    for name, ((heads, tokens, dim), kept, blocks) in _LISTS.items():
        for queries, keys in blocks:
            preset = line(1, heads, tokens, dim) | {"kept": kept}
            on = {"preset": preset, "plan": "random", "grain": keys, "q_block": queries}
            for suffix, backward in (("", False), ("-backward", True)):
                yield Case(f"lists-{name}-{queries}x{keys}{suffix}", on | {"backward": backward})
    kinds = {"default": DEFAULT, "tiles": hilbert_fields(16) | {"shared": "centre"}}
    for name, (heads, dim, grid, text) in _SHAPES.items():
        on = {"preset": {"batch": 1, "heads": heads, "head_dim": dim, "grid": list(grid), "text": text}}
        for kind, fields in kinds.items():
            yield Case(f"shape-{name}-{kind}", on, "Hilbert", fields)


CASES = named((*_plans(), *_hilbert(), *special.cases("attention"), *_rivals()), DEFAULTS)
