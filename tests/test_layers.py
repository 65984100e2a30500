"""Who may import whom: walks the syntax trees of the package and fails on any arrow that is not allowed.

The package is a row of rooms, folders each of which may import the rooms before it. From outside its room a module is
reached through the room's `__init__` alone, so that a reader knows from the name of a file who may call it.

Every import counts: at the top, inside a function, under TYPE_CHECKING, or by `importlib.import_module("name")`.
"""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "nearfield"
LAB = REPOSITORY / "lab" / "src" / "nearfield_lab"

ROOMS = ("layout", "plan", "ops", "methods", "session", "parallel", "diffusers retrieval", "cli")
"""From the first to the last; two at one place may not see each other."""
PLACE = {room: place for place, rooms in enumerate(ROOMS) for room in rooms.split()}

BASE = {"_types", "_checks", "_files", "_memo"}
"""Modules of no room, which all rooms may import."""
FACADES = {"", "__main__", "planning"}
"""Modules of no room that gather names of rooms: the package itself, the program, and the builders of plans. Of the
rooms the last one alone may import them."""
BASE_READS = {("_checks", "layout"), ("_checks", "plan")}
"""What is named in annotations of the checks."""

# Modules of a room that its other modules share, each of which may import the ones before it; the rest are siblings,
# which may not import each other. A folder inside of a room is one sibling.
SHARED = {
    "methods": (
        "registry", "borders", "dense_parts", "layers", "view", "base", "select", "composition",
        "fields", "recipes", "self_attention",
    ),
}  # fmt: skip

# Outside packages: torch for everyone; these for their owners alone; any other from `diffusers` and `retrieval` on.
OWNERS = {"diffusers": "diffusers", "transformers": "retrieval"}
FIRST_WITH_EXTRAS = PLACE["diffusers"]

# The lab: which of its rooms each may import, and who owns an outside package. None of them imports the benchmarks. Of
# the library it imports public names, those in the `__all__` of a room's `__init__`; and these modules, because it pins
# the library's exact version.
LAB_EXCEPTIONS = {"nearfield._checks", "nearfield._files"}
BENCHMARK_EXCEPTIONS = ("nearfield.methods.loglinear.choose", "nearfield.methods.loglinear.Chosen")
"""What LogLinear chose is needed to judge its answer."""
LAB_READS = {
    "__init__": set(),
    "missing": set(),
    "storage": {"missing"},
    "images": {"missing"},
    "tuning": set(),
    "embedded": {"missing", "storage"},
    "engines": {"missing"},
    "quality": {"missing", "storage", "images"},
    "training": {"missing", "storage", "images", "embedded"},
    "captured": {"missing", "storage", "images", "embedded", "training"},
    "drawings": {"missing", "storage", "images", "embedded", "training", "quality"},
    "plots": {"missing", "quality", "tuning"},
}
LAB_READS |= {room: {*LAB_READS, "commands", "studio"} for room in ("commands", "studio", "__main__")}
LAB_OWNERS = {
    "diffusers": ("embedded",),
    "matplotlib": ("plots",),
    "gradio": ("studio",),
    "starlette": ("studio",),
    "ray": ("engines",),
    "triton": (),
    "transformers": (),
    "benchmarks": (),
}


class Import(NamedTuple):
    line: int
    module: str
    only_for_annotations: bool


def broken_arrows(package: Path) -> list[str]:
    """Every import that is not allowed, as `path:line: importer -> imported (reason)`."""
    modules = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    broken = []
    for importer, path in modules.items():
        where = path.relative_to(package).as_posix()
        unit = importer.partition(".")[0]
        if unit not in {*PLACE, *BASE, *FACADES}:
            broken.append(f"{where}:1: {unit} is no room; give it one in ROOMS")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for found in _imports(tree, importer, path.name == "__init__.py", modules):
            reason = _objection(importer, found, where)
            if reason:
                short = found.module.removeprefix("nearfield.")
                broken.append(f"{where}:{found.line}: {importer or '__init__'} -> {short} ({reason})")
    return broken


