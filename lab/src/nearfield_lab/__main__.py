"""`python -m nearfield_lab` is the command `nearfield` with the commands of the lab, installed or not."""

import sys

from nearfield.cli import main
from nearfield_lab.commands import add_commands

sys.exit(main(others=[add_commands]))
