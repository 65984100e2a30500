"""Folders of numbered pictures, each in a file of its own, made by this process or on a Ray cluster.

Workers send packed pictures to the process that was started, and that process writes them: each once, whole or not at
all, even if workers die, and without a shared file system. A second run makes only what is missing.
"""

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nearfield._files import read_json, write_json
from nearfield.cli import FAILED, OK, Bar, UsageError, as_usage, machine, time_for, write_reports, wrong
from nearfield.diffusers import apply
from nearfield.methods import Recipe
from nearfield_lab.commands.launched import chosen_device
from nearfield_lab.embedded import generate
from nearfield_lab.embedded.generate import Sampler
from nearfield_lab.embedded.lora import lora_for
from nearfield_lab.embedded.model import EMBEDDED
from nearfield_lab.embedded.pictures import numbered, packed, write_packed
from nearfield_lab.embedded.sampler import DemoPipeline, OnStep
from nearfield_lab.engines import OneWorker, Outcome, Workers, WorkersLost, cluster, mapped
from nearfield_lab.images import is_whole

_TRIES = 3
_FAILURES_SHOWN = 10
_SETTINGS = "settings.json"


def generate_many(arguments: argparse.Namespace, name: str, recipe: Recipe | None, lora: Path | None) -> int:
    """Make what is missing of the pictures of the embedded model, of one like it, or of a pipeline."""
    job = Job(portable(arguments), recipe, lora and lora.resolve())
    return fill(arguments, arguments.images / name, job, _settings(arguments, recipe, lora))


def fill(
    arguments: argparse.Namespace,
    folder: Path,
    job: "Job",
    settings: dict[str, Any],
    further: Callable[[], dict[str, Any]] = dict,
) -> int:
    """Make what is missing of the pictures that were asked for, and report it.

    Args:
        job: what a worker does. It is called with nothing to load the model, and then makes batch after batch.
        settings: all that a picture depends on besides its number.
        further: measures what else the report holds, when the pictures are there.
    """
    check_settings("--images", folder, settings)
    tally = _Tally(folder, missing_pictures(folder, _numbers(arguments)), arguments.num)
    try:
        with as_usage():  # a size, or fields that do not fit it
            _make(arguments, job, tally)
            found = further()
    except WorkersLost as error:
        tally.lost, found = str(error), {}
    except KeyboardInterrupt:
        print(f"\n{tally.whereabouts()}; the same command goes on", file=sys.stderr)
        raise
    tally.say()
    written = write_reports(_document(arguments, settings, tally) | found, arguments.json)
    return OK if written and (tally.is_complete or tally.is_time_up) else FAILED


# -- the folder --------------------------------------------------------------------------------------------------------


def check_settings(argument: str, folder: Path, settings: dict[str, Any]) -> None:
    """A folder holds the pictures of one model and one way of making them."""
    path, rule = folder / _SETTINGS, "hold pictures of the same settings, or none"
    hint = "Name another folder."
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        if next(folder.glob("*.png"), None) is not None:
            wrong(argument, rule, f"{folder}, whose pictures do not say how they were made", hint)
        write_json(path, settings)
        return
    known = read_json(path, {})
    for name, value in settings.items():
        if known.get(name) != value:
            wrong(argument, rule, f"{folder}, made with {name} = {known.get(name)} instead of {value}", hint)


def missing_pictures(folder: Path, numbers: Sequence[int]) -> list[int]:
    """The numbers of which there is no whole picture."""
    with ThreadPoolExecutor() as readers:
        found = readers.map(lambda number: is_whole(numbered(folder, number)), numbers)
        return [number for number, is_there in zip(numbers, found, strict=True) if not is_there]


def runs_of(numbers: Iterable[int], most: int) -> list[range]:
    """Ascending numbers as ranges of at most `most`."""
    runs = list[range]()
    for number in numbers:
        if runs and runs[-1].stop == number and len(runs[-1]) < most:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


# -- making pictures ---------------------------------------------------------------------------------------------------


