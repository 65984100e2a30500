"""A model whose image tokens are split over ranks: once at its entrance, and gathered at its exit.

The text is on every rank. Between entrance and exit a rank computes its share of the image and all of the text, and
only attention sends anything.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearfield import planning
from nearfield._checks import wrong_value
from nearfield._types import Attended, Impl
from nearfield.geometry import Geometry
from nearfield.methods.hilbert import Hilbert, HilbertReader
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

    @property
    def num_pairs(self) -> int:
        """Pairs of all ranks, per batch element and head."""
        return round(self.plan.num_pairs / self.plan.blocks.shape[1])

    @property
    def plans(self) -> list[Plan]:
        """What this rank calls `nearfield.attend` with."""
        calls = (self.route.local, self.route.fetched, self.route.visited)
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
        return attend(query, key, value, self.route, self.ranks, key_bias=key_bias, scale=scale, impl=impl)

    def bytes_sent(self, shapes: Shapes) -> Sent:
        return bytes_sent(self.route.traffic, shapes)


def even_split(method: Hilbert, geometry: Geometry, num_ranks: int, block: int) -> Split:
    """Shared tokens and rings cut evenly, the text on all ranks.

    Cuts lie on multiples of the block where shares are large enough. A two-way shared region that has no block for
    every rank is cut more finely on many: who holds some of it talks to all others, and that should not be one rank's
    load. With keys-only sharing that would cost more than it spares: the rows of a torn block read the tiles of all
    of its tokens, on every rank that holds some.
    """
    spans = method.spans(geometry)
    share = max(stop - start for start, stop in spans) // num_ranks // _SHARE_OVER_UNIT
    units = []
    for start, stop in spans:
        is_spread = method.share == "two-way" and stop - start < block * num_ranks
        units.append(
            min(block, _power_of_two(share // (num_ranks - 1) if is_spread and num_ranks > 1 else share))
        )
    text = [geometry.text_span] if geometry.text else []
    return Split.even(spans, num_ranks, unit=units, replicated=text)


def _power_of_two(number: int) -> int:
    """The largest one that is not above a number."""
    return int(2 ** (max(number, 1).bit_length() - 1))


class SplitModel:
    """How the tokens of one geometry are split, and what layers read of them then.

    Args:
        method: whose order the image tokens stand in.
        block: of its plans.
    """

    def __init__(self, method: Hilbert, geometry: Geometry, block: int, ranks: Ranks) -> None:
        self.ranks, self.block = ranks, block
        self.split = even_split(method, geometry, ranks.size, block)

    def share(self, ordering: Ordering, geometry: Geometry) -> Share:
        """The tokens of the images alone, which stand in the sequence as in the model's own tensors."""
        start = geometry.text if geometry.text_first else 0
        owned = tuple(tuple((a - start, b - start) for a, b in spans) for spans in self.split.owned)
        return Share(ordering, Split(geometry.num_image_tokens, owned), self.ranks)

    def reader(self, reader: object) -> SplitReader:
        """What a method's layer reads."""
        if not isinstance(reader, HilbertReader) or reader.far is not None:
            wrong_value("method", SPLITTABLE, type(reader).__name__)
        return self._reader(reader.near)

    def dense_reader(self, device: torch.device) -> SplitReader:
        """What a dense layer reads: all."""
        tokens, block = self.split.num_tokens, self.block
        return self._reader(planning.full(tokens, q_block=block, k_block=block, device=device))

    def _reader(self, plan: Plan) -> SplitReader:
        everyones: Traffic = traffic(plan, self.split)
        return SplitReader(plan, everyones.route(self.ranks.index), self.ranks)


SPLITTABLE = "read one plan per layer, known beforehand (Hilbert without `far`), to be split over ranks"


def check_splittable(method: object) -> None:
    if not isinstance(method, Hilbert) or method.far is not None:
        wrong_value("method", SPLITTABLE, method)
