"""The attention of a model on pixels on the command line: its name, and its fields."""

import argparse
from typing import Any

from nearfield.cli.arguments import ORDERS, integer, member, wrong
from nearfield.cli.options import given
from nearfield_lab.embedded.pixel_cases import ATTENTION


def add_attention(parser: argparse.ArgumentParser) -> None:
    """`--attention`, and the fields of the methods it names."""
    parser.add_argument(
        "--attention",
        type=member("--attention", tuple(ATTENTION)),
        default="full",
        metavar="NAME",
        help=f"who reads whom: {', '.join(ATTENTION)} (default full)",
    )
    add_attention_fields(parser)


def add_attention_fields(parser: argparse.ArgumentParser) -> None:
    for name, least, words in (
        ("--block", 2, "tokens that are pooled, and chosen, together"),
        ("--topk", 1, "blocks that a query chooses (at each level)"),
        ("--enrich", 0, "up to which level summaries are read; for loglinear"),
    ):
        parser.add_argument(name, type=integer(name, least), metavar="N", help=words)
    parser.add_argument(
        "--unweighted",
        dest="weighted",
        action="store_const",
        const=False,
        help="a summary counts once, not as many times as it stands for tokens; for loglinear",
    )
    parser.add_argument(
        "--levels", type=_levels, metavar="N", help="pooled levels, or auto (default auto); for loglinear"
    )
    parser.add_argument(
        "--order",
        type=member("--order", ORDERS),
        metavar="NAME",
        help=f"of the tokens: {', '.join(ORDERS)} (default hilbert)",
    )


def attention_of(arguments: argparse.Namespace, name: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The attention that was asked for, and its fields; a field that it does not have is refused."""
    attention = name or arguments.attention
    every = {field for fields in ATTENTION.values() for field in fields}
    fields = given(arguments, sorted(every))
    for field, value in fields.items():
        if field not in ATTENTION[attention]:
            option = "unweighted" if field == "weighted" else field
            wrong(f"--{option}", f"be left out with `--attention {attention}`", value)
    return attention, fields


def _levels(text: str) -> int | str:
    return text if text == "auto" else integer("--levels", 1)(text)
