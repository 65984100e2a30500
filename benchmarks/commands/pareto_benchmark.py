"""`python -m benchmarks pareto`: speed and quality of all methods in one figure."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import quality_cases
from benchmarks.commands.quality_benchmark import patterns_of, second_network
from nearfield.cli.arguments import FAILED, OK, UsageError, command, output_file, wrong
from nearfield.cli.options import add_device, add_integer, add_json, add_number, add_plot, add_weights
from nearfield.cli.progress import Bar, time_for
from nearfield.cli.reports import note_load, write_reports
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.generating import chosen_device, missing_extras_told

if TYPE_CHECKING:
    import torch
    from torch import nn

    from benchmarks.pareto import TimedSweep
    from benchmarks.pareto_report import Point

_NONE = "none"


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "pareto",
        _bench_pareto,
        "speed and quality of all methods in one figure, measured on the embedded model and read from results",
        "  python -m benchmarks pareto --tiny --num 1 --steps 4 --plot pareto.png\n"
        "  python -m benchmarks pareto --weights run512/model.safetensors --minutes 9 --out pareto.json\n"
        "  python -m benchmarks pareto --patterns none --results quality.json model.json --plot pareto.svg",
    )
    parser.add_argument(
        "--patterns",
        default=",".join(quality_cases.ALL_METHODS),
        metavar="A,B",
        help=f"what to measure: groups ({', '.join(quality_cases.GROUPS)}), a .json file with a list of patterns, or"
        f" {_NONE} (default {','.join(quality_cases.ALL_METHODS)})",
    )
    add_weights(parser)
    parser.add_argument("--tiny", action="store_true", help="an untrained model of a few narrow layers")
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="also show these results of the benchmarks quality, hilbert or model: files, or folders of them"
        " (default: the committed ones of a checkout)",
    )
    add_integer(parser, "--num", 4, "pictures of each pattern")
    add_integer(parser, "--steps", 20, "denoising steps")
    add_integer(parser, "--seed", 0, "of the noise", least=0)
    add_integer(parser, "--batch", 1, "pictures at a time; each batch is one timing")
    add_integer(parser, "--size", None, "pixels per side (default: what the model was trained at)", least=64)
    parser.add_argument(
        "--inception",
        type=Path,
        metavar="FILE",
        help="the FID network, for distances of features (default: the installed package's, if there is one)",
    )
    add_number(parser, "--minutes", None, "begin no further pattern after this time", is_above=True)
    add_device(parser)
    parser.add_argument(
        "--out",
        type=output_file("--out", ".json"),
        default="pareto.json",
        metavar="FILE",
        help="what is measured; what stands there already is not measured again (default pareto.json)",
    )
    add_json(parser, "write all points, and which nothing beats")
    add_plot(parser, "draw them", ".png", ".svg")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured and read")


def _bench_pareto(arguments: argparse.Namespace) -> int:
    patterns = [] if arguments.patterns == _NONE else patterns_of(arguments.patterns)
    _check(arguments)
    arguments.out = Path(arguments.out)
    for path in filter(None, (arguments.out, arguments.json)):
        require_reports("--plot", arguments.plot, path)
    with missing_extras_told():
        files = _result_files(arguments)
        if arguments.dry_run:
            return _show_plan(arguments, patterns, files)
        points = _read(files)
        sweep, is_done = _swept(arguments, patterns)
    from benchmarks import pareto_report
    from nearfield.cli import machine
    from nearfield_lab.plots.fronts import pareto_panels

    own = pareto_report.points_of(sweep.rows, arguments.out.stem) if sweep else []
    if not own + points:
        wrong("--results", "hold results, where nothing is measured", "none")
    records = pareto_report.with_fronts(own + points)
    print(pareto_report.tables(records))
    document = pareto_report.as_json(records, machine.facts())
    title = "Methods of nearfield"
    if own:
        title += f", on {machine.device_name(chosen_device(arguments.device))} where measured here"
    written = write_reports(document, arguments.json, arguments.plot, pareto_panels, title)
    for name, reason in sweep.broken.items() if sweep else ():
        print(f"{name}: not measured: {reason}", file=sys.stderr)
    if not is_done:
        print("time is up; the same command goes on", file=sys.stderr)
    return OK if written and not (sweep and sweep.broken) else FAILED


def _check(arguments: argparse.Namespace) -> None:
    check_model(arguments)
    if arguments.inception and not arguments.inception.is_file():
        wrong("--inception", "name a file that is there", repr(str(arguments.inception)))


def check_model(arguments: argparse.Namespace) -> None:
    """Whose pictures are made, and how large: `--weights`, `--tiny` and `--size`."""
    if arguments.tiny and arguments.weights:
        wrong("--weights", "be left out with `--tiny`", repr(str(arguments.weights)))
    if arguments.weights and not arguments.weights.is_file():
        wrong("--weights", "name a file that is there", repr(str(arguments.weights)))
    if arguments.size and arguments.size % 8:
        wrong("--size", "be a multiple of 8 pixels", arguments.size)


def _result_files(arguments: argparse.Namespace) -> list[Path]:
    """What is read; not what this run writes."""
    from benchmarks import pareto_report

    for path in arguments.results or ():
        if not path.exists():
            wrong("--results", "name files or folders that are there", repr(str(path)))
    paths = arguments.results or ([pareto_report.COMMITTED])
    own = arguments.out.resolve()
    return [path for path in pareto_report.files_in(paths) if path.resolve() != own]


def _read(files: Sequence[Path]) -> "list[Point]":
    from benchmarks import pareto_report

    try:
        return [point for path in files for point in pareto_report.read_points(path)]
    except ValueError as error:
        raise UsageError(f"`--results` must name results of benchmarks. {error}") from None


def _sweep(
    arguments: argparse.Namespace, device: "torch.device", bar: Bar | None = None
) -> "TimedSweep | None":
    """What measures; None, with a note, where there is no model."""
    from benchmarks import pareto
    from benchmarks.picture_runs import Task
    from nearfield_lab.embedded.generate import NoWeights, embedded_weights

    try:
        weights = pareto.TINY if arguments.tiny else arguments.weights or embedded_weights()
    except NoWeights as error:
        print(f"nothing is measured: {error}, or use `--tiny`", file=sys.stderr)
        return None
    size = arguments.size or pareto.trained_size(weights)
    sizes = (arguments.num, arguments.steps, size, arguments.seed, arguments.batch)
    try:
        return pareto.TimedSweep(
            Task(weights, *sizes),
            arguments.out,
            networks=_networks(arguments, device) if bar else {},
            device=device,
            on_picture=bar.show if bar else None,
        )
    except ValueError as error:  # --out holds something else
        raise UsageError(f"`--out` must name a new file or one of these results. {error}") from None


def _networks(arguments: argparse.Namespace, device: "torch.device") -> "dict[str, nn.Module]":
    """Those that are there; one that was asked for must be."""
    from nearfield_lab import quality
    from nearfield_lab.quality.inception import MissingWeights

    try:
        return {"inception": quality.load_inception(arguments.inception, device)} | second_network(device)
    except MissingWeights as error:
        print(f"no distances of Inception's features: {error}", file=sys.stderr)
        return second_network(device)


def _swept(
    arguments: argparse.Namespace, patterns: Sequence[quality_cases.Pattern]
) -> "tuple[TimedSweep | None, bool]":
    """Measures what is missing; also tells whether time was enough."""
    if not patterns:
        return None, True
    is_time, device = time_for(arguments.minutes), chosen_device(arguments.device)
    note_load(device.type)
    with Bar(arguments.num, "pictures") as bar:
        sweep = _sweep(arguments, device, bar)
        if sweep is None:
            return None, True
        try:
            is_done = sweep.run(patterns, is_time)
        except ValueError as error:  # fields that are none, or do not go together
            raise UsageError(str(error)) from None
    print(f"measured: {arguments.out}", file=sys.stderr)
    return sweep, is_done


def _show_plan(
    arguments: argparse.Namespace, patterns: Sequence[quality_cases.Pattern], files: Sequence[Path]
) -> int:
    sweep = _sweep(arguments, chosen_device(arguments.device)) if patterns else None
    missing = [pattern for pattern in (None, *patterns) if not sweep.is_known(pattern)] if sweep else []
    names = [pattern.name if pattern else "dense" for pattern in missing]
    how = f" at {sweep.task.size} px, {arguments.steps} steps:" if sweep else ""
    print(f"{len(names)} to measure{how}", *names, sep="\n  ")
    print(f"{len(files)} result files to read:", *files, sep="\n  ")
    return OK
