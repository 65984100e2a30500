"""FineGrained where what may be skipped is unknown: a method that skips a given share, and one that reads given lists.

Of random weights nobody knows what may be skipped. So the share is fixed, and the threshold, or `top_p`, is sought for
it in every layer, from that layer's own queries and keys. All that is done with it is what the method always does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nearfield import Attended, FineGrained, Geometry, LayerAttention, Method, Ordering, Plan
from nearfield.methods import Memory, Moment, PlanLayer
from nearfield.ops import ReadStats, predict

_HALVINGS = 16
_LEAST = 1e-8
"""The smallest threshold that is tried."""
_MISFIT = 0.02
"""By how much of all keys the share that is skipped may differ from the one that was asked for."""
_STEPS = 2**30


@dataclass(frozen=True)
class Fitted(Method):
    """FineGrained that skips a given share of the keys.

    Args:
        method: with other fields; `threshold`, or `top_p` if it predicts online, is sought.
        skipped: that share.
        found: by layer, the value that skips it.
        layers: by number, those that were made last.
    """

    method: FineGrained
    skipped: float = 0.7
    found: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    layers: dict[int, "FittedLayer"] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, method: FineGrained, skipped: float, **changed: Any) -> "Fitted":
        return cls(replace(method, **changed), skipped)

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "FittedLayer":
        self.layers[index] = FittedLayer(self, geometry, index)
        return self.layers[index]

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        return self.method.ordering(geometry, device=device)

    @property
    def is_stateful(self) -> bool:
        return self.method.is_stateful

    def refreshes(self, num_steps: int) -> list[int]:
        return self.method.refreshes(num_steps)

    @property
    def kept(self) -> float:
        """The share of the keys that was read since the layers were made, full calls not counted."""
        return fmean(layer.inner.stats.kept for layer in self.layers.values())

    @property
    def misfit(self) -> str:
        """What is wrong with that share, if anything is."""
        if abs(1 - self.kept - self.skipped) <= _MISFIT:
            return ""
        return f"{1 - self.kept:.1%} of the keys were skipped, not {self.skipped:.0%}"

    def plans(self) -> dict[int, Plan]:
        """What layers remember."""
        return {
            index: known.lists
            for index, layer in self.layers.items()
            for known in layer.inner.known.values()  # lists: there is no bound on memory
        }


class FittedLayer(LayerAttention):
    """A layer that seeks, at its first call, what skips the share."""

    def __init__(self, fitted: Fitted, geometry: Geometry, index: int) -> None:
        self.fitted, self.geometry, self.index = fitted, geometry, index
        self.inner: Any = fitted.method.layer(geometry, index)
        self._moment: Moment | None = None
        self._is_found = False

    @property
    def num_pairs(self) -> None:
        """Not known before the calls; `stats` knows it after."""
        return None

    @property
    def stats(self) -> ReadStats:  # type: ignore[override]
        stats: ReadStats = self.inner.stats
        return stats

    def plans_like(self, device: torch.device) -> Any:
        return self.inner.plans_like(device)

    def set_step(self, moment: Moment) -> "FittedLayer":
        self._moment = moment
        self.inner.set_step(moment)
        return self

    def forget(self) -> None:
        self.inner.forget()

    def memory(self, heads: int) -> Memory | None:
        memory: Memory | None = self.inner.memory(heads)
        return memory

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Attended:
        if not self._is_found:
            found = self.fitted.found
            if self.index not in found:
                found[self.index] = self._sought(query, key, value, **options)
            self.inner = self._made(found[self.index])
            if self._moment is not None:
                self.inner.set_step(self._moment)
            self._is_found = True
        attended: Attended = self.inner.attend(query, key, value, **options)
        return attended

    def _made(self, sought: float) -> Any:
        method = self.fitted.method
        found = replace(method, threshold=sought) if method.is_stateful else replace(method, top_p=sought)
        return found.layer(self.geometry, self.index)

    def _sought(self, *inputs: Tensor, **options: Any) -> float:
        """By halving: a larger share keeps more, a larger threshold less."""
        low, high, is_cached = 0.0, 1.0, self.fitted.is_stateful
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            layer = self._made(_LEAST ** (1 - middle) if is_cached else middle)
            for step in (0, 1)[not is_cached :]:  # lists are made at the first of two
                layer.set_step(Moment(step, _STEPS))
                layer.attend(*inputs, **options)
            keeps_too_much = layer.stats.kept > 1 - self.fitted.skipped
            low, high = (low, middle) if keeps_too_much != is_cached else (middle, high)
        return _LEAST ** (1 - low) if is_cached else high

    def predicted(self, query: Tensor, key: Tensor, impl: Any) -> Plan:
        """What a call that predicts reads."""
        method: FineGrained = self.inner.method
        blocks = method.blocks(self.geometry)
        found = predict.by_means(
            query, key, blocks, mass=method.top_p, guard=method.min_similarity, impl=impl
        )
        return blocks.plan(found.keep, compact=False)


@dataclass(frozen=True)
class Given(Method):
    """Reads lists that were made before, by layer: rounding cannot change them."""

    method: Method
    plans: Mapping[int, Plan] = field(compare=False, repr=False)

    def layer(self, geometry: Geometry, index: int = 0, **_: Any) -> PlanLayer:
        return PlanLayer(self.plans[index])

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        return self.method.ordering(geometry, device=device)
