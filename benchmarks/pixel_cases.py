"""What the benchmark `pixel` measures, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the cases before it knows what else it needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ATTENTION: dict[str, tuple[str, ...]] = {
    "full": (),
    "loglinear": ("block", "topk", "levels", "enrich", "weighted", "order"),
    "gatedblocks": ("block", "topk", "order"),
    "sparselinear": ("block", "topk", "order"),
}
"""Attention that can be trained from the start, and the fields of each that can be given."""

TARGETS = {128: 4.0, 256: 10.0}
"""By pixels per side: how many times as fast as full attention log-linear attention shall train."""


@dataclass(frozen=True)
class Variant:
    """One line of the table: attention and fields, as they were written."""

    name: str
    attention: str
    fields: Mapping[str, Any] = field(default_factory=dict)


def read_variant(text: str) -> Variant:
    """`loglinear`, or with fields: `loglinear:levels=2:weighted=no`. Raises ValueError with what is wrong."""
    attention, *pairs = text.split(":")
    if attention not in ATTENTION:
        raise ValueError(f"name any of {', '.join(ATTENTION)}; got {attention!r}")
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or name not in ATTENTION[attention]:
            known = ", ".join(ATTENTION[attention]) or "none"
            raise ValueError(f"give {attention} its own fields ({known}) as name=value; got {pair!r}")
        words = {"yes": True, "no": False}
        fields[name] = int(value) if value.lstrip("-").isdecimal() else words.get(value, value)
    return Variant(text, attention, fields)
