"""The methods that the page offers, and the method that filled-in boxes make."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nearfield._checks import wrong_value
from nearfield.methods import DEFAULT, Method, method_classes
from nearfield.methods import fields as method_fields

Field = method_fields.Field

METHODS: dict[str, tuple[Field, ...]] = {
    DEFAULT.name: method_fields.fields_of(type(DEFAULT)),
    **{name: method_fields.fields_of(kind) for name, kind in method_classes().items() if kind.takes_text},
}
"""The fields of every method that reads sequences with text, as pictures have it; the default first."""


class Box(NamedTuple):
    """What a field is on the page: a choice, a flag, a number, or a text.

    Args:
        value: what is filled in at first.
    """

    field: Field
    value: Any


def boxes(name: str) -> list[Box]:
    """What can be filled in of a method."""
    return [Box(field, in_box(field, field.default)) for field in METHODS[name]]


def in_box(field: Field, value: Any) -> Any:
    """A value as its box shows it."""
    return method_fields.shown(value) if field.kind == "text" else value


def method_of(name: str, values: Mapping[str, Any]) -> Method:
    """The method that was asked for; wrong fields raise with the library's own message. Empty boxes are defaults."""
    known = {field.name: field for field in METHODS[name]}
    given = {
        key: _whole(known[key], value) for key, value in values.items() if value is not None and value != ""
    }
    return method_fields.made(name, given)


def _whole(field: Field, value: Any) -> Any:
    """Boxes of numbers know no integers."""
    is_integer = field.kind == "integer" and isinstance(value, float) and value.is_integer()
    return int(value) if is_integer else value


def filled_in(method: Method) -> tuple[str, dict[str, Any]]:
    """The name of a method and its fields as the page shows them; refuses what the page does not offer."""
    name = method_fields.name_of(method)
    if name not in METHODS:
        offered = ", ".join(kind.__name__ for each in METHODS for kind in method_fields.kinds_of(each))
        wrong_value("recipe", "have a method that the page offers", method.label, f"It offers {offered}.")
    values = method_fields.as_document(method)["fields"]
    return name, {field.name: in_box(field, values[field.name]) for field in METHODS[name]}
