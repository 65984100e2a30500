"""The CPU path: query blocks that read the same keys are read together, as ordinary dense attention.

Two ways to group, by whose lists the plan holds:

- One set of lists for all heads (layout plans): the query blocks with one list form a group, and one call reads its
  keys in every head. Keys that lie side by side are read in place, others are copied together once.
- A set of lists per head (chosen plans): the blocks that read equally many keys are stacked and read in one call.

Several parts of one softmax are read together where each has one set of lists: a group's keys are those of all parts.

Nothing is padded: ragged blocks are trimmed, so a mask exists only where `key_bias` or `positions` ask for one.
The backward walks the same groups in the same order, so its sums are bit-equal from run to run.

Inside a group the shapes are query `[g, r, n, D]` and key `[g, 1, m, D]`: the r query heads of one key head share it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._types import Attended, Gradients, Positions
from nearfield.ops.attention.parts import KeyValuePart, PartGradients, differentiate_in_turn
from nearfield.ops.lists.runs import as_runs, runs_of_rows
from nearfield.plan import Plan, Runs

# Copied keys and weights are made in pieces of about this size per thread: the allocator then hands out the same
# memory, still cached, again and again. Fresh pages cost more than the copy.
_PIECE_BYTES = 2 * 2**20

# Fewer queries than this at a time, and the keys are loaded too often.
_LEAST_QUERIES = 64

# From this many separate runs of keys on, one gather by index is cheaper than a copy per run.
_MANY_RUNS = 16


def attend_forward(query: Tensor, part: KeyValuePart, scale: float) -> Attended:
    out, lse = torch.zeros_like(query), _empty_lse(query)
    for group in _groups(query, part):
        group_out, group_lse = _read(group.take(query, part), scale)
        group.put(out, group_out)
        group.put(lse, group_lse)
    return Attended(out, lse)


def attend_parts_forward(query: Tensor, parts: Sequence[KeyValuePart], scale: float) -> Attended | None:
    """All parts in one pass; None where a part has more than one set of lists, or rows or heads of another size."""
    keys, values, plans, biases, _ = zip(*parts, strict=True)
    sizes = {
        (plan.blocks.shape[:2], plan.q_block, key.shape[1]) for key, plan in zip(keys, plans, strict=True)
    }
    if len(sizes) > 1 or plans[0].blocks.shape[:2] != (1, 1):
        return None
    out, lse = torch.zeros_like(query), _empty_lse(query)
    if query.numel() == 0:
        return Attended(out, lse)
    stores = _Store(), _Store()
    rows_of: dict[tuple[Runs, ...], list[int]] = {}
    for row, runs in enumerate(zip(*(runs_of_rows(plan, 0) for plan in plans), strict=True)):
        rows_of.setdefault(runs, []).append(row)
    for runs, rows in rows_of.items():
        if any(runs):
            queries = as_runs(rows, plans[0].q_block, plans[0].num_queries)
            group = _SharedRows(slice(None), queries, (), keys[0].shape[1], stores)
            key, value = (
                store.gather(tensors, runs).flatten(0, 1)[:, None]
                for store, tensors in zip(stores, (keys, values), strict=True)
            )
            part = _Part(group.take_queries(query), key, value, group.join_biases(biases, runs, query), None)
            group_out, group_lse = _read(part, scale)
            group.put(out, group_out)
            group.put(lse, group_lse)
    return Attended(out, lse)


def attend_backward(
    grads: Attended,
    query: Tensor,
    parts: Sequence[KeyValuePart],
    attended: Attended,
    scale: float,
    learned: Sequence[bool],
    pooling: object = None,
) -> PartGradients:
    del learned, pooling  # every bias gets its gradient, and means theirs
    return differentiate_in_turn(grads, query, parts, attended, scale, attend_forward, _backward_of_part)


def _backward_of_part(
    grads: Attended, query: Tensor, part: KeyValuePart, attended: Attended, scale: float
) -> Gradients:
    grad_out, grad_lse = grads
    key, value, _, key_bias, _ = part
    lse = attended.lse
    # The log of nothing has no gradient; merging two of them by lse gives NaN, which must not spread.
    nothing = lse == -torch.inf
    known = _Known(grad_out, nothing, grad_lse.masked_fill(nothing, 0))
    grad_query = torch.zeros_like(query)
    grad_key, grad_value = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (key, value))
    grad_bias = None if key_bias is None else lse.new_zeros(key_bias.shape)
    for group in _groups(query, part):
        taken = group.take(query, part)
        gradients = _differentiate(taken, _Known(*map(group.take_queries, known)), scale)
        group.put(grad_query, gradients.query)
        group.add_to_keys(grad_key, gradients.key)
        group.add_to_keys(grad_value, gradients.value)
        if grad_bias is not None and gradients.key_bias is not None:
            group.add_to_bias(grad_bias, gradients.key_bias)
    return Gradients(
        grad_query,
        torch.empty_like(key).copy_(grad_key),
        torch.empty_like(value).copy_(grad_value),
        grad_bias,
    )


# -- groups ------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What one group reads: `[g, r, n, D]`, twice `[g, 1, m, D]`, `[g, r, 1, m]`, `[1, n]` and `[1, m]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    positions: Positions | None


class _Known(NamedTuple):
    """What the backward knows of each query: the gradients that reach it, and whether it read nothing."""

    grad_out: Tensor
    nothing: Tensor
    grad_lse: Tensor


class _SharedRows(NamedTuple):
    """The rows of one list, in all heads of some batches."""

    batches: slice
    queries: Runs
    keys: Runs
    key_heads: int
    stores: "tuple[_Store, _Store]"

    def take(self, query: Tensor, part: KeyValuePart) -> _Part:
        key, value, _, key_bias, positions = part
        key, value = (
            store.gather([x[self.batches]], [self.keys]).flatten(0, 1)[:, None]
            for store, x in zip(self.stores, (key, value), strict=True)
        )
        bias = None
        if key_bias is not None:
            bias = self._by_key_head(_pick(key_bias[self.batches], self.keys, 2)[:, :, None])
        if positions is not None:
            where = self.batches if len(positions.query) > 1 else slice(None)
            seen = _pick(positions.query[where], self.queries, 1)
            where = self.batches if len(positions.key) > 1 else slice(None)
            positions = Positions(seen, _pick(positions.key[where], self.keys, 1))
        return _Part(self.take_queries(query), key, value, bias, positions)

    def join_biases(
        self, biases: Sequence[Tensor | None], runs: Sequence[Runs], query: Tensor
    ) -> Tensor | None:
        """What is added to the logits of the keys of several parts, 0 where a part has no bias; None if none has."""
        known = next(
            (bias for bias, some in zip(biases, runs, strict=True) if some and bias is not None), None
        )
        if known is None:
            return None
        shape = query.shape[:2]
        joined = [
            known.new_zeros(*shape, sum(stop - start for start, stop in some))
            if bias is None
            else _pick(bias, some, 2).expand(*shape, -1)
            for bias, some in zip(biases, runs, strict=True)
            if some
        ]
        return self._by_key_head(torch.cat(joined, 2)[:, :, None])

    def take_queries(self, x: Tensor) -> Tensor:
        return self._by_key_head(_pick(x[self.batches], self.queries, 2))

    def put(self, x: Tensor, values: Tensor) -> None:
        target = x[self.batches]
        values = values.reshape(*target.shape[:2], *values.shape[2:])
        done = 0
        for start, stop in self.queries:
            target[:, :, start:stop] = values[:, :, done : done + stop - start]
            done += stop - start

    def add_to_keys(self, x: Tensor, values: Tensor) -> None:
        _add(x[self.batches], self.keys, values.reshape(-1, x.shape[1], *values.shape[2:]))

    def add_to_bias(self, x: Tensor, values: Tensor) -> None:
        self.add_to_keys(x, values)

    def _by_key_head(self, x: Tensor) -> Tensor:
        repeats = x.shape[1] // self.key_heads
        return x.reshape(-1, repeats, *x.shape[2:])


class _Store:
    """Where one group after another finds its keys side by side. What the next group reads too stays in place."""

    def __init__(self) -> None:
        self.memory = torch.empty(0)
        self.content: set[tuple[int, tuple[int, int], int]] = set()

    def gather(self, tensors: Sequence[Tensor], runs: Sequence[Runs]) -> Tensor:
        """The tokens of some runs of each of `tensors` (`[.., .., tokens, D]`): a view where they are one run."""
        number = sum(map(len, runs))
        if number == 1:
            return next(x[:, :, slice(*some[0])] for x, some in zip(tensors, runs, strict=True) if some)
        if number >= _MANY_RUNS:
            return torch.cat([_pick(x, some, 2) for x, some in zip(tensors, runs, strict=True) if some], 2)
        pieces = [(source, run) for source, some in enumerate(runs) for run in some]
        ends = list(accumulate(stop - start for _, (start, stop) in pieces))
        x = tensors[0]
        if self.memory.dim() != 4 or self.memory.shape[2] < ends[-1]:
            self.memory, self.content = x.new_empty(*x.shape[:2], ends[-1], x.shape[3]), set()
        wanted = {(*piece, end) for piece, end in zip(pieces, ends, strict=True)}
        for source, (start, stop), end in sorted(wanted - self.content):
            self.memory[:, :, end - (stop - start) : end] = tensors[source][:, :, start:stop]
        self.content = wanted
        return self.memory[:, :, : ends[-1]]


class _StackedRows(NamedTuple):
    """Rows of one batch that read equally many keys: `[g]` heads and key heads, `[g, n]` queries, `[g, m]` keys."""

    batch: int
    heads: Tensor
    key_heads: Tensor
    queries: Tensor
    keys: Tensor

    def take(self, query: Tensor, part: KeyValuePart) -> _Part:
        key, value, _, key_bias, positions = part
        key, value = (_take_rows(x[self.batch], self.key_heads, self.keys)[:, None] for x in (key, value))
        bias = None
        if key_bias is not None:
            bias = key_bias[self.batch][self.heads[:, None], self.keys][:, None, None]
        if positions is not None:
            seen = positions.query[min(self.batch, len(positions.query) - 1)][self.queries]
            positions = Positions(seen, positions.key[min(self.batch, len(positions.key) - 1)][self.keys])
        return _Part(self.take_queries(query), key, value, bias, positions)

    def take_queries(self, x: Tensor) -> Tensor:
        return _take_rows(x[self.batch], self.heads, self.queries)[:, None]

    def put(self, x: Tensor, values: Tensor) -> None:
        x[self.batch][self.heads[:, None], self.queries] = values[:, 0].to(x.dtype)

    def add_to_keys(self, x: Tensor, values: Tensor) -> None:
        _add_rows(x[self.batch], self.key_heads, self.keys, values[:, 0])

    def add_to_bias(self, x: Tensor, values: Tensor) -> None:
        _add_rows(x[self.batch], self.heads, self.keys, values[:, 0])


def _groups(query: Tensor, part: KeyValuePart) -> Iterator[_SharedRows | _StackedRows]:
    """Every row that reads anything, once."""
    key, _, plan, _, positions = part
    if query.numel() == 0:
        return
    batch = query.shape[0]
    list_batches, list_heads = plan.blocks.shape[:2]
    one_mask = positions is None or len(positions.query) == len(positions.key) == 1
    if list_heads > 1:
        for index in range(batch):
            yield from _stacked_rows(plan, min(index, list_batches - 1), index, query, key)
    elif list_batches == 1 and one_mask:
        yield from _shared_rows(plan, 0, slice(None), key.shape[1])
    else:
        for index in range(batch):
            yield from _shared_rows(plan, min(index, list_batches - 1), slice(index, index + 1), key.shape[1])


def _shared_rows(plan: Plan, list_batch: int, batches: slice, key_heads: int) -> Iterator[_SharedRows]:
    stores = _Store(), _Store()
    rows_of: dict[Runs, list[int]] = {}
    for row, runs in enumerate(runs_of_rows(plan, list_batch)):
        rows_of.setdefault(runs, []).append(row)
    for runs, rows in rows_of.items():
        if runs:
            queries = as_runs(rows, plan.q_block, plan.num_queries)
            yield _SharedRows(batches, queries, runs, key_heads, stores)


def _stacked_rows(
    plan: Plan, list_batch: int, batch: int, query: Tensor, key: Tensor
) -> Iterator[_StackedRows]:
    offsets, blocks = plan.offsets[list_batch].long(), plan.blocks[list_batch].long()
    kinds, num_ragged = _row_kinds(plan, offsets, blocks)
    ordered, members = torch.sort(kinds.flatten(), stable=True)
    _, sizes = torch.unique_consecutive(ordered, return_counts=True)
    for ids in members.split(sizes.tolist()):
        heads, rows = ids // plan.num_rows, ids % plan.num_rows
        head, row = int(heads[0]), int(rows[0])
        first = offsets[heads, rows]
        count = int(offsets[head, row + 1] - first[0])
        if count == 0:
            continue
        slots = _slots(plan, count, int(num_ragged[head, row]), query.device)
        num_queries = min(plan.q_block, plan.num_queries - row * plan.q_block)
        piece = _fitting(len(ids), 2 * len(slots) * key.shape[3] * key.element_size())
        for some in torch.arange(len(ids), device=query.device).split(piece):
            entries = blocks[heads[some, None], first[some, None] + slots // plan.k_block]
            yield _StackedRows(
                batch,
                heads[some],
                heads[some] // (query.shape[1] // key.shape[1]),
                rows[some, None] * plan.q_block + torch.arange(num_queries, device=query.device),
                entries * plan.k_block + slots % plan.k_block,
            )


def _row_kinds(plan: Plan, offsets: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """`[h, rows]` numbers that are equal for rows of equal shape, and how often each row reads a ragged last block."""
    counts = offsets[:, 1:] - offsets[:, :-1]
    num_ragged = torch.zeros_like(counts)
    if plan.num_keys % plan.k_block:
        passed = torch.nn.functional.pad((blocks == plan.num_columns - 1).long().cumsum(-1), (1, 0))
        num_ragged = passed.gather(-1, offsets[:, 1:]) - passed.gather(-1, offsets[:, :-1])
    kinds = counts * (blocks.shape[-1] + 1) + num_ragged
    kinds = kinds * 2
    if plan.num_queries % plan.q_block:
        kinds[:, -1] += 1
    return kinds, num_ragged


def _slots(plan: Plan, count: int, num_ragged: int, device: torch.device) -> Tensor:
    """Which of the `count * k_block` key slots of a row hold a key; ids ascend, so ragged blocks come last."""
    slots = torch.arange(count * plan.k_block, device=device)
    if num_ragged == 0:
        return slots
    in_ragged = slots // plan.k_block >= count - num_ragged
    return slots[~in_ragged | (slots % plan.k_block < plan.num_keys % plan.k_block)]


def _pick(x: Tensor, runs: Runs, dim: int) -> Tensor:
    """The tokens of `runs` along `dim`: a view where they are one run."""
    if len(runs) < _MANY_RUNS:
        parts = [x.narrow(dim, start, stop - start) for start, stop in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x.index_select(dim, _indices(runs, x.device))


def _add(x: Tensor, runs: Runs, values: Tensor) -> None:
    """Add to the tokens of `runs` along dimension 2, in their order."""
    if len(runs) >= _MANY_RUNS:
        _add_at(x.movedim(2, 0), _indices(runs, x.device), values.movedim(2, 0))
        return
    done = 0
    for start, stop in runs:
        x[:, :, start:stop] += values[:, :, done : done + stop - start]
        done += stop - start


def _take_rows(x: Tensor, heads: Tensor, tokens: Tensor) -> Tensor:
    """`x[heads[g], tokens[g, m]]`. Whole rows are copied several times faster by index_select than by indexing."""
    if x.dim() == 2:
        return x[heads[:, None], tokens]
    if not x.is_contiguous() and x.transpose(0, 1).is_contiguous():
        rows = tokens * x.shape[0] + heads[:, None]
        x = x.transpose(0, 1)
    else:
        rows = heads[:, None] * x.shape[1] + tokens
    return x.reshape(-1, x.shape[2]).index_select(0, rows.flatten()).view(*tokens.shape, -1)


def _add_rows(x: Tensor, heads: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add `values[g, m]` to `x[heads[g], tokens[g, m]]`, in order; `x` is contiguous."""
    rows = heads[:, None] * x.shape[1] + tokens
    _add_at(x.flatten(0, 1), rows.flatten(), values.flatten(0, 1))


