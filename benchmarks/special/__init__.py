"""Methods whose benchmarks need more than the common way: each has one module here, which is found by itself.

The module defines SPECIAL. Benchmarks look it up by the name of a case's method.
"""

import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.cases import Case

if TYPE_CHECKING:
    from benchmarks.attention_calls import Call, Work
    from benchmarks.step import StepBenchmark
    from benchmarks.step_models import Built
    from benchmarks.step_parts import Step, Variant


@dataclass(frozen=True)
class Special:
    """What benchmarks do for one method. What is left out is done the common way.

    Args:
        method: its class, as cases name it.
        cases: by the name of the benchmark; each is `on` what differs from the benchmark's defaults.
        former: names of the method in older results.
        works: what `attention` times of a call, by name.
        compared: what `step` checks: the method with everything held fast that rounding could change, a method that
            reads everything, and the name of what that one reads.
        variants: how `step` runs the method.
    """

    method: str
    cases: Mapping[str, Sequence[Case]] = field(default_factory=dict)
    former: Sequence[str] = ()
    works: "Callable[[Call, Any], Iterator[tuple[str, Work]]] | None" = None
    compared: "Callable[[StepBenchmark, Case, Built, Step], tuple[Any, Any, str]] | None" = None
    variants: "Callable[[StepBenchmark, Case, Built, Step], Iterator[Variant]] | None" = None


@cache
def known() -> Mapping[str, Special]:
    """All of them, by the method's name. The modules are imported now: they import what imports this one."""
    found = (import_module(f"{__name__}.{module.name}").SPECIAL for module in pkgutil.iter_modules(__path__))
    return {special.method: special for special in found}


def of(method: str) -> Special:
    """That of a method; one that leaves everything out if it has none."""
    return known().get(method, Special(method))


def cases(benchmark: str) -> list[Case]:
    """Cases of all of them for one benchmark."""
    return [case for special in known().values() for case in special.cases.get(benchmark, ())]
