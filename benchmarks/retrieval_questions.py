"""Questions that are asked of a model after full prefill and after reuse, one after another, into a JSON file.

What is measured of an answer is another module's affair. Results are written after every question, so that a run that
is stopped goes on with the next.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._files import write_json
from nearfield.cli import machine
from nearfield.retrieval import Context, assemble, prefill_chunk, recompute, score, select
from nearfield.retrieval.prompt import chat_prompt, prefix_ids, question_ids, token_ids

_RESAMPLES = 10_000

Record = dict[str, Any]
Interval = dict[str, float]


@dataclass(frozen=True)
class Question:
    """A question and the passages it is asked about, each of which becomes a chunk.

    Args:
        answer: the right one; empty where it is not known.
        source: where the question is from.
    """

    text: str
    passages: tuple[str, ...]
    answer: str = ""
    source: str = ""


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSON file: a list of objects with `question`, `passages` of `title` and `text`, and `answer`."""
    records = json.loads(path.read_text(encoding="utf-8"))
    return [
        Question(
            record["question"],
            tuple(f"{passage['title']}\n{passage['text']}\n\n" for passage in record["passages"]),
            record.get("answer", ""),
            record.get("dataset", ""),
        )
        for record in records
    ]


class Asked(NamedTuple):
    """A question as token ids.

    Args:
        prefix: what stands before the passages.
        passages: each alone.
        tokens: all that follows the passages.
    """

    question: Question
    prefix: Tensor
    passages: tuple[Tensor, ...]
    tokens: Tensor

    @property
    def context(self) -> Tensor:
        """What stands before the question."""
        return torch.cat([self.prefix, *self.passages])


class Evaluation(ABC):
    """Measures question after question.

    Args:
        out: the JSON file; what it holds of the same settings is not measured again.
        name: of the model, for the file.
        num_tokens: of each answer, at most.
    """

    command = "bench retrieval"
    instruction = ""
    """What is put behind every question."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        out: Path,
        *,
        name: str,
        selectors: Sequence[str],
        ratios: Sequence[float],
        num_tokens: int = 16,
    ) -> None:
        self.model, self.tokenizer, self.out = model, tokenizer, out
        self.settings: dict[str, Any] = {
            "model": name,
            "dtype": str(model.dtype),
            "selectors": list(selectors),
            "ratios": list(ratios),
            "answer_tokens": num_tokens,
        }
        if self.instruction:
            self.settings["instruction"] = self.instruction
        self._prompt = chat_prompt(tokenizer)
        self._facts = machine.facts()
        self.records = self._known()

    def _known(self) -> list[Record]:
        """What was measured before with the same settings."""
        if not self.out.exists():
            return []
        document = json.loads(self.out.read_text(encoding="utf-8"))
        return document["questions"] if document["settings"] == self.settings else []

    def run(
        self,
        questions: Sequence[Question],
        has_time: Callable[[], bool] = lambda: True,
        on_question: Callable[[int], None] | None = None,
    ) -> bool:
        """Measure what is missing; returns whether all of it was."""
        known = {record["question"] for record in self.records}
        for index, question in enumerate(questions):
            if on_question is not None:
                on_question(index)
            if question.text in known:
                continue
            if not has_time():
                return False
            self.records.append(self._measured(question))
            write_json(self.out, self.document())
        return True

    def document(self) -> dict[str, Any]:
        return {
            "format": 1,
            "command": self.command,
            "machine": self._facts,
            "settings": self.settings,
            **self.summary(),
            "questions": self.records,
        }

    def _measured(self, question: Question) -> Record:
        device, tokenizer = self.model.device, self.tokenizer
        asked = Asked(
            question,
            prefix_ids(tokenizer, self._prompt).to(device),
            tuple(token_ids(tokenizer, text).to(device) for text in question.passages),
            question_ids(tokenizer, self._prompt, question.text + self.instruction).to(device),
        )
        return {
            "question": question.text,
            "source": question.source,
            "passages": len(question.passages),
            "tokens": len(asked.context),
            **self.measured(asked),
        }

    def mixed(self, asked: Asked) -> Iterator[tuple[Record, Context]]:
        """The context after each selector and ratio, and their names."""
        chunks = [prefill_chunk(self.model, passage, asked.prefix) for passage in asked.passages]
        context = assemble(self.model, chunks)
        for selector in self.settings["selectors"]:
            scores = score(self.model, context, asked.tokens, selector)
            for ratio in [0.0] if selector == "none" else self.settings["ratios"]:
                rows = select(context, scores, ratio)
                names = {"selector": selector, "ratio": ratio, "selected": len(rows)}
                yield names, recompute(self.model, context.copy(), rows)

    @abstractmethod
    def measured(self, asked: Asked) -> Record:
        """What is noted of one question; `results` holds one record for each selector and ratio."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What is said of all questions; `results` holds one row for each selector and ratio."""

    @abstractmethod
    def table(self) -> str:
        """The summary for people."""


def interval(values: Tensor) -> Interval:
    """The mean, and between what it lies in 95 % of the resampled sets."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)
    means = values[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


def cases_of(records: Sequence[Record]) -> list[tuple[str, float]]:
    """The selectors and ratios that were measured."""
    return [(result["selector"], result["ratio"]) for result in records[0]["results"]] if records else []


def values_of(records: Sequence[Record], selector: str, ratio: float, measure: str) -> Tensor:
    """One measure, question by question."""
    found = [
        result[measure]
        for record in records
        for result in record["results"]
        if (result["selector"], result["ratio"]) == (selector, ratio)
    ]
    return torch.tensor(found, dtype=torch.float64)


def differences(records: Sequence[Record], measure: str) -> list[Record]:
    """A measure of InfoFlow less that of each other selector at the same ratio, question by question."""
    rows = []
    for selector, ratio in cases_of(records):
        if selector in ("infoflow", "none") or ("infoflow", ratio) not in cases_of(records):
            continue
        ours, theirs = (values_of(records, name, ratio, measure) for name in ("infoflow", selector))
        rows.append({"against": selector, "ratio": ratio, measure: interval(ours - theirs)})
    return rows


def shown(found: Interval, form: str) -> str:
    """An interval for people."""
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"
