"""`python -m nearfield` is the command `nearfield`."""

import sys

from nearfield.cli.main import main

sys.exit(main())
