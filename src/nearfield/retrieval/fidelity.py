"""How near a context comes to full prefill: what the model says next, beside what it says after the whole prompt."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nearfield.retrieval.chunks import Context


@dataclass(frozen=True)
class Fidelity:
    """Of an answer, token by token: the divergence from full prefill's, and how often the likeliest token is the same.

    `divergence` is KL(full || reused) in nats, averaged over the answer's tokens; `first` is that of its first token.
    """

    divergence: float
    first: float
    agreement: float


@dataclass(frozen=True, eq=False)
class Teacher:
    """Full prefill's answer to a question, and its log-probabilities at every token of it."""

    question: Tensor  # [N]
    answer: Tensor  # [A]
    log_probabilities: Tensor  # [A, vocabulary]


@torch.no_grad()
def teacher_of(model: Any, context: Tensor, question: Tensor, num_tokens: int) -> Teacher:
    """The greedy answer of the model after the whole prompt, `num_tokens` long whatever it says."""
    cache = DynamicCache()
    prompt = torch.cat([context, question]).to(model.device)
    following, answer, rows = prompt, list[Tensor](), list[Tensor]()
    for _ in range(num_tokens):
        output = model(input_ids=following[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        rows.append(output.logits[0, -1].float().log_softmax(-1))
        following = rows[-1].argmax()[None]
        answer.append(following)
    return Teacher(question.to(model.device), torch.cat(answer), torch.stack(rows))


@torch.no_grad()
def fidelity(model: Any, context: Context, teacher: Teacher) -> Fidelity:
    """What the model says after a context, made to give the teacher's answer. The context stays as it is."""
    answer = teacher.answer
    following = torch.cat([teacher.question, answer[:-1]])
    output = model(
        input_ids=following[None],
        past_key_values=context.copy().cache,
        use_cache=True,
        logits_to_keep=len(answer),
    )
    ours = output.logits[0].float().log_softmax(-1)
    theirs = teacher.log_probabilities
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return Fidelity(float(divergence.mean()), float(divergence[0]), float(agreement))
