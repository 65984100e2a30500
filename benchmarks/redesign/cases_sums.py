"""Cases of the other sums: windows, pooling and choosing, prediction, merging, rotation, curves.

This folder serves the redesign alone, and goes away with its last commit.
"""

from collections.abc import Callable
from functools import partial

import names
import torch
from ground import Ground, Results, case
from names import Geometry
from torch import Tensor

NOT_INTERPRETED = ("cpu", "cuda")
EVERYWHERE = ("cpu", "interpreter", "cuda")
HALF, BRAIN = torch.float16, torch.bfloat16
INF = float("inf")


def gradients(function: Callable[..., Tensor], ground: Ground, **leaves: Tensor) -> Results:
    """A result without gradients and with them, and the gradients."""
    with torch.no_grad():
        plain = function(**leaves)
    inputs = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    out = function(**inputs)
    grad = ground.normal(*out.shape, seed=79).to(out.dtype)
    found = torch.autograd.grad(out, list(inputs.values()), grad, allow_unused=True)
    named = zip(inputs, found, strict=True)
    return {"plain out": plain, "out": out} | {f"grad {name}": x for name, x in named if x is not None}


# -- windows -----------------------------------------------------------------------------------------------------------


def windows_of(ground: Ground, window: int) -> tuple[Tensor, Tensor]:
    """Where the windows of tokens 5 to 83 begin, the last of them short, and how many tokens each holds."""
    starts = torch.arange(5, 83, window)
    sizes = (83 - starts).clamp(max=window)
    return starts.to(ground.device), sizes.int().to(ground.device)


def window_means(ground: Ground, window: int, dtype: torch.dtype, dim: int) -> Results:
    x = ground.normal(2, 2, 90, dim, seed=40, dtype=dtype)
    starts, sizes = windows_of(ground, window)
    return gradients(lambda x: names.window_means(x, starts, sizes, window, ground.impl), ground, x=x)


def weighted_windows(ground: Ground, window: int, dtype: torch.dtype, dim: int, groups: int) -> Results:
    query, key, value = ground.qkv(90, batch=2, heads=4, groups=groups, dim=dim, dtype=dtype, seed=41)
    starts, sizes = windows_of(ground, window)

    def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = names.weighted_windows(query, key, value, starts, sizes, window, impl=ground.impl)
        return torch.cat([part.flatten().float() for part in found])

    return gradients(read, ground, query=query, key=key, value=value)


def query_sums(ground: Ground, dtype: torch.dtype) -> Results:
    query = ground.normal(2, 4, 90, 16, seed=42, dtype=dtype)
    starts, sizes = windows_of(ground, 8)
    read = partial(names.query_sums, starts=starts, sizes=sizes, window=8, groups=2, impl=ground.impl)
    return gradients(lambda query: read(query), ground, query=query)


for _window, _dtype, _dim in (
    (16, torch.float32, 16),
    (5, torch.float32, 80),
    (8, HALF, 64),
    (16, BRAIN, 64),
):
    _devices = NOT_INTERPRETED if _dtype == BRAIN else EVERYWHERE
    _name = f"{_window} of {_dim} {str(_dtype).removeprefix('torch.')}"
    _sizes = {"window": _window, "dtype": _dtype, "dim": _dim}
    case(f"windows/means {_name}", partial(window_means, **_sizes), devices=_devices, every_impl=True)
    for _groups in (4, 2):
        case(
            f"windows/weighted {_name} {_groups}",
            partial(weighted_windows, **_sizes, groups=_groups),
            devices=_devices,
            every_impl=True,
        )
case("windows/query sums", partial(query_sums, dtype=torch.float32), every_impl=True)
case("windows/query sums half", partial(query_sums, dtype=HALF), every_impl=True)


# -- pooling and choosing ----------------------------------------------------------------------------------------------


def pooled(ground: Ground, tokens: int, block: int, levels: int, dtype: torch.dtype) -> Results:
    x = ground.normal(2, 2, tokens, 16, seed=43, dtype=dtype)
    return gradients(lambda x: names.pool(x, block, levels, ground.impl).data, ground, x=x)


