"""`python -m benchmarks errors`: how far one denoising step with patterns of attention is from the dense one."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import quality_cases
from benchmarks.commands.pareto_benchmark import check_model
from benchmarks.commands.quality_benchmark import patterns_of
from nearfield.cli.arguments import (
    FAILED,
    GRAINS,
    OK,
    QUERY_BLOCKS,
    UsageError,
    comma_list,
    command,
    integer,
    wrong,
)
from nearfield.cli.options import add_device, add_integer, add_json, add_number, add_weights
from nearfield.cli.progress import Bar, time_for
from nearfield.cli.reports import note_load
from nearfield_lab.commands.generating import chosen_device, missing_extras_told

if TYPE_CHECKING:
    from benchmarks.errors import ErrorSweep
    from nearfield_lab.training.data import Picture

_BLOCKS = ("device", "gpu")  # or sizes


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "errors",
        _bench_errors,
        "how far one denoising step with patterns of attention is from the dense one, in seconds per pattern",
        "  python -m benchmarks errors --photographs cats512 --patterns far,far-weighted --json errors.json\n"
        "  python -m benchmarks errors --photographs cats512/cats512-00.tar --num 2 --at 4,8,13 --patterns mine.json\n"
        "  python -m benchmarks errors --photographs pictures --tiny --size 64 --blocks gpu",
    )
    parser.add_argument(
        "--photographs",
        type=Path,
        required=True,
        metavar="PATH",
        help="what noise is added to: a folder of tar files or of pictures, or one tar file",
    )
    parser.add_argument(
        "--patterns",
        default="far",
        metavar="A,B",
        help=f"groups ({', '.join(quality_cases.GROUPS)}), or a .json file with a list of patterns (default far);"
        " their dense steps are set aside",
    )
    add_weights(parser)
    parser.add_argument("--tiny", action="store_true", help="an untrained model of a few narrow layers")
    add_integer(parser, "--num", 2, "photographs, evenly spaced over all there are")
    parser.add_argument(
        "--at",
        type=comma_list(integer("--at", 0)),
        default=[8, 13],
        metavar="N,N",
        help="numbers of the steps, from 0 (default 8,13)",
    )
    add_integer(parser, "--steps", 16, "of the sampling that these steps are of")
    add_integer(parser, "--size", None, "pixels per side (default: what the model was trained at)", least=64)
    add_integer(parser, "--seed", 0, "of the noise", least=0)
    parser.add_argument(
        "--blocks",
        type=_blocks,
        default="device",
        metavar="WHOSE",
        help="blocks that the Hilbert method reads by: the device's own, those of a gpu on any device, or sizes of"
        " queries and keys, 128x64 (default device)",
    )
    add_number(parser, "--minutes", None, "begin no further pattern after this time", is_above=True)
    add_device(parser)
    add_json(parser, "write results and machine facts; what stands there already is not measured again")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _blocks(text: str) -> str:
    """As they are kept in results: a name, or two sizes."""
    queries, _, keys = text.partition("x")
    if text in _BLOCKS or (queries in map(str, QUERY_BLOCKS) and keys in map(str, GRAINS)):
        return text
    rule = f"be {' or '.join(_BLOCKS)}, or sizes of queries ({_listed(QUERY_BLOCKS)}) and keys ({_listed(GRAINS)})"
    wrong("--blocks", rule, repr(text), "Example: --blocks 128x64")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _bench_errors(arguments: argparse.Namespace) -> int:
    patterns = patterns_of(arguments.patterns)
    check_model(arguments)
    if max(arguments.at) >= arguments.steps:
        rule = f"be numbers of steps, from 0 to {arguments.steps - 1}"
        wrong("--at", rule, max(arguments.at), "`--steps` says how many there are.")
    with missing_extras_told(), Bar(None, "steps") as bar:
        sweep = _sweep(arguments, bar)
        try:
            missing = sweep.missing(patterns)
            if arguments.dry_run:
                return _show_plan(sweep, missing)
            note_load(sweep.device.type)
            is_done = sweep.run(patterns, time_for(arguments.minutes))
        except ValueError as error:  # fields that are none, or do not go together
            raise UsageError(str(error)) from None
    return _told(arguments, sweep, patterns, is_done)


def _sweep(arguments: argparse.Namespace, bar: Bar) -> "ErrorSweep":
    from benchmarks import errors, pareto
    from benchmarks.picture_runs import Task
    from nearfield_lab.embedded.generate import embedded_weights

    weights = pareto.TINY if arguments.tiny else arguments.weights or embedded_weights()
    size = arguments.size or pareto.trained_size(weights)
    source = _photographs(arguments)
    try:
        return errors.ErrorSweep(
            Task(weights, arguments.num, arguments.steps, size, arguments.seed),
            errors.spread(source, arguments.num),
            arguments.photographs.resolve().name,
            arguments.at,
            out=arguments.json,
            blocks=arguments.blocks,
            device=chosen_device(arguments.device),
            on_step=bar.show,
        )
    except ValueError as error:  # --json holds something else
        raise UsageError(f"`--json` must name a new file or one of these results. {error}") from None


def _photographs(arguments: argparse.Namespace) -> "list[Picture]":
    """All there are."""
    from nearfield_lab.embedded.storage import BadFile
    from nearfield_lab.training import data

    try:
        source = data.pictures(arguments.photographs)
    except (FileNotFoundError, BadFile) as error:
        got = f"{str(arguments.photographs)!r} ({error})"
        wrong("--photographs", "name a folder of pictures or of tar files, or a tar file", got)
    if arguments.num > len(source):
        wrong("--num", f"be at most {len(source):,}, for there are no more photographs", arguments.num)
    return source


def _show_plan(sweep: "ErrorSweep", missing: list[quality_cases.Pattern]) -> int:
    where = ", ".join(map(str, sweep.at))
    how = f"at {sweep.task.size} px, {sweep.task.num} photographs, steps {where} of {sweep.task.steps}"
    print(f"{len(missing)} to measure {how}:", *(pattern.name for pattern in missing), sep="\n  ")
    return OK


def _told(
    arguments: argparse.Namespace, sweep: "ErrorSweep", patterns: list[quality_cases.Pattern], is_done: bool
) -> int:
    from benchmarks.errors import table

    rows = sweep.rows_of(patterns)
    if rows:
        print(table(rows))
    if arguments.json and arguments.json.exists():  # a row was measured, now or before
        print(f"wrote {arguments.json}")
    for name, reason in sweep.broken.items():
        print(f"{name}: not measured: {reason}", file=sys.stderr)
    if not is_done:
        goes_on = "; the same command goes on" if arguments.json else ""
        print(f"time is up{goes_on}", file=sys.stderr)
    return FAILED if sweep.broken else OK
