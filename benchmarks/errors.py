"""How far one denoising step with a pattern of attention is from the dense one: the mean squared error of velocities.

Pictures say what patterns are worth, and take minutes each on a CPU; a step takes seconds, and tells patterns apart.
Noisy latents of photographs are what a sampling sees, so nothing is sampled. Results are written after every pattern.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import pareto, picture_runs
from benchmarks.picture_runs import DENSE, Drawing, PictureMaker, Task
from benchmarks.quality_cases import Pattern, without_dense_steps
from nearfield import Geometry, Hilbert
from nearfield._files import write_json
from nearfield.cli import machine, report
from nearfield.methods import Composition, PlanLayer
from nearfield.methods.hilbert.layout import block_sizes
from nearfield_lab.embedded.sampler import DemoPipeline, noise
from nearfield_lab.training.data import Picture, decoded, fingerprint

FORMAT = 1
DEVICE, GPU = "device", "gpu"
_ABOUT = "velocities of the embedded model in one denoising step, beside the dense ones"
_EVERY_STEP = "every step sparse"


# -- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepError:
    """Mean squared errors in one step.

    Args:
        step: its number in the sampling, from 0.
        level: the share of noise.
        photographs: the error for each of them.
    """

    step: int
    level: float
    photographs: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean over photographs."""
        return statistics.fmean(self.photographs)

    @property
    def standard_error(self) -> float | None:
        """Of that mean; None where one photograph does not tell."""
        if len(self.photographs) < 2:
            return None
        return statistics.stdev(self.photographs) / math.sqrt(len(self.photographs))


