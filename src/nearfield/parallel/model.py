"""A model whose image tokens are split over ranks: once at its entrance, and gathered at its exit.

The text is on every rank. Between entrance and exit a rank computes its share of the image and all of the text, and
only attention sends anything.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearfield import planning, tiling
from nearfield._checks import wrong_value
from nearfield._types import Attended, Impl
from nearfield.attend import merge
from nearfield.geometry import Geometry, Span
from nearfield.merging import Regions
from nearfield.methods.hilbert import FarField, Hilbert, HilbertReader, window_sums
from nearfield.methods.merging import Merge, Merged
from nearfield.parallel.attention import Sent, Shapes, attend, bytes_sent
from nearfield.parallel.ranks import Parcel, Ranks
from nearfield.parallel.route import Route, Traffic, traffic
from nearfield.parallel.split import Split
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering

# At least: shares then differ by a quarter at most. Small ones may tear blocks for it.
_SHARE_OVER_UNIT = 4


class Share:
    """The image tokens of one rank: `enter` orders them and keeps its share, `leave` gathers all and brings them back.

    Args:
        ordering: of all image tokens.
        split: of the ordered image tokens, without text.
        ranks: who has the others.
    """

    def __init__(self, ordering: Ordering, split: Split, ranks: Ranks) -> None:
        self.ordering, self.split, self.ranks = ordering, split, ranks
        self._mine = split.own(ranks.index).to(ordering.order.device)
        everyones = torch.cat([split.own(rank) for rank in range(split.num_ranks)])
        self._places = everyones.argsort().to(ordering.order.device)

    def __len__(self) -> int:
        return len(self.ordering)

    def enter(self, x: Tensor, dim: int = 1) -> Tensor:
        return self.ordering.enter(x, dim).index_select(dim, self._mine)

    def leave(self, y: Tensor, dim: int = 1) -> Tensor:
        """All tokens, on every rank. Gradients are those of the sum of all ranks' losses."""
        gathered = gather(y.transpose(0, dim), self.split, self.ranks).index_select(0, self._places)
        return self.ordering.leave(gathered.transpose(0, dim), dim)


