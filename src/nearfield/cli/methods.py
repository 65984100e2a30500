"""`--method`, `--set` and `--recipe`: who reads whom, the same for every command."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nearfield.cli.arguments import UsageError, wrong
from nearfield.methods import DEFAULT, Method, fields, method_classes

if TYPE_CHECKING:
    from nearfield.methods import Recipe

DENSE = "dense"
"""What stands for no method: everyone reads everyone."""


def add_method(
    parser: argparse.ArgumentParser,
    default: str = DEFAULT.name,
    *,
    takes_dense: bool = True,
    takes_recipe: bool = True,
) -> None:
    """`--method`, `--set`, and `--recipe` instead of both."""
    names = ", ".join([DENSE] * takes_dense + list(method_classes()))
    parser.set_defaults(is_method_given=False)
    parser.add_argument(
        "--method",
        action=_Method,
        default=default,
        metavar="NAME",
        help=f"who reads whom: {names}; A{fields.JOIN}B for one that merges and one that reads (default {default})",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the method; repeat it for further ones. A value is none, true, a word, a number, or numbers"
        f" between commas: dense_layers=0,4,-1. Where A{fields.JOIN}B both have the field: B.field=value."
        " `nearfield explain --method NAME` lists the fields",
    )
    if takes_recipe:
        from nearfield.methods import recipes

        parser.add_argument(
            "--recipe",
            metavar="NAME",
            help=f"method and fields from a recipe: one that ships ({', '.join(recipes.names())}), or a file of"
            " `nearfield tune`",
        )


class _Method(argparse.Action):
    """Notes that a method was named, be it the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        namespace.method, namespace.is_method_given = values, True


def settings_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What `--set` gave, by field; the last one counts."""
    found = {}
    for text in arguments.settings:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            wrong("--set", "be FIELD=VALUE", repr(text), "Example: --set dense_steps=0")
        found[name.strip()] = value
    return found


def method_of(arguments: argparse.Namespace, base: Method = DEFAULT) -> Method | None:
    """The method that was asked for; None for dense.

    Args:
        base: what fields of its class are unless they are given.
    """
    settings = settings_of(arguments)
    if arguments.method == DENSE:
        if settings:
            wrong("--set", f"be left out with `--method {DENSE}`", repr(arguments.settings[0]))
        return None
    return _made(arguments.method, settings, base)


def _made(name: str, settings: Mapping[str, str], base: Method) -> Method:
    try:
        return fields.made(name, settings, base=base)
    except (TypeError, ValueError) as error:
        words = str(error)
        for argument, option in (("`method`", "`--method`"), ("`field`", "`--set`")):
            if words.startswith(argument):
                words = words.replace(argument, option, 1)
        raise UsageError(words) from None


def recipe_of(arguments: argparse.Namespace, base: Method = DEFAULT) -> "Recipe | None":
    """The recipe that was named, or one of the method that was asked for; None for dense."""
    from nearfield import recipes

    if arguments.recipe is None:
        method = method_of(arguments, base)
        return None if method is None else recipes.recipe_of(method)
    if arguments.settings:
        wrong("--set", "be left out with `--recipe`", repr(arguments.settings[0]))
    if arguments.is_method_given:
        wrong("--method", "be left out with `--recipe`", arguments.method)
    try:
        return recipes.recipe_of(arguments.recipe)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("`recipe`", "`--recipe`")) from None


def field_lines(name: str) -> list[str]:
    """The fields of a method, or of two joined by a plus, with defaults and what they mean."""
    lines = []
    for kind in fields.kinds_of(name):
        for field in fields.fields_of(kind):
            choices = f" ({', '.join(field.choices)})" if field.choices else ""
            lines.append(f"  {field.name}={fields.shown(field.default)}{choices}: {field.help}")
    return lines