def _make(arguments: argparse.Namespace, job: "Job", tally: "_Tally") -> None:
    if not tally.missing:
        return
    has_time = time_for(arguments.minutes)
    batches = runs_of(tally.missing, arguments.batch)
    with _opened_engine(arguments, job) as workers, Bar(tally.num, "pictures") as bar:
        tally.workers = workers.num_workers
        bar.show(tally.num_there)
        tries, hopeless = arguments.tries or _TRIES, (ValueError, UsageError)
        for outcome in mapped(workers, batches, tries=tries, hopeless=hopeless):
            for number, content in zip(outcome.item, outcome.value or (), strict=outcome.error is None):
                write_packed(numbered(tally.folder, number), content)
            tally.add(outcome)
            bar.show(tally.num_there, f"{tally.retries} retries" if tally.retries else "")
            if not has_time():
                tally.is_time_up = True
                break


@contextmanager
def _opened_engine(arguments: argparse.Namespace, job: "Job") -> Iterator[Workers]:
    if arguments.engine != "ray":
        chosen_device(arguments.device)
        yield OneWorker(job)
        return
    if arguments.device not in (None, "cpu", "cuda"):
        hint = "Ray gives each worker a GPU of its own."
        wrong("device", "be cpu or cuda with `engine=ray`", repr(arguments.device), hint)
    with cluster.joined(arguments.ray_address) as resources:
        gpus, cores = (int(resources.get(name, 0)) for name in ("GPU", "CPU"))
        job.arguments.device = arguments.device or ("cuda" if gpus else "cpu")
        uses_gpus = job.arguments.device == "cuda"
        if uses_gpus and not (gpus or arguments.workers):
            hint = "Say how many will come: --option workers=N."
            wrong("device", "be there: the cluster has no GPU", "cuda", hint)
        num_workers = arguments.workers or max(gpus if uses_gpus else cores, 1)
        with cluster.on_ray(job, num_workers, gpus=int(uses_gpus)) as ray_workers:
            yield ray_workers


def opened(arguments: argparse.Namespace) -> Any:
    """The pipeline that was named; the embedded model by default."""
    device = chosen_device(arguments.device)
    if arguments.model:
        return generate.open_pipeline(arguments.model, device)
    return DemoPipeline.load(arguments.weights or generate.embedded_weights(), device)


def sampler_of(arguments: argparse.Namespace, pipeline: Any, *, on_step: OnStep | None = None) -> Sampler:
    """What makes the pictures that were asked for."""
    common = {"size": arguments.size, "steps": arguments.steps, "seed": arguments.seed}
    if arguments.model:
        common["size"] = arguments.size or 1024
        return generate.pipeline_sampler(pipeline, arguments.prompt, arguments.num, on_step=on_step, **common)
    common |= {"first": arguments.first, "batch": arguments.batch}
    return generate.demo_sampler(pipeline, arguments.num, on_step, **common)


@dataclass
class Job:
    """What a worker does: it loads the model once, then makes batch after batch of pictures."""

    arguments: argparse.Namespace
    recipe: Recipe | None = None
    lora: Path | None = None

    def __call__(self) -> Callable[[range], list[bytes]]:
        pipeline = opened(self.arguments)
        lora = None if self.lora is None else lora_for(pipeline, self.lora)
        if lora is not None:
            lora.switch(True)
        if self.recipe is not None:
            apply(pipeline, self.recipe, lora=None if lora is None else lora.stepwise)

        def make(numbers: range) -> list[bytes]:
            images = sampler_of(_numbered(self.arguments, numbers), pipeline)().images
            return [packed(image) for image in images]

        return make


