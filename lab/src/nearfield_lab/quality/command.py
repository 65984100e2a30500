"""`nearfield quality A B`: how far images are from others, printed as a table and written as JSON.

Whoever owns the command line calls `add_command`. What the command needs besides torch is imported when it runs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from nearfield._files import write_json
from nearfield.cli import UsageError, settings_of
from nearfield.layout import Geometry
from nearfield.methods import Borders, fields
from nearfield_lab.missing import MissingExtra
from nearfield_lab.quality import inception
from nearfield_lab.quality.inception import WHERE_TO_GET_IT, MissingWeights
from nearfield_lab.quality.measure import BY_FEATURES, BY_PAIRS, METRICS, Source, Task, measure

OK, FAILED, USAGE = 0, 1, 2

Facts = Callable[[], dict[str, Any]]

_FEW = 200
"""Below so many images a note says what that does to figures."""
_EXAMPLES = """examples:
  nearfield quality samples/ photographs.tar --num 1500 --size 256
  nearfield quality photographs.tar --size 512 --save photographs.safetensors
  nearfield quality samples/ photographs.safetensors --metrics fid,kid --json quality.json
  nearfield quality sparse/ dense/ --pairs --seam-method NAME --set dense_layers=2 --pixels 8

exit codes: 0 done, 1 a check or a write failed, 2 wrong usage, 130 interrupted"""


def add_command(subparsers: Any, facts: Facts | None = None) -> None:
    """Add the command to a parser's subparsers; `arguments.run(arguments)` runs it and returns the exit code.

    Args:
        facts: gives the facts about the machine that go into the JSON; by default versions and the device.
    """
    summary = "distances between two sets of images: FID, KID, precision, LPIPS, PSNR, SSIM, seams"
    parser = subparsers.add_parser(
        "quality",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    _add_arguments(parser)
    parser.set_defaults(run=lambda arguments: run(arguments, facts or own_facts))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = "a folder, a tar archive, a sheet of images, or statistics written by --save"
    parser.add_argument("images", metavar="A", help=f"the images: {kinds}")
    parser.add_argument("references", metavar="B", nargs="?", help="photographs, or the dense model's images")
    parser.add_argument(
        "--metrics", metavar="A,B", help=f"any of {', '.join(METRICS)} (default: those that can be computed)"
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="A and B were made from the same seeds: compare image by image, too",
    )
    parser.add_argument(
        "--seam-method",
        metavar="NAME",
        help="the method whose tiles, blocks or merged regions to look at; B are the dense images",
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of that method; repeat it for further ones",
    )
    parser.add_argument("--text", default="0", metavar="N", help="text tokens of that model (default 0)")
    parser.add_argument(
        "--pixels", default="16", metavar="N", help="pixels per side of a token of that model (default 16)"
    )
    parser.add_argument(
        "--q-block",
        metavar="N",
        help="queries per list where A was made: 128 for tiles on a GPU (default: what suits this device)",
    )
    parser.add_argument(
        "--size", default="512", metavar="N", help="pixels per side of all images (default 512)"
    )
    parser.add_argument("--num", metavar="N", help="so many images of each, evenly spaced (default: all)")
    parser.add_argument(
        "--inception",
        metavar="FILE",
        help="the FID network as safetensors (default: the installed package's)",
    )
    parser.add_argument("--batch", default="32", metavar="N", help="images at once (default 32)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    parser.add_argument("--save", metavar="FILE", help="write the statistics of A (.safetensors)")
    parser.add_argument("--json", metavar="FILE", help="write the figures and machine facts")


def run(arguments: argparse.Namespace, facts: Facts) -> int:
    """Measure, print and write; returns the exit code. What cannot be used is said in one line on stderr."""
    try:
        return _run(arguments, facts)
    except (UsageError, MissingWeights, MissingExtra, FileNotFoundError, ValueError) as error:
        print(f"nearfield: error: {error}", file=sys.stderr)
        return USAGE


def _run(arguments: argparse.Namespace, facts: Facts) -> int:
    _check_outputs(arguments)
    task = _task(arguments)
    first = Source(Path(arguments.images), task.size, task.num)
    second = Source(Path(arguments.references), task.size, task.num) if arguments.references else None
    notes = _remarks(first, second, task)
    if arguments.metrics is None and not task.needs_features:
        notes.append(f"no {', '.join(BY_FEATURES)}: their network is not installed. {WHERE_TO_GET_IT}")
    if arguments.pairs and second is not None:
        _check_pairs(first, second)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    record = measure(first, second, task)
    if second is not None:
        print(_text(record, arguments))
    document = {
        "format": 1,
        "command": "quality",
        "machine": facts(),
        "A": arguments.images,
        "B": arguments.references,
        "size": task.size,
        "device": str(task.device),
        "seam_method": " ".join([arguments.seam_method, *arguments.settings])
        if arguments.seam_method
        else None,
        "notes": notes,
        "figures": record,
    }
    return _write(arguments, first, document)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _wrong(argument: str, rule: str, got: object, hint: str = "") -> NoReturn:
    raise UsageError(f"`{argument}` must {rule}; got {got}." + (f" {hint}" if hint else ""))


def _task(arguments: argparse.Namespace) -> Task:
    size = _integer("--size", arguments.size, 32)
    return Task(
        metrics=_metrics(arguments),
        size=size,
        batch=_integer("--batch", arguments.batch, 1),
        device=_device(arguments.device),
        num=None if arguments.num is None else _integer("--num", arguments.num, 2),
        inception=None if arguments.inception is None else Path(arguments.inception),
        borders=_borders(arguments, size),
    )


def _metrics(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for, or all that the arguments allow."""
    if arguments.references is None:
        if arguments.save is None:
            _wrong("B", "be given unless `--save` writes the statistics of A", "nothing")
        return ("fid",)
    if arguments.metrics is None:
        seams = ("seams",) if arguments.seam_method else ()
        others = (*(BY_PAIRS if arguments.pairs else ()), *seams)
        return others if others and not _has_features(arguments) else (*BY_FEATURES, *others)
    chosen = tuple(dict.fromkeys(name.strip() for name in arguments.metrics.split(",")))
    for name in chosen:
        if name not in METRICS:
            _wrong("--metrics", f"be any of {', '.join(METRICS)}", repr(name))
        if name in BY_PAIRS and not arguments.pairs:
            _wrong(
                "--metrics",
                f"go with `--pairs` for {name}",
                repr(arguments.metrics),
                "Pairs share their seeds.",
            )
    if arguments.save and not any(name in BY_FEATURES for name in chosen):
        _wrong("--metrics", f"name one of {', '.join(BY_FEATURES)} for `--save`", repr(arguments.metrics))
    if ("seams" in chosen) != (arguments.seam_method is not None):
        _wrong(
            "--metrics", "name seams where `--seam-method` is given, and only there", repr(arguments.metrics)
        )
    return chosen


