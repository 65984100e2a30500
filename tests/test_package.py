"""The wheel holds the package and nothing else, the sdist what one works on it with.

Built without network, by the build backend itself. `make package` installs both and tries them.
"""

import configparser
import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import nearfield
from nearfield.cli import weights

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "nearfield"
INFO = f"nearfield-{nearfield.__version__}.dist-info"
LICENCE_FILES = {
    "LICENSE",
    "src/nearfield/demo/weights/LICENSE-TAEF2",
    "src/nearfield/demo/weights/README.md",
    "src/nearfield/quality/weights/LICENSE",
    "src/nearfield/quality/weights/README.md",
}

pytestmark = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")


def build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files() -> set[str]:
    files = (path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(SOURCE.parent).as_posix() for path in files}


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt"} | {
        f"licenses/{name}" for name in LICENCE_FILES
    }
    assert set(contents(wheel)) == package_files() | {f"{INFO}/{name}" for name in about}
    must = {"py.typed", "demo/weights/taef2_encoder.safetensors", "demo/weights/taef2_decoder.safetensors"}
    must |= {
        "demo/weights/LICENSE-TAEF2",
        "quality/weights/lpips_alex.safetensors",
        "quality/weights/LICENSE",
        "demo/recipes/cats-close.json",
    }
    assert {f"nearfield/{name}" for name in must} <= set(contents(wheel))


def test_wheel_says_what_it_is(wheel: Path) -> None:
    inside = contents(wheel)
    scripts = configparser.ConfigParser()
    scripts.read_string(inside[f"{INFO}/entry_points.txt"].decode())
    assert dict(scripts["console_scripts"]) == {"nearfield": "nearfield.cli.main:main"}
    facts = email.message_from_bytes(inside[f"{INFO}/METADATA"])
    assert facts["Version"] == nearfield.__version__
    always = [line for line in facts.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert always == ["torch>=2.11"], "torch is all that is always needed"
    assert {"diffusers", "triton", "studio"} <= set(facts.get_all("Provides-Extra", []))


def test_wheel_says_its_licences(wheel: Path) -> None:
    """Those of the code and of the weights, whose notes are in it."""
    facts = email.message_from_bytes(contents(wheel)[f"{INFO}/METADATA"])
    licences = {record["licence"] for record in weights.embedded()}
    assert "CC-BY-NC-4.0" in licences
    assert facts["License-Expression"] == " AND ".join(sorted({"Apache-2.0"} | licences))
    assert set(facts.get_all("License-File", [])) == LICENCE_FILES
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert facts["License-Expression"] in readme.partition("## Licence")[2]


def test_extras_that_messages_and_pages_name_are_the_wheels(wheel: Path) -> None:
    """`pip install 'nearfield[extra]'` adds one to what is installed; a name that is none would be ignored by pip."""
    facts = email.message_from_bytes(contents(wheel)[f"{INFO}/METADATA"])
    extras = set(facts.get_all("Provides-Extra", []))
    texts = [
        *SOURCE.rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "comfy" / "README.md",
    ]
    named = {
        extra
        for path in texts
        for names in re.findall(
            r"pip install '(?:nearfield|\.)\[([\w,]+)\]'", path.read_text(encoding="utf-8")
        )
        for extra in names.split(",")
    }
    assert {"bench", "diffusers", "studio", "triton"} <= named
    assert named - {"extra"} <= extras  # "extra" stands for any


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


def test_sdist_holds_the_package_and_what_works_on_it(tmp_path: Path) -> None:
    """What its Makefile and tests name is there; what was made on this machine is not."""
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in held if name.startswith("src/")} == {f"src/{name}" for name in package_files()}
    wanted = {
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        ".ci/run",
        "mkdocs.yml",
        "tests/tiny_models.py",
    }
    wanted |= {"comfy/nodes.py", "docs/support.py", "examples/first_look.ipynb", "benchmarks/README.md"}
    assert wanted <= held
    made = (".venv", ".cache", "dist", "site", "__pycache__")
    assert not [name for name in held if set(name.split("/")) & set(made)]
