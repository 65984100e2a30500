"""What patterns of attention do to the embedded model's pictures: FID and likeness beside the share of pairs read.

One process for many patterns: the networks are loaded once, pictures stay in memory, and results are written after
every pattern, so that a sweep that is stopped goes on with the next.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nearfield import quality
from nearfield._files import write_json
from nearfield.bench import machine, picture_runs
from nearfield.bench.picture_runs import DENSE, Facts, PictureMaker, Task
from nearfield.bench.quality_cases import Pattern
from nearfield.demo.pictures import grid_of, write_picture
from nearfield.quality.results import QualityRow, as_document, read_rows

_ON_A_STRIP = 4


class Sweep:
    """Measures patterns one by one into a JSON file.

    Args:
        references: statistics of the photographs' features.
        network: what gives features of pictures.
        networks: others, for the distance to the dense pictures alone, by the names `QualityRow` has.
        on_picture: called with the number of pictures made and what they are.
        strips: a folder for the first pictures of every pattern, side by side in one file.
    """

    def __init__(
        self,
        task: Task,
        references: quality.Statistics,
        network: nn.Module,
        out: Path,
        *,
        networks: Mapping[str, nn.Module] | None = None,
        device: torch.device | str = "cpu",
        on_picture: Callable[[int, str], None] | None = None,
        strips: Path | None = None,
    ) -> None:
        self.task, self.network, self.out = task, network, out
        self.networks, self.device = networks or {}, torch.device(device)
        self.rows = read_rows(out) if out.exists() else []
        self._on_picture, self._strips = on_picture, strips
        self._maker = PictureMaker(task, self.device)
        self._dense: Tensor | None = None
        self._dense_features: Tensor | None = None
        # Matrices of 2,048 features are decomposed, and all photographs compared, for every pattern.
        self._computing = self.device if self.device.type == "cuda" else torch.device("cpu")
        self.references = references.to(self._computing)
        self._lpips = quality.load_lpips(device=self.device)

    def run(self, patterns: Sequence[Pattern], has_time: Callable[[], bool] = lambda: True) -> bool:
        """Measure the dense model and what of the patterns is missing; returns whether all of it was."""
        picture_runs.check_patterns(patterns)
        self._dense, _ = self._pictures(None)
        if not self._is_known(None):
            row = QualityRow(
                DENSE,
                1.0,
                self.task.num,
                compiled=self.task.compiled,
                settings=self.task.settings(None),
            )
            self._dense_features = self._features(self._dense)
            self._add(row, self._dense_features)
        for pattern in patterns:
            if self._is_known(pattern):
                continue
            if not has_time():
                return False
            self._measure(pattern)
        return True

    @property
    def not_compiled(self) -> Mapping[str, str]:
        """Patterns whose model could not be compiled, and why."""
        return self._maker.not_compiled

    def _is_known(self, pattern: Pattern | None) -> bool:
        return picture_runs.is_known(self.task.settings(pattern), self.rows)

    def _measure(self, pattern: Pattern) -> None:
        assert self._dense is not None  # `run` made them
        images, facts = self._pictures(pattern)
        features = self._features(images)
        if self._dense_features is None:
            self._dense_features = self._features(self._dense)
        distances = quality.cosine_distance(features, self._dense_features)
        found: dict[str, Any] = picture_runs.likeness(images, self._dense, self._lpips, self.device)
        method = picture_runs.method_of(pattern)
        found |= picture_runs.feature_distances(images, self._dense, self.networks, self.device)
        found |= picture_runs.seams(method, facts.geometry, images, self._dense, self.device)
        row = QualityRow(
            pattern.name,
            facts.pairs_kept,
            self.task.num,
            tokens_kept=facts.tokens_kept,
            inception_distance=float(distances.mean()),
            compiled=self.task.compiled and pattern.name not in self.not_compiled,
            settings=self.task.settings(pattern),
            **found,
        )
        self._add(row, features)

    def _features(self, images: Tensor) -> Tensor:
        return quality.features_of(picture_runs.batches(images, self.device), self.network)

    def _add(self, row: QualityRow, features: Tensor) -> None:
        """Complete a row by what the features say beside the photographs', and write it."""
        features, references = features.to(self._computing), self.references
        found = quality.Statistics.of(features, self.task.size)
        record = asdict(row) | {"fid": quality.frechet_distance(found, references)}
        if references.features is not None:
            shares = quality.precision_recall(features, references.features)
            blocks = max(1, min(10, min(len(features), references.count) // 100))
            kernel = quality.kernel_distance(features, references.features, blocks=blocks)
            record |= {"precision": shares.precision, "recall": shares.recall}
            record |= {"kid": kernel.value, "kid_error": kernel.error}
        self.rows.append(QualityRow(**record))
        write_json(self.out, as_document(self.rows, machine.facts(), "the embedded model's pictures"))

    def _pictures(self, pattern: Pattern | None) -> tuple[Tensor, Facts]:
        """`[num, height, width, 3]` uint8, and what they read."""
        parts, place = [], self._place()
        with self._maker.using(pattern) as drawing:
            for numbers in self.task.batches():
                if self._on_picture is not None:
                    self._on_picture(numbers.start, pattern.name if pattern else DENSE)
                parts.append(drawing.pictures(numbers).to(place))
            facts = drawing.facts()
        images = torch.cat(parts)
        if self._strips is not None:
            first = images[:_ON_A_STRIP].cpu()
            write_picture(strip_file(self._strips, pattern), grid_of(first, _ON_A_STRIP))
        return images, facts

    def _place(self) -> torch.device:
        """Where pictures are kept: on the device, if there is plenty of room for these and the dense ones."""
        if self.device.type != "cuda":
            return torch.device("cpu")
        free, _ = torch.cuda.mem_get_info(self.device)
        return self.device if 2 * 3 * self.task.num * self.task.size**2 < free // 4 else torch.device("cpu")


def strip_file(folder: Path, pattern: Pattern | None) -> Path:
    """Where the first pictures of a pattern stand: its name, as far as files may be called so."""
    name = pattern.name if pattern else DENSE
    return folder / f"{re.sub('[^a-z0-9.]+', '-', name.lower()).strip('-')}.png"


def photograph_statistics(
    batches: Iterable[Tensor], network: nn.Module, size: int, kept: Path
) -> quality.Statistics:
    """Of photographs `[B, 3, size, size]`, from a file where they were measured before."""
    if kept.exists():
        return quality.Statistics.load(kept)
    found = quality.Statistics.of(quality.features_of(batches, network), size)
    found.save(kept)
    return found
