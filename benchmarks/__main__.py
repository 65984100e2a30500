"""`python -m benchmarks NAME`: run it from the root of a checkout; `-h` lists the names."""

import sys

from benchmarks.commands import add_commands
from nearfield.cli.main import run_family

sys.exit(run_family("python -m benchmarks", "Measure on this machine.", add_commands))
