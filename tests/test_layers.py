"""Who may import whom: walks the syntax trees of the package and fails on any arrow the tables do not allow.

Every import counts: at the top, inside a function, under TYPE_CHECKING, or by `importlib.import_module("name")`. An
import under TYPE_CHECKING is a dependency of the reader if not of the interpreter; the few that are needed to name a
type of the same level are listed in ANNOTATIONS_ONLY.
"""

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "src" / "nearfield"
LAB = REPOSITORY / "lab" / "src" / "nearfield_lab"

LEVELS = {
    0: {"_eager", "_files", "_types", "curves", "keeping", "levels"},
    1: {"_checks", "geometry", "plan"},
    2: {"reference", "kernels", "grouped"},
    3: {
        "planning",
        "pyramid",
        "tiling",
        "tokenmap",
        "dense_parts",
        "blockwise",
        "implementations",
        "operators",
        "attend",
        "merging",
        "predict",
        "windows",
    },
    4: {"methods", "recipes"},
    5: {"adapters", "parallel", "retrieval"},
    6: {"cli", "__main__"},
}
LEVEL_OF = {unit: level for level, units in LEVELS.items() for unit in units}

# Levels each level may import. Only the top one may import its own.
READS = {
    0: set(),
    1: {0},
    2: {0, 1},
    3: {0, 1, 2},
    4: {0, 1, 3},
    5: {0, 1, 2, 3, 4},
    6: {0, 1, 2, 3, 4, 5, 6},
}
SIDEWAYS = {
    ("recipes", "methods"),
    ("plan", "_checks"),
    ("geometry", "_checks"),
    ("predict", "planning"),
    ("pyramid", "planning"),
    ("operators", "implementations"),
    ("attend", "operators"),
    ("adapters", "parallel"),
    ("retrieval", "parallel"),
}
ANNOTATIONS_ONLY = {("_checks", "plan"), ("_checks", "geometry")}

# The public names are gathered from levels 0 to 5, so only what lies above may import them from there.
ROOT = "__init__"
ROOT_READS = {0, 1, 2, 3, 4, 5}
ROOT_READERS = {6}

# Packages whose modules may not import each other, but for those that all of them share, each of which may import the
# ones before it; their `__init__` may import them all. A package inside of them is one sibling: its modules may.
NO_SIBLINGS = {
    "methods": ("registry", "borders", "layers", "base", "composition", "self_attention"),
}

# Outside packages: torch for everyone; these for their owners alone, or for nobody; any other from level 5 up.
OWNERS = {
    "triton": ("kernels",),
    "diffusers": ("adapters",),
    "transformers": ("retrieval",),
    "matplotlib": (),
    "gradio": (),
    "ray": (),
    "nearfield_lab": (),
    "benchmarks": (),
}
FIRST_LEVEL_WITH_EXTRAS = 5

