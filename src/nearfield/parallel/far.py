"""The far field of a rank: summaries of its own tokens, which travel to their readers as keys do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.geometry import Span
from nearfield.methods.hilbert import FarField
from nearfield.parallel.route import Route, traffic
from nearfield.parallel.split import Split
from nearfield.windows import window_means


@dataclass(frozen=True, eq=False)
class SplitFarField:
    """The far field on one rank. Summaries are keys like others: made where their tokens are, and sent to readers.

    Args:
        window: tokens per summary.
        starts: `[windows]`, where this rank's windows begin among its tokens.
        sizes, bias: of this rank's summaries.
        route: the way of summaries; its queries are those of the tokens.
    """

    window: int
    starts: Tensor
    sizes: Tensor
    bias: Tensor
    route: Route

    @classmethod
    def of(cls, field: FarField, split: Split, rank: int) -> "SplitFarField":
        summaries = summary_split(field, split)
        mine, device = summaries.own(rank), field.sizes.device
        starts = torch.searchsorted(split.held(rank), field.starts.cpu()[mine]).to(device)
        mine = mine.to(device)
        route = traffic(field.plan, split, summaries).route(rank)
        return cls(field.window, starts, field.sizes[mine], field.bias[mine], route)

    def pooled(self, x: Tensor) -> Tensor:
        """The means of this rank's windows."""
        return window_means(x, self.starts, self.sizes, self.window)


def summary_split(field: FarField, split: Split) -> Split:
    """Who makes which summaries: the rank that holds their tokens."""
    begins = field.starts.cpu()
    owners = split.owners[begins]
    for one in range(split.num_ranks):
        if not (owners == one).any():
            hint = "Use fewer ranks, or smaller summaries."
            wrong_value("far", "leave every rank a summary", f"{field.window}, none on rank {one}", hint)
    if not torch.equal(split.owners[begins + field.sizes.cpu() - 1], owners):
        hint = "Use `even_split`."
        wrong_value("split", f"be cut on multiples of `far` ({field.window})", split, hint)
    return Split(len(owners), tuple(_runs(owners == one) for one in range(split.num_ranks)))


def _runs(marks: Tensor) -> tuple[Span, ...]:
    """Spans of the places that are marked."""
    edges = torch.nn.functional.pad(marks.int(), (1, 1)).diff()
    starts, stops = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
    return tuple(zip(starts, stops, strict=True))
