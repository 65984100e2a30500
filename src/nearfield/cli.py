"""The command line. Arguments are read here with nothing imported but the package itself (whose `__init__` imports
torch); what the commands need besides is imported inside `main`, which says in one line what went wrong.

Exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nearfield.bench import hilbert_cases, model_cases, presets

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# The library's, written out so that this file needs nothing to read arguments; a test holds them to the originals.
QUERY_BLOCKS = (16, 32, 64, 128, 192)
GRAINS = (1, 2, 4, 8, 16, 32, 64, 128, 192)
SHARES = ("two-way", "keys")
SHARED = ("centre", "distributed", "none")
CURVES = ("auto", "hilbert", "hilbert-closed", "morton", "raster")
IMPLS = ("auto", "gluon", "triton", "grouped", "reference")
_CODES = "exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted"

# What `explain` builds at most: a preview counts every block, and the figures take some forty bytes per listed id.
_MOST_BLOCKS, _MOST_IDS = 2**29, 2**26
_MOST_DRAWN, _MOST_LAYERS, _MOST_TILES = 2**16, 8, 2**12


Drawing = Callable[[Path, Sequence[dict[str, Any]], str], None]


class UsageError(Exception):
    """An argument that cannot be used, said as "`argument` must rule; got value. Hint"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _prepare_streams()
    try:
        return _run(argv)
    except UsageError as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nnearfield: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has left
        _drop_unwritten()
        return OK
    except OSError as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        _drop_unwritten()
        return FAILED


def _run(argv: Sequence[str] | None) -> int:
    if sys.stdout is None:
        raise OSError("stdout is closed")
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    finally:
        sys.stdout.flush()


def _prepare_streams() -> None:
    """Where the encoding lacks a character, print "?" rather than fail; where stderr is closed, complain to nobody."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _drop_unwritten() -> None:
    """What stdout does not take, Python would try to flush once more at its exit, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- commands ----------------------------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace) -> int:
    from nearfield.bench import doctor

    report = doctor.examine()
    print(json.dumps(report, indent=1) if arguments.json else doctor.text(report))
    return OK if report["ok"] else FAILED


def _explain(arguments: argparse.Namespace) -> int:
    preset = presets.PRESETS[arguments.preset].changed(arguments.grid, arguments.text, arguments.heads)
    _require_fit(preset, arguments.tiles, arguments.q_block, arguments.k_block)
    from nearfield.bench import explain

    report, plan = explain.examine(
        preset, arguments.tiles, arguments.layer, arguments.q_block, arguments.k_block
    )
    print(json.dumps(report, indent=1) if arguments.json else explain.text(report, plan))
    return OK


