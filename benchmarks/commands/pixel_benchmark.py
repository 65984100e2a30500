"""`python -m benchmarks pixel`: training steps of a transformer on pixels."""

import argparse
from typing import Any

from benchmarks import pixel_cases
from nearfield.cli.arguments import OK, UsageError, comma_list, command, member
from nearfield.cli.options import add_device, add_integer, add_json
from nearfield.cli.reports import note_load, verdict, write_reports
from nearfield_lab.commands.generating import chosen_device, missing_extras_told
from nearfield_lab.commands.training import BACKENDS, TINY_PIXEL


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "pixel",
        _bench_pixel,
        "time whole training steps on pixels, for every attention in turns",
        "  python -m benchmarks pixel --tiny --size 32 --batch 2\n"
        "  python -m benchmarks pixel --size 128 --batch 16 --compile --json pixel128.json\n"
        "  python -m benchmarks pixel --size 256 --batch 4 --attention full,loglinear:levels=2 --compile",
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
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _variant_name(text: str) -> str:
    try:
        return pixel_cases.read_variant(text).name
    except ValueError as error:
        raise UsageError(f"`--attention` must {error}.") from None


def _bench_pixel(arguments: argparse.Namespace) -> int:
    from nearfield.cli import machine

    device = chosen_device(arguments.device)
    variants = [pixel_cases.read_variant(name) for name in arguments.attention]
    sizes: dict[str, int] = TINY_PIXEL if arguments.tiny else {}
    words = f"{arguments.size} px, {arguments.size**2:,} tokens x {arguments.batch}"
    words += ", compiled" if arguments.compile else ""
    with missing_extras_told():
        from benchmarks import pixel
        from benchmarks.progress import Progress
        from nearfield.cli.timing import Effort

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