def _add_at(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add to rows that may repeat, in a fixed order: index_add_ keeps one on the CPU, index_put_ on the GPU."""
    if x.device.type == "cpu":
        x.index_add_(0, rows, values)
    else:
        x.index_put_((rows,), values, accumulate=True)


def _indices(runs: Runs, device: torch.device) -> Tensor:
    starts, stops = torch.tensor(runs, device=device).unbind(1)
    lengths = stops - starts
    # Counting on from 0, each run is as far ahead of the count as its start is past the runs before it.
    ahead = starts - (lengths.cumsum(0) - lengths)
    return ahead.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=device)


# -- reading -----------------------------------------------------------------------------------------------------


def _read(part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of one group. A mask, or the weights where they are made at all, come in pieces of queries."""
    read = _read_fused if part.query.device.type == "cpu" else _read_plainly
    num_heads, repeats, num_queries = part.query.shape[:3]
    piece = num_queries
    if part.positions is not None or read is _read_plainly:
        # A mask of positions is the same for all heads; weights are not, nor is a bias.
        is_shared = read is _read_fused and part.bias is None
        copies = 1 if is_shared else num_heads * repeats
        piece = _fitting(num_queries, 4 * copies * part.key.shape[2], _LEAST_QUERIES)
    results = [
        read(part.query[:, :, start : start + piece], part.key, part.value, mask, scale)
        for start, mask in _masks(part, piece)
    ]
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)


