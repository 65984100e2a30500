"""Patterns of attention whose pictures are compared, in groups: methods with their fields, on the embedded model."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks import special
from benchmarks.cases import CPU, CUDA, QUICK, Case, Fields, named
from benchmarks.rivals import masks  # noqa: F401, registers them

DENSE = "dense"
DEFAULTS: dict[str, Any] = {"pattern": "", "weights": None, "lora": None}
"""What people call it, if that is not the case's name; another model file than the one given for all, such as one that
was trained with the pattern; and a LoRA."""


def _pattern(name: str, fields: Fields | None = None, method: str = "Hilbert") -> Case:
    return Case(name, {}, method, fields or {})


def tuning_of(case: Case) -> str:
    """What was done to the model for this pattern."""
    return "LoRA" if case.on.get("lora") else "own weights" if case.on.get("weights") else "none"


def _sparse(name: str, **fields: Any) -> Case:
    """Tiles with nothing dense, unless the fields say so: what the pattern itself does."""
    return _pattern(name, {"near": "tile", "summary": "mean", "dense_layers": 0, "dense_steps": 0} | fields)


def _paper(name: str, **fields: Any) -> Case:
    """The paper's method: tiles with a shared centre, and no far field."""
    return _sparse(name, **{"shared": "centre", "far": None} | fields)


def _chosen(name: str, method: str, **fields: Any) -> Case:
    """A method that chooses by what the tokens hold, with nothing dense."""
    return _pattern(name, {"dense_layers": 0, "dense_steps": 0} | fields, method)


def _around(name: str, **fields: Any) -> Case:
    """The tokens around each block instead of its tile, and weighted summaries, unless the fields say otherwise."""
    return _sparse(name, **{"near": "around", "summary": "weighted"} | fields)


def _merge_fields(**fields: Any) -> Fields:
    """Fields of `Merge`: all but the first block of each kind merge, because the embedded model has few."""
    return {"skip_blocks": (1, 1)} | fields


def _merge_then_tiles(tiles: int) -> Case:
    parts = {
        "merge": {"method": "Merge", "fields": _merge_fields()},
        "attention": {"method": "Hilbert", "fields": {**_paper("").fields, "tiles": tiles}},
    }
    return _pattern(f"merge 0.5, {tiles} tiles", parts, "Composition")


_REGIONS = [(place, share) for place in ("centre", "distributed") for share in ("two-way", "keys")]
_STEPS = {
    "first step dense": 1,
    "first 3 steps dense": 3,
    "last 3 steps dense": (0, 3),
    "first and last 2 steps dense": (1, 2),
}

GROUPS: dict[str, Sequence[Case]] = {
    "default": [_pattern("Hilbert()"), _pattern("Hilbert(tiles=4)", {"tiles": 4})],
    "far": [
        *(_sparse(f"far {window}", far=window) for window in (8, 16, 32, 64)),
        *(_sparse(f"far 16, {tiles} tiles", tiles=tiles) for tiles in (4, 8, 32, 64)),
        _sparse("far 8, 32 tiles", far=8, tiles=32),
    ],
    "far-shared": [
        *(_sparse(f"far 16, {place}, {share}", shared=place, share=share) for place, share in _REGIONS),
        *(
            _sparse(f"far 16, {tokens} in the centre", shared="centre", shared_tokens=tokens)
            for tokens in (64, 512)
        ),
    ],
    "around": [
        _around("around"),
        _around("around, 16 tiles, far 8", tiles=16, far=8),
        _around("around, means", summary="mean"),
        *(_around(f"around, far {window}", far=window) for window in (8, 32)),
        _around("around, nothing far", far=None, summary="mean"),
        *(_around(f"around, {tiles} tiles", tiles=tiles) for tiles in (4, 16, 32)),
        _around("around, 16 tiles, means", tiles=16, summary="mean"),
        _around("around, text in summary", text_reads="summary"),
        _around("around, centre", shared="centre"),
        *(_around(f"around, {curve}", curve=curve) for curve in ("morton", "raster")),
        *(_around(f"around, {words}", dense_steps=ends) for words, ends in _STEPS.items()),
    ],
    "tiles": [_paper(f"{tiles} tiles", tiles=tiles) for tiles in (2, 4, 8, 16)],
    "rivals": [
        *(
            _pattern(f"disc of radius {radius}", {"radius": radius}, "window")
            for radius in (4, 8, 12, 15, 18)
        ),
        *(_pattern(f"band of {width}", {"width": width}, "band") for width in (256, 512, 600, 832)),
    ],
    "chosen": [
        *(_chosen(f"LogLinear, top {topk}", "LogLinear", topk=topk) for topk in (8, 16)),
        *special.cases("pictures"),
        *(_chosen(f"BlockTopK, {keep:.0%}", "BlockTopK", keep=keep) for keep in (0.25, 0.5)),
    ],
    "merge": [
        *(
            _pattern(f"merge {ratio}, {region}", _merge_fields(ratio=ratio, region=region), "Merge")
            for region in ("run", "window", "global")
            for ratio in (0.25, 0.5, 0.75)
        ),
        _pattern("merge 0.5, by module", _merge_fields(placement="module"), "Merge"),
    ],
    "peers": [
        *(
            _pattern(f"bipartite {ratio}", _merge_fields(ratio=ratio), "BipartiteMerge")
            for ratio in (0.25, 0.5, 0.75)
        ),
        _chosen("strided keys", "StridedKeys"),
    ],
    "together": [_merge_then_tiles(tiles) for tiles in (4, 16)],
}

ALL_METHODS = ("tiles", "default", "far", "far-shared", "chosen", "merge", "peers", "together")
"""Groups in which every method of the library has its place: what is measured where nothing is asked for."""


def as_file_name(name: str) -> str:
    """A pattern's name, as far as files may be called so."""
    return re.sub("[^a-z0-9.]+", "-", name.lower()).strip("-")


def _where(group: str) -> tuple[str, ...]:
    return ((CPU, CUDA) if group in ALL_METHODS else ()) + ((QUICK,) if group == "default" else ())


_ALL = (
    replace(
        case,
        name=f"{group}/{as_file_name(case.name)}",
        on={**case.on, "pattern": case.name},
        where=_where(group),
    )
    for group, patterns in GROUPS.items()
    for case in patterns
)
CASES = named(_ALL, DEFAULTS)
"""Called by the group and the pattern, which the results name as people do."""
