"""`nearfield quality A B`: how far images are from others, printed as a table and written as JSON."""

import argparse
import sys
from pathlib import Path
from typing import Any

from nearfield import Geometry
from nearfield._files import write_json
from nearfield.cli import (
    FAILED,
    OK,
    UsageError,
    add_device,
    add_integer,
    add_json,
    as_usage,
    command,
    machine,
    output_file,
    settings_of,
    write_all,
    wrong,
)
from nearfield.methods import Borders, fields
from nearfield_lab.commands.further import add_path, add_switch
from nearfield_lab.commands.launched import chosen_device
from nearfield_lab.quality import inception
from nearfield_lab.quality.inception import WHERE_TO_GET_IT
from nearfield_lab.quality.measure import BY_FEATURES, BY_PAIRS, METRICS, Source, Task, measure

_FEW = 200
"""With fewer images a note says what that does to figures."""


def add_commands(commands: Any) -> None:
    parser = command(
        commands,
        "quality",
        _quality,
        "distances between two sets of images: FID, KID, precision, LPIPS, PSNR, SSIM, seams",
        "  nearfield quality samples/ photographs.tar --num 1500 --size 256\n"
        "  nearfield quality photographs.tar --size 512 --save photographs.safetensors\n"
        "  nearfield quality samples/ photographs.safetensors --metrics fid,kid --json quality.json\n"
        "  nearfield quality sparse/ dense/ --pairs --seam-method NAME --set dense_layers=2 --pixels 8",
    )
    kinds = "a folder, a tar archive, a sheet of images, or statistics written by --save"
    parser.add_argument("images", metavar="A", help=f"the images: {kinds}")
    parser.add_argument("references", metavar="B", nargs="?", help="photographs, or the dense model's images")
    parser.add_argument(
        "--metrics", metavar="A,B", help=f"any of {', '.join(METRICS)} (default: those that can be computed)"
    )
    add_switch(parser, "--pairs", "A and B were made from the same seeds: compare image by image, too")
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
    add_integer(parser, "--text", 0, "text tokens of that model", least=0)
    add_integer(parser, "--pixels", 16, "pixels per side of a token of that model")
    words = "queries per list where A was made: 128 for tiles on a GPU (default: what suits this device)"
    add_integer(parser, "--q-block", None, words, least=16)
    add_integer(parser, "--size", 512, "pixels per side of all images", least=32)
    add_integer(parser, "--num", None, "use N images of each set, evenly spaced (default: all)", least=2)
    add_path(
        parser, "--inception", "FILE", "the FID network as safetensors (default: the installed package's)"
    )
    add_integer(parser, "--batch", 32, "images at once")
    add_device(parser)
    kind = output_file("--save", ".safetensors")
    add_path(parser, "--save", "FILE", "write the statistics of A (.safetensors)", type=kind)
    add_json(parser, "write the figures and machine facts")


def _quality(arguments: argparse.Namespace) -> int:
    size, num = arguments.size, arguments.num
    task = Task(
        metrics=_metrics(arguments),
        size=size,
        batch=arguments.batch,
        device=chosen_device(arguments.device),
        num=num,
        inception=arguments.inception,
        borders=_borders(arguments),
    )
    with as_usage(FileNotFoundError):
        first = Source(Path(arguments.images), size, num)
        second = Source(Path(arguments.references), size, num) if arguments.references else None
        if arguments.pairs and second is not None:
            _check_pairs(first, second)
        notes = _remarks(first, second, task)
        if arguments.metrics is None and not task.needs_features:
            notes.append(f"no {', '.join(BY_FEATURES)}: their network is not installed. {WHERE_TO_GET_IT}")
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        record = measure(first, second, task)
    if second is not None:
        print(_text(record, arguments))
    seam_method = [arguments.seam_method, *arguments.settings] if arguments.seam_method else None
    document = {
        "format": 1,
        "command": "quality",
        "machine": machine.facts(),
        "A": arguments.images,
        "B": arguments.references,
        "size": size,
        "device": str(task.device),
        "seam_method": seam_method and " ".join(seam_method),
        "notes": notes,
        "figures": record,
    }
    writers: dict[Path, Any] = {}
    if arguments.save and first.statistics is not None:
        writers[arguments.save] = first.statistics.save
    if arguments.json:
        writers[arguments.json] = lambda path: write_json(path, document)
    return OK if write_all(writers) else FAILED


