"""The library, the lab and each of their extras bring what they are for, tried with all other packages hidden."""

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
from typing import Any

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.cats import CATS
from tests.readme_smoke import tiny_flux

ROOT = Path(__file__).resolve().parents[1]
PLACES = [place for place in sys.path if "thirdparty_files" not in place]
"""Where packages are installed. Ray, once another test imports it, adds a folder of packages that it carries itself."""
FOLDERS = {"nearfield": ".", "nearfield-lab": "./lab"}
PROJECTS: dict[str, dict[str, Any]] = {
    name: tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, folder in FOLDERS.items()
}
OWN = {"nearfield": "nearfield", "nearfield_lab": "nearfield-lab", "benchmarks": "nearfield-lab"}
"""Modules of this repository, and what must be installed for them."""

SNIPPETS = [
    path
    for kind in ("README.md", "docs/*.md", "examples/*.py", "examples/*.ipynb")
    for path in ROOT.glob(kind)
]
FENCED = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INSTALL = re.compile(r"pip install((?: '?\.(?:/lab)?(?:\[[\w,]+\])?'?)+)")

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

torch.set_num_threads(1)
for line in lines:
    words = line.split()
    if words[:2] == ["python", "-m"]:
        sys.argv = words[2:]
        try:
            runpy.run_module(words[2], run_name="__main__")
        except SystemExit as done:
            assert done.code == 0, line
    elif words[0].endswith(".py"):
        runpy.run_path(line, run_name="__main__")
    else:
        exec(line)
