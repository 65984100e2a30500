"""`nearfield bench scaling`: what ranks send each other, beside ring attention and Ulysses."""

import argparse
from typing import Any

from nearfield.bench import scaling_cases as cases
from nearfield.commands.arguments import FAILED, OK, comma_list, command, integer, member, output_file
from nearfield.commands.reports import require_reports, write_reports


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "scaling",
        _bench_scaling,
        "count what ranks send when one image is split over them, beside ring attention and Ulysses",
        "  nearfield bench scaling --cases flux-2048 --ranks 8\n"
        "  nearfield bench scaling --processes 2,4 --json scaling.json --plot scaling.png",
    )
    parser.add_argument(
        "--cases",
        type=comma_list(member("--cases", tuple(cases.CASES))),
        default=list(cases.CASES),
        metavar="A,B",
        help=f"any of {', '.join(cases.CASES)} (default all)",
    )
    parser.add_argument(
        "--ranks",
        type=comma_list(integer("--ranks", 2, 1024)),
        default=list(cases.RANKS),
        metavar="N,N",
        help=f"how many ranks (default {','.join(map(str, cases.RANKS))})",
    )
    parser.add_argument(
        "--processes",
        type=comma_list(integer("--processes", 2, 16)),
        default=[],
        metavar="N,N",
        help="also run a small case on so many real processes, and compare what they send with what is counted",
    )
    parser.add_argument(
        "--json", type=output_file("--json"), metavar="FILE", help="write results and machine facts"
    )
    parser.add_argument("--plot", type=output_file("--plot", ".png"), metavar="FILE", help="draw them")


def _bench_scaling(arguments: argparse.Namespace) -> int:
    require_reports("--plot", arguments.plot, arguments.json)
    from nearfield import plots
    from nearfield.bench import machine, scaling
    from nearfield.bench.progress import Progress

    checks = [scaling.check(cases.TINY, number) for number in arguments.processes]
    for one in checks:
        verdict = "as counted" if one.passed else f"but {one.counted} were counted"
        print(f"{one.ranks} processes sent {one.sent} bytes, {verdict}")
    chosen = [cases.CASES[name] for name in arguments.cases]
    with Progress(len(chosen) * len(arguments.ranks)) as progress:
        results = scaling.run_all(chosen, arguments.ranks, progress.step)
    print(scaling.results_table(results))
    print("sent: by the busiest rank, per layer, forward. Step times are computed, not measured.")
    document = scaling.as_json(results, checks, machine.facts())
    written = write_reports(document, arguments.json, arguments.plot, plots.scaling_lines)
    return OK if written and all(one.passed for one in checks) else FAILED
