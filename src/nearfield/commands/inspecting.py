"""`nearfield doctor`, `explain`, `demo` and `show`: what there is, without measuring it."""

import argparse
import json
import math
from typing import Any

from nearfield.bench import presets
from nearfield.commands.arguments import (
    FAILED,
    GRAINS,
    OK,
    QUERY_BLOCKS,
    UsageError,
    command,
    grid_name,
    grid_sides,
    layer_numbers,
    member,
    output_file,
    preset_name,
    wrong,
)
from nearfield.commands.options import METHOD_FIELDS, add_integer, add_method_fields, given
from nearfield.commands.reports import picture_path

# What `explain` builds at most: a preview counts every block, and the figures take some forty bytes per listed id.
_MOST_BLOCKS, _MOST_IDS = 2**29, 2**26
_MOST_DRAWN, _MOST_LAYERS, _MOST_TILES = 2**16, 8, 2**12
_FIRST_LAYERS = [0, 1, 2, 3]


def add_commands(commands: Any) -> None:
    _add_doctor(commands)
    _add_explain(commands)
    _add_demo(commands)
    _add_show(commands)


def _doctor(arguments: argparse.Namespace) -> int:
    from nearfield.bench import doctor

    report = doctor.examine()
    print(json.dumps(report, indent=1) if arguments.json else doctor.text(report))
    return OK if report["ok"] else FAILED


def _explain(arguments: argparse.Namespace) -> int:
    preset = presets.PRESETS[arguments.preset].changed(arguments.grid, arguments.text, arguments.heads)
    _require_fit(preset, arguments.tiles, arguments.q_block, arguments.k_block)
    from nearfield.bench import explain

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


def _demo(arguments: argparse.Namespace) -> int:
    if len(arguments.grid) != 2:
        wrong("--grid", "have two sides to be drawn", grid_name(arguments.grid), "Example: --grid 64x64")
    if math.prod(arguments.grid) > _MOST_DRAWN:
        wrong("--grid", f"hold at most {_MOST_DRAWN:,} tokens to be drawn", f"{math.prod(arguments.grid):,}")
    picture = picture_path(arguments.out, output_file("--out", ".png")("nearfield-demo.png"))
    from nearfield.bench import demo

    preset = demo.preset_for(arguments.grid)
    if picture:
        demo.draw(picture, preset, arguments.tiles)
        print(f"wrote {picture}")
    text, passed = demo.speed_table(preset, arguments.tiles)
    print(text)
    return OK if passed else FAILED


def _show(arguments: argparse.Namespace) -> int:
    _require_drawable(arguments)
    picture = picture_path(arguments.out, output_file("--out", ".png", ".svg")("nearfield-show.png"))
    from nearfield import Geometry, Hilbert
    from nearfield.bench import show

    try:
        geometry = Geometry(arguments.grid, text=arguments.text)
        method = Hilbert(**given(arguments, METHOD_FIELDS))
        layers = arguments.layer or ([0] if method.reads_alike else _FIRST_LAYERS)
        shown = show.examine(geometry, method, layers, arguments.q_block)
        report = show.record(shown)
    except ValueError as error:  # fields that do not go together, or not with this grid
        raise UsageError(str(error)) from None
    if picture:
        show.draw(picture, shown)
    if arguments.json:
        print(json.dumps(report | {"picture": str(picture) if picture else None}, indent=1))
    else:
        print(report["description"] + (f"\nwrote {picture}" if picture else ""))
    return OK


def _require_drawable(arguments: argparse.Namespace) -> None:
    grid, tokens = arguments.grid, math.prod(arguments.grid)
    if len(grid) == 1:
        wrong("--grid", "have two or three sides to be drawn", grid_name(grid), "Example: --grid 64x64")
    if tokens > _MOST_DRAWN:
        wrong("--grid", f"hold at most {_MOST_DRAWN:,} tokens to be drawn", f"{tokens:,}")
    if len(arguments.layer or ()) > _MOST_LAYERS:
        wrong("--layer", f"name at most {_MOST_LAYERS} layers to be drawn", len(arguments.layer))


def _add_doctor(commands: Any) -> None:
    summary = "versions, devices, licences of weights, which implementation runs and why, and a self-check"
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


def _add_demo(commands: Any) -> None:
    parser = command(
        commands,
        "demo",
        _demo,
        "draw the curve, the tiles and the mask, and print what they save on this machine",
        "  nearfield demo\n  nearfield demo --grid 45x80 --tiles 9 --out tiles.png",
    )
    parser.add_argument(
        "--grid",
        type=grid_sides,
        default=(64, 64),
        metavar="HxW",
        help="image tokens per side (default 64x64)",
    )
    add_integer(parser, "--tiles", 16, "tiles along the curve")
    parser.add_argument(
        "--out",
        type=output_file("--out", ".png"),
        metavar="FILE",
        help="the picture (default nearfield-demo.png)",
    )


def _add_show(commands: Any) -> None:
    parser = command(
        commands,
        "show",
        _show,
        "draw the Hilbert method on an image: the curve, blocks or tiles of layers, what is shared, who reads whom",
        "  nearfield show\n  nearfield show --grid 64x64 --near tile --layer 0..3 --shared centre --share keys\n"
        "  nearfield show --grid 21x30x52 --text 0 --shared distributed --out video.svg\n"
        "  nearfield show --grid 45x80 --near tile --tiles 9 --far 64 --q-block 64 --json",
    )
    parser.add_argument(
        "--grid",
        type=grid_sides,
        default=(64, 64),
        metavar="HxW",
        help="image tokens per side, or frames x height x width, of which some frames are drawn (default 64x64)",
    )
    add_integer(parser, "--text", 512, "text tokens", least=0, most=2**13)
    parser.add_argument(
        "--layer",
        type=layer_numbers("--layer"),
        metavar="N..N",
        help="layers to draw: 2, 0,2 or 0..3 (default 0..3, or 0 where all layers read alike)",
    )
    add_method_fields(parser, _MOST_TILES)
    parser.add_argument(
        "--q-block",
        type=member("--q-block", QUERY_BLOCKS),
        metavar="N",
        help="queries per list, to which tiles are rounded (default 16; on a GPU 128; with --near around 16 to 128)",
    )
    parser.add_argument(
        "--out",
        type=output_file("--out", ".png", ".svg"),
        metavar="FILE",
        help="the picture, .png or .svg (default nearfield-show.png)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
