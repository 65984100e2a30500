"""The commands of the lab, one module for each family. Loading them loads neither diffusers nor matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearfield import Geometry, Method
from nearfield.cli import add_drawer, as_usage, weights
from nearfield_lab.captured import command as capturing
from nearfield_lab.commands import (
    drawings,
    generating,
    measuring,
    retrieving,
    serving,
    training,
    tuning,
)
from nearfield_lab.plots import show
from nearfield_lab.plots.figures import require_matplotlib


def add_commands(commands: Any) -> None:
    """What the entry point `nearfield.commands` names."""
    lab = Path(__file__).resolve().parents[1]
    for room in ("embedded", "quality"):
        weights.add_folder(lab / room / "weights")
    add_drawer(_draw_method)
    for family in (generating, serving, retrieving, training, tuning, measuring, capturing, drawings):
        family.add_commands(commands)


def _draw_method(path: Path, geometry: Geometry, method: Method, layers: Sequence[int]) -> None:
    """What `nearfield explain --plot` draws."""
    require_matplotlib()
    with as_usage():
        show.require_drawable(geometry, layers)
        shown = show.examine(geometry, method, layers)
    show.draw(path, shown)
