"""Messages: how the tensors of a layer stand in the bytes that ranks send each other, and how many those are.

Each token is a row of bytes: keys and values, or an output and its `lse`, side by side. Rows of one kind that came from
several ranks then lie evenly spaced, so that they are read as tensors where they arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.parallel.ranks import ALIGNMENT
from nearfield.parallel.route import Traffic


class Row(NamedTuple):
    """What travels for one token.

    Args:
        parts: for each tensor its shape without tokens, `[B, H, ...]`, and its type. Wide types come last.
    """

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor begins, and last the size of all."""
        return _starts(self.parts)

    @property
    def size(self) -> int:
        return self.starts[-1]

    def tensors(self, rows: Tensor) -> list[Tensor]:
        """Rows `[tokens, size]` as tensors `[B, H, tokens, ...]`, which share their memory."""
        found = []
        for (shape, dtype), start in zip(self.parts, self.starts, strict=False):
            stop = start + torch.Size(shape).numel() * dtype.itemsize
            found.append(rows[:, start:stop].view(dtype).view(len(rows), *shape).movedim(0, 2))
        return found

    def empty(self, count: int, device: torch.device) -> Tensor:
        return torch.empty(count, self.size, dtype=torch.uint8, device=device)

    def filled(self, tensors: Sequence[Tensor], index: Tensor | None = None) -> Tensor:
        """Rows with some tokens of tensors `[B, H, tokens, ...]`; with all in their order without an index."""
        count = tensors[0].shape[2] if index is None else len(index)
        rows = self.empty(count, tensors[0].device)
        if not count:
            return rows
        for part, tensor in zip(self.tensors(rows), tensors, strict=True):
            select(tensor.detach(), index, part)
        return rows


