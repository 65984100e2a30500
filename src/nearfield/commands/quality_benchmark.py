"""`nearfield bench quality`: the embedded model's pictures with many patterns of attention, beside the dense ones."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfield.bench import quality_cases
from nearfield.commands.arguments import (
    FAILED,
    OK,
    UsageError,
    comma_list,
    command,
    integer,
    output_file,
    wrong,
)
from nearfield.commands.collected import (
    add_results,
    check_results,
    require_results,
    seen_from,
    text_writer,
)
from nearfield.commands.generating import chosen_device, missing_extras_told
from nearfield.commands.options import add_device, add_integer, add_number, add_plot, add_weights
from nearfield.commands.progress import Bar, time_for
from nearfield.commands.reports import require_reports, write_all

if TYPE_CHECKING:
    import torch
    from torch import nn

    from nearfield.quality import Statistics


_PLOT_WORDS = "Pairs kept against FID; what nothing beats in both is joined by a line, tuned or not apart"
_SHEET_WORDS = "The first pictures of the dense model and of patterns, of one noise"


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "quality",
        _bench_quality,
        "make the embedded model's pictures with many patterns of attention, and measure them beside the dense ones",
        "  nearfield bench quality --photographs cats512 --weights run512/model.safetensors --patterns tiles,steps\n"
        "  nearfield bench quality --photographs cats512 --patterns mine.json --num 5000 --minutes 9 --out mine.json\n"
        "  nearfield bench quality --results quality-results.tar.gz --out campaign.json --plot front.png",
    )
    parser.add_argument(
        "--photographs",
        type=Path,
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
    add_number(
        parser,
        "--minutes",
        None,
        "begin no further pattern after this time, and with --kept no further batch",
        is_above=True,
    )
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
    parser.add_argument(
        "--kept",
        type=Path,
        metavar="DIR",
        help="keep what was measured of every picture, and the first dense pictures, for this and other commands",
    )
    parser.add_argument(
        "--no-dense-row",
        action="store_true",
        help="compare with the dense pictures without a row for them, which another command measures",
    )
    add_plot(parser, "draw pairs against FID")
    add_results(parser, "measure_quality.sh")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _bench_quality(arguments: argparse.Namespace) -> int:
    if arguments.results is not None:
        return _show_results(arguments)
    require_results(arguments)
    if arguments.photographs is None:
        wrong("--photographs", "name a folder, unless `--results` names results", None)
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
    from nearfield import quality as measures
    from nearfield.bench import quality
    from nearfield.bench.picture_runs import Task
    from nearfield.demo.generate import embedded_weights
    from nearfield.quality.inception import MissingWeights
    from nearfield.quality.results import table

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
            extent=quality.Extent(tuple(arguments.num), arguments.pairs, not arguments.no_dense_row),
            networks=second_network(device),
            device=device,
            on_picture=bar.show,
            strips=arguments.strips,
            kept=arguments.kept,
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
        from nearfield.plots.fronts import quality_front

        quality_front(arguments.plot, sweep.rows, f"{task.num:,} pictures at {arguments.size} px")
        print(f"wrote {arguments.plot}")
    return done


def _show_results(arguments: argparse.Namespace) -> int:
    """Tables of what was measured elsewhere, as JSON, on a page, and as pictures."""
    check_results(arguments)
    require_reports("--plot", arguments.plot, arguments.out)
    with missing_extras_told():
        from nearfield._files import write_json
        from nearfield.bench import quality_results
        from nearfield.bench.collected import BadResults, put_into

        try:
            with quality_results.opened(arguments.results) as collected:
                print(quality_results.tables(collected))
                writers = _drawings(arguments, collected)
                if arguments.page is not None:
                    page, words = arguments.page, {arguments.plot: _PLOT_WORDS, arguments.sheet: _SHEET_WORDS}
                    text = quality_results.markdown(
                        collected,
                        {words[path]: seen_from(page, path) for path in writers},
                        seen_from(page, arguments.out),
                    )
                    whole = put_into(page.read_text(encoding="utf-8"), text, quality_results.WHAT)
                    writers[page] = text_writer(whole)
                document = quality_results.as_json(collected)
                writers[arguments.out] = lambda path: write_json(path, document)
                written = write_all(writers)
        except (BadResults, ValueError) as error:
            raise UsageError(f"`--results` cannot be used: {str(error).rstrip('.')}.") from None
    return OK if written else FAILED


def _drawings(arguments: argparse.Namespace, collected: Any) -> dict[Path, Callable[[Path], object]]:
    """What draws the pictures that were asked for, as far as there is something to draw."""
    from nearfield.bench.quality_results import front_rows, sheet
    from nearfield.demo.pictures import write_rows
    from nearfield.plots.fronts import quality_front

    points, pictures = front_rows(collected), sheet(collected)
    settings = collected.settings
    title = f"{settings['num']:,} pictures at {settings['size']} px"
    found: dict[Path, Callable[[Path], object]] = {}
    if arguments.plot is not None and points:
        found[arguments.plot] = lambda path: quality_front(path, points, title)
    if arguments.sheet is not None and arguments.sheet.exists() and pictures.missing:
        # A sheet of fewer rows would lose what cannot be made again.
        whole = arguments.sheet.read_bytes()
        found[arguments.sheet] = lambda path: path.write_bytes(whole)
        names = ", ".join(pictures.missing)
        print(f"{arguments.sheet} stays as it is: no pictures were collected of {names}", file=sys.stderr)
    elif arguments.sheet is not None and pictures.rows:
        found[arguments.sheet] = lambda path: write_rows(path, pictures.rows)
    for path in (arguments.plot, arguments.sheet):
        if path is not None and path not in found:
            print(f"nothing to draw for {path}: nothing of it was collected", file=sys.stderr)
    return found


def _references(arguments: argparse.Namespace, network: "nn.Module") -> "Statistics":
    """Of all photographs, from the file in which an earlier run has kept them."""
    from nearfield.bench.quality import photograph_statistics
    from nearfield.training import data

    source = data.pictures(arguments.photographs)
    name = f"photographs-{arguments.size}-{data.fingerprint(source)[:12]}.safetensors"
    kept = arguments.kept / name if arguments.kept else arguments.out.with_name(name)
    with Bar(len(source), "photographs") as bar:
        batches = data.batches(
            source, arguments.size, on_progress=lambda done, total, words: bar.show(done, words)
        )
        return photograph_statistics(batches, network, arguments.size, kept)


def patterns_of(text: str) -> list[quality_cases.Pattern]:
    """What `--patterns` names."""
    try:
        return quality_cases.read_patterns(text)
    except ValueError as error:
        raise UsageError(f"`--patterns` must {error}.") from None


def second_network(device: "torch.device") -> "dict[str, nn.Module]":
    """EfficientNet-Lite0, where it is installed."""
    from nearfield import quality
    from nearfield.quality.inception import MissingWeights

    try:
        return {"efficientnet": quality.load_efficientnet(device)}
    except MissingWeights as error:
        print(f"no distances of EfficientNet's features: {error}", file=sys.stderr)
        return {}
