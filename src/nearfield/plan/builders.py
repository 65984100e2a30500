"""Builders of plans: from a layout, a mask, scores, or key lists.

Every builder returns lists that are right by construction (ids in range and ascending, unused slots zero), so none
asks `Plan` to check them. `full`, `topk` and, unchecked, `key_lists` never wait for the device. `ring` reads nothing
back from it either, but copies a few numbers per row to it. A compact `from_mask` waits to learn how long its lists
are, `key_lists` to check what it was given.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield._checks import (
    check_int,
    check_same_device,
    check_tensor,
    shape_of,
    wrong_type,
    wrong_value,
)
from nearfield._memo import tensor_cache
from nearfield.plan.plan import Plan, check_block

Span = tuple[int, int]
"""Consecutive tokens, `(start, stop)`; `stop` is the first token after them."""


class _Sizes(NamedTuple):
    """The plan's sizes, in the order in which `Plan` takes them."""

    q_block: int
    k_block: int
    num_queries: int
    num_keys: int

    @property
    def rows(self) -> int:
        return -(-self.num_queries // self.q_block)

    @property
    def columns(self) -> int:
        return -(-self.num_keys // self.k_block)


# -- from a layout -----------------------------------------------------------------------------------------------------


def full(
    num_queries: int,
    num_keys: int | None = None,
    *,
    q_block: int = 128,
    k_block: int = 64,
    device: torch.device | str | None = None,
) -> Plan:
    """Every query reads every key. `num_keys` defaults to `num_queries`; `device` to torch's default device."""
    sizes = _sizes(q_block, k_block, num_queries, num_queries if num_keys is None else num_keys)
    _check_capacity(sizes.rows * sizes.columns)
    offsets = torch.arange(sizes.rows + 1, device=device, dtype=torch.int32) * sizes.columns
    blocks = torch.arange(sizes.columns, device=device, dtype=torch.int32).repeat(sizes.rows)
    return Plan(offsets[None, None], blocks[None, None], *sizes, uniform=True, check=False)


def ring(
    length: int,
    run: int,
    *,
    shift: int = 0,
    ring: Span | None = None,
    both: Sequence[Span] = (),
    keys: Sequence[Span] = (),
    num_keys: int | None = None,
    q_block: int = 128,
    k_block: int = 64,
    device: torch.device | str | None = None,
) -> Plan:
    """Self-attention inside the runs of a closed curve, plus spans that everyone reads.

    The token at position `p` of a ring of `n` tokens belongs to run `((p - shift) mod n) // run` and reads all of
    that run. The run that crosses the end of the ring continues at its start; if `run` does not divide `n`, the
    last run is shorter (the one that ends at position `shift`); if `run` exceeds `n`, it is the whole ring.

    A block of queries reads every block of keys that any of its tokens needs. That is exactly the pattern where
    spans, run and shift are multiples of both blocks, and elsewhere the smallest cover of it.

    Args:
        length: tokens.
        run: tokens per run.
        shift: how many tokens the cuts between runs are moved by.
        ring: the span of tokens on the curve; all of them by default.
        both: spans whose tokens read every token and are read by every token. They may overlap the ring.
        keys: spans that every token reads. Their own tokens read no more for it: outside `ring` and `both` they
            read only the spans of `both` and `keys`.
        num_keys: keys, if there are more of them than tokens. Those past `length` have no query, as the pooled keys
            of a far field; `keys` must name them. Tokens of `both`, which have read everything exactly, skip them.
        q_block: queries per row.
        k_block: keys per id.
        device: where the lists shall be; torch's default device by default.

    Every token must be in `ring`, `both` or `keys`.
    """
    check_int("length", length, at_least=1)
    sizes = _sizes(q_block, k_block, length, length if num_keys is None else num_keys)
    if sizes.num_keys < length:
        wrong_value("num_keys", f"be at least `length` ({length})", num_keys)
    check_int("run", run, at_least=1)
    check_int("shift", shift, at_least=0)
    curve = _check_span("ring", (0, length) if ring is None else ring, length)
    if curve[0] == curve[1]:
        wrong_value("ring", "hold at least one token", curve)
    both, keys = _check_spans("both", both, length), _check_spans("keys", keys, sizes.num_keys)
    _check_covered(sizes, [curve, *both, *keys])

    reads_all = _members(both, length)
    read = [
        *_reach_on_ring(sizes, curve, run, shift),
        *_read_by(_any_in_row(reads_all, q_block), [(0, length)]),
        *_read_by(_any_in_row(~reads_all, q_block), [*both, *keys]),
    ]
    starts, stops = (torch.stack(ends, dim=1) for ends in zip(*read, strict=True))
    return _from_spans(starts, stops, sizes, device)


def from_spans(
    starts: Tensor,
    stops: Tensor,
    *,
    q_block: int,
    k_block: int,
    num_queries: int,
    num_keys: int,
    device: torch.device | str | None = None,
) -> Plan:
    """Row `r` reads the union of the spans of keys `starts[r, s] : stops[r, s]`, rounded outwards to whole blocks.

    Args:
        starts, stops: `[rows, spans]` int64 on the CPU, within `0 ... num_keys`, with
            `rows = ceil(num_queries / q_block)`. Spans may overlap, stand in any order, or be empty.
        device: where the lists shall be; torch's default device by default.
    """
    sizes = _sizes(q_block, k_block, num_queries, num_keys)
    for name, ends in (("starts", starts), ("stops", stops)):
        check_tensor(name, ends, dims=2)
        if ends.dtype != torch.int64:
            wrong_type(name, "be int64", ends.dtype)
        check_same_device(name, ends, "the CPU", torch.device("cpu"))
        if ends.shape[0] != sizes.rows or ends.shape[1] == 0:
            rule = f"be [{sizes.rows}, at least 1]: a row for each of ceil(num_queries / q_block)"
            wrong_value(name, rule, shape_of(ends))
        if bool((ends < 0).any()) or bool((ends > num_keys).any()):
            wrong_value(name, f"lie from 0 to `num_keys` ({num_keys})", [int(ends.min()), int(ends.max())])
    if starts.shape != stops.shape:
        wrong_value("stops", f"have the shape of `starts` {list(starts.shape)}", shape_of(stops))
    return _from_spans(starts, stops, sizes, device)


def _reach_on_ring(sizes: _Sizes, curve: Span, run: int, shift: int) -> list[tuple[Tensor, Tensor]]:
    """The tokens of the ring that each row reads: a piece up to the end of the ring, and one from its start.

    The tokens of a row are consecutive, hence so are the runs they belong to. `first` and `last` are a row's outer
    tokens, in positions counted from the cut that `shift` moved; `last` is not reduced where it passes the end.
    """
    n = curve[1] - curve[0]
    run, shift = min(run, n), shift % n
    row_start = torch.arange(sizes.rows, device="cpu") * sizes.q_block
    start, stop = row_start.clamp(min=curve[0]), (row_start + sizes.q_block).clamp(max=curve[1])
    on_ring = start < stop
    first = (start - curve[0] - shift) % n
    last = first + stop - start - 1
    reach_start = first // run * run
    reach_stop = last // n * n + ((last % n // run + 1) * run).clamp(max=n)
    reach = torch.where(on_ring, (reach_stop - reach_start).clamp(max=n), 0)
    begin = (reach_start + shift) % n
    end = begin + reach
    wrapped = (end - n).clamp(min=0)
    return [
        (curve[0] + begin, curve[0] + end - wrapped),
        (torch.full_like(wrapped, curve[0]), curve[0] + wrapped),
    ]


def _read_by(readers: Tensor, spans: Sequence[Span]) -> list[tuple[Tensor, Tensor]]:
    """Each span as starts and stops for all rows, empty for those that are not `readers`."""
    return [(torch.where(readers, start, 0), torch.where(readers, stop, 0)) for start, stop in spans]


def _members(spans: Sequence[Span], length: int) -> Tensor:
    """Which tokens are in any of the spans, `[length]` bool."""
    members = torch.zeros(length, dtype=torch.bool, device="cpu")
    for start, stop in spans:
        members[start:stop] = True
    return members


def _any_in_row(members: Tensor, q_block: int) -> Tensor:
    return pad(members, (0, -len(members) % q_block)).view(-1, q_block).any(dim=1)


def _from_spans(starts: Tensor, stops: Tensor, sizes: _Sizes, device: torch.device | str | None) -> Plan:
    """Each row reads the union of its spans of keys, `[rows, spans]`: in any order, overlapping or empty.

    Spans are few and known on the host, so only their expansion into ids happens on the device.
    """
    device = torch.get_default_device() if device is None else device
    some = starts < stops
    starts = starts // sizes.k_block
    stops = torch.where(some, -(-stops // sizes.k_block), starts)
    starts, order = starts.sort(dim=1)
    stops = stops.gather(1, order)
    reached = pad(stops.cummax(dim=1).values[:, :-1], (1, 0))
    starts = torch.maximum(starts, reached)
    lengths = (stops - starts).clamp(min=0)
    counts = lengths.sum(dim=1)
    lengths = lengths.flatten()
    first = (starts.flatten() - (lengths.cumsum(0) - lengths)).to(device, torch.int32)
    total = int(counts.sum())
    _check_capacity(total)
    blocks = first.repeat_interleave(lengths.to(device), output_size=total)
    blocks += torch.arange(total, device=device, dtype=torch.int32)
    offsets = _offsets(counts).to(device)
    uniform = bool((counts == counts[0]).all())
    return Plan(offsets[None, None], blocks[None, None], *sizes, uniform=uniform, check=False)


# -- from tensors ------------------------------------------------------------------------------------------------------


def from_mask(
    mask: Tensor,
    *,
    q_block: int,
    k_block: int,
    num_queries: int,
    num_keys: int,
    compact: bool = True,
    similar_rows: bool = False,
) -> Plan:
    """The plan of a block mask: row `r` reads column `c` where `mask[..., r, c]`.

    Args:
        mask: `[rows, columns]`, `[h, rows, columns]` or `[b, h, rows, columns]` bool, with
            `rows = ceil(num_queries / q_block)` and `columns = ceil(num_keys / k_block)`.
        compact: give lists as little memory as they need. This waits for the device: how long they are is known only
            from the mask. Without it nothing does, and they get as much as a mask that is all true would need.
        similar_rows: see `Plan`.
    """
    sizes = _sizes(q_block, k_block, num_queries, num_keys)
    mask = _with_leading("mask", mask, sizes)
    if mask.dtype != torch.bool:
        wrong_type("mask", "be bool", mask.dtype, "Compare it first, as in `mask > 0`.")
    counts = mask.sum(dim=-1)
    offsets = _offsets(counts)
    capacity, uniform = sizes.rows * sizes.columns, False
    if compact:
        numbers = torch.stack([offsets[..., -1].max().long(), counts.min(), counts.max()])
        capacity, shortest, longest = numbers.tolist()
        uniform = shortest == longest
    _check_capacity(capacity)
    blocks = torch.ops.nearfield.lists_of(mask, offsets, capacity)  # of `ops.lists`
    return Plan(offsets, blocks, *sizes, uniform=uniform, similar_rows=similar_rows, check=False)


def topk(scores: Tensor, k: int, *, q_block: int, k_block: int, num_queries: int, num_keys: int) -> Plan:
    """Each row reads the `k` columns with the highest scores; of equal scores, those with the lower ids.

    Args:
        scores: `[rows, columns]`, `[h, rows, columns]` or `[b, h, rows, columns]`, floating, with
            `rows = ceil(num_queries / q_block)` and `columns = ceil(num_keys / k_block)`. Columns scored `-inf` or
            NaN are never read, even if that leaves a row with fewer than `k`, or none.
        k: columns per row; more than there are means all.

    Never waits for the device: the capacity is `rows * min(k, columns)`, and since a row may turn out shorter the
    plan does not call itself uniform.
    """
    sizes = _sizes(q_block, k_block, num_queries, num_keys)
    scores = _with_leading("scores", scores, sizes)
    if not scores.is_floating_point():
        wrong_type("scores", "be floating point", scores.dtype, "Convert it with `.float()`.")
    check_int("k", k, at_least=1)
    lowest = float("-inf")
    readable = torch.where(scores.detach() > lowest, scores.detach(), lowest)  # False for NaN too
    best, column = readable.sort(dim=-1, descending=True, stable=True)
    chosen = best[..., :k] > lowest
    ids = torch.where(chosen, column[..., :k], sizes.columns).to(torch.int32).sort(dim=-1).values
    return _from_rows(ids, chosen.sum(dim=-1), sizes)


def key_lists(
    keys: Tensor,
    counts: Tensor | None,
    *,
    q_block: int,
    k_block: int = 1,
    num_queries: int,
    num_keys: int,
    similar_rows: bool = False,
    check: bool = True,
) -> Plan:
    """The plan of padded lists: row `r` reads the ids `keys[..., r, : counts[..., r]]`.

    Args:
        keys: `[b, h, rows, width]` integer ids of key blocks (of keys, at the default grain), ascending, with
            `rows = ceil(num_queries / q_block)`. A repeated id is read twice. Entries from the count on are ignored.
        counts: `[b, h, rows]` integer, from 0 to `width`. None: every list is full.
        similar_rows: see `Plan`.
        check: verify counts, range and order. This waits for the device; without it nothing does.

    The capacity is `rows * width`.
    """
    sizes = _sizes(q_block, k_block, num_queries, num_keys)
    check_tensor("keys", keys, dims=4)
    _check_integers("keys", keys)
    if keys.shape[2] != sizes.rows:
        wrong_value("keys", f"have ceil(num_queries / q_block) = {sizes.rows} rows", shape_of(keys))
    if counts is not None:
        check_tensor("counts", counts, dims=3)
        _check_integers("counts", counts)
        if counts.shape != keys.shape[:3]:
            rule = f"have the batch, heads and rows of `keys` {list(keys.shape[:3])}"
            wrong_value("counts", rule, shape_of(counts))
        check_same_device("counts", counts, "keys", keys.device)
    if check:
        every = torch.full((), keys.shape[3], device=keys.device).expand(keys.shape[:3])
        _check_key_lists(keys, every if counts is None else counts, sizes)
    if counts is None:
        return _full_rows(keys, sizes, similar_rows)
    return _from_rows(keys, counts, sizes, similar_rows)


def _full_rows(ids: Tensor, sizes: _Sizes, similar_rows: bool) -> Plan:
    """Rows without gaps: nothing has to be moved."""
    batch, heads, rows, width = ids.shape
    _check_capacity(rows * width)
    offsets = _even_offsets(batch, heads, rows, width, ids.device)
    blocks = ids.to(torch.int32).flatten(2)
    return Plan(offsets, blocks, *sizes, uniform=True, similar_rows=similar_rows, check=False)


@tensor_cache
def _even_offsets(batch: int, heads: int, rows: int, width: int, device: torch.device) -> Tensor:
    offsets = torch.arange(rows + 1, device=device, dtype=torch.int32) * width
    return offsets.expand(batch, heads, -1).contiguous()


def _from_rows(ids: Tensor, counts: Tensor, sizes: _Sizes, similar_rows: bool = False) -> Plan:
    """Closes the gaps of padded rows: `ids [b, h, rows, width]`, of which the first `counts [b, h, rows]` are used.

    Unused slots go behind all used ones, each to a place of its own: with no two writes to one place the result is
    deterministic, and without a count of the used ones it never waits for the device.
    """
    batch, heads, rows, width = ids.shape
    _check_capacity(rows * width)
    offsets = _offsets(counts)
    begin, end, total = (
        part.long().unsqueeze(-1) for part in (offsets[..., :-1], offsets[..., 1:], offsets[..., -1:])
    )
    entry = torch.arange(width, device=ids.device)
    row_start = torch.arange(rows, device=ids.device).unsqueeze(-1) * width
    used = entry < counts.unsqueeze(-1)
    slot = torch.where(used, begin + entry, total + row_start + entry - end)
    values = torch.where(used, ids, 0).to(torch.int32)
    blocks = values.new_empty(batch, heads, rows * width)
    blocks.scatter_(-1, slot.flatten(2), values.flatten(2))
    return Plan(offsets, blocks, *sizes, similar_rows=similar_rows, check=False)


def _offsets(counts: Tensor) -> Tensor:
    """Where rows of these lengths begin and end, `[..., rows]` to `[..., rows + 1]` int32."""
    return pad(counts.cumsum(dim=-1, dtype=torch.int32), (1, 0))


# -- checks ------------------------------------------------------------------------------------------------------------


def _sizes(q_block: int, k_block: int, num_queries: int, num_keys: int) -> _Sizes:
    check_block("q_block", q_block)
    check_block("k_block", k_block)
    check_int("num_queries", num_queries, at_least=1)
    check_int("num_keys", num_keys, at_least=1)
    return _Sizes(q_block, k_block, num_queries, num_keys)


def _check_integers(name: str, value: Tensor) -> None:
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        wrong_type(name, "be integers", value.dtype)


def _check_capacity(entries: int) -> None:
    """Offsets are 32 bits wide."""
    if entries >= 2**31:
        wrong_value(
            "q_block", "be large enough for lists below 2^31 ids", f"{entries} ids", "Use larger blocks."
        )


def _with_leading(name: str, value: Tensor, sizes: _Sizes) -> Tensor:
    """`value` with its missing leading dimensions, as `[b, h, rows, columns]`."""
    if not isinstance(value, Tensor):
        wrong_type(name, "be a tensor", type(value).__name__)
    if not 2 <= value.dim() <= 4:
        wrong_value(name, "be [rows, columns], [h, rows, columns] or [b, h, rows, columns]", shape_of(value))
    if value.shape[-2:] != (sizes.rows, sizes.columns):
        wrong_value(
            name,
            f"end in [{sizes.rows}, {sizes.columns}]",
            shape_of(value),
            "These are ceil(num_queries / q_block) rows and ceil(num_keys / k_block) columns.",
        )
    if 0 in value.shape:
        wrong_value(name, "have at least one batch and one head", shape_of(value))
    return value[(None,) * (4 - value.dim())]


def _check_spans(name: str, spans: Sequence[Span], limit: int) -> list[Span]:
    if not isinstance(spans, Sequence):
        wrong_type(name, "be a sequence of spans (start, stop)", type(spans).__name__)
    return [_check_span(name, span, limit) for span in spans]


def _check_span(name: str, span: Span, limit: int) -> Span:
    if not isinstance(span, Sequence) or [type(end) for end in span] != [int, int]:
        hint = "Write ((start, stop),) for a single span." if name != "ring" else ""
        wrong_type(name, "hold integers (start, stop)", repr(span), hint)
    start, stop = span
    if not 0 <= start <= stop <= limit:
        wrong_value(name, f"hold 0 <= start <= stop <= {limit}", (start, stop))
    return start, stop


def _check_covered(sizes: _Sizes, spans: Sequence[Span]) -> None:
    outside = ~_members(spans, sizes.num_keys)
    if not bool(outside.any()):
        return
    first = int(outside.int().argmax())
    if first >= sizes.num_queries:
        rule = f"hold every key past `length` ({sizes.num_queries})"
        wrong_value("keys", rule, f"key {first} in none of its spans")
    wrong_value(
        "ring",
        "cover every token, together with `both` and `keys`",
        f"token {first} in none of them",
        "Put it on the ring, or name it in `both` or `keys`.",
    )


def _check_key_lists(keys: Tensor, counts: Tensor, sizes: _Sizes) -> None:
    width = keys.shape[3]
    if bool(((counts < 0) | (counts > width)).any()):
        wrong = counts[(counts < 0) | (counts > width)]
        wrong_value("counts", f"be from 0 to the width of `keys` ({width})", int(wrong[0]))
    used = torch.arange(width, device=keys.device) < counts.unsqueeze(-1)
    outside = used & ((keys < 0) | (keys >= sizes.columns))
    if bool(outside.any()):
        rule = f"hold ids from 0 to {sizes.columns - 1} (ceil(num_keys / k_block) - 1)"
        wrong_value("keys", rule, int(keys[outside][0]))
    descends = used[..., 1:] & (keys[..., 1:] < keys[..., :-1])
    if bool(descends.any()):
        wrong_value(
            "keys",
            "ascend inside each row",
            f"a descent in row {int(descends.nonzero()[0, 2])}",
            "Sort each row's ids; reading order does not change the result.",
        )
