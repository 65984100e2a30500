"""How near reuse comes to full prefill on real questions: every selector, every ratio, with confidence intervals.

Results are written after every question, so that a run that is stopped goes on with the next.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nearfield.bench import machine
from nearfield.bench.report import write_json
from nearfield.retrieval import assemble, prefill_chunk, recompute, score, select
from nearfield.retrieval.fidelity import fidelity, teacher_of
from nearfield.retrieval.prompt import chat_prompt, prefix_ids, question_ids, token_ids

_RESAMPLES = 10_000
_MEASURES = ("divergence", "first", "agreement")


@dataclass(frozen=True)
class Question:
    """A question and the passages it is asked about, each of which becomes a chunk."""

    text: str
    passages: tuple[str, ...]
    source: str = ""


def read_questions(path: Path) -> list[Question]:
    """Questions of a JSON file: a list of objects with `question` and `passages` of `title` and `text`."""
    records = json.loads(path.read_text(encoding="utf-8"))
    return [
        Question(
            record["question"],
            tuple(f"{passage['title']}\n{passage['text']}\n\n" for passage in record["passages"]),
            record.get("dataset", ""),
        )
        for record in records
    ]


class Evaluation:
    """Measures question after question into a JSON file.

    Args:
        name: of the model, for the file.
        num_tokens: of each answer that is compared.
    """

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
        self._prompt = chat_prompt(tokenizer)
        self._facts = machine.facts()
        self.records = self._known()

    def _known(self) -> list[dict[str, Any]]:
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
            "command": "bench retrieval",
            "machine": self._facts,
            "settings": self.settings,
            "results": summary(self.records),
            "differences": differences(self.records),
            "questions": self.records,
        }

    def _measured(self, question: Question) -> dict[str, Any]:
        model, device = self.model, self.model.device
        prefix = prefix_ids(self.tokenizer, self._prompt).to(device)
        chunks = [
            prefill_chunk(model, token_ids(self.tokenizer, text).to(device), prefix)
            for text in question.passages
        ]
        asked = question_ids(self.tokenizer, self._prompt, question.text).to(device)
        context = assemble(model, chunks)
        teacher = teacher_of(model, context.tokens, asked, self.settings["answer_tokens"])
        results = []
        for selector in self.settings["selectors"]:
            scores = score(model, context, asked, selector)
            for ratio in [0.0] if selector == "none" else self.settings["ratios"]:
                rows = select(context, scores, ratio)
                mixed = recompute(model, context.copy(), rows)
                found = asdict(fidelity(model, mixed, teacher))
                results.append({"selector": selector, "ratio": ratio, "selected": len(rows)} | found)
        return {
            "question": question.text,
            "source": question.source,
            "passages": len(chunks),
            "tokens": context.num_tokens,
            "results": results,
        }


def summary(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over questions for every selector and ratio, with 95 % intervals by the bootstrap."""
    rows = []
    for selector, ratio in _cases(records):
        values = {name: _values(records, selector, ratio, name) for name in _MEASURES}
        rows.append(
            {"status": "ok", "selector": selector, "ratio": ratio, "questions": len(records)}
            | {name: interval(column) for name, column in values.items()}
        )
    return rows


def differences(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """InfoFlow's divergence less that of each other selector at the same ratio, question by question."""
    rows = []
    for selector, ratio in _cases(records):
        if selector in ("infoflow", "none") or ("infoflow", ratio) not in _cases(records):
            continue
        ours = _values(records, "infoflow", ratio, "divergence")
        theirs = _values(records, selector, ratio, "divergence")
        rows.append({"against": selector, "ratio": ratio, "divergence": interval(ours - theirs)})
    return rows


def interval(values: torch.Tensor) -> dict[str, float]:
    """The mean, and between what it lies in 95 % of the resampled sets."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)
    means = values[drawn].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high}


def _cases(records: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(result["selector"], result["ratio"]) for result in records[0]["results"]] if records else []


def _values(records: Sequence[dict[str, Any]], selector: str, ratio: float, measure: str) -> torch.Tensor:
    found = [
        result[measure]
        for record in records
        for result in record["results"]
        if (result["selector"], result["ratio"]) == (selector, ratio)
    ]
    return torch.tensor(found, dtype=torch.float64)


def table(document: dict[str, Any]) -> str:
    """The summary for people."""
    lines = [f"{'selector':12} {'ratio':>6} {'KL to full prefill':>26} {'same top token':>24}"]
    for row in document["results"]:
        divergence, agreement = row["divergence"], row["agreement"]
        lines.append(
            f"{row['selector']:12} {row['ratio']:6.0%} {_shown(divergence, '.4f'):>26} {_shown(agreement, '.1%'):>24}"
        )
    return "\n".join(lines)


def _shown(found: dict[str, float], form: str) -> str:
    return f"{found['mean']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"