def _dotted(path: Path, package: Path) -> str:
    """`methods.base` for methods/base.py, `methods` for methods/__init__.py, "" for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(
    tree: ast.Module,
    importer: str,
    is_package: bool,
    modules: dict[str, Path],
    package: str = "nearfield",
) -> Iterator[Import]:
    for node, guarded in _walk(tree, guarded=False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, guarded)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, importer, is_package, package)
            for alias in node.names:
                name = f"{base}.{alias.name}"
                short = name.removeprefix(f"{package}.")
                # A module that a room's `__init__` hands on is one of its names.
                is_module = short in modules and (base == package or _room(short) == _room(importer))
                yield Import(node.lineno, name if is_module else base, guarded)
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "__import__"} and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                yield Import(node.lineno, target.value, guarded)


def _walk(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, with whether it stands under `if TYPE_CHECKING`."""
    yield node, guarded
    names_guard = isinstance(node, ast.If) and ast.unparse(node.test) in {
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    }
    body = node.body if isinstance(node, ast.If) and names_guard else []
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, guarded or child in body)


def _absolute(node: ast.ImportFrom, importer: str, is_package: bool, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = [package, *importer.split(".")] if importer else [package]
    climb = node.level - 1 if is_package else node.level
    return ".".join(parts[: len(parts) - climb] + ([node.module] if node.module else []))


def _called(node: ast.Call) -> str:
    return ast.unparse(node.func).rpartition(".")[2]


def _room(dotted: str) -> str:
    return dotted.partition(".")[0]


def _objection(importer: str, found: Import, where: str) -> str | None:
    top, _, rest = found.module.partition(".")
    if top == "nearfield":
        return _inside_objection(importer, rest, found.only_for_annotations)
    return _outside_objection(_room(importer), top, where)


def _inside_objection(importer: str, imported: str, only_for_annotations: bool) -> str | None:
    here, there = _room(importer), _room(imported)
    if there not in {*PLACE, *BASE, *FACADES}:
        return "no such module"
    if there in BASE:
        return None
    if here in BASE:
        return None if only_for_annotations and (here, there) in BASE_READS else f"{here} belongs to no room"
    if here == there:
        return None if _is_allowed_in_room(here, importer, imported) else f"no siblings inside {here}"
    if here in FACADES:
        return None if imported == there else f"only through the __init__ of {there}"
    if there in FACADES and PLACE[here] != max(PLACE.values()):
        return "rooms do not read the names that are gathered of them"
    if there in FACADES:
        return None
    if PLACE[there] >= PLACE[here]:
        return f"{there} does not come before {here}"
    return None if imported == there else f"only through the __init__ of {there}"


def _is_allowed_in_room(room: str, importer: str, imported: str) -> bool:
    shared = SHARED.get(room)
    here, there = (".".join(dotted.split(".")[1:2]) for dotted in (importer, imported))
    if shared is None or not here or here == there:
        return True
    if there not in shared:
        return False
    return here not in shared or shared.index(there) < shared.index(here)


def _outside_objection(unit: str, top: str, where: str) -> str | None:
    if top == "torch" or top in sys.stdlib_module_names:
        return None
    if top == "triton":
        owners = ("ops/_triton/", "/triton/", "/triton.py", "/hopper/")
        return None if any(owner in where for owner in owners) else "only kernels may import triton"
    if top in OWNERS:
        return None if unit == OWNERS[top] else f"only {OWNERS[top]} may import {top}"
    if top.startswith("nearfield_") or top == "benchmarks":
        return "the library knows neither the lab nor benchmarks"
    if PLACE.get(unit, 0) < FIRST_WITH_EXTRAS:
        return f"before {ROOMS[FIRST_WITH_EXTRAS].split()[0]} torch is the only dependency"
    return None


def broken_lab_arrows(package: Path) -> list[str]:
    """The same of the lab, whose rooms may import all of the library."""
    modules = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    broken = []
    for importer, path in modules.items():
        room = _room(importer) or "__init__"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for found in _imports(tree, importer, path.name == "__init__.py", modules, "nearfield_lab"):
            top, _, rest = found.module.partition(".")
            there = _room(rest) if rest else room  # the package itself knows its version and its folder
            if top == "nearfield_lab":
                target, is_allowed = there, there == room or there in LAB_READS.get(room, ())
            else:
                target, is_allowed = top, room in LAB_OWNERS.get(top, [room])
            if not is_allowed:
                where = path.relative_to(package).as_posix()
                broken.append(f"{where}:{found.line}: {room} -> {target}")
    return broken


def unpublic_imports(package: Path) -> list[str]:
    """What is imported of the library though no `__init__` exports it, as `path:line: name`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            where = f"{path.relative_to(package).as_posix()}:{node.lineno}"
            found += [f"{where}: {name}" for name in names if not _is_public(name)]
    return found


def _is_public(name: str) -> bool:
    """Whether a dotted name is none of the library's, a room of it, or exported by one; or in LAB_EXCEPTIONS."""
    parts = name.split(".")
    if parts[0] != "nearfield" or len(parts) == 1 or ".".join(parts[:2]) in LAB_EXCEPTIONS:
        return True
    room = ".".join(parts[:2] if parts[1] in PLACE else parts[:1])
    exported, rest = importlib.import_module(room).__all__, name.removeprefix(room).strip(".")
    module, _, inside = rest.partition(".")  # a module that is exported has public names
    return not rest or rest in exported or (module in exported and not inside.startswith("_"))


def test_package_has_only_allowed_arrows() -> None:
    assert PACKAGE.is_dir()
    broken = broken_arrows(PACKAGE)
    assert not broken, "\n" + "\n".join(broken)


def test_lab_has_only_allowed_arrows() -> None:
    assert LAB.is_dir()
    broken = broken_lab_arrows(LAB)
    assert not broken, "\n" + "\n".join(broken)


def test_benchmarks_import_public_names() -> None:
    """As the lab does, but without its exceptions, and with one of their own."""
    unpublic = [
        found
        for found in unpublic_imports(REPOSITORY / "benchmarks")
        if not found.startswith("redesign/") and not found.endswith(BENCHMARK_EXCEPTIONS)
    ]
    assert not unpublic, "\n" + "\n".join(unpublic)


def test_lab_imports_public_names() -> None:
    unpublic = unpublic_imports(LAB)
    assert not unpublic, "\n" + "\n".join(unpublic)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nearfield, torch\nfrom nearfield import Hilbert, methods\nimport nearfield.cli", []),
        ("from nearfield.cli import Bar, machine\nfrom nearfield.methods import fields", []),
        ("from nearfield._checks import wrong_value\nfrom nearfield import _files", []),
        ("from nearfield._types import Impl", ["a.py:1: nearfield._types.Impl"]),
        ("from nearfield import _types", ["a.py:1: nearfield._types"]),
        ("def f():\n    import nearfield.cli.options", ["a.py:2: nearfield.cli.options"]),
        ("from nearfield.cli.options import add_json", ["a.py:1: nearfield.cli.options.add_json"]),
        ("from nearfield.cli import add_json, options", ["a.py:1: nearfield.cli.options"]),
    ],
)
def test_public_names_are_those_that_are_exported(text: str, expected: list[str], tmp_path: Path) -> None:
    assert unpublic_imports(write_tree(tmp_path, {"a.py": text}, "nearfield_lab")) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("embedded/a.py", "def f():\n    from benchmarks import cases", "embedded/a.py:2: embedded -> benchmarks"),
        ("plots/a.py", "from benchmarks.cases import Case", "plots/a.py:1: plots -> benchmarks"),
        ("embedded/a.py", "from nearfield_lab import plots", "embedded/a.py:1: embedded -> plots"),
        ("quality/a.py", "from ..embedded import model", "quality/a.py:1: quality -> embedded"),
        ("training/a.py", "import nearfield_lab.commands", "training/a.py:1: training -> commands"),
        ("new/a.py", "from nearfield_lab.missing import MissingExtra", "new/a.py:1: new -> missing"),
        ("commands/a.py", "import matplotlib.pyplot", "commands/a.py:1: commands -> matplotlib"),
        ("commands/a.py", "import gradio", "commands/a.py:1: commands -> gradio"),
        ("quality/a.py", "from diffusers import Pipe", "quality/a.py:1: quality -> diffusers"),
        ("training/a.py", "from nearfield_lab.embedded import model\nimport peft, nearfield.parallel", None),
        ("studio/a.py", "import gradio\nfrom nearfield_lab.commands import many", None),
    ],
)  # fmt: skip
def test_arrows_of_the_lab(name: str, text: str, expected: str | None, tmp_path: Path) -> None:
    rooms = dict.fromkeys((f"{room}/__init__.py" for room in ("embedded", "plots", "commands")), "")
    found = broken_lab_arrows(write_tree(tmp_path, rooms | {name: text}, "nearfield_lab"))
    assert found == ([expected] if expected else [])


