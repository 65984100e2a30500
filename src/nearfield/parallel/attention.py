"""Attention over a sequence that is split over ranks: forward and backward.

Forward: send what others read and let queries travel; attend to the keys that are here and those that came, and let the
queries that came read what is here; send partial results home and merge them by `lse`. Backward: the same ways in the
other direction, and gradients that come home are added in the order of ranks, so that a run repeats bit by bit.

A rank reads all in one call over one plan, when everything is there. Where the link is slow (`Ranks.overlap`), it reads
what is here while the rest travels, and merges.

All of it is one autograd function: its collectives run in one order on every rank, whatever a rank has to send.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nearfield._checks import check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Gradients, Impl
from nearfield.ops import attend as attend_here
from nearfield.ops import attend_continued, merge_attended, merge_partials
from nearfield.ops import gradients as gradients_here
from nearfield.parallel.messages import Kind, Messages, Shapes, message_sizes, packed, select, unpacked
from nearfield.parallel.ranks import Delivery, Ranks
from nearfield.parallel.route import CAME, HERE, Call, Route, Slots


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
    layer = _Layer(route, ranks, _messages(route, shapes), scale, impl)
    if not needs_gradient:
        return layer.forward(query, _Sides(key, value, key_bias), in_place=True)[0]
    out, lse = _Attend.apply(layer, query, key, value, key_bias)  # type: ignore[no-untyped-call]
    return Attended(out, lse)


def _messages(route: Route, shapes: Shapes) -> Messages:
    if shapes not in route.kept:
        route.kept[shapes] = Messages(route.traffic, shapes, route.rank)
    messages: Messages = route.kept[shapes]
    return messages


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


class _Partial(NamedTuple):
    """Results of some queries on all ranks, `[ranks, B, H, tokens, ...]`, which are merged here."""

    out: Tensor
    lse: Tensor

    def merged(self) -> Attended:
        """As one, in the precision of `lse`."""
        return merge_partials(self.out, self.lse)


class _Kept(NamedTuple):
    """What the backward pass needs.

    Args:
        queries, keys: those that are here, and those that came.
        parts: results of each call.
        travelled, everyones: results of queries that have been elsewhere, and of everyone's that are merged here.
    """

    queries: list[Tensor | None]
    keys: list[_Sides | None]
    parts: list[Attended]
    travelled: _Partial | None
    everyones: _Partial | None


class _Layer(NamedTuple):
    route: Route
    ranks: Ranks
    messages: Messages
    scale: float | None
    impl: Impl

    @property
    def shapes(self) -> Shapes:
        return self.messages.shapes

    @property
    def calls(self) -> tuple[Call, ...]:
        return self.route.apart if self.ranks.overlap else (self.route.joined,)

    def _send(self, outgoing: list[Kind], rows: Sequence[Tensor], incoming: list[Kind]) -> Delivery:
        return self.ranks.send(packed(outgoing, rows), message_sizes(outgoing), message_sizes(incoming))

    # -- forward -------------------------------------------------------------------------------------------------

    def forward(self, query: Tensor, own: _Sides, *, in_place: bool) -> tuple[Attended, _Kept]:
        """Results, and what the backward pass needs; unless results are written over it."""
        calls = self.calls
        queries: list[Tensor | None] = [query, None]
        keys: list[_Sides | None] = [own, None]
        delivery = self._send_tokens(query, own)
        parts = [self._attended(calls[0], queries, keys)] if self.ranks.overlap else []
        if delivery is not None:
            queries[CAME], keys[CAME] = self._arrived(delivery)
        parts += [self._attended(call, queries, keys) for call in calls[len(parts) :]]
        whole, visited = self._combined(parts)
        travelled = everyones = None
        if self.route.traffic.has_returns:
            travelled, everyones = self._returned(whole, visited)
            if not in_place:
                whole = Attended(whole.out.clone(), whole.lse.clone())
            if travelled is not None:
                _place(whole, self.route.travellers, travelled.merged())
            if everyones is not None:
                self._spread(whole, everyones.merged())
        return whole, _Kept(queries, keys, parts, travelled, everyones)

    def _send_tokens(self, query: Tensor, own: _Sides) -> Delivery | None:
        route, shapes = self.route, self.shapes
        if not route.traffic.has_journeys:
            return None
        rows = [shapes.key.filled([own.key, own.value], route.keys_out)]
        rows.append(shapes.query.filled([query], route.queries_out))
        if own.bias is not None:
            rows.append(shapes.bias.filled([own.bias], route.keys_out))
        return self._send(self.messages.sent, rows, self.messages.sent_here)

    def _arrived(self, delivery: Delivery) -> tuple[Tensor, _Sides]:
        """Queries and keys that came, where they arrived."""
        key_rows, query_rows, *bias_rows = unpacked(self.messages.sent_here, delivery.wait())
        key, value = self.shapes.key.tensors(key_rows)
        (query,) = self.shapes.query.tensors(query_rows)
        (bias,) = self.shapes.bias.tensors(bias_rows[0]) if bias_rows else (None,)
        return query, _Sides(key, value, bias)

    def _attended(
        self, call: Call, queries: Sequence[Tensor | None], keys: Sequence[_Sides | None]
    ) -> Attended:
        query = _entered(call.queries, [queries[group] for group in call.query_groups])
        sides = [keys[group] for group in call.key_groups]
        out, lse = self._continued(call, query, sides) or self._at_once(call, query, sides)
        return Attended(call.queries.leave(out), call.queries.leave(lse))

    def _continued(self, call: Call, query: Tensor, sides: Sequence[Any]) -> Attended | None:
        """Over keys that are here and keys that came, both where they are, if these are whole blocks."""
        if len(sides) == 1 or call.keys.tokens is not None:
            return None
        here, came = sides
        bias = None if here.bias is None else _joined([here.bias, came.bias])
        more = came.key, came.value
        return attend_continued(
            query, here.key, here.value, more, call.plan, key_bias=bias, scale=self.scale, impl=self.impl
        )

    def _at_once(self, call: Call, query: Tensor, sides: Sequence[Any]) -> Attended:
        """Over keys that are put together in their slots, where there are several or slots."""
        key, value, bias = (_entered(call.keys, parts) for parts in _turned(sides))
        bias = _hiding_holes(call.keys, bias, self.shapes.lse_dtype)
        return attend_here(query, key, value, call.plan, key_bias=bias, scale=self.scale, impl=self.impl)

    def _combined(self, parts: Sequence[Attended]) -> tuple[Attended, Attended | None]:
        """Results of the queries that are here, and of those that came."""
        found: list[list[Attended]] = [[], []]
        for call, part in zip(self.calls, parts, strict=True):
            for group, some in zip(call.query_groups, self._by_group(call, part), strict=True):
                found[group].append(some)
        return reduce(merge_attended, found[HERE]), found[CAME][0] if found[CAME] else None

    def _by_group(self, call: Call, part: Attended) -> list[Attended]:
        if len(call.query_groups) == 1:
            return [part]
        held = self.route.num_queries
        return [
            Attended(part.out[:, :, some], part.lse[:, :, some]) for some in (slice(held), slice(held, None))
        ]

    def _returned(self, whole: Attended, visited: Attended | None) -> tuple[_Partial | None, _Partial | None]:
        """Send visitors' results home, and those of everyone's queries to where each part is merged."""
        route, row = self.route, self.shapes.result
        outgoing, incoming = self.messages.returned, self.messages.returned_here
        travellers = row.filled(whole, route.travellers)
        if visited is not None:
            visits = row.filled(visited)
            before = sum(outgoing[0].counts[: route.rank])
            travellers = torch.cat([visits[:before], travellers, visits[before:]])
        rows = [travellers, row.filled(*self._everyones_of(whole))]
        visit_rows, part_rows = unpacked(incoming, self._send(outgoing, rows, incoming).wait())
        travelled = everyones = None
        if len(visit_rows):
            travelled = self._travelled(*row.tensors(visit_rows))
        if route.traffic.has_everyones:  # though none of them may be merged here
            everyones = _Partial(*(_stacked(part, route.num_ranks) for part in row.tensors(part_rows)))
        return travelled, everyones

    def _everyones_of(self, whole: Attended) -> tuple[Sequence[Tensor], Tensor | None]:
        """Where everyone's queries are, as `Row.filled` wants to know it."""
        span = self.route.everyones_span
        if span is None:
            return whole, self.route.everyones
        return [part[:, :, slice(*span)] for part in whole], None

    def _travelled(self, out: Tensor, lse: Tensor) -> _Partial:
        """Results of travellers from each rank, with nothing from where they have not been."""
        route = self.route
        places = route.num_ranks * len(route.travellers)
        wide_out = out.new_zeros(*out.shape[:2], places, out.shape[3]).index_copy_(2, route.returned, out)
        wide_lse = lse.new_full((*lse.shape[:2], places), float("-inf")).index_copy_(2, route.returned, lse)
        return _Partial(_stacked(wide_out, route.num_ranks), _stacked(wide_lse, route.num_ranks))

    def _spread(self, whole: Attended, mine: Attended) -> None:
        """Every rank gets all of everyone's results, each part from where it was merged."""
        row, outgoing, incoming = self.shapes.result, self.messages.spread, self.messages.spread_here
        rows = row.empty(sum(outgoing[0].counts), mine.out.device)
        for copies, part in zip(row.tensors(rows), mine, strict=True):
            copies = _stacked(copies, self.route.num_ranks)
            select(part.expand_as(copies), None, copies)
        (came,) = unpacked(incoming, self._send(outgoing, [rows], incoming).wait())
        self._place_everyones(whole, row.tensors(came))

    def _place_everyones(self, whole: Attended, parts: Sequence[Tensor]) -> None:
        span = self.route.everyones_span
        if span is None:
            _place(whole, self.route.everyones, parts)
            return
        for into, part in zip(whole, parts, strict=True):
            select(part, None, into[:, :, slice(*span)])

    # -- backward ------------------------------------------------------------------------------------------------

    def backward(self, grads: Attended, kept: _Kept) -> tuple[Tensor, _Sides]:
        """Gradients of the queries and keys that are here."""
        route, calls = self.route, self.calls
        visitor_grads = None
        if route.traffic.has_returns:
            grads, visitor_grads = self._unmerged(grads, kept)
        part_grads = self._uncombined(grads, visitor_grads, kept.parts)
        found = _Found([None, None], [None, None])
        # Those that travel home first, so that they travel while the others are computed.
        numbers = [*range(1, len(calls)), 0]
        delivery = None
        for number in numbers:
            if number == 0 and self.ranks.overlap:
                delivery = self._send_gradients(found)
            self._gradients(calls[number], part_grads[number], kept, kept.parts[number], found)
        if not self.ranks.overlap:
            delivery = self._send_gradients(found)
        query_grad, side_grads = found.queries[HERE], found.keys[HERE]
        assert query_grad is not None
        assert side_grads is not None
        return (query_grad, side_grads) if delivery is None else self._home(query_grad, side_grads, delivery)

    def _unmerged(self, grads: Attended, kept: _Kept) -> tuple[Attended, Attended | None]:
        """Gradients of this rank's own partial results, and of those of the queries that came."""
        route, row = self.route, self.shapes.result
        grads = Attended(grads.out.clone(), grads.lse.clone())
        rows = [row.empty(0, grads.out.device), row.empty(0, grads.out.device)]
        if kept.travelled is not None:
            of_travellers = Attended(*(grad.index_select(2, route.travellers) for grad in grads))
            partial = _partial_gradients(kept.travelled, kept.travelled.merged(), of_travellers)
            rows[0] = row.filled([part.movedim(0, 2).flatten(2, 3) for part in partial], route.returned)
        if kept.everyones is not None:
            total = self._everyones_total(grads)
            partial = _partial_gradients(kept.everyones, kept.everyones.merged(), total)
            rows[1] = row.filled([part.movedim(0, 2).flatten(2, 3) for part in partial])
        outgoing, incoming = self.messages.returned_here, self.messages.returned
        visit_rows, part_rows = unpacked(incoming, self._send(outgoing, rows, incoming).wait())
        if len(part_rows):
            self._place_everyones(grads, row.tensors(part_rows))
        before = sum(incoming[0].counts[: route.rank])
        mine = slice(before, before + len(route.travellers))
        if len(route.travellers):
            _place(grads, route.travellers, row.tensors(visit_rows[mine]))
        if CAME not in route.joined.query_groups:
            return grads, None
        visitors = torch.cat([visit_rows[: mine.start], visit_rows[mine.stop :]])
        return grads, Attended(*row.tensors(visitors))

    def _everyones_total(self, grads: Attended) -> Attended:
        """Gradients of everyone's results that were merged here: the sum over ranks."""
        row, outgoing, incoming = self.shapes.result, self.messages.spread_here, self.messages.spread
        rows = [row.filled(*self._everyones_of(grads))]
        (came,) = unpacked(incoming, self._send(outgoing, rows, incoming).wait())
        out, lse = (_stacked(part, self.route.num_ranks) for part in row.tensors(came))
        return Attended(out.sum(dim=0, dtype=lse.dtype), lse.sum(dim=0))

    def _uncombined(
        self, grads: Attended, visitor_grads: Attended | None, parts: Sequence[Attended]
    ) -> list[Attended]:
        """Gradients of each call's results."""
        groups = [grads, visitor_grads]
        if not self.ranks.overlap:
            return [Attended(*map(_joined, _turned(groups)))]
        whole, _ = self._combined(parts)
        found = []
        for call, part in zip(self.calls, parts, strict=True):
            of_group = groups[call.query_groups[0]]
            assert of_group is not None
            is_whole = HERE not in call.query_groups or len(self.calls) == 1
            found.append(of_group if is_whole else _partial_gradients(part, whole, of_group))
        return found

    def _gradients(self, call: Call, grads: Attended, kept: _Kept, part: Attended, found: "_Found") -> None:
        """Add the gradients of one call to those that were found."""
        queries, slots = call.queries, call.keys
        sides = [kept.keys[group] for group in call.key_groups]
        key, value, bias = (_entered(slots, parts) for parts in _turned(sides))
        assert key is not None
        assert value is not None
        grad: Gradients = gradients_here(
            Attended(*(_scattered(queries, of_result) for of_result in grads)),
            _entered(queries, [kept.queries[group] for group in call.query_groups]),
            key,
            value,
            Attended(*(_scattered(queries, result) for result in part)),
            call.plan,
            key_bias=_hiding_holes(slots, bias, self.shapes.lse_dtype),
            scale=self.scale,
            impl=self.impl,
        )
        of_sides = [slots.leave(grad.key), slots.leave(grad.value)]
        if bias is not None and grad.key_bias is not None:
            of_sides.append(slots.leave(grad.key_bias))
        route = self.route
        found.add_queries(call.query_groups, queries.leave(grad.query), route.num_queries)
        found.add_keys(call.key_groups, of_sides, route.num_keys)

    def _send_gradients(self, found: "_Found") -> Delivery | None:
        """Send gradients of what came back to where it came from."""
        shapes, device = self.shapes, self.route.device
        if not self.route.traffic.has_journeys:
            return None
        outgoing, incoming = self.messages.sent_here, self.messages.sent
        rows = [kind.row.empty(0, device) for kind in outgoing]
        sides, queries = found.keys[CAME], found.queries[CAME]
        if sides is not None:
            rows[0] = shapes.key.filled([sides.key, sides.value])
            if sides.bias is not None:
                rows[2] = shapes.bias.filled([sides.bias])
        if queries is not None:
            rows[1] = shapes.query.filled([queries])
        return self._send(outgoing, rows, incoming)

    def _home(self, query_grad: Tensor, sides: _Sides, delivery: Delivery) -> tuple[Tensor, _Sides]:
        """Gradients and what came home of them."""
        kinds, route = self.messages.sent, self.route
        key_rows, query_rows, *bias_rows = unpacked(kinds, delivery.wait())
        came = self.shapes.key.tensors(key_rows)
        if bias_rows:
            came += self.shapes.bias.tensors(bias_rows[0])
        home = [
            _with_those_that_came(grad, route.keys_out, part, kinds[0].counts)
            for grad, part in zip(sides.tensors, came, strict=True)
        ]
        (queries,) = self.shapes.query.tensors(query_rows)
        query_grad = _with_those_that_came(query_grad, route.queries_out, queries, kinds[1].counts)
        return query_grad, _Sides.of(home)


