"""Split: which tokens of a sequence each rank holds."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_type, wrong_value
from nearfield.layout import Span

REPLICATED = -1
"""The owner of a token that every rank holds."""


@dataclass(frozen=True)
class Split:
    """A sequence divided over ranks. A rank's own tensors hold its tokens in the order of the sequence.

    Args:
        num_tokens: of the whole sequence.
        owned: for each rank the spans that it alone holds. Sizes may differ.
        replicated: spans that every rank holds, and computes, for itself.

    Every token belongs to one rank, or to all.
    """

    num_tokens: int
    owned: tuple[tuple[Span, ...], ...]
    replicated: tuple[Span, ...] = ()

    def __post_init__(self) -> None:
        check_int("num_tokens", self.num_tokens, at_least=1)
        object.__setattr__(self, "owned", tuple(_checked_spans("owned", spans) for spans in self.owned))
        object.__setattr__(self, "replicated", _checked_spans("replicated", self.replicated))
        if not self.owned:
            wrong_value("owned", "name at least one rank", "none")
        place = 0
        for start, stop in sorted(span for spans in (*self.owned, self.replicated) for span in spans):
            if start != place:
                kind = "once" if start < place else "at all"
                wrong_value(
                    "owned", f"give every token {kind} to a rank or to all", f"token {min(start, place)}"
                )
            place = stop
        if place != self.num_tokens:
            wrong_value("owned", f"end at `num_tokens` ({self.num_tokens})", place)
        for rank in range(self.num_ranks):
            if not self.num_held(rank):
                hint = "Use fewer ranks, or smaller units."
                wrong_value("owned", "leave no rank without a token", f"none for rank {rank}", hint)

    @classmethod
    def even(
        cls,
        spans: Sequence[Span],
        num_ranks: int,
        *,
        unit: int | Sequence[int] = 1,
        replicated: Sequence[Span] = (),
    ) -> "Split":
        """Cut each span into one piece per rank, as equal as cuts on multiples of `unit` can be.

        Args:
            spans: all tokens but the replicated ones.
            unit: cuts lie on multiples of it in the sequence, so that blocks of a plan are not torn. One number for
                each span, or one for all.
        """
        check_int("num_ranks", num_ranks, at_least=1)
        units = [unit] * len(spans) if isinstance(unit, int) else list(unit)
        for one in units:
            check_int("unit", one, at_least=1)
        spans = _checked_spans("spans", spans)
        if len(units) != len(spans):
            wrong_value("unit", f"be one number, or one for each of {len(spans)} spans", len(units))
        pieces = [_cut(span, num_ranks, one) for span, one in zip(spans, units, strict=True)]
        owned = tuple(
            tuple(piece[rank] for piece in pieces if piece[rank][0] < piece[rank][1])
            for rank in range(num_ranks)
        )
        return cls(max(stop for _, stop in (*spans, *replicated)), owned, tuple(replicated))

    @property
    def num_ranks(self) -> int:
        return len(self.owned)

    def num_held(self, rank: int) -> int:
        return sum(stop - start for start, stop in (*self.owned[rank], *self.replicated))

    @cached_property
    def owners(self) -> Tensor:
        """The rank that owns each token, `[num_tokens]`; `REPLICATED` where all ranks hold it."""
        owners = torch.full((self.num_tokens,), REPLICATED, dtype=torch.int64, device="cpu")
        for rank, spans in enumerate(self.owned):
            for start, stop in spans:
                owners[start:stop] = rank
        return owners

    def held(self, rank: int) -> Tensor:
        """The positions in the sequence of the tokens that a rank holds, in the rank's order."""
        return ((self.owners == rank) | (self.owners == REPLICATED)).nonzero().flatten()

    def own(self, rank: int) -> Tensor:
        """The positions in the sequence of the tokens that a rank alone holds."""
        return self._own[rank]

    @cached_property
    def _own(self) -> list[Tensor]:
        return [
            torch.cat(
                [torch.empty(0, dtype=torch.int64, device="cpu")]
                + [torch.arange(start, stop, device="cpu") for start, stop in spans]
            )
            for spans in self.owned
        ]

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.num_tokens, self.owned, self.replicated)).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        sizes = ", ".join(str(sum(stop - start for start, stop in spans)) for spans in self.owned)
        everyone = sum(stop - start for start, stop in self.replicated)
        return f"{self.num_tokens} tokens over {self.num_ranks} ranks: {sizes}" + (
            f"; {everyone} on all" if everyone else ""
        )


def _cut(span: Span, num_ranks: int, unit: int) -> list[Span]:
    start, stop = span
    cuts = [start]
    for rank in range(1, num_ranks):
        place = start * num_ranks + rank * (stop - start)  # times num_ranks: in whole numbers
        cuts.append(min(max((2 * place + unit * num_ranks) // (2 * unit * num_ranks) * unit, start), stop))
    cuts.append(stop)
    return list(pairwise(cuts))


def _checked_spans(name: str, spans: object) -> tuple[Span, ...]:
    if not isinstance(spans, Sequence) or not all(
        isinstance(span, Sequence) and len(span) == 2 and all(isinstance(end, int) for end in span)
        for span in spans
    ):
        wrong_type(name, "hold spans (start, stop) of tokens", repr(spans))
    for start, stop in spans:
        if not 0 <= start < stop:
            wrong_value(name, "hold spans with 0 <= start < stop", (start, stop))
    return tuple(sorted((start, stop) for start, stop in spans))
