"""The weights inside this package: of what they were made, and under which licence."""

import re
from collections.abc import Iterator
from pathlib import Path

import nearfield

_FOLDERS = ("demo/weights", "quality/weights")
_COLUMNS = ("what", "made_of", "licence", "use")


def embedded() -> list[dict[str, str]]:
    """A record for each file of weights that comes with the package."""
    package = Path(nearfield.__file__).parent
    return [record | {"folder": name} for name in _FOLDERS for record in notes(package / name / "README.md")]


def notes(readme: Path) -> Iterator[dict[str, str]]:
    """The rows of a README's table of files, a record for each name or pattern of a name in the first column."""
    for line in readme.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
            for name in re.findall(r"`([^`]+)`", first):
                yield {"file": name} | dict(zip(_COLUMNS, others, strict=True))
