"""The fields of methods as text: their help, what is read, what is printed, and the methods they make."""

import json
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import pytest

from nearfield import Geometry, Hilbert, LogLinear, Merge, Plan, PlanMethod, planning
from nearfield.methods import Composition, method_classes, registry
from nearfield.methods.fields import (
    as_document,
    fields_of,
    from_document,
    made,
    name_of,
    parse,
    shown,
    texts_of,
)

CLASSES = tuple(method_classes().values())


@dataclass(frozen=True)
class Spokes(PlanMethod):
    """Fields of further types."""

    width: float | str = 1.0
    reach: float | None = 0.6
    turns: tuple[float, ...] = (0.0,)

    def plan(self, geometry: Geometry, layer: int, *, q_block: int, k_block: int) -> Plan:
        raise NotImplementedError


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.name)
def test_every_field_has_help_and_a_default_that_can_be_written(kind: Any) -> None:
    found = fields_of(kind)
    assert [field.name for field in found] == [field.name for field in fields(kind)]
    for field in found:
        assert len(field.help.split()) >= 3, f"{kind.__name__}.{field.name}"
        assert field.default == getattr(kind(), field.name)
        assert parse(kind, field.name, shown(field.default)) == field.default
        assert (field.kind == "choice") == bool(field.choices)
        for word in field.choices:
            assert parse(kind, field.name, word) == word


@pytest.mark.parametrize(
    ("kind", "name", "text", "value"),
    [
        (Hilbert, "tiles", "16", 16),
        (Hilbert, "tiles", "4, 4,16", (4, 4, 16)),
        (Hilbert, "tiles", "none", None),
        (Hilbert, "dense_layers", "0,4,-1", (0, 4, -1)),
        (Hilbert, "dense_layers", "4,", (4,)),
        (Hilbert, "dense_layers", "4", 4),
        (Hilbert, "dense_steps", "0.15", 0.15),
        (Hilbert, "dense_steps", "1,2", (1, 2)),
        (Hilbert, "dense_steps", "1,0.1", (1, 0.1)),
        (Hilbert, "interleave", "True", True),
        (Hilbert, "share", "two-way", "two-way"),
        (LogLinear, "levels", "auto", "auto"),
        (LogLinear, "levels", "2", 2),
        (Spokes, "width", "0.5/N", "0.5/N"),
        (Spokes, "width", "0.01", 0.01),
        (Spokes, "reach", "none", None),
        (Spokes, "turns", "0,0.5", (0.0, 0.5)),
        (Merge, "ratio", "0.3", 0.3),
        (Merge, "sharpness", "inf", float("inf")),
        (Merge, "refresh", "3,1", (3, 1)),
    ],
)
def test_values_are_read_and_printed(kind: Any, name: str, text: str, value: Any) -> None:
    read = parse(kind, name, text)
    assert read == value
    assert type(read) is type(value)
    assert parse(kind, name, shown(value)) == value


def test_a_whole_number_of_steps_is_an_integer() -> None:
    """So that methods that are written alike are equal, and shown alike."""
    assert type(parse(Hilbert, "dense_steps", "3.0")) is int
    assert type(parse(Merge, "ratio", "0")) is float


