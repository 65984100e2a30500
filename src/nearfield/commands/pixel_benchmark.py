"""`nearfield bench pixel`: training steps of a transformer on pixels."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nearfield.bench import pixel_cases
from nearfield.commands.arguments import (
    FAILED,
    OK,
    UsageError,
    comma_list,
    command,
    member,
)
from nearfield.commands.collected import (
    add_results,
    check_results,
    require_results,
    seen_from,
    text_writer,
)
from nearfield.commands.generating import chosen_device, missing_extras_told
from nearfield.commands.options import add_device, add_integer, add_json, add_plot
from nearfield.commands.reports import note_load, require_reports, verdict, write_all, write_reports
from nearfield.commands.training import BACKENDS, TINY_PIXEL


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "pixel",
        _bench_pixel,
        "time whole training steps on pixels, for every attention in turns",
        "  nearfield bench pixel --tiny --size 32 --batch 2\n"
        "  nearfield bench pixel --size 128 --batch 16 --compile --json pixel128.json\n"
        "  nearfield bench pixel --size 256 --batch 4 --attention full,loglinear:levels=2,gated:topk=32 --compile\n"
        "  nearfield bench pixel --results pixel-results.tar.gz --plot loss.png --sheet samples.png",
    )
    parser.add_argument(
        "--attention",
        type=comma_list(_variant_name),
        default=list(pixel_cases.ATTENTION),
        metavar="A,B",
        help="any of "
        + ", ".join(pixel_cases.ATTENTION)
        + ", with fields as in loglinear:levels=2 (default all)",
    )
    add_integer(parser, "--size", 128, "pixels per side", least=8, most=1024)
    add_integer(parser, "--batch", 16, "pictures per step", most=4096)
    add_integer(parser, "--rounds", 5, "turns in which everything is timed", least=2, most=1000)
    parser.add_argument("--compile", action="store_true", help="let torch.compile make the models faster")
    parser.add_argument(
        "--dense-kernels",
        type=comma_list(member("--dense-kernels", BACKENDS)),
        metavar="A,B",
        help=f"torch's kernels for full attention: any of {', '.join(BACKENDS)} (default on a GPU: cudnn,flash)",
    )
    parser.add_argument("--tiny", action="store_true", help="two narrow layers")
    add_device(parser)
    add_json(parser)
    add_results(parser, "train_pixel.sh")
    add_plot(parser, "for --results: draw the losses", ".png", ".svg")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _variant_name(text: str) -> str:
    try:
        return pixel_cases.read_variant(text).name
    except ValueError as error:
        raise UsageError(f"`--attention` must {error}.") from None


def _bench_pixel(arguments: argparse.Namespace) -> int:
    if arguments.results is not None:
        return _show_results(arguments)
    require_results(arguments, "plot")
    from nearfield.bench import machine

    device = chosen_device(arguments.device)
    variants = [pixel_cases.read_variant(name) for name in arguments.attention]
    sizes: dict[str, int] = TINY_PIXEL if arguments.tiny else {}
    words = f"{arguments.size} px, {arguments.size**2:,} tokens x {arguments.batch}"
    words += ", compiled" if arguments.compile else ""
    with missing_extras_told():
        from nearfield.bench import pixel
        from nearfield.bench.progress import Progress
        from nearfield.bench.timing import Effort

        task = pixel.PixelTask(arguments.size, arguments.batch, arguments.compile, sizes)
        try:
            for variant in variants:
                task.config(variant)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None
        if arguments.dry_run:
            print(
                f"training steps at {words} on {machine.device_name(device)}:",
                *(variant.name for variant in variants),
                sep="\n  ",
            )
            return OK
        note_load(device.type)
        effort = Effort(arguments.rounds, seconds=0.4 * arguments.rounds, most=10)
        bench = pixel.PixelBench(task, device, effort, arguments.dense_kernels)
        with Progress(len(bench.lines(variants)) + 1) as progress:
            results = bench.run(variants, progress.step)
    print(f"{machine.device_name(device)}, {words}")
    print(pixel.results_table(results, task))
    document = pixel.as_json(results, task, machine.facts())
    return verdict(results, write_reports(document, arguments.json))


def _show_results(arguments: argparse.Namespace) -> int:
    """Tables of what was trained elsewhere, as JSON, on a page, and as pictures."""
    check_results(arguments)
    require_reports("--plot", arguments.plot, arguments.json)
    with missing_extras_told():
        from nearfield._files import write_json
        from nearfield.bench import pixel_results
        from nearfield.bench.collected import BadResults

        try:
            with pixel_results.opened(arguments.results) as collected:
                document = pixel_results.as_json(collected)
                print(pixel_results.tables(document))
                writers = _drawings(arguments, collected, document["results"])
                if arguments.page is not None:
                    writers[arguments.page] = text_writer(_page_with(arguments, document, list(writers)))
                if arguments.json is not None:
                    writers[arguments.json] = lambda path: write_json(path, document)
                written = write_all(writers)
        except BadResults as error:
            raise UsageError(f"`--results` cannot be used: {error}.") from None
    return OK if written else FAILED


def _drawings(
    arguments: argparse.Namespace, collected: Any, records: list[dict[str, Any]]
) -> dict[Path, Callable[[Path], object]]:
    """What draws the pictures that were asked for, as far as there is something to draw."""
    from nearfield.bench.pixel_results import sheet_rows
    from nearfield.demo.pictures import write_rows
    from nearfield.plots.lines import loss_lines

    rows = sheet_rows(collected) if arguments.sheet is not None else []
    sizes = [record["size"] for record in records if record["curve"]]
    found: dict[Path, Callable[[Path], object]] = {}
    if arguments.plot is not None and len(set(sizes)) < len(sizes):
        found[arguments.plot] = lambda path: loss_lines(path, records)
    if rows:
        found[arguments.sheet] = lambda path: write_rows(path, rows)
    for path in (arguments.plot, arguments.sheet):
        if path is not None and path not in found:
            print(f"nothing to draw for {path}: no two runs, or no pictures, were collected", file=sys.stderr)
    return found


def _page_with(arguments: argparse.Namespace, document: dict[str, Any], drawn: list[Path]) -> str:
    """The page with tables, and with pictures that are made along with it."""
    from nearfield.bench.collected import put_into
    from nearfield.bench.pixel_results import markdown

    words = {
        arguments.plot: "Loss against pictures and time, and over full attention's",
        arguments.sheet: "The first pictures of every model",
    }
    pictures = {words[path]: seen_from(arguments.page, path) for path in drawn}
    source = None if arguments.json is None else seen_from(arguments.page, arguments.json)
    return put_into(arguments.page.read_text(encoding="utf-8"), markdown(document, pictures, source), "pixel")
