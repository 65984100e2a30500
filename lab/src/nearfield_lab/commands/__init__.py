"""The commands of the lab, one module for each family. Loading them loads neither diffusers nor matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfield.cli import UsageError, add_drawer, weights
from nearfield_lab.commands import (
    generating,
    retrieving,
    serving,
    training,
    tuning,
)

if TYPE_CHECKING:
    from nearfield import Geometry, Method


def add_commands(commands: Any) -> None:
    """What the entry point `nearfield.commands` names."""
    lab = Path(__file__).resolve().parents[1]
    for room in ("embedded", "quality"):
        weights.add_folder(lab / room / "weights")
    add_drawer(_draw_method)
    for family in (generating, serving, retrieving, training, tuning):
        family.add_commands(commands)
    _add_quality(commands)


def _draw_method(path: Path, geometry: "Geometry", method: "Method", layers: Sequence[int]) -> None:
    """What `nearfield explain --plot` draws."""
    from nearfield_lab.commands.drawing import require_drawing
    from nearfield_lab.plots import show

    require_drawing("--plot")
    try:
        show.require_drawable(geometry, layers)
        shown = show.examine(geometry, method, layers)
    except ValueError as error:
        raise UsageError(str(error)) from None
    show.draw(path, shown)


def _add_quality(commands: Any) -> None:
    from nearfield.cli import machine
    from nearfield_lab.quality.command import add_command

    add_command(commands, machine.facts)
