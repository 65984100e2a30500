"""Questions to a folder of texts: the answer, which tokens were computed again for it, and what the steps took."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.cli import UsageError
from nearfield_lab.commands.retrieving import (
    NAMES,
    added,
    chosen_parts,
    compared,
    opened,
    read_texts,
    retrieval_told,
)

SELECTORS = NAMES
AGAIN = "computed again"
MOST_NEW_TOKENS, MOST_CHUNKS, MOST_CHUNK_TOKENS = 256, 32, 2048
_STEPS = ("assemble", "score", "select", "recompute")
HEADINGS = ("", *_STEPS, "first token", "speed-up", "KL to full", "same top token")
Span = tuple[str, str | None]


class Question(NamedTuple):
    text: str
    selector: Any = "infoflow"
    ratio: float = 0.15
    top: int = 4
    chunk_tokens: int = 256
    max_new_tokens: int = 64


class Asked(NamedTuple):
    """An answer; the prompt's texts in spans, labelled where they were computed again; a report; a table of times."""

    answer: str
    spans: list[Span]
    report: str
    rows: list[list[str]]


class Library:
    """A folder of texts and the model that answers from them.

    Args:
        model: a folder of transformers; the small model of its own package by default.
        problem: why nothing can be asked, or None.
    """

    def __init__(self, docs: Path | None, model: Path | None, device: torch.device) -> None:
        self._model, self._device = model, device
        self._texts: dict[str, str] = {}
        self._reuse: Any = None
        self._lock = threading.Lock()
        self.problem: str | None = None
        if docs is None:
            self.problem = "No folder of texts was named. Start with `nearfield studio --docs FOLDER`."
            return
        self._texts = read_texts(docs)
        self.problem = self._missing()

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def _missing(self) -> str | None:
        """What is missing, a package or a model, in words; found before anybody asks."""
        try:
            with retrieval_told():
                from nearfield.retrieval import check_embedded, check_folder

                check_embedded() if self._model is None else check_folder(self._model)
        except UsageError as error:
            return str(error).replace("`--model`", "`--language-model`")
        return None

    def ask(self, question: Question) -> Asked:
        """Answer from the parts of the texts that share most words with the question, and compare with full prefill."""
        _check(question)
        if self.problem:
            raise UsageError(self.problem)
        with self._lock, retrieval_told():
            if self._reuse is None:
                self._reuse = opened(self._model, self._device)
            return _answered(self._reuse, self._texts, question)


def _check(question: Question) -> None:
    if not question.text.strip():
        wrong_value("question", "not be empty", repr(question.text))
    limits = {"top": MOST_CHUNKS, "chunk_tokens": MOST_CHUNK_TOKENS, "max_new_tokens": MOST_NEW_TOKENS}
    for name, most in limits.items():
        value = getattr(question, name)
        if not isinstance(value, int) or not 1 <= value <= most:
            wrong_value(name, f"be a whole number from 1 to {most}", value)


def _answered(reuse: Any, texts: dict[str, str], question: Question) -> Asked:
    parts = chosen_parts(reuse, texts, question.text, question.chunk_tokens, question.top)
    names = added(reuse, parts)
    answer = reuse.answer(
        question.text,
        list(names),
        question.ratio,
        question.selector,
        max_new_tokens=question.max_new_tokens,
    )
    report, cases = answer.report, [(question.selector, question.ratio)]
    teacher, rows, tokens = compared(reuse, answer, question.text, cases)
    shown = [names[identity] for identity in report.chunks]
    spans = spans_of(reuse.tokenizer, tokens.cpu(), report.rows, report.lengths, shown)
    return Asked(answer.text.strip(), spans, str(report), _rows(teacher.seconds, rows))


def spans_of(
    tokenizer: Any, tokens: Tensor, rows: Tensor, lengths: Sequence[int], names: Sequence[str]
) -> list[Span]:
    """Runs of tokens of each text, after its name, labelled where their rows were computed again.

    Args:
        tokens: `[N]` of the whole context, whose end are the texts, as long as `lengths` says.
        rows: which of them were computed again.
    """
    is_again = torch.zeros(len(tokens), dtype=torch.bool)
    is_again[rows] = True
    start = len(tokens) - sum(lengths)
    spans: list[Span] = []
    for name, length in zip(names, lengths, strict=True):
        spans.append((f"\n[{name}]\n", None))
        inside = slice(start, start + length)
        values, counts = is_again[inside].unique_consecutive(return_counts=True)
        runs = tokens[inside].split(counts.tolist())
        for flag, run in zip(values.tolist(), runs, strict=True):
            spans.append((str(tokenizer.decode(run)), AGAIN if flag else None))
        start += length
    return spans


def _rows(full_seconds: float, compared: Sequence[Any]) -> list[list[str]]:
    lines = [["full prefill", *["-"] * len(_STEPS), f"{full_seconds:.2f} s", "1.00x", "0", "100 %"]]
    for row in compared:
        times = [f"{row.seconds[step]:.2f} s" for step in _STEPS]
        ratio = full_seconds / row.first_token
        found = [f"{row.fidelity.divergence:.4f}", f"{row.fidelity.agreement:.0%}"]
        name = f"{row.selector}, {row.ratio:.0%}"
        lines.append([name, *times, f"{row.first_token:.2f} s", f"{ratio:.2f}x", *found])
    return lines
