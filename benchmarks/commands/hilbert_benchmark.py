"""`python -m benchmarks hilbert`: one attention call of the Hilbert method, beside dense attention."""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import hilbert_cases
from nearfield.cli.arguments import GRAINS, QUERY_BLOCKS, comma_list, command, layer_numbers, member
from nearfield.cli.options import add_impl, add_json, add_plot
from nearfield.cli.reports import list_measurements, note_load, verdict, write_reports
from nearfield_lab.commands.drawing import require_reports


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "hilbert",
        _bench_hilbert,
        "time one attention call of the Hilbert method, text and shared rows included, beside dense attention",
        "  python -m benchmarks hilbert --quick\n"
        "  python -m benchmarks hilbert --cases 2048-keys,2048-far --layers 0..3\n"
        "  python -m benchmarks hilbert --flex --json hilbert.json --plot hilbert.png",
    )
    parser.add_argument(
        "--cases",
        type=comma_list(member("--cases", tuple(hilbert_cases.CASES))),
        metavar="A,B",
        help=f"any of {', '.join(hilbert_cases.CASES)}",
    )
    parser.add_argument(
        "--layers",
        type=layer_numbers("--layers"),
        default=[1],
        metavar="N,N",
        help="whose tiles to read, averaged; 0..3 is a whole cycle (default 1, which slides)",
    )
    parser.add_argument(
        "--q-block",
        type=member("--q-block", QUERY_BLOCKS),
        metavar="N",
        help="queries per list (default: what suits the device)",
    )
    parser.add_argument(
        "--k-block",
        type=member("--k-block", GRAINS),
        metavar="N",
        help="keys per id (default: what suits the device)",
    )
    add_impl(parser)
    parser.add_argument(
        "--flex", action="store_true", help="also time torch's flex_attention, compiled, with the same mask"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repetitions")
    add_json(parser)
    add_plot(parser, "draw the results")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _bench_hilbert(arguments: argparse.Namespace) -> int:
    require_reports("--plot", arguments.plot, arguments.json)
    from benchmarks import hilbert, hilbert_report
    from benchmarks.progress import Progress
    from nearfield.cli import machine
    from nearfield.cli.timing import Effort
    from nearfield_lab.plots.bars import hilbert_bars

    device = machine.default_device()
    names = arguments.cases or _default_cases(device.type, arguments.quick)
    cases = [hilbert_cases.CASES[name] for name in names]
    if arguments.dry_run:
        return list_measurements(cases, device)
    note_load(device.type)
    options = hilbert.Options(
        tuple(arguments.layers), arguments.q_block, arguments.k_block, arguments.impl, arguments.flex
    )
    with Progress(len(cases)) as progress:
        effort = Effort.of(device, arguments.quick)
        results = hilbert.run_all(cases, options, device, effort, progress.step)
    print(f"{machine.device_name(device)}, {_layers_words(arguments.layers)}")
    print(hilbert_report.results_table(results))
    document = hilbert_report.as_json(results, machine.facts())
    written = write_reports(
        document, arguments.json, arguments.plot, hilbert_bars, machine.device_name(device)
    )
    return verdict(results, written)


def _default_cases(device: str, quick: bool) -> tuple[str, ...]:
    if quick:
        return hilbert_cases.QUICK
    return hilbert_cases.ON_CUDA if device == "cuda" else hilbert_cases.ON_CPU


def _layers_words(layers: Sequence[int]) -> str:
    return (
        f"tiles of layer {layers[0]}"
        if len(layers) == 1
        else f"mean over layers {', '.join(map(str, layers))}"
    )
