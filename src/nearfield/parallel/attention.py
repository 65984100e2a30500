"""Attention over a sequence that is split over ranks: forward, backward, and the bytes of both.

Forward: send what others read and let queries travel; meanwhile attend to the keys that are here; then to those that
came, and to the visitors' queries; send partial results home and merge them by `lse`. Backward: the same ways in the
other direction, and gradients that come home are added in the order of ranks, so that a run repeats bit by bit.

All of it is one autograd function: its collectives run in one order on every rank, whatever a rank has to send.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearfield._checks import check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Gradients, Impl
from nearfield.attend import attend as attend_here
from nearfield.attend import gradients as gradients_here
from nearfield.attend import merge
from nearfield.parallel.ranks import Parcel, Ranks, message_bytes
from nearfield.parallel.route import Call, Route, Slots, Traffic


class Shapes(NamedTuple):
    """What decides the size of a message besides its tokens."""

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype
    has_bias: bool = False

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def keys(self, count: int) -> list[Parcel]:
        """Keys and values, and their bias."""
        parcels = [Parcel((self.batch, self.key_heads, count, self.head_dim), self.dtype)] * 2
        return parcels + [Parcel((self.batch, self.heads, count), self.lse_dtype)] * self.has_bias

    def queries(self, count: int) -> list[Parcel]:
        return [Parcel((self.batch, self.heads, count, self.head_dim), self.dtype)]

    def results(self, count: int) -> list[Parcel]:
        """Outputs and their `lse`."""
        return [*self.queries(count), Parcel((self.batch, self.heads, count), self.lse_dtype)]


class Sent(NamedTuple):
    """Bytes that each rank sends to others in one layer."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def bytes_sent(traffic: Traffic, shapes: Shapes) -> Sent:
    """What `attend` would send, without sending it: the sizes of the very same messages."""
    messages = _Messages(traffic, shapes)
    ranks = range(traffic.num_ranks)
    sizes = [
        [
            sum(
                message_bytes(way(here, there)) for way in (messages.sent, messages.returned, messages.spread)
            )
            for there in ranks
        ]
        for here in ranks
    ]
    # A gradient takes the way of its tensor, back.
    return Sent(tuple(map(sum, sizes)), tuple(map(sum, zip(*sizes, strict=True))))


class _Messages(NamedTuple):
    """What ranks send each other in the forward pass."""

    traffic: Traffic
    shapes: Shapes

    def sent(self, here: int, there: int) -> list[Parcel]:
        """First keys, values and travelling queries ..."""
        if here == there:
            return []
        num_keys, num_queries = (
            int(x[here, there]) for x in (self.traffic.num_keys, self.traffic.num_queries)
        )
        return self.shapes.keys(num_keys) + self.shapes.queries(num_queries)

    def returned(self, here: int, there: int) -> list[Parcel]:
        """... then results for the queries that came, and for that part of everyone's which is merged there ..."""
        if here == there:
            return []
        visitors = int(self.traffic.num_queries[there, here])
        return self.shapes.results(visitors) + self.shapes.results(self.traffic.part_sizes[there])

    def spread(self, here: int, there: int) -> list[Parcel]:
        """... and last the part of everyone's that was merged here."""
        return [] if here == there else self.shapes.results(self.traffic.part_sizes[here])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    route: Route,
    ranks: Ranks,
    *,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Attended:
    """Each rank's part of `nearfield.attend` over a sequence that is split over ranks. A collective call.

    Args:
        query, key, value: the tokens that this rank holds, `[B, H, n, D]` and `[B, G, m, D]`, in the order of the
            sequence.
        route: what this rank sends and reads: `Traffic(plan, split).route(rank)`.
        ranks: who takes part.
        key_bias: of the keys that this rank holds, broadcastable to `[B, H, m]`. Gradients flow.

    Returns:
        `out` and `lse` of this rank's queries. Rows that all ranks hold come out bit-equal on all.

    A gradient belongs to the sum of all ranks' losses. What every rank holds (replicated tokens, parameters) has a part
    of its gradient on each rank: add them up over the ranks.
    """
    shapes = _checked(query, key, value, key_bias, route, ranks)
    if key_bias is not None:
        key_bias = key_bias.to(shapes.lse_dtype).expand(query.shape[0], query.shape[1], key.shape[2])
    needs_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, key_bias)
    )
    ranks.agree(
        plan_and_split=route.traffic.fingerprint,
        tensors=tuple(shapes),
        scale=scale,
        has_gradient=needs_gradient,
    )
    layer = _Layer(route, ranks, shapes, scale, impl)
    if not needs_gradient:
        return layer.spread(*layer.merged(layer.forward(query, key, value, key_bias)[0]))
    out, lse = _Attend.apply(layer, query, key, value, key_bias)  # type: ignore[no-untyped-call]
    return Attended(out, lse)


