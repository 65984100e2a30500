"""The command `nearfield`: what there is on this machine, who reads whom, and how fast.

Installed packages add commands by the entry points `nearfield.commands`: functions that are given the subparsers. What
their commands share with these is exported here.
"""

from nearfield.cli import bench, check, machine, presets, reports, timing, weights
from nearfield.cli.arguments import (
    FAILED,
    INTERRUPTED,
    OK,
    UsageError,
    as_usage,
    comma_list,
    command,
    input_file,
    integer,
    member,
    number,
    output_file,
    show_help_without_command,
    wrong,
)
from nearfield.cli.drawing import add_drawer
from nearfield.cli.main import main, run_family
from nearfield.cli.methods import DENSE, add_method, method_of, recipe_of, settings_of
from nearfield.cli.options import (
    DEVICE_WORDS,
    TakesOptions,
    add_device,
    add_impl,
    add_integer,
    add_json,
    add_number,
    add_plot,
    add_weights,
    device_of,
)
from nearfield.cli.progress import Bar, time_for
from nearfield.cli.reports import note_load, write_all, write_reports

__all__ = [
    "DENSE",
    "DEVICE_WORDS",
    "FAILED",
    "INTERRUPTED",
    "OK",
    "Bar",
    "TakesOptions",
    "UsageError",
    "add_device",
    "add_drawer",
    "add_impl",
    "add_integer",
    "add_json",
    "add_method",
    "add_number",
    "add_plot",
    "add_weights",
    "as_usage",
    "bench",
    "check",
    "comma_list",
    "command",
    "device_of",
    "input_file",
    "integer",
    "machine",
    "main",
    "member",
    "method_of",
    "note_load",
    "number",
    "output_file",
    "presets",
    "recipe_of",
    "reports",
    "run_family",
    "settings_of",
    "show_help_without_command",
    "time_for",
    "timing",
    "weights",
    "write_all",
    "write_reports",
    "wrong",
]
