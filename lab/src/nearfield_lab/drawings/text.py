"""Captions to tokens: a byte-pair vocabulary that is learned from captions, inside of words."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import torch
from torch import Tensor

from nearfield._checks import check_int

PADDING, UNKNOWN = 0, 1
_FIRST = 2  # of the tokens that stand for letters
_START = "_"  # of a word
_WORD = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9_]")
_LEAST = 3  # times a letter must be seen to be known

Pair = tuple[str, str]


class Vocabulary:
    """Letters and the pairs of tokens that are joined, in the order of joining."""

    def __init__(self, letters: Sequence[str], pairs: Sequence[Pair]) -> None:
        self.letters, self.pairs = tuple(letters), tuple(pairs)
        tokens = [*self.letters, *(first + second for first, second in self.pairs)]
        self._numbers = {token: number for number, token in enumerate(dict.fromkeys(tokens), _FIRST)}
        self._ranks = {pair: rank for rank, pair in enumerate(self.pairs)}
        self._known = dict[str, list[int]]()

    def __len__(self) -> int:
        return _FIRST + len(self._numbers)

    @classmethod
    def learn(cls, captions: Iterable[str], size: int) -> "Vocabulary":
        """A vocabulary of at most `size` tokens, of the pairs that are most frequent in captions."""
        check_int("size", size, at_least=_FIRST + 1)
        counts = Counter(word for caption in captions for word in _words(caption))
        seen = Counter[str]()
        for word, count in counts.items():
            for letter in word:
                seen[letter] += count
        letters = [letter for letter, count in sorted(seen.items()) if count >= _LEAST][: size - _FIRST]
        return cls(letters, _frequent_pairs(counts, size - _FIRST - len(letters)))

    def tokens(self, captions: Sequence[str], length: int) -> Tensor:
        """Numbers of tokens `[captions, length]` int64, filled up with padding; what is too long is cut off."""
        rows = list[list[int]]()
        for caption in captions:
            numbers = [number for word in _words(caption) for number in self._of(word)][:length]
            rows.append(numbers + [PADDING] * (length - len(numbers)))
        return torch.tensor(rows, dtype=torch.int64)

    def document(self) -> dict[str, list[str]]:
        return {"letters": list(self.letters), "pairs": [" ".join(pair) for pair in self.pairs]}

    @classmethod
    def of(cls, document: dict[str, list[str]]) -> "Vocabulary":
        pairs = [pair.split(" ") for pair in document["pairs"]]
        return cls(document["letters"], [(first, second) for first, second in pairs])

    def _of(self, word: str) -> list[int]:
        if word not in self._known:
            parts = list(word)
            while len(parts) > 1:
                pairs = list(pairwise(parts))
                ranks = [self._ranks.get(pair, len(self._ranks)) for pair in pairs]
                best = pairs[ranks.index(min(ranks))]
                if best not in self._ranks:
                    break
                parts = _joined(parts, best)
            self._known[word] = [self._numbers.get(part, UNKNOWN) for part in parts]
        return self._known[word]


def _words(caption: str) -> list[str]:
    return [_START + word for word in _WORD.findall(caption.lower())]


def _frequent_pairs(counts: Counter[str], number: int) -> list[Pair]:
    """The most frequent pair of neighbours, joined everywhere, and so on. Ties fall to the first in the alphabet."""
    words = [list(word) for word in counts]
    weights = list(counts.values())
    totals, places = Counter[Pair](), defaultdict[Pair, set[int]](set)
    for place, parts in enumerate(words):
        for pair in pairwise(parts):
            totals[pair] += weights[place]
            places[pair].add(place)
    # Of each pair the heap holds an entry for every total it had; those of old totals are passed over.
    heap = [(-total, pair) for pair, total in totals.items()]
    heapify(heap)
    found = list[Pair]()
    while len(found) < number and heap:
        total, best = heappop(heap)
        if -total != totals[best] or -total < 2:
            continue
        found.append(best)
        changed = set[Pair]()
        for place in places.pop(best):
            parts, weight = words[place], weights[place]
            for pair in pairwise(parts):
                totals[pair] -= weight
                changed.add(pair)
            words[place] = parts = _joined(parts, best)
            for pair in pairwise(parts):
                totals[pair] += weight
                places[pair].add(place)
                changed.add(pair)
        for pair in changed - {best}:
            heappush(heap, (-totals[pair], pair))
    return found


def _joined(parts: Sequence[str], pair: Pair) -> list[str]:
    joined, place = list[str](), 0
    while place < len(parts):
        if tuple(parts[place : place + 2]) == pair:
            joined.append(pair[0] + pair[1])
            place += 2
        else:
            joined.append(parts[place])
            place += 1
    return joined