BAD = {
    ("hilbert", "tiles", "x"): "`tiles` must be an integer, numbers between commas or none; got 'x'.",
    ("hilbert", "tiles", "4,,16"): "`tiles` must be an integer, numbers between commas or none; got '4,,16'.",
    ("hilbert", "tiles", "0"): "`tiles` must be at least 1; got 0.",
    ("hilbert", "tiles", "4,0"): "`tiles` must be at least 1; got 0.",
    (
        "hilbert",
        "curve",
        "peano",
    ): "`curve` must be one of auto, hilbert, hilbert-closed, morton, raster; got 'peano'.",
    ("hilbert", "interleave", "1"): "`interleave` must be true or false; got '1'.",
    (
        "hilbert",
        "interleave",
        "true",
    ): '`interleave` must be False where `near` is "around"; got True. Nothing slides '
    'there; tiles do: near="tile".',
    (
        "hilbert",
        "dense_steps",
        "1,2,3",
    ): "`dense_steps` must be a number or 2 numbers with a comma between them; got '1,2,3'.",
    ("merge", "refresh", "3"): "`refresh` must be 2 numbers with a comma between them; got '3'.",
    ("merge", "tiles", "3"): "`field` must be one of ratio, region, region_size, sharpness, refresh, groups, "
    "skip_blocks, size_bias, placement; got 'tiles'.",
    ("merge+bipartitemerge", "seed", "-"): "`seed` must be an integer; got '-'.",
    (
        "merge+bipartitemerge",
        "ratio",
        "0",
    ): "`field` must say whose it is: merge.ratio or bipartitemerge.ratio; got 'ratio'.",
    (
        "merge+hilbert+merge",
        "tiles",
        "1",
    ): "`method` must be one, or two: one that merges and one that reads; got 'merge+hilbert+merge'.",
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_read_is_one_line(case: tuple[str, str, str]) -> None:
    name, field, text = case
    with pytest.raises(ValueError) as raised:
        made(name, {field: text})
    assert str(raised.value) == BAD[case]


METHODS = [
    Hilbert(),
    Hilbert(tiles=(4, 16), far=None, dense_layers=(3,), dense_steps=(1, 0.1)),
    LogLinear(levels=2, weighted=False),
    Merge(0.3, groups=4) | Hilbert(tiles=9, shared="centre"),
    Composition(Merge(0.25)),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_methods_come_back_from_texts_and_documents(method: Any) -> None:
    again = made(name_of(method), texts_of(method))
    assert Composition.of(again) == Composition.of(method)
    document = json.loads(json.dumps(as_document(method)))
    assert Composition.of(from_document(document)) == Composition.of(method)


def test_two_methods_are_joined_by_a_plus() -> None:
    given = {"ratio": "0.3", "hilbert.dense-layers": "0,-1", "tiles": "4"}
    assert made("merge+hilbert", given) == Merge(0.3) | Hilbert(tiles=4, dense_layers=(0, -1))
    with pytest.raises(TypeError, match="`merge` must be a method that merges; got Hilbert"):
        made("hilbert+merge")


def test_what_is_not_given_is_of_the_base_where_it_is_of_that_class() -> None:
    base = Hilbert(dense_steps=0)
    assert made("hilbert", {"tiles": "4"}, base=base) == Hilbert(tiles=4, dense_steps=0)
    assert made("hilbert", {"dense_steps": 2}, base=base) == Hilbert(dense_steps=2)
    assert made("loglinear", base=base) == LogLinear()
    assert made("merge+hilbert", base=base) == Merge() | base


def test_a_method_of_one_file_has_its_fields_read() -> None:
    """Nothing but its class: types from hints, help from the docstring, of several lines or of the base."""

    @dataclass(frozen=True)
    class Bands(PlanMethod):
        """Everyone reads a band.

        Args:
            width: tokens to
                either side.
            edges, corners: what happens there.
        """

        name: ClassVar[str] = "bandsoffields"
        width: int = 16
        edges: Literal["cut", "wrap"] = "cut"
        corners: str | None = None
        dense_steps: int | float | tuple[int | float, int | float] = 0

        def plan(self, geometry: Geometry, layer: int, *, q_block: int, k_block: int) -> Plan:
            return planning.full(geometry.num_tokens, geometry.num_tokens, q_block=q_block, k_block=k_block)

    try:
        found = {field.name: field for field in fields_of(Bands)}
        assert found["width"].help == "tokens to either side."
        assert found["corners"].help == found["edges"].help == "what happens there."
        assert found["dense_steps"].help.startswith("how many of the first denoising steps stay dense")
        assert [field.kind for field in found.values()] == ["integer", "choice", "text", "text"]
        assert found["edges"].choices == ("cut", "wrap")
        assert made("bandsoffields", {"width": "4", "corners": "round"}) == Bands(4, corners="round")
        assert made("merge+bandsoffields", {"width": "4"}) == Merge() | Bands(4)
    finally:
        del registry._CLASSES["bandsoffields"]