def gather(part: Tensor, split: Split, ranks: Ranks) -> Tensor:
    """Every rank's part, `[tokens of the rank, ...]`, those of the first rank first. A collective call."""
    if part.shape[0] != len(split.own(ranks.index)):
        wrong_value(
            "part", f"hold the {len(split.own(ranks.index))} tokens of rank {ranks.index}", part.shape[0]
        )
    gathered: Tensor = _Gather.apply(part, split, ranks)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split, ranks: Ranks) -> Tensor:
        ctx.split, ctx.ranks = split, ranks
        others = [rank != ranks.index for rank in range(ranks.size)]
        messages = [
            [Parcel((len(split.own(rank)), *part.shape[1:]), part.dtype)] * other
            for rank, other in enumerate(others)
        ]
        arrived = ranks.exchange([[part] * other for other in others], messages).wait()
        return torch.cat([tensors[0] if tensors else part for tensors in arrived])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The sum of what all ranks' losses say about this rank's part, in the order of ranks."""
        split, ranks = ctx.split, ctx.ranks
        parts = grad.split([len(split.own(rank)) for rank in range(ranks.size)])
        mine = parts[ranks.index]
        others = [rank != ranks.index for rank in range(ranks.size)]
        parcel = Parcel(tuple(mine.shape), mine.dtype)
        outgoing = [[part] * other for part, other in zip(parts, others, strict=True)]
        arrived = ranks.exchange(outgoing, [[parcel] * other for other in others]).wait()
        total = torch.zeros_like(mine, dtype=torch.promote_types(mine.dtype, torch.float32))
        for tensors in arrived:
            total += tensors[0] if tensors else mine
        return total.to(mine.dtype), None, None


@dataclass(frozen=True, eq=False)
class SplitReader:
    """What one layer reads on one rank: tokens are those that it holds.

    Args:
        plan: who reads whom in the whole sequence.
    """

    plan: Plan
    route: Route
    ranks: Ranks
    far: "SplitFarField | None" = None

    @property
    def num_pairs(self) -> int:
        """Pairs of all ranks, per batch element and head."""
        plans = [self.plan] if self.far is None else [self.plan, self.far.route.traffic.plan]
        return round(sum(plan.num_pairs / plan.blocks.shape[1] for plan in plans))

    @property
    def plans(self) -> list[Plan]:
        """What this rank calls `nearfield.attend` with."""
        routes = [self.route] if self.far is None else [self.route, self.far.route]
        calls = [call for route in routes for call in (route.local, route.fetched, route.visited)]
        return [call.plan for call in calls if call is not None]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended:
        near = attend(query, key, value, self.route, self.ranks, key_bias=key_bias, scale=scale, impl=impl)
        if self.far is None:
            return near
        far = self.far
        summaries = far.pooled(key), far.pooled(value)
        read = attend(query, *summaries, far.route, self.ranks, key_bias=far.bias, scale=scale, impl=impl)
        return merge(near, read)

    def bytes_sent(self, shapes: Shapes) -> Sent:
        sent = bytes_sent(self.route.traffic, shapes)
        if self.far is None:
            return sent
        more = bytes_sent(self.far.route.traffic, shapes._replace(has_bias=True))
        return Sent(*(tuple(map(sum, zip(*both, strict=True))) for both in zip(sent, more, strict=True)))


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
        route = Traffic(field.plan, split, summaries).route(rank)
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


def even_split(method: Hilbert, geometry: Geometry, num_ranks: int, block: int) -> Split:
    """Shared tokens and rings cut evenly, the text on all ranks.

    Cuts lie on multiples of the block where shares are large enough. A two-way shared region that has no block for
    every rank is cut more finely on many: who holds some of it talks to all others, and that should not be one rank's
    load. With keys-only sharing that would cost more than it spares: the rows of a torn block read the tiles of all
    of its tokens, on every rank that holds some.
    """
    spans = method.spans(geometry)
    segments = tiling.segments_of(geometry, method.curve, method.shared, method.shared_tokens)
    rings = [segment.ring for segment in segments]
    share = max(stop - start for start, stop in spans) // num_ranks // _SHARE_OVER_UNIT
    units = []
    for start, stop in spans:
        is_spread = method.share == "two-way" and stop - start < block * num_ranks
        unit = min(block, _power_of_two(share // (num_ranks - 1) if is_spread and num_ranks > 1 else share))
        is_summarised = method.far is not None and (start, stop) in rings
        units.append(_whole_windows(unit, method.far or 1, share) if is_summarised else unit)
    text = [geometry.text_span] if geometry.text else []
    return Split.even(spans, num_ranks, unit=units, replicated=text)


def _whole_windows(unit: int, far: int, share: int) -> int:
    """Cuts that tear no summary's tokens apart, and no block if shares are large enough for both."""
    both = math.lcm(unit, far)
    return both if both <= share else far


def _power_of_two(number: int) -> int:
    """The largest one that is not above a number."""
    return int(2 ** (max(number, 1).bit_length() - 1))


class MergedSplit(NamedTuple):
    """Tokens that are merged inside regions, split between regions: a rank merges and parts its own by itself.

    Args:
        whole: of all tokens.
        merged: of those that are left.
        regions: of each rank.
    """

    whole: Split
    merged: Split
    regions: tuple[Regions, ...]


