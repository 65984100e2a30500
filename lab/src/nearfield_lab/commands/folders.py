"""Folders of numbered pictures that a command fills and another run of it goes on with."""

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nearfield.cli import wrong

_SETTINGS = "settings.json"


def check_settings(argument: str, folder: Path, settings: dict[str, Any]) -> None:
    """A folder holds the pictures of one model and one way of making them."""
    from nearfield._files import write_json

    path, rule = folder / _SETTINGS, "hold pictures of the same settings, or none"
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        if next(folder.glob("*.png"), None) is not None:
            wrong(
                argument,
                rule,
                f"{folder}, whose pictures do not say how they were made",
                "Name another folder.",
            )
        write_json(path, settings)
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        wrong(argument, rule, f"{folder}, where {_SETTINGS} is no JSON", "Name another folder.")
    for name, value in settings.items():
        if known.get(name) != value:
            got = f"{folder}, made with {name} = {known.get(name)} instead of {value}"
            wrong(argument, rule, got, "Name another folder.")


def missing_pictures(folder: Path, numbers: Iterable[int]) -> list[int]:
    """The numbers of which there is no whole picture."""
    from nearfield_lab.embedded.pictures import is_whole, numbered

    numbers = list(numbers)
    with ThreadPoolExecutor() as readers:
        found = readers.map(lambda number: is_whole(numbered(folder, number)), numbers)
        return [number for number, is_there in zip(numbers, found, strict=True) if not is_there]


def run_length(numbers: Sequence[int], most: int) -> int:
    """How many of ascending numbers follow the first one without a gap, itself counted."""
    count = 1
    while count < min(most, len(numbers)) and numbers[count] == numbers[0] + count:
        count += 1
    return count


def runs_of(numbers: Sequence[int], most: int) -> list[range]:
    """Ascending numbers as ranges of at most `most`."""
    ranges, place = list[range](), 0
    while place < len(numbers):
        count = run_length(numbers[place : place + most], most)
        ranges.append(range(numbers[place], numbers[place] + count))
        place += count
    return ranges
