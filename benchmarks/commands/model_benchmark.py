"""`python -m benchmarks model`: a denoising step of a real architecture."""

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.commands.fields import METHOD_FIELDS, PLACEMENTS, add_method_fields, given
from nearfield.cli import model_cases
from nearfield.cli.arguments import (
    FAILED,
    GRAINS,
    INTERRUPTED,
    QUERY_BLOCKS,
    UsageError,
    block_counts,
    comma_list,
    command,
    member,
    pixels,
    share,
    wrong,
)
from nearfield.cli.options import add_impl, add_integer, add_json
from nearfield.cli.reports import collect, verdict, write_reports

if TYPE_CHECKING:
    from benchmarks.model import ModelBench

_MERGE_FIELDS = ("ratio", "region_size", "placement")
_FINE_FIELDS = ("query_block", "grain")


_DEFAULTS = {
    "near": "tile; with around, all that follows is by default what the method's own is",
    "tiles": "16; 64 of large images",
    "shared": "centre, keys only",
    "far": "0",
    "summary": "mean",
}


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "model",
        _bench_model,
        "time one denoising step of a real architecture with random weights: dense, with a method, and with no"
        " attention at all",
        "  python -m benchmarks model --tiny\n  python -m benchmarks model --sizes 1024,2048,4096 --json model.json\n"
        "  python -m benchmarks model --layers 2+4 --sizes 1024 --share two-way --tiles 4\n"
        "  python -m benchmarks model --sizes 2048 --method merge+hilbert --ratio 0.5\n"
        "  python -m benchmarks model --model wan21-1.3b --sizes 480p,720p --method fine --skipped 0.7,0.9",
    )
    parser.add_argument(
        "--model",
        type=member("--model", model_cases.MODELS),
        default=model_cases.MODELS[0],
        metavar="NAME",
        help=f"one of {', '.join(model_cases.MODELS)} (default {model_cases.MODELS[0]})",
    )
    parser.add_argument(
        "--sizes",
        type=comma_list(pixels("--sizes")),
        metavar="N,HxW",
        help="pixels of the images or videos (default 1024,2048,4096; of Wan 480p,720p)",
    )
    parser.add_argument(
        "--layers",
        type=block_counts,
        metavar="N+N",
        help="fewer layers: double-stream + single-stream blocks; of Wan one number",
    )
    parser.add_argument("--tiny", action="store_true", help="a few narrow layers and a small image")
    parser.add_argument(
        "--method",
        type=member("--method", model_cases.METHODS),
        metavar="NAME",
        help=f"one of {', '.join(model_cases.METHODS)} (default hilbert; of Wan fine)",
    )
    parser.add_argument(
        "--ratio",
        type=share("--ratio"),
        metavar="X",
        help="share of the image tokens that is merged away (default 0.5)",
    )
    add_integer(parser, "--region-size", None, "tokens that merge among themselves")
    parser.add_argument(
        "--placement",
        type=member("--placement", PLACEMENTS),
        metavar="WHERE",
        help=f"around what tokens are merged: {' or '.join(PLACEMENTS)} (default block)",
    )
    parser.add_argument(
        "--skipped",
        type=comma_list(share("--skipped")),
        metavar="X,X",
        help=f"shares of the keys that fine skips (default {model_cases.SKIPPED})",
    )
    parser.add_argument(
        "--query-block",
        type=member("--query-block", QUERY_BLOCKS),
        metavar="N",
        help="queries that share a list of keys (default 128)",
    )
    parser.add_argument(
        "--grain",
        type=member("--grain", GRAINS),
        metavar="N",
        help="keys that are kept or skipped together (default 4)",
    )
    # A row tells the pairs of one layer.
    add_method_fields(parser, by_layer=False, defaults=_DEFAULTS)
    add_impl(parser)
    add_integer(parser, "--rounds", 5, "turns in which everything is timed", least=2, most=1000)
    add_json(parser)


