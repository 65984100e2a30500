"""Measure how far one denoising step with a pattern of attention is from the dense one: the error of the velocity.

Pictures say what patterns are worth, and take minutes each on a CPU; a step takes seconds, and tells patterns apart.
Noisy latents of photographs are what a sampling sees, so nothing is sampled.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.patterns import CASES, DEFAULTS, tuning_of, without_dense_steps
from benchmarks.picture_runs import PictureMaker, Task, trained_size
from benchmarks.pictures import check_model, model_of, shown_name
from benchmarks.report import Column, Record
from benchmarks.runner import Benchmark, Session
from nearfield import Hilbert
from nearfield.cli import machine
from nearfield.cli.arguments import GRAINS, QUERY_BLOCKS, comma_list, integer, wrong
from nearfield.cli.options import add_integer, add_weights
from nearfield.layout import Geometry
from nearfield.methods import Composition, PlanLayer
from nearfield.methods.hilbert.layout import block_sizes
from nearfield_lab.embedded.sampler import DemoPipeline, noise
from nearfield_lab.images import Picture
from nearfield_lab.storage import BadFile
from nearfield_lab.training.data import decoded, fingerprint, pictures

DEVICE, GPU = "device", "gpu"
_EVERY_STEP = "every step sparse"


# -- patterns in a single step ---------------------------------------------------------------------------------------


def of_a_step(pattern: Case) -> Case:
    """A pattern with every step sparse, also where its method is inside of another; called as people call it."""
    named = replace(pattern, name=shown_name(pattern), on={**pattern.on, "pattern": ""})
    if pattern.method == "Composition" and pattern.fields.get("attention"):
        attention = dict(pattern.fields["attention"])
        inside = of_a_step(Case(named.name, {}, attention["method"], attention.get("fields", {})))
        nested = {**pattern.fields, "attention": {**attention, "fields": inside.fields}}
        return replace(named, name=inside.name, fields=nested)
    method: Any = pattern.made()
    if "dense_steps" not in {each.name for each in fields(method)}:
        return named
    bare = without_dense_steps(named)
    return replace(bare, name=bare.name or _EVERY_STEP)


def distinct(patterns: Sequence[Case]) -> list[Case]:
    """What is left of patterns in a single step: those that differ in dense steps alone are one, the first."""
    found: dict[str, Case] = {}
    for pattern in map(of_a_step, patterns):
        found.setdefault(json.dumps(replace(pattern, name="").document, sort_keys=True), pattern)
    return list(found.values())


@dataclass(frozen=True)
class OtherBlocks(Hilbert):
    """Hilbert with the blocks that it would have on a GPU, or of given sizes: what is read is rounded to blocks, so
    errors depend on them.

    Args:
        blocks: "gpu", or queries and keys, "128x64".
    """

    blocks: str = GPU

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        q_block: int | None = None,
        k_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PlanLayer:
        if self.blocks != GPU:
            q_block, k_block = map(int, self.blocks.split("x"))
        q_block, k_block = block_sizes(self._pattern(index), geometry, q_block, k_block, "cuda")
        return super().layer(geometry, index, heads=heads, q_block=q_block, k_block=k_block, device=device)


def with_blocks(method: Any, blocks: str) -> Any:
    """The same method with other blocks, where it is Hilbert's or has one inside; others have no such blocks."""
    if isinstance(method, Composition):
        return replace(method, attention=with_blocks(method.attention, blocks))
    if not isinstance(method, Hilbert) or blocks == DEVICE:
        return method
    return OtherBlocks(**{each.name: getattr(method, each.name) for each in fields(method)}, blocks=blocks)


# -- measuring -------------------------------------------------------------------------------------------------------