class _Found(NamedTuple):
    """Gradients of what is here and what came, as far as they were computed."""

    queries: list[Tensor | None]
    keys: list[_Sides | None]

    def add_queries(self, groups: tuple[int, ...], grad: Tensor, held: int) -> None:
        for group, part in zip(groups, _apart(grad, groups, held), strict=True):
            before = self.queries[group]
            self.queries[group] = part if before is None else before + part

    def add_keys(self, groups: tuple[int, ...], grads: Sequence[Tensor], held: int) -> None:
        for group, *parts in zip(groups, *(_apart(grad, groups, held) for grad in grads), strict=True):
            before = self.keys[group]
            if before is not None:
                parts = [a + b for a, b in zip(before.tensors, parts, strict=True)]
            self.keys[group] = _Sides.of(parts)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        (out, lse), kept = layer.forward(query, _Sides(key, value, bias), in_place=False)
        ctx.layer = layer
        tensors: list[Tensor] = []
        ctx.frame = _flattened(kept, tensors)
        ctx.save_for_backward(*tensors)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        kept: _Kept = _rebuilt(ctx.frame, ctx.saved_tensors)
        query_grad, sides = ctx.layer.backward(Attended(grad_out, grad_lse), kept)
        return None, query_grad, *sides


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


def _partial_gradients(part: Attended | _Partial, whole: Attended, grads: Attended) -> Attended:
    """Gradients of results that were merged with others: each weighs as much as its `lse` says.

    With w = exp(part.lse - whole.lse): whole.out is the sum of all w * part.out, and lse grows by w for each.
    """
    anchor = whole.lse.masked_fill(whole.lse == float("-inf"), 0)
    weight = torch.exp(part.lse - anchor)
    slope = torch.linalg.vecdot(grads.out.to(weight.dtype), part.out.to(weight.dtype) - whole.out)
    out = (weight.unsqueeze(-1) * grads.out).to(part.out.dtype)
    return Attended(out, weight * (slope + grads.lse))


