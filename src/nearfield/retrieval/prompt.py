"""Prompts as token ids: a prefix, the documents, and what follows them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import wrong_type, wrong_value

_DOCUMENTS, _QUESTION = "[[documents]]", "[[question]]"
_CONTENT = f"Answer the question from these documents.\n\n{_DOCUMENTS}\nQuestion: {_QUESTION}"
_PLAIN = f"{_DOCUMENTS}\nQuestion: {_QUESTION}\nAnswer:"


@dataclass(frozen=True)
class Prompt:
    """Three texts around the documents and the question: `before` documents `between` question `after`.

    These texts may name special tokens. In documents and questions, what looks like a special token is text.
    """

    before: str
    between: str
    after: str


def chat_prompt(tokenizer: Any, content: str = _CONTENT) -> Prompt:
    """The prompt of a tokenizer's chat template, with the documents and the question in the user's message.

    A tokenizer without a template gets the bare texts behind its start token.

    Args:
        content: the message, with `[[documents]]` and `[[question]]` in that order.
    """
    check_tokenizer(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        start = tokenizer.bos_token or ""
        return _cut(start + _PLAIN if content == _CONTENT else start + content)
    messages = [{"role": "user", "content": content}]
    return _cut(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def check_tokenizer(tokenizer: Any) -> None:
    if not callable(tokenizer) or not hasattr(tokenizer, "batch_decode"):
        wrong_type("tokenizer", "be a tokenizer of transformers", type(tokenizer).__name__)


def _cut(text: str) -> Prompt:
    before, documents, rest = text.partition(_DOCUMENTS)
    between, question, after = rest.partition(_QUESTION)
    whole = before + between + after
    if not documents or not question or _DOCUMENTS in whole or _QUESTION in whole:
        rule = f"hold {_DOCUMENTS} once and {_QUESTION} once after it"
        wrong_value("content", rule, repr(text), "Or give `prompt=Prompt(before, between, after)`.")
    return Prompt(before, between, after)


def token_ids(tokenizer: Any, text: str, *, special: bool = False) -> Tensor:
    """Token ids `[N]` of a text, without added tokens. With `special` the text may name special tokens."""
    if not isinstance(text, str):
        wrong_type("text", "be a string", type(text).__name__)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=not special).input_ids
    return torch.tensor(ids, dtype=torch.long)


def prefix_ids(tokenizer: Any, prompt: Prompt) -> Tensor:
    """The token ids before the documents."""
    return token_ids(tokenizer, prompt.before, special=True)


def question_ids(tokenizer: Any, prompt: Prompt, question: str) -> Tensor:
    """The token ids between the documents and the answer."""
    parts = [
        token_ids(tokenizer, prompt.between, special=True),
        token_ids(tokenizer, question),
        token_ids(tokenizer, prompt.after, special=True),
    ]
    whole = torch.cat(parts)
    if not len(whole):
        wrong_value("question", "hold at least one token", repr(question))
    return whole
