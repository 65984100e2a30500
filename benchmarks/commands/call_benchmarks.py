"""The benchmarks `fine` and `loglinear`: single calls of methods whose content decides what they read."""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks import fine_cases, loglinear_cases
from nearfield.cli.arguments import INTERRUPTED, comma_list, command, member
from nearfield.cli.options import add_impl, add_json
from nearfield.cli.reports import collect, verdict, write_reports


def add_fine(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "fine",
        _bench_fine,
        "time fine-grained attention, its predictions and the making of its lists, beside dense attention",
        "  python -m benchmarks fine --quick\n"
        "  python -m benchmarks fine --cases wan-480p-70-128x8,wan-480p-90-192x8 --json fine.json",
    )
    _add_call_options(parser, fine_cases, "model, percent of the keys that is skipped, and blocks")


def add_loglinear(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "loglinear",
        _bench_loglinear,
        "time log-linear attention, pooling and choosing included, beside dense attention",
        "  python -m benchmarks loglinear --quick\n"
        "  python -m benchmarks loglinear --cases 1x6x65536x64,4x6x16384x64 --json loglinear.json",
    )
    _add_call_options(parser, loglinear_cases, "batch x heads x tokens x head dimension")


def _add_call_options(parser: argparse.ArgumentParser, cases: Any, meaning: str) -> None:
    names = (*cases.CASES, *cases.QUICK)
    parser.add_argument(
        "--cases",
        type=comma_list(member("--cases", names)),
        metavar="A,B",
        help=f"{meaning}: any of {', '.join(names)}",
    )
    add_impl(parser)
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repetitions")
    add_json(parser)


def _bench_fine(arguments: argparse.Namespace) -> int:
    from benchmarks import fine

    return _bench_calls(arguments, fine, fine_cases, fine.effort)


def _bench_loglinear(arguments: argparse.Namespace) -> int:
    from benchmarks import loglinear
    from nearfield.cli.timing import Effort

    return _bench_calls(arguments, loglinear, loglinear_cases, Effort.of)


def _bench_calls(
    arguments: argparse.Namespace, bench: Any, cases: Any, effort: Callable[[Any, bool], Any]
) -> int:
    """Measure single calls of attention: `cases` has their tables, `bench` measures them with an `effort`."""
    from benchmarks.progress import Progress
    from nearfield.cli import machine

    device = machine.default_device()
    known = cases.QUICK | cases.CASES
    few = arguments.quick or device.type == "cpu"
    names = arguments.cases or tuple(cases.QUICK if few else cases.CASES)
    facts = machine.facts()
    with Progress(len(names)) as progress:
        chosen, much = [known[name] for name in names], effort(device, arguments.quick)
        measured = bench.run_all(chosen, device, much, arguments.impl, progress.step)
        results, is_whole = collect(measured, lambda some: bench.as_json(some, facts), arguments.json)
    if not is_whole:
        print(f"interrupted; {len(results)} of {len(names)} were measured")
    print(machine.device_name(device))
    print(bench.results_table(results))
    written = write_reports(bench.as_json(results, facts), arguments.json)
    return verdict(results, written) if is_whole else INTERRUPTED
