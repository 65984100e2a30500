"""Questions that are asked of a model after full prefill and after reuse: how near reuse comes, and how right it is."""

import hashlib
import json
import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.report import Column, Record
from nearfield.retrieval import Context, assemble, prefill_chunk, recompute, score, select
from nearfield.retrieval.fidelity import fidelity, greedy_answer, teacher_of
from nearfield.retrieval.prompt import chat_prompt, prefix_ids, question_ids, token_ids

_RESAMPLES = 10_000
_MEASURES = ("divergence", "first", "agreement")
ANSWERED = 0.5
"""From this F1 after full prefill on, a question counts as one that the model can answer."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
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

    def __str__(self) -> str:
        return f"with {len(self.passages)} passages"

    @property
    def digest(self) -> str:
        """A digest of the passages, by which they are recognised."""
        return hashlib.sha256("".join(self.passages).encode()).hexdigest()[:12]


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
        settings: selectors, ratios, and the most tokens of an answer.
    """

    instruction = ""
    """What is put behind every question."""

    def __init__(self, model: Any, tokenizer: Any, settings: Record) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self._prompt = chat_prompt(tokenizer)

    def measure(self, question: Question) -> Record:
        device, tokenizer = self.model.device, self.tokenizer
        asked = Asked(
            question,
            prefix_ids(tokenizer, self._prompt).to(device),
            tuple(token_ids(tokenizer, text).to(device) for text in question.passages),
            question_ids(tokenizer, self._prompt, question.text + self.instruction).to(device),
        )
        about = {"question": question.text, "source": question.source, "passages": len(question.passages)}
        return about | {"tokens": len(asked.context)} | self.measured(asked)

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

    @staticmethod
    @abstractmethod
    def summary(records: Sequence[Record]) -> Record:
        """What is said of all questions; `summary` holds one row for each selector and ratio."""


class Fidelity(Evaluation):
    """The likelihood of full prefill's answer, token by token, after reuse."""

    columns = (
        Column("KL to full prefill", lambda row: shown(row["divergence"], ".4f")),
        Column("same top token", lambda row: shown(row["agreement"], ".1%")),
    )

    def measured(self, asked: Asked) -> Record:
        teacher = teacher_of(self.model, asked.context, asked.tokens, self.settings["answer_tokens"])
        results = [names | asdict(fidelity(self.model, mixed, teacher)) for names, mixed in self.mixed(asked)]
        return {"results": results}

    @staticmethod
    def summary(records: Sequence[Record]) -> Record:
        """Means over questions, with 95 % intervals by the bootstrap."""
        rows = [
            named_row(selector, ratio, len(records))
            | {name: interval(values_of(records, selector, ratio, name)) for name in _MEASURES}
            for selector, ratio in cases_of(records)
        ]
        return {"summary": rows, "differences": differences(records, "divergence")}


class Answers(Evaluation):
    """Greedy answers up to the model's own end, or the first line's: the F1 of their words with the right ones.

    A model that cannot answer a question says nothing about reuse, so only those questions are asked again that it
    answers after full prefill.
    """

    instruction = " Answer with a few words only."
    columns = (Column("F1 of those answered", lambda row: shown(row["f1"], ".3f")),)

    def measured(self, asked: Asked) -> Record:
        full = self._said(asked, torch.cat([asked.context, asked.tokens]))
        results = []
        if full["f1"] >= ANSWERED:
            results = [names | self._said(asked, asked.tokens, mixed) for names, mixed in self.mixed(asked)]
        return {"answer": asked.question.answer, "full": full, "results": results}

    def _said(self, asked: Asked, tokens: Tensor, context: Context | None = None) -> Record:
        most = self.settings["answer_tokens"]
        answer = greedy_answer(self.model, tokens, most, context, self._ends)
        text = self.tokenizer.decode(answer, skip_special_tokens=True).strip().partition("\n")[0]
        return {"said": text, "f1": word_f1(text, asked.question.answer)}

    @property
    def _ends(self) -> set[int]:
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        several = ends if isinstance(ends, list) else [ends]
        return {token for token in (*several, self.tokenizer.eos_token_id) if token is not None}

    @staticmethod
    def summary(records: Sequence[Record]) -> Record:
        """Means over the questions that the model can answer, with 95 % intervals by the bootstrap."""
        answered = [record for record in records if record["results"]]
        rows = [
            named_row(selector, ratio, len(answered))
            | {"f1": interval(values_of(answered, selector, ratio, "f1"))}
            for selector, ratio in cases_of(answered)
        ]
        full = _full_f1(answered)
        whole = [named_row("full prefill", 1.0, len(answered)) | {"f1": full}] if full else []
        return {
            "num_questions": len(records),
            "num_answered": len(answered),
            "answered_from": ANSWERED,
            "full_of_all": _full_f1(records),
            "full": full,
            "summary": [*whole, *rows],
            "differences": differences(answered, "f1"),
        }


def _full_f1(records: Sequence[Record]) -> Interval | None:
    found = torch.tensor([record["full"]["f1"] for record in records], dtype=torch.float64)
    return interval(found) if len(found) else None


def word_f1(found: str, right: str) -> float:
    """The harmonic mean of the shares of words that two answers have in common.

    Upper case, punctuation and articles do not count, as in SQuAD's script.
    """
    ours, theirs = (_words(text) for text in (found, right))
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def named_row(selector: str, ratio: float, questions: int) -> Record:
    case = f"{selector} at {ratio:.0%}"
    return {"case": case, "status": "ok", "selector": selector, "ratio": ratio, "questions": questions}


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
