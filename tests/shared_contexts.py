"""What the ranks of test_retrieval_sharing.py do. Started by name, so it stands in a module."""

from typing import Any, NamedTuple

import torch
from tests.tiny_language_models import language_model, random_tokens
from torch import Tensor

from nearfield.retrieval import InfoFlow, SharedContext, prefill_chunk

PREFIX = torch.tensor([1, 5])
LENGTHS = (37, 20, 33, 25, 18, 41)  # six chunks for two or three ranks
QUESTION = random_tokens(11, seed=7)


class Outcome(NamedTuple):
    scores: Tensor
    rows: Tensor
    logits: Tensor
    layers: list[tuple[Tensor, Tensor]]
    tokens: Tensor
    offset: Tensor
    bytes_scored: int
    bytes_recomputed: int


def texts(factor: int = 1) -> list[Tensor]:
    return [random_tokens(factor * length, seed) for seed, length in enumerate(LENGTHS)]


def answered(mesh: Any, name: str, ratio: float, factor: int = 1, only: int = 0) -> Outcome:
    """Every step on one rank: its own chunks alone are computed here."""
    model = language_model(name, max_position_embeddings=2048)
    parts = texts(factor)
    per_rank = len(parts) // mesh.size()
    mine = parts[mesh.get_local_rank() * per_rank :][:per_rank]
    shared = SharedContext(model, [prefill_chunk(model, part, PREFIX) for part in mine], mesh)
    before = shared.bytes_sent
    scores = shared.score(QUESTION, InfoFlow())
    scored = shared.bytes_sent - before
    rows = shared.select(scores, ratio)[-only:]
    shared.recompute(rows)
    recomputed = shared.bytes_sent - before - scored
    logits = shared.next_logits(QUESTION)
    whole = shared.gather()
    layers = [(layer.keys, layer.values) for layer in whole.cache.layers]
    return Outcome(scores, rows, logits, layers, whole.tokens, whole.offset, scored, recomputed)


def unlike_prefixes(mesh: Any) -> None:
    model = language_model()
    prefix = torch.tensor([mesh.get_local_rank()])
    SharedContext(model, [prefill_chunk(model, random_tokens(5), prefix)], mesh)