# -- arguments ---------------------------------------------------------------------------------------------------------


def _metrics(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for, or all that the arguments allow."""
    if arguments.references is None:
        if arguments.save is None:
            wrong("B", "be given unless `--save` writes the statistics of A", "nothing")
        return ("fid",)
    if arguments.metrics is None:
        seams = ("seams",) if arguments.seam_method else ()
        others = (*(BY_PAIRS if arguments.pairs else ()), *seams)
        return others if others and not _has_features(arguments) else (*BY_FEATURES, *others)
    chosen, got = tuple(dict.fromkeys(map(str.strip, arguments.metrics.split(",")))), repr(arguments.metrics)
    for name in chosen:
        if name not in METRICS:
            wrong("--metrics", f"be any of {', '.join(METRICS)}", repr(name))
        if name in BY_PAIRS and not arguments.pairs:
            wrong("--metrics", f"go with `--pairs` for {name}", got, "Pairs share their seeds.")
    if arguments.save and not any(name in BY_FEATURES for name in chosen):
        wrong("--metrics", f"name one of {', '.join(BY_FEATURES)} for `--save`", got)
    if ("seams" in chosen) != (arguments.seam_method is not None):
        wrong("--metrics", "name seams where `--seam-method` is given, and only there", got)
    return chosen


def _has_features(arguments: argparse.Namespace) -> bool:
    """Whether features can be computed, or were, or must be; else figures that need none are enough."""
    is_kept = all(name.endswith(".safetensors") for name in (arguments.images, arguments.references))
    return bool(is_kept or arguments.save or arguments.inception or inception.packaged_file())


def _borders(arguments: argparse.Namespace) -> Borders | None:
    """Lines of the method that was named, on square images of the size that was asked for."""
    if arguments.seam_method is None:
        for option, value in (("--set", arguments.settings), ("--q-block", arguments.q_block)):
            if value:
                wrong(option, "be given with `--seam-method` only", value)
        return None
    if arguments.size % arguments.pixels:
        wrong("--pixels", f"divide the size ({arguments.size})", arguments.pixels)
    side = arguments.size // arguments.pixels
    try:
        method = fields.made(arguments.seam_method, settings_of(arguments))
        borders = method.borders(Geometry((side, side), text=arguments.text), q_block=arguments.q_block)
    except (TypeError, ValueError) as error:
        raise UsageError(f"`--seam-method` cannot be used: {error}") from None
    if borders is None:
        wrong("--seam-method", "part neighbours by the geometry, not by content", method.label)
    return borders


def _check_pairs(first: Source, second: Source) -> None:
    if len(first) != len(second):
        wrong("--pairs", "have equally many images on both sides", f"{len(first)} and {len(second)}")
    if first.images is None or second.images is None:
        wrong("--pairs", "compare images, not statistics", f"{first.path} and {second.path}")
    if first.images.is_sheet or second.images.is_sheet:  # which has no names
        return
    for one, other in zip(first.images.names, second.images.names, strict=True):
        if one != other:
            wrong("--pairs", "have the same names on both sides", f"{one} beside {other}")


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
    ("FID", "fid", ".2f"),
    ("KID x 1000", "kid", ".3f"),
    ("precision", "precision", ".3f"),
    ("recall", "recall", ".3f"),
    ("LPIPS", "lpips", ".4f"),
    ("PSNR dB", "psnr", ".2f"),
    ("SSIM", "ssim", ".4f"),
    ("seam energy of A", "seam", ".4f"),
    ("seam energy of B", "dense_seam", ".4f"),
)


def _text(record: dict[str, Any], arguments: argparse.Namespace) -> str:
    heading = f"{arguments.images} ({record['images']:,} images) against {arguments.references}"
    lines = [f"{heading} ({record['references']:,} images)"]
    for label, name, form in _LINES:
        if record.get(name) is None:
            continue
        scale, error = 1000 if name == "kid" else 1, record.get(f"{name}_error")
        spread = "" if error is None else f" ± {error * scale:{form}}"
        lines.append(f"  {label:<18}{record[name] * scale:{form}}{spread}")
    if record.get("equal_images"):
        lines.append(f"  {'equal pairs':<18}{record['equal_images']} (not part of the PSNR)")
    if record.get("seam") is not None:
        lines.append(f"  {'seams, A over B':<18}{record['seam'] / record['dense_seam']:.4f}")
    return "\n".join(lines)
