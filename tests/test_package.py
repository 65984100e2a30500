"""Both wheels hold their package and nothing else, and say what they are; a sdist holds what its wheel is built from.

Built without network, by the build backend itself. `make package` installs them and tries them.
"""

import ast
import configparser
import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import nearfield
from nearfield.cli import weights

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = {"nearfield": ROOT, "nearfield-lab": ROOT / "lab"}
SOURCES = {"nearfield": ROOT / "src" / "nearfield", "nearfield-lab": ROOT / "lab" / "src" / "nearfield_lab"}
LICENCE_FILES = {
    "nearfield": {"LICENSE"},
    "nearfield-lab": {
        "LICENSE",
        "src/nearfield_lab/embedded/weights/LICENSE-TAEF2",
        "src/nearfield_lab/embedded/weights/README.md",
        "src/nearfield_lab/quality/weights/LICENSE",
        "src/nearfield_lab/quality/weights/README.md",
    },
}
BOTH = pytest.mark.parametrize("name", PROJECTS)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")


class Wheel(NamedTuple):
    """What is in a wheel, and how large it is as a file."""

    files: dict[str, bytes]
    info: str
    size: int

    @property
    def facts(self) -> Message:
        return email.message_from_bytes(self.files[f"{self.info}/METADATA"])

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        parser = configparser.ConfigParser()
        parser.read_string(self.files[f"{self.info}/entry_points.txt"].decode())
        return {section: dict(parser[section]) for section in parser.sections()}


def build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Wheel]:
    """The wheel of a project, built once."""

    @cache
    def built(name: str) -> Wheel:
        path = build("wheel", PROJECTS[name], tmp_path_factory.mktemp(name))
        with zipfile.ZipFile(path) as archive:
            files = {member: archive.read(member) for member in archive.namelist()}
        return Wheel(files, f"{SOURCES[name].name}-{nearfield.__version__}.dist-info", path.stat().st_size)

    return built


Built = Callable[[str], Wheel]


def package_files(name: str) -> set[str]:
    source = SOURCES[name]
    files = (path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(source.parent).as_posix() for path in files}


@BOTH
def test_wheel_holds_the_package_and_nothing_else(wheel: Built, name: str) -> None:
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt"} | {
        f"licenses/{file}" for file in LICENCE_FILES[name]
    }
    assert set(wheel(name).files) == package_files(name) | {f"{wheel(name).info}/{file}" for file in about}
    assert f"{SOURCES[name].name}/py.typed" in wheel(name).files


def test_wheel_of_the_library_is_small_and_is_code(wheel: Built) -> None:
    assert wheel("nearfield").size < 1_000_000
    kinds = {Path(file).suffix for file in package_files("nearfield")} - {".typed"}
    assert kinds == {".py"}


def test_wheel_of_the_lab_holds_weights_and_recipes(wheel: Built) -> None:
    must = {
        "embedded/weights/cats.safetensors",
        "embedded/weights/taef2_encoder.safetensors",
        "embedded/weights/taef2_decoder.safetensors",
        "embedded/weights/LICENSE-TAEF2",
        "embedded/recipes/cats-close.json",
        "quality/weights/lpips_alex.safetensors",
        "quality/weights/LICENSE",
    }
    assert {f"nearfield_lab/{file}" for file in must} <= set(wheel("nearfield-lab").files)


@BOTH
def test_wheel_says_its_version_and_what_it_always_needs(wheel: Built, name: str) -> None:
    facts = wheel(name).facts
    assert (facts["Name"], facts["Version"]) == (name, nearfield.__version__)
    always = [line for line in facts.get_all("Requires-Dist", []) if "extra ==" not in line]
    if name == "nearfield":
        assert always == ["torch>=2.11"]
    else:
        assert f"nearfield[diffusers,retrieval]=={nearfield.__version__}" in always


def test_entry_points(wheel: Built) -> None:
    """The library has the command; the lab adds to it."""
    assert wheel("nearfield").entry_points == {"console_scripts": {"nearfield": "nearfield.cli:main"}}
    assert wheel("nearfield-lab").entry_points == {
        "nearfield.commands": {"lab": "nearfield_lab.commands:add_commands"},
        "nearfield.recipes": {"lab": "nearfield_lab"},
    }