def _read_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    # The operator takes an inner stride of 1 for granted.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    repeats, num_queries = query.shape[1:3]
    shown = mask
    if mask is None or mask.shape[1] == 1:
        # The query heads of a key head as more queries of it: the operator works in larger tiles.
        query = query.flatten(1, 2)[:, None]
        shown = None if mask is None else mask.repeat(1, 1, repeats, 1) if mask.shape[2] > 1 else mask
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    # Not every release broadcasts masks; all of them follow strides of zero.
    shown = None if shown is None else shown.expand(*query.shape[:3], key.shape[2])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=shown, scale=scale
    )
    out, lse = (x.reshape(-1, repeats, num_queries, *x.shape[3:]) for x in (out, lse))
    # Where everything is masked the operator gives lse = 0, or what is no number: only then is the mask looked at.
    if mask is None or bool((lse.isfinite() & (lse != 0)).all()):
        return out, lse
    empty = (mask == -torch.inf).all(-1)
    return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)


def _read_plainly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    logits = scale * (_wide(query) @ _wide(key).mT)
    if mask is not None:
        logits += mask
    lse = torch.logsumexp(logits, -1)
    weights = torch.softmax(logits, -1)
    if mask is not None:
        weights.masked_fill_((lse == -torch.inf)[..., None], 0)
    return weights @ _wide(value), lse


