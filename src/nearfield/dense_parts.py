"""Layers and denoising steps that a method leaves dense: two fields that all methods have.

`dense_layers` is how many of the first layers, or the indices of those that do (negative ones count from the end);
`dense_steps` how many of the first denoising steps, or, below 1, which share of them.
"""

import math
from collections.abc import Sequence

from nearfield._checks import check_int, wrong_type, wrong_value

Layers = int | tuple[int, ...]


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


def check_steps(steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int | float):
        wrong_type("dense_steps", "be a number of steps, or a share of them below 1", repr(steps))
    if not 0 <= steps < float("inf") or (steps >= 1 and steps != int(steps)):
        wrong_value("dense_steps", "be a share from 0 to 1 or a whole number of steps", steps)


class DenseParts:
    """What a method says of these two fields; a frozen dataclass that has them takes it as a base."""

    dense_layers: Layers
    dense_steps: int | float

    def check_dense_parts(self) -> None:
        object.__setattr__(self, "dense_layers", checked_layers(self.dense_layers))
        check_steps(self.dense_steps)

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        return layer_reason(self.dense_layers, layer, num_layers)

    def num_dense_steps(self, num_steps: int) -> int:
        """How many of `num_steps` denoising steps stay dense."""
        return steps_of(self.dense_steps, num_steps)


def layer_reason(layers: Layers, layer: int, num_layers: int) -> str | None:
    """Why a layer stays dense, or None."""
    named = range(layers) if isinstance(layers, int) else layers
    return f"dense_layers={layers}" if layer in named or layer - num_layers in named else None


def steps_of(steps: int | float, total: int) -> int:
    """How many of `total` denoising steps stay dense."""
    if isinstance(steps, float) and steps < 1:
        return math.ceil(round(steps * total, 6))  # 0.07 * 100 is a little above 7
    return min(int(steps), total)
