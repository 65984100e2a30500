"""The words of `Handle.summary`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from nearfield.adapters.region import Ready, Region, plans_of
from nearfield.adapters.specs import Located, Move
from nearfield.adapters.steps import Steps
from nearfield.attend import explain_choice
from nearfield.methods import Method

_NAMED = 4


def summary(
    models: Sequence[nn.Module],
    regions: Sequence[Region],
    places: Sequence[Located | None],
    method: Method,
    steps: Steps,
    origin: str,
) -> str:
    """All of it. `places` are the tokens to tell about, region by region, and `origin` says where they come from."""
    if not models:
        return "nearfield: removed; nothing is changed"
    lines = [f"nearfield: {_method_words(method)}"]
    for model in models:
        mine = [
            (region, place) for region, place in zip(regions, places, strict=True) if region.root is model
        ]
        lines += [type(model).__name__, *(f"  {line}" for line in _model_lines(mine, method, steps, origin))]
    return "\n".join(lines)


def _model_lines(
    parts: Sequence[tuple[Region, Located | None]], method: Method, steps: Steps, origin: str
) -> list[str]:
    regions = [region for region, _ in parts]
    lines = [
        _changed_words(regions),
        *_layer_lines(regions),
        _step_words(method, steps),
        *_dense_call_lines(regions),
    ]
    known = [(region, place) for region, place in parts if place is not None]
    if not known:
        return [*lines, "geometry: not known before the first call; ask with summary(height=..., width=...)"]
    return lines + _geometry_lines(known, method, steps, origin)


def _method_words(method: Method) -> str:
    """The method with the fields that were set."""
    value: Any = method
    if not is_dataclass(value):
        return str(value)
    values = [(field.name, getattr(value, field.name), field.default) for field in fields(value)]
    given = ", ".join(f"{name}={setting!r}" for name, setting, default in values if setting != default)
    return f"{type(method).__name__}({given})"


def _changed_words(regions: Sequence[Region]) -> str:
    sparse = sum(layer.is_sparse for region in regions for layer in region.layers)
    places: dict[str, list[str]] = {"enter": [], "leave": []}
    for move in regions[0].spec.moves:
        places[move.way].append(_place_words(move))
    number = f" of each of {len(regions)} {regions[0].spec.region}" if regions[0].spec.region else ""
    enter, leave = (", ".join(names) for names in places.values())
    return f"changed: {sparse} attention processors; tokens enter at {enter} and leave at {leave}{number}"


def _place_words(move: Move) -> str:
    if isinstance(move.what, str):
        return f"{move.place}({move.what})" if move.place else move.what
    return move.place if move.what is None else f"{move.place}[{move.what}]"


def _layer_lines(regions: Sequence[Region]) -> list[str]:
    layers = [layer for region in regions for layer in region.layers]
    sparse = sum(layer.is_sparse for layer in layers)
    lines = [f"attention: {sparse} sparse, {len(layers) - sparse} dense"]
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.dense is not None:
            reasons.setdefault(layer.dense, []).append(layer.name)
    for reason, names in reasons.items():
        shown = ", ".join(names[:_NAMED]) + (
            f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        )
        lines.append(f"  dense, {reason}: {shown}")
    return lines


def _step_words(method: Method, steps: Steps) -> str:
    scheduler = steps.scheduler
    if not method.num_dense_steps(1000):
        return "steps: all sparse"
    if scheduler is None:
        return "steps: all sparse; without a scheduler no step is known to be a first one (pass `scheduler=`)"
    total = steps.total()
    if total is None:
        return f"steps: the first dense; how many there are is not known yet ({type(scheduler).__name__})"
    return f"steps: the first {method.num_dense_steps(total)} of {total} dense ({type(scheduler).__name__})"


def _dense_call_lines(regions: Sequence[Region]) -> list[str]:
    calls = sum((region.dense_calls for region in regions), Counter[str]())
    return [f"dense calls: {count}, {reason}" for reason, count in calls.items()]


def _geometry_lines(
    known: Sequence[tuple[Region, Located]], method: Method, steps: Steps, origin: str
) -> list[str]:
    lines, read, everything, whole = [], 0, 0, 0
    shown: set[Located] = set()
    choice = ""
    for region, located in known:
        device = torch.device("cpu") if region.device.type == "meta" else region.device
        ready = region.make_ready(located, device)
        geometry = located.geometry(region.spec.text_first, sees_text=True)
        if located not in shown:
            words = method.describe(geometry, device=device)
            lines += f"{origin}: {words}".splitlines()
            shown.add(located)
        sparse_read, sparse_all, layers_all = _pairs(region, ready)
        read, everything, whole = read + sparse_read, everything + sparse_all, whole + layers_all
        choice = choice or _choice_words(region, ready)
    return [*lines, *_speed_lines(read, everything, whole, method, steps), *filter(None, [choice])]


def _pairs(region: Region, ready: Ready) -> tuple[int, int, int]:
    """Pairs read in sparse layers, pairs there are in them, pairs in all self-attention layers; times heads."""
    read = everything = whole = 0
    for layer, reader in zip(region.layers, ready.readers, strict=True):
        if layer.index is None:
            continue
        geometry = ready.located.geometry(region.spec.text_first, layer.sees_text)
        pairs = geometry.num_tokens**2 * layer.attention.heads
        whole += pairs
        if reader is not None:
            read += reader.num_pairs * layer.attention.heads
            everything += pairs
    return read, everything, whole


def _speed_lines(read: int, everything: int, whole: int, method: Method, steps: Steps) -> list[str]:
    if not everything:
        return ["pairs: every layer is dense"]
    share = read / everything
    in_model = (whole - everything + read) / whole
    lines = [
        f"pairs: {share:.1%} in sparse layers; attention at most {1 / share:.2f}x faster there,"
        f" {1 / in_model:.2f}x with the dense layers"
    ]
    total = steps.total() if method.num_dense_steps(1000) else None
    if total is not None:
        dense = method.num_dense_steps(total) / total
        lines.append(f"  with dense steps {1 / (dense + (1 - dense) * in_model):.2f}x over all {total} steps")
    return lines


def _choice_words(region: Region, ready: Ready) -> str:
    for layer, reader in zip(region.layers, ready.readers, strict=True):
        for plan in plans_of(reader):
            heads = layer.attention.heads
            head_dim = layer.attention.inner_dim // heads
            dtype = region.dtype or next(layer.attention.parameters()).dtype
            query = torch.empty(1, plan.num_queries, heads, head_dim, dtype=dtype, device=ready.device)
            query = query.transpose(1, 2)
            choice = explain_choice(query, query, plan, impl=region.impl)
            return f"attend: {choice.impl}, {choice.reason}"
    return ""