def _has_features(arguments: argparse.Namespace) -> bool:
    """Whether features can be computed, or were, or must be; else figures that need none are enough."""
    is_kept = all(name.endswith(".safetensors") for name in (arguments.images, arguments.references))
    return bool(is_kept or arguments.save or arguments.inception or inception.packaged_file())


def _borders(arguments: argparse.Namespace, size: int) -> Borders | None:
    """Lines of the method that was named, on square images of `size` pixels."""
    if arguments.seam_method is None:
        for option, value in (("--set", arguments.settings), ("--q-block", arguments.q_block)):
            if value:
                _wrong(option, "be given with `--seam-method` only", value)
        return None
    pixels, text = _integer("--pixels", arguments.pixels, 1), _integer("--text", arguments.text, 0)
    if size % pixels:
        _wrong("--pixels", f"divide the size ({size})", pixels)
    q_block = None if arguments.q_block is None else _integer("--q-block", arguments.q_block, 16)
    geometry = Geometry((size // pixels, size // pixels), text=text)
    try:
        method = fields.made(arguments.seam_method, settings_of(arguments))
        borders = method.borders(geometry, q_block=q_block)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`--seam-method` cannot be used: {error}") from None
    if borders is None:
        _wrong("--seam-method", "part neighbours by the geometry, not by content", method.label)
    return borders


def _integer(argument: str, text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= 2**24:
        _wrong(argument, f"be an integer of at least {least}", repr(text))
    return int(text)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        _wrong("--device", "name a device", repr(name), "Example: --device cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        _wrong("--device", f"be there ({torch.cuda.device_count()} CUDA devices are)", repr(name))
    return device


def _check_outputs(arguments: argparse.Namespace) -> None:
    """What will be written can be, as far as can be told before there is anything to write."""
    for argument, text, suffix in (
        ("--save", arguments.save, ".safetensors"),
        ("--json", arguments.json, ""),
    ):
        if text is None:
            continue
        path = Path(text)
        if path.is_dir() or not path.name:
            _wrong(argument, "name a file", repr(text))
        if not path.name.endswith(suffix):
            _wrong(argument, f"end in {suffix}", repr(text))
        if any(parent.exists() and not parent.is_dir() for parent in path.absolute().parents):
            _wrong(argument, "stand in a directory", repr(text))


def _check_pairs(first: Source, second: Source) -> None:
    if len(first) != len(second):
        _wrong("--pairs", "have equally many images on both sides", f"{len(first)} and {len(second)}")
    if first.images is None or second.images is None:
        _wrong("--pairs", "compare images, not statistics", f"{first.path} and {second.path}")
    if first.images.is_sheet or second.images.is_sheet:  # which has no names
        return
    for one, other in zip(first.images.names, second.images.names, strict=True):
        if one != other:
            _wrong("--pairs", "have the same names on both sides", f"{one} beside {other}")


def _remarks(first: Source, second: Source | None, task: Task) -> list[str]:
    """What a reader must know to compare the figures."""
    notes = []
    if second is not None and len(first) != len(second) and task.needs_features:
        notes.append(
            f"A has {len(first):,} images and B {len(second):,}: FID depends on the number of images,"
            " compare it with figures of the same numbers only (--num takes equally many)"
        )
    fewest = min(len(source) for source in (first, second) if source is not None)
    if second is not None and task.needs_features and fewest < _FEW:
        notes.append(
            f"{fewest} images are few: an FID is then mostly bias, and precision and recall say next to nothing"
        )
    for source in filter(None, (first, second)):
        if source.statistics is not None and source.statistics.size not in (0, task.size):
            notes.append(f"{source.path} was made at {source.statistics.size} pixels, not at {task.size}")
    return notes


# -- results -----------------------------------------------------------------------------------------------------------

_LINES = (
    ("FID", "fid", ".2f", None),
    ("KID x 1000", "kid", ".3f", "kid_error"),
    ("precision", "precision", ".3f", None),
    ("recall", "recall", ".3f", None),
    ("LPIPS", "lpips", ".4f", None),
    ("PSNR dB", "psnr", ".2f", None),
    ("SSIM", "ssim", ".4f", None),
    ("seam energy of A", "seam", ".4f", "seam_error"),
    ("seam energy of B", "dense_seam", ".4f", "dense_seam_error"),
)


def _text(record: dict[str, Any], arguments: argparse.Namespace) -> str:
    heading = f"{arguments.images} ({record['images']:,} images) against {arguments.references}"
    lines = [f"{heading} ({record['references']:,} images)"]
    for label, name, form, error in _LINES:
        if record.get(name) is None:
            continue
        scale = 1000 if name == "kid" else 1
        line = f"  {label:<18}{record[name] * scale:{form}}"
        if error and record.get(error) is not None:
            line += f" ± {record[error] * scale:{form}}"
        lines.append(line)
    if record.get("equal_images"):
        lines.append(f"  {'equal pairs':<18}{record['equal_images']} (not part of the PSNR)")
    if record.get("seam") is not None:
        lines.append(f"  {'seams, A over B':<18}{record['seam'] / record['dense_seam']:.4f}")
    return "\n".join(lines)


def _write(arguments: argparse.Namespace, first: Source, document: dict[str, Any]) -> int:
    writers: list[tuple[str, Callable[[Path], None]]] = []
    if arguments.save and first.statistics is not None:
        writers.append((arguments.save, first.statistics.save))
    if arguments.json:
        writers.append((arguments.json, lambda path: write_json(path, document)))
    code = OK
    for name, write in writers:
        try:
            write(Path(name))
        except OSError as error:
            print(f"nearfield: error: {name} was not written: {error}", file=sys.stderr)
            code = FAILED
        else:
            print(f"wrote {name}")
    return code


def own_facts() -> dict[str, Any]:
    """The least a reader needs to judge a figure."""
    import platform

    from nearfield import __version__

    gpus: Sequence[str] = [
        torch.cuda.get_device_name(index)
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    return {
        "versions": {
            "nearfield": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": list(gpus),
    }
