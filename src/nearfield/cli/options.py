"""Options that several commands have, each added by one call."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nearfield.cli.arguments import (
    CURVES,
    IMPLS,
    NEAR,
    SHARED,
    SHARES,
    SUMMARIES,
    TEXT_READS,
    integer,
    member,
    number,
    output_file,
    tile_counts,
)


def add_integer(
    parser: argparse.ArgumentParser,
    name: str,
    default: int | None,
    words: str,
    least: int = 1,
    most: int = 2**24,
) -> None:
    """A whole number; its default, if it has one, is said behind the words."""
    shown = words if default is None else f"{words} (default {default})"
    parser.add_argument(name, type=integer(name, least, most), default=default, metavar="N", help=shown)


def add_number(
    parser: argparse.ArgumentParser, name: str, default: float | None, words: str, is_above: bool = False
) -> None:
    """A number of at least zero, or above it."""
    shown = words if default is None else f"{words} (default {default:g})"
    parse = number(name, least=0, is_above=is_above)
    parser.add_argument(name, type=parse, default=default, metavar="X", help=shown)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda if there is one)")


def add_impl(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--impl",
        type=member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """`--weights FILE` of the embedded model's architecture."""
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="a model of `nearfield train demo` (default: the embedded one)",
    )


METHOD_FIELDS = (
    "near",
    "tiles",
    "shared",
    "share",
    "shared_tokens",
    "curve",
    "far",
    "summary",
    "text_reads",
    "interleave",
)
METHOD_DEFAULTS = {
    "near": "around",
    "tiles": "16; around blocks: of 512 tokens or more",
    "shared": "none",
    "far": "16",
    "summary": "weighted",
}


def add_method_fields(
    parser: argparse.ArgumentParser,
    most_tiles: int = 2**24,
    *,
    by_layer: bool = True,
    defaults: Mapping[str, str] = METHOD_DEFAULTS,
) -> None:
    """Fields of the Hilbert method; what is not given is left to the method or the size.

    Args:
        by_layer: whether layers may differ in their number of tiles.
        defaults: what is said of fields that are not given.
    """

    def words(name: str) -> str:
        return f" (default {defaults[name]})" if name in defaults else ""

    parser.add_argument(
        "--near",
        type=member("--near", NEAR),
        metavar="WHAT",
        help="what a token reads exactly: the tokens around its block, or the tile it is in" + words("near"),
    )
    several = "; several numbers, 4,4,16: of the layers from the first on, the last of all that follow"
    parser.add_argument(
        "--tiles",
        type=tile_counts("--tiles", most_tiles) if by_layer else integer("--tiles", 1, most_tiles),
        metavar="N",
        help=f"tiles per image{words('tiles')}{several if by_layer else ''}",
    )
    parser.add_argument(
        "--share",
        type=member("--share", SHARES),
        metavar="HOW",
        help="whether shared tokens read everything, too (two-way), or are only read (keys)",
    )
    parser.add_argument(
        "--shared-tokens", type=integer("--shared-tokens", 1), metavar="N", help="how many tokens are shared"
    )
    parser.add_argument(
        "--far",
        type=integer("--far", 0),
        metavar="N",
        help="tokens per summary of what is not read exactly; 0: it is not read at all" + words("far"),
    )
    parser.add_argument(
        "--shared",
        type=member("--shared", SHARED),
        metavar="WHERE",
        help=f"image tokens that everyone reads: {', '.join(SHARED)}" + words("shared"),
    )
    parser.add_argument(
        "--curve",
        type=member("--curve", CURVES),
        metavar="NAME",
        help=f"one of {', '.join(CURVES)} (default auto)",
    )
    parser.add_argument(
        "--summary",
        type=member("--summary", SUMMARIES),
        metavar="HOW",
        help="of a window: its mean, or weighted by what its tokens are to the mean query" + words("summary"),
    )
    parser.add_argument(
        "--text-reads",
        type=member("--text-reads", TEXT_READS),
        metavar="WHAT",
        help="of the images: all of their tokens, or the summary of everything (default all)",
    )
    parser.add_argument(
        "--interleave", action="store_const", const=True, help="tiles differ between heads, too"
    )


def given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def add_json(parser: argparse.ArgumentParser, words: str = "write results and machine facts") -> None:
    parser.add_argument("--json", type=output_file("--json"), metavar="FILE", help=words)


def add_plot(parser: argparse.ArgumentParser, words: str, *suffixes: str) -> None:
    """`--plot FILE`."""
    endings = suffixes or (".png",)
    parser.add_argument(
        "--plot",
        type=output_file("--plot", *endings),
        metavar="FILE",
        help=f"{words} ({' or '.join(endings)})",
    )
