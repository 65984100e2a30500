"""The command line. Only arguments are handled here; this file asks for torch after they are understood.

Exit codes: 0 done, 1 a check failed, 2 wrong usage, 130 interrupted.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nearfield.bench import presets

OK, CHECK_FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

# The library's, written out so that arguments can be read without torch; a test holds them to the originals.
QUERY_BLOCKS = (16, 32, 64, 128, 192)
GRAINS = (1, 2, 4, 8, 16, 32, 64, 128, 192)
IMPLS = ("auto", "gluon", "triton", "grouped", "reference")
_CODES = "exit codes: 0 done, 1 a check failed, 2 wrong usage, 130 interrupted"


class UsageError(Exception):
    """An argument that cannot be used, said as "`argument` must rule; got value. Hint"."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\nnearfield: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left; what Python would still flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# -- commands ----------------------------------------------------------------------------------------------------------


def _doctor(arguments: argparse.Namespace) -> int:
    from nearfield.bench import doctor

    report = doctor.examine()
    print(json.dumps(report, indent=1) if arguments.json else doctor.text(report))
    return OK if report["ok"] else CHECK_FAILED


def _explain(arguments: argparse.Namespace) -> int:
    from nearfield.bench import explain

    preset = presets.PRESETS[arguments.preset].changed(arguments.grid, arguments.text, arguments.heads)
    report, plan = explain.examine(
        preset, arguments.tiles, arguments.layer, arguments.q_block, arguments.k_block
    )
    print(json.dumps(report, indent=1) if arguments.json else explain.text(report, plan))
    return OK


def _demo(arguments: argparse.Namespace) -> int:
    if len(arguments.grid) != 2:
        _wrong("--grid", "have two sides to be drawn", _grid_name(arguments.grid), "Example: --grid 64x64")
    _require_drawing("--out")
    from nearfield.bench import demo

    preset = demo.preset_for(arguments.grid)
    demo.draw(arguments.out, preset, arguments.tiles)
    print(f"wrote {arguments.out}")
    text, passed = demo.speed_table(preset, arguments.tiles)
    print(text)
    return OK if passed else CHECK_FAILED


def _bench_attend(arguments: argparse.Namespace) -> int:
    if arguments.png:
        _require_drawing("--png")
    import torch

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
    if device.type == "cpu" and (load := machine.load()) and load > (os.cpu_count() or 1):
        print(f"note: {load} processes want to run here; times will be long and uneven", file=sys.stderr)
    with Progress(len(cases)) as progress:
        results = attend.run_all(cases, device, Effort.of(device, arguments.quick), progress.step)
    print(report.results_table(results))
    _write_reports(arguments, report.as_json(results, machine.facts()), machine.device_name(device))
    measured = any(result.status == "ok" for result in results)
    failed = any(result.status in ("check failed", "broke") for result in results)
    return OK if measured and not failed else CHECK_FAILED


def _default_presets(device: str, quick: bool) -> tuple[str, ...]:
    if device == "cuda":
        return presets.QUICK_ON_CUDA if quick else presets.ON_CUDA
    return presets.QUICK_ON_CPU if quick else presets.ON_CPU


def _write_reports(arguments: argparse.Namespace, document: dict[str, Any], device_name: str) -> None:
    from nearfield import plots
    from nearfield.bench import report

    if arguments.json:
        report.write_json(arguments.json, document)
        print(f"wrote {arguments.json}")
    if arguments.png:
        if any(record["status"] == "ok" for record in document["results"]):
            plots.benchmark_bars(arguments.png, document["results"], device_name)
            print(f"wrote {arguments.png}")
        else:
            print("nothing to draw: no result passed its check", file=sys.stderr)


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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nearfield",
        description="Sparse attention for diffusion transformers: who reads whom, how fast, and why.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"examples:\n  nearfield doctor\n  nearfield explain flux-1024 --grid 90x160\n  nearfield demo\n"
        f"  nearfield bench attend --quick\n\n{_CODES}",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_explain(commands)
    _add_bench(commands)
    _add_demo(commands)
    return parser


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
        "--heads", type=_integer("--heads", 1), metavar="N", help="heads (default: the preset's)"
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
    parser = _command(
        bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True),
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
        help="also time the parts of the tile layout, to see what mixing them costs",
    )
    parser.add_argument("--quick", action="store_true", help="one small preset and few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and machine facts")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the results")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


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
        type=Path,
        default=Path("nearfield-demo.png"),
        metavar="FILE",
        help="the picture (default nearfield-demo.png)",
    )


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


def _integer(argument: str, least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            _wrong(argument, f"be an integer of at least {least}", repr(text))
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
    return lambda text: [parse(part.strip()) for part in text.split(",")]
