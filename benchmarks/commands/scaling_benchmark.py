"""`python -m benchmarks scaling`: what ranks send each other, beside ring attention and Ulysses."""

import argparse
from typing import Any

from benchmarks import scaling_cases as cases
from nearfield.cli.arguments import FAILED, INTERRUPTED, OK, comma_list, command, integer, member, wrong
from nearfield.cli.options import add_json, add_plot
from nearfield.cli.reports import collect, note_load, write_reports
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.generating import chosen_device

_TIMED, _TIMED_RANKS = ("flux-4096",), (8,)


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "scaling",
        _bench_scaling,
        "count what ranks send when one image is split over them, beside ring attention and Ulysses",
        "  python -m benchmarks scaling --cases flux-2048 --ranks 8\n"
        "  python -m benchmarks scaling --processes 2,4 --json scaling.json --plot scaling.png\n"
        "  python -m benchmarks scaling --kernel-time --json kernel-time.json",
    )
    parser.add_argument(
        "--cases",
        type=comma_list(member("--cases", tuple(cases.CASES))),
        metavar="A,B",
        help=f"any of {', '.join(cases.CASES)} (default all; with --kernel-time flux-4096)",
    )
    parser.add_argument(
        "--ranks",
        type=comma_list(integer("--ranks", 2, 1024)),
        metavar="N,N",
        help=f"how many ranks (default {','.join(map(str, cases.RANKS))}; with --kernel-time 8)",
    )
    parser.add_argument(
        "--processes",
        type=comma_list(integer("--processes", 2, 16)),
        default=[],
        metavar="N,N",
        help="also run a small case on so many real processes, and compare what they send with what is counted",
    )
    parser.add_argument(
        "--kernel-time",
        action="store_true",
        help="instead time on this device what each rank computes, one after another, beside its share of the whole",
    )
    parser.add_argument("--quick", action="store_true", help="with --kernel-time: a tiny case, timed shortly")
    parser.add_argument("--device", metavar="NAME", help="with --kernel-time (default: cuda if there is one)")
    add_json(parser)
    add_plot(parser, "draw them")


def _bench_scaling(arguments: argparse.Namespace) -> int:
    if arguments.kernel_time:
        return _time_kernels(arguments)
    for name in ("quick", "device"):
        if getattr(arguments, name):
            wrong(f"--{name}", "be given with `--kernel-time` only", getattr(arguments, name))
    require_reports("--plot", arguments.plot, arguments.json)
    from benchmarks import scaling
    from benchmarks.progress import Progress
    from nearfield.cli import machine
    from nearfield_lab.plots.lines import scaling_lines

    checks = [scaling.check(cases.TINY, number) for number in arguments.processes]
    for one in checks:
        verdict = "as counted" if one.passed else f"but {one.counted} were counted"
        print(f"{one.ranks} processes sent {one.sent} bytes, {verdict}")
    chosen = [cases.CASES[name] for name in arguments.cases or cases.CASES]
    ranks = arguments.ranks or cases.RANKS
    with Progress(len(chosen) * len(ranks)) as progress:
        results = scaling.run_all(chosen, ranks, progress.step)
    print(scaling.results_table(results))
    print("sent: by the busiest rank, per layer, forward. Step times are computed, not measured.")
    document = scaling.as_json(results, checks, machine.facts())
    written = write_reports(document, arguments.json, arguments.plot, scaling_lines)
    return OK if written and all(one.passed for one in checks) else FAILED


def _time_kernels(arguments: argparse.Namespace) -> int:
    for name in ("processes", "plot"):
        if getattr(arguments, name):
            wrong(f"--{name}", "be left out with `--kernel-time`", getattr(arguments, name))
    if arguments.quick and arguments.cases:
        wrong("--cases", "be left out with `--quick`", ",".join(arguments.cases))
    for name in arguments.cases or ():
        if cases.CASES[name].far:
            wrong("--cases", "have no far field with `--kernel-time`", name)
    from benchmarks import scaling_times
    from benchmarks.progress import Progress
    from nearfield import Hilbert
    from nearfield.cli import machine

    device = chosen_device(arguments.device)
    note_load(device.type)
    chosen = [cases.TINY] if arguments.quick else [cases.CASES[name] for name in arguments.cases or _TIMED]
    ranks = arguments.ranks or _TIMED_RANKS
    effort = scaling_times.effort(device, arguments.quick)
    layers = sum(Hilbert(**case.fields).phases for case in chosen)
    facts = machine.facts()

    def document(results: list[scaling_times.KernelTimes]) -> dict[str, Any]:
        return scaling_times.as_json(results, str(device), facts)

    try:
        with Progress(layers * len(ranks)) as progress:
            measured = scaling_times.run_all(chosen, ranks, device, effort, progress.step)
            results, is_whole = collect(measured, document, arguments.json)
    except scaling_times.WrongAnswer as error:
        print(f"no figures: {error}")
        return FAILED
    if not is_whole:
        print("interrupted; what was measured until then:")
    print(scaling_times.results_table(results))
    written = write_reports(document(results), arguments.json)
    return (OK if written else FAILED) if is_whole else INTERRUPTED
