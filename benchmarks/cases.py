"""A case: a method, what it is applied to, and where it is measured."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from nearfield import Method
from nearfield.cli import UsageError, wrong
from nearfield.methods import recipes

CUDA, CPU, QUICK = "cuda", "cpu", "quick"
Fields = Mapping[str, Any]
RIVALS: dict[str, Callable[..., Method]] = {}
"""Methods that are here to compare with, and known to benchmarks alone."""


@dataclass(frozen=True)
class Case:
    """One line of a table.

    Args:
        name: for people, and to know it again.
        on: what the method is applied to, by the benchmark's own names.
        method: its class, as a recipe names it; empty where there is none.
        fields: of the method.
        targets: what is to be reached on one H200, by the work that a record names: the speed-up over dense, or in
            `host` microseconds.
        where: the devices on which it is measured by default ("cuda", "cpu"), and "quick" if `--quick` measures it.
    """

    name: str
    on: Fields = field(default_factory=dict)
    method: str = ""
    fields: Fields = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)
    where: tuple[str, ...] = ()

    def made(self) -> Method:
        """The method itself."""
        if self.method in RIVALS:
            return RIVALS[self.method](**self.fields)
        return recipes.read({"format": recipes.FORMAT, "method": self.method, "fields": self.fields}).method

    @property
    def document(self) -> dict[str, Any]:
        """What it takes to measure it again: with every field, for defaults may change."""
        fields: Any = self.fields
        if self.method and self.method not in RIVALS:
            fields = recipes.Recipe(self.made()).as_document()["fields"]
        return {"case": self.name, **self.on, "method": self.method, "fields": fields}

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        on = ", ".join(f"{name} {value}" for name, value in self.on.items() if value not in (None, "", False))
        return f"{self.name}: {self.method}({given}) on {on}" if self.method else f"{self.name}: {on}"


def named(cases: Iterable[Case], defaults: Fields = MappingProxyType({})) -> dict[str, Case]:
    """A table by names, each of which stands there once; every case is `on` the defaults, where it says no other."""
    listed = [replace(case, on={**defaults, **case.on}) for case in cases]
    table = {case.name: case for case in listed}
    assert len(table) == len(listed)
    return table


def chosen(
    table: Mapping[str, Case], names: Sequence[str], own: Sequence[Case], device: str, quick: bool
) -> list[Case]:
    """What `--cases` and `--case` ask for; without them what is measured on the device.

    Args:
        names: of the table, or patterns of them: "hilbert-*".
        own: cases that are not in the table.
    """
    if not names and not own:
        return [case for case in table.values() if (QUICK if quick else device) in case.where]
    found: dict[str, Case] = {}
    for name in names:
        matching = {key: case for key, case in table.items() if fnmatchcase(key, name)}
        if not matching:
            wrong("--cases", f"be any of {', '.join(table)}, or a pattern of them", repr(name))
        found |= matching
    return [*found.values(), *own]


def read(text: str, defaults: Fields, table: Mapping[str, Case]) -> list[Case]:
    """Cases from JSON: of each `method` and `fields`, a `name`, and anything of `on`, whose `defaults` are given.

    One that is called like a case of the table starts from that case.

    Args:
        text: an object, or the name of a .json file with a list of them.
    """
    try:
        given = json.loads(Path(text).read_text(encoding="utf-8") if text.endswith(".json") else text)
    except (OSError, ValueError) as error:
        _wrong_json(text, error)
    listed = given if isinstance(given, list) else [given]
    for each in listed:
        if not isinstance(each, dict):
            _wrong_json(text, f"{type(each).__name__} is no object")
    return [_case(each, defaults, table) for each in listed]


def _wrong_json(text: str, error: object) -> NoReturn:
    rule = "be a JSON object, or a .json file with a list of them"
    wrong("--case", rule, f"{text!r} ({error})", 'Example: --case \'{"method": "Hilbert"}\'')


def _case(given: Fields, defaults: Fields, table: Mapping[str, Case]) -> Case:
    known = ("name", "method", "fields", *defaults)
    if unknown := sorted(given.keys() - set(known)):
        wrong("--case", f"hold any of {', '.join(known)}", unknown[0])
    base = table.get(given.get("name", ""), Case("", defaults))
    on = {**base.on, **{key: given[key] for key in defaults if key in given}}
    method, fields = given.get("method", base.method), given.get("fields", {})
    if method == base.method:
        fields = {**base.fields, **fields}
    changed = replace(base, on=on, method=method, fields=fields, targets={}, where=())
    name = given.get("name", method.lower() or "case")
    if name in table and changed != replace(base, targets={}, where=()):
        name = f"{name}, changed"
    return replace(changed, name=name)


def check(cases: Iterable[Case]) -> None:
    """Refuse fields that a method does not have, or that do not go together, before anything takes time."""
    for case in cases:
        try:
            if case.method:
                case.made()
        except (TypeError, ValueError) as error:
            raise UsageError(f"case {case.name!r}: {error}") from None
