"""How near reuse comes to full prefill on real questions: every selector, every ratio, with confidence intervals."""

from dataclasses import asdict
from typing import Any

from benchmarks.retrieval_questions import (
    Asked,
    Evaluation,
    Record,
    cases_of,
    differences,
    interval,
    shown,
    values_of,
)
from nearfield.retrieval.fidelity import fidelity, teacher_of

_MEASURES = ("divergence", "first", "agreement")


class FidelityEvaluation(Evaluation):
    """The likelihood of full prefill's answer, token by token, after reuse."""

    def measured(self, asked: Asked) -> Record:
        teacher = teacher_of(self.model, asked.context, asked.tokens, self.settings["answer_tokens"])
        results = [names | asdict(fidelity(self.model, mixed, teacher)) for names, mixed in self.mixed(asked)]
        return {"results": results}

    def summary(self) -> dict[str, Any]:
        """Means over questions, with 95 % intervals by the bootstrap."""
        rows = [
            {"status": "ok", "selector": selector, "ratio": ratio, "questions": len(self.records)}
            | {name: interval(values_of(self.records, selector, ratio, name)) for name in _MEASURES}
            for selector, ratio in cases_of(self.records)
        ]
        return {"results": rows, "differences": differences(self.records, "divergence")}

    def table(self) -> str:
        lines = [f"{'selector':12} {'ratio':>6} {'KL to full prefill':>26} {'same top token':>24}"]
        for row in self.summary()["results"]:
            divergence, agreement = shown(row["divergence"], ".4f"), shown(row["agreement"], ".1%")
            lines.append(f"{row['selector']:12} {row['ratio']:6.0%} {divergence:>26} {agreement:>24}")
        return "\n".join(lines)
