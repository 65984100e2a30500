"""The commands of the lab, one module for each family. Loading them loads neither diffusers nor matplotlib."""

from pathlib import Path
from typing import Any

from nearfield.cli import weights
from nearfield_lab.commands import (
    generating,
    retrieving,
    sampling,
    serving,
    showing,
    training,
    tuning,
)


def add_commands(commands: Any) -> None:
    """What the entry point `nearfield.commands` names."""
    lab = Path(__file__).resolve().parents[1]
    for room in ("embedded", "quality"):
        weights.add_folder(lab / room / "weights")
    for family in (generating, serving, showing, retrieving, sampling, training, tuning):
        family.add_commands(commands)
    _add_quality(commands)


def _add_quality(commands: Any) -> None:
    from nearfield.cli import machine
    from nearfield_lab.quality.command import add_command

    add_command(commands, machine.facts)
