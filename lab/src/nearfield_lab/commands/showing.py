"""`nearfield demo` and `show`: pictures of who reads whom."""

import argparse
import json
import math
from typing import Any

from nearfield.cli.arguments import (
    FAILED,
    OK,
    QUERY_BLOCKS,
    UsageError,
    command,
    grid_name,
    grid_sides,
    layer_numbers,
    member,
    output_file,
    wrong,
)
from nearfield.cli.options import METHOD_FIELDS, add_integer, add_method_fields, given
from nearfield_lab.commands.drawing import picture_path

_MOST_DRAWN, _MOST_LAYERS, _MOST_TILES = 2**16, 8, 2**12
_FIRST_LAYERS = [0, 1, 2, 3]


def add_commands(commands: Any) -> None:
    _add_demo(commands)
    _add_show(commands)


def _demo(arguments: argparse.Namespace) -> int:
    if len(arguments.grid) != 2:
        wrong("--grid", "have two sides to be drawn", grid_name(arguments.grid), "Example: --grid 64x64")
    if math.prod(arguments.grid) > _MOST_DRAWN:
        wrong("--grid", f"hold at most {_MOST_DRAWN:,} tokens to be drawn", f"{math.prod(arguments.grid):,}")
    picture = picture_path(arguments.out, output_file("--out", ".png")("nearfield-demo.png"))
    from nearfield_lab.plots import demo

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
    from nearfield_lab.plots import show

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
