"""Each extra brings what its commands and examples import, tried with everything else of this environment hidden."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.cats import CATS
from tests.readme_smoke import tiny_flux

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

SNIPPETS = [
    path
    for kind in ("README.md", "docs/*.md", "examples/*.py", "examples/*.ipynb")
    for path in ROOT.glob(kind)
]
FENCED = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"pip install '\.\[([\w,]+)\]'")

# Hidden packages are not found, as if they were not installed: libraries ask before they import.
PROGRAM = """
import importlib.machinery, json, re, runpy, sys

kept, hidden, lines = json.loads(sys.argv[1])
finder = importlib.machinery.PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in hidden else finder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*context):
        for found in finder.find_distributions(*context):
            if re.sub("[-_.]+", "-", found.name).lower() in kept:
                yield found

sys.meta_path[sys.meta_path.index(finder)] = Finder

import torch
from nearfield import cli

torch.set_num_threads(1)
for line in lines:
    words = line.split()
    if words[0] == "nearfield":
        assert cli.main(words[1:]) == 0, line
    elif words[0].endswith(".py"):
        runpy.run_path(line, run_name="__main__")
    else:
        exec(line)
"""

PICTURE = "--size 64 --steps 2 --num 1 --device cpu"
TRAINING = f"--data {CATS} --size 32 --batch 2 --steps 2 --device cpu"
LINES = {
    "": ["nearfield doctor", "nearfield explain flux-1024", "nearfield bench attend --quick"],
    "diffusers": [f"{ROOT}/examples/own_method.py"],
    "retrieval": [f"{ROOT}/examples/retrieval.py"],
    "quality": [f"nearfield quality {CATS} {CATS} --size 64 --metrics lpips,psnr,ssim --pairs --device cpu"],
    "demo": [
        f"nearfield generate --recipe cats-close {PICTURE} --out cats.png",
        f"nearfield generate --model flux --prompt cat {PICTURE} --out flux.png",
    ],
    "train": [
        f"nearfield train demo --tiny {TRAINING} --out demo",
        f"nearfield distill --weights demo/model.safetensors {TRAINING} --out lora",
    ],
    "bench": [
        "nearfield show --grid 16x16 --out show.png",
        "nearfield bench model --tiny --layers 1+1",
        f"nearfield bench quality --photographs {CATS} --dry-run",
        "nearfield bench retrieval --speed --models tiny-llama --lengths 128 --chunk-tokens 64 --rounds 2",
    ],
    "ray": ["import nearfield_lab.engines.cluster, nearfield_lab.embedded.sampler, ray"],
    "studio": ["import nearfield_lab.studio.page, nearfield_lab.studio.server"],
}
"""What runs with each extra: programs, commands, or Python."""


@cache
def provided(extra: str) -> frozenset[str]:
    """The distributions that an extra brings, and what they bring in turn; as far as they are installed here."""
    found: set[str] = set()
    todo = [Requirement(need) for need in (*PROJECT["dependencies"], *EXTRAS.get(extra, ()))]
    seen = set()
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        found.add(name)
        todo += needs_of(name, need.extras)
    return frozenset(found | {"nearfield"})


def needs_of(name: str, extras: set[str]) -> list[Requirement]:
    """Of an installed distribution, with these extras of it; of this project as `pyproject.toml` says."""
    if name == "nearfield":
        return [Requirement(need) for extra in extras for need in EXTRAS[extra]]
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    needs = [Requirement(line) for line in lines]
    chosen = ["", *extras]
    return [
        need
        for need in needs
        if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in chosen)
    ]


def hidden(extra: str) -> list[str]:
    """The top-level modules of all that the extra does not bring."""
    modules = importlib.metadata.packages_distributions().items()
    return [
        module for module, owners in modules if provided(extra).isdisjoint(map(canonicalize_name, owners))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extras")
    tiny_flux().save_pretrained(path / "flux")
    return path


def imported(path: Path) -> set[str]:
    """The packages that a program, a notebook or the Python blocks of a page import, but torch and this one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        blocks = [
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"
        ]
    else:
        blocks = [text] if path.suffix == ".py" else FENCED.findall(text)
    names = {name.partition(".")[0] for block in blocks for name in import_names(ast.parse(block))}
    return names - set(sys.stdlib_module_names) - {"torch", "nearfield"}


def import_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_snippets_name_the_extra_that_brings_what_they_import() -> None:
    modules = importlib.metadata.packages_distributions()
    checked = {}
    for path in SNIPPETS:
        named = {
            extra for found in INSTALL.findall(path.read_text(encoding="utf-8")) for extra in found.split(",")
        }
        brought = frozenset().union(*map(provided, named))
        checked[path.name] = imported(path)
        for module in checked[path.name]:
            owners = set(map(canonicalize_name, modules[module]))
            assert owners & brought, f"{path.name} imports {module} and names no extra that brings it"
    assert {"diffusers"} == checked["README.md"] == checked["flux.py"]
    assert "transformers" in checked["retrieval.md"] & checked["retrieval.py"]


def test_every_extra_for_users_is_tried() -> None:
    for_developers = {"docs", "dev"}
    assert set(LINES) - {""} == set(EXTRAS) - for_developers - {"triton"}


@pytest.mark.parametrize("extra", LINES)
def test_extra_brings_what_its_commands_import(extra: str, folder: Path) -> None:
    if extra == "studio":
        pytest.importorskip("gradio")
    assert "pytest" in hidden(extra)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([sorted(provided(extra)), hidden(extra), LINES[extra]])],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
