"""Measure what patterns of attention do to the embedded model's pictures: likeness to the dense ones, and their speed,
or with photographs FID.

One process serves many patterns: the networks are loaded once. Without photographs dense and sparse pictures are made
in turns from the same noise, so that a busy machine slows both.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import picture_runs
from benchmarks.cases import Case
from benchmarks.patterns import CASES, DEFAULTS, DENSE, as_file_name, tuning_of
from benchmarks.picture_runs import TINY, Drawing, Facts, PictureMaker, Task
from benchmarks.report import Column, Record
from benchmarks.runner import Benchmark, Session
from nearfield.cli import UsageError, add_integer, add_weights, comma_list, integer, machine, wrong
from nearfield_lab import quality
from nearfield_lab.embedded.generate import NoWeights, embedded_weights
from nearfield_lab.embedded.pictures import grid_of, write_picture
from nearfield_lab.plots.fronts import quality_front
from nearfield_lab.quality.inception import MissingWeights
from nearfield_lab.quality.results import QualityRow
from nearfield_lab.training import data

_ON_A_STRIP = 4


class Batch(NamedTuple):
    """What was measured of pictures that were made together.

    Args:
        values: tensors by what they are, of every picture from the first on; some of the first few alone.
    """

    values: Mapping[str, Tensor]
    facts: Facts
    is_compiled: bool


class Pictures(Benchmark):
    name = "pictures"
    examples = (
        "  python -m benchmarks pictures --quick --plot pareto.png\n"
        "  python -m benchmarks pictures --cases 'far/*' --num 4 --json likeness.json\n"
        "  python -m benchmarks pictures --photographs cats512 --weights run512/model.safetensors --cases 'tiles/*'\n"
        "  python -m benchmarks pictures --photographs cats512 --case mine.json --num 1500,5000 --json mine.json"
    )
    table = CASES
    defaults = DEFAULTS
    drawing = "benchmarks.pareto:draw_rows"
    plot_suffixes = (".png", ".svg")

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        options = self.options
        self.task = _task(options)
        self.maker = PictureMaker(self.task, self.device)
        # Matrices of 2,048 features are decomposed, and all photographs compared, for every pattern.
        self._computing = self.device if self.device.type == "cuda" else torch.device("cpu")
        self._references: quality.Statistics | None = None
        self._networks: dict[str, nn.Module] | None = None
        self._lpips: nn.Module | None = None
        self._dense: list[Batch] = []
        self._last: tuple[str, list[Batch]] = "", []
        self._warm: set[str] = set()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--photographs",
            type=Path,
            metavar="DIR",
            help="what FID, KID, precision and recall compare with: tar files or pictures; without it steps are timed",
        )
        add_weights(parser)
        parser.add_argument("--tiny", action="store_true", help="an untrained model of a few narrow layers")
        parser.add_argument(
            "--inception",
            type=Path,
            metavar="FILE",
            help="the FID network (default: the installed package's)",
        )
        parser.add_argument(
            "--num",
            type=comma_list(integer("--num", 1)),
            metavar="N",
            help="pictures of each pattern (default 4, with --photographs 1500); 1500,5000 gives a record for the first"
            " 1,500, too",
        )
        add_integer(parser, "--pairs", 512, "pictures that are compared with the dense ones, from the first")
        add_integer(parser, "--steps", 16, "denoising steps")
        add_integer(
            parser, "--size", None, "pixels per side (default: what the model was trained at)", least=64
        )
        add_integer(parser, "--seed", 0, "of the noise", least=0)
        add_integer(
            parser,
            "--batch",
            None,
            "pictures at a time (default 1, with --photographs 64); each is one timing",
        )
        parser.add_argument(
            "--compile",
            action="store_true",
            help="let torch.compile make the model faster; pictures are the same up to rounding",
        )
        parser.add_argument(
            "--strips",
            type=Path,
            metavar="DIR",
            help="keep the first four pictures of every pattern, side by side, one file each",
        )

    # -- cases -----------------------------------------------------------------------------------------------------

    @classmethod
    def cases(cls, options: argparse.Namespace, device: torch.device) -> list[Case]:
        """Dense first, each for every number of pictures: rows of fewer come free."""
        patterns = [Case(DENSE, DEFAULTS), *super().cases(options, device)]
        return [
            replace(pattern, on={**pattern.on, "num": count})
            for pattern in patterns
            for count in _counts(options)
        ]

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        super().check(cases, options)
        check_model(options)
        if len(options.num or ()) > 1 and not options.photographs:
            wrong("--num", "be one number without `--photographs`", ",".join(map(str, options.num)))
        if options.inception and not options.inception.is_file():
            wrong("--inception", "name a file that is there", repr(str(options.inception)))

    def settings(self, case: Case) -> Record:
        """What it takes to do it again, and to know that it was done. Files are named without their folders."""
        task, own = self.task, case.on.get("weights")
        files = {"weights": Path(own).name if own else task.weights.name, "name": shown_name(case)}
        if lora := case.on.get("lora"):
            files["lora"] = Path(lora).name
        sizes = {"steps": task.steps, "size": task.size, "seed": task.seed, "tuning": tuning_of(case)}
        timed = (
            {}
            if self.options.photographs
            else {"batch": task.batch, "device": machine.device_name(self.device)}
        )
        return case.document | sizes | timed | files

    def is_timed(self) -> bool:
        return False  # each record says of which commit it is: a sweep takes days

    # -- measuring -------------------------------------------------------------------------------------------------

    def measure(self, case: Case) -> Iterator[Record]:
        pattern = None if case.name == DENSE else case
        yield self._row(pattern, case.on["num"]) if self.options.photographs else self._timed_row(pattern)

    def _say(self, pattern: Case | None, first: int) -> None:
        self.session.say(f"{shown_name(pattern)}: picture {first} of {self.task.num}")

    @property
    def lpips(self) -> nn.Module:
        if self._lpips is None:
            self._lpips = quality.load_lpips(device=self.device)
        return self._lpips

    @property
    def networks(self) -> dict[str, nn.Module]:
        """What gives features, by the names that distances have; Inception must be there for FID, or if asked for."""
        if self._networks is None:
            self._networks = {}
            loaders: dict[str, Callable[[], nn.Module]] = {
                "inception": partial(quality.load_inception, self.options.inception, self.device),
                "efficientnet": partial(quality.load_efficientnet, self.device),
            }
            for name, load in loaders.items():
                try:
                    self._networks[name] = load()
                except MissingWeights as error:
                    if name == "inception" and self.options.photographs:
                        raise UsageError(str(error)) from None
                    print(f"no distances of features of {name}: {error}", file=sys.stderr)
        return self._networks

    # -- with photographs ------------------------------------------------------------------------------------------

    @property
    def references(self) -> quality.Statistics:
        """Statistics of all photographs, read from the file that an earlier run wrote."""
        if self._references is None:
            source = data.pictures(self.options.photographs)
            kept = f"photographs-{self.task.size}-{data.fingerprint(source)[:12]}.safetensors"
            batches = data.batches(
                source,
                self.task.size,
                on_progress=lambda done, total, words: self.session.say(f"{words} {done}"),
            )
            folder = self.options.json or Path("pictures.json")
            network = self.networks["inception"]
            found = photograph_statistics(batches, network, self.task.size, folder.with_name(kept))
            self._references = found.to(self._computing)
        return self._references

    def _batches(self, count: int) -> Iterator[range]:
        """Batches of the first `count` pictures, always whole ones, so that they serve larger numbers, too."""
        return (numbers for numbers in self.task.batches() if numbers.start < count)

    def _made(self, pattern: Case | None, count: int) -> list[Batch]:
        """So many pictures of a pattern, measured; those of the dense model and of the last pattern are kept."""
        name = shown_name(pattern)
        if pattern is None:
            batches = self._dense
        else:
            self._made(None, min(count, self.options.pairs))
            if self._last[0] != name:
                self._last = name, []
            batches = self._last[1]
        missing = list(self._batches(count))[len(batches) :]
        if missing:
            with self.maker.using(pattern) as drawing:
                for numbers in missing:
                    self._say(pattern, numbers.start)
                    batches.append(self._measured(pattern, numbers, drawing))
        return batches

    def _measured(self, pattern: Case | None, numbers: range, drawing: Drawing) -> Batch:
        images, facts = drawing.pictures(numbers), drawing.facts()
        self._keep_strip(pattern, numbers, images)
        batches = picture_runs.batches(images, self.device)
        values = {"features": quality.features_of(batches, self.networks["inception"])}
        paired = max(0, min(numbers.stop, self.options.pairs) - numbers.start)
        if pattern is None:
            values["pictures"] = images[:paired].cpu()
        elif paired:
            known = self._dense[numbers.start // self.task.batch].values
            values |= self._likeness(pattern, facts, images[:paired], known["pictures"].to(self.device))
            pairs = (each[:paired] for each in (values["features"], known["features"]))
            values["inception_distance"] = quality.cosine_distance(*pairs)
        return Batch(values, facts, drawing.is_compiled)

    def _keep_strip(self, pattern: Case | None, numbers: range, images: Tensor) -> None:
        if self.options.strips is not None and numbers.start == 0:
            first = images[:_ON_A_STRIP].cpu()
            path = self.options.strips / f"{as_file_name(shown_name(pattern))}.png"
            write_picture(path, grid_of(first, _ON_A_STRIP))

    def _likeness(self, pattern: Case, facts: Facts, images: Tensor, dense: Tensor) -> dict[str, Tensor]:
        """What is known of every pair with the dense picture of the same noise."""
        others = {name: each for name, each in self.networks.items() if name != "inception"}
        found = picture_runs.likeness_values(images, dense, self.lpips, self.device)
        found |= picture_runs.feature_distance_values(images, dense, others, self.device)
        borders = picture_runs.borders_of(pattern.made(), facts.geometry, self.device)
        if borders is not None:
            for name, each in (("seam", images), ("dense_seam", dense)):
                found[name] = picture_runs.gradients(each, borders, self.device)
        return found

    def _row(self, pattern: Case | None, count: int) -> Record:
        """What all pictures say together."""
        parts: dict[str, list[Tensor]] = {}
        used = list(zip(self._batches(count), self._made(pattern, count), strict=False))
        for numbers, batch in used:
            for name, part in batch.values.items():
                if name != "pictures":
                    parts.setdefault(name, []).append(part[: count - numbers.start])
        values = {name: torch.cat(each) for name, each in parts.items()}
        by_features = self._by_features(values.pop("features"))
        facts = used[0][1].facts
        about: Record = {"compiled": all(batch.is_compiled for _, batch in used)}
        if pattern is not None and pattern.name in self.maker.not_compiled:
            about["note"] = f"not compiled, {self.maker.not_compiled[pattern.name]}"
        return self._about(pattern, facts, count) | about | by_features | _means(values)

    def _about(self, pattern: Case | None, facts: Facts, count: int) -> Record:
        kept = {"pairs_kept": facts.pairs_kept, "tokens_kept": facts.tokens_kept}
        return {"pattern": shown_name(pattern), "samples": count} | kept

    def _by_features(self, features: Tensor) -> dict[str, float]:
        """What features say, compared with the photographs'."""
        features, references = features.to(self._computing), self.references
        found = {"fid": quality.frechet_distance(quality.Statistics.of(features, self.task.size), references)}
        if references.features is not None:
            shares = quality.precision_recall(features, references.features)
            blocks = max(1, min(10, min(len(features), references.count) // 100))
            kernel = quality.kernel_distance(features, references.features, blocks=blocks)
            found |= {"precision": shares.precision, "recall": shares.recall}
            found |= {"kid": kernel.value, "kid_error": kernel.error}
        return found

    # -- in turns with the dense model -----------------------------------------------------------------------------

    def _timed_row(self, pattern: Case | None) -> Record:
        """Likeness, and milliseconds of a step and of the dense model's in turns with it."""
        turns = (None,) if pattern is None else (None, pattern)
        for each in turns:
            self._warm_up(each)
        images: dict[int, list[Tensor]] = {}
        times: dict[str, list[float]] = {}
        facts = Facts(1.0)
        for numbers in self.task.batches():
            self._say(pattern, numbers.start)
            for each in turns:
                made, milliseconds, facts = self._drawn(each, numbers)
                images.setdefault(id(each), []).append(made)
                times.setdefault(shown_name(each), []).append(milliseconds)
        median, dense = (_median(times[name]) for name in (shown_name(pattern), DENSE))
        speed = {"milliseconds": median, "dense_milliseconds": dense, "speed_up": dense / median}
        row = self._about(pattern, facts, self.task.num) | speed
        if pattern is None:
            return row
        ours, theirs = (torch.cat(images[id(each)]) for each in (pattern, None))
        values = self._likeness(pattern, facts, ours, theirs)
        if network := self.networks.get("inception"):
            distances = {"inception": network}
            values |= picture_runs.feature_distance_values(ours, theirs, distances, self.device)
        return row | _means(values)

    def _warm_up(self, pattern: Case | None) -> None:
        """On a GPU: kernels are compiled at their first call, and its clock rises."""
        name = shown_name(pattern)
        if self.device.type == "cuda" and name not in self._warm:
            self._drawn(pattern, next(self.task.batches()))
            self._warm.add(name)

    def _drawn(self, pattern: Case | None, numbers: range) -> tuple[Tensor, float, Facts]:
        """Pictures, milliseconds per step (the mean: steps may differ on purpose), and what was read."""
        with self.maker.using(pattern) as drawing:
            images, seconds = drawing.draw(numbers)
            self._keep_strip(pattern, numbers, images)
            return images, 1000 * statistics.fmean(seconds), drawing.facts()

    # -- report ----------------------------------------------------------------------------------------------------

    def columns(self, records: Sequence[Record]) -> list[Column]:
        return [
            Column("pictures", "samples", ","),
            Column("pairs", "pairs_kept", ".1%"),
            Column("tokens", "tokens_kept", ".0%"),
            Column("ms per step", "milliseconds", ",.1f"),
            Column("dense", "dense_milliseconds", ",.1f"),
            Column("speed-up", "speed_up", ".2f"),
            Column("FID", "fid", ".1f"),
            Column("KID", "kid", ".4f"),
            Column("precision", "precision", ".3f"),
            Column("recall", "recall", ".3f"),
            Column("LPIPS", "lpips", ".3f"),
            Column("PSNR", "psnr", ".1f"),
            Column("SSIM", "ssim", ".3f"),
            Column("seam", "seam", ".3f"),
            Column("dense seam", "dense_seam", ".3f"),
            Column("Inception", "inception_distance", ".4f"),
            Column("EfficientNet", "efficientnet_distance", ".4f"),
        ]

    def draw(self, path: Path, records: Sequence[Record], title: str) -> None:
        if not self.options.photographs:
            super().draw(path, records, title)
            return
        rows = [QualityRow.of(record) for record in records]
        quality_front(path, rows, f"{self.task.num:,} pictures at {self.task.size} px")

    def notes(self, records: Sequence[Record]) -> list[str]:
        return [f"{record['case']}: {record['note']}" for record in records if record["note"]]


def shown_name(pattern: Case | None) -> str:
    """What people call a pattern."""
    if pattern is None or pattern.name == DENSE:
        return DENSE
    return pattern.on.get("pattern") or pattern.name


def _counts(options: argparse.Namespace) -> list[int]:
    default = 1 if options.quick else 1500 if options.photographs else 4
    return sorted(options.num or [default])


def _task(options: argparse.Namespace) -> Task:
    weights = model_of(options)
    batch = options.batch or (64 if options.photographs else 1)
    steps = min(options.steps, 2) if options.quick else options.steps
    size = options.size or (64 if options.quick else picture_runs.trained_size(weights))
    return Task(weights, max(_counts(options)), steps, size, options.seed, batch, options.compile)


def model_of(options: argparse.Namespace) -> Path:
    """`--weights`, `--tiny`, or the embedded model."""
    if options.tiny or options.quick:
        return TINY
    try:
        return options.weights or embedded_weights()
    except NoWeights as error:
        raise UsageError(f"{error}, or use `--tiny`.") from None


def check_model(options: argparse.Namespace) -> None:
    """Whose pictures are made, and how large."""
    if options.tiny and options.weights:
        wrong("--weights", "be left out with `--tiny`", repr(str(options.weights)))
    if options.weights and not options.weights.is_file():
        wrong("--weights", "name a file that is there", repr(str(options.weights)))
    if options.size and options.size % 8:
        wrong("--size", "be a multiple of 8 pixels", options.size)


def _means(values: dict[str, Tensor]) -> Record:
    """Means over all pairs."""
    found: Record = {}
    if "seam" in values:
        found |= picture_runs.seam_figures(values.pop("seam"), values.pop("dense_seam"))
    return found | {name: picture_runs.finite_mean(each) for name, each in values.items()}


def _median(times: Sequence[float]) -> float:
    """The first of several warms up: it is left out where others are enough."""
    return statistics.median(times[1:] if len(times) > 2 else times)


def photograph_statistics(batches: Any, network: nn.Module, size: int, kept: Path) -> quality.Statistics:
    """Statistics of photographs `[B, 3, size, size]`, read from a file where they were measured before."""
    if kept.exists():
        return quality.Statistics.load(kept)
    found = quality.Statistics.of(quality.features_of(batches, network), size)
    found.save(kept)
    return found
