"""The fields of methods as people write them: read and printed here alone, for commands, pages, nodes and recipes.

A value is `none`, `true` or `false`, a number, a word, or numbers between commas (`0,4,-1`; a comma behind a single one
makes it a list, `4,`). What a field takes is its type hint; the method itself judges the value. What a field means is
said in the `Args:` of its class, or of the class from which that inherits.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, replace
from dataclasses import fields as dataclass_fields
from functools import cache
from inspect import getdoc
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from nearfield._checks import wrong_value
from nearfield._files import check_fields
from nearfield.methods.base import Method
from nearfield.methods.composition import Composition
from nearfield.methods.registry import method_class, method_classes

Kind = Literal["flag", "choice", "integer", "number", "text"]
"""What can stand for a field where people click: a "text" is read by `parse`."""

JOIN = "+"
"""Between the names of a method that merges and of one that reads: `first+second`."""


class Field(NamedTuple):
    """One field of a method.

    Args:
        choices: of a "choice", the words that it may be.
        help: what it means, in one line.
        hint: its type.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...]
    hint: Any


def fields_of(kind: type[Method]) -> tuple[Field, ...]:
    """The fields of a method, in their order."""
    known: Any = kind
    return _fields_of(known)


@cache
def _fields_of(kind: Any) -> tuple[Field, ...]:
    hints, words = get_type_hints(kind), _help_of(kind)
    return tuple(
        Field(
            each.name,
            _kind_of(hints[each.name]),
            each.default if each.default_factory is MISSING else each.default_factory(),
            words.get(each.name, ""),
            _words_in(hints[each.name]),
            hints[each.name],
        )
        for each in dataclass_fields(kind)
        if each.init
    )


def parse(kind: type[Method], name: str, text: str) -> Any:
    """The value that a text stands for."""
    known = {field.name: field for field in fields_of(kind)}
    if name not in known:
        wrong_value("field", f"be one of {', '.join(known)}", repr(name))
    for value in _readings(known[name].hint, text.strip()):
        return value
    wrong_value(name, f"be {_wanted(known[name].hint)}", repr(text))


def shown(value: Any) -> str:
    """The text that `parse` reads as that value."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        numbers = ",".join(map(shown, value))
        return f"{numbers}," if len(value) == 1 else numbers
    return str(value)


# -- methods -----------------------------------------------------------------------------------------------------------


def made(name: str, given: Mapping[str, Any] | None = None, *, base: Method | None = None) -> Method:
    """The method of a name, or of two with a plus between them, with the fields that were given.

    Args:
        given: values by field; texts are read by `parse`. Where both methods have a field, `name.field` says whose.
        base: what fields that were not given are taken from, if it is of the same class.
    """
    kinds = kinds_of(name)
    values: list[dict[str, Any]] = [{} for _ in kinds]
    for key, value in (given or {}).items():
        place, field = _owner(key, kinds)
        values[place][field] = parse(kinds[place], field, value) if isinstance(value, str) else value
    parts: list[Any] = [
        _changed(base, chosen) if type(base) is kind else kind(**chosen)
        for kind, chosen in zip(kinds, values, strict=True)
    ]
    method: Method = parts[0] if len(parts) == 1 else Composition(*parts)
    return method


def kinds_of(name: str) -> list[type[Method]]:
    """The class of a name, or the two of a name with a plus."""
    names = [part.strip() for part in name.split(JOIN)]
    if len(names) > 2:
        wrong_value("method", "be one, or two: one that merges and one that reads", repr(name))
    return [method_class(part) for part in names]


def _changed(method: Any, values: Mapping[str, Any]) -> Any:
    return replace(method, **values)


def _owner(key: str, kinds: Sequence[type[Method]]) -> tuple[int, str]:
    """Which of the methods has a field, and its name there."""
    owner, dot, field = key.replace("-", "_").rpartition(".")
    having = [
        place
        for place, kind in enumerate(kinds)
        if (not dot or owner == kind.name) and field in {each.name for each in fields_of(kind)}
    ]
    if len(having) == 1:
        return having[0], field
    if having:
        rule = f"say whose it is: {' or '.join(f'{kinds[place].name}.{field}' for place in having)}"
        wrong_value("field", rule, repr(key))
    every = [
        each.name if len(kinds) == 1 else f"{kind.name}.{each.name}"
        for kind in kinds
        for each in fields_of(kind)
    ]
    wrong_value("field", f"be one of {', '.join(every)}", repr(key))


def name_of(method: Method) -> str:
    """The name by which `made` knows a method."""
    return JOIN.join(part.name for part in Composition.of(method).parts)


def texts_of(method: Method) -> dict[str, str]:
    """Every field as a text, which `made` reads."""
    parts = Composition.of(method).parts
    return {
        each.name if len(parts) == 1 else f"{part.name}.{each.name}": shown(getattr(part, each.name))
        for part in parts
        for each in fields_of(type(part))
    }


# -- documents ---------------------------------------------------------------------------------------------------------


def as_document(method: Method) -> dict[str, Any]:
    """A method with every field in plain values, so that it means the same when a default has changed."""
    parts = Composition.of(method)
    if parts.merge is None or parts.attention is None:
        (only,) = parts.parts
        return _document_of(only)
    nested = {"merge": _document_of(parts.merge), "attention": _document_of(parts.attention)}
    return {"method": Composition.__name__, "fields": nested}


def _document_of(method: Method) -> dict[str, Any]:
    values = {each.name: getattr(method, each.name) for each in fields_of(type(method))}
    return {"method": type(method).__name__, "fields": values}


def from_document(document: Mapping[str, Any]) -> Method:
    """The method of a document. Raises ValueError with what is wrong."""
    check_fields("`recipe`", document, {"method": str, "fields": (dict, NoneType)})
    name, given = document["method"], document.get("fields") or {}
    if name == Composition.__name__:
        _check_names(name, given, ("merge", "attention"))
        parts: dict[str, Any] = {
            key: None if value is None else from_document(value) for key, value in given.items()
        }
        return Composition(**parts)
    classes = {kind.__name__: kind for kind in method_classes().values()}
    if name not in classes:
        wrong_value("recipe", f"name a method of {', '.join(classes)}", repr(name))
    kind: Any = classes[name]
    _check_names(name, given, [each.name for each in fields_of(kind)])
    # JSON has no tuples, and no method has lists.
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    try:
        method: Method = kind(**values)
    except TypeError as error:  # a value of another kind
        raise ValueError(str(error)) from None
    return method


def _check_names(method: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        wrong_value("recipe", f"hold fields of {method} ({', '.join(sorted(known))})", ", ".join(unknown))


# -- types -------------------------------------------------------------------------------------------------------------


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """What a hint allows: the members of a union, or itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _kind_of(hint: Any) -> Kind:
    if get_origin(hint) is Literal:
        return "choice"
    plain: dict[Any, Kind] = {bool: "flag", int: "integer", float: "number"}
    return plain.get(hint, "text")