def spread(source: Sequence[Picture], number: int) -> dict[int, Picture]:
    """So many of the photographs, evenly spaced, by their places among all."""
    places = (index * len(source) // number for index in range(number))
    return {place: source[place] for place in places}


class Sample(NamedTuple):
    """A photograph with the noise of a step, and what the dense model says of it."""

    step: int
    level: float
    noisy: Tensor
    velocity: Tensor


class Errors(Benchmark):
    name = "errors"
    examples = (
        "  python -m benchmarks errors --photographs cats512 --cases 'far/*' --json errors.json\n"
        "  python -m benchmarks errors --photographs cats512/cats512-00.tar --num 2 --at 4,8,13 --case mine.json\n"
        "  python -m benchmarks errors --photographs pictures --tiny --size 64 --blocks gpu"
    )
    table = CASES
    defaults = DEFAULTS

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        options = self.options
        weights = model_of(options)
        size = options.size or trained_size(weights)
        self.task = Task(weights, options.num, options.steps, size, options.seed)
        self.at, self.blocks = sorted(options.at), options.blocks
        self.photographs = spread(_photographs(options), options.num)
        self.maker = PictureMaker(self.task, self.device, lambda case: with_blocks(case.made(), self.blocks))
        self._samples = list[Sample]()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--photographs",
            type=Path,
            metavar="PATH",
            help="what noise is added to: a folder of tar files or of pictures, or one tar file",
        )
        add_weights(parser)
        parser.add_argument("--tiny", action="store_true", help="an untrained model of a few narrow layers")
        add_integer(parser, "--num", 2, "photographs, evenly spaced over all there are")
        parser.add_argument(
            "--at",
            type=comma_list(integer("--at", 0)),
            default=[8, 13],
            metavar="N,N",
            help="numbers of the steps, from 0 (default 8,13)",
        )
        add_integer(parser, "--steps", 16, "of the sampling that these steps are of")
        add_integer(
            parser, "--size", None, "pixels per side (default: what the model was trained at)", least=64
        )
        add_integer(parser, "--seed", 0, "of the noise", least=0)
        parser.add_argument(
            "--blocks",
            type=_blocks,
            default=DEVICE,
            metavar="WHOSE",
            help="blocks that the Hilbert method reads by: the device's own, those of a gpu on any device, or sizes of"
            " queries and keys, 128x64 (default device)",
        )

    @classmethod
    def cases(cls, options: argparse.Namespace, device: torch.device) -> list[Case]:
        if not options.cases and not options.case:
            options.cases = ["default/*" if options.quick else "far/*"]
        return distinct(super().cases(options, device))

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        super().check(cases, options)
        check_model(options)
        if options.photographs is None:
            wrong("--photographs", "be given", None)
        if max(options.at) >= options.steps:
            rule = f"be numbers of steps, from 0 to {options.steps - 1}"
            wrong("--at", rule, max(options.at), "`--steps` says how many there are.")

    def settings(self, case: Case) -> Record:
        """What it takes to do it again, without folders of this machine."""
        task, own = self.task, case.on.get("weights")
        files = {"weights": Path(own).name if own else task.weights.name}
        if lora := case.on.get("lora"):
            files["lora"] = Path(lora).name
        source = self.options.photographs.resolve().name
        photographs = {"source": source, "digest": fingerprint(list(self.photographs.values()))[:12]}
        sizes = {"num": task.num, "steps": task.steps, "size": task.size, "seed": task.seed}
        how = {"at": self.at, "blocks": self.blocks, "photographs": photographs, "tuning": tuning_of(case)}
        return case.document | sizes | how | files | {"device": machine.device_name(self.device)}

    def is_timed(self) -> bool:
        return False  # each record says of which commit it is

    def measure(self, case: Case) -> Iterator[Record]:
        if not self._samples:
            self._samples = self._dense_samples()
        errors: dict[int, list[float]] = {step: [] for step in self.at}
        started = time.perf_counter()
        with self.maker.using(case) as drawing:
            for place, sample in enumerate(self._samples):
                self.session.say(f"{case.name}: step {place} of {len(self._samples)}")
                velocity = drawing.velocity(sample.noisy, sample.step)
                # As a number: the device is waited for.
                errors[sample.step].append(float((velocity - sample.velocity).double().square().mean()))
            seconds = time.perf_counter() - started
            kept = drawing.facts().pairs_kept
        levels = {sample.step: sample.level for sample in self._samples}
        steps = [step_error(step, levels[step], values) for step, values in errors.items()]
        yield {"pattern": case.name, "pairs_kept": kept, "steps": steps, "seconds": seconds}

    def _dense_samples(self) -> list[Sample]:
        """Noisy latents by photograph and step."""
        pipeline = self.maker.pipeline(None)
        levels = pipeline.level(pipeline.begin(self.task.steps)).tolist()
        samples = []
        with self.maker.using(None) as drawing:
            for place, photograph in self.photographs.items():
                latents = self._latents(pipeline, photograph)
                for step in self.at:
                    self.session.say(f"dense: photograph {place}, step {step}")
                    noisy = self._noisy(latents, levels[step], place, step)
                    samples.append(Sample(step, levels[step], noisy, drawing.velocity(noisy, step)))
        return samples

    @torch.no_grad()
    def _latents(self, pipeline: DemoPipeline, photograph: Picture) -> Tensor:
        image = decoded(photograph, self.task.size)[None].to(self.device) / 255
        return pipeline.model.normalised(pipeline.autoencoder.encode(image))

    def _noisy(self, latents: Tensor, level: float, place: int, step: int) -> Tensor:
        number = place * self.task.steps + step  # no two photographs or steps have the same noise
        added = noise(range(number, number + 1), (self.task.size, self.task.size), self.task.seed)
        return (1 - level) * latents + level * added.to(self.device)

    def columns(self, records: Sequence[Record]) -> list[Column]:
        return [
            Column("pairs kept", "pairs_kept", ".1%"),
            *(Column(f"error in step {step}", partial(_cell, step)) for step in self.at),
            Column("seconds", "seconds", ".1f"),
        ]


def step_error(step: int, level: float, photographs: Sequence[float]) -> Record:
    """Mean squared errors in one step: of each photograph, their mean, and its standard error (of several)."""
    spread = statistics.stdev(photographs) / math.sqrt(len(photographs)) if len(photographs) > 1 else None
    found = {"step": step, "level": level, "photographs": list(photographs)}
    return found | {"error": statistics.fmean(photographs), "standard_error": spread}


def _cell(step: int, record: Mapping[str, Any]) -> str | None:
    for each in record.get("steps", ()):
        if each["step"] == step:
            error = f"{each['error']:.3g}"
            return error if each["standard_error"] is None else f"{error} ± {each['standard_error']:.1g}"
    return None


def _photographs(options: argparse.Namespace) -> list[Picture]:
    """All there are."""
    try:
        source = pictures(options.photographs)
    except (FileNotFoundError, BadFile) as error:
        got = f"{str(options.photographs)!r} ({error})"
        wrong("--photographs", "name a folder of pictures or of tar files, or a tar file", got)
    if options.num > len(source):
        wrong("--num", f"be at most {len(source):,}, for there are no more photographs", options.num)
    return source


def _blocks(text: str) -> str:
    """As they are kept in results: a name, or two sizes."""
    queries, _, keys = text.partition("x")
    if text in (DEVICE, GPU) or (queries in map(str, QUERY_BLOCKS) and keys in map(str, GRAINS)):
        return text
    queries_words, keys_words = (", ".join(map(str, sizes)) for sizes in (QUERY_BLOCKS, GRAINS))
    rule = f"be {DEVICE} or {GPU}, or sizes of queries ({queries_words}) and keys ({keys_words})"
    wrong("--blocks", rule, repr(text), "Example: --blocks 128x64")
