"""What a method comes to in one attention call of a model, in its layers and steps, and what would run it."""

from collections.abc import Sequence
from typing import Any

import torch

from nearfield import Geometry
from nearfield.cli.doctor import choice_lines, choice_record
from nearfield.cli.presets import PRESETS, Preset
from nearfield.methods import Composition, LayerAttention, Method, fields, method_classes
from nearfield.plan import Plan

STEPS = 20
"""Denoising steps that the words on steps are of."""
_FIRST_LAYERS = range(4)
_MOST_SEEN = 2**27
"""Blocks of a plan of which a preview is made: it counts every one."""


class Explained:
    """A method in the calls of a preset, on a device.

    Args:
        layers: which layers to explain; by default the first four, or one where these read alike.
    """

    def __init__(
        self, preset: Preset, method: Method, layers: Sequence[int] | None, device: torch.device
    ) -> None:
        self.preset, self.method, self.device = preset, Composition.of(method), device
        self.method.check_layers(preset.layers)
        self.geometry = Geometry(preset.grid, text=preset.text)
        self.left = self.method.shortened(self.geometry)
        self._made: dict[int, LayerAttention] = {}
        first = [layer for layer in _FIRST_LAYERS if layer < preset.layers]
        self.layers = list(layers or (first if len({self._key(layer) for layer in first}) > 1 else first[:1]))

    def layer(self, index: int) -> LayerAttention:
        """What a layer reads, made once."""
        if index not in self._made:
            self._made[index] = self.method.layer(
                self.left, index, heads=self.preset.heads, device=self.device
            )
        return self._made[index]

    def _key(self, index: int) -> tuple[Any, ...]:
        """Equal for layers that read alike."""
        return tuple(id(plan) for plan in self.layer(index).plans)

    # -- pairs -------------------------------------------------------------------------------------------------------

    @property
    def all_pairs(self) -> int:
        """Of a dense call, per batch element and head."""
        return self.preset.tokens**2

    def density(self, index: int) -> float | None:
        """The share of pairs that a sparse layer reads; None where that is known after calls only."""
        pairs = self.layer(index).num_pairs
        return None if pairs is None else pairs / self.all_pairs

    def dense_reasons(self) -> dict[int, str]:
        """The layers that everyone reads everyone in, and why. Where tokens are merged, merged ones."""
        if self.method.attention is None:
            return {}
        found = {
            index: self.method.dense_layer_reason(index, self.preset.layers)
            for index in range(self.preset.layers)
        }
        return {index: reason for index, reason in found.items() if reason is not None}

    def density_over_layers(self) -> float | None:
        """The mean over all layers in a sparse step, dense ones included."""
        reasons, whole = self.dense_reasons(), self.left.num_tokens**2 / self.all_pairs
        found = [whole if index in reasons else self.density(index) for index in range(self.preset.layers)]
        known = [density for density in found if density is not None]
        return sum(known) / len(found) if len(known) == len(found) else None

    def density_over_steps(self) -> float | None:
        """The mean over all layers and steps."""
        sparse = self.density_over_layers()
        if sparse is None:
            return None
        share = sum(self.method.num_dense_steps(STEPS)) / STEPS
        return share * self.left.num_tokens**2 / self.all_pairs + (1 - share) * sparse


