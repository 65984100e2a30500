"""The methods by name: the library's own, and the ones of installed packages."""

from importlib.metadata import entry_points
from typing import Any

from nearfield._checks import wrong_value

ENTRY_POINTS = "nearfield.methods"
"""The group of entry points by which an installed package adds a method: each names its class."""

_CLASSES: dict[str, type[Any]] = {}
_loaded_others = False


def register(kind: type[Any]) -> None:
    """Know a method by its name. Defining a class twice, as a notebook does, replaces it."""
    name = kind.name
    if name != name.lower() or not name.isidentifier():
        wrong_value(
            "name", "be an identifier in lower case", repr(name), f"Rename the method {kind.__name__}."
        )
    known = _CLASSES.get(name)
    if known is not None and _place(known) != _place(kind):
        wrong_value("name", "be one that no other method has", repr(name), f"{_place(known)} has it.")
    _CLASSES[name] = kind


def _place(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def method_classes(*, installed: bool = True) -> dict[str, type[Any]]:
    """All methods that are known, by name, in the order of names.

    Args:
        installed: look for those of other packages, too.
    """
    if installed:
        _load_others()
    return dict(sorted(_CLASSES.items()))


def method_class(name: str) -> type[Any]:
    """The class of a method, by its name; capitals do not matter."""
    classes = method_classes()
    if name.lower() not in classes:
        wrong_value("method", f"be one of {', '.join(classes)}", repr(name))
    return classes[name.lower()]


def default_method() -> Any:
    """What `apply` takes where no method is given."""
    return method_class("hilbert")()


def _load_others() -> None:
    """Import what installed packages bring, once, and only when somebody asks for all methods."""
    global _loaded_others
    if not _loaded_others:
        _loaded_others = True
        for entry in entry_points(group=ENTRY_POINTS):
            entry.load()  # defining the class registers it