# The lab: which of its rooms each may import, and who owns an outside package. None of them imports the benchmarks.
LAB_READS = {
    "__init__": set(),
    "dense": set(),
    "missing": set(),
    "tuning": set(),
    "embedded": {"missing"},
    "engines": {"missing"},
    "quality": {"missing"},
    "training": {"missing", "embedded"},
    "plots": {"missing", "dense", "quality", "tuning"},
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
    """Every import that the tables do not allow, as `path:line: importer -> imported (reason)`."""
    modules = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    broken = []
    for importer, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(package).as_posix()
        unit = _unit(importer)
        if unit != ROOT and unit not in LEVEL_OF:
            broken.append(f"{where}:1: {unit} has no level; give it one in LEVELS")
            continue
        for found in _imports(tree, importer, path.name == "__init__.py", modules):
            reason = _objection(importer, found)
            if reason:
                short = found.module.removeprefix("nearfield.")
                broken.append(f"{where}:{found.line}: {importer or ROOT} -> {short} ({reason})")
    return broken


def _dotted(path: Path, package: Path) -> str:
    """`methods.fine` for methods/fine.py, `methods` for methods/__init__.py, "" for the package itself."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _unit(dotted: str) -> str:
    return dotted.partition(".")[0] or ROOT


def _member(dotted: str) -> str:
    """`hilbert` for methods.hilbert and for methods.hilbert.plans, "" for methods."""
    return ".".join(dotted.split(".")[1:2])


def _imports(
    tree: ast.Module,
    importer: str,
    is_package: bool,
    modules: Collection[str],
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
                names_unit = base == "nearfield" and alias.name in LEVEL_OF
                is_module = names_unit or name.removeprefix(f"{package}.") in modules
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


def _objection(importer: str, found: Import) -> str | None:
    top, _, rest = found.module.partition(".")
    if top == "nearfield":
        return _inside_objection(importer, rest, found.only_for_annotations)
    return _outside_objection(_unit(importer), top)


def _inside_objection(importer: str, imported: str, only_for_annotations: bool) -> str | None:
    here, there = _unit(importer), _unit(imported)
    if there != ROOT and there not in LEVEL_OF:
        return "no such module in LEVELS"
    if here == there:
        is_of_siblings = here in NO_SIBLINGS and importer != here and _member(importer) != _member(imported)
        if is_of_siblings and not _is_shared(NO_SIBLINGS[here], _member(importer), _member(imported)):
            return f"no siblings inside {here}"
        return None
    if here == ROOT:
        return None if LEVEL_OF[there] in ROOT_READS else "the public names come from levels 0-5"
    if there == ROOT:
        return None if LEVEL_OF[here] in ROOT_READERS else "only level 6 reads the public names"
    if (here, there) in SIDEWAYS or LEVEL_OF[there] in READS[LEVEL_OF[here]]:
        return None
    if only_for_annotations and (here, there) in ANNOTATIONS_ONLY:
        return None
    return f"level {LEVEL_OF[here]} may not read level {LEVEL_OF[there]}"


def _is_shared(shared: tuple[str, ...], importer: str, imported: str) -> bool:
    """Whether a module is one that its siblings may import; of these, only those that come later."""
    if imported not in shared:
        return False
    return importer not in shared or shared.index(imported) < shared.index(importer)


def _outside_objection(unit: str, top: str) -> str | None:
    if top == "torch" or top in sys.stdlib_module_names:
        return None
    if top in OWNERS:
        owners = OWNERS[top]
        return None if unit in owners else f"only {' and '.join(owners) or 'the lab'} may import {top}"
    if LEVEL_OF.get(unit, 0) < FIRST_LEVEL_WITH_EXTRAS:
        return f"below level {FIRST_LEVEL_WITH_EXTRAS} torch is the only dependency"
    return None


def broken_lab_arrows(package: Path) -> list[str]:
    """The same of the lab, whose rooms may import all of the library."""
    modules = {_dotted(path, package): path for path in sorted(package.rglob("*.py"))}
    broken = []
    for importer, path in modules.items():
        room = _unit(importer)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for found in _imports(tree, importer, path.name == "__init__.py", modules, "nearfield_lab"):
            top, _, rest = found.module.partition(".")
            there = _unit(rest) if rest else room  # the package itself knows its version and its folder
            if top == "nearfield_lab":
                target, is_allowed = there, there == room or there in LAB_READS.get(room, ())
            else:
                target, is_allowed = top, room in LAB_OWNERS.get(top, [room])
            if not is_allowed:
                where = path.relative_to(package).as_posix()
                broken.append(f"{where}:{found.line}: {room} -> {target}")
    return broken


def test_package_has_only_allowed_arrows() -> None:
    assert PACKAGE.is_dir()
    broken = broken_arrows(PACKAGE)
    assert not broken, "\n" + "\n".join(broken)


def test_lab_has_only_allowed_arrows() -> None:
    assert LAB.is_dir()
    broken = broken_lab_arrows(LAB)
    assert not broken, "\n" + "\n".join(broken)


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
        "from nearfield import curves\nfrom nearfield.methods.hilbert import Hilbert",
    ),
    "plan reads its checks": ("plan.py", "from nearfield._checks import check_int"),
    "checks name a plan": ("_checks.py", f"{GUARD}from nearfield.plan import Plan"),
    "one package's modules": ("reference/attend.py", "from nearfield.reference.softmax import softmax"),
    "triton in kernels": (
        "kernels/attend.py",
        "import triton.language as tl\nfrom nearfield.plan import Plan",
    ),
    "a method attends": ("methods/blocks.py", "from nearfield.attend import attend"),
    "methods gathers": (
        "methods/__init__.py",
        "from .hilbert import Hilbert\nfrom nearfield.methods import fine",
    ),
    "a method reads what all share": (
        "methods/fine.py",
        "from nearfield.methods.base import Method",
    ),
    "a shared module reads an earlier one": (
        "methods/base.py",
        "from nearfield.methods.layers import PlanLayer",
    ),
    "a method of several modules": (
        "methods/hilbert/plans.py",
        "from nearfield.methods.hilbert.layout import layout_of\nfrom nearfield.methods.hilbert import Hilbert",
    ),
    "the top reads the public names": (
        "cli/__init__.py",
        "import nearfield\nfrom nearfield import __version__",
    ),
    "the top reads the top": ("__main__.py", "def run():\n    from nearfield import cli"),
    "diffusers in the adapters": ("adapters/a.py", "def build():\n    from diffusers import Model"),
    "other packages above": ("retrieval/store.py", "import fsspec"),
    "standard library": ("curves.py", "from __future__ import annotations\nimport math, torch"),
}

FORBIDDEN = {
    "upwards": ("plan.py", "from nearfield.attend import attend", "plan.py:1: plan -> attend"),
    "upwards, relative": ("plan.py", "from .attend import attend", "plan.py:1: plan -> attend"),
    "upwards, from the package": ("curves.py", "from nearfield import plan", "curves.py:1: curves -> plan"),
    "upwards, from a dot": ("curves.py", "from . import plan", "curves.py:1: curves -> plan"),
    "in a function": ("curves.py", "def f():\n    import nearfield.plan", "curves.py:2: curves -> plan"),
    "by name": (
        "curves.py",
        "import importlib\nimportlib.import_module('nearfield.plan')",
        "curves.py:2: curves -> plan",
    ),
    "for annotations": (
        "curves.py",
        f"{GUARD}from nearfield.plan import Plan",
        "curves.py:3: curves -> plan",
    ),
    "annotation table, at run time": ("_checks.py", "import nearfield.plan", "_checks.py:1: _checks -> plan"),
    "annotation table, in the else branch": (
        "_checks.py",
        f"{GUARD}pass\nelse:\n    import nearfield.plan",
        "_checks.py:5: _checks -> plan",
    ),
    "sideways": ("plan.py", "import nearfield.geometry", "plan.py:1: plan -> geometry"),
    "sideways at level 3": ("attend.py", "import nearfield.planning", "attend.py:1: attend -> planning"),
    "reference reads kernels": (
        "reference/attend.py",
        "from nearfield.kernels import attend",
        "reference/attend.py:1: reference.attend -> kernels.attend",
    ),
    "kernels read reference": (
        "kernels/__init__.py",
        "from ..reference.attend import attend",
        "kernels/__init__.py:1: kernels -> reference.attend",
    ),
    "grouped reads reference": (
        "grouped.py",
        "import nearfield.reference",
        "grouped.py:1: grouped -> reference",
    ),
    "a method reads a kernel": (
        "methods/fine.py",
        "from nearfield.kernels.attend import attend",
        "methods/fine.py:1: methods.fine -> kernels.attend",
    ),
    "a method reads a method": (
        "methods/fine.py",
        "from .hilbert import Hilbert",
        "methods/fine.py:1: methods.fine -> methods.hilbert",
    ),
    "a method's module reads a method": (
        "methods/hilbert/plans.py",
        "from nearfield.methods.fine import FineGrained",
        "methods/hilbert/plans.py:1: methods.hilbert.plans -> methods.fine",
    ),
    "a method reads a method's module": (
        "methods/fine.py",
        "from .hilbert.plans import near_plan",
        "methods/fine.py:1: methods.fine -> methods.hilbert.plans",
    ),
    "a shared module reads a later one": (
        "methods/layers.py",
        "from nearfield.methods.base import Method",
        "methods/layers.py:1: methods.layers -> methods.base",
    ),
    "a shared module reads a method": (
        "methods/base.py",
        "from nearfield.methods.fine import FineGrained",
        "methods/base.py:1: methods.base -> methods.fine",
    ),
    "a method's module reads all methods": (
        "methods/hilbert/plans.py",
        "from nearfield.methods import Hilbert",
        "methods/hilbert/plans.py:1: methods.hilbert.plans -> methods",
    ),
    "a method reads all methods": (
        "methods/fine.py",
        "from nearfield.methods import Hilbert",
        "methods/fine.py:1: methods.fine -> methods",
    ),
    "the core reads the public names": (
        "attend.py",
        "from nearfield import Plan",
        "attend.py:1: attend -> nearfield",
    ),
    "public names read the top": (
        "__init__.py",
        "from nearfield import cli",
        "__init__.py:1: __init__ -> cli",
    ),
    "an adapter reads the top": (
        "adapters/a.py",
        "from nearfield.cli import main",
        "adapters/a.py:1: adapters.a -> cli",
    ),
    "the top reads the lab": (
        "cli/a.py",
        "def draw():\n    from nearfield_lab.plots import bars",
        "cli/a.py:2: cli.a -> nearfield_lab.plots",
    ),
    "the top reads the lab by name": (
        "cli/a.py",
        "import importlib\nimportlib.import_module('nearfield_lab')",
        "cli/a.py:2: cli.a -> nearfield_lab",
    ),
    "the top reads the benchmarks": (
        "cli/a.py",
        f"{GUARD}from benchmarks.cases import Result",
        "cli/a.py:3: cli.a -> benchmarks.cases",
    ),
    "triton elsewhere": ("attend.py", "import triton", "attend.py:1: attend -> triton"),
    "triton elsewhere, guarded": (
        "cli/a.py",
        f"{GUARD}import triton",
        "cli/a.py:3: cli.a -> triton",
    ),
    "diffusers elsewhere": (
        "parallel/a.py",
        "from diffusers import Pipe",
        "parallel/a.py:1: parallel.a -> diffusers",
    ),
    "transformers elsewhere": (
        "adapters/a.py",
        "import transformers",
        "adapters/a.py:1: adapters.a -> transformers",
    ),
    "matplotlib": (
        "cli.py",
        "def f():\n    import matplotlib.pyplot",
        "cli.py:2: cli -> matplotlib.pyplot",
    ),
    "numpy in the core": ("plan.py", "import numpy as np", "plan.py:1: plan -> numpy"),
    "unknown module": ("helpers.py", "", "helpers.py:1: helpers has no level"),
    "unknown target": ("attend.py", "import nearfield.helpers", "attend.py:1: attend -> helpers"),
}

# Present in every synthetic tree, so that `from nearfield.kernels import attend` is seen to name a module.
BACKGROUND = dict.fromkeys(
    ["kernels/attend.py", "reference/attend.py", "methods/fine.py", "methods/hilbert/__init__.py"]
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


def test_levels_are_a_partition() -> None:
    assert sum(map(len, LEVELS.values())) == len(LEVEL_OF)
    assert set(LEVELS) == set(READS)
