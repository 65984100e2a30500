"""The lower bounds of both projects as constraints for pip: `python .ci/lowest.py [package ...]` prints them.

`make package` and `make smoke` install these versions, so that the bounds are what was tried.
"""

import re
import sys
from itertools import chain
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECTS = (ROOT / "pyproject.toml", ROOT / "lab" / "pyproject.toml")
_BOUND = re.compile(r"([\w-]+)>=([\d.]+)")


def lowest() -> dict[str, str]:
    """The version that each package with a bound begins with. One package has one bound, in all extras of both."""
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in PROJECTS]
    needs = chain.from_iterable(
        chain(project["dependencies"], *project["optional-dependencies"].values()) for project in projects
    )
    bounds = {match.groups() for need in needs if (match := _BOUND.match(need))}
    named = dict(sorted(bounds))
    assert len(named) == len(bounds), f"a package has two lower bounds: {sorted(bounds)}"
    return named


if __name__ == "__main__":
    asked = sys.argv[1:]
    for name, version in lowest().items():
        if not asked or name in asked:
            print(f"{name}=={version}")
