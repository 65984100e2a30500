"""Layers and denoising steps that a method leaves dense: two fields that all methods have.

`dense_layers` is how many of the first layers, or the indices of those that do (negative ones count from the end);
`dense_steps` how many of the first denoising steps, or, below 1, which share of them; two numbers are of the first and
of the last steps.
"""

import math
from collections.abc import Sequence

from nearfield._checks import check_int, wrong_type, wrong_value

Layers = int | tuple[int, ...]
DenseSteps = int | float | tuple[int | float, int | float]


def checked_layers(layers: object) -> Layers:
    if isinstance(layers, bool) or not isinstance(layers, int | Sequence):
        wrong_type("dense_layers", "be a number of layers or their indices", repr(layers))
    if isinstance(layers, int):
        check_int("dense_layers", layers, at_least=0)
        return layers
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            wrong_type("dense_layers", "hold integers", repr(layer))
    return tuple(layers)


def checked_steps(steps: object) -> DenseSteps:
    if isinstance(steps, Sequence) and not isinstance(steps, str):
        if len(steps) != 2:
            wrong_value("dense_steps", "be one number, or two, of the first and of the last steps", steps)
        return _checked_end(steps[0]), _checked_end(steps[1])
    return _checked_end(steps)


def _checked_end(steps: object) -> int | float:
    if isinstance(steps, bool) or not isinstance(steps, int | float):
        wrong_type("dense_steps", "be a number of steps, or a share of them below 1", repr(steps))
    if not 0 <= steps < float("inf") or (steps >= 1 and steps != int(steps)):
        wrong_value("dense_steps", "be a share from 0 to 1 or a whole number of steps", steps)
    return steps


def layer_reason(layers: Layers, layer: int, num_layers: int) -> str | None:
    """Why a layer stays dense, or None."""
    named = range(layers) if isinstance(layers, int) else layers
    return f"dense_layers={layers}" if layer in named or layer - num_layers in named else None


def ends_of(steps: DenseSteps, total: int) -> tuple[int, int]:
    """How many of the first and of the last of `total` denoising steps stay dense."""
    first, last = steps if isinstance(steps, tuple) else (steps, 0)
    num_first = _number_of(first, total)
    return num_first, min(_number_of(last, total), total - num_first)


def stays_dense(ends: tuple[int, int], step: int, total: int) -> bool:
    """Whether a step is among the first or the last ones."""
    return step < ends[0] or step >= total - ends[1]


def _number_of(steps: int | float, total: int) -> int:
    if isinstance(steps, float) and steps < 1:
        return math.ceil(round(steps * total, 6))  # 0.07 * 100 is a little above 7
    return min(int(steps), total)