@dataclass
class _Tally:
    """What is there, what was made, and what was not."""

    folder: Path
    missing: list[int]
    num: int
    workers: int = 0
    made: int = 0
    retries: int = 0
    failed: list[Outcome] = field(default_factory=list)
    lost: str | None = None
    is_time_up: bool = False
    started: float = field(default_factory=time.monotonic)
    seconds_to_first: float | None = None

    def add(self, outcome: Outcome) -> None:
        self.retries += outcome.tries - 1
        if outcome.error is not None:
            self.failed.append(outcome)
            return
        self.made += len(outcome.item)
        self.seconds_to_first = self.seconds_to_first or self.seconds

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def num_there(self) -> int:
        return self.num - len(self.missing) + self.made

    @property
    def is_complete(self) -> bool:
        return self.num_there == self.num

    def whereabouts(self) -> str:
        return f"{self.num_there} of {self.num} pictures are in {self.folder}"

    def say(self) -> None:
        if self.made:
            rate = f"{self.made / self.seconds:.2f} a second"
            print(f"made {self.made} pictures, {rate}; workers: {self.workers}, retries: {self.retries}")
        print(self.whereabouts())
        for outcome in self.failed[:_FAILURES_SHOWN]:
            print(f"nearfield: error: {_failure(outcome)}", file=sys.stderr)
        if len(self.failed) > _FAILURES_SHOWN:
            print(f"... and {len(self.failed) - _FAILURES_SHOWN} more batches", file=sys.stderr)
        if self.lost:
            print(f"nearfield: error: {self.lost}", file=sys.stderr)
        if self.is_time_up and not self.is_complete:
            print("time is up; the same command goes on")
        elif not self.is_complete:
            print("the same command tries the missing ones again", file=sys.stderr)


def _failure(outcome: Outcome) -> str:
    first, last = outcome.item[0], outcome.item[-1]
    which = f"picture {first}" if first == last else f"pictures {first} to {last}"
    return f"{which} failed {outcome.tries} times; the last: {type(outcome.error).__name__}: {outcome.error}"


def _numbers(arguments: argparse.Namespace) -> range:
    """Names of the pictures: a pipeline's are their seeds, the embedded model's count within a seed."""
    first = arguments.seed if arguments.model else arguments.first
    return range(first, first + arguments.num)


def _numbered(arguments: argparse.Namespace, numbers: range) -> argparse.Namespace:
    """The same for other pictures."""
    first = {"seed": numbers[0]} if arguments.model else {"first": numbers[0]}
    return argparse.Namespace(**(vars(arguments) | first | {"num": len(numbers), "batch": len(numbers)}))


def portable(arguments: argparse.Namespace) -> argparse.Namespace:
    """What a worker in another folder can use."""
    weights = arguments.weights.resolve() if arguments.weights else None
    kept = {name: value for name, value in vars(arguments).items() if name != "run"}
    return argparse.Namespace(**(kept | {"weights": weights}))


def _settings(arguments: argparse.Namespace, recipe: Recipe | None, lora: Path | None) -> dict[str, Any]:
    """All that a picture depends on besides its number. A method by all of its fields: defaults may change."""
    settings: dict[str, Any] = {
        "method": repr(recipe.method) if recipe is not None else "dense",
        "lora": identity(lora),
        **{name: getattr(arguments, name) for name in ("model", "prompt", "size", "steps")},
    }
    if arguments.model:
        return settings
    weights = arguments.weights or (EMBEDDED if EMBEDDED.exists() else None)
    return settings | {"weights": identity(weights), "seed": arguments.seed}


def identity(path: Path | None) -> str | None:
    """A file by its name and by what is in it."""
    if path is None:
        return None
    return f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


def _document(arguments: argparse.Namespace, settings: dict[str, Any], tally: _Tally) -> dict[str, Any]:
    return {
        "format": 1,
        "command": "generate",
        "machine": machine.facts(),
        "settings": settings | {name: getattr(arguments, name) for name in ("seed", "first", "num", "batch")},
        "engine": arguments.engine,
        "workers": tally.workers,
        "pictures_of_this_run": tally.made,
        "missing": tally.num - tally.num_there,
        "retries": tally.retries,
        "seconds": tally.seconds,
        "seconds_to_first": tally.seconds_to_first,
        "images_per_second": tally.made / tally.seconds if tally.made else None,
        "failures": [
            {"pictures": list(outcome.item), "tries": outcome.tries, "error": _failure(outcome)}
            for outcome in tally.failed
        ],
        "given_up": tally.lost,
    }
