"""Ranks chunks by the words they share with a question: BM25 on token ids."""

import math
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

_SATURATION, _LENGTH_WEIGHT = 1.2, 0.75


def rank(question: Tensor, texts: Sequence[Tensor]) -> list[int]:
    """Indices of texts (token ids), the most relevant first. Equally relevant ones keep their order."""
    counts = [Counter(text.tolist()) for text in texts]
    mean = sum(map(len, texts)) / max(1, len(texts))
    weights = {token: _rarity(token, counts) for token in set(question.tolist())}

    def relevance(index: int) -> float:
        count, size = counts[index], len(texts[index]) / mean
        damping = _SATURATION * (1 - _LENGTH_WEIGHT + _LENGTH_WEIGHT * size)
        return sum(
            weight * count[token] * (1 + _SATURATION) / (count[token] + damping)
            for token, weight in weights.items()
        )

    return sorted(range(len(texts)), key=relevance, reverse=True)


def _rarity(token: int, counts: Sequence[Counter[int]]) -> float:
    holding = sum(token in count for count in counts)
    return math.log(1 + (len(counts) - holding + 0.5) / (holding + 0.5))
