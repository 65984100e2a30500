"""Fields of methods as options of their own, for benchmarks of one method."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from nearfield.cli.arguments import integer, member, tile_counts
from nearfield.layout.tiling import Curve, Shared
from nearfield.methods.hilbert import Near, Share, TextReads
from nearfield.methods.layers import Summary
from nearfield.methods.merge import Placement

NEAR, SHARES, SUMMARIES, TEXT_READS = map(get_args, (Near, Share, Summary, TextReads))
SHARED, CURVES, PLACEMENTS = map(get_args, (Shared, Curve, Placement))

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
