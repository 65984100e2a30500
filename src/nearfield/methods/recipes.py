"""A recipe: a method and its fields in a small JSON file, with what was measured when it was chosen.

`nearfield tune` writes recipes, and `apply(pipe, "recipe.json")` takes them where it takes a method. Some ship with the
embedded model, and are known by name: `apply(pipe, "cats-close")`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args

from nearfield._checks import check_member, wrong_type, wrong_value
from nearfield._files import BadFile, check_fields, read_json
from nearfield.methods.base import Method
from nearfield.methods.fields import as_document, from_document
from nearfield.methods.registry import default_method

FORMAT = 2
ENTRY_POINTS = "nearfield.recipes"
"""The group of entry points by which an installed package brings recipes: modules that call `add_folder`."""
_FOLDERS: list[Path] = []
Lora = Literal["", "none", "embedded"]


@dataclass(frozen=True)
class Recipe:
    """A method for a model.

    Args:
        model: class of the model it was made for; empty: any.
        measured: figures, and what they were measured on; for people.
        lora: what was on the model then: "none", or "embedded", the one that ships with the embedded model; empty: not
            said. `nearfield generate` loads it, `apply` does not.
    """

    method: Method
    model: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)
    lora: Lora = ""

    def __post_init__(self) -> None:
        check_member("lora", self.lora, get_args(Lora))

    def check_model(self, model: object) -> None:
        """Fields that were sought on one model say nothing about another: layers have numbers."""
        classes = [cls.__name__ for cls in type(model).__mro__]
        if self.model and self.model not in classes:
            hint = "Tune one for this model, or pass `recipe.method` if you want it nevertheless."
            wrong_value("recipe", f"be one for {classes[0]}", f"one for {self.model}", hint)

    def as_document(self) -> dict[str, Any]:
        """What `read` reads. Every field is in it, so that it means the same when a default has changed."""
        facts = {"model": self.model, "lora": self.lora, "measured": dict(self.measured)}
        return {"format": FORMAT, "kind": "nearfield recipe", **as_document(self.method), **facts}


def add_folder(folder: Path) -> None:
    """Know the recipes in a folder by their names, too."""
    if folder not in _FOLDERS:
        _FOLDERS.append(folder)


def names() -> tuple[str, ...]:
    """The recipes that ship with installed packages."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, Path]:
    for entry in entry_points(group=ENTRY_POINTS):
        entry.load()
    return {path.stem: path for folder in _FOLDERS for path in folder.glob("*.json")}


def read(source: str | Path | Mapping[str, Any]) -> Recipe:
    """A recipe by its name, from its file, or from what is in it. Raises ValueError with what is wrong.

    Args:
        source: one of `names()`, a path, or the content of a file. A file that is called like a shipped recipe is read
            as `./name`.
    """
    document = source if isinstance(source, Mapping) else _loaded(_path_of(source))
    version = document.get("format") if isinstance(document, Mapping) else None
    if type(version) is not int or version != FORMAT or "method" not in document:
        hint = "`nearfield tune` writes recipes."
        wrong_value("recipe", f"be a nearfield recipe of format {FORMAT}", _words(document), hint)
    check_fields("`recipe`", document, {"model": (str, NoneType), "measured": (dict, NoneType)})
    facts = document.get("model") or "", document.get("measured") or {}, document.get("lora", "")
    return Recipe(from_document(document), *facts)


def recipe_of(value: Any) -> Recipe:
    """What `apply` was given as a method: one, a recipe, or the file or name of one."""
    if isinstance(value, str | Path):
        value = read(value)
    recipe = value if isinstance(value, Recipe) else Recipe(value)
    _check_method(recipe.method)
    return recipe


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        rule = f"be a method such as nearfield.{default_method().label}"
        if not isinstance(method, type):
            wrong_type("method", rule, type(method).__name__)
        hint = f"Write {method.__name__}()." if issubclass(method, Method) else ""
        wrong_type("method", rule, f"the class {method.__name__}", hint)


def _path_of(source: str | Path) -> Path:
    return _shipped().get(str(source), Path(source))


def _loaded(path: Path) -> Any:
    try:
        return read_json(path)
    except BadFile as error:
        wrong_value("recipe", "be a JSON file", f"{str(path)!r}", str(error))
    except OSError as error:
        rule = f"name a file that can be read, or one that ships ({', '.join(names())})"
        wrong_value("recipe", rule, f"{str(path)!r} ({error.strerror})")


def _words(document: object) -> str:
    if isinstance(document, Mapping):
        return f"format {document.get('format')!r} and method {document.get('method')!r}"
    return type(document).__name__
