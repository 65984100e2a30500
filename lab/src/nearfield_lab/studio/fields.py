"""The methods that the page offers, their fields, and the method that filled-in fields make."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from nearfield._checks import wrong_value
from nearfield.cli.arguments import CURVES, NEAR, ORDERS, SHARED, SHARES, SUMMARIES, TEXT_READS, integer
from nearfield.cli.methods import dense_layers, dense_steps
from nearfield.methods import BlockTopK, FineGrained, Hilbert, LogLinear, Method

Kind = Literal["integer", "optional", "number", "choice", "flag", "text"]
"""An "optional" integer may be left empty."""


class Field(NamedTuple):
    """One field of a method. An empty one is left to the method."""

    name: str
    kind: Kind
    value: Any
    words: str
    choices: tuple[str, ...] = ()


def _dense(layers: str, steps: str) -> tuple[Field, Field]:
    return (
        Field("dense_layers", "text", layers, "how many first layers stay dense, or which: 0,4,-1"),
        Field(
            "dense_steps",
            "text",
            steps,
            "first steps that stay dense, or, below 1, which share of them; 1,2: the first and the last two",
        ),
    )


_ORDER = Field("order", "choice", "hilbert", "of the tokens", ORDERS)

METHODS: dict[str, tuple[type[Any], tuple[Field, ...]]] = {
    "hilbert": (
        Hilbert,
        (
            Field("near", "choice", "around", "read exactly: what is around its block, or its tile", NEAR),
            Field("tiles", "optional", "", "tiles per image; empty: as many as suit the size"),
            Field("cycle", "integer", 4, "layers after which the tiles are back"),
            Field("curve", "choice", "auto", "through the tokens", CURVES),
            Field("shared", "choice", "none", "image tokens that everyone reads", SHARED),
            Field("share", "choice", "two-way", "whether shared tokens read everything, too", SHARES),
            Field("shared_tokens", "optional", "", "how many of them; empty: as many as suit the size"),
            Field("far", "integer", 16, "tokens per summary of the rest; 0: it is not read"),
            Field("summary", "choice", "weighted", "of the rest", SUMMARIES),
            Field("text_reads", "choice", "all", "of the image: all, or its summaries", TEXT_READS),
            Field("interleave", "flag", False, "tiles differ between heads, too"),
            *_dense("0", "0.15"),
        ),
    ),
    "blocks": (
        BlockTopK,
        (
            Field("keep", "number", 0.25, "share of the blocks that is read"),
            Field("grain", "integer", 64, "keys per block"),
            _ORDER,
            *_dense("1", "0.2"),
        ),
    ),
    "fine": (
        FineGrained,
        (
            Field("mass", "number", 0.9, "share of the weights that the lists shall hold"),
            Field("grain", "integer", 4, "keys per id"),
            Field("predict", "choice", "cached", "weights of earlier steps, or online", ("cached", "online")),
            _ORDER,
            *_dense("0", "0"),
        ),
    ),
    "loglinear": (
        LogLinear,
        (
            Field("block", "integer", 16, "tokens that are pooled, and chosen, together"),
            Field("topk", "integer", 8, "blocks that a query chooses at each level"),
            _ORDER,
            *_dense("0", "0"),
        ),
    ),
}
"""Classes of the methods and the fields that can be set here; the others keep their defaults."""


def method_of(name: str, values: Mapping[str, Any]) -> Method:
    """The method that was asked for; wrong fields raise with the library's own message."""
    maker, offered = METHODS[name]
    given = {field.name: _parsed(field, values.get(field.name)) for field in offered}
    made: Method = maker(**{name: value for name, value in given.items() if value is not None})
    return made


def filled_in(method: Method) -> tuple[str, dict[str, Any]]:
    """The name of a method and its fields as the page shows them; refuses what the page cannot show."""
    for name, (maker, offered) in METHODS.items():
        if type(method) is maker:
            values = {field.name: _shown(field, getattr(method, field.name)) for field in offered}
            if method_of(name, values) == method:
                return name, values
    hint = (
        f"It offers {', '.join(maker.__name__ for maker, _ in METHODS.values())}, and most of their fields."
    )
    wrong_value("recipe", "have a method and fields that the page offers", str(method), hint)


def _shown(field: Field, value: Any) -> Any:
    """What `_parsed` reads as that value."""
    if field.name == "dense_steps" and isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, tuple):  # a field of one number has no room for several
        return "".join(f"{number}," for number in value) if field.kind == "text" else ""
    if value is None:
        return 0 if field.name == "far" else ""
    return str(value) if field.kind in ("text", "optional") else value


def _parsed(field: Field, value: Any) -> Any:
    if value is None or value == "":
        return None
    if field.name == "dense_layers":
        return dense_layers(str(value), "dense_layers")
    if field.name == "dense_steps":
        return dense_steps(str(value), "dense_steps")
    if field.kind == "optional":
        return integer(field.name, 1)(str(value).strip())
    if field.kind == "integer" and float(value).is_integer():
        return int(value)
    return value
