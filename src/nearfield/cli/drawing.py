"""Who draws a method. The library itself draws nothing: installed packages bring it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nearfield.cli.arguments import UsageError

if TYPE_CHECKING:
    from nearfield import Geometry, Method

Draw = Callable[[Path, "Geometry", "Method", Sequence[int]], None]
"""Draws layers of a method on a geometry to a file; a UsageError says why not."""

_drawers: list[Draw] = []


def add_drawer(draw: Draw) -> None:
    """What an entry point of `nearfield.commands` calls; the last one draws."""
    _drawers.append(draw)


def drawer() -> Draw:
    """Who draws."""
    if not _drawers:
        raise UsageError("`--plot` needs nearfield-lab, which draws. Run `pip install nearfield-lab`.")
    return _drawers[-1]
