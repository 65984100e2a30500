"""How near a context comes to full prefill: answers after the context are compared with answers after the prompt."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nearfield.retrieval.chunks import Chunk, Context, assemble
from nearfield.retrieval.clock import Clock
from nearfield.retrieval.recomputing import first_logits
from nearfield.retrieval.selectors import SelectorName, score, select, selector_of


@dataclass(frozen=True)
class Fidelity:
    """How near an answer's probabilities are to those after full prefill.

    Args:
        divergence: KL(full || reused) in nats, averaged over the answer's tokens.
        first: the divergence of the first token.
        agreement: the share of tokens of which the likeliest is the same.
    """

    divergence: float
    first: float
    agreement: float


@dataclass(frozen=True, eq=False)
class Teacher:
    """Full prefill's answer to a question, its log-probabilities at every token of it, and the seconds to the first."""

    question: Tensor  # [N]
    answer: Tensor  # [A]
    log_probabilities: Tensor  # [A, vocabulary]
    seconds: float


@torch.no_grad()
def next_logits(model: Any, tokens: Tensor, context: Context | None = None) -> Tensor:
    """Logits `[vocabulary]` of the token after tokens `[N]`, which follow a context or stand alone.

    The context's cache grows by them.
    """
    cache = DynamicCache() if context is None else context.cache
    output = model(input_ids=tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = output.logits[0, -1]
    return logits


@torch.no_grad()
def teacher_of(model: Any, context: Tensor, question: Tensor, num_tokens: int) -> Teacher:
    """The greedy answer of the model after the whole prompt, of exactly `num_tokens` tokens."""
    prompt = torch.cat([context, question]).to(model.device)
    clock = Clock(model.device)
    answer, rows = zip(*_greedy(model, DynamicCache(), prompt, num_tokens, clock), strict=True)
    seconds = clock.seconds["first"]
    return Teacher(question.to(model.device), torch.cat(answer), torch.stack(rows), seconds)


@torch.no_grad()
def greedy_answer(
    model: Any, tokens: Tensor, num_tokens: int, context: Context | None = None, ends: Collection[int] = ()
) -> Tensor:
    """The greedy answer, of at most `num_tokens` tokens, after tokens that follow a context or stand alone.

    The context is not changed.

    Args:
        ends: tokens that end an answer and are not part of it.
    """
    cache = DynamicCache() if context is None else context.copy().cache
    answer = tokens.new_empty(0).to(model.device)
    for token, _ in _greedy(model, cache, tokens.to(model.device), num_tokens):
        if int(token) in ends:
            break
        answer = torch.cat([answer, token])
    return answer


def _greedy(
    model: Any, cache: Any, following: Tensor, num_tokens: int, clock: Clock | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each token `[1]` of a greedy answer and the log-probabilities `[vocabulary]` it was taken from."""
    clock = clock or Clock(model.device)
    for index in range(num_tokens):
        with clock.step("later" if index else "first"):
            output = model(input_ids=following[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
            row = output.logits[0, -1].float().log_softmax(-1)
        following = row.argmax()[None]
        yield following, row


@torch.no_grad()
def fidelity(model: Any, context: Context, teacher: Teacher) -> Fidelity:
    """Compare the model's probabilities of the teacher's answer with the teacher's. The context is not changed."""
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
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).clamp(min=0)  # below 0 by rounding alone
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    return Fidelity(float(divergence.mean()), float(divergence[0]), float(agreement))


@dataclass(frozen=True)
class Compared:
    """One selector at one ratio: seconds of its steps up to the first token, and how near it comes.

    The question is read in the pass of "recompute".
    """

    selector: str
    ratio: float
    selected: int
    seconds: dict[str, float]
    fidelity: Fidelity

    @property
    def first_token(self) -> float:
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"first_token_seconds": self.first_token}


def compare(
    model: Any,
    chunks: Sequence[Chunk],
    teacher: Teacher,
    cases: Sequence[tuple[SelectorName, float]],
    on_case: Callable[[int], None] | None = None,
) -> list[Compared]:
    """Answer the teacher's question with other selectors and ratios, from the same chunks."""
    found = []
    for index, (name, ratio) in enumerate(cases):
        if on_case is not None:
            on_case(index)
        fixed, clock = selector_of(name).fixed_ratio, Clock(model.device)
        ratio = ratio if fixed is None else fixed
        with clock.step("assemble"):
            context = assemble(model, chunks, room=len(teacher.question))
        with clock.step("score"):
            scores = score(model, context, teacher.question, name)
        with clock.step("select"):
            rows = select(context, scores, ratio)
        with clock.step("recompute"):
            first_logits(model, context, rows, teacher.question)
        context.cache.crop(-len(teacher.question))
        found.append(Compared(name, ratio, len(rows), clock.seconds, fidelity(model, context, teacher)))
    return found
