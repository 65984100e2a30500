"""FineGrained in benchmarks: its cases, and what is timed of it where nobody knows what may be skipped.

Random weights and tensors do not say what may be skipped. So the share is fixed, and the threshold, or `top_p`, that
skips it is sought in every layer, from that layer's own queries and keys. The rest is what the method always does.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.attention_calls import Call, Work, judge, line
from benchmarks.cases import CPU, CUDA, QUICK, Case
from benchmarks.runner import WrongAnswer
from benchmarks.special import Special
from benchmarks.step_parts import REFRESH, Loop, Step, Variant
from nearfield import Attended, FineGrained, Geometry, LayerAttention, Method, Ordering, Plan, apply, planning
from nearfield.methods import Memory, Moment, PlanLayer
from nearfield.ops import ReadStats, predict

if TYPE_CHECKING:
    from benchmarks.step import StepBenchmark
    from benchmarks.step_models import Built

_METHOD = "FineGrained"
CACHED, ONLINE = "cached", "online"

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
    skipped: float
    found: dict[int, float] = field(default_factory=dict, compare=False, repr=False)
    layers: dict[int, "FittedLayer"] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, method: FineGrained, on: Mapping[str, Any], **changed: Any) -> "Fitted":
        """Skips what a case asks for, or 70%."""
        return cls(replace(method, **changed), 0.7 if on["skipped"] is None else float(on["skipped"]))

    @classmethod
    def both(cls, method: FineGrained, on: Mapping[str, Any]) -> tuple["Fitted", "Fitted"]:
        """One whose lists serve until the end, and one that predicts them at every call."""
        cached = cls.of(method, on, predict=CACHED, refresh=(0.0,))
        return cached, cls.of(method, on, predict=ONLINE, min_similarity=None)

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

    def kept(self) -> float:
        """The share of the keys that was read since the layers were made, full calls not counted.

        Raises WrongAnswer where it does not leave out the share that was asked for.
        """
        kept = fmean(layer.inner.stats.kept for layer in self.layers.values())
        if abs(1 - kept - self.skipped) > _MISFIT:
            raise WrongAnswer(f"{1 - kept:.1%} of the keys were skipped, not {self.skipped:.0%}")
        return kept

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


# -- what is timed -----------------------------------------------------------------------------------------------------


def works(call: Call, method: FineGrained) -> Iterator[tuple[str, Work]]:
    """A call that finds its lists, one that predicts them, and one that makes them; each skips the share asked for."""
    cached, online = Fitted.both(method, call.on)
    finds, makes, predicts = (each.layer(call.geometry) for each in (cached, cached, online))
    cached.layers[0] = finds  # what is kept is asked of the one that finds its lists
    full = planning.full(call.preset.tokens, call.preset.tokens, device=call.device)
    facts = {"q_block": method.query_block, "k_block": method.grain}

    def attended(layer: FittedLayer, step: int) -> Attended:
        layer.set_step(Moment(step, _STEPS))
        return layer.attend(*call.alike, impl=call.impl)

    def made_anew() -> Attended:
        makes.forget()
        return attended(makes, 0)

    attended(finds, 0)
    for name, fitted, layer in ((CACHED, cached, finds), (ONLINE, online, predicts)):
        run = partial(attended, layer, 1)
        run()
        kept = fitted.kept()
        plan = fitted.plans()[0] if layer is finds else layer.predicted(*call.alike[:2], impl=call.impl)
        memory = {"list_bytes": plan.blocks.nbytes}
        yield name, Work(run, partial(judge, call, run, plan), kept, facts=facts | memory)
    yield "refresh", Work(made_anew, partial(judge, call, made_anew, full), 1.0, facts=facts)


def compared(bench: "StepBenchmark", case: Case, built: "Built", step: Step) -> tuple[Method, Method, str]:
    """Lists that are made once: rounding would change them."""
    method: Any = case.made()
    everything = replace(method, predict=ONLINE, top_p=1.0, min_similarity=None)
    fitted = Fitted.of(method, case.on)
    with torch.no_grad(), apply(built.model, fitted, scheduler=Loop(), impl=bench.session.impl):
        step()
        return Given(method, fitted.plans()), everything, "lists of all keys"


def variants(bench: "StepBenchmark", case: Case, built: "Built", step: Step) -> Iterator[Variant]:
    """Steps that find their lists, and steps that predict them."""
    method: Any = case.made()
    cached, online = Fitted.both(method, case.on)
    facts, loop, anew = {"skipped": cached.skipped}, Loop(), Loop()
    later = loop.later(step)
    making = replace(cached, layers={})  # the share that is kept is read from the others
    parts = {REFRESH: (bench.applied(built, making, anew), anew.anew(step))}
    found = bench.applied(built, cached, loop, first=later), later
    yield Variant(CACHED, cached, found, cached.kept, parts, facts)
    yield Variant(ONLINE, online, (bench.applied(built, online), step), online.kept, facts=facts)


# -- cases -------------------------------------------------------------------------------------------------------------

_CALL_TARGETS = {
    ("wan-480p", 0.7): {
        CACHED: 3.1,
        ONLINE: 2.8,
        "refresh": 1 / 1.6,
    },  # a refresh takes 1.6 dense calls at most
    ("wan-720p", 0.7): {CACHED: 3.0},
    ("wan-480p", 0.9): {CACHED: 9.0},
}
_TENSORS: dict[str, Any] = {
    "wan-480p": "wan-480p",
    "wan-720p": {"batch": 1, "heads": 40, "head_dim": 128, "grid": [21, 45, 80], "text": 0},
    "small": line(1, 2, 900, 32),
}


def _calls() -> Iterator[Case]:
    for model, skipped, blocks, where in (
        ("wan-480p", 0.7, ((128, 1), (128, 4), (128, 8), (192, 1), (192, 4), (192, 8)), CUDA),
        ("wan-480p", 0.9, ((128, 8), (192, 8)), CUDA),
        ("wan-720p", 0.7, ((128, 8), (192, 8)), CUDA),
        ("small", 0.7, ((64, 4),), QUICK),
    ):
        for queries, grain in blocks:
            name = f"fine-{model}-{100 * skipped:.0f}-{queries}x{grain}"
            fields = {"query_block": queries, "grain": grain}
            targets = _CALL_TARGETS.get((model, skipped), {})
            on = {"preset": _TENSORS[model], "skipped": skipped}
            yield Case(name, on, _METHOD, fields, targets, (where,))


def _steps() -> Iterator[Case]:
    video: dict[str, Any] = {"model": "wan21-1.3b"}
    for size, target in (("480p", 1.6), ("720p", 2.0)):
        on, targets = video | {"size": size, "skipped": 0.7}, {CACHED: target, ONLINE: target}
        wide = {"query_block": 192, "grain": 8}
        yield Case(f"wan21-{size}-fine-70", on, _METHOD, {}, targets, (CUDA,))
        yield Case(f"wan21-{size}-fine-70-192x8", on, _METHOD, wide, targets)
        yield Case(f"wan21-{size}-fine-90", on | {"skipped": 0.9}, _METHOD)
    tiny = video | {"size": "128x192", "tiny": True, "skipped": 0.7}
    yield Case("tiny-fine-70", tiny, _METHOD, {"query_block": 16}, where=(QUICK,))


def _patterns() -> Iterator[Case]:
    dense = {"dense_layers": 0, "dense_steps": 0}
    for weight in ("0.25/N", "0.5/N", "1/N"):
        yield Case(f"FineGrained, {weight}", {}, _METHOD, dense | {"threshold": weight})
    for mass in (0.9, 0.7):
        yield Case(f"FineGrained online, {mass:.0%}", {}, _METHOD, dense | {"predict": ONLINE, "top_p": mass})


_ON_HOST = (
    Case("fine-cached", {}, _METHOD, {}, {"inference": 200, "compiled": 80}, (CUDA, CPU)),
    Case("fine-online", {}, _METHOD, {"predict": ONLINE}, where=(CUDA, CPU)),
)

SPECIAL = Special(
    _METHOD,
    {"attention": [*_calls()], "step": [*_steps()], "pictures": [*_patterns()], "host": _ON_HOST},
    former=("fine",),
    works=works,
    compared=compared,
    variants=variants,
)
