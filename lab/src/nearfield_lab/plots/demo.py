"""A first look: the curve, the tiles and the mask as one picture, and what they save on this machine."""

from pathlib import Path

import torch

from nearfield import curves
from nearfield.cli import layouts, machine
from nearfield.cli.check import Checked, check_forward, poisoned_memory
from nearfield.cli.presets import Preset
from nearfield.cli.report import table, too_small_note
from nearfield.cli.timing import Effort, Timing, measure
from nearfield.ops.attention.api import attend
from nearfield.ops.attention.dispatch import explain_choice
from nearfield.plan.plan import Plan
from nearfield_lab.dense import dense_attention, random_inputs
from nearfield_lab.plots.tiles import overview

LAYERS = 2


def preset_for(grid: tuple[int, ...]) -> Preset:
    """A call of modest size on that grid: text for an eighth of the image, at most 512 tokens."""
    tokens = grid[0] * grid[1]
    return Preset("demo", 1, 8, 64, grid, text=min(512, tokens // 8), kept=1.0)


def draw(path: Path, preset: Preset, tiles: int) -> None:
    """Curve, tiles of two layers and the second layer's mask."""
    run = layouts.run_length(preset, tiles)
    block = 1 if preset.tokens <= 1024 else 16
    layers = [
        (
            layouts.layer_shift(run, layer),
            layouts.tiles(preset, tiles, layer=layer, q_block=block, k_block=block),
        )
        for layer in range(LAYERS)
    ]
    height, width = preset.grid
    overview(path, curves.hilbert(preset.grid), (height, width), preset.text, run, layers)


def speed_table(preset: Preset, tiles: int) -> tuple[str, bool]:
    """Dense and nearfield side by side for two layers, and whether every answer was right."""
    device = machine.default_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q_block, k_block = (128, 64) if device.type == "cuda" else (16, 16)
    inputs = random_inputs(preset, device, dtype)
    rows: list[tuple[str, ...]] = [
        ("layer", "implementation", "dense ms", "ms", "speed-up", "bound", "error / allowed")
    ]
    passed, note = True, None
    for layer in range(LAYERS):
        plan = layouts.tiles(preset, tiles, layer=layer, q_block=q_block, k_block=k_block, device=device)
        with poisoned_memory():
            checked = check_forward(inputs, plan, *attend(*inputs, plan))
        passed &= checked.passed
        impl = explain_choice(*inputs[:2], plan).impl
        timings = _timings(inputs, plan, device) if checked.passed else None
        rows.append(_row(layer, impl, plan, checked, timings))
        if timings is not None:
            dense, ours = timings
            note = note or too_small_note(preset.tokens, dense.median / ours.median, plan.density)
    shape = f"{preset.heads} heads, {preset.tokens:,} tokens, head dimension {preset.head_dim}, {dtype}"
    lines = [f"{machine.device_name(device)}: {shape.replace('torch.', '')}", table(rows)]
    return "\n".join([*lines, note] if note else lines), passed


def _timings(inputs: tuple[torch.Tensor, ...], plan: Plan, device: torch.device) -> tuple[Timing, Timing]:
    """The best dense implementation and attend, measured in turns."""
    query, key, value = inputs
    functions = {
        name: (lambda dense=dense: dense((query, key, value)))
        for name, dense in dense_attention(device).items()
    }
    timings = measure(
        functions | {"attend": lambda: attend(query, key, value, plan)}, device, Effort.of(device, quick=True)
    )
    ours = timings.pop("attend")
    return min(timings.values(), key=lambda timing: timing.median), ours


def _row(
    layer: int, impl: str, plan: Plan, checked: Checked, timings: tuple[Timing, Timing] | None
) -> tuple[str, ...]:
    if timings is None:
        return (str(layer), impl, "-", "-", "-", "-", f"FAILED: {checked}")
    dense, ours = (timing.median for timing in timings)
    figures = f"{dense:.2f}", f"{ours:.2f}", f"{dense / ours:.2f}x", f"{1 / plan.density:.2f}x"
    return (str(layer), impl, *figures, f"{checked.error:.1e} / {checked.limit:.1e}")