def record(shown: Explained) -> dict[str, Any]:
    """Everything to say, as plain values."""
    preset, method, first = shown.preset, shown.method, shown.layers[0]
    dtype = torch.bfloat16 if shown.device.type == "cuda" else torch.float32
    layer = shown.layer(first)
    plans = [_plan_record(plan, preset, dtype) for plan in layer.plans_like(shown.device)]
    pairs, memory = layer.num_pairs, layer.memory(preset.heads)
    calls = preset.batch * preset.heads
    whole, steps = shown.density_over_layers(), shown.density_over_steps()
    return {
        "preset": preset.name,
        "shape": dict(zip("BHND", preset.shape, strict=True)),
        "grid": list(preset.grid),
        "text": preset.text,
        "tokens_left": shown.left.num_tokens,
        "method": fields.name_of(method),
        "label": method.label,
        "fields": fields.texts_of(method),
        "description": method.describe(shown.geometry, device=shown.device),
        "layers": [_layer_record(shown, index) for index in shown.layers],
        "num_layers": preset.layers,
        "dense_layers": shown.dense_reasons(),
        "dense_steps": list(method.num_dense_steps(STEPS)),
        "num_steps": STEPS,
        "refreshes": method.refreshes(STEPS),
        "pairs": None if pairs is None else pairs * calls,
        "dense_pairs": calls * shown.all_pairs,
        **_bounds("density", shown.density(first)),
        **_bounds("density_over_layers", whole),
        **_bounds("density_over_steps", steps),
        "plans": plans,
        "list_bytes": sum(x.numel() * x.element_size() for x in layer.lists()) or None,
        "remembered_bytes": None if memory is None else memory.as_bits,
        "tensor_bytes": 3 * preset.batch * preset.heads * preset.tokens * preset.head_dim * dtype.itemsize,
        "warning": method.warning,
        "compile_reason": method.compile_reason,
        "can_split": method.can_split,
        "device": str(shown.device),
        "dtype": str(dtype).removeprefix("torch."),
        "forward": plans[0]["forward"] if plans else None,
        "backward": plans[0]["backward"] if plans else None,
    }


def _bounds(name: str, density: float | None) -> dict[str, float | None]:
    bound = name.replace("density", "bound_over_dense")
    return {name: density, bound: None if density is None else 1 / density}


def _layer_record(shown: Explained, index: int) -> dict[str, Any]:
    reason = shown.dense_reasons().get(index)
    return {"layer": index, "dense": reason, **_bounds("density", shown.density(index))}