def test_wheels_say_their_licences(wheel: Built) -> None:
    """The library's is that of its code alone; the lab's names those of its weights, whose notes are in it."""
    for name in PROJECTS:
        assert set(wheel(name).facts.get_all("License-File", [])) == LICENCE_FILES[name]
    assert wheel("nearfield").facts["License-Expression"] == "Apache-2.0"
    readmes = [ROOT / "lab" / file for file in LICENCE_FILES["nearfield-lab"] if file.endswith(".md")]
    notes = [note for path in readmes for note in weights.notes(path)]
    licences = {record["licence"] for record in notes}
    assert "CC-BY-NC-4.0" in licences
    expression = " AND ".join(sorted({"Apache-2.0"} | licences))
    assert wheel("nearfield-lab").facts["License-Expression"] == expression
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert expression in readme.partition("## Licence")[2]


# In a checkout '.[extra]' and './lab[extra]'; elsewhere by name.
NAMED = re.compile(r"'(\.|\./lab|nearfield|nearfield-lab)\[([\w,]+)\]'")


def named_extras() -> Iterator[tuple[str, str]]:
    """Projects and extras that pages, examples and messages name; `MissingExtra` puts the lab's into its message."""
    pages = [
        path for folder in (".", "docs", "comfy", "lab", "examples") for path in (ROOT / folder).glob("*.*")
    ]
    code = [path for folder in (*SOURCES.values(), ROOT / "benchmarks") for path in folder.rglob("*.py")]
    for path in [*pages, *code]:
        if path.suffix in (".py", ".md", ".ipynb"):
            text = path.read_text(encoding="utf-8")
            for project, extras in NAMED.findall(text):
                name = "nearfield-lab" if "lab" in project else "nearfield"
                yield from ((name, extra) for extra in extras.split(","))
            if path.suffix == ".py" and "MissingExtra(" in text:
                yield from (("nearfield-lab", extra) for extra in extras_of_errors(ast.parse(text)))


def extras_of_errors(tree: ast.Module) -> Iterator[str]:
    """`extra` of each `MissingExtra(package, error, extra)`, where it is given."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "MissingExtra":
            by_name = [keyword.value for keyword in call.keywords if keyword.arg == "extra"]
            yield from (ast.literal_eval(value) for value in [*call.args[2:3], *by_name])


def test_extras_that_messages_and_pages_name_are_the_wheels(wheel: Built) -> None:
    """pip ignores a name that is no extra."""
    named = set(named_extras())
    for name, extras in (
        ("nearfield", {"diffusers", "retrieval", "triton"}),
        ("nearfield-lab", {"drawings", "train", "quality", "studio", "ray"}),
    ):
        assert extras <= {extra for project, extra in named if project == name}
    for name, extra in named - {("nearfield", "extra"), ("nearfield-lab", "extra")}:  # "extra" stands for any
        assert extra in wheel(name).facts.get_all("Provides-Extra", []), (name, extra)


def test_lower_bounds_are_what_is_tried() -> None:
    """`make package` and `make smoke` install what this prints; pages name the same versions."""
    call = [sys.executable, str(ROOT / ".ci" / "lowest.py"), "torch", "diffusers", "transformers", "peft"]
    lines = subprocess.run(call, capture_output=True, text=True, check=True).stdout.splitlines()
    lowest = dict(line.split("==") for line in lines)
    assert set(lowest) == {"torch", "diffusers", "transformers", "peft"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("torch", "diffusers", "transformers"):
        assert f"{name} {lowest[name]} or later" in readme
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"`diffusers` ({lowest['diffusers']} or later)" in page


@BOTH
def test_sdist_holds_what_its_wheel_is_built_from(name: str, tmp_path: Path) -> None:
    """Nothing else: pictures and weights elsewhere in the repository have other licences."""
    with tarfile.open(build("sdist", PROJECTS[name], tmp_path)) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    about = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore", "CHANGELOG.md"}
    assert {file for file in held if file.startswith("src/")} == {
        f"src/{file}" for file in package_files(name)
    }
    assert {file for file in held if not file.startswith("src/")} <= about