def write_tree(root: Path, files: dict[str, str], name: str = "nearfield") -> Path:
    package = root / name
    for file, text in files.items():
        path = package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


GUARD = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "

ALLOWED = {
    "public names": (
        "__init__.py",
        "from nearfield.layout import curves\nfrom nearfield.methods import Hilbert",
    ),
    "the builders": ("planning.py", "from nearfield.plan import full"),
    "a room reads an earlier one": ("methods/spokes.py", "from nearfield.ops import attend"),
    "a room reads its own modules": ("ops/attention/api.py", "from nearfield.ops.lists import api"),
    "a room reads the checks": ("layout/curves.py", "from nearfield._checks import check_int"),
    "checks name a plan": ("_checks.py", f"{GUARD}from nearfield.plan import Plan"),
    "triton in kernels": ("ops/attention/triton/forward.py", "import triton.language as tl"),
    "triton in one module of kernels": ("ops/windows/triton.py", "import triton"),
    "methods gathers": (
        "methods/__init__.py",
        "from .hilbert import Hilbert\nfrom nearfield.methods import spokes",
    ),
    "a method of several modules": (
        "methods/hilbert/plans.py",
        "from nearfield.methods.hilbert.layout import layout_of\nfrom nearfield.methods.hilbert import Hilbert",
    ),
    "a method reads what all share": ("methods/spokes.py", "from nearfield.methods.base import Method"),
    "a shared module reads an earlier one": (
        "methods/base.py",
        "from nearfield.methods.layers import PlanLayer",
    ),
    "diffusers in its room": ("diffusers/apply.py", "def build():\n    from diffusers import Model"),
    "other packages late": ("retrieval/store.py", "import safetensors"),
    "standard library": ("layout/curves.py", "from __future__ import annotations\nimport math, torch"),
}

