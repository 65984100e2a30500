"""The weights that installed packages bring: of what they were made, and under which licence."""

import re
from collections.abc import Iterator
from pathlib import Path

_FOLDERS: list[Path] = []
_COLUMNS = ("what", "made_of", "licence", "use")


def add_folder(folder: Path) -> None:
    """Know the weights in a folder, whose README.md has a table of them."""
    if folder not in _FOLDERS:
        _FOLDERS.append(folder)


def embedded() -> list[dict[str, str]]:
    """A record for each file of weights that comes with an installed package."""
    return [
        record | {"folder": folder.parent.name + "/" + folder.name}
        for folder in _FOLDERS
        for record in notes(folder / "README.md")
    ]


def notes(readme: Path) -> Iterator[dict[str, str]]:
    """The rows of a README's table of files, a record for each name or pattern of a name in the first column."""
    for line in readme.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
            for name in re.findall(r"`([^`]+)`", first):
                yield {"file": name} | dict(zip(_COLUMNS, others, strict=True))