def chosen(
    ground: Ground, tokens: int, block: int, levels: int, topk: int, keep_own: bool, turned: bool
) -> Results:
    query, key, value = ground.qkv(tokens, batch=2, seed=44)
    sizes = block, levels, topk
    options = {"keep_own": keep_own, "turned": turned, "impl": ground.impl}

    def read(key: Tensor, value: Tensor) -> Tensor:
        found = names.pool_and_select(query, key, value, *sizes, **options)
        return torch.cat([found.keys.data, found.values.data], 2)

    found = names.pool_and_select(query, key, value, *sizes, **options)
    results = gradients(read, ground, key=key, value=value)
    results |= {f"picks {level}": picks for level, picks in enumerate(found.picks)}
    queries, keys = (names.pool(x, block, levels, ground.impl) for x in (query, key))
    for level, picks in enumerate(
        names.select_blocks(queries, keys, topk, keep_own=keep_own, impl=ground.impl)
    ):
        results[f"selected {level}"] = picks
    if levels == 1:
        results["blocks"] = names.chosen_blocks(
            queries, keys, topk, -1.0 if turned else None, ground.impl
        ).blocks
    return results


for _tokens, _block, _levels in ((85, 4, 3), (130, 16, 1), (64, 8, 2)):
    for _dtype in (torch.float32, HALF):
        case(
            f"pool/{_tokens} by {_block} {str(_dtype).removeprefix('torch.')}",
            partial(pooled, tokens=_tokens, block=_block, levels=_levels, dtype=_dtype),
            every_impl=True,
        )
    for _own, _turned in ((False, False), (True, False), (False, True)):
        case(
            f"pool/choose {_tokens} by {_block}{' own' * _own}{' turned' * _turned}",
            partial(
                chosen, tokens=_tokens, block=_block, levels=_levels, topk=2, keep_own=_own, turned=_turned
            ),
            every_impl=True,
        )


# -- prediction --------------------------------------------------------------------------------------------------------


def predicted(ground: Ground, grain: int, has_bias: bool, dtype: torch.dtype = torch.float32) -> Results:
    query, key, _ = ground.qkv(77, batch=2, heads=4, groups=2, dtype=dtype, seed=45)
    blocks = names.Blocks(16, grain, 77, 77, ((0, 7),))
    bias = ground.normal(2, 1, 77, seed=46) if has_bias else None
    if bias is not None:
        bias = bias.masked_fill(ground.share(2, 1, 77, seed=47, below=0.2), -INF)
    wide = (query.float() @ key.float().repeat_interleave(2, 1).mT) / 4
    lse = (wide if bias is None else wide + bias[:, :, None]).logsumexp(-1)
    call = {"key_bias": bias, "impl": ground.impl}
    found = {
        "weights": names.by_weights(query, key, lse, blocks, 0.02, **call),
        "mass": names.by_means(query, key, blocks, mass=0.8, **call),
        "topk": names.by_means(query, key, blocks, topk=3, guard=0.2, **call),
        "everything": names.by_means(query, key, blocks, mass=1.0, **call),
    }
    results: Results = {}
    for name, prediction in found.items():
        plan = blocks.plan(prediction.keep, compact=True)
        results |= {f"{name} keep": prediction.keep, f"{name} dropped": prediction.dropped}
        results |= {
            f"{name} kept": prediction.kept,
            f"{name} offsets": plan.offsets,
            f"{name} blocks": plan.blocks,
        }
        bits = names.pack_mask(prediction.keep)
        results |= {f"{name} bits": bits, f"{name} again": names.unpack_mask(bits, prediction.keep.shape[-1])}
    return results


for _grain in (1, 4, 16, 32):
    for _bias in (False, True):
        case(
            f"predict/grain {_grain}{' bias' * _bias}",
            partial(predicted, grain=_grain, has_bias=_bias),
            every_impl=True,
            devices=EVERYWHERE if (_grain, _bias) in ((4, False), (32, True)) else NOT_INTERPRETED,
        )
case("predict/half", partial(predicted, grain=4, has_bias=False, dtype=HALF), every_impl=True)


# -- merging -----------------------------------------------------------------------------------------------------------

REGIONS = {
    "runs": ((16,) * 5, (8,) * 5),
    "uneven": ((16, 16, 11, 7, 5), (8, 8, 6, 7, 1)),
    "whole": ((70,), (20,)),
    "kept": ((8, 8), (8, 8)),
}