def _require_fit(preset: presets.Preset, tiles: int, q_block: int, k_block: int) -> None:
    rows, columns = -(-preset.tokens // q_block), -(-preset.tokens // k_block)
    text_rows = -(-preset.text // q_block)
    read = preset.text + -(-preset.image // tiles) + q_block
    ids = text_rows * columns + (rows - text_rows) * min(columns, -(-read // k_block))
    for size, most, what in ((rows * columns, _MOST_BLOCKS, "blocks"), (ids, _MOST_IDS, "listed ids")):
        if size > most:
            _wrong(
                "--grid",
                f"with `--text` make a plan of at most {most:,} {what}",
                f"about {size:,} ({preset.tokens:,} tokens in blocks of {q_block} x {k_block})",
                "Use larger --q-block and --k-block, or a smaller --grid or --text.",
            )


def _demo(arguments: argparse.Namespace) -> int:
    if len(arguments.grid) != 2:
        _wrong("--grid", "have two sides to be drawn", _grid_name(arguments.grid), "Example: --grid 64x64")
    if math.prod(arguments.grid) > _MOST_DRAWN:
        _wrong("--grid", f"hold at most {_MOST_DRAWN:,} tokens to be drawn", f"{math.prod(arguments.grid):,}")
    _require_drawing("--out")
    from nearfield.bench import demo

    preset = demo.preset_for(arguments.grid)
    demo.draw(arguments.out, preset, arguments.tiles)
    print(f"wrote {arguments.out}")
    text, passed = demo.speed_table(preset, arguments.tiles)
    print(text)
    return OK if passed else FAILED


def _show(arguments: argparse.Namespace) -> int:
    _require_drawable(arguments)
    _require_drawing("--out")
    from nearfield import Geometry, Hilbert
    from nearfield.bench import show

    names = ("tiles", "shared", "share", "shared_tokens", "curve", "far", "interleave")
    fields = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    try:
        geometry = Geometry(arguments.grid, text=arguments.text)
        shown = show.examine(geometry, Hilbert(**fields), arguments.layer, arguments.q_block)
        report = show.record(shown)
    except ValueError as error:  # fields that do not go together, or not with this grid
        raise UsageError(str(error)) from None
    show.draw(arguments.out, shown)
    if arguments.json:
        print(json.dumps(report | {"picture": str(arguments.out)}, indent=1))
    else:
        print(f"{report['description']}\nwrote {arguments.out}")
    return OK


def _require_drawable(arguments: argparse.Namespace) -> None:
    grid, tokens = arguments.grid, math.prod(arguments.grid)
    if len(grid) == 1:
        _wrong("--grid", "have two or three sides to be drawn", _grid_name(grid), "Example: --grid 64x64")
    if tokens > _MOST_DRAWN:
        _wrong("--grid", f"hold at most {_MOST_DRAWN:,} tokens to be drawn", f"{tokens:,}")
    if len(arguments.layer) > _MOST_LAYERS:
        _wrong("--layer", f"name at most {_MOST_LAYERS} layers to be drawn", len(arguments.layer))


def _bench_attend(arguments: argparse.Namespace) -> int:
    _require_reports("--png", arguments.png, arguments.json)
    import torch

    from nearfield import plots
    from nearfield.bench import attend, machine, report
    from nearfield.bench.cases import cases as all_cases
    from nearfield.bench.progress import Progress
    from nearfield.bench.timing import Effort

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        print(f"{len(cases)} measurements on {machine.device_name(device)}:", *cases, sep="\n  ")
        return OK
    _note_load(device.type)
    with Progress(len(cases)) as progress:
        results = attend.run_all(cases, device, Effort.of(device, arguments.quick), progress.step)
    print(report.results_table(results))
    if arguments.quick and (note := report.too_small(results)):
        print(note)
    document = report.as_json(results, machine.facts())
    written = _write_reports(
        document, arguments.json, arguments.png, plots.benchmark_bars, machine.device_name(device)
    )
    return _verdict(results, written)


def _bench_hilbert(arguments: argparse.Namespace) -> int:
    _require_reports("--plot", arguments.plot, arguments.json)
    import torch

    from nearfield import plots
    from nearfield.bench import hilbert, hilbert_report, machine
    from nearfield.bench.progress import Progress
    from nearfield.bench.timing import Effort

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = arguments.cases or _default_cases(device.type, arguments.quick)
    cases = [hilbert_cases.CASES[name] for name in names]
    if arguments.dry_run:
        print(f"{len(cases)} measurements on {machine.device_name(device)}:", *cases, sep="\n  ")
        return OK
    _note_load(device.type)
    options = hilbert.Options(
        tuple(arguments.layers), arguments.q_block, arguments.k_block, arguments.impl, arguments.flex
    )
    with Progress(len(cases)) as progress:
        effort = Effort.of(device, arguments.quick)
        results = hilbert.run_all(cases, options, device, effort, progress.step)
    print(f"{machine.device_name(device)}, {_layers_words(arguments.layers)}")
    print(hilbert_report.results_table(results))
    document = hilbert_report.as_json(results, machine.facts())
    written = _write_reports(
        document, arguments.json, arguments.plot, plots.hilbert_bars, machine.device_name(device)
    )
    return _verdict(results, written)


def _bench_model(arguments: argparse.Namespace) -> int:
    import torch

    from nearfield.bench import flux_model, machine, model, model_report
    from nearfield.bench.progress import Progress
    from nearfield.bench.timing import Effort

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("tiles", "share", "shared_tokens", "far", "interleave")
    fields = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    case = model_cases.ModelCase(arguments.model, arguments.layers, arguments.tiny, fields)
    default = model_cases.TINY_SIZES if arguments.tiny else model_cases.SIZES
    sizes = [model_cases.Size(*size) for size in arguments.sizes or default]
    effort = Effort(arguments.rounds, seconds=0.4 * arguments.rounds, most=10)
    with Progress(len(sizes) + 2) as progress:
        try:
            progress.step(f"making {arguments.model} with random weights")
            bench = model.ModelBench(case, device, effort, arguments.impl)
        except flux_model.MissingDiffusers as error:
            raise UsageError(str(error)) from None
        except flux_model.TooLarge as error:
            _wrong("--model", "fit into memory", error, "Use --layers 2+4 for fewer layers, or --tiny.")
        progress.step("checking outputs")
        checked = bench.check(model.check_size(sizes))
        if not checked.passed:
            print(f"no figures: {checked}")
            return FAILED
        results = []
        for size in sizes:
            progress.step(f"{size}: {size.tokens + case.text:,} tokens")
            results.append(bench.run(size))
    parameters = flux_model.num_parameters(bench.model)
    print(model_report.heading(case, parameters, machine.device_name(device), bench.dtype))
    print(model_report.results_table(results))
    print(f"checked: {checked}")
    document = model_report.as_json(results, checked, parameters, machine.facts())
    return _verdict(results, _write_reports(document, arguments.json))


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


def _note_load(device: str) -> None:
    from nearfield.bench import machine

    if device == "cpu" and (load := machine.load()) and load > (os.cpu_count() or 1):
        print(f"note: {load} processes want to run here; times will be long and uneven", file=sys.stderr)


def _verdict(results: Sequence[Any], written: bool) -> int:
    """Done if something was measured, nothing was wrong, and all of it was written."""
    measured = any(result.status == "ok" for result in results)
    failed = any(result.status in ("check failed", "broke") for result in results)
    return OK if measured and written and not failed else FAILED


def _default_presets(device: str, quick: bool) -> tuple[str, ...]:
    if device == "cuda":
        return presets.QUICK_ON_CUDA if quick else presets.ON_CUDA
    return presets.QUICK_ON_CPU if quick else presets.ON_CPU


def _write_reports(
    document: dict[str, Any],
    json_path: Path | None,
    picture: Path | None = None,
    draw: Drawing | None = None,
    device_name: str = "",
) -> bool:
    """Write what was asked for, each whatever becomes of the other; returns whether all of it was written."""
    from nearfield.bench import report

    writers: dict[Path, Callable[[], None]] = {}
    if json_path:
        writers[json_path] = lambda: report.write_json(json_path, document)
    if picture and draw and any(record["status"] == "ok" for record in document["results"]):
        writers[picture] = lambda: draw(picture, document["results"], device_name)
    elif picture:
        print("nothing to draw: no result passed its check", file=sys.stderr)
    written = True
    for path, write in writers.items():
        try:
            write()
        except OSError as error:
            print(f"nearfield: error: {path} was not written: {error}", file=sys.stderr)
            written = False
        else:
            print(f"wrote {path}")
    return written


def _require_reports(argument: str, picture: Path | None, json_path: Path | None) -> None:
    """A picture can be drawn if one was asked for, and is another file than the JSON."""
    if picture is None:
        return
    _require_drawing(argument)
    if json_path and json_path.resolve() == picture.resolve():
        _wrong(argument, "be another file than `--json`", repr(str(picture)))


def _require_drawing(argument: str) -> None:
    from nearfield import plots

    try:
        plots.require_matplotlib()
    except plots.MissingExtra as error:
        raise UsageError(f"`{argument}` needs a picture. {error}") from None


# -- arguments ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See `{self.prog} --help`.")

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr)  # argparse's own passes over what cannot be written


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nearfield",
        description="Sparse attention for diffusion transformers: who reads whom, how fast, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"examples:\n  nearfield doctor\n  nearfield explain flux-1024 --grid 90x160\n  nearfield demo\n"
        f"  nearfield show --grid 64x64 --layer 0..3\n  nearfield bench attend --quick\n\n{_CODES}",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    _show_help_without_command(parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_doctor(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_demo(commands)
    _add_show(commands)
    return parser


def _show_help_without_command(parser: argparse.ArgumentParser) -> None:
    def show_help(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return USAGE

    parser.set_defaults(run=show_help)


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, examples: str
) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"examples:\n{examples}\n\n{_CODES}",
    )
    added.set_defaults(run=run)
    return added


def _add_doctor(commands: Any) -> None:
    summary = "versions, devices, which implementation runs and why, and a self-check"
    parser = _command(commands, "doctor", _doctor, summary, "  nearfield doctor\n  nearfield doctor --json")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_explain(commands: Any) -> None:
    parser = _command(
        commands,
        "explain",
        _explain,
        "the curve, the plan, its cost and the implementation for one attention call",
        "  nearfield explain flux-1024\n  nearfield explain flux-2048 --tiles 4 --layer 3\n"
        "  nearfield explain wan-480p --grid 21x45x80 --json",
    )
    parser.add_argument(
        "preset", metavar="PRESET", type=_preset("PRESET"), help=f"one of {', '.join(presets.PRESETS)}"
    )
    parser.add_argument(
        "--grid", type=_grid, metavar="HxW", help="image tokens per side, or frames x height x width"
    )
    parser.add_argument(
        "--tiles",
        type=_integer("--tiles", 1),
        default=16,
        metavar="N",
        help="tiles along the curve (default 16)",
    )
    parser.add_argument(
        "--text", type=_integer("--text", 0), metavar="N", help="text tokens (default: the preset's)"
    )
    parser.add_argument(
        "--heads", type=_integer("--heads", 1, 2**16), metavar="N", help="heads (default: the preset's)"
    )
    parser.add_argument(
        "--layer",
        type=_integer("--layer", 0),
        default=0,
        metavar="N",
        help="layer, which slides the tiles (default 0)",
    )
    parser.add_argument(
        "--q-block",
        type=_member("--q-block", QUERY_BLOCKS),
        default=128,
        metavar="N",
        help="queries per list (default 128)",
    )
    parser.add_argument(
        "--k-block",
        type=_member("--k-block", GRAINS),
        default=64,
        metavar="N",
        help="keys per id (default 64)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_bench(commands: Any) -> None:
    summary = "measure on this machine"
    bench = commands.add_parser("bench", help=summary, description=f"{summary.capitalize()}.")
    _show_help_without_command(bench)
    benchmarks = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    _add_bench_attend(benchmarks)
    _add_bench_hilbert(benchmarks)
    _add_bench_model(benchmarks)


def _add_bench_attend(benchmarks: Any) -> None:
    parser = _command(
        benchmarks,
        "attend",
        _bench_attend,
        "time attend beside dense attention on the same tensors; a wrong answer gets no figure",
        "  nearfield bench attend --quick\n  nearfield bench attend --dry-run\n"
        "  nearfield bench attend --presets flux-2048,wan-480p --grains 64,16,1 --backward\n"
        "  nearfield bench attend --ragged --json results.json --png results.png",
    )
    parser.add_argument(
        "--presets",
        type=_list(_preset("--presets")),
        metavar="A,B",
        help=f"any of {', '.join(presets.PRESETS)}",
    )
    parser.add_argument(
        "--grains",
        type=_list(_member("--grains", GRAINS)),
        default=[64, 16, 1],
        metavar="N,N",
        help="keys per id (default 64,16,1)",
    )
    parser.add_argument(
        "--impl",
        type=_list(_member("--impl", IMPLS)),
        default=["auto"],
        metavar="A,B",
        help=f"any of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--q-block",
        type=_member("--q-block", QUERY_BLOCKS),
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
    parser.add_argument(
        "--json", type=_output("--json"), metavar="FILE", help="write results and machine facts"
    )
    parser.add_argument(
        "--png", type=_output("--png", ".png"), metavar="FILE", help="draw the results (.png)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _add_bench_hilbert(benchmarks: Any) -> None:
    parser = _command(
        benchmarks,
        "hilbert",
        _bench_hilbert,
        "time one attention call of the Hilbert method, text and shared rows included, beside dense attention",
        "  nearfield bench hilbert --quick\n  nearfield bench hilbert --cases 2048-keys,2048-far --layers 0..3\n"
        "  nearfield bench hilbert --flex --json hilbert.json --plot hilbert.png",
    )
    parser.add_argument(
        "--cases",
        type=_list(_member("--cases", tuple(hilbert_cases.CASES))),
        metavar="A,B",
        help=f"any of {', '.join(hilbert_cases.CASES)}",
    )
    parser.add_argument(
        "--layers",
        type=_layers("--layers"),
        default=[1],
        metavar="N,N",
        help="whose tiles to read, averaged; 0..3 is a whole cycle (default 1, which slides)",
    )
    parser.add_argument(
        "--q-block",
        type=_member("--q-block", QUERY_BLOCKS),
        metavar="N",
        help="queries per list (default: what suits the device)",
    )
    parser.add_argument(
        "--k-block",
        type=_member("--k-block", GRAINS),
        metavar="N",
        help="keys per id (default: what suits the device)",
    )
    parser.add_argument(
        "--impl",
        type=_member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--flex", action="store_true", help="also time torch's flex_attention, compiled, with the same mask"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few repetitions")
    parser.add_argument(
        "--json", type=_output("--json"), metavar="FILE", help="write results and machine facts"
    )
    parser.add_argument(
        "--plot", type=_output("--plot", ".png"), metavar="FILE", help="draw the results (.png)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def _add_bench_model(benchmarks: Any) -> None:
    parser = _command(
        benchmarks,
        "model",
        _bench_model,
        "time one denoising step of a real architecture with random weights: dense, with the Hilbert method, and"
        " with no attention at all",
        "  nearfield bench model --tiny\n  nearfield bench model --sizes 1024,2048,4096 --json model.json\n"
        "  nearfield bench model --layers 2+4 --sizes 1024 --share two-way --tiles 4",
    )
    parser.add_argument(
        "--model",
        type=_member("--model", model_cases.MODELS),
        default=model_cases.MODELS[0],
        metavar="NAME",
        help=f"one of {', '.join(model_cases.MODELS)} (default {model_cases.MODELS[0]})",
    )
    parser.add_argument(
        "--sizes",
        type=_list(_pixels("--sizes")),
        metavar="N,HxW",
        help="pixels of the images (default 1024,2048,4096)",
    )
    parser.add_argument(
        "--layers", type=_two_layers, metavar="N+N", help="fewer layers: double-stream + single-stream blocks"
    )
    parser.add_argument("--tiny", action="store_true", help="a few narrow layers and a small image")
    _add_method(parser)
    parser.add_argument(
        "--impl",
        type=_member("--impl", IMPLS),
        default="auto",
        metavar="A",
        help=f"one of {', '.join(IMPLS)} (default auto)",
    )
    parser.add_argument(
        "--rounds",
        type=_integer("--rounds", 2, 1000),
        default=5,
        metavar="N",
        help="turns in which everything is timed (default 5)",
    )
    parser.add_argument(
        "--json", type=_output("--json"), metavar="FILE", help="write results and machine facts"
    )


def _add_method(parser: argparse.ArgumentParser, most_tiles: int = 2**24) -> None:
    """Fields of the Hilbert method; what is not given is left to the method or the size."""
    parser.add_argument(
        "--tiles", type=_integer("--tiles", 1, most_tiles), metavar="N", help="tiles per image (default 16)"
    )
    parser.add_argument(
        "--share",
        type=_member("--share", SHARES),
        metavar="HOW",
        help="whether shared tokens read everything, too (two-way), or are only read (keys)",
    )
    parser.add_argument(
        "--shared-tokens", type=_integer("--shared-tokens", 1), metavar="N", help="how many tokens are shared"
    )
    parser.add_argument(
        "--far",
        type=_integer("--far", 2),
        metavar="N",
        help="tokens per summary of what lies outside the tile",
    )
    parser.add_argument(
        "--interleave", action="store_const", const=True, help="tiles differ between heads, too"
    )


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        _demo,
        "draw the curve, the tiles and the mask, and print what they save on this machine",
        "  nearfield demo\n  nearfield demo --grid 45x80 --tiles 9 --out tiles.png",
    )
    parser.add_argument(
        "--grid", type=_grid, default=(64, 64), metavar="HxW", help="image tokens per side (default 64x64)"
    )
    parser.add_argument(
        "--tiles",
        type=_integer("--tiles", 1),
        default=16,
        metavar="N",
        help="tiles along the curve (default 16)",
    )
    parser.add_argument(
        "--out",
        type=_output("--out", ".png"),
        default="nearfield-demo.png",
        metavar="FILE",
        help="the picture (default nearfield-demo.png)",
    )


def _add_show(commands: Any) -> None:
    parser = _command(
        commands,
        "show",
        _show,
        "draw the Hilbert method on an image: the curve, the tiles of some layers, what is shared, who reads whom",
        "  nearfield show\n  nearfield show --grid 64x64 --tiles 16 --layer 0..3 --share keys\n"
        "  nearfield show --grid 21x30x52 --text 0 --shared distributed --out video.svg\n"
        "  nearfield show --grid 45x80 --tiles 9 --far 64 --q-block 64 --json",
    )
    parser.add_argument(
        "--grid",
        type=_grid,
        default=(64, 64),
        metavar="HxW",
        help="image tokens per side, or frames x height x width, of which some frames are drawn (default 64x64)",
    )
    parser.add_argument(
        "--text",
        type=_integer("--text", 0, 2**13),
        default=512,
        metavar="N",
        help="text tokens (default 512)",
    )
    parser.add_argument(
        "--layer",
        type=_layers("--layer"),
        default=[0, 1, 2, 3],
        metavar="N..N",
        help="layers to draw: 2, 0,2 or 0..3 (default 0..3)",
    )
    parser.add_argument(
        "--shared",
        type=_member("--shared", SHARED),
        metavar="WHERE",
        help=f"image tokens that everyone reads: {', '.join(SHARED)} (default centre)",
    )
    parser.add_argument(
        "--curve",
        type=_member("--curve", CURVES),
        metavar="NAME",
        help=f"one of {', '.join(CURVES)} (default auto)",
    )
    _add_method(parser, _MOST_TILES)
    parser.add_argument(
        "--q-block",
        type=_member("--q-block", QUERY_BLOCKS),
        default=16,
        metavar="N",
        help="queries per list, to which tiles are rounded (default 16; on a GPU 128)",
    )
    parser.add_argument(
        "--out",
        type=_output("--out", ".png", ".svg"),
        default="nearfield-show.png",
        metavar="FILE",
        help="the picture, .png or .svg (default nearfield-show.png)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        import nearfield

        print(f"nearfield {nearfield.__version__}")
        parser.exit()


# -- values ------------------------------------------------------------------------------------------------------------


def _wrong(argument: str, rule: str, got: object, hint: str = "") -> NoReturn:
    # Not a ValueError: argparse would replace the message with its own.
    raise UsageError(f"`{argument}` must {rule}; got {got}." + (f" {hint}" if hint else ""))


def _grid(text: str) -> tuple[int, ...]:
    sides = text.lower().split("x")
    if not 1 <= len(sides) <= 3 or not all(side.isdecimal() and int(side) >= 1 for side in sides):
        _wrong("--grid", "be one to three positive sides joined by x", repr(text), "Example: --grid 90x160")
    grid = tuple(map(int, sides))
    if math.prod(grid) > 2**20:
        _wrong("--grid", "hold at most 1,048,576 tokens", f"{math.prod(grid):,}")
    return grid


def _grid_name(grid: tuple[int, ...]) -> str:
    return "x".join(map(str, grid))


def _integer(argument: str, least: int, most: int = 2**24) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            _wrong(argument, f"be an integer of at least {least}", repr(text))
        if value > most:
            _wrong(argument, f"be at most {most:,}", f"{value:,}")
        return value

    return parse


def _member(argument: str, allowed: Sequence[Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        for value in allowed:
            if text == str(value):
                return value
        _wrong(argument, f"be one of {', '.join(map(str, allowed))}", repr(text))

    return parse


def _preset(argument: str) -> Callable[[str], str]:
    return _member(argument, tuple(presets.PRESETS))


def _list(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Values between commas, each once."""
    return lambda text: list(dict.fromkeys(parse(part.strip()) for part in text.split(",")))


def _pixels(argument: str) -> Callable[[str], tuple[int, int]]:
    """`1024` or `768x1344`, in whole tokens."""
    step = model_cases.PIXELS_PER_TOKEN

    def parse(text: str) -> tuple[int, int]:
        sides = text.lower().split("x")
        numbers = [int(side) if side.isdecimal() and len(side) < 6 else 0 for side in sides]
        if len(numbers) > 2 or any(number < step or number % step for number in numbers):
            rule = f"be pixels or height x width, in multiples of {step}"
            _wrong(argument, rule, repr(text), f"Example: {argument} 1024,768x1344")
        return numbers[0], numbers[-1]

    return parse


def _two_layers(text: str) -> tuple[int, int]:
    parts = text.split("+")
    if len(parts) != 2 or not all(part.isdecimal() and 0 < int(part) < 1000 for part in parts):
        _wrong("--layers", "be two numbers of blocks joined by +", repr(text), "Example: --layers 2+4")
    return int(parts[0]), int(parts[1])


def _layers(argument: str) -> Callable[[str], list[int]]:
    """Layers between commas, or from one to another: `2`, `0,2`, `0..3`."""
    number = _integer(argument, 0, 2**16)

    def parse(text: str) -> list[int]:
        layers = list[int]()
        for part in text.split(","):
            first, dots, last = part.strip().partition("..")
            start = number(first)
            stop = number(last) if dots else start
            if stop < start:
                _wrong(
                    argument,
                    "run from the smaller to the larger layer",
                    repr(text),
                    f"Example: {argument} 0..3",
                )
            layers += range(start, stop + 1)
        return list(dict.fromkeys(layers))

    return parse


def _output(argument: str, *suffixes: str) -> Callable[[str], Path]:
    """A file that can be written, as far as can be told before there is anything to write."""
    hint = f"Example: {argument} results{suffixes[0] if suffixes else '.json'}"

    def parse(text: str) -> Path:
        path = Path(text)
        if not text.strip():
            _wrong(argument, "name a file", repr(text), hint)
        if suffixes and not path.name.lower().endswith(suffixes):
            _wrong(argument, f"end in {' or '.join(suffixes)}", repr(text), hint)
        try:
            if path.is_dir() or text.endswith(("/", os.sep)):
                _wrong(argument, "name a file, not a directory", repr(text), hint)
            if path.exists() and not path.is_file():
                _wrong(argument, "name a plain file", repr(text), hint)
            folder = next(parent for parent in path.absolute().parents if parent.exists())
        except OSError as error:
            _wrong(argument, "be a usable path", f"{text!r} ({error.strerror})", hint)
        if not folder.is_dir():
            _wrong(argument, "stand in a directory", f"{text!r}, where {folder} is a file", hint)
        if not os.access(folder, os.W_OK | os.X_OK):
            _wrong(argument, "stand where files can be written", f"{text!r}, where {folder} takes none", hint)
        return path

    return parse
