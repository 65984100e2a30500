"""Attention over a sequence that is split over ranks: forward and backward.

Three nodes of autograd surround calls of `nearfield.attend`, which differentiates itself:

- `_Depart` sends what others read, and queries that travel. `_Arrive` waits for what comes.
- The calls: a rank reads all in one call over one plan, when everything is there. Where the link is slow
  (`Ranks.overlap`), it reads what is here between departure and arrival, and merges.
- `_Settle` sends partial results home, merges them by `lse`, and spreads those of queries that all ranks hold.

In the backward pass gradients take the same ways back. Those that come home are added in the order of ranks, so that a
run repeats bit by bit. Every rank has the same nodes, whatever it has to send, and each depends on the one before it.
So collectives run in one order on every rank.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearfield._checks import check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Impl
from nearfield.ops import attend as attend_here
from nearfield.ops import attend_continued, gradients_of_part, merge_partials
from nearfield.parallel.messages import Kind, Messages, Shapes, message_sizes, packed, select, unpacked
from nearfield.parallel.ranks import Delivery, Ranks
from nearfield.parallel.route import CAME, HERE, Call, Route, Slots

Tokens = Sequence[Tensor]
"""Queries, keys and values of some tokens, and the bias of the keys, if there is one."""


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
    own = [query, key, value]
    if key_bias is not None:
        bias = key_bias.to(shapes.lse_dtype)
        own.append(bias.expand(query.shape[0], query.shape[1], key.shape[2]))
    ranks.agree(
        plan_and_split=route.traffic.fingerprint,
        tensors=tuple(shapes),
        scale=scale,
        has_gradient=_needs_gradient(own),
    )
    if shapes not in route.kept:
        route.kept[shapes] = Messages(route.traffic, shapes, route.rank)
    return _Layer(route, ranks, route.kept[shapes], scale, impl).attend(own)


def _needs_gradient(tensors: Tokens) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


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


class _Journey:
    """Tokens on their way to other ranks, and in the backward pass their gradients on the way home."""

    delivery: Delivery


class _Layer(NamedTuple):
    """One call of `attend` on one rank."""

    route: Route
    ranks: Ranks
    messages: Messages
    scale: float | None
    impl: Impl

    @property
    def shapes(self) -> Shapes:
        return self.messages.shapes

    def attend(self, own: Tokens) -> Attended:
        """Run this rank's calls, and the exchanges before, between and after them."""
        route, overlap, journey = self.route, bool(self.ranks.overlap), _Journey()
        calls = route.apart if overlap else (route.joined,)
        came: Tokens = ()
        read: list[list[Attended]] = []
        if route.traffic.has_journeys:
            own = _Depart.apply(self, journey, *own)  # type: ignore[no-untyped-call]
            if overlap:
                out, lse = self._read(calls[0], own)[0]
                out, lse, *came = _Arrive.apply(self, journey, out, lse)  # type: ignore[no-untyped-call]
                read = [[Attended(out, lse)]]
            else:
                both = _Arrive.apply(self, journey, *own)  # type: ignore[no-untyped-call]
                own, came = both[: len(own)], both[len(own) :]
        read += [self._read(call, own, came) for call in calls[len(read) :]]
        found: list[list[Attended]] = [[], []]
        for call, parts in zip(calls, read, strict=True):
            for group, part in zip(call.query_groups, parts, strict=True):
                found[group].append(part)
        whole, *others = found[HERE]
        if others:
            sides = [torch.stack(some) for some in zip(whole, *others, strict=True)]
            whole = Attended(*_Merge.apply(*sides))  # type: ignore[no-untyped-call]
        if route.traffic.has_returns:
            visited = [side for part in found[CAME] for side in part]
            whole = Attended(*_Settle.apply(self, *whole, *visited))  # type: ignore[no-untyped-call]
        return whole

    def _read(self, call: Call, *groups: Tokens) -> list[Attended]:
        """The results of one call, for each group of its queries."""
        query = _put(call.queries, [groups[group][0] for group in call.query_groups])
        sides = list(zip(*(groups[group][1:] for group in call.key_groups), strict=True))
        result = self._continued(call, query, sides)
        if result is None:
            key, value, *bias = (_put(call.keys, parts) for parts in sides)
            key_bias = _hiding_holes(call.keys, bias[0] if bias else None, self.shapes.lse_dtype)
            result = attend_here(
                query, key, value, call.plan, key_bias=key_bias, scale=self.scale, impl=self.impl
            )
        out, lse = (call.queries.leave(side) for side in result)
        if len(call.query_groups) == 1:
            return [Attended(out, lse)]
        held = self.route.num_queries
        lengths = [held, out.shape[2] - held]
        return [Attended(*parts) for parts in zip(out.split(lengths, 2), lse.split(lengths, 2), strict=True)]

    def _continued(self, call: Call, query: Tensor, sides: Sequence[Tokens]) -> Attended | None:
        """Read keys that are here and keys that came without copying them. None where no kernel can."""
        if len(call.key_groups) == 1 or call.keys.tokens is not None or _needs_gradient([query]):
            return None
        (key, more_key), (value, more_value), *biases = sides
        bias = _joined(biases[0]) if biases else None
        more = more_key, more_value
        return attend_continued(
            query, key, value, more, call.plan, key_bias=bias, scale=self.scale, impl=self.impl
        )

    # -- messages: forward, and for gradients in the other direction -----------------------------------------------

    def send(self, outgoing: list[Kind], rows: Sequence[Tensor], incoming: list[Kind]) -> Delivery:
        return self.ranks.send(packed(outgoing, rows), message_sizes(outgoing), message_sizes(incoming))

    def send_tokens(
        self,
        outgoing: list[Kind],
        tokens: Tokens,
        incoming: list[Kind],
        queries: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Delivery:
        """Send tokens, or the gradients of some: all, or some queries and keys."""
        query, key, value, *bias = tokens
        rows = [self.shapes.key.filled([key, value], keys), self.shapes.query.filled([query], queries)]
        rows += [self.shapes.bias.filled([one], keys) for one in bias]
        return self.send(outgoing, rows, incoming)

    def tokens(self, kinds: list[Kind], delivery: Delivery) -> tuple[Tensor, ...]:
        """The tokens that arrived, as views of the buffer they arrived in."""
        key_rows, query_rows, *bias_rows = unpacked(kinds, delivery.wait())
        found = [*self.shapes.query.tensors(query_rows), *self.shapes.key.tensors(key_rows)]
        return (*found, *(bias for rows in bias_rows for bias in self.shapes.bias.tensors(rows)))

    def returned(self, whole: Attended, visited: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Send visitors' results home, and results of everyone's queries to the ranks that merge them.

        Returns:
            Results `[ranks, B, H, tokens, ...]` of this rank's queries that travelled, and of everyone's queries that
            are merged here.
        """
        route, row = self.route, self.shapes.result
        outgoing, incoming = self.messages.returned, self.messages.returned_here
        travellers = row.filled(whole, route.travellers)
        if visited:
            visits = row.filled(visited)
            before = sum(outgoing[0].counts[: route.rank])
            travellers = torch.cat([visits[:before], travellers, visits[before:]])
        rows = [travellers, self._rows_of_everyone(whole)]
        visit_rows, part_rows = unpacked(incoming, self.send(outgoing, rows, incoming).wait())
        travelled = self._travelled(*row.tensors(visit_rows)) if len(visit_rows) else []
        # Of everyone's queries none may be merged here, though there are some.
        parts = row.tensors(part_rows) if route.traffic.has_everyones else []
        return travelled, [_stacked(part, route.num_ranks) for part in parts]

    def _travelled(self, out: Tensor, lse: Tensor) -> list[Tensor]:
        """Results of travellers from each rank; from ranks where a query has not been they are empty."""
        route = self.route
        places = route.num_ranks * len(route.travellers)
        wide_out = out.new_zeros(*out.shape[:2], places, out.shape[3]).index_copy_(2, route.returned, out)
        wide_lse = lse.new_full((*lse.shape[:2], places), float("-inf")).index_copy_(2, route.returned, lse)
        return [_stacked(wide_out, route.num_ranks), _stacked(wide_lse, route.num_ranks)]

    def _rows_of_everyone(self, whole: Attended) -> Tensor:
        span = self.route.everyones_span
        if span is None:
            return self.shapes.result.filled(whole, self.route.everyones)
        return self.shapes.result.filled([part[:, :, slice(*span)] for part in whole])

    def spread(self, whole: Attended, mine: Attended) -> None:
        """Give every rank the results of everyone's queries, each part from the rank that merged it."""
        row, outgoing, incoming = self.shapes.result, self.messages.spread, self.messages.spread_here
        rows = row.empty(sum(outgoing[0].counts), mine.out.device)
        for copies, part in zip(row.tensors(rows), mine, strict=True):
            copies = _stacked(copies, self.route.num_ranks)
            select(part.expand_as(copies), None, copies)
        (came,) = unpacked(incoming, self.send(outgoing, [rows], incoming).wait())
        self.place_everyones(whole, row.tensors(came))

    def gathered(self, grads: Attended) -> Attended:
        """The backward pass of `spread`: the gradients of what was merged here, summed over ranks."""
        row, outgoing, incoming = self.shapes.result, self.messages.spread_here, self.messages.spread
        rows = [self._rows_of_everyone(grads)]
        (came,) = unpacked(incoming, self.send(outgoing, rows, incoming).wait())
        out, lse = (_stacked(part, self.route.num_ranks) for part in row.tensors(came))
        return Attended(out.sum(dim=0, dtype=lse.dtype), lse.sum(dim=0))

    def place_everyones(self, whole: Attended, parts: Sequence[Tensor]) -> None:
        span = self.route.everyones_span
        if span is None:
            _place(whole, self.route.everyones, parts)
            return
        for into, part in zip(whole, parts, strict=True):
            select(part, None, into[:, :, slice(*span)])


# -- nodes -------------------------------------------------------------------------------------------------------------


class _Depart(torch.autograd.Function):
    """Sends what others read of this rank's tokens. Backward: adds the gradients that come home to those from here."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, journey: _Journey, *own: Tensor) -> Tokens:
        ctx.layer, ctx.journey = layer, journey
        messages, route = layer.messages, layer.route
        journey.delivery = layer.send_tokens(
            messages.sent, own, messages.sent_here, route.queries_out, route.keys_out
        )
        return own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        route, kinds = ctx.layer.route, ctx.layer.messages.sent
        came = ctx.layer.tokens(kinds, ctx.journey.delivery)
        indices = [route.queries_out] + [route.keys_out] * (len(grads) - 1)
        counts = [kinds[1].counts] + [kinds[0].counts] * (len(grads) - 1)
        return None, None, *map(_with_those_that_came, grads, indices, came, counts)


class _Arrive(torch.autograd.Function):
    """Waits for the tokens of other ranks. Backward: sends their gradients home.

    Tensors of this rank pass through: so the gradients depart on every rank, even if nothing came here that is read.
    """

    @staticmethod
    def forward(ctx: Any, layer: _Layer, journey: _Journey, *through: Tensor) -> Tokens:
        ctx.layer, ctx.journey, ctx.number = layer, journey, len(through)
        return *through, *layer.tokens(layer.messages.sent_here, journey.delivery)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        messages = ctx.layer.messages
        came = grads[ctx.number :]
        ctx.journey.delivery = ctx.layer.send_tokens(messages.sent_here, came, messages.sent)
        return None, None, *grads[: ctx.number]


class _Settle(torch.autograd.Function):
    """Makes partial results whole: sends those of visitors home, and merges and spreads those of everyone's queries."""

    @staticmethod
    def forward(ctx: Any, layer: _Layer, out: Tensor, lse: Tensor, *visited: Tensor) -> Attended:
        whole = Attended(out, lse)
        travelled, everyones = layer.returned(whole, visited)
        if any(ctx.needs_input_grad):  # otherwise results are written over their parts
            whole = Attended(out.clone(), lse.clone())
        if travelled:
            _place(whole, layer.route.travellers, merge_partials(*travelled))
        if everyones:
            layer.spread(whole, merge_partials(*everyones))
        ctx.layer, ctx.has_visitors, ctx.num_travelled = layer, bool(visited), len(travelled)
        ctx.save_for_backward(*travelled, *everyones)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        layer, route, row = ctx.layer, ctx.layer.route, ctx.layer.shapes.result
        grads = Attended(grad_out.clone(), grad_lse.clone())
        rows = [row.empty(0, grad_out.device), row.empty(0, grad_out.device)]
        saved = ctx.saved_tensors  # asked for once: checkpointing allows no more
        if ctx.num_travelled:
            of_travellers = [grad.index_select(2, route.travellers) for grad in grads]
            rows[0] = row.filled(_flat(_unmerged(saved[:2], of_travellers)), route.returned)
        if len(saved) > ctx.num_travelled:
            rows[1] = row.filled(_flat(_unmerged(saved[-2:], layer.gathered(grads))))
        outgoing, incoming = layer.messages.returned_here, layer.messages.returned
        visit_rows, part_rows = unpacked(incoming, layer.send(outgoing, rows, incoming).wait())
        if len(part_rows):
            layer.place_everyones(grads, row.tensors(part_rows))
        before = sum(incoming[0].counts[: route.rank])
        after = before + len(route.travellers)
        if len(route.travellers):
            _place(grads, route.travellers, row.tensors(visit_rows[before:after]))
        visitors = torch.cat([visit_rows[:before], visit_rows[after:]])
        return None, *grads, *(row.tensors(visitors) if ctx.has_visitors else ())


class _Merge(torch.autograd.Function):
    """Merges results `[parts, B, H, N, ...]` of the same queries over different keys."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor) -> Attended:
        ctx.save_for_backward(out, lse)
        return merge_partials(out, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(_unmerged(ctx.saved_tensors, grads))


class _Put(torch.autograd.Function):
    """Puts the tokens of several tensors behind each other, in slots."""

    @staticmethod
    def forward(ctx: Any, slots: Slots, *parts: Tensor) -> Tensor:
        ctx.slots, ctx.lengths = slots, [part.shape[2] for part in parts]
        return slots.enter(_joined(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.slots.leave(grad).split(ctx.lengths, dim=2)


# -- pieces ------------------------------------------------------------------------------------------------------------


def _put(slots: Slots, parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1 and slots.tokens is None:
        return parts[0]
    whole: Tensor = _Put.apply(slots, *parts)  # type: ignore[no-untyped-call]
    return whole


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors behind each other, `[B, H, tokens, ...]`."""
    if len(parts) == 1:
        return parts[0]
    lengths = [part.shape[2] for part in parts]
    first = parts[0]
    whole = first.new_empty(*first.shape[:2], sum(lengths), *first.shape[3:])
    for into, part in zip(whole.split(lengths, dim=2), parts, strict=True):
        select(part, None, into)
    return whole


def _hiding_holes(slots: Slots, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias of the keys in their slots; nobody reads a hole."""
    if slots.holes is None:
        return bias
    hidden = torch.zeros(slots.length, dtype=dtype, device=slots.holes.device)
    hidden.masked_fill_(slots.holes, float("-inf"))
    return hidden if bias is None else bias + hidden


def _unmerged(parts: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of results `[parts, ...]` that were merged."""
    part = Attended(*parts)
    found = gradients_of_part(Attended(*grads), part, merge_partials(*part))
    return [found.out.to(part.out.dtype), found.lse]


def _stacked(x: Tensor, num_ranks: int) -> Tensor:
    """`[B, H, ranks * tokens, ...]` as `[ranks, B, H, tokens, ...]`."""
    shape = *x.shape[:2], num_ranks, x.shape[2] // num_ranks, *x.shape[3:]
    return x.view(shape).movedim(2, 0)


def _flat(parts: Sequence[Tensor]) -> list[Tensor]:
    """`[ranks, B, H, tokens, ...]` as `[B, H, ranks * tokens, ...]`."""
    return [part.movedim(0, 2).flatten(2, 3) for part in parts]


def _place(whole: Attended, index: Tensor, parts: Sequence[Tensor]) -> None:
    for into, part in zip(whole, parts, strict=True):
        into.index_copy_(2, index, part)


def _with_those_that_came(grad: Tensor, index: Tensor, came: Tensor, counts: Sequence[int]) -> Tensor:
    """A gradient and its parts from each rank, added one after another in single precision at least.

    No part has an index twice, so no two additions meet, on whatever device.
    """
    if not len(index):
        return grad
    total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    for places, part in zip(index.split(list(counts)), came.split(list(counts), dim=2), strict=True):
        total.index_add_(2, places, part.to(total.dtype))
    return total.to(grad.dtype)