def _stacked(x: Tensor, num_ranks: int) -> Tensor:
    """`[B, H, ranks * tokens, ...]` as `[ranks, B, H, tokens, ...]`."""
    shape = *x.shape[:2], num_ranks, x.shape[2] // num_ranks, *x.shape[3:]
    return x.view(shape).movedim(2, 0)


def _place(whole: Attended, index: Tensor, parts: Sequence[Tensor]) -> None:
    for into, part in zip(whole, parts, strict=True):
        into.index_copy_(2, index, part)


def _turned(groups: Sequence[Any]) -> list[list[Any]]:
    """Tuples of tensors as one list for each of their tensors."""
    return [list(parts) for parts in zip(*(group for group in groups if group is not None), strict=True)]


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


def _apart(x: Tensor, groups: tuple[int, ...], held: int) -> tuple[Tensor, ...]:
    """What is here, and what came, if there are both."""
    return (x,) if len(groups) == 1 else x.split([held, x.shape[2] - held], dim=2)


def _entered(slots: Slots, parts: Sequence[Any]) -> Any:
    """Tensors behind each other, in slots; None if there are none."""
    return None if parts[0] is None else slots.enter(_joined(parts))


def _hiding_holes(slots: Slots, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The bias of the keys in their slots; nobody reads a hole."""
    if slots.holes is None:
        return bias
    hidden = torch.zeros(slots.length, dtype=dtype, device=slots.holes.device).masked_fill(
        slots.holes, float("-inf")
    )
    return hidden if bias is None else bias + hidden


def _scattered(slots: Slots, x: Tensor) -> Tensor:
    """Into slots, with nothing in the holes: gradients, and results that belong to them."""
    if slots.tokens is None:
        return x
    return x.new_zeros(*x.shape[:2], slots.length, *x.shape[3:]).index_copy_(2, slots.place, x)


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
