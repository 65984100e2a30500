"""`python -m benchmarks attend`: the operation itself, beside dense attention."""

import argparse
from typing import Any

from nearfield.cli import presets
from nearfield.cli.arguments import GRAINS, IMPLS, QUERY_BLOCKS, comma_list, command, member, preset_name
from nearfield.cli.options import add_json, add_plot
from nearfield.cli.reports import list_measurements, note_load, verdict, write_reports
from nearfield_lab.commands.drawing import require_reports


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "attend",
        _bench_attend,
        "time attend beside dense attention on the same tensors; a wrong answer gets no figure",
        "  python -m benchmarks attend --quick\n  python -m benchmarks attend --dry-run\n"
        "  python -m benchmarks attend --presets flux-2048,wan-480p --grains 64,16,1 --backward\n"
        "  python -m benchmarks attend --ragged --json results.json --plot results.png",
    )
    parser.add_argument(
        "--presets",
        type=comma_list(preset_name("--presets")),
        metavar="A,B",
        help=f"any of {', '.join(presets.PRESETS)}",
    )
    parser.add_argument(
        "--grains",
        type=comma_list(member("--grains", GRAINS)),
        default=[64, 16, 1],
        metavar="N,N",
        help="keys per id (default 64,16,1)",
    )
    parser.add_argument(
        "--impl",
        type=comma_list(member("--impl", IMPLS)),
        default=["auto"],
        metavar="A,B",
        help=f"any of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--q-block",
        type=member("--q-block", QUERY_BLOCKS),
        metavar="N",
        help="queries per list (default: the preset's)",
    )
    parser.add_argument("--backward", action="store_true", help="also time the backward pass at grain 64")
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="instead of the tile row, time it and its parts, to see what mixing them costs",
    )
    parser.add_argument("--quick", action="store_true", help="one small preset and few repetitions")
    add_json(parser)
    add_plot(parser, "draw the results")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _bench_attend(arguments: argparse.Namespace) -> int:
    require_reports("--plot", arguments.plot, arguments.json)
    from benchmarks import attend, attend_report
    from benchmarks.cases import cases as all_cases
    from benchmarks.progress import Progress
    from nearfield.cli import machine
    from nearfield.cli.timing import Effort
    from nearfield_lab.plots.bars import attend_bars

    device = machine.default_device()
    chosen = [
        presets.PRESETS[name] for name in arguments.presets or _default_presets(device.type, arguments.quick)
    ]
    cases = all_cases(
        chosen,
        arguments.grains,
        arguments.impl,
        arguments.q_block,
        device,
        backward=arguments.backward,
        ragged=arguments.ragged,
    )
    if arguments.dry_run:
        return list_measurements(cases, device)
    note_load(device.type)
    with Progress(len(cases)) as progress:
        results = attend.run_all(cases, device, Effort.of(device, arguments.quick), progress.step)
    print(attend_report.results_table(results))
    if arguments.quick and (note := attend_report.too_small(results)):
        print(note)
    document = attend_report.as_json(results, machine.facts())
    written = write_reports(
        document, arguments.json, arguments.plot, attend_bars, machine.device_name(device)
    )
    return verdict(results, written)


def _default_presets(device: str, quick: bool) -> tuple[str, ...]:
    if device == "cuda":
        return presets.QUICK_ON_CUDA if quick else presets.ON_CUDA
    return presets.QUICK_ON_CPU if quick else presets.ON_CPU
