"""`python -m benchmarks NAME`: run it from the root of a checkout; `-h` lists the names."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from nearfield.cli import (
    add_device,
    add_impl,
    add_integer,
    add_json,
    add_number,
    add_plot,
    comma_list,
    command,
    run_family,
)

# By name: the class, and what it measures. A benchmark is imported when it runs.
BENCHMARKS = {
    "attention": (
        "benchmarks.attention:Attention",
        "one attention call of a plan or of a method, compared with dense attention on the same tensors",
    ),
    "errors": (
        "benchmarks.errors:Errors",
        "how far methods are from dense attention on captured activations, at equal shares of pairs",
    ),
    "host": (
        "benchmarks.host:Host",
        "what one attention call costs the host: inference, training and compiled, of every method",
    ),
    "pareto": (
        "benchmarks.pareto:",
        "speed and quality of all methods in one figure, read from results of the others",
    ),
    "pictures": (
        "benchmarks.pictures:Pictures",
        "the embedded model's pictures with patterns of attention: likeness to the dense ones, and speed or FID",
    ),
    "retrieval": (
        "benchmarks.retrieval:Retrieval",
        "reuse of document caches compared with full prefill: how soon, or how near (--questions)",
    ),
    "scaling": (
        "benchmarks.scaling:Scaling",
        "one image split over ranks: what each sends, compared with ring attention and Ulysses, and what each computes",
    ),
    "step": (
        "benchmarks.step:StepBenchmark",
        "one denoising step of a real architecture with random weights: dense, with a method, and with no attention",
    ),
    "train": (
        "benchmarks.train:Train",
        "whole training steps of a transformer on pixels, in turns with full attention",
    ),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit code."""
    asked = sys.argv[1:] if words is None else words
    return run_family("python -m benchmarks", "Measure on this machine.", partial(_add, asked), asked)


def _add(asked: Sequence[str], benchmarks: Any) -> None:
    for name, (place, summary) in BENCHMARKS.items():
        kind = _loaded(place) if name in asked[:1] else None
        examples = kind.examples if kind else ""
        parser = command(benchmarks, name, partial(_run, place), summary, examples)
        if isinstance(kind, ModuleType):
            kind.add_options(parser)
        elif kind is not None:
            add_options(parser, kind)


def add_options(parser: argparse.ArgumentParser, kind: Any) -> None:
    """The options that all benchmarks have, and the benchmark's own."""
    names = ", ".join(kind.table)
    parser.add_argument(
        "--cases",
        type=comma_list(str),
        metavar="A,B",
        help=f"names of the table, or patterns of them (default: those of this device): {names}",
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="JSON",
        help=f"a case of your own, or a .json file with a list of them: name, method, fields, and any of"
        f" {', '.join(kind.defaults)}; with the name of a case of the table it changes that one",
    )
    kind.add_options(parser)
    add_impl(parser)
    parser.add_argument("--quick", action="store_true", help="small cases and few repetitions")
    add_integer(parser, "--rounds", None, "turns in which everything is timed", most=1000)
    add_number(parser, "--minutes", None, "begin no further case after this time", is_above=True)
    add_device(parser)
    add_json(parser, "write results and machine facts; what stands there already is not measured again")
    if kind.drawing:
        add_plot(parser, "draw the results", *kind.plot_suffixes)
    else:
        parser.set_defaults(plot=None)
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, name) if name else loaded


def _run(place: str, options: argparse.Namespace) -> int:
    from benchmarks.runner import run

    kind = _loaded(place)
    code: int = kind.run(options) if isinstance(kind, ModuleType) else run(kind, options)
    return code


if __name__ == "__main__":
    sys.exit(main())
