"""Measure how much of full attention's weight is left, pattern by pattern, at equal numbers of pairs.

Single keys, few of them together, whole blocks, and runs of a curve: each reads as many pairs as the run does, and what
it holds of the weights of full attention is added up exactly. Queries and keys come from a model's layers, recorded
through `apply`, or are the tokens of a latent themselves.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.cases import Case
from benchmarks.report import Column, Record
from benchmarks.runner import Benchmark
from nearfield import attend, planning
from nearfield._types import Attended, Impl
from nearfield.cli.arguments import comma_list, integer, wrong
from nearfield.cli.options import add_integer, add_number
from nearfield.diffusers import apply
from nearfield.layout import Geometry, Ordering, along
from nearfield.methods import Hilbert, LayerAttention, Method
from nearfield.ops import Blocks, predict
from nearfield.ops.predict.reference import columns
from nearfield_lab.embedded.autoencoder import Autoencoder
from nearfield_lab.embedded.model import load_model
from nearfield_lab.images import Picture
from nearfield_lab.storage import BadFile, read_tensors
from nearfield_lab.training import data

QUERY_BLOCK = 128
GRAINS = (1, 4, 8, 16, 64, 128)
FINEST_BLOCK = 16
"""From here on a grain is called a block."""
TILES = (2, 4, 8, 16)
RUNS = "Hilbert runs"


class Sample(NamedTuple):
    """Queries and keys of one layer, `[B, H, N, D]`, in raster order."""

    name: str
    geometry: Geometry
    query: Tensor
    key: Tensor
    scale: float


# -- where queries and keys come from --------------------------------------------------------------------------------


class Recording(Method):
    """A method that reads everything, and keeps the queries and keys it was given."""

    order = "raster"

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def layer(self, geometry: Geometry, index: int = 0, **_: Any) -> "_RecordingLayer":
        return _RecordingLayer(self, geometry, index)

    def describe(self, geometry: Geometry, **_: Any) -> str:
        return f"{geometry}: everything is read, and queries and keys are kept"


@dataclass(frozen=True)
class _RecordingLayer(LayerAttention):
    method: Recording
    geometry: Geometry
    layer: int

    @property
    def num_pairs(self) -> int:
        return self.geometry.num_tokens**2

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended:
        scale = query.shape[3] ** -0.5 if scale is None else scale
        kept_query, kept_key = (x.detach().float() for x in (query, key))
        self.method.samples.append(Sample(f"layer {self.layer}", self.geometry, kept_query, kept_key, scale))
        full = planning.full(query.shape[2], key.shape[2], device=query.device)
        return attend(query, key, value, full, key_bias=key_bias, scale=scale, impl=impl)


def recorded(model: nn.Module, call: Callable[[], object]) -> list[Sample]:
    """What the attention layers of a diffusers model are given while `call` calls it; biases are not regarded."""
    method = Recording()
    with apply(model, method), torch.no_grad():
        call()
    return method.samples


def latent_sample(latent: Tensor, patch: int = 2, name: str = "latent") -> Sample:
    """The tokens of a latent, each its own query and key: no model, only what real videos or images are like.

    A token is a patch, each channel with mean 0 and standard deviation 1 over the latent; logits are products of tokens
    over the root of their length.

    Args:
        latent: `[C, height, width]` or `[C, frames, height, width]`.
        patch: latent pixels per side of a token.
    """
    channels = latent.float().flatten(1)
    normal = ((channels - channels.mean(1, keepdim=True)) / channels.std(1, keepdim=True)).view_as(latent)
    cells = normal.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # ..., h, patch, w, patch
    tokens = cells.movedim((0, -3, -1), (-3, -2, -1)).flatten(-3)
    grid = tuple(tokens.shape[:-1])
    query = tokens.flatten(0, -2)[None, None]
    return Sample(name, Geometry(grid), query, query, query.shape[3] ** -0.5)


# -- what is held ----------------------------------------------------------------------------------------------------


def measured(
    sample: Sample, tiles: Sequence[int] = TILES, query_block: int = QUERY_BLOCK
) -> Iterator[Record]:
    """Every pattern, with as many pairs as the runs of so many tiles have.

    Args:
        query_block: queries that share a choice. One that holds text reads everything.
    """
    lse = full_lse(sample)
    runs = [run_recall(sample, lse, number) for number in tiles]
    yield from runs
    ordering = along("hilbert", sample.geometry, str(sample.query.device))
    query, key, ordered_lse = (
        _ordered(x, sample.geometry, ordering) for x in (sample.query, sample.key, lse)
    )
    tokens = sample.geometry.num_tokens
    for grain in GRAINS:
        blocks = Blocks(query_block, grain, tokens, tokens, (sample.geometry.text_span,))
        maxima, masses = columns.column_statistics(
            query, key, ordered_lse, blocks.q_block, blocks.k_block, sample.scale
        )
        name = f"grain {grain}" if grain < FINEST_BLOCK else f"blocks of {grain}"
        for run in runs:
            for by, keep in (
                ("weights", largest(maxima, blocks, run["kept"])),
                ("means", by_means(query, key, blocks, run["kept"], sample.scale)),
            ):
                kept, recall = _held(keep, masses, blocks)
                yield record_of(sample, name, by, run["tiles"], kept, recall)


def record_of(sample: Sample, pattern: str, by: str, tiles: int, kept: float, recall: float) -> Record:
    """What one pattern holds of one sample.

    Args:
        by: how it was chosen: by "weights" of full attention, by "means" of blocks, or by "place".
        tiles: of the run that says how many pairs are read.
        kept: share of the pairs that is read.
        recall: share of the weights that is in them, on average over queries.
    """
    found: Record = {"sample": sample.name, "pattern": pattern, "by": by, "tiles": tiles}
    return found | {"kept": kept, "recall": recall}


def full_lse(sample: Sample) -> Tensor:
    full = planning.full(sample.query.shape[2], sample.key.shape[2], device=sample.query.device)
    return attend(sample.query, sample.key, sample.key, full, scale=sample.scale).lse


def run_recall(sample: Sample, lse: Tensor, tiles: int) -> Record:
    """Of the runs of a curve: the sum over what a plan lists is known from its `lse`."""
    method = Hilbert(tiles=tiles, near="tile", far=None)
    ordering = method.ordering(sample.geometry, device=sample.query.device)
    query, key, full = (_ordered(x, sample.geometry, ordering) for x in (sample.query, sample.key, lse))
    attention = method.layer(sample.geometry, 0, heads=query.shape[1], device=query.device)
    held = (attention.attend(query, key, key, scale=sample.scale).lse - full).exp()
    kept = attention.num_pairs / sample.geometry.num_tokens**2
    return record_of(sample, RUNS, "place", tiles, kept, float(held.mean()))


def largest(maxima: Tensor, blocks: Blocks, share: float) -> Tensor:
    """The cells with the largest weights in them, up to a share of all pairs.

    Text and the best of each row come first, however many pairs that makes.
    """
    rows, always = blocks.always(maxima.device)
    first = (rows[:, None] | always).expand_as(maxima)
    first = first.scatter(-1, maxima.argmax(-1, keepdim=True), True)
    order = maxima.masked_fill(first, math.inf).flatten(2).argsort(dim=-1, descending=True, stable=True)
    queries = _sizes(blocks.num_queries, blocks.q_block, maxima).double()
    keys = _sizes(blocks.num_keys, blocks.k_block, maxima).double()
    pairs = torch.outer(queries, keys).flatten()[order].cumsum(-1)
    fits = pairs <= share * blocks.num_queries * blocks.num_keys
    keep = torch.zeros_like(fits).scatter(-1, order, fits).view_as(maxima)
    return keep | first


def by_means(query: Tensor, key: Tensor, blocks: Blocks, share: float, scale: float) -> Tensor:
    """As `BlockTopK` and online prediction choose: so many of each row."""
    number = max(1, round(share * -(-blocks.num_keys // blocks.k_block)))
    return predict.by_means(query, key, blocks, topk=number, scale=scale).keep


def _held(keep: Tensor, masses: Tensor, blocks: Blocks) -> tuple[float, float]:
    """The share of pairs in a mask, and that of the weights."""
    queries = _sizes(blocks.num_queries, blocks.q_block, masses)
    keys = _sizes(blocks.num_keys, blocks.k_block, masses)
    pairs = queries @ keep.to(masses.dtype) @ keys / (blocks.num_queries * blocks.num_keys)
    recall = (masses * keep).sum(-1) @ queries / blocks.num_queries
    return float(pairs.mean()), float(recall.mean())


def _sizes(length: int, block: int, like: Tensor) -> Tensor:
    sizes = torch.full((-(-length // block),), block, device=like.device, dtype=like.dtype)
    sizes[-1] = length - (len(sizes) - 1) * block
    return sizes


def _ordered(x: Tensor, geometry: Geometry, ordering: Ordering) -> Tensor:
    start = geometry.image_spans[0][0]
    order = torch.arange(geometry.num_tokens, device=x.device)
    order[start : start + len(ordering)] = start + ordering.order
    return x[:, :, order]


# -- the benchmark -----------------------------------------------------------------------------------------------------


class Recall(Benchmark):
    name = "recall"
    examples = (
        "  python -m benchmarks recall --latents video.safetensors --plot recall.png --json recall.json\n"
        "  python -m benchmarks recall --weights model.safetensors --images photographs --num 4"
    )
    drawing = "nearfield_lab.plots.lines:recall_lines"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--latents",
            type=Path,
            metavar="FILE",
            help="safetensors with a latent [1, C, frames, height, width] or [1, C, height, width]: its tokens are"
            " queries and keys, as they are",
        )
        parser.add_argument(
            "--weights",
            type=Path,
            metavar="FILE",
            help="of the embedded model: queries and keys of its layers",
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
            default=list(TILES),
            metavar="N,N",
            help="runs that the curve is cut into: they say how many pairs are kept (default 2,4,8,16)",
        )
        add_integer(
            parser,
            "--query-block",
            QUERY_BLOCK,
            "queries that share a choice; small pictures want fewer, and as many as divide the text",
        )

    @classmethod
    def cases(cls, options: argparse.Namespace, device: torch.device) -> list[Case]:
        """A latent, or a picture with its noise."""
        if (options.latents is None) == (options.weights is None):
            wrong("--latents", "be given, or `--weights`", "both" if options.latents else "neither")
        if options.weights and not options.images:
            wrong("--images", "be given with `--weights`", None)
        if options.noise > 1:
            wrong("--noise", "lie between 0 and 1", options.noise)
        try:
            return list(_latent_cases(options) if options.latents else _picture_cases(options))
        except (FileNotFoundError, BadFile) as error:
            name = "latents" if options.latents else "weights"
            wrong(f"--{name}", "name files that can be read", error)

    def settings(self, case: Case) -> Record:
        options = self.options
        own = {"case": case.name, "query_block": options.query_block, "tiles": options.tiles}
        file = options.latents or options.weights
        of = {"patch": options.patch} if options.latents else {"noise": options.noise}
        return own | of | {"file": file.name}

    def is_timed(self) -> bool:
        return False  # each record says of which commit it is

    def measure(self, case: Case) -> Iterator[Record]:
        for sample in case.on["samples"](self.device):
            self.session.say(f"{case.name}: {sample.name}, {sample.geometry}")
            moved = sample._replace(query=sample.query.to(self.device), key=sample.key.to(self.device))
            about = {"geometry": str(sample.geometry)}
            for record in measured(moved, self.options.tiles, self.options.query_block):
                yield about | record

    def facts(self, records: Sequence[Record]) -> Record:
        kind = "tokens of a latent" if self.options.latents else "layers of the embedded model"
        return {"source": {"kind": kind, "samples": len({record.get("sample") for record in records})}}

    def notes(self, records: Sequence[Record]) -> list[str]:
        source = self.facts(records)["source"]
        return [
            f"{source['kind']}: {record['geometry']}, {source['samples']} samples" for record in records[:1]
        ]

    def rows(self, records: Sequence[Record]) -> Sequence[Record]:
        """Patterns, as averages over samples."""
        return table_rows([record for record in records if record["status"] == "ok"])

    def columns(self, records: Sequence[Record]) -> list[Column]:
        kept = records[0]["kept_by_tiles"]
        headings = {tiles: f"{share:.1%} of pairs" for tiles, share in kept.items()}
        return [
            Column("by", "by"),
            *(Column(heading, f"cells/{tiles}") for tiles, heading in headings.items()),
        ]


def _latent_cases(options: argparse.Namespace) -> Iterator[Case]:
    tensors, _ = read_tensors(options.latents)
    for name, tensor in tensors.items():
        sides = tensor.shape[-2:]
        if tensor.dim() not in (4, 5) or any(side % options.patch for side in sides):
            rule = f"hold latents of 4 or 5 dimensions, with sides of multiples of {options.patch}"
            wrong("--latents", rule, f"{name} of {list(tensor.shape)}", "`--patch 1` takes any sides.")
        for place, latent in enumerate(tensor):
            sample = latent_sample(latent, options.patch, f"{name} {place}")
            yield Case(sample.name, {"samples": lambda device, sample=sample: [sample]})


def _picture_cases(options: argparse.Namespace) -> Iterator[Case]:
    for place, picture in enumerate(data.pictures(options.images)[: options.num]):
        samples = partial(_layer_samples, options, place, picture)
        yield Case(f"picture {place}", {"samples": samples})


def _layer_samples(
    options: argparse.Namespace, place: int, picture: Picture, device: torch.device
) -> Iterator[Sample]:
    """Of every layer of the embedded model, for a noisy picture."""
    model, _ = load_model(options.weights)
    model, autoencoder = model.to(device), Autoencoder().to(device)
    image = data.decoded(picture, model.config.size)[None].to(device) / 255
    latent = model.normalised(autoencoder.encode(image).float())
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(place)).to(device)
    noisy = (1 - options.noise) * latent + options.noise * noise
    level = torch.full((1,), options.noise, device=device)
    for sample in recorded(model.transformer, partial(model, noisy, level)):
        yield sample._replace(name=f"picture {place}, {sample.name}")


def averaged(records: Sequence[Record]) -> list[Record]:
    """Over samples."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["pattern"], record["by"], record["tiles"]), []).append(record)
    return [
        {"pattern": pattern, "by": by, "tiles": tiles}
        | {name: math.fsum(each[name] for each in group) / len(group) for name in ("kept", "recall")}
        for (pattern, by, tiles), group in groups.items()
    ]


def table_rows(records: Sequence[Record]) -> list[Record]:
    """Patterns by number of pairs; where other pairs were needed, a cell says how many."""
    means = averaged(records)
    kept = {str(mean["tiles"]): mean["kept"] for mean in means if mean["pattern"] == RUNS}
    rows: dict[tuple[str, str], Record] = {}
    for mean in means:
        start = {"case": mean["pattern"], "by": mean["by"], "kept_by_tiles": kept, "cells": {}}
        row = rows.setdefault((mean["pattern"], mean["by"]), start)
        words, share = f"{mean['recall']:.1%}", kept[str(mean["tiles"])]
        is_as_asked = abs(mean["kept"] / share - 1) < 0.05
        row["cells"][str(mean["tiles"])] = words if is_as_asked else f"{words} of {mean['kept']:.1%}"
    return list(rows.values())