FORBIDDEN = {
    "a later room": (
        "plan/plan.py", "from nearfield.ops import attend", "plan/plan.py:1: plan.plan -> ops"
    ),
    "a later room, relative": (
        "plan/plan.py", "from ..ops import attend", "plan/plan.py:1: plan.plan -> ops"
    ),
    "a later room, from the package": (
        "plan/plan.py", "from nearfield import ops", "plan/plan.py:1: plan.plan -> ops"
    ),
    "in a function": (
        "layout/curves.py", "def f():\n    import nearfield.plan", "layout/curves.py:2: layout.curves -> plan"
    ),
    "by name": (
        "layout/curves.py",
        "import importlib\nimportlib.import_module('nearfield.plan')",
        "layout/curves.py:2: layout.curves -> plan",
    ),
    "for annotations": (
        "layout/curves.py",
        f"{GUARD}from nearfield.plan import Plan",
        "layout/curves.py:3: layout.curves -> plan",
    ),
    "checks name a plan, at run time": (
        "_checks.py", "from nearfield.plan import Plan", "_checks.py:1: _checks -> plan"
    ),
    "checks name a plan in the else branch": (
        "_checks.py",
        f"{GUARD}pass\nelse:\n    import nearfield.plan",
        "_checks.py:5: _checks -> plan",
    ),
    "rooms at one place": (
        "retrieval/store.py", "import nearfield.diffusers", "retrieval/store.py:1: retrieval.store -> diffusers"
    ),
    "past an __init__": (
        "methods/spokes.py",
        "from nearfield.ops.attention.api import attend",
        "methods/spokes.py:1: methods.spokes -> ops.attention.api",
    ),
    "public names past an __init__": (
        "__init__.py",
        "from nearfield.ops.attention.api import attend",
        "__init__.py:1: __init__ -> ops.attention.api",
    ),
    "a method reads a method": (
        "methods/spokes.py",
        "from .hilbert import Hilbert",
        "methods/spokes.py:1: methods.spokes -> methods.hilbert",
    ),
    "a method's module reads a method": (
        "methods/hilbert/plans.py",
        "from nearfield.methods.spokes import Spokes",
        "methods/hilbert/plans.py:1: methods.hilbert.plans -> methods.spokes",
    ),
    "a method reads a method's module": (
        "methods/spokes.py",
        "from .hilbert.plans import near_plan",
        "methods/spokes.py:1: methods.spokes -> methods.hilbert.plans",
    ),
    "a method reads all methods": (
        "methods/spokes.py",
        "from nearfield.methods import Hilbert",
        "methods/spokes.py:1: methods.spokes -> methods",
    ),
    "a shared module reads a later one": (
        "methods/layers.py",
        "from nearfield.methods.base import Method",
        "methods/layers.py:1: methods.layers -> methods.base",
    ),
    "a shared module reads a method": (
        "methods/base.py",
        "from nearfield.methods.spokes import Spokes",
        "methods/base.py:1: methods.base -> methods.spokes",
    ),
    "a room reads the public names": (
        "ops/attention/api.py",
        "from nearfield import Plan",
        "ops/attention/api.py:1: ops.attention.api -> nearfield",
    ),
    "a room reads the builders' façade": (
        "methods/base.py", "from nearfield import planning", "methods/base.py:1: methods.base -> planning"
    ),
    "triton elsewhere": (
        "ops/attention/api.py", "import triton", "ops/attention/api.py:1: ops.attention.api -> triton"
    ),
    "triton elsewhere, guarded": (
        "cli/run.py", f"{GUARD}import triton", "cli/run.py:3: cli.run -> triton"
    ),
    "diffusers elsewhere": (
        "cli/a.py", "from diffusers import Pipe", "cli/a.py:1: cli.a -> diffusers"
    ),
    "transformers elsewhere": (
        "diffusers/a.py", "import transformers", "diffusers/a.py:1: diffusers.a -> transformers"
    ),
    "numpy in the core": ("plan/plan.py", "import numpy as np", "plan/plan.py:1: plan.plan -> numpy"),
    "the lab": ("cli/a.py", "import nearfield_lab", "cli/a.py:1: cli.a -> nearfield_lab"),
    "no room": ("helpers.py", "", "helpers.py:1: helpers is no room"),
    "no such module": (
        "ops/attention/api.py",
        "import nearfield.helpers",
        "ops/attention/api.py:1: ops.attention.api -> helpers",
    ),
}  # fmt: skip

# Present in every synthetic tree, so that an import is seen to name a module.
BACKGROUND = dict.fromkeys(
    [
        "planning.py",
        "ops/__init__.py",
        "ops/attention/api.py",
        "methods/spokes.py",
        "methods/hilbert/__init__.py",
    ]
    + [f"methods/{name}.py" for name in ("base", "layers")]
    + [f"methods/hilbert/{name}.py" for name in ("layout", "plans")],
    "",
)


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed_arrow_passes(case: str, tmp_path: Path) -> None:
    name, text = ALLOWED[case]
    assert broken_arrows(write_tree(tmp_path, BACKGROUND | {name: text})) == []


@pytest.mark.parametrize("case", FORBIDDEN)
def test_forbidden_arrow_is_named(case: str, tmp_path: Path) -> None:
    name, text, expected = FORBIDDEN[case]
    (found,) = broken_arrows(write_tree(tmp_path, BACKGROUND | {name: text}))
    assert found == expected or found.startswith((f"{expected} (", f"{expected};"))
