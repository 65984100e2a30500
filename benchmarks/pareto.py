"""Speed beside likeness, method by method: the embedded model's pictures with each, timed beside the dense model's.

Dense and sparse pictures are made in turns from the same noise, so that a busy machine slows both. Results are written
after every pattern.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import picture_runs
from benchmarks.picture_runs import DENSE, Facts, PictureMaker, Task
from benchmarks.quality_cases import Pattern
from nearfield.cli import machine
from nearfield_lab import quality
from nearfield_lab.embedded.model import ModelConfig, TinyFlux
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.embedded.storage import read_tensors
from nearfield_lab.quality.results import QualityRow, read_rows

TINY = Path("tiny")
"""In the place of a model file."""
_ABOUT = "the embedded model's pictures, each pattern timed beside dense"
_TINY = ModelConfig(joint_blocks=2, single_blocks=3, heads=2, head_dim=32, condition_tokens=16, size=128)


def tiny_pipeline() -> DemoPipeline:
    """An untrained model with random weights also where a new one has zeros: its pictures depend on everything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyFlux(_TINY)
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)
        return DemoPipeline(model.requires_grad_(False))


def trained_size(weights: Path) -> int:
    """Pixels per side that a model file was trained at last."""
    if weights == TINY:
        return _TINY.size
    _, facts = read_tensors(weights)
    return int(facts.get("config", {}).get("size", ModelConfig.size))


class _Turns(NamedTuple):
    """Pictures of a pattern and of the dense model, and milliseconds per step of every batch."""

    images: Tensor
    dense: Tensor
    times: list[float]
    dense_times: list[float]
    facts: Facts


class TimedSweep:
    """Measures patterns one by one into a file of quality results.

    Args:
        networks: what gives features of pictures, by the names `QualityRow` has: "inception", "efficientnet".
        on_picture: called with the number of pictures made and what they are.
    """

    def __init__(
        self,
        task: Task,
        out: Path,
        *,
        networks: Mapping[str, nn.Module] | None = None,
        device: torch.device | str = "cpu",
        on_picture: Callable[[int, str], None] | None = None,
    ) -> None:
        self.task, self.out, self.networks = task, out, networks or {}
        self.device = torch.device(device)
        self.rows = read_rows(out) if out.exists() else []
        self.broken: dict[str, str] = {}
        """Patterns that raised, and what."""
        self._on_picture = on_picture or (lambda done, name: None)
        self._maker = PictureMaker(task, self.device)
        if task.weights == TINY:
            self._maker.provide(TINY, tiny_pipeline())
        self._lpips = quality.load_lpips(device=self.device)
        self._warm: set[str] = set()

    def run(self, patterns: Sequence[Pattern], has_time: Callable[[], bool] = lambda: True) -> bool:
        """Measure what is missing; returns whether time was enough for all of it."""
        picture_runs.check_patterns(patterns)
        for pattern in (None, *patterns):
            if self.is_known(pattern):
                continue
            if not has_time():
                return False
            if pattern is None:
                self._add(self._dense_row())
                continue
            try:
                self._add(self._row(pattern))
            except (ValueError, NotImplementedError) as error:  # it does not fit this size, or has no kernel
                self.broken[pattern.name] = str(error)
        return True

    def is_known(self, pattern: Pattern | None) -> bool:
        return picture_runs.is_known(self._settings(pattern), self.rows)

    def _settings(self, pattern: Pattern | None) -> dict[str, Any]:
        timed = {"batch": self.task.batch, "device": machine.device_name(self.device)}
        return self.task.settings(pattern) | timed

    def _add(self, row: QualityRow) -> None:
        picture_runs.add_row(self.rows, row, self.out, _ABOUT)

    # -- one pattern ---------------------------------------------------------------------------------------------

    def _dense_row(self) -> QualityRow:
        self._warm_up(None)
        times = []
        for numbers in self.task.batches():
            self._on_picture(numbers.start, DENSE)
            times.append(self._drawn(None, numbers)[1])
        median = _median(times)
        return QualityRow(
            DENSE,
            1.0,
            self.task.num,
            milliseconds=median,
            dense_milliseconds=median,
            settings=self._settings(None),
        )

    def _row(self, pattern: Pattern) -> QualityRow:
        turns = self._turns(pattern)
        found: dict[str, Any] = picture_runs.likeness(turns.images, turns.dense, self._lpips, self.device)
        method = picture_runs.method_of(pattern)
        found |= picture_runs.seams(method, turns.facts.geometry, turns.images, turns.dense, self.device)
        found |= picture_runs.feature_distances(turns.images, turns.dense, self.networks, self.device)
        return QualityRow(
            pattern.name,
            turns.facts.pairs_kept,
            self.task.num,
            tokens_kept=turns.facts.tokens_kept,
            milliseconds=_median(turns.times),
            dense_milliseconds=_median(turns.dense_times),
            settings=self._settings(pattern),
            **found,
        )

    def _turns(self, pattern: Pattern) -> _Turns:
        self._warm_up(None)
        self._warm_up(pattern)
        images, dense = list[Tensor](), list[Tensor]()
        times, dense_times = list[float](), list[float]()
        for numbers in self.task.batches():
            self._on_picture(numbers.start, pattern.name)
            for each, pictures, durations in ((None, dense, dense_times), (pattern, images, times)):
                made, milliseconds, facts = self._drawn(each, numbers)
                pictures.append(made)
                durations.append(milliseconds)
        return _Turns(torch.cat(images), torch.cat(dense), times, dense_times, facts)

    def _warm_up(self, pattern: Pattern | None) -> None:
        """On a GPU: kernels are compiled at their first call, and its clock rises."""
        name = pattern.name if pattern else DENSE
        if self.device.type == "cuda" and name not in self._warm:
            self._drawn(pattern, next(self.task.batches()))
            self._warm.add(name)

    def _drawn(self, pattern: Pattern | None, numbers: range) -> tuple[Tensor, float, Facts]:
        """Pictures, milliseconds per step (the mean: steps may differ on purpose), and what was read."""
        with self._maker.using(pattern) as drawing:
            images, seconds = drawing.draw(numbers)
            return images, 1000 * statistics.fmean(seconds), drawing.facts()


def _median(times: Sequence[float]) -> float:
    """The first of several warms up: it is left out where others are enough."""
    return statistics.median(times[1:] if len(times) > 2 else times)