@lru_cache
def _starts(parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> tuple[int, ...]:
    places = [0]
    for shape, dtype in parts:
        places[-1] = -(-places[-1] // dtype.itemsize) * dtype.itemsize
        places.append(places[-1] + torch.Size(shape).numel() * dtype.itemsize)
    widest = max(dtype.itemsize for _, dtype in parts)
    places[-1] = -(-places[-1] // widest) * widest
    return tuple(places)


def select(source: Tensor, index: Tensor | None, out: Tensor) -> None:
    """Copy some tokens of a tensor, or all, into another tensor; in words of 8 bytes where possible.

    A device copies strided tensors number by number, so larger numbers take less time.
    """
    source, out = _in_words(source, out)
    if index is None:
        out.copy_(source)
    else:
        torch.index_select(source, 2, index, out=out)


def _in_words(*tensors: Tensor) -> list[Tensor]:
    """View tensors of one type as integers of 8 bytes, if all allow it; otherwise return them unchanged."""
    size = tensors[0].element_size()
    per_word = 8 // size
    are_fit = size < 8 and all(
        x.dim() > 3
        and x.stride(-1) == 1
        and not any(number % per_word for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in tensors
    )
    return [x.view(torch.int64) for x in tensors] if are_fit else list(tensors)


class Kind(NamedTuple):
    """Rows of one kind in a message to, or from, each rank.

    Args:
        counts: rows per rank.
    """

    row: Row
    counts: Sequence[int]

    def num_bytes(self, rank: int) -> int:
        return -(-self.row.size * self.counts[rank] // ALIGNMENT) * ALIGNMENT


def message_sizes(kinds: Sequence[Kind]) -> list[int]:
    """Bytes for each rank."""
    return [sum(kind.num_bytes(rank) for kind in kinds) for rank in range(len(kinds[0].counts))]


def packed(kinds: Sequence[Kind], rows: Sequence[Tensor]) -> Tensor:
    """Rows of several kinds as one buffer, in the order of the ranks that they go to."""
    used = [(kind, some) for kind, some in zip(kinds, rows, strict=True) if len(some)]
    if len(used) == 1 and _is_dense(used[0][0]):
        return used[0][1].flatten()
    split = [some.split(list(kind.counts)) for kind, some in used]
    parts = [_padded(of_kind[rank].flatten()) for rank in range(len(kinds[0].counts)) for of_kind in split]
    return torch.cat(parts) if parts else rows[0].flatten()


def unpacked(kinds: Sequence[Kind], buffer: Tensor) -> list[Tensor]:
    """The rows of each kind in a buffer, in the order of the ranks that they came from."""
    used = [number for number, kind in enumerate(kinds) if sum(kind.counts)]
    if len(used) == 1 and _is_dense(kinds[used[0]]):
        return [
            buffer.view(-1, kind.row.size) if number in used else kind.row.empty(0, buffer.device)
            for number, kind in enumerate(kinds)
        ]
    found: list[list[Tensor]] = [[kind.row.empty(0, buffer.device)] for kind in kinds]
    place = 0
    for rank in range(len(kinds[0].counts)):
        for kind, parts in zip(kinds, found, strict=True):
            stop = place + kind.counts[rank] * kind.row.size
            parts.append(buffer[place:stop].view(-1, kind.row.size))
            place += kind.num_bytes(rank)
    return [torch.cat(parts) for parts in found]


def _is_dense(kind: Kind) -> bool:
    """Whether nothing stands between the rows of different ranks."""
    return kind.row.size % ALIGNMENT == 0 or not any(
        kind.row.size * count % ALIGNMENT for count in kind.counts
    )


def _padded(part: Tensor) -> Tensor:
    padding = -len(part) % ALIGNMENT
    return torch.nn.functional.pad(part, (0, padding)) if padding else part


# -- a layer's messages ------------------------------------------------------------------------------------------------


class Shapes(NamedTuple):
    """The sizes of tensors that decide, with the number of tokens, how long a message is."""

    batch: int
    heads: int
    key_heads: int
    head_dim: int
    dtype: torch.dtype
    has_bias: bool = False

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def key(self) -> Row:
        """A key and its value."""
        part = (self.batch, self.key_heads, self.head_dim), self.dtype
        return Row((part, part))

    @property
    def bias(self) -> Row:
        return Row((((self.batch, self.heads), self.lse_dtype),))

    @property
    def query(self) -> Row:
        return Row((((self.batch, self.heads, self.head_dim), self.dtype),))

    @property
    def result(self) -> Row:
        """An output and its `lse`."""
        return Row((*self.query.parts, *self.bias.parts))


@dataclass(frozen=True, eq=False)
class Messages:
    """What one rank sends to each other rank in the forward pass. Gradients take the same ways back."""

    traffic: Traffic
    shapes: Shapes
    rank: int

    @cached_property
    def sent(self) -> list[Kind]:
        """First: keys, values and travelling queries."""
        return self._tokens(self.traffic.num_keys[self.rank], self.traffic.num_queries[self.rank])

    @cached_property
    def sent_here(self) -> list[Kind]:
        return self._tokens(self.traffic.num_keys[:, self.rank], self.traffic.num_queries[:, self.rank])

    def _tokens(self, keys: Tensor, queries: Tensor) -> list[Kind]:
        shapes, num_keys = self.shapes, keys.tolist()
        biases = [Kind(shapes.bias, num_keys)] * shapes.has_bias
        return [Kind(shapes.key, num_keys), Kind(shapes.query, queries.tolist()), *biases]

    @cached_property
    def returned(self) -> list[Kind]:
        """Second: results of the queries that came, and of the part of everyone's queries that is merged there."""
        visitors = self.traffic.num_queries[:, self.rank].tolist()
        return self._results(visitors, self.traffic.part_sizes)

    @cached_property
    def returned_here(self) -> list[Kind]:
        visits = self.traffic.num_queries[self.rank].tolist()
        return self._results(visits, [self.traffic.part_sizes[self.rank]] * self.traffic.num_ranks)

    def _results(self, visits: list[int], parts: list[int]) -> list[Kind]:
        """A rank also sends to itself, because its own results are merged with those of others."""
        visits[self.rank] = self.traffic.num_travellers(self.rank)
        return [Kind(self.shapes.result, visits), Kind(self.shapes.result, parts)]

    @cached_property
    def spread(self) -> list[Kind]:
        """Third: the results of everyone's queries that were merged here."""
        mine = self.traffic.part_sizes[self.rank]
        return [Kind(self.shapes.result, [mine] * self.traffic.num_ranks)]

    @cached_property
    def spread_here(self) -> list[Kind]:
        return [Kind(self.shapes.result, self.traffic.part_sizes)]


class Sent(NamedTuple):
    """Bytes that each rank sends to others in one layer."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def bytes_sent(traffic: Traffic, shapes: Shapes) -> Sent:
    """Count what `attend` would send, from the sizes of the same messages."""
    forward: list[int] = []
    backward: list[int] = []
    for rank in range(traffic.num_ranks):
        messages = Messages(traffic, shapes, rank)
        sent = [messages.sent]
        received = [messages.sent_here]
        if traffic.has_returns:
            sent.append(messages.returned)
            received.append(messages.returned_here)
        if traffic.has_everyones:
            sent.append(messages.spread)
            received.append(messages.spread_here)
        for totals, all_kinds in ((forward, sent), (backward, received)):
            sizes = [message_sizes(kinds) for kinds in all_kinds]
            totals.append(sum(sum(one) - one[rank] for one in sizes))
    return Sent(tuple(forward), tuple(backward))
