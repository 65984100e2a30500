"""Compare reuse of document caches with full prefill: what a model says, or how soon the first token of it is there.

Full prefill and reuse run in one process, in turns, on the same model and tokens. Before anything is timed the gate
must open; a model whose caches cannot be moved gets no figure.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.report import Column, Record, speed_figures, target_cell, times_cell
from benchmarks.retrieval_cases import ARCHITECTURES, CASES, DEFAULTS, EMBEDDED, RATIOS, SELECTORS
from benchmarks.runner import Benchmark, Session, WrongAnswer
from nearfield.cli import add_integer, comma_list, member, number, wrong
from nearfield.cli.timing import Timing
from nearfield_lab.commands.retrieving import retrieval_told

STEPS = ("assemble", "score", "select", "recompute")
"""The steps of reuse. The last includes the question, read in the same pass, up to the first token's logits."""
_PREFIX = 4
_ROUNDS = 5


class Retrieval(Benchmark):
    name = "retrieval"
    examples = (
        "  python -m benchmarks retrieval --quick\n"
        "  python -m benchmarks retrieval --cases 'llama-3.1-8b-*' --json speed.json\n"
        "  python -m benchmarks retrieval --questions multihop.json --json fidelity.json --plot fidelity.png\n"
        "  python -m benchmarks retrieval --questions multihop.json --answers --json answers.json"
    )
    table = CASES
    defaults = DEFAULTS
    drawing = "nearfield_lab.plots.lines:fidelity_lines"

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._loaded: tuple[str, Any, Any] | None = None
        self._gates: dict[str, Record] = {}

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--questions",
            type=Path,
            metavar="FILE",
            help="ask these instead: JSON, a list of objects with `question` and `passages` of `title` and `text`, and"
            " `answer` for --answers",
        )
        parser.add_argument(
            "--answers",
            action="store_true",
            help="for --questions: how many words of short answers are right (F1), instead of how near they come to"
            " full prefill",
        )
        parser.add_argument(
            "--model",
            default=EMBEDDED,
            metavar="NAME",
            help=f"for --questions: a folder of transformers (default {EMBEDDED})",
        )
        parser.add_argument(
            "--selectors",
            type=comma_list(member("--selectors", (*SELECTORS, "all"))),
            default=list(SELECTORS),
            metavar="A,B",
            help=f"for --questions: any of {', '.join(SELECTORS)}, all (default all but the last)",
        )
        parser.add_argument(
            "--ratios",
            type=comma_list(number("--ratios", least=0)),
            default=list(RATIOS),
            metavar="X,X",
            help="for --questions: shares of tokens to compute again (default 0.05,0.15,0.3)",
        )
        add_integer(parser, "--answer-tokens", 16, "for --questions: tokens of each answer, at most")
        add_integer(parser, "--num", None, "the first N questions only")

    # -- cases -----------------------------------------------------------------------------------------------------

    @classmethod
    def cases(cls, options: argparse.Namespace, device: torch.device) -> list[Case]:
        if options.questions is None:
            if options.answers:
                wrong("--answers", "be given with `--questions`", True)
            if options.plot:
                wrong("--plot", "be given with `--questions`", str(options.plot))
            return super().cases(options, device)
        if options.plot and options.answers:
            wrong("--plot", "be given without `--answers`", str(options.plot))
        questions = _questions(options)
        return [
            Case(f"{place}: {question.text}", {"question": question})
            for place, question in enumerate(questions)
        ]

    @classmethod
    def check(cls, cases: Sequence[Case], options: argparse.Namespace) -> None:
        asked = options.questions is not None
        for ratio in options.ratios if asked else [case.on["ratio"] for case in cases]:
            if not 0 <= ratio <= 1:
                wrong("--ratios" if asked else "ratio", "lie between 0 and 1", ratio)
        known = (EMBEDDED, *(() if asked else ARCHITECTURES))
        for name in [options.model] if asked else [case.on["model"] for case in cases]:
            if name not in known and not Path(name).is_dir():
                wrong(
                    "--model" if asked else "model", f"be one of {', '.join(known)}, or a folder", repr(name)
                )

    def settings(self, case: Case) -> Record:
        if self.options.questions is None:
            return super().settings(case)
        question = case.on["question"]
        own = {"work": self._work, "question": question.text, "passages": question.digest}
        model = {"model": Path(self.options.model).name, "dtype": str(self.dtype)}
        return own | model | self._asked | {"instruction": self._evaluation.instruction}

    @property
    def _work(self) -> str:
        return (
            "speed" if self.options.questions is None else "answers" if self.options.answers else "fidelity"
        )

    @property
    def _asked(self) -> Record:
        options = self.options
        return {
            "selectors": options.selectors,
            "ratios": options.ratios,
            "answer_tokens": options.answer_tokens,
        }

    def is_timed(self) -> bool:
        return self._work == "speed"

    # -- measuring -------------------------------------------------------------------------------------------------

    def measure(self, case: Case) -> Iterator[Record]:
        if self._work == "speed":
            yield {"work": "speed"} | self._speed(case)
            return
        model, tokenizer = self._model(self.options.model)
        evaluation = self._evaluation(model, tokenizer, self._asked)
        yield {"work": self._work, "case": case.on["question"].text} | evaluation.measure(case.on["question"])

    @property
    def _evaluation(self) -> Any:
        from benchmarks.retrieval_questions import Answers, Fidelity

        return Answers if self.options.answers else Fidelity

    def _model(self, name: str) -> tuple[Any, Any]:
        """A model and its tokenizer; architectures get random weights, and the speed is that of any others."""
        if self._loaded is None or self._loaded[0] != name:
            self._loaded = None  # before the next is made: two may not fit
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            with retrieval_told():
                from nearfield.retrieval.embedded import load_embedded, load_folder, random_model

                if name in ARCHITECTURES:
                    made = random_model(*ARCHITECTURES[name], self.device, self.dtype), None
                else:
                    load = load_embedded if name == EMBEDDED else partial(load_folder, name)
                    made = load(self.device, self.dtype)
            self._loaded = name, *made
        return self._loaded[1:]

    def _speed(self, case: Case) -> Record:
        """Milliseconds of full prefill, of reuse and of each of its steps."""
        from nearfield.retrieval import assemble
        from nearfield.retrieval.clock import Clock
        from nearfield.retrieval.fidelity import next_logits

        on = case.on
        model, _ = self._model(on["model"])
        gate = self._gate(on["model"], model)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        chunks, question = self._inputs(model, case)
        prompt = torch.cat([assemble(model, chunks).tokens, question])
        samples: dict[str, list[float]] = {}
        selected = 0
        for index in range((self.options.rounds or _ROUNDS) + 1):
            clock = Clock(self.device)
            with clock.step("full prefill"):
                next_logits(model, prompt)
            with clock.step("reuse"):
                selected = _reused(model, on, chunks, question, clock)
            for name, value in clock.seconds.items():
                if index:  # the first round compiles kernels and fills caches
                    samples.setdefault(name, []).append(1000 * value)
        timings = {name: _timing(values) for name, values in samples.items()}
        full = {"full prefill": timings["full prefill"]}
        is_cuda = self.device.type == "cuda"
        return {
            "dtype": str(self.dtype),
            "length": on["length"],
            "selected": selected,
            "gate": gate,
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if is_cuda else None,
            **speed_figures(timings["reuse"].median, full, None, case.targets.get("speed")),
            "milliseconds": timings,
        }

    def _gate(self, name: str, model: Any) -> Record:
        """What the gate measured: once, it is the same model in all cases."""
        from nearfield.retrieval import verify

        if name not in self._gates:
            try:
                self._gates[name] = asdict(verify(model))
            except ValueError as error:
                raise WrongAnswer(str(error)) from None
        return self._gates[name]

    def _inputs(self, model: Any, case: Case) -> tuple[list[Any], Tensor]:
        from nearfield.retrieval import prefill_chunk

        length, generator = case.on["length"], torch.Generator().manual_seed(0)
        count = length + case.on["question"]
        tokens = torch.randint(model.config.vocab_size, (count,), generator=generator).to(self.device)
        prefix, texts = tokens[:_PREFIX], tokens[_PREFIX:length].split(case.on["chunk"])
        return [prefill_chunk(model, text, prefix) for text in texts], tokens[length:]

    # -- report ----------------------------------------------------------------------------------------------------

    def facts(self, records: Sequence[Record]) -> Record:
        measured = [record for record in records if record["status"] == "ok"]
        if self._work == "speed" or not measured:
            return {}
        found: Record = self._evaluation.summary(measured)
        return found

    def rows(self, records: Sequence[Record]) -> Sequence[Record]:
        found: Sequence[Record] = records if self._work == "speed" else self.facts(records).get("summary", [])
        return found

    def columns(self, records: Sequence[Record]) -> list[Column]:
        if self._work != "speed":
            return list(self._evaluation.columns)
        names = ("full prefill", "reuse", *STEPS)
        return [
            *(Column(f"{name} ms", f"milliseconds/{name}/median", ",.1f") for name in names),
            Column("speed-up", times_cell("speed_up")),
            Column("target", target_cell),
        ]

    def notes(self, records: Sequence[Record]) -> list[str]:
        facts = self.facts(records)
        if "num_answered" not in facts:
            return []
        return [
            f"{facts['num_answered']} of {facts['num_questions']} questions are answered after full prefill"
        ]

    def draw(self, path: Path, records: Sequence[Record], title: str) -> None:
        super().draw(path, self.rows(records), f"{Path(self.options.model).name}, {len(records)} questions")


def _reused(model: Any, on: Any, chunks: list[Any], question: Tensor, clock: Any) -> int:
    """The steps of an answer up to the logits of its first token."""
    from nearfield.retrieval import assemble, first_logits, score, select

    with clock.step("assemble"):
        context = assemble(model, chunks, room=len(question))
    with clock.step("score"):
        scores = score(model, context, question, on["selector"])
    with clock.step("select"):
        rows = select(context, scores, on["ratio"])
    with clock.step("recompute"):
        first_logits(model, context, rows, question)
    return len(rows)


def _timing(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, len(values))


def _questions(options: argparse.Namespace) -> list[Any]:
    if not options.questions.is_file():
        wrong("--questions", "name a file that is there", repr(str(options.questions)))
    with retrieval_told():
        from benchmarks.retrieval_questions import read_questions

        try:
            found = read_questions(options.questions)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            rule = "hold a list of objects with `question` and `passages`"
            wrong("--questions", rule, repr(error))
    chosen = found[: options.num]
    if options.answers and not all(question.answer for question in chosen):
        wrong("--questions", "have an `answer` each for `--answers`", repr(str(options.questions)))
    return chosen
