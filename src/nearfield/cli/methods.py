"""Fields of a method on the command line, and the method they make."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nearfield.cli.arguments import UsageError, integer, member, number, wrong
from nearfield.cli.options import METHOD_FIELDS, add_method_fields, given

if TYPE_CHECKING:
    from nearfield.methods import DenseSteps, Recipe

METHODS = ("hilbert", "dense")
OTHERS = {"loglinear": "LogLinear", "fine": "FineGrained", "blocks": "BlockTopK", "merge": "Merge"}
"""Further methods, by their public names."""

_FIELDS = (*METHOD_FIELDS, "cycle", "dense_layers", "dense_steps")


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """`--recipe`, in the place of a method and its fields."""
    from nearfield.methods import recipes

    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"method and fields from a recipe: one that ships ({', '.join(recipes.names())}), or a file"
        " of `nearfield tune`",
    )


def add_method(parser: argparse.ArgumentParser, default: str, *, others: bool = False) -> None:
    """`--method`, and all fields of the Hilbert method.

    Args:
        others: take further methods, too. Of the fields these have dense layers and steps; a recipe says the rest.
    """
    names = (*METHODS, *OTHERS) if others else METHODS
    rest = "; fields of others than hilbert stand in a --recipe" if others else ""
    parser.add_argument(
        "--method",
        type=member("--method", names),
        default=default,
        metavar="NAME",
        help=f"who reads whom: {', '.join(names[:-1])} or {names[-1]} (default {default}){rest}",
    )
    add_method_fields(parser)
    parser.add_argument(
        "--cycle",
        type=integer("--cycle", 1, 64),
        metavar="N",
        help="layers after which tiles are back (default 4)",
    )
    parser.add_argument(
        "--dense-layers",
        type=dense_layers,
        metavar="N",
        help="how many first layers stay dense, or which: 0,4,-1 (default 0; a comma makes it a list: 4,)",
    )
    parser.add_argument(
        "--dense-steps",
        type=dense_steps,
        metavar="N",
        help="how many first steps stay dense, or, below 1, which share of them (default 0.15); two numbers, 1,2: of"
        " the first and of the last steps",
    )


def method_of(arguments: argparse.Namespace, **defaults: Any) -> Any:
    """The method that was asked for; None for dense.

    Args:
        defaults: fields of Hilbert that the command sets where the user does not.
    """
    from nearfield import methods

    name = arguments.method
    kind = None if name == "dense" else getattr(methods, OTHERS.get(name, "Hilbert"))
    own = () if kind is None else tuple(each.name for each in fields(kind))
    _refuse_fields(arguments, f"--method {name}", own)
    if kind is None:
        return None
    try:
        return kind(**((defaults if name == "hilbert" else {}) | given(arguments, _FIELDS)))
    except (TypeError, ValueError) as error:  # fields that do not go together
        raise UsageError(str(error)) from None


def recipe_of(arguments: argparse.Namespace, **defaults: Any) -> "Recipe | None":
    """The recipe that was named, or one of the method that was asked for; None for dense.

    Args:
        defaults: as for `method_of`.
    """
    from nearfield.methods import recipes

    if arguments.recipe is None:
        method = method_of(arguments, **defaults)
        return None if method is None else recipes.recipe_of(method)
    _refuse_fields(arguments, "--recipe")
    if arguments.method != METHODS[0]:
        wrong("--method", "be left out with `--recipe`", arguments.method)
    try:
        return recipes.recipe_of(arguments.recipe)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("`recipe`", "`--recipe`")) from None


def _refuse_fields(arguments: argparse.Namespace, beside: str, own: Sequence[str] = ()) -> None:
    """All but those that a method has of its own."""
    for name, value in given(arguments, [name for name in _FIELDS if name not in own]).items():
        wrong(f"--{name.replace('_', '-')}", f"be left out with `{beside}`", value)


def dense_layers(text: str, argument: str = "--dense-layers") -> int | tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part]
    if not numbers or not all(part.lstrip("-").isdecimal() for part in numbers):
        wrong(argument, "be a number, or numbers between commas", repr(text), "Example: 0,4,-1")
    if len(parts) == 1 and not numbers[0].startswith("-"):
        return int(numbers[0])
    return tuple(map(int, numbers))


def dense_steps(text: str, argument: str = "--dense-steps") -> "DenseSteps":
    def end(text: str) -> int | float:
        value = number(argument, least=0.0)(text.strip())
        return int(value) if value.is_integer() else value

    first, comma, last = text.partition(",")
    return (end(first), end(last)) if comma else end(first)
