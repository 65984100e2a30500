"""The rows of the table of errors: any method with fields that say how much is read, and functions in plain torch."""

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cli import bench
from nearfield.methods import DEFAULT, Method, fields, method_class
from nearfield_lab.captured.samples import Sample

OR = "|"
"""Between the values of a field among which the share of pairs chooses."""
_TOLERANCE = 1.02


class Read(NamedTuple):
    """What a row read of a sample.

    Args:
        out: `[heads, N, D]`, in raster order; only image queries count.
        kept: the share of pairs that was read, one for each summary.
        weight: the share of dense attention's weight that was read exactly, `[heads, N]`; None where that is unknown.
    """

    out: Tensor
    kept: float
    weight: Tensor | None = None


Row = Callable[[Sample, float], Read | None]
"""Reads a sample with at most a share of the pairs; None where it cannot."""


def default_rows() -> list[str]:
    """All rules in plain torch, and the default method along the first of its ladders."""
    from nearfield_lab.captured.plain import ROWS

    return [*ROWS, *(f"{DEFAULT.name} {field}=*" for field in list(DEFAULT.ladders)[:1])]


def row_of(text: str) -> Row:
    """A row from its name.

    Args:
        text: a row in plain torch by its name; a function as `module:name`; or a method with fields as texts,
            `hilbert near=tile tiles=32|16|8`. Of values with `|` between them those count that read the most pairs
            within the share; `*` stands for the values on the method's own ladder. `blocks=128x64` asks for blocks of
            this many queries and keys, as a GPU has them, instead of the device's own.
    """
    from nearfield_lab.captured.plain import ROWS

    if text in ROWS:
        return ROWS[text]
    module, colon, name = text.partition(":")
    if colon and "=" not in module:
        found: Row = getattr(import_module(module), name)
        return found
    return MethodRow(text)


class MethodRow:
    """A registered method, by the values of its fields that read the most pairs within the share."""

    def __init__(self, text: str) -> None:
        name, *given = text.split()
        ladders, self.blocks = method_class(name).ladders, dict[str, int]()
        values: dict[str, Sequence[Any]] = {}
        for setting in given:
            field, _, text = setting.partition("=")
            if field == "blocks":
                self.blocks = dict(zip(("q_block", "k_block"), map(int, text.split("x")), strict=True))
                continue
            values[field] = ladders[field] if text == "*" and field in ladders else text.split(OR)
        self.methods = [
            fields.made(name, dict(zip(values, each, strict=True))) for each in product(*values.values())
        ]
        self._last: tuple[Sample | None, Sequence[Read]] = None, ()

    def __call__(self, sample: Sample, share: float) -> Read | None:
        if self._last[0] is not sample:
            self._last = sample, [read_by(method, sample, **self.blocks) for method in self.methods]
        fitting = [read for read in self._last[1] if read.kept <= _TOLERANCE * share]
        return max(fitting, key=lambda read: read.kept, default=None)


def read_by(method: Method, sample: Sample, **blocks: int) -> Read:
    """What a layer of a method gives. One that depends on earlier steps decides by the same activations first."""
    geometry, device = sample.geometry, sample.query.device
    order = method.ordering(geometry, device=device)
    moved = sample.in_order(order.order)
    maker: Any = method.layer
    layer = maker(geometry, 1, heads=len(sample.query), device=device, **blocks)
    inputs = [x[None] for x in (moved.query, moved.key, moved.value)]

    def call() -> Any:
        return layer.attend(*inputs, scale=sample.scale)

    with torch.no_grad():
        bench.in_a_usual_step(method, layer, call)
        out, lse = call()
    kept = bench.density_of(layer, geometry.num_tokens)
    if kept is None:
        raise NotImplementedError(f"{method.label} does not count the pairs that it reads")
    back = moved.image
    out[:, :, back], lse[:, :, back] = order.leave(out[:, :, back], 2), order.leave(lse[:, :, back], 2)
    # Summaries are in the sum of weights, too: it says what was read exactly only where there are none.
    is_exact = len(layer.plans) == 1
    return Read(out[0], kept, (lse[0] - sample.dense[1]).exp() if is_exact else None)
