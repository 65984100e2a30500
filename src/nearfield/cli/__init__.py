"""The command `nearfield`: what there is on this machine, who reads whom, and how fast.

Installed packages add commands by the entry points `nearfield.commands`: functions that are given the subparsers.
"""

from nearfield.cli.main import main

__all__ = ["main"]
