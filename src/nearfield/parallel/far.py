"""The far field of a rank: summaries of its own tokens, which travel to their readers as keys do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.geometry import Span
from nearfield.methods.hilbert import FarField, window_sums
from nearfield.parallel.route import Route, traffic
from nearfield.parallel.split import Split


@dataclass(frozen=True, eq=False)
class SplitFarField:
    """The far field on one rank. Summaries are keys like others: made where their tokens are, and sent to readers.

    Args:
        window: tokens per summary.
        pieces: the spans of this rank's tokens that it summarises, each with where it stands in the sequence.
        sizes, bias: of this rank's summaries.
        route: the way of summaries; its queries are those of the tokens.
    """

    window: int
    pieces: tuple[tuple[Span, int], ...]
    sizes: Tensor
    bias: Tensor
    route: Route

    @classmethod
    def of(cls, field: FarField, split: Split, rank: int) -> "SplitFarField":
        owners = split.owners[field.begins]
        for one in range(split.num_ranks):
            if not (owners == one).any():
                hint = "Use fewer ranks, or smaller summaries."
                wrong_value("far", "leave every rank a summary", f"{field.window}, none on rank {one}", hint)
        ends = field.begins + field.sizes.long().cpu() - 1
        if not torch.equal(split.owners[ends], owners):
            hint = "Use `even_split`."
            wrong_value("split", f"be cut on multiples of `far` ({field.window})", split, hint)
        summaries = Split(len(owners), tuple(_runs(owners == one) for one in range(split.num_ranks)))
        held, pieces = split.held(rank), list[tuple[Span, int]]()
        for start, stop in field.spans:
            for begin, end in split.owned[rank]:
                first, last = max(start, begin), min(stop, end)
                if first < last:
                    place = int(torch.searchsorted(held, first))
                    pieces.append(((place, place + last - first), first - place))
        mine = summaries.own(rank).to(field.sizes.device)
        route = traffic(field.plan, split, summaries).route(rank)
        return cls(field.window, tuple(pieces), field.sizes[mine], field.bias[mine], route)

    def pooled(self, x: Tensor) -> Tensor:
        """The means of this rank's windows."""
        sums = [window_sums(x, span, self.window, shift) for span, shift in self.pieces]
        return (torch.cat(sums, dim=2) / self.sizes.to(sums[0].dtype)[:, None]).to(x.dtype)


def _runs(marks: Tensor) -> tuple[Span, ...]:
    """Spans of the places that are marked."""
    edges = torch.nn.functional.pad(marks.int(), (1, 1)).diff()
    starts, stops = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(starts, stops, strict=True))
