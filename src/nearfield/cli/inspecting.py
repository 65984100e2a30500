"""`nearfield doctor` and `explain`: what there is, without measuring it."""

import argparse
import json
from typing import Any

from nearfield.cli import presets
from nearfield.cli.arguments import (
    FAILED,
    GRAINS,
    OK,
    QUERY_BLOCKS,
    command,
    grid_sides,
    member,
    preset_name,
    wrong,
)
from nearfield.cli.options import add_integer

# What `explain` builds at most: a preview counts every block, and the figures take some forty bytes per listed id.
_MOST_BLOCKS, _MOST_IDS = 2**29, 2**26


def add_commands(commands: Any) -> None:
    _add_doctor(commands)
    _add_explain(commands)


def _doctor(arguments: argparse.Namespace) -> int:
    from nearfield.cli import doctor

    report = doctor.examine()
    print(json.dumps(report, indent=1) if arguments.json else doctor.text(report))
    return OK if report["ok"] else FAILED


def _explain(arguments: argparse.Namespace) -> int:
    preset = presets.PRESETS[arguments.preset].changed(arguments.grid, arguments.text, arguments.heads)
    _require_fit(preset, arguments.tiles, arguments.q_block, arguments.k_block)
    from nearfield.cli import explain

    report, plan = explain.examine(
        preset, arguments.tiles, arguments.layer, arguments.q_block, arguments.k_block
    )
    print(json.dumps(report, indent=1) if arguments.json else explain.text(report, plan))
    return OK


def _require_fit(preset: presets.Preset, tiles: int, q_block: int, k_block: int) -> None:
    rows, columns = -(-preset.tokens // q_block), -(-preset.tokens // k_block)
    text_rows = -(-preset.text // q_block)
    read = preset.text + -(-preset.image // tiles) + q_block
    ids = text_rows * columns + (rows - text_rows) * min(columns, -(-read // k_block))
    for size, most, what in ((rows * columns, _MOST_BLOCKS, "blocks"), (ids, _MOST_IDS, "listed ids")):
        if size > most:
            wrong(
                "--grid",
                f"with `--text` make a plan of at most {most:,} {what}",
                f"about {size:,} ({preset.tokens:,} tokens in blocks of {q_block} x {k_block})",
                "Use larger --q-block and --k-block, or a smaller --grid or --text.",
            )


def _add_doctor(commands: Any) -> None:
    summary = "versions, devices, which implementation runs and why, and a self-check"
    parser = command(commands, "doctor", _doctor, summary, "  nearfield doctor\n  nearfield doctor --json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_explain(commands: Any) -> None:
    parser = command(
        commands,
        "explain",
        _explain,
        "the curve, the plan, its cost and the implementation for one attention call",
        "  nearfield explain flux-1024\n  nearfield explain flux-2048 --tiles 4 --layer 3\n"
        "  nearfield explain wan-480p --grid 21x45x80 --json",
    )
    parser.add_argument(
        "preset", metavar="PRESET", type=preset_name("PRESET"), help=f"one of {', '.join(presets.PRESETS)}"
    )
    parser.add_argument(
        "--grid", type=grid_sides, metavar="HxW", help="image tokens per side, or frames x height x width"
    )
    add_integer(parser, "--tiles", 16, "tiles along the curve")
    add_integer(parser, "--text", None, "text tokens (default: the preset's)", least=0)
    add_integer(parser, "--heads", None, "heads (default: the preset's)", most=2**16)
    add_integer(parser, "--layer", 0, "layer, which slides the tiles", least=0)
    parser.add_argument(
        "--q-block",
        type=member("--q-block", QUERY_BLOCKS),
        default=128,
        metavar="N",
        help="queries per list (default 128)",
    )
    parser.add_argument(
        "--k-block",
        type=member("--k-block", GRAINS),
        default=64,
        metavar="N",
        help="keys per id (default 64)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
