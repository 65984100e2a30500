"""FineGrained where what may be skipped is unknown: a method that skips a given share, and one that reads given lists.

Of random weights nobody knows what may be skipped. So the share is fixed, and the threshold, or the mass, is sought for
it, in every layer, from that layer's own queries and keys. All that is done with it is what the method always does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nearfield import FineGrained, Geometry
from nearfield._types import Attended, Impl
from nearfield.methods.finegrained import FineLayer
from nearfield.ops import Mask, attend, predict
from nearfield.ops import _triton as kernels
from nearfield.ops.predict.reference import columns
from nearfield.plan import Plan

_SAMPLED_ROWS = 16
_HALVINGS = 16
_MISFIT = 0.02
"""By how much of all keys the share that is skipped may differ from the one that was asked for."""


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

    @classmethod
    def of(cls, method: FineGrained, skipped: float, **changed: Any) -> "Fitted":
        """The method with other fields, some of them changed."""
        own = {each.name: getattr(method, each.name) for each in fields(FineGrained)}
        return cls(**own | changed, skipped=skipped)

    def layer(
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
        return fmean(reader.stats.kept for reader in self.readers.values())

    @property
    def misfit(self) -> str:
        """What is wrong with that share, if anything is."""
        if abs(1 - self.kept - self.skipped) <= _MISFIT:
            return ""
        return f"{1 - self.kept:.1%} of the keys were skipped, not {self.skipped:.0%}"

    def lists(self) -> dict[int, Plan]:
        """What layers remember."""
        return {
            layer: _plan(known.lists)
            for layer, reader in self.readers.items()
            for known in reader.known.values()
        }


def _plan(lists: Plan | Mask) -> Plan:
    assert isinstance(lists, Plan)  # there is no bound on memory
    return lists


class FittedReader(FineLayer):
    """At the first call of its layer it seeks what skips the share."""

    def __init__(self, method: Fitted, geometry: Geometry, layer: int) -> None:
        super().__init__(method, geometry)
        self.fitted, self.layer = method, layer
        self.plan: Plan | None = None
        """What was predicted last."""

    def _remember(
        self,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        key_bias: Tensor | None,
        scale: float | None,
        impl: Impl,
    ) -> None:
        found = self.fitted.found
        if self.layer not in found:
            found[self.layer] = self._threshold(query, key, lse, scale, impl)
        self.method = replace(self.fitted, threshold=found[self.layer])
        super()._remember(query, key, lse, key_bias, scale, impl)

    def _predicted(
        self, query: Tensor, key: Tensor, key_bias: Tensor | None, scale: float | None, impl: Impl
    ) -> Plan:
        found = self.fitted.found
        if self.layer not in found:
            found[self.layer] = self._mass(query, key, scale, impl)
        self.method = replace(self.fitted, top_p=found[self.layer])
        self.plan = super()._predicted(query, key, key_bias, scale, impl)
        return self.plan

    def _threshold(self, query: Tensor, key: Tensor, lse: Tensor, scale: float | None, impl: Impl) -> float:
        """The weight that the share falls below, in some blocks of queries of every head.

        Weights are computed as the method will: where they hardly differ, rounding would decide.
        """
        rows = torch.arange(query.shape[2], device=query.device).split(self.blocks.q_block)
        places = torch.linspace(0, len(rows) - 1, min(_SAMPLED_ROWS, len(rows))).round().int().tolist()
        some = torch.cat([rows[place] for place in places])  # the last, which may be shorter, at the end
        grain = self.blocks.k_block
        module = (
            kernels.kernels("predict.triton.columns", impl if query.is_cuda else "grouped", query, grain)
            or columns
        )
        scale = query.shape[3] ** -0.5 if scale is None else scale
        maxima, _ = module.column_statistics(
            query[:, :, some], key, lse[:, :, some], self.blocks.q_block, grain, float(scale)
        )
        ranked = maxima.flatten().sort().values
        return float(ranked[int(self.fitted.skipped * (len(ranked) - 1))])

    def _mass(self, query: Tensor, key: Tensor, scale: float | None, impl: Impl) -> float:
        """The mass that keeps the rest, by halving."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            kept = predict.by_means(query, key, self.blocks, mass=middle, scale=scale, impl=impl).kept
            low, high = (low, middle) if float(kept) > 1 - self.fitted.skipped else (middle, high)
        return high


@dataclass(frozen=True)
class Given(FineGrained):
    """Reads lists that were made before, by layer: rounding cannot change them."""

    lists: Mapping[int, Plan] = field(default_factory=dict, compare=False, repr=False)
    predict: Any = "online"

    @classmethod
    def of(cls, method: FineGrained, lists: Mapping[int, Plan]) -> "Given":
        """With the method's other fields."""
        own = {each.name: getattr(method, each.name) for each in fields(FineGrained)}
        return cls(**own | {"predict": "online"}, lists=lists)

    def layer(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Any:
        return _GivenReader(self, geometry, self.lists[layer])


class _GivenReader(FineLayer):
    def __init__(self, method: Given, geometry: Geometry, plan: Plan) -> None:
        super().__init__(method, geometry)
        self.plan = plan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Attended:
        return attend(query, key, value, self.plan, **options)
