"""What patterns of attention do to the embedded model's pictures: FID and likeness beside the share of pairs read.

One process for many patterns: the networks are loaded once, and results are written after every pattern, so that a
sweep that is stopped goes on with the next.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import picture_runs
from benchmarks.picture_runs import DENSE, Drawing, Facts, PictureMaker, Task
from benchmarks.quality_cases import Pattern, as_file_name
from nearfield_lab import quality
from nearfield_lab.embedded.pictures import grid_of, write_picture
from nearfield_lab.quality.results import QualityRow, read_rows

_ON_A_STRIP = 4


class Batch(NamedTuple):
    """What was measured of pictures that were made together.

    Args:
        values: tensors by what they are, of every picture from the first on; some of the first few alone.
    """

    values: Mapping[str, Tensor]
    facts: Facts
    is_compiled: bool


class Sweep:
    """Measures patterns one by one into a JSON file.

    Args:
        references: gives statistics of the photographs' features; asked when the first row is due.
        network: what gives features of pictures.
        counts: numbers of pictures for which there is a row, of each pattern; None: the task's.
        pairs: each of the first so many pictures is compared with the dense one of the same noise.
        networks: others, for the distance to the dense pictures alone, by the names `QualityRow` has.
        on_picture: called with the number of pictures made and what they are.
        strips: a folder for the first pictures of every pattern, side by side in one file.
    """

    def __init__(
        self,
        task: Task,
        references: Callable[[], quality.Statistics],
        network: nn.Module,
        out: Path,
        *,
        counts: Sequence[int] | None = None,
        pairs: int = 512,
        networks: Mapping[str, nn.Module] | None = None,
        device: torch.device | str = "cpu",
        on_picture: Callable[[int, str], None] | None = None,
        strips: Path | None = None,
    ) -> None:
        self.counts = sorted(counts or (task.num,))
        self.task = replace(task, num=self.counts[-1])
        self.pairs = min(pairs, self.task.num)
        self.network, self.out = network, out
        self.networks, self.device = networks or {}, torch.device(device)
        self.rows = read_rows(out) if out.exists() else []
        self._on_picture, self._strips = on_picture, strips
        self._maker = PictureMaker(self.task, self.device)
        # Matrices of 2,048 features are decomposed, and all photographs compared, for every pattern.
        self._computing = self.device if self.device.type == "cuda" else torch.device("cpu")
        self._given = references
        self._references: quality.Statistics | None = None
        self._lpips = quality.load_lpips(device=self.device)
        self._dense: list[Batch] = []

    def run(self, patterns: Sequence[Pattern], has_time: Callable[[], bool] = lambda: True) -> bool:
        """Measure the dense model and what of the patterns is missing; returns whether all of it was."""
        picture_runs.check_patterns(patterns)
        self._measure(None, self._dense)
        for pattern in patterns:
            if not self._missing(pattern):
                continue
            if not has_time():
                return False
            self._make(None, self.pairs, self._dense)
            self._measure(pattern, [])
        return True

    def _measure(self, pattern: Pattern | None, batches: list[Batch]) -> None:
        """Add the missing rows of a pattern; its pictures are measured into `batches`."""
        for count in self._missing(pattern):
            self._make(pattern, count, batches)
            self._add(self._row(pattern, count, batches))

    @property
    def not_compiled(self) -> Mapping[str, str]:
        """Patterns whose model could not be compiled, and why."""
        return self._maker.not_compiled

    @property
    def references(self) -> quality.Statistics:
        if self._references is None:
            self._references = self._given().to(self._computing)
        return self._references

    def _settings(self, pattern: Pattern | None, count: int) -> dict[str, Any]:
        return replace(self.task, num=count).settings(pattern)

    def _missing(self, pattern: Pattern | None) -> list[int]:
        """Numbers of pictures for which there is no row yet."""
        return [
            count
            for count in self.counts
            if not picture_runs.is_known(self._settings(pattern, count), self.rows)
        ]

    # -- pictures ------------------------------------------------------------------------------------------------

    def _batches(self, count: int) -> Iterator[range]:
        """Of the first so many pictures, whole ones, so that they serve larger numbers, too."""
        return (numbers for numbers in self.task.batches() if numbers.start < count)

    def _make(self, pattern: Pattern | None, count: int, batches: list[Batch]) -> None:
        """Make and measure what is missing of so many pictures."""
        missing = list(self._batches(count))[len(batches) :]
        if not missing:
            return
        with self._maker.using(pattern) as drawing:
            for numbers in missing:
                if self._on_picture is not None:
                    self._on_picture(numbers.start, pattern.name if pattern else DENSE)
                batches.append(self._made(pattern, numbers, drawing))

    def _made(self, pattern: Pattern | None, numbers: range, drawing: Drawing) -> Batch:
        images = drawing.pictures(numbers)
        facts = drawing.facts()
        if self._strips is not None and numbers.start == 0:
            first = images[:_ON_A_STRIP].cpu()
            write_picture(strip_file(self._strips, pattern), grid_of(first, _ON_A_STRIP))
        values = {"features": quality.features_of(picture_runs.batches(images, self.device), self.network)}
        paired = max(0, min(numbers.stop, self.pairs) - numbers.start)
        if pattern is None:
            values["pictures"] = images[:paired].cpu()
        elif paired:
            values |= self._beside_dense(pattern, facts, values["features"], images[:paired], numbers)
        return Batch(values, facts, drawing.is_compiled)

    def _beside_dense(
        self, pattern: Pattern, facts: Facts, features: Tensor, images: Tensor, numbers: range
    ) -> dict[str, Tensor]:
        """What is told of every pair with the dense picture of the same noise."""
        known = self._dense[numbers.start // self.task.batch].values
        dense = known["pictures"].to(self.device)
        found = picture_runs.likeness_values(images, dense, self._lpips, self.device)
        found |= picture_runs.feature_distance_values(images, dense, self.networks, self.device)
        pairs = (each[: len(images)] for each in (features, known["features"]))
        found["inception_distance"] = quality.cosine_distance(*pairs)
        borders = picture_runs.borders_of(picture_runs.method_of(pattern), facts.geometry, self.device)
        if borders is not None:
            for name, each in (("seam", images), ("dense_seam", dense)):
                found[name] = picture_runs.gradients(each, borders, self.device)
        return found

    # -- rows ----------------------------------------------------------------------------------------------------

    def _row(self, pattern: Pattern | None, count: int, batches: Sequence[Batch]) -> QualityRow:
        """What all pictures say together."""
        parts: dict[str, list[Tensor]] = {}
        used = [(numbers.start, batch) for numbers, batch in zip(self._batches(count), batches, strict=False)]
        for start, batch in used:
            for name, part in batch.values.items():
                if name != "pictures":
                    parts.setdefault(name, []).append(part[: count - start])
        values = {name: torch.cat(each) for name, each in parts.items()}
        found: dict[str, Any] = self._by_features(values.pop("features"))
        if "seam" in values:
            found |= picture_runs.seam_figures(values.pop("seam"), values.pop("dense_seam"))
        found |= {name: picture_runs.finite_mean(each) for name, each in values.items()}
        return QualityRow(
            pattern.name if pattern else DENSE,
            batches[0].facts.pairs_kept,
            count,
            tokens_kept=batches[0].facts.tokens_kept,
            compiled=all(batch.is_compiled for _, batch in used),
            settings=self._settings(pattern, count),
            **found,
        )

    def _by_features(self, features: Tensor) -> dict[str, float]:
        """What features say beside the photographs'."""
        features, references = features.to(self._computing), self.references
        found = {"fid": quality.frechet_distance(quality.Statistics.of(features, self.task.size), references)}
        if references.features is not None:
            shares = quality.precision_recall(features, references.features)
            blocks = max(1, min(10, min(len(features), references.count) // 100))
            kernel = quality.kernel_distance(features, references.features, blocks=blocks)
            found |= {"precision": shares.precision, "recall": shares.recall}
            found |= {"kid": kernel.value, "kid_error": kernel.error}
        return found

    def _add(self, row: QualityRow) -> None:
        picture_runs.add_row(self.rows, row, self.out, "the embedded model's pictures")


def strip_file(folder: Path, pattern: Pattern | None) -> Path:
    """Where the first pictures of a pattern stand."""
    return folder / f"{as_file_name(pattern.name if pattern else DENSE)}.png"


def photograph_statistics(
    batches: Iterable[Tensor], network: nn.Module, size: int, kept: Path
) -> quality.Statistics:
    """Of photographs `[B, 3, size, size]`, from a file where they were measured before."""
    if kept.exists():
        return quality.Statistics.load(kept)
    found = quality.Statistics.of(quality.features_of(batches, network), size)
    found.save(kept)
    return found
