"""How good the answers after reuse are: the F1 of their words with the right ones, beside full prefill.

A model that cannot answer a question says nothing about reuse, so the questions that it answers after full prefill are
also counted by themselves.
"""

import re
import string
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from nearfield.bench.retrieval_questions import (
    Evaluation,
    Question,
    Record,
    cases_of,
    differences,
    interval,
    shown,
    values_of,
)
from nearfield.retrieval import Context
from nearfield.retrieval.fidelity import greedy_answer

ANSWERED = 0.5
"""From this F1 after full prefill on, a model can answer a question."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


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


class AnswerEvaluation(Evaluation):
    """Greedy answers up to the model's own end, or the first line's."""

    command = "bench retrieval --answers"
    instruction = " Answer with a few words only."

    def measured(self, question: Question, context: Context, asked: Tensor) -> Record:
        return {
            "answer": question.answer,
            "full": self._said(question, torch.cat([context.tokens, asked])),
            "results": [
                names | self._said(question, asked, mixed) for names, mixed in self.mixed(context, asked)
            ],
        }

    def _said(self, question: Question, tokens: Tensor, context: Context | None = None) -> Record:
        most = self.settings["answer_tokens"]
        answer = greedy_answer(self.model, tokens, most, context, self._ends)
        text = self.tokenizer.decode(answer, skip_special_tokens=True).strip().partition("\n")[0]
        return {"said": text, "f1": word_f1(text, question.answer)}

    @property
    def _ends(self) -> set[int]:
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        several = ends if isinstance(ends, list) else [ends]
        return {token for token in (*several, self.tokenizer.eos_token_id) if token is not None}

    def summary(self) -> dict[str, Any]:
        answered = [record for record in self.records if record["full"]["f1"] >= ANSWERED]
        rows = [
            {"status": "ok", "selector": selector, "ratio": ratio}
            | _f1_of(self.records, answered, selector, ratio)
            for selector, ratio in cases_of(self.records)
        ]
        full = {
            name: interval(torch.tensor([record["full"]["f1"] for record in records], dtype=torch.float64))
            for name, records in (("f1", self.records), ("f1_answered", answered))
            if records
        }
        return {
            "num_questions": len(self.records),
            "num_answered": len(answered),
            "answered_from": ANSWERED,
            "full": full,
            "results": rows,
            "differences": differences(self.records, "f1"),
            "differences_answered": differences(answered, "f1"),
        }

    def table(self) -> str:
        summary = self.summary()
        counts = summary["num_questions"], summary["num_answered"]
        heads = f"F1 of {counts[0]} questions", f"of the {counts[1]} it can answer"
        lines = [f"{'selector':12} {'ratio':>6} {heads[0]:>24} {heads[1]:>24}"]
        for row in [{"selector": "full prefill", "ratio": 1.0} | summary["full"], *summary["results"]]:
            cells = [shown(row[name], ".3f") if name in row else "-" for name in ("f1", "f1_answered")]
            lines.append(f"{row['selector']:12} {row['ratio']:6.0%} {cells[0]:>24} {cells[1]:>24}")
        return "\n".join(lines)


def _f1_of(records: list[Record], answered: list[Record], selector: str, ratio: float) -> Record:
    found = {"f1": interval(values_of(records, selector, ratio, "f1"))}
    if answered:
        found["f1_answered"] = interval(values_of(answered, selector, ratio, "f1"))
    return found
