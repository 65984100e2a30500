"""A model whose image tokens are split over ranks: once at its entrance, and gathered at its exit.

The text is on every rank. Between entrance and exit a rank computes its share of the image and all of the text, and
only attention sends anything.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Attended, Impl
from nearfield.layout import Geometry, Ordering
from nearfield.methods import Composition, LayerAttention
from nearfield.ops import merge_attended
from nearfield.parallel.attention import attend
from nearfield.parallel.far import SplitFarField, bytes_summed
from nearfield.parallel.messages import Sent, Shapes, bytes_sent
from nearfield.parallel.ranks import Ranks
from nearfield.parallel.route import Route, Traffic, traffic
from nearfield.parallel.split import Split
from nearfield.plan import Plan
from nearfield.plan import builders as planning


class Share:
    """The image tokens of one rank. `enter` orders all and keeps a share; `leave` gathers all and restores their order.

    Args:
        ordering: of all image tokens.
        split: of the ordered image tokens, without text.
        ranks: the ranks that hold the other shares.
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
    """Every rank's part, `[tokens of the rank, ...]`, in the order of ranks. A collective call."""
    sizes = [len(split.own(rank)) for rank in range(ranks.size)]
    if len(part) != sizes[ranks.index]:
        wrong_value("part", f"hold the {sizes[ranks.index]} tokens of rank {ranks.index}", len(part))
    return torch.cat(ranks.all_gather(part, sizes))


@dataclass(frozen=True, eq=False)
class SplitLayer(LayerAttention):
    """What one layer reads on one rank, among the tokens that the rank holds.

    Args:
        plan: who reads whom in the whole sequence.
    """

    plan: Plan
    route: Route
    ranks: Ranks
    far: SplitFarField | None = None

    @property
    def num_pairs(self) -> int:
        """Pairs of all ranks, per batch element and head."""
        plans = [self.plan] if self.far is None else [self.plan, self.far.route.traffic.plan]
        return round(sum(plan.num_pairs / plan.blocks.shape[1] for plan in plans))

    @property
    def plans(self) -> list[Plan]:  # type: ignore[override]
        """The plans of this rank's calls of `nearfield.attend`."""
        routes = [self.route] if self.far is None else [self.route, self.far.route]
        calls = [route.apart if self.ranks.overlap else (route.joined,) for route in routes]
        return [call.plan for of_route in calls for call in of_route]

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
        keys, values, bias = self.far.summaries(query, key, value, scale, impl, self.ranks)
        far = attend(query, keys, values, self.far.route, self.ranks, key_bias=bias, scale=scale, impl=impl)
        return merge_attended(near, far)

    def bytes_sent(self, shapes: Shapes) -> Sent:
        sent = bytes_sent(self.route.traffic, shapes)
        if self.far is None:
            return sent
        far = bytes_sent(self.far.route.traffic, shapes._replace(has_bias=True))
        queries = bytes_summed(self.far.summary, shapes, self.ranks.size)
        return Sent(
            *(tuple(map(sum, zip(*each, strict=True))) for each in zip(sent, far, queries, strict=True))
        )


class SplitModel:
    """Makes the layers of a model whose tokens are split over ranks.

    Args:
        block: the block size of a dense layer's plan.
    """

    def __init__(self, split: Split, block: int, ranks: Ranks) -> None:
        self.split, self.block, self.ranks = split, block, ranks

    def share(self, ordering: Ordering, geometry: Geometry) -> Share:
        """The share of the image tokens, which stand in the sequence in the order of the model's own tensors."""
        start = geometry.text if geometry.text_first else 0
        owned = tuple(tuple((a - start, b - start) for a, b in spans) for spans in self.split.owned)
        return Share(ordering, Split(geometry.num_image_tokens, owned), self.ranks)

    def layer(self, layer: LayerAttention) -> SplitLayer:
        """This rank's part of a method's layer."""
        if len(layer.plans) != 1 + (layer.summaries is not None):
            wrong_value("method", SPLITTABLE, type(layer).__name__)
        near = self._layer(layer.plans[0])
        if layer.summaries is None:
            return near
        field, kind = layer.summaries
        return replace(near, far=SplitFarField.of(field, self.split, self.ranks.index, kind))

    def dense_layer(self, device: torch.device) -> SplitLayer:
        """This rank's part of a layer in which everyone reads everyone."""
        tokens, block = self.split.num_tokens, self.block
        return self._layer(planning.full(tokens, q_block=block, k_block=block, device=device))

    def _layer(self, plan: Plan) -> SplitLayer:
        everyones: Traffic = traffic(plan, self.split)
        return SplitLayer(plan, everyones.route(self.ranks.index), self.ranks)


SPLITTABLE = "decide by the geometry alone who reads whom to be split over ranks"
_MERGEABLE = "merge inside regions of the order to be split over ranks"


def check_splittable(method: Composition) -> None:
    """Refuse a method for which tokens cannot be split."""
    if method.merge is not None and not method.merge.can_split:
        wrong_value("method", _MERGEABLE, method.merge.label)
    if method.attention is not None and not method.attention.can_split:
        wrong_value("method", SPLITTABLE, method.attention.label)
