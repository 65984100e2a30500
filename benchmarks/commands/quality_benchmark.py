"""The benchmark `quality`: the embedded model's pictures with many patterns of attention, compared with dense ones."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import quality_cases
from nearfield.cli.arguments import OK, UsageError, comma_list, command, integer, output_file, wrong
from nearfield.cli.options import add_device, add_integer, add_number, add_plot, add_weights
from nearfield.cli.progress import Bar, time_for
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.generating import chosen_device, missing_extras_told

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nearfield_lab.quality import Statistics


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "quality",
        _bench_quality,
        "make the embedded model's pictures with many patterns of attention, and measure them beside the dense ones",
        "  python -m benchmarks quality --photographs cats512 --weights run/model.safetensors --patterns tiles,steps\n"
        "  python -m benchmarks quality --photographs cats512 --patterns my.json --num 5000 --minutes 9 --out my.json",
    )
    parser.add_argument(
        "--photographs",
        type=Path,
        required=True,
        metavar="DIR",
        help="what FID compares with: tar files or pictures",
    )
    parser.add_argument(
        "--patterns",
        default="tiles",
        metavar="A,B",
        help=f"groups ({', '.join(quality_cases.GROUPS)}), or a .json file with a list of patterns (default tiles)",
    )
    add_weights(parser)
    parser.add_argument(
        "--inception", type=Path, metavar="FILE", help="the FID network (default: the installed package's)"
    )
    parser.add_argument(
        "--num",
        type=comma_list(integer("--num", 4)),
        default=[1500],
        metavar="N",
        help="pictures of each pattern (default 1500); 1500,5000 gives a row for the first 1,500, too",
    )
    add_integer(parser, "--pairs", 512, "of the first so many each is held beside the dense one")
    add_integer(parser, "--steps", 16, "denoising steps")
    add_integer(parser, "--size", 512, "pixels per side", least=64)
    add_integer(parser, "--seed", 0, "of the noise", least=0)
    add_integer(parser, "--batch", 64, "pictures at a time")
    add_number(parser, "--minutes", None, "begin no further pattern after this time", is_above=True)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="let torch.compile make the model faster; pictures are the same up to rounding",
    )
    add_device(parser)
    parser.add_argument(
        "--out",
        type=output_file("--out", ".json"),
        default="quality.json",
        metavar="FILE",
        help="the results; what stands there already is not measured again (default quality.json)",
    )
    parser.add_argument(
        "--strips",
        type=Path,
        metavar="DIR",
        help="keep the first four pictures of every pattern, side by side, one file each",
    )
    add_plot(parser, "draw pairs against FID")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _bench_quality(arguments: argparse.Namespace) -> int:
    patterns = patterns_of(arguments.patterns)
    if arguments.dry_run:
        print(f"dense and {len(patterns)} patterns:", *(pattern.name for pattern in patterns), sep="\n  ")
        return OK
    if arguments.size % 8:
        wrong("--size", "be a multiple of 8 pixels", arguments.size)
    require_reports("--plot", arguments.plot, arguments.out)
    with missing_extras_told():
        done = _swept(arguments, patterns)
    if arguments.out.exists():  # a row was measured, now or before
        print(f"wrote {arguments.out}")
    if not done:
        print("time is up; the same command goes on", file=sys.stderr)
    return OK


def _swept(arguments: argparse.Namespace, patterns: Sequence[quality_cases.Pattern]) -> bool:
    from benchmarks import quality
    from benchmarks.picture_runs import Task
    from nearfield_lab import quality as measures
    from nearfield_lab.embedded.generate import embedded_weights
    from nearfield_lab.quality.inception import MissingWeights
    from nearfield_lab.quality.results import table

    is_time, device = time_for(arguments.minutes), chosen_device(arguments.device)
    try:
        network = measures.load_inception(arguments.inception, device)
    except MissingWeights as error:
        raise UsageError(str(error)) from None
    task = Task(
        arguments.weights or embedded_weights(),
        *(max(arguments.num), arguments.steps, arguments.size, arguments.seed, arguments.batch),
        compiled=arguments.compile,
    )
    with Bar(task.num, "pictures") as bar:
        sweep = quality.Sweep(
            task,
            lambda: _references(arguments, network),
            network,
            arguments.out,
            counts=arguments.num,
            pairs=arguments.pairs,
            networks=second_network(device),
            device=device,
            on_picture=bar.show,
            strips=arguments.strips,
        )
        try:
            done = sweep.run(patterns, is_time)
        except ValueError as error:  # fields that do not go together, or not with this size
            raise UsageError(str(error)) from None
    if sweep.rows:
        print(table(sweep.rows))
    for name, reason in sweep.not_compiled.items():
        print(f"{name}: not compiled, {reason}")
    if arguments.plot:
        from nearfield_lab.plots.fronts import quality_front

        quality_front(arguments.plot, sweep.rows, f"{task.num:,} pictures at {arguments.size} px")
        print(f"wrote {arguments.plot}")
    return done


def _references(arguments: argparse.Namespace, network: "nn.Module") -> "Statistics":
    """Of all photographs, from the file in which an earlier run has kept them."""
    from benchmarks.quality import photograph_statistics
    from nearfield_lab.training import data

    source = data.pictures(arguments.photographs)
    name = f"photographs-{arguments.size}-{data.fingerprint(source)[:12]}.safetensors"
    with Bar(len(source), "photographs") as bar:
        batches = data.batches(
            source, arguments.size, on_progress=lambda done, total, words: bar.show(done, words)
        )
        return photograph_statistics(batches, network, arguments.size, arguments.out.with_name(name))


def patterns_of(text: str) -> list[quality_cases.Pattern]:
    """What `--patterns` names."""
    try:
        return quality_cases.read_patterns(text)
    except ValueError as error:
        raise UsageError(f"`--patterns` must {error}.") from None


def second_network(device: "torch.device") -> "dict[str, nn.Module]":
    """EfficientNet-Lite0, where it is installed."""
    from nearfield_lab import quality
    from nearfield_lab.quality.inception import MissingWeights

    try:
        return {"efficientnet": quality.load_efficientnet(device)}
    except MissingWeights as error:
        print(f"no distances of EfficientNet's features: {error}", file=sys.stderr)
        return {}
