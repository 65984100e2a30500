"""What a preset's plan looks like and what would run it."""

from typing import Any

import torch

from nearfield.cli import layouts
from nearfield.cli.doctor import choice_lines, choice_record
from nearfield.cli.presets import Preset
from nearfield.layout import curves
from nearfield.plan import Plan


def examine(
    preset: Preset, tiles: int, layer: int, q_block: int, k_block: int
) -> tuple[dict[str, Any], Plan]:
    """Everything to say, as plain values, and the plan it is about."""
    on_cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_cuda else ("cpu", torch.float32)
    plan = layouts.tiles(preset, tiles, layer=layer, q_block=q_block, k_block=k_block, device=device)
    run = layouts.run_length(preset, tiles)
    query = key = _stand_in(preset.shape, dtype, device)
    pairs = plan.num_pairs * preset.batch * preset.heads
    report = {
        "preset": preset.name,
        "shape": dict(zip("BHND", preset.shape, strict=True)),
        "grid": list(preset.grid),
        "text": preset.text,
        "curve": _curve_record(preset.grid),
        "tiles": -(-preset.image // run),
        "tokens_per_tile": run,
        "layer": layer,
        "shift": layouts.layer_shift(run, layer),
        "q_block": q_block,
        "k_block": k_block,
        "density": plan.density,
        "pairs": pairs,
        "dense_pairs": preset.batch * preset.heads * preset.tokens**2,
        "bound_over_dense": 1 / plan.density,
        "exact_bound_over_dense": _exact_bound(preset, run),
        "list_bytes": sum(x.numel() * x.element_size() for x in (plan.offsets, plan.blocks)),
        "tensor_bytes": 3 * query.numel() * query.element_size(),
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "forward": choice_record(query, key, plan, backward=False),
        "backward": choice_record(query, key, plan, backward=True),
    }
    return report, plan


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of that shape without its memory: only shape, strides, dtype and device are looked at.

    Its rows overlap, 16 bytes or more apart: with strides of 0 the kernels would refuse it, as they do not refuse the
    real one.
    """
    step = 8
    memory = torch.empty(step * sum(size - 1 for size in shape[:-1]) + shape[-1], dtype=dtype, device=device)
    return memory.as_strided(shape, (step,) * (len(shape) - 1) + (1,))


def _exact_bound(preset: Preset, run: int) -> float:
    """The bound of the pattern itself, token by token, before blocks are rounded up."""
    whole, last = divmod(preset.image, run)
    pairs = preset.text * preset.tokens + preset.image * preset.text + whole * run**2 + last**2
    return preset.tokens**2 / pairs


def _curve_record(grid: tuple[int, ...]) -> dict[str, Any]:
    choice = curves.choose(grid)
    return {**choice._asdict(), "text": str(choice)}


def text(report: dict[str, Any], plan: Plan) -> str:
    """The report for people, with a preview of the plan."""
    shape, grid = report["shape"], "x".join(map(str, report["grid"]))
    sizes = f"batch {shape['B']}, {shape['H']} heads, {shape['N']:,} tokens, head dimension {shape['D']}"
    slides = f"layer {report['layer']} slides them by {report['shift']:,}"
    exact = f"{report['exact_bound_over_dense']:.2f}x before rounding to blocks"
    tensors = f"{_size(report['tensor_bytes'])} of query, key and value ({report['dtype']})"
    lines = {
        "call": f"{report['preset']}: {sizes} (grid {grid}, {report['text']} text)",
        "curve": report["curve"]["text"],
        "tiles": f"{report['tiles']} of {report['tokens_per_tile']:,} tokens; {slides}",
        "plan": f"blocks of {report['q_block']} queries x {report['k_block']} keys; darker is more:",
        "preview": "\n".join(f"{'':<10}{line}" for line in plan.preview().splitlines()),
        "density": f"{report['density']:.4f}",
        "pairs": f"{report['pairs']:,} of {report['dense_pairs']:,}",
        "bound": f"{report['bound_over_dense']:.2f}x over dense ({exact})",
        "bytes": f"{_size(report['list_bytes'])} of lists, {tensors}",
    }
    named = [value if name == "preview" else f"{name:<10}{value}" for name, value in lines.items()]
    return "\n".join([*named, "", f"On {report['device']} ({report['dtype']}):", *choice_lines(report)])


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
