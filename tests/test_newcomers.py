"""A new method is one file: dropped into the library, everything that knows methods knows it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_layers import broken_arrows

pytest.importorskip("diffusers")

ROOT = Path(__file__).resolve().parents[1]
FILES = {"radial": 40, "nearest": 50}
"""Newcomers, and how many lines their file may have: the geometry decides, or content does."""


def test_one_file_is_all_that_a_method_needs(tmp_path: Path) -> None:
    copy = tmp_path / "src"
    shutil.copytree(
        ROOT / "src" / "nearfield", copy / "nearfield", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, most in FILES.items():
        file = ROOT / "tests" / "newcomers" / f"{name}.py"
        assert len(file.read_text(encoding="utf-8").splitlines()) < most
        shutil.copy(file, copy / "nearfield" / "methods")
    assert broken_arrows(copy / "nearfield") == []
    places = os.pathsep.join(map(str, (copy, ROOT / "lab" / "src", ROOT)))
    # Before anything puts the checkout in front of the copy.
    program = "import runpy, nearfield; runpy.run_module('tests.newcomers.walk', run_name='__main__')"
    command = [sys.executable, "-c", program, str(copy), *FILES]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[-3:-1] == [f"{name}: walked" for name in FILES]
