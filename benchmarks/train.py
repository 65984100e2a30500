"""Measure training on pixels: tokens per second of whole training steps, in turns with full attention.

What is timed is the step that `nearfield train pixel` makes: forward, backward, clipping, AdamW, moving average.
"""

import argparse
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from benchmarks.cases import CUDA, QUICK, Case, named
from benchmarks.report import Column, Record, error_cell, speed_figures, target_cell, times_cell
from benchmarks.runner import Benchmark, Session, WrongAnswer, require
from nearfield.cli import UsageError, comma_list, member
from nearfield.cli.check import Checked, relative_error
from nearfield.cli.timing import measure
from nearfield_lab.embedded.model import num_parameters
from nearfield_lab.embedded.pixel import PixelConfig, PixelTransformer
from nearfield_lab.embedded.sampler import precision
from nearfield_lab.training.data import Pixels
from nearfield_lab.training.loop import Schedule
from nearfield_lab.training.pixel import PixelRecipe, PixelTraining
from nearfield_lab.training.runs import Backend, attention_backend, quiet_compiling

_EVERYTHING: dict[str, dict[str, Any]] = {
    "LogLinear": {"topk": 2**20, "levels": 1, "enrich": 0},
    "GatedBlocks": {"topk": 2**20},
    "SparseLinear": {"topk": 2**20},
}
"""Fields with which everything is chosen, of the methods that can be trained from the start."""
_TINY = {"layers": 2, "heads": 2, "head_dim": 32}
_CHECKED_SIDE = 24
_ROUNDS = 5
DEFAULTS: dict[str, Any] = {"size": 128, "batch": 16, "compiled": True, "tiny": False}
"""What is trained: pixels per side, pictures per step, whether torch.compile makes it faster, and two narrow layers."""
_TARGETS = {128: 4.0, 256: 10.0}
"""By pixels per side: how many times as fast as full attention log-linear attention shall train on one H200."""


def _cases() -> Iterator[Case]:
    for size, batch in ((128, 16), (256, 4)):
        for method in _EVERYTHING:
            targets = {"training": _TARGETS[size]} if method == "LogLinear" else {}
            on = DEFAULTS | {"size": size, "batch": batch}
            yield Case(f"pixel-{size}-{method.lower()}", on, method, targets=targets, where=(CUDA,))
    tiny = {"size": 16, "batch": 1, "compiled": False, "tiny": True}
    for method in _EVERYTHING:
        yield Case(f"tiny-{method.lower()}", tiny, method, {"topk": 2}, where=(QUICK,))


@dataclass(frozen=True)
class _Trained:
    """A training whose first steps are made.

    Args:
        peak_bytes: the most memory that a step took beyond what was in use before.
    """

    training: PixelTraining
    kernel: Backend
    peak_bytes: int | None

    @property
    def step(self) -> Callable[[], object]:
        return self.training.loop.advance


