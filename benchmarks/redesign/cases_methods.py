"""Cases of the methods: what a layer of each reads, over several steps where the method remembers.

This folder serves the redesign alone, and goes away with its last commit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import names
import torch
from ground import Ground, Results, case, differentiated, fill, never, parameter_gradients, plain
from names import Geometry
from torch import Tensor

INF = float("inf")
NOT_INTERPRETED = ("cpu", "cuda")
EVERYWHERE = ("cpu", "interpreter", "cuda")

IMAGE = Geometry((12, 10), 7)
LAST = Geometry((9, 7), 5, text_first=False)
TWO = Geometry((8, 8), 3, references=((5, 7),))
VIDEO = Geometry((3, 6, 8), 5)
BARE = Geometry((12, 10))
LARGE = Geometry((24, 20), 20)


def layer(
    ground: Ground,
    method: Any,
    geometry: Geometry,
    index: int = 0,
    heads: int = 2,
    groups: int = 2,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    hides_text: bool = False,
    scale: float | None = None,
    extra: str | None = None,
) -> Results:
    """One layer of a method, without gradients and with them, and the order of the tokens."""
    reader = names.layer_of(method, geometry, index, heads, ground.device)
    tokens = geometry.num_tokens
    sizes = {"batch": batch, "heads": heads, "groups": groups, "dtype": dtype}
    leaves = dict(zip(("query", "key", "value"), ground.qkv(tokens, **sizes, seed=60), strict=True))
    bias = text_bias(ground, geometry) if hides_text else None
    if extra == "gate":
        leaves["gate"] = ground.normal(batch, heads, tokens, 16, seed=61)
    if extra == "projection":
        leaves["projection"] = ground.normal(heads, 16, 16, seed=62)

    def attend(query: Tensor, key: Tensor, value: Tensor, more: Tensor | None = None):
        options = {} if more is None else {extra: more}
        return reader.attend(query, key, value, key_bias=bias, scale=scale, impl=ground.impl, **options)

    results = differentiated(attend, leaves, ground)
    return results | {"order": names.order_of(method, geometry), "pairs": reader.num_pairs}


def text_bias(ground: Ground, geometry: Geometry) -> Tensor:
    """Hides the last two tokens of the text."""
    bias = torch.zeros(1, 1, geometry.num_tokens, device=ground.device)
    bias[..., geometry.text_span[1] - 2 : geometry.text_span[1]] = -INF
    return bias


def made(name: str, **fields: Any) -> Callable[[], Any]:
    """A method, made when its case is run: its fields are checked then."""
    return lambda: names.method(name, **fields)


def layer_case(
    name: str,
    make: Callable[[], Any],
    geometry: Geometry,
    *,
    apart: Callable[[str, str], bool] = never,
    devices: tuple[str, ...] = EVERYWHERE,
    **call: Any,
) -> None:
    case(
        f"methods/{name}",
        lambda ground: layer(ground, make(), geometry, **call),
        devices=devices,
        every_impl=True,
        apart=apart,
    )


# -- Hilbert -----------------------------------------------------------------------------------------------------------

hilbert = partial(made, "Hilbert")
tile = partial(made, "Hilbert", near="tile")

for _geometry, _name in ((IMAGE, "image"), (LAST, "text last"), (TWO, "references"), (VIDEO, "video")):
    _devices = EVERYWHERE if _name == "image" else NOT_INTERPRETED
    layer_case(f"hilbert/default {_name}", hilbert(), _geometry, apart=plain, devices=NOT_INTERPRETED)
    layer_case(
        f"hilbert/around {_name}", hilbert(tile_size=24, far=4), _geometry, apart=plain, devices=_devices
    )
    layer_case(f"hilbert/tiles {_name}", tile(tiles=4, far=None), _geometry, index=1, devices=_devices)
    layer_case(
        f"hilbert/tiles far {_name}",
        tile(tiles=4, far=8),
        _geometry,
        index=2,
        apart=plain,
        devices=_devices,
    )
for _shared in ("centre", "distributed"):
    for _share in ("two-way", "keys"):
        _fields = {"tiles": 4, "shared": _shared, "share": _share, "shared_tokens": 40}
        layer_case(
            f"hilbert/{_shared} {_share}",
            tile(**_fields, far=None),
            LARGE,
            index=3,
            devices=NOT_INTERPRETED,
        )
        layer_case(
            f"hilbert/{_shared} {_share} far",
            tile(**_fields, far=4),
            LARGE,
            apart=plain,
            devices=NOT_INTERPRETED,
        )
_MORE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "around alone": (hilbert(tile_size=32, far=None), {}),
    "mean": (hilbert(tile_size=24, far=4, summary="mean"), {"apart": plain}),
    "mean tiles": (tile(tile_size=30, far=5, summary="mean"), {"apart": plain}),
    "text summary": (hilbert(tile_size=24, far=4, text_reads="summary"), {"apart": plain}),
    "text summary tiles": (tile(tiles=4, far=4, text_reads="summary"), {"apart": plain}),
    "tiles by layer": (tile(tiles=(2, 2, 4), far=4), {"apart": plain, "index": 2}),
    "interleaved": (tile(tiles=4, far=None, interleave=True), {"heads": 4, "groups": 2, "index": 1}),
    "interleaved far": (tile(tiles=4, far=4, interleave=True), {"heads": 4, "groups": 4, "apart": plain}),
    "open": (tile(tiles=4, far=None, curve="hilbert"), {}),
    "closed": (tile(tiles=4, far=None, curve="hilbert-closed", cycle=3), {"index": 2}),
    "morton": (tile(tiles=4, far=None, curve="morton"), {}),
    "raster": (hilbert(tile_size=24, far=4, curve="raster"), {"apart": plain}),
    "masked": (hilbert(tile_size=24, far=4), {"apart": plain, "hides_text": True, "batch": 2}),
    "masked tiles": (tile(tiles=4, far=None), {"hides_text": True, "batch": 2}),
    "shared keys": (hilbert(tile_size=24, far=4), {"apart": plain, "heads": 4, "groups": 1}),
    "scale": (hilbert(tile_size=24, far=4), {"apart": plain, "scale": -0.4}),
    "half": (hilbert(tile_size=24, far=4), {"apart": plain, "dtype": torch.float16}),
    "brain": (hilbert(tile_size=24, far=4), {"apart": plain, "dtype": torch.bfloat16}),
    "double": (hilbert(tile_size=24, far=4), {"apart": plain, "dtype": torch.float64, "devices": ("cpu",)}),
}
for _name, (_make, _call) in _MORE.items():
    _chosen = EVERYWHERE if _name in ("mean", "interleaved", "masked", "half") else NOT_INTERPRETED
    _geometry = IMAGE if _chosen is EVERYWHERE else LARGE
    layer_case(f"hilbert/{_name}", _make, _geometry, **{"devices": _chosen} | _call)


# -- LogLinear ---------------------------------------------------------------------------------------------------------

log_linear = partial(made, "LogLinear", block=4, topk=2)
_LOG: dict[str, tuple[Callable[[], Any], Geometry, dict[str, Any]]] = {
    "default": (made("LogLinear"), Geometry((20, 20)), {"apart": plain}),
    "small": (log_linear(), BARE, {"apart": plain}),
    "text": (log_linear(), IMAGE, {"apart": plain}),
    "text last": (log_linear(), LAST, {"apart": plain}),
    "references": (log_linear(), TWO, {"apart": plain}),
    "video": (log_linear(), VIDEO, {"apart": plain}),
    "one level": (log_linear(levels=1), BARE, {"apart": plain}),
    "chosen alone": (log_linear(enrich=0), BARE, {}),
    "one level read": (log_linear(enrich=1), BARE, {"apart": plain}),
    "unweighted": (log_linear(weighted=False), BARE, {"apart": plain}),
    "exclusive": (log_linear(exclude_selected=True), BARE, {"apart": plain}),
    "exclusive text": (log_linear(exclude_selected=True), IMAGE, {"apart": plain}),
    "own": (log_linear(keep_own=True, order="raster"), BARE, {"apart": plain}),
    "morton": (log_linear(order="morton"), BARE, {"apart": plain}),
    "masked": (log_linear(), IMAGE, {"apart": plain, "hides_text": True, "batch": 2}),
    "negative": (log_linear(), BARE, {"apart": plain, "scale": -0.3}),
    "shared keys": (log_linear(), BARE, {"apart": plain, "heads": 4, "groups": 2}),
    "half": (log_linear(), BARE, {"apart": plain, "dtype": torch.float16}),
    "half 16": (made("LogLinear"), Geometry((20, 20)), {"apart": plain, "dtype": torch.float16}),
}
for _name, (_make, _geometry, _call) in _LOG.items():
    _chosen = EVERYWHERE if _name in ("default", "small", "text", "exclusive", "half 16") else NOT_INTERPRETED
    layer_case(f"loglinear/{_name}", _make, _geometry, **{"devices": _chosen} | _call)


def log_linear_apart(ground: Ground) -> Results:
    """Fewer queries than keys, which the function takes without a geometry."""
    method = names.method("LogLinear", block=4, topk=2)
    query, key, value = ground.qkv(50, 90, heads=4, groups=2, seed=63)
    call = {"method": method, "impl": ground.impl}

    def attend(query: Tensor, key: Tensor, value: Tensor):
        out = names.log_linear_attention(query, key, value, **call)
        return out, out.sum(-1)

    return differentiated(attend, {"query": query, "key": key, "value": value}, ground)


case("methods/loglinear/fewer queries", log_linear_apart, every_impl=True, apart=plain)


# -- methods that choose blocks ----------------------------------------------------------------------------------------

top = partial(made, "BlockTopK", query_block=16, grain=8)
fine = partial(made, "FineGrained", query_block=16, grain=2)
_CHOOSE: dict[str, tuple[Callable[[], Any], Geometry, dict[str, Any]]] = {
    "blocks/default": (made("BlockTopK"), LARGE, {}),
    "blocks/small": (top(), IMAGE, {}),
    "blocks/keep": (top(keep=0.5, order="raster"), TWO, {"heads": 4}),
    "blocks/mass": (top(mass=0.7), IMAGE, {"hides_text": True, "batch": 2}),
    "blocks/guard": (top(guard=0.2), VIDEO, {}),
    "fine/online": (fine(predict="online", guard=0.2, mass=0.6), IMAGE, {}),
    "fine/online mass": (fine(predict="online", mass=0.5, guard=None), LAST, {"heads": 4, "batch": 2}),
    "fine/online single": (fine(grain=1, predict="online", mass=0.7), IMAGE, {"hides_text": True}),
    "gated/alone": (made("GatedBlocks", block=16, topk=3), BARE, {}),
    "gated/gate": (made("GatedBlocks", block=16, topk=3), BARE, {"extra": "gate", "batch": 2}),
    "gated/gate odd": (made("GatedBlocks", block=8, topk=2), Geometry((9, 7)), {"extra": "gate"}),
    "linear/alone": (made("SparseLinear", block=16, topk=3), BARE, {"heads": 4}),
    "linear/projection": (made("SparseLinear", block=16, topk=3), BARE, {"extra": "projection"}),
    "strided/default": (made("StridedKeys"), IMAGE, {}),
    "strided/three": (made("StridedKeys", stride=3), TWO, {"hides_text": True, "heads": 4}),
    "strided/video": (made("StridedKeys"), VIDEO, {}),
}
for _name, (_make, _geometry, _call) in _CHOOSE.items():
    _chosen = EVERYWHERE if _name.endswith(("small", "online", "gate", "projection")) else NOT_INTERPRETED
    layer_case(_name, _make, _geometry, **{"devices": _chosen} | _call)


# -- steps -------------------------------------------------------------------------------------------------------------


def remembered(ground: Ground, layers: int = 1, **fields: Any) -> Results:
    """A layer at six steps, two calls each; lists are made anew at the first and the fourth."""
    fields = {"query_block": 16, "grain": 2, "threshold": "1/N", "refresh": (0.0, 0.5)} | fields
    reader = names.layer_of(names.method("FineGrained", **fields), IMAGE, 0, 2, ground.device)
    names.set_num_layers(reader, layers)
    results: Results = {}
    for step in range(6):
        for branch in ("cond", "uncond"):
            query, key, value = ground.qkv(IMAGE.num_tokens, seed=64 + step + 100 * (branch == "cond"))
            names.set_step(reader, step, 6, branch)
            found = reader.attend(query, key, value, key_bias=text_bias(ground, IMAGE), impl=ground.impl)
            results |= {f"out {step} {branch}": found.out, f"lse {step} {branch}": found.lse}
    results["read"] = tuple(names.read_share(reader))
    reader.forget()
    names.set_step(reader, 4, 6)
    results["forgotten"] = reader.attend(*ground.qkv(IMAGE.num_tokens, seed=65), impl=ground.impl).out
    return results


_STEPS: dict[str, dict[str, Any]] = {
    "lists": {},
    "shared branches": {"share_branches": True},
    "bits": {"memory": 5e-6, "layers": 1},
    "host": {"memory": 0.0, "layers": 2},
    "everything": {"threshold": 0},
    "number": {"threshold": 0.03, "grain": 1, "order": "morton"},
}
for _name, _fields in _STEPS.items():
    _chosen = EVERYWHERE if _name == "lists" else NOT_INTERPRETED
    case(f"steps/{_name}", partial(remembered, **_fields), devices=_chosen, every_impl=True)


# -- merging -----------------------------------------------------------------------------------------------------------


def merged(ground: Ground, name: str, geometry: Geometry, **fields: Any) -> Results:
    """Which tokens become one, and both ways."""
    method = names.method(name, **fields)
    features = ground.normal(2, geometry.num_image_tokens, 12, seed=66)
    mapped = method.merging(features, geometry, impl=ground.impl)
    regions = method.regions(geometry)
    short = mapped.enter(features)
    return {
        "order": names.order_of(method, geometry),
        "regions": (regions.lengths, regions.counts),
        "destinations": mapped.destinations,
        "short": short,
        "long": mapped.leave(short),
        "updated": mapped.update(features, short, short * 3),
        "key bias": mapped.key_bias,
        "groups": tuple(
            method.block_group(kind, block) for kind in ("joint", "single") for block in range(12)
        ),
        "phases": tuple(method.refresh_phase(step) for step in range(20)),
    }


_MERGES: dict[str, tuple[str, Geometry, dict[str, Any]]] = {
    "runs": ("Merge", IMAGE, {}),
    "runs of 16": ("Merge", TWO, {"region_size": 16, "ratio": 0.3}),
    "windows": ("Merge", TWO, {"region": "window", "region_size": 16}),
    "windows video": ("Merge", VIDEO, {"region": "window", "region_size": 9, "size_bias": True}),
    "global": ("Merge", TWO, {"region": "global", "ratio": 0.6}),
    "hard": ("Merge", IMAGE, {"sharpness": INF, "refresh": (4, 2), "groups": 3, "skip_blocks": (1, 2)}),
    "nothing": ("Merge", IMAGE, {"ratio": 0}),
    "bipartite": ("BipartiteMerge", TWO, {}),
    "bipartite 3": ("BipartiteMerge", IMAGE, {"stride": 3, "ratio": 0.7, "seed": 4}),
}
for _name, (_method, _geometry, _fields) in _MERGES.items():
    case(f"merge/{_name}", partial(merged, name=_method, geometry=_geometry, **_fields))


def composed(
    ground: Ground, attention: Callable[[], Any] | None, geometry: Geometry, **fields: Any
) -> Results:
    """What is left of the tokens, and attention among it."""
    method = names.merged(names.method("Merge", **fields), attention and attention())
    features = ground.normal(1, geometry.num_image_tokens, 12, seed=67)
    mapped = method.merging(features, geometry, impl=ground.impl)
    short = method.shortened(geometry)
    reader = names.layer_of(method, short, 1, 2, ground.device)
    leaves = dict(zip(("query", "key", "value"), ground.qkv(short.num_tokens, seed=68), strict=True))
    results = differentiated(partial(reader.attend, impl=ground.impl), leaves, ground)
    results |= {"short": mapped.enter(features), "order": names.order_of(method, geometry)}
    return results | {"pieces": method.pieces(geometry), "grid": (short.grid, short.num_tokens)}


_COMPOSED: dict[str, tuple[Callable[[], Any] | None, Geometry, dict[str, Any], Any]] = {
    "alone": (None, IMAGE, {}, never),
    "hilbert": (hilbert(tile_size=16, far=4), IMAGE, {}, plain),
    "hilbert references": (hilbert(tile_size=16, far=4), TWO, {"region_size": 16}, plain),
    "tiles": (tile(tiles=3, far=None, shared="centre", shared_tokens=12), IMAGE, {"size_bias": True}, never),
    "loglinear": (log_linear(), BARE, {"ratio": 0.3}, plain),
    "blocks": (top(), IMAGE, {"region": "global"}, never),
    "strided": (made("StridedKeys"), IMAGE, {}, never),
}
for _name, (_attention, _geometry, _fields, _apart) in _COMPOSED.items():
    case(
        f"composed/{_name}",
        partial(composed, attention=_attention, geometry=_geometry, **_fields),
        apart=_apart,
        devices=NOT_INTERPRETED,
    )


# -- layers of a model of one's own ------------------------------------------------------------------------------------


def own_layer(ground: Ground, make: Callable[[], Any], geometry: Geometry) -> Results:
    module = fill(names.self_attention(make(), 32, 2), ground)
    x = ground.normal(2, geometry.num_tokens, 32, seed=69).requires_grad_()
    with torch.no_grad():
        before = module(x, geometry)
    return {"plain out": before} | parameter_gradients(module, module(x, geometry), ground, {"x": x})


def own_tensors(ground: Ground) -> Results:
    """With a mask of the text's keys."""
    query, key, value = ground.qkv(IMAGE.num_tokens, batch=2, seed=70)
    mask = torch.ones(2, IMAGE.num_tokens, dtype=torch.bool, device=ground.device)
    mask[1, 5:7] = False
    call = {"key_mask": mask, "impl": ground.impl}
    method = names.method("Hilbert", tile_size=24, far=4)
    found = names.hilbert_attention(query, key, value, IMAGE, 1, method=method, **call)
    method = names.method("LogLinear", block=4, topk=2)
    other = names.log_linear_attention(query, key, value, IMAGE, method=method, **call)
    return {"hilbert": found, "loglinear": other}


for _name, _make, _apart in (
    ("hilbert", hilbert(tile_size=24, far=4), plain),
    ("tiles", tile(tiles=4, far=None), never),
    ("loglinear", log_linear(), plain),
    ("gated", made("GatedBlocks", block=16, topk=3), never),
    ("linear", made("SparseLinear", block=16, topk=3), never),
):
    case(
        f"layers/{_name}",
        partial(own_layer, make=_make, geometry=BARE),
        apart=_apart,
        devices=NOT_INTERPRETED,
    )
case("layers/functions", own_tensors, every_impl=True)