"""

PICTURE = "--size 64 --steps 2 --num 1 --option device=cpu"
TRAINING = f"--data {CATS} --size 32 --batch 2 --steps 2 --option device=cpu"
TRAINED = f"python -m nearfield_lab train demo --tiny {TRAINING}"
COMPARED = f"{CATS} {CATS} --size 64 --metrics lpips,psnr,ssim --pairs --device cpu"
LINES = {
    "nearfield": ["python -m nearfield doctor", "python -m nearfield explain flux-1024"],
    "nearfield[diffusers]": [f"{ROOT}/examples/own_method.py"],
    "nearfield[retrieval]": [f"{ROOT}/examples/retrieval.py"],
    "nearfield-lab": [
        "python -m nearfield_lab explain --grid 16x16 --plot show.png",
        f"python -m nearfield_lab generate --recipe cats-close {PICTURE} --out cats.png",
        f"python -m nearfield_lab generate --model flux --prompt cat {PICTURE} --out flux.png",
        f"{TRAINED} --out plain",
        "python -m benchmarks attention --quick --cases cpu-small-random-64",
        "python -m benchmarks step --cases tiny-tiles --rounds 2",
        f"python -m benchmarks pictures --tiny --photographs {CATS} --dry-run",
        "python -m benchmarks retrieval --cases tiny-llama-256 --rounds 2",
    ],
    "nearfield-lab[train]": [
        f"{TRAINED} --out demo",
        f"python -m nearfield_lab distill --weights demo/model.safetensors {TRAINING} --out lora",
    ],
    "nearfield-lab[quality]": [f"python -m nearfield_lab quality {COMPARED}"],
    "nearfield-lab[drawings]": ["import nearfield_lab.drawings.pixels, resvg_py"],
    "nearfield-lab[ray]": ["import nearfield_lab.engines.cluster, nearfield_lab.embedded.sampler, ray"],
    "nearfield-lab[studio]": ["import nearfield_lab.studio.page, nearfield_lab.studio.server"],
}
"""What runs where so much is installed: programs, commands, or Python."""


@cache
def provided(installed: str) -> frozenset[str]:
    """What a requirement brings, and what that brings in turn; as far as it is installed here."""
    found: set[str] = set()
    todo = [Requirement(installed)]
    seen = set()
    while todo:
        need = todo.pop()
        name = canonicalize_name(need.name)
        if (name, frozenset(need.extras)) in seen:
            continue
        seen.add((name, frozenset(need.extras)))
        found.add(name)
        todo += needs_of(name, need.extras)
    return frozenset(found)


def needs_of(name: str, extras: set[str]) -> list[Requirement]:
    """Of an installed distribution, with these extras of it; of this repository's as their `pyproject.toml` says."""
    if name in PROJECTS:
        project = PROJECTS[name]
        chosen = [project["optional-dependencies"][extra] for extra in extras]
        return [Requirement(need) for needs in (project["dependencies"], *chosen) for need in needs]
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    needs = [Requirement(line) for line in lines]
    return [
        need
        for need in needs
        if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def hidden(installed: str) -> list[str]:
    """The top-level modules of all that a requirement does not bring."""
    modules = importlib.metadata.packages_distributions() | {name: [owner] for name, owner in OWN.items()}
    known = {canonicalize_name(found.name) for found in importlib.metadata.distributions(path=PLACES)}
    known |= {canonicalize_name(owner) for owner in OWN.values()}
    others = known - provided(installed)
    owned = {name: set(map(canonicalize_name, owners)) & known for name, owners in modules.items()}
    return [name for name, owners in owned.items() if owners and owners <= others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("extras")
    tiny_flux().save_pretrained(path / "flux")
    return path


def imported(path: Path) -> set[str]:
    """The packages that a program, a notebook or the Python blocks of a page import, but torch and nearfield."""
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


def named(text: str) -> set[str]:
    """What the install lines of a page bring: `pip install '.[triton]' ./lab` and the like."""
    names = {folder: name for name, folder in FOLDERS.items()}
    found = re.findall(r"(\./lab|\.)(\[[\w,]+\])?", " ".join(INSTALL.findall(text)))
    return set().union(*(provided(f"{names[folder]}{extras}") for folder, extras in found))


def test_install_lines_are_read() -> None:
    """One project or both, with extras and without."""
    assert "diffusers" not in named("pip install .")
    assert "diffusers" in named("pip install '.[triton,diffusers]'")
    assert {"diffusers", "matplotlib"} <= named("pip install . ./lab")
    assert "peft" in named("so: `pip install '.[triton]' './lab[train]'`") - named(
        "pip install '.[triton]' ./lab"
    )


def test_snippets_name_what_brings_what_they_import() -> None:
    modules = importlib.metadata.packages_distributions() | {name: [owner] for name, owner in OWN.items()}
    checked = {}
    for path in SNIPPETS:
        brought = named(path.read_text(encoding="utf-8"))
        checked[path.name] = imported(path)
        for module in checked[path.name]:
            owners = set(map(canonicalize_name, modules[module]))
            assert owners & brought, f"{path.name} imports {module} and names nothing that brings it"
    assert {"diffusers"} == checked["README.md"] == checked["flux.py"]
    assert "transformers" in checked["retrieval.md"] & checked["retrieval.py"]
    assert "nearfield_lab" in checked["measures.md"]


def test_every_extra_for_users_is_tried() -> None:
    extras = {f"{name}[{extra}]" for name in PROJECTS for extra in PROJECTS[name]["optional-dependencies"]}
    assert set(LINES) == {*PROJECTS, *extras} - {"nearfield[dev]", "nearfield[triton]"}


@pytest.mark.parametrize("installed", LINES)
def test_what_is_installed_brings_what_its_commands_import(installed: str, folder: Path) -> None:
    for extra, package in (("studio", "gradio"), ("drawings", "resvg_py")):
        if extra in installed:
            pytest.importorskip(package)
    assert "pytest" in hidden(installed)
    assert ("nearfield_lab" in hidden(installed)) == (not installed.startswith("nearfield-lab"))
    sources = [str(ROOT / name) for name in ("src", "lab/src", ".")]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    given = json.dumps([sorted(provided(installed)), hidden(installed), LINES[installed]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