class Train(Benchmark):
    name = "train"
    examples = (
        "  python -m benchmarks train --quick\n"
        "  python -m benchmarks train --cases 'pixel-128-*' --dense-kernels cudnn --json pixel128.json\n"
        '  python -m benchmarks train --case \'{"method": "LogLinear", "fields": {"levels": 2}, "size": 256}\''
    )
    table = named(_cases())
    defaults = DEFAULTS

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._full: tuple[object, dict[str, _Trained], list[str]] = None, {}, []

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--dense-kernels",
            type=comma_list(member("--dense-kernels", get_args(Backend))),
            metavar="A,B",
            help=f"torch's kernels for full attention: any of {', '.join(get_args(Backend))} (on a GPU cudnn,flash)",
        )

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        super().check(cases, options)
        for case in cases:
            if case.method not in _EVERYTHING:
                known = ", ".join(_EVERYTHING)
                raise UsageError(f"case {case.name!r}: `method` must be one of {known}; got {case.method!r}.")

    def settings(self, case: Case) -> Record:
        return super().settings(case) | {"dense_kernels": self._kernels}

    @property
    def _kernels(self) -> list[Backend]:
        fast: list[Backend] = ["cudnn", "flash"] if self.device.type == "cuda" else ["auto"]
        return self.options.dense_kernels or fast

    def measure(self, case: Case) -> Iterator[Record]:
        checked = require(compared(case, self.device))
        with quiet_compiling():
            full, notes = self._full_attention(case)
            self.session.say(f"{case.name}: first step")
            ours = self._trained(case, config_of(case), "auto")
            steps = {name: each.step for name, each in full.items()} | {case.name: ours.step}
            contexts = {name: partial(attention_backend, each.kernel) for name, each in full.items()}
            contexts |= {case.name: partial(attention_backend, ours.kernel)}
            self.session.say(f"{case.name}: timing {len(steps)} in turns")
            timings = measure(steps, self.device, self.session.effort(_ROUNDS), contexts)
        mine = timings.pop(case.name)
        tokens = case.on["batch"] * case.on["size"] ** 2
        figures = speed_figures(mine.median, timings, None, case.targets.get("training"))
        yield {
            "work": "training",
            "check": checked,
            "note": "; ".join(notes),
            **figures,
            "milliseconds": mine,
            "tokens_per_step": tokens,
            "tokens_per_second": 1000 * tokens / mine.median,
            "full_tokens_per_second": {name: 1000 * tokens / time.median for name, time in timings.items()},
            "peak_bytes": ours.peak_bytes,
            "full_peak_bytes": {name: each.peak_bytes for name, each in full.items()},
            "parameters": num_parameters(ours.training.model),
        }

    def _full_attention(self, case: Case) -> tuple[dict[str, _Trained], list[str]]:
        """The full model with each kernel of torch, kept as long as cases are as large; and what has none."""
        if self._full[0] != case.on:
            self._full = None, {}, []  # before others are made: all may not fit
            found: dict[str, _Trained] = {}
            notes = []
            for kernel in self._kernels:
                name = "sdpa" if kernel == "auto" else kernel
                self.session.say(f"full attention by {name}: first step")
                try:
                    found[name] = self._trained(case, config_of(Case("full", case.on)), kernel)
                except (RuntimeError, WrongAnswer) as error:  # it does not fit, or cannot run
                    notes.append(f"full attention by {name}: {type(error).__name__}: {error}".splitlines()[0])
            self._full = case.on, found, notes
        return self._full[1], self._full[2]

    def _trained(self, case: Case, config: PixelConfig, kernel: Backend) -> _Trained:
        is_cuda = self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if is_cuda else 0
        recipe = PixelRecipe(
            config,
            batch=case.on["batch"],
            dense_kernel=kernel,
            compiled=case.on["compiled"],
            samples=0,
        )
        training = PixelTraining(
            _pixels(case.on), self._folder, recipe, Schedule(steps=1), device=self.device
        )
        with attention_backend(kernel):
            training.loop.advance()  # compiles
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            loss = float(training.loop.advance())
        if not math.isfinite(loss):
            raise WrongAnswer(f"the loss is {loss}")
        peak = torch.cuda.max_memory_allocated(self.device) - before if is_cuda else None
        return _Trained(training, kernel, peak)

    def columns(self, records: Sequence[Record]) -> list[Column]:
        dense = dict.fromkeys(name for record in records for name in record.get("speed_ups", {}))
        return [
            *(Column(f"full by {name}, ms", f"dense_milliseconds/{name}/median", ".1f") for name in dense),
            Column("ms per step", "milliseconds/median", ".1f"),
            Column("tokens/s", "tokens_per_second", ",.0f"),
            *(Column(f"over {name}", times_cell(f"speed_ups/{name}")) for name in dense),
            Column("target", target_cell),
            Column("peak memory", _gibibytes),
            Column("error / limit", error_cell),
        ]

    def notes(self, records: Sequence[Record]) -> list[str]:
        return [f"{record['case']}: {record['note']}" for record in records if record["note"]]


def _gibibytes(record: Record) -> str | None:
    return f"{record['peak_bytes'] / 2**30:.1f} GiB" if record.get("peak_bytes") else None


def _pixels(on: Mapping[str, Any]) -> Pixels:
    generator = torch.Generator().manual_seed(0)
    shape = on["batch"], 3, on["size"], on["size"]
    return Pixels(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))


def config_of(case: Case, **sizes: int) -> PixelConfig:
    """The model of a case, of the paper's sizes if no others are given."""
    given = sizes or (_TINY if case.on["tiny"] else {})
    return PixelConfig.of(case.made() if case.method else None, size=case.on["size"], **given)


def compared(case: Case, device: torch.device) -> Checked:
    """With everything chosen, and its second branch closed, a model must give what the full one gives.

    It may differ by twice what eager attention changes in the full model.
    """
    full = _lively(Case("full", case.on), device)
    sparse = _lively(
        Case(case.name, case.on, case.method, {**case.fields, **_EVERYTHING[case.method]}), device
    )
    weights = {name: torch.zeros_like(value) for name, value in sparse.state_dict().items()}
    sparse.load_state_dict(weights | full.state_dict())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(1, 3, _CHECKED_SIDE, _CHECKED_SIDE, generator=generator).to(device)
    want, eager = (_output(full, images, kernel) for kernel in ("auto", "math"))
    low = torch.bfloat16 if device.type == "cuda" else torch.float32
    limit = 2 * relative_error(eager, want) + torch.finfo(low).eps
    error = relative_error(_output(sparse, images, "auto"), want)
    return Checked(error, limit, f"{case.name} with everything chosen, compared with the full model")


def _lively(case: Case, device: torch.device) -> PixelTransformer:
    """Random weights also where a new model has zeros, so that its output depends on everything."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = PixelTransformer(config_of(case, layers=2, heads=2))
        for parameter in model.parameters():
            if not bool(parameter.any()):
                nn.init.normal_(parameter, std=0.3)
    return model.to(device)


@torch.no_grad()
def _output(model: PixelTransformer, images: Tensor, kernel: Backend) -> Tensor:
    with attention_backend(kernel), precision(images.device):
        out: Tensor = model(images, torch.full((1,), 0.5, device=images.device))
    return out
