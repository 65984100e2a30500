"""What `bench model` needs where single keys are skipped: a method that skips a given share, and given lists.

Of random weights nobody knows what may be skipped. So the share is fixed, and the threshold, or the mass, is sought for
it, in every layer, from that layer's own queries and keys. All that is done with it is what the method always does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield import FineGrained, Geometry, predict
from nearfield._types import Attended, Impl
from nearfield.attend import attend
from nearfield.methods.fine import FineReader
from nearfield.plan import Plan
from nearfield.predict import Mask

_SAMPLED_ROWS = 16
_HALVINGS = 10


@dataclass(frozen=True)
class Fitted(FineGrained):
    """FineGrained that skips a given share of the keys.

    Args:
        skipped: that share.
        found: by layer, the threshold or the mass that skips it.
        readers: by layer, those that were made last.
    """

    skipped: float = 0.7
    found: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    readers: dict[int, "FittedReader"] = field(default_factory=dict, compare=False, repr=False)

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "FittedReader":
        self.readers[layer] = FittedReader(self, geometry, layer)
        return self.readers[layer]

    @property
    def kept(self) -> float:
        """The share of the keys that was read since the readers were made, full calls not counted."""
        return fmean(reader.tally.kept for reader in self.readers.values())

    def lists(self) -> dict[int, Plan]:
        """What layers remember."""
        return {
            layer: _plan(known.lists)
            for layer, reader in self.readers.items()
            for known in reader.memory.values()
        }


def _plan(lists: Plan | Mask) -> Plan:
    assert isinstance(lists, Plan)  # there is no bound on memory
    return lists


class FittedReader(FineReader):
    """At the first call of its layer it seeks what skips the share."""

    def __init__(self, method: Fitted, geometry: Geometry, layer: int) -> None:
        super().__init__(method, geometry)
        self.fitted, self.layer = method, layer

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Attended:
        if self.method is self.fitted:
            self.method = self._method_for(query, key, options.get("scale"), options.get("impl", "auto"))
        return super().attend(query, key, value, **options)

    def _method_for(self, query: Tensor, key: Tensor, scale: float | None, impl: Impl) -> Fitted:
        """The method with what was found for the layer, which is sought if it was not yet."""
        found, is_online = self.fitted.found, self.fitted.predict == "online"
        if self.layer not in found:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            found[self.layer] = (
                self._mass(query, key, scale, impl) if is_online else self._threshold(query, key, scale)
            )
        at = found[self.layer]
        return replace(self.fitted, mass=at) if is_online else replace(self.fitted, threshold=at)

    def _threshold(self, query: Tensor, key: Tensor, scale: float) -> float:
        """The weight that the share falls below, in some blocks of queries of every head."""
        rows = -(-query.shape[2] // self.blocks.q_block)
        picked = torch.linspace(0, rows - 1, min(_SAMPLED_ROWS, rows)).round().int().tolist()
        keys = key.float().mT
        ranked = torch.cat([_largest_weights(query, keys, self.blocks, row, scale) for row in picked])
        return float(ranked.sort().values[int(self.fitted.skipped * (len(ranked) - 1))])

    def _mass(self, query: Tensor, key: Tensor, scale: float, impl: Impl) -> float:
        """The mass that keeps the rest, by halving."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            kept = predict.by_means(query, key, self.blocks, mass=middle, scale=scale, impl=impl).kept
            low, high = (low, middle) if float(kept) > 1 - self.fitted.skipped else (middle, high)
        return high


def _largest_weights(query: Tensor, keys: Tensor, blocks: predict.Blocks, row: int, scale: float) -> Tensor:
    """Of one block of queries, the largest weight in each block of keys, of all heads in one row."""
    some = query[:, :, row * blocks.q_block : (row + 1) * blocks.q_block].float()
    largest = (scale * (some @ keys)).softmax(-1).amax(-2)
    cells: Tensor = pad(largest, (0, -largest.shape[-1] % blocks.k_block)).unflatten(-1, (-1, blocks.k_block))
    return cells.amax(-1).flatten()


@dataclass(frozen=True)
class Given(FineGrained):
    """Reads lists that were made before, by layer: rounding cannot change them."""

    lists: Mapping[int, Plan] = field(default_factory=dict, compare=False, repr=False)
    predict: Any = "online"

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Any:
        return _GivenReader(self, geometry, self.lists[layer])


class _GivenReader(FineReader):
    def __init__(self, method: Given, geometry: Geometry, plan: Plan) -> None:
        super().__init__(method, geometry)
        self.plan = plan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Attended:
        return attend(query, key, value, self.plan, **options)
