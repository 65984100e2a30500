"""`python -m nearfield` is the command `nearfield`."""

import sys

from nearfield.cli import main

sys.exit(main())
