"""Importing the package in a fresh interpreter: it needs torch alone, loads no extra, and keeps its promises."""

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
EXTRAS = ("triton", "diffusers", "transformers", "matplotlib", "ray")

BLOCK_EXTRAS = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run_fresh(program: str) -> str:
    """What `program` prints in a new interpreter that treats warnings as errors."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_block_blocks() -> None:
    program = (
        BLOCK_EXTRAS
        + f"""
import importlib
for name in {EXTRAS}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        print(name)
"""
    )
    assert run_fresh(program).split() == list(EXTRAS)


def test_import_works_without_extras() -> None:
    assert run_fresh(BLOCK_EXTRAS + "import nearfield; print(nearfield.__version__)").strip()


def test_import_loads_no_extra_and_public_names_exist() -> None:
    """In one interpreter: what takes its time is torch."""
    program = f"""
import sys
import torch
before = set(sys.modules)
import nearfield
loaded = [name for name in {EXTRAS} if name in set(sys.modules) - before]
assert not loaded, loaded
names = nearfield.__all__
assert len(names) == len(set(names)), "a name is listed twice"
missing = [name for name in names if not hasattr(nearfield, name)]
assert not missing, missing
for name in ("apply", "attend", "Attended", "Handle", "Plan", "planning", "curves", "__version__"):
    assert name in names, name
assert callable(nearfield.attend), "the submodule `attend` hides the function"
"""
    run_fresh(program)