def _masks(part: _Part, piece: int) -> Iterator[tuple[int, Tensor | None]]:
    """For each piece of queries its start and what is added to its logits, broadcastable to `[g, r, piece, m]`."""
    for start in range(0, part.query.shape[2], piece):
        mask = part.bias
        if part.positions is not None:
            seen = part.positions.query[:, None, start : start + piece, None]
            hidden = part.positions.key[:, None, None, :] > seen
            zeros = _wide(part.query).new_zeros(()) if mask is None else mask
            mask = torch.where(hidden, -torch.inf, zeros)
        yield start, mask


def _differentiate(part: _Part, known: _Known, scale: float) -> Gradients:
    """Gradients of one group (`[g, r, n, D]`, twice `[g, 1, m, D]`, `[g, r, m]`), in pieces of heads and queries."""
    grad_query = torch.empty_like(part.query)
    grad_key, grad_value = (torch.zeros_like(x, dtype=known.grad_lse.dtype) for x in (part.key, part.value))
    grad_bias = None
    if part.bias is not None:
        grad_bias = known.grad_lse.new_zeros(*part.query.shape[:2], part.key.shape[2])
    num_heads, repeats, num_queries = part.query.shape[:3]
    piece = _fitting(num_queries, 4 * repeats * part.key.shape[2], _LEAST_QUERIES)
    heads_piece = _fitting(num_heads, 4 * repeats * piece * part.key.shape[2])
    for start, mask in _masks(part, piece):
        for head in range(0, num_heads, heads_piece):
            some = slice(head, head + heads_piece), slice(None), slice(start, start + piece)
            _differentiate_piece(
                part.query[some],
                part.key[some[0], 0],
                part.value[some[0], 0],
                None if mask is None else mask[some[0]] if len(mask) > 1 else mask,
                _Known(*(x[some] for x in known)),
                scale,
                Gradients(
                    grad_query[some],
                    grad_key[some[0], 0],
                    grad_value[some[0], 0],
                    None if grad_bias is None else grad_bias[some[0]],
                ),
            )
    return Gradients(grad_query, grad_key, grad_value, grad_bias)