def split_between_regions(method: Merged, geometry: Geometry, num_ranks: int, block: int) -> MergedSplit:
    """Every piece of the order cut evenly, as far as regions allow, the text on all ranks.

    Of the places between two regions those are preferred that tear no block.
    """
    regions = method.regions(geometry)
    runs = list(zip(regions.lengths, regions.counts, strict=True))
    pieces = [tokens for image in method.pieces(geometry) for tokens in image]
    unit = min(block, _power_of_two(max(pieces) // num_ranks // _SHARE_OVER_UNIT))
    begin = geometry.text if geometry.text_first else 0
    place, first = begin, 0
    mine: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]  # first and last region, one per piece
    for tokens in pieces:
        borders = [place]
        while borders[-1] < place + tokens:
            borders.append(borders[-1] + runs[first + len(borders) - 1][0])
        cuts = _cut_at(borders, num_ranks, unit)
        for rank, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                mine[rank].append((first + start, first + stop))
        place, first = place + tokens, first + len(borders) - 1
    for rank, spans in enumerate(mine):
        if not spans:
            hint = "Use fewer ranks, or smaller regions."
            got = f"{len(runs)} regions, none for rank {rank}"
            wrong_value("method", f"leave each of {num_ranks} ranks a region to merge in", got, hint)
    short = method.shortened(geometry, regions)
    return MergedSplit(
        _split_at(mine, begin, [length for length, _ in runs], geometry),
        _split_at(mine, begin, [count for _, count in runs], short),
        tuple(_regions_in(regions, spans) for spans in mine),
    )


def _cut_at(borders: Sequence[int], num_ranks: int, unit: int) -> list[int]:
    """Which of some places to cut at, into one part per rank.

    Those on multiples of `unit` are taken where they are hardly farther from an even share than others.
    """
    places = range(len(borders))
    aligned = [number for number in places if borders[number] % unit == 0]
    share = (borders[-1] - borders[0]) / num_ranks
    cuts = [0]
    for rank in range(1, num_ranks):
        ideal = borders[0] + share * rank

        def distance(number: int, ideal: float = ideal) -> float:
            return abs(borders[number] - ideal)

        nearest = min(places, key=distance)
        whole = min(aligned, key=distance, default=nearest)
        is_close = distance(whole) <= distance(nearest) + share / (2 * _SHARE_OVER_UNIT)
        cuts.append(max(cuts[-1], whole if is_close else nearest))
    return [*cuts, places[-1]]


def _split_at(mine: list[list[Span]], begin: int, sizes: list[int], geometry: Geometry) -> Split:
    """The split of a sequence whose regions have some sizes."""
    places = [begin, *(begin + size for size in accumulate(sizes))]
    owned = tuple(tuple((places[start], places[stop]) for start, stop in spans) for spans in mine)
    return Split(geometry.num_tokens, owned, (geometry.text_span,) if geometry.text else ())


def _regions_in(regions: Regions, spans: Sequence[Span]) -> Regions:
    chosen = [number for start, stop in spans for number in range(start, stop)]
    return Regions(
        tuple(regions.lengths[number] for number in chosen),
        tuple(regions.counts[number] for number in chosen),
    )


class SplitModel:
    """What layers read of tokens that are split over ranks.

    Args:
        block: of a dense layer's plan.
    """

    def __init__(self, split: Split, block: int, ranks: Ranks) -> None:
        self.split, self.block, self.ranks = split, block, ranks

    def share(self, ordering: Ordering, geometry: Geometry) -> Share:
        """The tokens of the images alone, which stand in the sequence as in the model's own tensors."""
        start = geometry.text if geometry.text_first else 0
        owned = tuple(tuple((a - start, b - start) for a, b in spans) for spans in self.split.owned)
        return Share(ordering, Split(geometry.num_image_tokens, owned), self.ranks)

    def reader(self, reader: object) -> SplitReader:
        """What a method's layer reads."""
        if not isinstance(reader, HilbertReader):
            wrong_value("method", SPLITTABLE, type(reader).__name__)
        near = self._reader(reader.near)
        if reader.far is None:
            return near
        return replace(near, far=SplitFarField.of(reader.far, self.split, self.ranks.index))

    def dense_reader(self, device: torch.device) -> SplitReader:
        """What a dense layer reads: all."""
        tokens, block = self.split.num_tokens, self.block
        return self._reader(planning.full(tokens, q_block=block, k_block=block, device=device))

    def _reader(self, plan: Plan) -> SplitReader:
        everyones: Traffic = traffic(plan, self.split)
        return SplitReader(plan, everyones.route(self.ranks.index), self.ranks)


SPLITTABLE = "read what is known beforehand (Hilbert) to be split over ranks"
_MERGEABLE = "merge inside runs or windows (Merge) to be split over ranks"


def check_splittable(method: object) -> None:
    """Whether tokens can be split for a method at all."""
    attention = method
    if isinstance(method, Merged):
        if not isinstance(method.merge, Merge) or method.merge.region == "global":
            wrong_value("method", _MERGEABLE, method.merge)
        attention = method.attention
        if attention is None:
            return
        if getattr(attention, "far", None) is not None:
            hint = "Ranks part between regions, and that would tear the tokens of a summary apart."
            wrong_value("far", "be None where tokens are merged and split over ranks", attention.far, hint)
    if not isinstance(attention, Hilbert):
        wrong_value("method", SPLITTABLE, method)
