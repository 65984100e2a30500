"""The documentation builds as a site, with every link and anchor in its place."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs")
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {
        "start",
        "DESIGN",
        "CONTRIBUTING",
        "CHANGELOG",
    }
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert "key_bias" in api, "signatures are missing"
    for path in tmp_path.rglob("*.html"):
        page = path.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"?(https?:[^\" >]*)", page)
        assert not fetched, f"{path.name} needs a network"
        assert "arithmatex" not in page, f"{path.name} has a formula that was not drawn"
