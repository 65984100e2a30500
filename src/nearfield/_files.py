"""Files that are written whole or not at all, and one gate through which they are read.

Whatever is wrong with a file becomes a `BadFile` of one line, which names the file, the field and the rule.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
    NoneType: "null",
}


class BadFile(OSError, ValueError):
    """A file that does not hold what it should."""


# -- writing -----------------------------------------------------------------------------------------------------------


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, then put it in its place: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".nearfield-", suffix=".part")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Names outlive a loss of power, too, where the system can open folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_json(path: Path, fields: Mapping[str, Any] | None = None) -> Any:
    """What a JSON file holds.

    Args:
        fields: what the object in it must hold, see `check_fields`.
    """
    document = parsed_json(path, path.read_bytes())
    if fields is not None:
        check_fields(path, document, fields)
    return document


def parsed_json(source: object, text: str | bytes) -> Any:
    """What a JSON text holds; `source` says where it is from."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadFile(f"{source} must be a JSON file; {reason}.") from None


def check_fields(source: object, document: Any, fields: Mapping[str, Any]) -> None:
    """Refuse what is no object, lacks a field, or holds another kind of value there.

    Args:
        source: what the document is from, for the message.
        fields: a type or a tuple of types for each name; one with None among them may be left out.
    """
    if not isinstance(document, Mapping):
        raise BadFile(f"{source} must hold an object; got {_kind_of(document)}.")
    for name, kinds in fields.items():
        allowed = kinds if isinstance(kinds, tuple) else (kinds,)
        value = document.get(name)
        if type(value) not in allowed and not (type(value) is int and float in allowed):
            words = " or ".join(_WORDS[kind] for kind in allowed)
            got = _kind_of(value) if name in document else "nothing"
            raise BadFile(f"`{name}` in {source} must be {words}; got {got}.")


def _kind_of(value: object) -> str:
    return _WORDS.get(type(value), type(value).__name__)
