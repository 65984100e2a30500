"""How good the answers after reuse are: the F1 of their words with the right ones, beside full prefill.

A model that cannot answer a question says nothing about reuse, so only those questions are asked again that it answers
after full prefill.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.retrieval_questions import (
    Asked,
    Evaluation,
    Interval,
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
"""From this F1 after full prefill on, a question counts as one that the model can answer."""

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

    def summary(self) -> dict[str, Any]:
        """Means over the questions that the model can answer, with 95 % intervals by the bootstrap."""
        answered = [record for record in self.records if record["results"]]
        rows = [
            {"status": "ok", "selector": selector, "ratio": ratio}
            | {"f1": interval(values_of(answered, selector, ratio, "f1"))}
            for selector, ratio in cases_of(answered)
        ]
        return {
            "num_questions": len(self.records),
            "num_answered": len(answered),
            "answered_from": ANSWERED,
            "full_of_all": _full_f1(self.records),
            "full": _full_f1(answered),
            "results": rows,
            "differences": differences(answered, "f1"),
        }

    def table(self) -> str:
        summary = self.summary()
        counts = f"{summary['num_answered']} of {summary['num_questions']} questions are answered after full prefill"
        lines = [counts, f"{'selector':12} {'ratio':>6} {'F1 of those':>24}"]
        rows = [{"selector": "full prefill", "ratio": 1.0, "f1": summary["full"]}, *summary["results"]]
        for row in rows if summary["num_answered"] else []:
            lines.append(f"{row['selector']:12} {row['ratio']:6.0%} {shown(row['f1'], '.3f'):>24}")
        return "\n".join(lines)


def _full_f1(records: Sequence[Record]) -> Interval | None:
    found = torch.tensor([record["full"]["f1"] for record in records], dtype=torch.float64)
    return interval(found) if len(found) else None