def _checked(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor | None, route: Route, ranks: Ranks
) -> Shapes:
    if not isinstance(route, Route):
        wrong_type(
            "route", "be a Route", type(route).__name__, "Make one with Traffic(plan, split).route(rank)."
        )
    if (route.rank, route.num_ranks) != (ranks.index, ranks.size):
        wrong_value(
            "route", f"be that of rank {ranks.index} of {ranks.size}", f"{route.rank} of {route.num_ranks}"
        )
    for name, x, count in (
        ("query", query, route.num_queries),
        ("key", key, route.num_keys),
        ("value", value, route.num_keys),
    ):
        check_tensor(name, x, dims=4, hint="Expected [batch, heads, tokens, head_dim].")
        if x.shape[2] != count:
            wrong_value(name, f"have the {count} tokens that rank {route.rank} holds", shape_of(x))
    batch, heads, _, head_dim = query.shape
    return Shapes(batch, heads, key.shape[1], head_dim, query.dtype, key_bias is not None)


class _Sides(NamedTuple):
    """Tensors of keys."""

    key: Tensor
    value: Tensor
    bias: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.key, self.value] if self.bias is None else [self.key, self.value, self.bias]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "_Sides":
        return cls(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)


class _Results(NamedTuple):
    """Results of this rank's queries that are to be merged.

    Args:
        local, fetched: over what is here, and over what came.
        returned: of each rank: travellers' results from there, and results there of the part of everyone's queries that
            is merged here.
    """

    local: Attended
    fetched: Attended | None
    returned: list[list[Tensor]] | None


class _Work(NamedTuple):
    """What others have sent, and what was computed for them; kept for the backward pass."""

    keys: _Sides | None
    visitors: Tensor | None
    visited: Attended | None


