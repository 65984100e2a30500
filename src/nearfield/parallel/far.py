"""The far field of a rank: summaries of its own tokens, which travel to their readers as keys do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Impl
from nearfield.layout import Span
from nearfield.methods import FarField, Summary
from nearfield.ops import query_sums, weighted_windows, window_means
from nearfield.parallel.messages import Sent, Shapes
from nearfield.parallel.ranks import Ranks
from nearfield.parallel.route import Route, traffic
from nearfield.parallel.split import Split


@dataclass(frozen=True, eq=False)
class SplitFarField:
    """The far field on one rank. Summaries are keys like others: made where their tokens are, and sent to readers.

    Args:
        window: tokens per summary.
        starts: `[windows]`, where this rank's windows begin among its tokens.
        sizes, bias: of this rank's summaries.
        route: who reads which summaries; its queries are the tokens.
        summary: the kind of summaries.
        num_summarised: tokens of all ranks' windows.
    """

    window: int
    starts: Tensor
    sizes: Tensor
    bias: Tensor
    route: Route
    summary: Summary
    num_summarised: int

    @classmethod
    def of(cls, field: FarField, split: Split, rank: int, summary: Summary) -> "SplitFarField":
        if summary == "sloped":
            wrong_value("summary", 'be "mean" or "weighted" over ranks', summary)
        summaries = summary_split(field, split)
        mine, device = summaries.own(rank), field.sizes.device
        starts = torch.searchsorted(split.held(rank), field.starts.cpu()[mine]).to(device)
        mine = mine.to(device)
        route = traffic(field.plan, split, summaries).route(rank)
        sizes, bias = field.sizes[mine], field.bias[mine]
        return cls(field.window, starts, sizes, bias, route, summary, int(field.sizes.sum()))

    def summaries(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, impl: Impl, ranks: Ranks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and biases of this rank's windows. A collective call where windows are weighted: the mean query
        is that of all ranks."""
        windows = self.starts, self.sizes, self.window
        if self.summary == "mean":
            return window_means(key, *windows, impl), window_means(value, *windows, impl), self.bias
        sums = torch.stack(ranks.all_gather(query_sums(query, *windows, key.shape[1], impl))).sum(0)
        moments = sums / self.num_summarised
        return weighted_windows(query, key, value, *windows, scale=scale, impl=impl, moments=moments)


def bytes_summed(summary: Summary, shapes: Shapes, num_ranks: int) -> Sent:
    """The bytes that ranks send so that each knows the mean query, where summaries need it."""
    if summary == "mean":
        return Sent((0,) * num_ranks, (0,) * num_ranks)
    dtype = torch.promote_types(shapes.dtype, torch.float32)
    num_bytes = 2 * shapes.batch * shapes.key_heads * shapes.head_dim * dtype.itemsize
    each = (num_bytes * (num_ranks - 1),) * num_ranks
    return Sent(each, each)


def summary_split(field: FarField, split: Split) -> Split:
    """The split of summaries: each is made by the rank that holds its tokens."""
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