def _plan_record(plan: Plan, preset: Preset, dtype: torch.dtype) -> dict[str, Any]:
    """What a plan is, and what would run it: for tensors of its shape."""
    query, key = (
        _stand_in((preset.batch, preset.heads, tokens, preset.head_dim), dtype, plan.device)
        for tokens in (plan.num_queries, plan.num_keys)
    )
    return {
        "q_block": plan.q_block,
        "k_block": plan.k_block,
        "num_queries": plan.num_queries,
        "num_keys": plan.num_keys,
        "forward": choice_record(query, key, plan, backward=False),
        "backward": choice_record(query, key, plan, backward=True),
    }


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A tensor of that shape without its memory: only shape, strides, dtype and device are looked at.

    Its rows overlap, 16 bytes or more apart: with strides of 0 the kernels would refuse it, as they do not refuse the
    real one.
    """
    step = 8
    memory = torch.empty(step * sum(size - 1 for size in shape[:-1]) + shape[-1], dtype=dtype, device=device)
    return memory.as_strided(shape, (step,) * (len(shape) - 1) + (1,))


# -- words -------------------------------------------------------------------------------------------------------------


def text(shown: Explained, report: dict[str, Any]) -> str:
    """The report for people, with a preview of who reads whom."""
    shape, grid = report["shape"], "x".join(map(str, report["grid"]))
    sizes = f"batch {shape['B']}, {shape['H']} heads, {shape['N']:,} tokens, head dimension {shape['D']}"
    lines = [
        _line("call", f"{report['preset']}: {sizes} (grid {grid}, {report['text']} text)"),
        _line("method", report["label"]),
        *(f"{'':<10}{line}" for line in report["description"].splitlines()),
        *_preview_lines(shown),
        *_pair_lines(report),
        _line("bytes", _bytes_words(report)),
        *([_line("note", report["warning"])] if report["warning"] else []),
        *(
            [_line("compile", f"blocks are not compiled: {report['compile_reason']}")]
            * bool(report["compile_reason"])
        ),
        "",
        f"On {report['device']} ({report['dtype']}):",
        *(_choice_lines(report) or ["  every call makes its own lists, and the choice is made there"]),
    ]
    return "\n".join(lines)


def _line(name: str, words: str) -> str:
    return f"{name:<10}{words}"


def _preview_lines(shown: Explained) -> list[str]:
    index = shown.layers[0]
    plans = shown.layer(index).plans
    if not plans:
        return [_line("plan", "who reads whom is decided by the content of every call")]
    plan = plans[0]
    blocks = f"layer {index}: blocks of {plan.q_block} queries x {plan.k_block} keys"
    if plan.num_rows * plan.num_columns > _MOST_SEEN:
        return [_line("plan", f"{blocks}; too many for a preview")]
    preview = [f"{'':<10}{line}" for line in plan.preview().splitlines()]
    return [_line("plan", f"{blocks}; darker is more:"), *preview]


def _pair_lines(report: dict[str, Any]) -> list[str]:
    """Of the layers that were asked for, of all layers, and of all steps."""
    lines = [
        _line("pairs" if not number else "", _layer_words(each, report))
        for number, each in enumerate(report["layers"])
    ]
    dense = ", ".join(map(str, report["dense_layers"])) or "none"
    whole = report["density_over_layers"]
    read = "known after calls only" if whole is None else f"{whole:.1%} of the pairs on average"
    lines.append(_line("layers", f"{report['num_layers']}: {read}; dense: {dense}"))
    first, last = report["dense_steps"]
    steps = report["density_over_steps"]
    bound = "" if steps is None else f"; at most {1 / steps:.2f}x over dense in all layers and steps"
    lines.append(_line("steps", f"of {STEPS} the first {first} and the last {last} are dense{bound}"))
    if report["refreshes"]:
        lines.append(_line("", f"the method decides again at {', '.join(map(str, report['refreshes']))}"))
    return lines


def _layer_words(layer: dict[str, Any], report: dict[str, Any]) -> str:
    name = f"layer {layer['layer']}"
    if layer["dense"] is not None:
        return f"{name}: everyone reads everyone, {layer['dense']}"
    if layer["density"] is None:
        return f"{name}: known after calls only"
    pairs = round(layer["density"] * report["dense_pairs"])
    bound = f"at most {layer['bound_over_dense']:.2f}x over dense"
    return f"{name}: {pairs:,} of {report['dense_pairs']:,} ({layer['density']:.1%}), {bound}"


def _bytes_words(report: dict[str, Any]) -> str:
    words = [f"{size(report['list_bytes'])} of lists"] if report["list_bytes"] else []
    if report["remembered_bytes"]:
        words.append(f"{size(report['remembered_bytes'])} remembered from step to step by a layer, as bits")
    return ", ".join([*words, f"{size(report['tensor_bytes'])} of query, key and value ({report['dtype']})"])


def _choice_lines(report: dict[str, Any]) -> list[str]:
    """What runs each plan, said once where all agree."""
    plans = report["plans"]
    alike = all(plan[way] == plans[0][way] for plan in plans for way in ("forward", "backward"))
    lines = list[str]()
    for plan in plans[:1] if alike else plans:
        if not alike:
            lines.append(f"  blocks of {plan['q_block']} queries x {plan['k_block']} keys:")
        lines += choice_lines(plan)
    return lines


def size(count: int) -> str:
    for unit, bytes_of in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= bytes_of:
            return f"{count / bytes_of:.1f} {unit}"
    return f"{count} bytes"


def overview() -> dict[str, Any]:
    """What can be explained: presets and methods."""
    return {
        "presets": {name: list(preset.shape) for name, preset in PRESETS.items()},
        "methods": {name: _summary(kind) for name, kind in method_classes().items()},
    }


def _summary(kind: type[Method]) -> str:
    first: str = (kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(first.split())


def overview_text(found: dict[str, Any]) -> str:
    """The same for people."""
    shapes = {
        name: f"batch {batch}, {heads} heads, {tokens:,} tokens, head dimension {dim}"
        for name, (batch, heads, tokens, dim) in found["presets"].items()
    }
    lines = ["presets, as in `nearfield explain flux-1024`:", *_columns(shapes)]
    return "\n".join(
        [*lines, "", "methods, as in `nearfield explain --method NAME`:", *_columns(found["methods"])]
    )


def _columns(words: dict[str, str]) -> list[str]:
    width = max(map(len, words))
    return [f"  {name:<{width}}  {each}" for name, each in words.items()]