def _differentiate_piece(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    known: _Known,
    scale: float,
    into: Gradients,
) -> None:
    """Set the query gradient and add to the others. Query heads of one key head are folded into its queries."""
    key, value = _wide(key), _wide(value)
    folded_query = (_wide(query) * scale).flatten(1, 2)
    grad_out = _wide(known.grad_out).flatten(1, 2)
    logits = folded_query @ key.mT
    if mask is not None:
        logits.view(*query.shape[:3], -1).add_(mask)
    # Not exp(logits - lse): a rounded lse would be wrong by the same factor for all keys of a query.
    weights = torch.softmax(logits, -1)
    if mask is not None:
        weights.masked_fill_(known.nothing.flatten(1, 2)[..., None], 0)
    into.value.baddbmm_(weights.mT, grad_out)
    # Nor the delta of the rounded output: the weights are all here.
    grad_weights = grad_out @ value.mT
    delta = torch.linalg.vecdot(grad_weights, weights) - known.grad_lse.flatten(1, 2)
    grad_logits = grad_weights.sub_(delta[..., None]).mul_(weights)
    into.query.copy_((scale * (grad_logits @ key)).view(query.shape))
    into.key.baddbmm_(grad_logits.mT, folded_query)
    if into.key_bias is not None:
        into.key_bias.add_(grad_logits.view(*query.shape[:3], -1).sum(2))


def _fitting(total: int, bytes_each: int, least: int = 1) -> int:
    """How many of `total` equal things to do at once."""
    return min(total, max(least, _PIECE_BYTES * torch.get_num_threads() // bytes_each))


def _empty_lse(query: Tensor) -> Tensor:
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