class _Layer(NamedTuple):
    route: Route
    ranks: Ranks
    shapes: Shapes
    scale: float | None
    impl: Impl

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[_Results, _Work]:
        route, messages = self.route, _Messages(self.route.traffic, self.shapes)
        own = _Sides(key, value, bias)
        outgoing = [
            [side.index_select(2, route.keys_out[other]) for side in own.tensors]
            + [query.index_select(2, route.queries_out[other])]
            if other != route.rank
            else []
            for other in range(route.num_ranks)
        ]
        incoming = [messages.sent(other, route.rank) for other in range(route.num_ranks)]
        exchange = self.ranks.exchange(outgoing, incoming)
        local = self._attended(route.local, query, own)
        arrived = [tensors for tensors in exchange.wait() if tensors]

        fetched = keys = visitors = visited = None
        if route.fetched is not None:
            keys = _Sides.of(_joined([tensors[:-1] for tensors in arrived]))
            fetched = self._attended(route.fetched, query, keys)
        if route.visited is not None:
            (visitors,) = _joined([tensors[-1:] for tensors in arrived])
            visited = self._attended(route.visited, visitors, own)
        returned = self._returned(messages, local, visited) if route.traffic.has_returns else None
        return _Results(local, fetched, returned), _Work(keys, visitors, visited)

    def _attended(self, call: Call, query: Tensor, keys: _Sides) -> Attended:
        out, lse = attend_here(
            call.queries.enter(query),
            call.keys.enter(keys.key),
            call.keys.enter(keys.value),
            call.plan,
            key_bias=_bias_of(call.keys, keys.bias, self.shapes.lse_dtype),
            scale=self.scale,
            impl=self.impl,
        )
        return Attended(call.queries.leave(out), call.queries.leave(lse))

    def _returned(self, messages: _Messages, local: Attended, visited: Attended | None) -> list[list[Tensor]]:
        """Send visitors' results home, and those of everyone's queries to where each part is merged."""
        route = self.route
        visits = self._by_rank(visited or _no_results(self.shapes, local.out.device))
        outgoing = [
            [*visits[other], *(part.index_select(2, route.everyones[other]) for part in local)]
            if other != route.rank
            else []
            for other in range(route.num_ranks)
        ]
        incoming = [messages.returned(other, route.rank) for other in range(route.num_ranks)]
        return self.ranks.exchange(outgoing, incoming).wait()

    def _by_rank(self, visited: Sequence[Tensor]) -> list[list[Tensor]]:
        counts = self.route.traffic.num_queries[:, self.route.rank].tolist()
        return [list(parts) for parts in zip(*(part.split(counts, dim=2) for part in visited), strict=True)]

    def merged(self, results: _Results) -> tuple[Attended, Attended]:
        """Results of all queries but everyone's, and those of everyone's that are merged here."""
        route, local = self.route, results.local
        whole = local if results.fetched is None else merge(local, results.fetched)
        mine = Attended(*(part.index_select(2, route.everyones[route.rank]) for part in local))
        if results.returned is None:
            return whole, mine
        if len(route.travellers):
            here = Attended(*(part.index_select(2, route.travellers) for part in whole))
            parts = [here]
            for tensors, index in zip(results.returned, route.returned, strict=True):
                if tensors and len(index):
                    parts.append(_spread(Attended(*tensors[:2]), index, here))
            whole = _placed(whole, route.travellers, _merged(parts))
        return whole, _merged([Attended(*(tensors[2:] or mine)) for tensors in results.returned])

    def spread(self, whole: Attended, mine: Attended) -> Attended:
        """Every rank gets all of everyone's results, each part from where it was merged."""
        route, messages = self.route, _Messages(self.route.traffic, self.shapes)
        if not route.traffic.has_everyones:
            return whole
        ranks = range(route.num_ranks)
        arrived = self.ranks.exchange(
            [list(mine) if other != route.rank else [] for other in ranks],
            [messages.spread(other, route.rank) for other in ranks],
        ).wait()
        for index, tensors in zip(route.everyones, arrived, strict=True):
            whole = _placed(whole, index, Attended(*(tensors or mine)))
        return whole

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(
        self, grads: Attended, query: Tensor, own: _Sides, results: _Results, work: _Work
    ) -> tuple[Tensor, _Sides]:
        route, messages = self.route, _Messages(self.route.traffic, self.shapes)
        ranks = range(route.num_ranks)
        local_grads, fetched_grads, returned_grads = self._unmerged(*self._unspread(grads), results)
        visited_grads = None
        if returned_grads is not None:
            arrived = self.ranks.exchange(
                returned_grads, [messages.returned(route.rank, other) for other in ranks]
            ).wait()
            visited_grads = self._distributed(arrived, local_grads)

        keys_back, queries_back = self._no_gradients()
        if route.fetched is not None and fetched_grads is not None:
            assert results.fetched is not None
            assert work.keys is not None
            fetched_query, fetched_sides = self._gradients(
                route.fetched, fetched_grads, query, work.keys, results.fetched
            )
            counts = route.traffic.num_keys[:, route.rank].tolist()
            keys_back = [
                list(parts)
                for parts in zip(*(side.split(counts, dim=2) for side in fetched_sides.tensors), strict=True)
            ]
        if route.visited is not None and visited_grads is not None:
            assert work.visitors is not None
            assert work.visited is not None
            visitor_grads, visited_sides = self._gradients(
                route.visited, visited_grads, work.visitors, own, work.visited
            )
            queries_back = self._by_rank([visitor_grads])
        outgoing = [
            [*keys_back[other], *queries_back[other]] if other != route.rank else [] for other in ranks
        ]
        exchange = self.ranks.exchange(outgoing, [messages.sent(route.rank, other) for other in ranks])
        query_grad, side_grads = self._gradients(route.local, local_grads, query, own, results.local)
        arrived = exchange.wait()

        if route.fetched is not None and fetched_grads is not None:
            query_grad = query_grad + fetched_query
        if route.visited is not None and visited_grads is not None:
            side_grads = _added(side_grads, visited_sides)
        others = [other for other in ranks if other != route.rank]
        came_home = [
            _with_those_that_came(grad, [(route.keys_out[other], arrived[other][number]) for other in others])
            for number, grad in enumerate(side_grads.tensors)
        ]
        query_grad = _with_those_that_came(
            query_grad, [(route.queries_out[other], arrived[other][-1]) for other in others]
        )
        return query_grad, _Sides.of(came_home)

    def _unspread(self, grads: Attended) -> tuple[Attended, Attended]:
        """Gradients of all queries but everyone's, and of everyone's that were merged here: the sum over ranks."""
        route, messages = self.route, _Messages(self.route.traffic, self.shapes)
        mine = Attended(*(grad.index_select(2, route.everyones[route.rank]) for grad in grads))
        if not route.traffic.has_everyones:
            return grads, mine
        ranks = range(route.num_ranks)
        outgoing = [
            [grad.index_select(2, route.everyones[other]) for grad in grads] if other != route.rank else []
            for other in ranks
        ]
        arrived = self.ranks.exchange(
            outgoing, [messages.spread(route.rank, other) for other in ranks]
        ).wait()
        total = [
            _sum([(tensors or mine)[number].to(self.shapes.lse_dtype) for tensors in arrived]).to(grad.dtype)
            for number, grad in enumerate(grads)
        ]
        rest = [grad.index_fill(2, torch.cat(route.everyones), 0) for grad in grads]
        return Attended(*rest), Attended(*total)

    def _unmerged(
        self, grads: Attended, my_grads: Attended, results: _Results
    ) -> tuple[Attended, Attended | None, list[list[Tensor]] | None]:
        """Gradients of the results that were merged: merging is cheap, so it is done again and differentiated."""
        parts = [part.detach().requires_grad_() for part in results.local]
        fetched = [part.detach().requires_grad_() for part in results.fetched or ()]
        returned = [[part.detach().requires_grad_() for part in parts] for parts in results.returned or ()]
        leaves = _Results(
            Attended(*parts), Attended(*fetched) if fetched else None, returned if results.returned else None
        )
        with torch.enable_grad():
            whole, mine = self.merged(leaves)
        inputs = [*parts, *fetched, *(part for parts in returned for part in parts)]
        found = iter(
            torch.autograd.grad(
                (*whole, *mine), inputs, (*grads, *my_grads), allow_unused=True, materialize_grads=True
            )
        )
        local_grads = Attended(next(found), next(found))
        fetched_grads = Attended(next(found), next(found)) if fetched else None
        if results.returned is None:
            return local_grads, fetched_grads, None
        return local_grads, fetched_grads, [[next(found) for _ in parts] for parts in returned]

    def _distributed(self, arrived: list[list[Tensor]], local_grads: Attended) -> Attended | None:
        """Gradients of visitors' results; those of everyone's, merged elsewhere, join the local ones."""
        route = self.route
        for index, parts in zip(route.everyones, arrived, strict=True):
            for grad, part in zip(local_grads, parts[2:], strict=False):
                grad.index_copy_(2, index, part)
        others = [parts[:2] for parts in arrived if parts]
        return Attended(*_joined(others)) if route.visited is not None else None

    def _gradients(
        self, call: Call, grads: Attended, query: Tensor, keys: _Sides, results: Attended
    ) -> tuple[Tensor, _Sides]:
        queries, slots = call.queries, call.keys
        found: Gradients = gradients_here(
            Attended(*(_scattered(queries, grad) for grad in grads)),
            queries.enter(query),
            slots.enter(keys.key),
            slots.enter(keys.value),
            Attended(*(_scattered(queries, part) for part in results)),
            call.plan,
            key_bias=_bias_of(slots, keys.bias, self.shapes.lse_dtype),
            scale=self.scale,
            impl=self.impl,
        )
        bias = None if keys.bias is None or found.key_bias is None else slots.leave(found.key_bias)
        return queries.leave(found.query), _Sides(slots.leave(found.key), slots.leave(found.value), bias)

    def _no_gradients(self) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
        """For ranks that sent nothing: messages of no tokens, as they were on the way here."""
        device = self.route.travellers.device
        keys = [
            torch.empty(parcel.shape, dtype=parcel.dtype, device=device) for parcel in self.shapes.keys(0)
        ]
        query = [
            torch.empty(parcel.shape, dtype=parcel.dtype, device=device) for parcel in self.shapes.queries(0)
        ]
        return [keys] * self.route.num_ranks, [query] * self.route.num_ranks


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        results, work = layer.forward(query, key, value, bias)
        out, lse = layer.spread(*layer.merged(results))
        kept = _Kept(query, _Sides(key, value, bias), results, work)
        ctx.layer = layer
        tensors: list[Tensor] = []
        ctx.frame = _flattened(kept, tensors)
        ctx.save_for_backward(*tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        kept: _Kept = _rebuilt(ctx.frame, ctx.saved_tensors)
        query_grad, sides = ctx.layer.backward(Attended(grad_out, grad_lse), *kept)
        return None, query_grad, *sides


class _Kept(NamedTuple):
    """What the backward pass needs."""

    query: Tensor
    own: _Sides
    results: _Results
    work: _Work


def _flattened(value: Any, tensors: list[Tensor]) -> Any:
    """The frame of nested tuples and lists with numbers for tensors, which go into a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, tuple):
        return type(value)(*(_flattened(part, tensors) for part in value))
    return [_flattened(part, tensors) for part in value] if isinstance(value, list) else value


def _rebuilt(frame: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(frame, int):
        return tensors[frame]
    if isinstance(frame, tuple):
        return type(frame)(*(_rebuilt(part, tensors) for part in frame))
    return [_rebuilt(part, tensors) for part in frame] if isinstance(frame, list) else frame


# -- pieces ------------------------------------------------------------------------------------------------------------


def _merged(parts: Sequence[Attended]) -> Attended:
    """Results over different keys as one, in the precision of `lse`, in the order given."""
    top = torch.stack([part.lse.detach() for part in parts]).amax(dim=0)
    top = top.masked_fill(top == float("-inf"), 0)
    weights = [torch.exp(part.lse - top) for part in parts]
    total = _sum(weights)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1)
    terms = [weight.unsqueeze(-1) * part.out for weight, part in zip(weights, parts, strict=True)]
    out = _sum(terms) / total.unsqueeze(-1)
    return Attended(out.to(parts[0].out.dtype), (top + total.log()).masked_fill(is_empty, float("-inf")))


def _spread(part: Attended, index: Tensor, like: Attended) -> Attended:
    """Results of some of the queries, as results of all: the others read nothing."""
    out = torch.zeros_like(like.out).index_copy(2, index, part.out)
    return Attended(out, torch.full_like(like.lse, float("-inf")).index_copy(2, index, part.lse))


def _placed(whole: Attended, index: Tensor, part: Attended) -> Attended:
    return Attended(whole.out.index_copy(2, index, part.out), whole.lse.index_copy(2, index, part.lse))


def _bias_of(slots: Slots, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The keys' bias in their slots; nobody reads a hole."""
    if slots.holes is None:
        return bias if bias is None else slots.enter(bias)
    hidden = torch.zeros(slots.length, dtype=dtype, device=slots.holes.device).masked_fill(
        slots.holes, float("-inf")
    )
    return hidden if bias is None else slots.enter(bias) + hidden


def _scattered(slots: Slots, x: Tensor) -> Tensor:
    """Into slots, with nothing in the holes: gradients, and results that belong to them."""
    if slots.tokens is None:
        return x
    return x.new_zeros(*x.shape[:2], slots.length, *x.shape[3:]).index_copy_(2, slots.place, x)


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True)]


def _with_those_that_came(grad: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """A gradient and its parts from other ranks, added one after another in single precision at least.

    No part has an index twice, so no two additions meet, on whatever device.
    """
    parts = [(index, part) for index, part in parts if len(index)]
    if not parts:
        return grad
    total = grad.to(torch.promote_types(grad.dtype, torch.float32))
    for index, part in parts:
        total = total.index_add(2, index, part.to(total.dtype))
    return total.to(grad.dtype)


def _added(first: _Sides, second: _Sides) -> _Sides:
    return _Sides.of([a + b for a, b in zip(first.tensors, second.tensors, strict=True)])


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


def _no_results(shapes: Shapes, device: torch.device) -> Attended:
    out, lse = (torch.empty(parcel.shape, dtype=parcel.dtype, device=device) for parcel in shapes.results(0))
    return Attended(out, lse)
