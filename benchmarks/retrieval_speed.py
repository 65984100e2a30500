"""Time to the first token of an answer: full prefill of a prompt, beside reuse of its cached chunks, step by step.

Both run in one process, in turns, on the same model and tokens. Before anything is timed the gate must open; a model
whose caches cannot be moved gets no figure.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nearfield.cli.timing import Timing
from nearfield.retrieval import Chunk, assemble, first_logits, prefill_chunk, score, select, verify
from nearfield.retrieval.clock import Clock
from nearfield.retrieval.embedded import load_embedded, load_folder, random_model
from nearfield.retrieval.fidelity import next_logits
from nearfield_lab.commands import retrieval_cases

STEPS = ("assemble", "score", "select", "recompute")
_PREFIX = 4


@dataclass(frozen=True)
class SpeedCase:
    """One model and prompt: `length` tokens of context in chunks of `chunk` tokens, and a question."""

    model: str
    length: int
    chunk: int = 1024
    question: int = 64
    ratio: float = 0.15
    selector: str = "infoflow"

    @property
    def target(self) -> float | None:
        if self.ratio != 0.15 or self.selector != "infoflow":
            return None
        if self.model == retrieval_cases.EMBEDDED:
            is_set = self.length == retrieval_cases.EMBEDDED_LENGTH
            return retrieval_cases.EMBEDDED_TARGET if is_set else None
        return None if self.model.startswith("tiny") else retrieval_cases.TARGETS.get(self.length)

    def __str__(self) -> str:
        return (
            f"{self.model}, {self.length:,} tokens in chunks of {self.chunk:,}, {self.question} of question, "
            f"{self.selector} at {self.ratio:.0%}"
        )


@dataclass(frozen=True)
class SpeedResult:
    """What one case gave, in milliseconds. `timings` holds "full prefill", "reuse" and each step of reuse.

    "recompute" holds the question, too, which is read in the same pass, up to the logits of the first token.
    """

    case: SpeedCase
    status: str
    note: str = ""
    dtype: str = ""
    selected: int = 0
    timings: dict[str, Timing] = field(default_factory=dict)
    gate: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None

    @property
    def speed_up(self) -> float | None:
        if self.status != "ok":
            return None
        return self.timings["full prefill"].median / self.timings["reuse"].median

    def as_record(self) -> dict[str, Any]:
        target, gained = self.case.target, self.speed_up
        return {
            **asdict(self.case),
            "status": self.status,
            "note": self.note,
            "dtype": self.dtype,
            "selected": self.selected,
            "milliseconds": {name: asdict(timing) for name, timing in self.timings.items()},
            "speed_up": gained,
            "target": target,
            "reached": None if target is None or gained is None else gained >= target,
            "gate": self.gate,
            "peak_bytes": self.peak_bytes,
        }


def run_all(
    cases: Sequence[SpeedCase],
    device: torch.device,
    rounds: int,
    on_case: Callable[[int, str], None] | None = None,
) -> Iterator[SpeedResult]:
    """Measure case after case; a model stays as long as the next case needs it."""
    name, bench = None, None
    for index, case in enumerate(cases):
        if on_case is not None:
            on_case(index, str(case))
        if case.model != name:
            bench = None  # before the next is made: two may not fit
            if device.type == "cuda":
                torch.cuda.empty_cache()
            name, bench = case.model, SpeedBench(case.model, device)
        assert bench is not None
        yield bench.run(case, rounds)


class SpeedBench:
    """One model. Architectures get random weights; the speed is that of any others."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.device = device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if name == retrieval_cases.EMBEDDED:
            self.model: Any = load_embedded(device, dtype)[0]
        elif name in retrieval_cases.ARCHITECTURES:
            self.model = random_model(*retrieval_cases.ARCHITECTURES[name], device, dtype)
        else:
            self.model = load_folder(name, device, dtype)[0]
        self._gate: dict[str, float] | None = None

    def run(self, case: SpeedCase, rounds: int) -> SpeedResult:
        """What breaks is a result, too, so that the other cases still run."""
        dtype = str(self.model.dtype)
        try:
            gate = self._verified()
        except ValueError as error:
            return SpeedResult(case, "check failed", str(error), dtype)
        try:
            return self._measured(case, rounds, dtype, gate)
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # after the handler: the error held on to what was in use
        return SpeedResult(case, "broke", note, dtype, gate=gate)

    def _verified(self) -> dict[str, float]:
        """What the gate measured: once, it is the same model in all cases."""
        if self._gate is None:
            self._gate = asdict(verify(self.model))
        return self._gate

    def _measured(self, case: SpeedCase, rounds: int, dtype: str, gate: dict[str, float]) -> SpeedResult:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        chunks, question = self._inputs(case)
        prompt = torch.cat([assemble(self.model, chunks).tokens, question])
        samples: dict[str, list[float]] = {}
        selected = 0
        for index in range(rounds + 1):
            clock = Clock(self.device)
            with clock.step("full prefill"):
                next_logits(self.model, prompt)
            with clock.step("reuse"):
                selected = self._reused(case, chunks, question, clock)
            for name, value in clock.seconds.items():
                if index:  # the first round compiles kernels and fills caches
                    samples.setdefault(name, []).append(1000 * value)
        return SpeedResult(
            case,
            "ok",
            "",
            dtype,
            selected,
            {name: _timing(values) for name, values in samples.items()},
            gate,
            torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )

    def _reused(self, case: SpeedCase, chunks: list[Chunk], question: Tensor, clock: Clock) -> int:
        """The steps of an answer up to the logits of its first token."""
        selector: Any = case.selector
        with clock.step("assemble"):
            context = assemble(self.model, chunks, room=len(question))
        with clock.step("score"):
            scores = score(self.model, context, question, selector)
        with clock.step("select"):
            rows = select(context, scores, case.ratio)
        with clock.step("recompute"):
            first_logits(self.model, context, rows, question)
        return len(rows)

    def _inputs(self, case: SpeedCase) -> tuple[list[Chunk], Tensor]:
        generator = torch.Generator().manual_seed(0)
        vocabulary = self.model.config.vocab_size
        tokens = torch.randint(vocabulary, (case.length + case.question,), generator=generator)
        tokens = tokens.to(self.device)
        prefix, texts = tokens[:_PREFIX], tokens[_PREFIX : case.length].split(case.chunk)
        return [prefill_chunk(self.model, text, prefix) for text in texts], tokens[case.length :]


def _timing(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, len(values))


def table(results: Sequence[SpeedResult]) -> str:
    """Medians in milliseconds, for people."""
    names = ("full prefill", "reuse", *STEPS)
    lines = [f"{'':34}" + "".join(f"{name:>13}" for name in names) + f"{'speed-up':>10}"]
    for result in results:
        case = f"{result.case.model}, {result.case.length:,} tokens"
        if result.status != "ok":
            lines.append(f"{case:34} {result.status}: {result.note}")
            continue
        figures = "".join(f"{result.timings[name].median:11.1f}ms" for name in names)
        lines.append(f"{case:34}{figures}{result.speed_up:9.2f}x")
    return "\n".join(lines)