def _model_case(arguments: argparse.Namespace) -> model_cases.ModelCase:
    """What was asked for; fields that the method, or the model, does not have are refused."""
    known = model_cases.ARCHITECTURES[arguments.model]
    method = arguments.method or known.methods[0]
    if method not in known.methods:
        hint = f"Methods for {arguments.model}: {', '.join(known.methods)}."
        wrong("--method", f"go with `--model {arguments.model}`", repr(method), hint)
    if arguments.layers and len(arguments.layers) != len(known.layers):
        count, example = ("two numbers of blocks joined by +", "2+4")
        if len(known.layers) == 1:
            count, example = ("one number of blocks", "4")
        got = repr("+".join(map(str, arguments.layers)))
        wrong("--layers", f"be {count}", got, f"Example: --layers {example}")

    def allowed(names: Sequence[str], is_allowed: bool) -> dict[str, Any]:
        found = given(arguments, names)
        if found and not is_allowed:
            name = next(iter(found))
            wrong(f"--{name.replace('_', '-')}", f"be left out with `--method {method}`", found[name])
        return found

    shares = allowed(("skipped",), method == "fine").get("skipped", (model_cases.SKIPPED,))
    return model_cases.ModelCase(
        arguments.model,
        arguments.layers,
        arguments.tiny,
        allowed(METHOD_FIELDS, "hilbert" in method),
        method,
        allowed(_MERGE_FIELDS, "merge" in method),
        allowed(_FINE_FIELDS, method == "fine"),
        tuple(shares),
    )


def _bench_model(arguments: argparse.Namespace) -> int:
    case = _model_case(arguments)
    sizes = [case.size(*size) for size in arguments.sizes or ()] or case.sizes
    _check_fields(case, sizes)
    from benchmarks import model, model_report, random_model
    from benchmarks.progress import Progress
    from nearfield.cli import machine

    with Progress(len(sizes) + 2) as progress:
        progress.step(f"making {arguments.model} with random weights")
        bench = _made(arguments, case)
        progress.step("checking outputs")
        checked = bench.check(model.check_size(sizes))
        if not checked.passed:
            print(f"no figures: {checked}")
            return FAILED
        parameters, facts = random_model.num_parameters(bench.model), machine.facts()

        def document(results: list[model.ModelResult]) -> dict[str, Any]:
            return model_report.as_json(results, checked, parameters, facts)

        def measured() -> Iterator[model.ModelResult]:
            for size in sizes:
                progress.step(f"{size}: {size.tokens + case.text:,} tokens")
                yield from bench.run(size)

        results, is_whole = collect(measured(), document, arguments.json)
    if not is_whole:
        print("interrupted; what was measured until then:")
    print(model_report.heading(case, parameters, machine.device_name(bench.device), bench.dtype))
    print(model_report.results_table(results))
    print(f"checked: {checked}")
    written = write_reports(document(results), arguments.json)
    return verdict(results, written) if is_whole else INTERRUPTED


def _check_fields(case: model_cases.ModelCase, sizes: Sequence[model_cases.Size]) -> None:
    """Before a model is made, which takes long: fields that do not go together."""
    from nearfield import Hilbert

    try:
        for size in sizes if "hilbert" in case.method else ():
            Hilbert(**case.method_fields(size))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _made(arguments: argparse.Namespace, case: model_cases.ModelCase) -> "ModelBench":
    """The model, where it can be made here."""
    from benchmarks import random_model
    from benchmarks.model import ModelBench
    from nearfield.cli import machine
    from nearfield.cli.timing import Effort

    effort = Effort(arguments.rounds, seconds=0.4 * arguments.rounds, most=10)
    try:
        return ModelBench(case, machine.default_device(), effort, arguments.impl)
    except random_model.MissingDiffusers as error:
        raise UsageError(str(error)) from None
    except random_model.TooLarge as error:
        fewer = "+".join(map(str, case.architecture.tiny_layers))
        wrong("--model", "fit into memory", error, f"Use --layers {fewer} for fewer layers, or --tiny.")