def _words_in(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _readings(hint: Any, text: str) -> Iterator[Any]:
    """The value of a text as each of the alternatives that take it, the plainest first."""
    kinds = _alternatives(hint)
    for kind in kinds:
        if text in (get_args(kind) if get_origin(kind) is Literal else ()):
            yield text
        if kind is NoneType and text.lower() == "none":
            yield None
        if kind is bool and text.lower() in ("true", "false"):
            yield text.lower() == "true"
    yield from _numbers(kinds, text)
    for kind in kinds:
        if get_origin(kind) is tuple and "," in text:
            yield from _tuples(kind, text)
    if str in kinds:
        yield text


def _numbers(kinds: Sequence[Any], text: str) -> Iterator[int | float]:
    if int in kinds:
        with suppress(ValueError):
            yield int(text)
    if float in kinds:
        with suppress(ValueError):
            value = float(text)
            yield int(value) if int in kinds and value.is_integer() else value


def _tuples(kind: Any, text: str) -> Iterator[tuple[Any, ...]]:
    """Values between commas; the last comma may have none behind it."""
    parts = [part.strip() for part in text.split(",")]
    if not parts[-1]:
        parts.pop()
    hints = get_args(kind)
    if hints[-1] is ...:
        hints = hints[:1] * len(parts)
    if len(hints) != len(parts):
        return
    values = [next(_readings(hint, part), None) for hint, part in zip(hints, parts, strict=True)]
    if None not in values:
        yield tuple(values)


def _wanted(hint: Any) -> str:
    """What a hint allows, in words."""
    words = list[str]()
    for kind in _alternatives(hint):
        if get_origin(kind) is Literal:
            words += get_args(kind)
        elif get_origin(kind) is tuple:
            many = get_args(kind)[-1] is ...
            words.append(
                "numbers between commas"
                if many
                else f"{len(get_args(kind))} numbers with a comma between them"
            )
        else:
            named = {
                bool: "true or false",
                int: "an integer",
                float: "a number",
                str: "a word",
                NoneType: "none",
            }
            words.append(named.get(kind, str(kind)))
    if "an integer" in words and "a number" in words:
        words.remove("an integer")
    if get_origin(hint) is Literal:
        return f"one of {', '.join(words)}"
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


# -- help --------------------------------------------------------------------------------------------------------------


def _help_of(kind: type[Method]) -> dict[str, str]:
    """What the class says of its fields, and what those say from which it inherits."""
    found: dict[str, str] = {}
    for each in kind.__mro__:
        if each.__doc__:
            found = _arguments(getdoc(each) or "") | found
    return found


def _arguments(text: str) -> dict[str, str]:
    """The entries of a docstring's `Args:`, by name; one may be of several names."""
    section = re.search(r"^Args:\n((?:(?: .*)?\n?)*)", text, re.MULTILINE)
    if section is None:
        return {}
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section[1].rstrip()):
        names, colon, words = entry.strip().partition(":")
        for name in names.split(",") if colon else ():
            found[name.strip()] = " ".join(words.split())
    return found
