"""`python -m benchmarks recall`: what sparse patterns keep of full attention's weights, at equal numbers of pairs."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearfield.cli.arguments import OK, UsageError, comma_list, command, integer, wrong
from nearfield.cli.options import add_device, add_integer, add_json, add_number, add_plot
from nearfield.cli.progress import Bar
from nearfield.cli.reports import write_reports
from nearfield_lab.commands.drawing import require_reports
from nearfield_lab.commands.generating import chosen_device, missing_extras_told

if TYPE_CHECKING:
    import torch

    from benchmarks.recall import Recall, Sample


def add_command(benchmarks: Any) -> None:
    parser = command(
        benchmarks,
        "recall",
        _bench_recall,
        "how much of full attention's weight is kept by single keys, blocks and runs of a curve, at equal pairs",
        "  python -m benchmarks recall --latents video.safetensors --plot recall.png --json recall.json\n"
        "  python -m benchmarks recall --weights demo.safetensors --images photographs --num 4",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--latents",
        type=Path,
        metavar="FILE",
        help="safetensors with a latent [1, C, frames, height, width] or [1, C, height, width]: its tokens are queries"
        " and keys, as they are",
    )
    source.add_argument(
        "--weights", type=Path, metavar="FILE", help="of the embedded model: queries and keys of its layers"
    )
    parser.add_argument(
        "--images", type=Path, metavar="FOLDER", help="pictures, or tar files of them, for --weights"
    )
    add_integer(parser, "--num", 1, "pictures")
    add_number(parser, "--noise", 0.5, "level of noise in the pictures, 0 to 1")
    add_integer(parser, "--patch", 2, "latent pixels per token side")
    parser.add_argument(
        "--tiles",
        type=comma_list(integer("--tiles", 1)),
        metavar="N,N",
        help="runs that the curve is cut into: they say how many pairs are kept (default 2,4,8,16)",
    )
    add_integer(
        parser,
        "--query-block",
        128,
        "queries that share a choice; small pictures want fewer, and as many as divide the text",
    )
    add_device(parser)
    add_json(parser)
    add_plot(parser, "draw them")


def _bench_recall(arguments: argparse.Namespace) -> int:
    if arguments.weights and not arguments.images:
        wrong("--images", "be given with `--weights`", None)
    if arguments.noise > 1:
        wrong("--noise", "lie between 0 and 1", arguments.noise)
    require_reports("--plot", arguments.plot, arguments.json)
    device = chosen_device(arguments.device)
    with missing_extras_told():
        from benchmarks import recall
        from nearfield.cli import machine
        from nearfield_lab.embedded.storage import BadFile
        from nearfield_lab.plots.lines import recall_lines

        try:
            samples = list(_latents(arguments) if arguments.latents else _layers(arguments, device))
        except (FileNotFoundError, BadFile) as error:
            raise UsageError(str(error)) from None
        results: list[Recall] = []
        with Bar(len(samples), "samples") as bar:
            for place, sample in enumerate(samples):
                bar.show(place, f"{sample.name}, {sample.geometry}")
                moved = sample._replace(query=sample.query.to(device), key=sample.key.to(device))
                results += recall.measured(moved, arguments.tiles or recall.TILES, arguments.query_block)
    source = {
        "geometry": str(samples[0].geometry),
        "samples": len(samples),
        "query_block": arguments.query_block,
        **_facts(arguments),
    }
    print(f"{source['kind']}: {source['geometry']}, {len(samples)} samples")
    print(recall.results_table(results))
    document = recall.as_json(results, machine.facts(), source)
    written = write_reports(document, arguments.json, arguments.plot, recall_lines, source["kind"])
    return OK if written else 1


def _facts(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.latents:
        return {"kind": "tokens of a latent", "file": arguments.latents.name, "patch": arguments.patch}
    return {
        "kind": "layers of the embedded model",
        "file": arguments.weights.name,
        "pictures": arguments.num,
        "noise": arguments.noise,
    }


def _latents(arguments: argparse.Namespace) -> "Iterator[Sample]":
    from benchmarks.recall import latent_sample
    from nearfield_lab.embedded.storage import read_tensors

    tensors, _ = read_tensors(arguments.latents)
    for name, tensor in tensors.items():
        sides = tensor.shape[-2:]
        if tensor.dim() not in (4, 5) or any(side % arguments.patch for side in sides):
            rule = f"hold latents of 4 or 5 dimensions, with sides of multiples of {arguments.patch}"
            wrong("--latents", rule, f"{name} of {list(tensor.shape)}", "`--patch 1` takes any sides.")
        for place, latent in enumerate(tensor):
            yield latent_sample(latent, arguments.patch, f"{name} {place}")


def _layers(arguments: argparse.Namespace, device: "torch.device") -> "Iterator[Sample]":
    import torch

    from benchmarks.recall import recorded
    from nearfield_lab.embedded.autoencoder import Autoencoder
    from nearfield_lab.embedded.model import load_model
    from nearfield_lab.training import data

    model, _ = load_model(arguments.weights)
    model, autoencoder = model.to(device), Autoencoder().to(device)
    pictures = data.pictures(arguments.images)[: arguments.num]
    generator = torch.Generator().manual_seed(0)
    for place, picture in enumerate(pictures):
        image = data.decoded(picture, model.config.size)[None].to(device) / 255
        latent = model.normalised(autoencoder.encode(image).float())
        noise = torch.randn(latent.shape, generator=generator).to(device)
        noisy = (1 - arguments.noise) * latent + arguments.noise * noise
        level = torch.full((1,), arguments.noise, device=device)
        for sample in recorded(model.transformer, partial(model, noisy, level)):
            yield sample._replace(name=f"picture {place}, {sample.name}")