@dataclass(frozen=True)
class ErrorRow:
    """One pattern, measured.

    Args:
        pattern: its name, for people.
        pairs_kept: share of the dense pairs that a sparse step reads.
        steps: the errors, step by step.
        seconds: that all of its steps took.
        commit, date: of the code it was measured with, and when.
        settings: what it takes to do it again, and to know that it was done.
    """

    pattern: str
    pairs_kept: float
    steps: tuple[StepError, ...]
    seconds: float
    commit: str | None = None
    date: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def as_document(rows: Sequence[ErrorRow], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Rows with the machine's facts, in plain values."""
    return {
        "format": FORMAT,
        "benchmark": "errors",
        "about": _ABOUT,
        "machine": dict(facts),
        "results": [_record(row) for row in rows],
    }


def _record(row: ErrorRow) -> dict[str, Any]:
    steps = [
        asdict(each) | {"error": each.error, "standard_error": each.standard_error} for each in row.steps
    ]
    return asdict(row) | {"steps": steps}


def read_rows(path: Path) -> list[ErrorRow]:
    """Rows of a file that `as_document` describes. Raises ValueError where it holds something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if (document["benchmark"], document["format"]) != ("errors", FORMAT):
            raise ValueError("its benchmark or its format is another")
        return [_row_of(record) for record in document["results"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold errors of format {FORMAT}: {error}.") from None


def _row_of(record: Mapping[str, Any]) -> ErrorRow:
    steps = (StepError(each["step"], each["level"], tuple(each["photographs"])) for each in record["steps"])
    return ErrorRow(**{**record, "steps": tuple(steps)})


def table(rows: Sequence[ErrorRow]) -> str:
    """A line for each row; all of them have the same steps."""
    heads = [f"error in step {each.step}" for each in rows[0].steps]
    lines = [
        [row.pattern, f"{row.pairs_kept:.1%}", *map(_cell, row.steps), f"{row.seconds:.1f}"] for row in rows
    ]
    return report.table([["pattern", "pairs kept", *heads, "seconds"], *lines])


def _cell(step: StepError) -> str:
    if step.standard_error is None:
        return f"{step.error:.3g}"
    return f"{step.error:.3g} ± {step.standard_error:.1g}"


# -- patterns in a single step ---------------------------------------------------------------------------------------


def of_a_step(pattern: Pattern) -> Pattern:
    """A pattern with every step sparse, also where its method is inside of another."""
    if pattern.method == "Composition" and pattern.fields.get("attention"):
        attention = dict(pattern.fields["attention"])
        inside = of_a_step(Pattern(pattern.name, attention.get("fields", {}), attention["method"]))
        nested = {**pattern.fields, "attention": {**attention, "fields": inside.fields}}
        return replace(pattern, name=inside.name, fields=nested)
    if "dense_steps" not in {each.name for each in fields(picture_runs.method_of(pattern))}:
        return pattern
    bare = without_dense_steps(pattern)
    return replace(bare, name=bare.name or _EVERY_STEP)


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

    place: int
    step: int
    level: float
    noisy: Tensor
    velocity: Tensor


class ErrorSweep:
    """Measures patterns one by one.

    Args:
        task: `num`, `steps`, `size` and `seed` are of the photographs, of a sampling, and of the noise.
        photographs: by their places among all there are, which the noise depends on.
        source: the name of what they come from.
        at: numbers of the steps.
        out: a file with results; what stands there already is not measured again.
        blocks: Hilbert's: those of the "device", of a "gpu" on any device, or sizes of queries and keys, "128x64".
        on_step: called with the number of steps computed, what of, and the number of all.
    """

    def __init__(
        self,
        task: Task,
        photographs: Mapping[int, Picture],
        source: str,
        at: Sequence[int],
        *,
        out: Path | None = None,
        blocks: str = DEVICE,
        device: torch.device | str = "cpu",
        on_step: Callable[[int, str, int], None] | None = None,
    ) -> None:
        self.task, self.photographs, self.source, self.at = task, photographs, source, sorted(at)
        self.out, self.blocks, self.device = out, blocks, torch.device(device)
        self.rows = read_rows(out) if out is not None and out.exists() else []
        self.broken: dict[str, str] = {}
        """Patterns that raised, and what."""
        self._on_step = on_step or (lambda done, name, total: None)
        self._done = self._total = 0
        self._samples = list[Sample]()
        self._commit = machine.commit()  # now: what is committed while it runs is not what runs
        self._maker = PictureMaker(task, self.device, self._method)

    def run(self, patterns: Sequence[Pattern], has_time: Callable[[], bool] = lambda: True) -> bool:
        """Measure what is missing; returns whether time was enough for all of it."""
        missing = self.missing(patterns)
        self._total = (len(missing) + 1) * len(self.photographs) * len(self.at)
        for pattern in missing:
            if not has_time():
                return False
            if not self._samples:
                self._samples = self._dense_samples()
            try:
                row = self._row(pattern)
            except (ValueError, NotImplementedError) as error:  # it does not fit this size, or has no kernel
                self.broken[pattern.name] = str(error)
                continue
            self._add(row)
        return True

    def distinct(self, patterns: Sequence[Pattern]) -> list[Pattern]:
        """What is left of patterns in a single step: those that differ in dense steps alone are one, the first."""
        picture_runs.check_patterns(patterns)
        found: dict[str, Pattern] = {}
        for pattern in map(of_a_step, patterns):
            # Settings name files without their folders.
            what = self.settings(replace(pattern, name="")), pattern.weights, pattern.lora
            found.setdefault(json.dumps(what, sort_keys=True), pattern)
        return list(found.values())

    def missing(self, patterns: Sequence[Pattern]) -> list[Pattern]:
        """Those without a row."""
        return [
            pattern
            for pattern in self.distinct(patterns)
            if not picture_runs.is_known(self.settings(pattern), self.rows)
        ]

    def rows_of(self, patterns: Sequence[Pattern]) -> list[ErrorRow]:
        """Of what these are in a single step, measured now or before."""
        wanted = [self.settings(pattern) for pattern in self.distinct(patterns)]
        return [row for settings in wanted for row in self.rows if picture_runs.is_known(settings, [row])]

    def settings(self, pattern: Pattern) -> dict[str, Any]:
        """What it takes to do it again, without folders of this machine."""
        photographs = {
            "source": self.source,
            "digest": fingerprint(list(self.photographs.values()))[:12],
        }
        own = {"at": self.at, "blocks": self.blocks, "photographs": photographs}
        return self.task.settings(pattern) | own | {"device": machine.device_name(self.device)}

    def _method(self, pattern: Pattern) -> Any:
        return with_blocks(picture_runs.method_of(pattern), self.blocks)

    def _dense_samples(self) -> list[Sample]:
        """Noisy latents by photograph and step."""
        weights = self.task.weights
        is_tiny = weights == pareto.TINY
        pipeline = pareto.tiny_pipeline() if is_tiny else DemoPipeline.load(weights, self.device)
        self._maker.provide(weights, pipeline)
        levels = pipeline.level(pipeline.begin(self.task.steps)).tolist()
        samples = []
        with self._maker.using(None) as drawing:
            for place, photograph in self.photographs.items():
                latents = self._latents(pipeline, photograph)
                for step in self.at:
                    noisy = self._noisy(latents, levels[step], place, step)
                    velocity = self._velocity(drawing, noisy, step, DENSE)
                    samples.append(Sample(place, step, levels[step], noisy, velocity))
        return samples

    @torch.no_grad()
    def _latents(self, pipeline: DemoPipeline, photograph: Picture) -> Tensor:
        image = decoded(photograph, self.task.size)[None].to(self.device) / 255
        return pipeline.model.normalised(pipeline.autoencoder.encode(image))

    def _noisy(self, latents: Tensor, level: float, place: int, step: int) -> Tensor:
        number = place * self.task.steps + step  # no two photographs or steps have the same noise
        added = noise(range(number, number + 1), (self.task.size, self.task.size), self.task.seed)
        return (1 - level) * latents + level * added.to(self.device)

    def _velocity(self, drawing: Drawing, noisy: Tensor, step: int, name: str) -> Tensor:
        self._on_step(self._done, name, self._total)
        self._done += 1
        return drawing.velocity(noisy, step)

    def _row(self, pattern: Pattern) -> ErrorRow:
        errors: dict[int, list[float]] = {step: [] for step in self.at}
        started = time.perf_counter()
        with self._maker.using(pattern) as drawing:
            for sample in self._samples:
                velocity = self._velocity(drawing, sample.noisy, sample.step, pattern.name)
                # As a number: the device is waited for.
                errors[sample.step].append(float((velocity - sample.velocity).double().square().mean()))
            seconds = time.perf_counter() - started
            kept = drawing.facts().pairs_kept
        levels = {sample.step: sample.level for sample in self._samples}
        steps = tuple(StepError(step, levels[step], tuple(values)) for step, values in errors.items())
        return ErrorRow(pattern.name, kept, steps, seconds, settings=self.settings(pattern))

    def _add(self, row: ErrorRow) -> None:
        """Write a file with one row more. Those of a file may come of several runs, so each says by itself of which."""
        facts = machine.facts() | {"commit": self._commit}
        self.rows.append(replace(row, commit=self._commit, date=facts["date"]))
        if self.out is not None:
            write_json(self.out, as_document(self.rows, facts))