def merging(ground: Ground, regions: str, sharpness: float, dtype: torch.dtype = torch.float32) -> Results:
    cut = names.Regions(*REGIONS[regions])
    features = ground.normal(2, cut.num_tokens, 12, seed=48, dtype=dtype)
    call = {"sharpness": sharpness, "impl": ground.impl}
    made = names.merging_of(features, cut, **call)
    again = names.merging_of(features + 0.1, cut, destinations=made.destinations, **call)
    short = made.enter(features)
    after = short * 2 + 1
    table = ground.normal(cut.num_tokens, 6, seed=49)
    results = {
        "destinations": made.destinations,
        "sizes": made.sizes,
        "key bias": made.key_bias,
        "short": short,
        "long": made.leave(short),
        "updated": made.update(features, short, after),
        "again": again.leave(again.enter(features)),
        "heads": made.enter(features.unflatten(-1, (3, 4)).transpose(1, 2), dim=2),
        "at destinations": made.at_destinations(table),
    }

    def through(features: Tensor, x: Tensor) -> Tensor:
        mapped = names.merging_of(features, cut, destinations=made.destinations, **call)
        return mapped.leave(mapped.enter(x) ** 2)

    x = ground.normal(2, cut.num_tokens, 5, seed=50, dtype=dtype)
    return results | gradients(through, ground, features=features, x=x)


for _regions in REGIONS:
    for _sharpness in (INF, 20.0):
        case(
            f"merging/{_regions} {'soft' if _sharpness < INF else 'hard'}",
            partial(merging, regions=_regions, sharpness=_sharpness),
        )
case("merging/half", partial(merging, regions="uneven", sharpness=20.0, dtype=HALF))


# -- rotation, partial results, curves ---------------------------------------------------------------------------------


def rotated(ground: Ground, batch: int, dtype: torch.dtype) -> Results:
    x = ground.normal(2, 3, 37, 16, seed=51, dtype=dtype)
    cos, sin = (ground.normal(batch, 1, 37, 8, seed=seed).repeat_interleave(2, -1) for seed in (52, 53))
    results = {"plain": names.rotate(x, cos, sin)}
    if ground.impl != "auto" or ground.device.type == "cuda":
        results["kernel"] = names.kernels_of("rotate").rotate(x, cos, sin)
    return results


def partials(ground: Ground, dtype: torch.dtype) -> Results:
    out = ground.normal(3, 2, 2, 33, 16, seed=54, dtype=dtype)
    lse = ground.normal(3, 2, 2, 33, seed=55)
    lse = lse.masked_fill(ground.share(3, 2, 2, 33, seed=56, below=0.5), -INF)
    results = dict(zip(("plain out", "plain lse"), names.merge_partials(out, lse), strict=True))
    if ground.impl != "auto" or ground.device.type == "cuda":
        found = names.kernels_of("partials").merge_partials(out, lse)
        results |= dict(zip(("kernel out", "kernel lse"), found, strict=True))
    return results


def rerotated(ground: Ground, dtype: torch.dtype) -> Results:
    source = ground.normal(3, 2, 29, 16, seed=57, dtype=dtype)
    cos, sin = (ground.normal(29, 12, seed=seed) for seed in (58, 59))
    partner = torch.arange(12, device=ground.device).roll(6)
    results = {}
    turns = {"plain": names.rerotate_keys}
    if ground.impl != "auto" or ground.device.type == "cuda":
        turns["kernel"] = names.kernels_of("turn").turn
    for name, turn in turns.items():
        results[name] = torch.empty_like(source)
        turn(source, results[name], cos, sin, partner)
    return results


for _dtype in (torch.float32, HALF):
    _name = str(_dtype).removeprefix("torch.")
    for _batch in (1, 2):
        case(f"rotate/{_name} {_batch}", partial(rotated, batch=_batch, dtype=_dtype))
    case(f"partials/{_name}", partial(partials, dtype=_dtype))
    case(f"rerotate/{_name}", partial(rerotated, dtype=_dtype))


def curves(ground: Ground) -> Results:
    grids = ((37,), (8, 8), (12, 10), (9, 7), (1, 6), (3, 6, 8), (2, 5, 7))
    results: Results = {}
    for grid in grids:
        for name in ("hilbert", "morton", "raster"):
            results[f"{name} {grid}"] = getattr(names.curves, name)(grid)
    results["closed"] = names.curves.hilbert((12, 10), closed=True)
    geometry = Geometry((12, 10), 7, references=((4, 4),))
    results["spans"] = (geometry.text_span, geometry.image_spans, geometry.num_tokens)
    return results


case("curves", curves, devices=("cpu",))
