"""Routes: what travels between ranks, and what each rank reads, worked out from a plan alone.

Every rank knows the whole plan and who holds which tokens, so all come to the same result without a word. Between two
ranks one of two things travels. Usually keys and values do: those blocks that the rows of one rank read of the other,
each once. But a row that reads most of what another rank holds, as text and shared tokens do, is itself smaller than
what it reads: its queries travel there, are attended to, and a partial result with its `lse` comes back.

Rows that every rank holds (replicated text) travel nowhere: each rank lets them read the keys it owns. Of these partial
results every rank merges a part, and all get the parts.

Plans have blocks, and a split may tear them. So every rank lays out its tokens in whole blocks, with holes where a
block is torn; where blocks are whole, as with cuts on multiples of the block, nothing is moved at all.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield.parallel.split import REPLICATED, Split
from nearfield.plan import Plan

_OWN, _EVERYONES = 0, 1
_WIDE = 0.5  # of what a rank holds, above which a row that reads it may travel there
_WORTH = 2  # times fewer queries than keys: returning costs a second exchange


class Slots(NamedTuple):
    """How tokens are laid out in whole blocks.

    Args:
        tokens: `[length]`, which token stands in each place (any in a hole); None where tokens stay as they are.
        place: `[tokens]`, where each token stands.
        holes: `[length]` bool, or None where there are none.
        length: places.
    """

    tokens: Tensor | None
    place: Tensor
    holes: Tensor | None
    length: int

    def enter(self, x: Tensor) -> Tensor:
        return x if self.tokens is None else x.index_select(2, self.tokens)

    def leave(self, y: Tensor) -> Tensor:
        """Back to the tokens; also the way of gradients, since every token has one place."""
        return y if self.tokens is None else y.index_select(2, self.place)

    def to(self, device: torch.device) -> "Slots":
        tokens, place, holes = (
            None if part is None else part.to(device) for part in (self.tokens, self.place, self.holes)
        )
        assert place is not None
        return Slots(tokens, place, holes, self.length)


class Call(NamedTuple):
    """One call of `attend` on a rank: queries and keys in their slots, and who reads whom."""

    queries: Slots
    keys: Slots
    plan: Plan


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank sends, receives and computes. Indices are those of its own tokens.

    Args:
        local: its rows, over the keys it holds.
        fetched: its rows, over the keys it was sent, those of the first rank first; None if there are none.
        visited: rows of others, over the keys it owns; None if there are none.
        keys_out: for each rank, which keys are sent there.
        queries_out: for each rank, which queries travel there.
        travellers: all queries that travel anywhere.
        returned: for each rank, which of the `travellers` have been there.
        everyones: the queries that all ranks hold, in parts: for each rank those that it merges. None if they read
            nothing.
    """

    rank: int
    traffic: "Traffic"
    local: Call
    fetched: Call | None
    visited: Call | None
    keys_out: tuple[Tensor, ...]
    queries_out: tuple[Tensor, ...]
    travellers: Tensor
    returned: tuple[Tensor, ...]
    everyones: tuple[Tensor, ...]

    @property
    def num_ranks(self) -> int:
        return self.traffic.num_ranks

    @property
    def num_queries(self) -> int:
        return len(self.local.queries.place)

    @property
    def num_keys(self) -> int:
        return len(self.local.keys.place)

    @property
    def num_pairs(self) -> int:
        """Pairs this rank computes, per batch element and head, on average over heads."""
        calls = [call for call in (self.local, self.fetched, self.visited) if call is not None]
        return round(sum(call.plan.num_pairs / call.plan.blocks.shape[1] for call in calls))

    @property
    def is_aligned(self) -> bool:
        """Whether queries and keys are read where they are."""
        return self.local.queries.tokens is None and self.local.keys.tokens is None


class Traffic:
    """Who sends what to whom, for all ranks.

    Args:
        plan: who reads whom in the whole sequence.
        queries: who holds which queries.
        keys: who holds which keys; as the queries if left out.
    """

    def __init__(self, plan: Plan, queries: Split, keys: Split | None = None) -> None:
        keys = queries if keys is None else keys
        for name, split, length in (("queries", queries, plan.num_queries), ("keys", keys, plan.num_keys)):
            if split.num_tokens != length:
                wrong_value(name, f"split the plan's {length} {name}", split.num_tokens)
        if queries.num_ranks != keys.num_ranks:
            wrong_value("keys", f"be split over the {queries.num_ranks} ranks of the queries", keys.num_ranks)
        self.plan, self.queries, self.keys = plan, queries, keys
        self.num_ranks = queries.num_ranks
        self._rows = _held_per_block(queries, plan.q_block)
        self._columns = _held_per_block(keys, plan.k_block)
        self._reads = _reads(plan)
        self._work_out(self._reads)

    def _work_out(self, reads: Tensor) -> None:
        """For each reader and holder, which columns are sent, which rows travel, and how many tokens that is."""
        ranks = range(self.num_ranks)
        self._fetched: dict[tuple[int, int], Tensor] = {}
        self._travelling: dict[tuple[int, int], Tensor] = {}
        self.num_keys = torch.zeros(self.num_ranks, self.num_ranks, dtype=torch.int64, device="cpu")
        self.num_queries = torch.zeros_like(self.num_keys)
        for reader in ranks:
            rows = self._rows[reader].nonzero().flatten()
            mine = reads[rows]
            for holder in ranks:
                if holder == reader:
                    continue
                sizes = self._columns[holder]
                columns = sizes.nonzero().flatten()
                pairs, held = mine[:, columns], sizes[columns]
                travels = _wide_rows(pairs, self._rows[reader][rows], held)
                stays = pairs[~travels].any(dim=0)
                self.num_keys[holder, reader] = held[stays].sum()
                self.num_queries[reader, holder] = self._rows[reader][rows[travels]].sum()
                self._fetched[reader, holder] = _marked(reads.shape[1], columns[stays])
                self._travelling[reader, holder] = _marked(reads.shape[0], rows[travels])

    @cached_property
    def num_everyones(self) -> int:
        """Queries that all ranks hold and that read something: text does not read summaries."""
        rows = _tokens_per_block(self.queries, REPLICATED, self.plan.q_block) > 0
        return int((self.queries.owners == REPLICATED).sum()) if bool(self._reads[rows].any()) else 0

    @property
    def has_everyones(self) -> bool:
        """Whether queries that all ranks hold have results on several."""
        return self.num_everyones > 0 and self.num_ranks > 1

    @property
    def has_returns(self) -> bool:
        """Whether any rank has partial results for another."""
        return bool(self.num_queries.any()) or self.has_everyones

    @cached_property
    def part_sizes(self) -> list[int]:
        """How many of everyone's queries each rank merges."""
        ends = [self.num_everyones * rank // self.num_ranks for rank in range(self.num_ranks + 1)]
        return [stop - start for start, stop in pairwise(ends)]

    def pairs_per_rank(self) -> list[int]:
        """Pairs that each rank computes (of lists that differ between heads, what any of them reads)."""
        all_keys = _tokens_per_block(self.keys, REPLICATED, self.plan.k_block)
        all_queries = _tokens_per_block(self.queries, REPLICATED, self.plan.q_block)
        held = torch.cat([self._columns, all_keys[None]]).double()
        # How many tokens of each rank a row reads; in the last place, of those that all hold.
        read = self._reads.double() @ held.T
        pairs = [int(rows.double() @ read[:, [rank, -1]].sum(1)) for rank, rows in enumerate(self._rows)]
        for (reader, holder), travels in self._travelling.items():
            counts = self._rows[reader] * read[:, holder]
            pairs[reader] += int(counts[~travels].sum())
            pairs[holder] += int(counts[travels].sum())
        for rank in range(self.num_ranks):
            pairs[rank] += int((all_queries * read[:, rank]).sum())
        pairs[0] += int((all_queries * read[:, -1]).sum())
        return pairs

    @cached_property
    def fingerprint(self) -> str:
        """The same on ranks that have the same plan and splits."""
        plan = self.plan
        digest = hashlib.sha256(repr(plan.layout._replace(capacity=0)).encode())
        used = int(plan.offsets[..., -1].max())
        for lists in (plan.offsets, torch.where(plan.entry_rows()[1], plan.blocks, -1)[..., :used]):
            digest.update(lists.cpu().contiguous().numpy(force=True).tobytes())
        return f"{digest.hexdigest()[:16]}-{self.queries.fingerprint}-{self.keys.fingerprint}"

    # -- one rank ------------------------------------------------------------------------------------------------

    def route(self, rank: int, device: torch.device | str | None = None) -> Route:
        """What one rank has to do. `device` is where its tensors are; by default where the plan is."""
        check_int("rank", rank, at_least=0)
        if rank >= self.num_ranks:
            wrong_value("rank", f"be below the number of ranks ({self.num_ranks})", rank)
        where = torch.device(self.plan.device if device is None else device)
        plan = self.plan
        others = [other for other in range(self.num_ranks) if other != rank]
        entries = _entries(plan)

        my_queries, my_keys = self.queries.held(rank), self.keys.held(rank)
        queries, row_of = self._slotted(
            my_queries, _kinds(self.queries, my_queries), plan.q_block, is_key=False
        )
        keys, column_of = self._slotted(my_keys, _kinds(self.keys, my_keys), plan.k_block, is_key=True)
        pairs = [(_OWN, _OWN), (_OWN, _EVERYONES), (_EVERYONES, _OWN)]
        if rank == 0:  # what all hold is counted once
            pairs.append((_EVERYONES, _EVERYONES))
        reads = [_Reads(row_of[reader], column_of[read]) for reader, read in pairs]
        local = Call(queries, keys, _part(plan, entries, reads, queries, keys))

        fetched = visited = None
        arriving = [self._sent_keys(other, rank) for other in others]
        if sum(map(len, arriving)):
            slots, columns = self._slotted(torch.cat(arriving), _counted(arriving), plan.k_block, is_key=True)
            reads = [
                _Reads(row_of[_OWN].masked_fill(self._travelling[rank, other], -1), columns[number])
                for number, other in enumerate(others)
            ]
            fetched = Call(queries, slots, _part(plan, entries, reads, queries, slots))
        visiting = [self._sent_queries(other, rank) for other in others]
        if sum(map(len, visiting)):
            slots, rows = self._slotted(torch.cat(visiting), _counted(visiting), plan.q_block, is_key=False)
            reads = [_Reads(rows[number], column_of[_OWN]) for number in range(len(others))]
            visited = Call(slots, keys, _part(plan, entries, reads, slots, keys))

        ranks = range(self.num_ranks)
        queries_out = [torch.searchsorted(my_queries, self._sent_queries(rank, other)) for other in ranks]
        keys_out = [torch.searchsorted(my_keys, self._sent_keys(rank, other)) for other in ranks]
        travellers = torch.cat(queries_out).unique()
        returned = [torch.searchsorted(travellers, index) for index in queries_out]
        everyones = (self.queries.owners[my_queries] == REPLICATED).nonzero().flatten()[: self.num_everyones]
        return Route(
            rank,
            self,
            _moved(local, where),
            fetched and _moved(fetched, where),
            visited and _moved(visited, where),
            tuple(index.to(where) for index in keys_out),
            tuple(index.to(where) for index in queries_out),
            travellers.to(where),
            tuple(index.to(where) for index in returned),
            everyones.to(where).split(self.part_sizes),
        )

    def _sent_keys(self, holder: int, reader: int) -> Tensor:
        return self._chosen(self.keys, holder, self._fetched.get((reader, holder)), self.plan.k_block)

    def _sent_queries(self, reader: int, holder: int) -> Tensor:
        return self._chosen(self.queries, reader, self._travelling.get((reader, holder)), self.plan.q_block)

    @staticmethod
    def _chosen(split: Split, rank: int, blocks: Tensor | None, block: int) -> Tensor:
        """Places in the sequence of a rank's own tokens that lie in marked blocks."""
        own = split.own(rank)
        return own[:0] if blocks is None else own[blocks[own // block]]

    def _slotted(self, tokens: Tensor, kinds: Tensor, block: int, *, is_key: bool) -> tuple[Slots, Tensor]:
        num_blocks = self.plan.num_columns if is_key else self.plan.num_rows
        return _slotted(tokens, kinds, block, num_blocks, max(2, self.num_ranks))


class _Reads(NamedTuple):
    """Rows and columns of the whole plan as slots of a rank; -1 where it has none."""

    rows: Tensor
    columns: Tensor


@lru_cache(maxsize=64)
def traffic(plan: Plan, queries: Split, keys: Split | None = None) -> Traffic:
    """`Traffic`, kept: layers whose tiles lie alike share a plan."""
    return Traffic(plan, queries, keys)


# -- who reads whom ----------------------------------------------------------------------------------------------------


def _reads(plan: Plan) -> Tensor:
    """Which row reads which column in any batch element and head, `[rows, columns]` bool on the CPU."""
    reads = torch.zeros(plan.num_rows * plan.num_columns, dtype=torch.bool, device="cpu")
    _, row, column = _entries(plan)
    reads[row * plan.num_columns + column] = True
    return reads.view(plan.num_rows, plan.num_columns)


def _entries(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """List (batch element and head), row and column of everything a plan reads, on the CPU."""
    row, used = plan.entry_rows()
    lists = used.shape[0] * used.shape[1]
    number = torch.arange(lists, device=plan.device).view(*used.shape[:2], 1).expand_as(used)
    return number[used].cpu(), row[used].long().cpu(), plan.blocks[used].long().cpu()


def _held_per_block(split: Split, block: int) -> Tensor:
    """How many tokens of each block a rank owns, `[ranks, blocks]`."""
    num_blocks = -(-split.num_tokens // block)
    owned = split.owners != REPLICATED
    cell = split.owners * num_blocks + torch.arange(split.num_tokens, device="cpu") // block
    return cell[owned].bincount(minlength=split.num_ranks * num_blocks).view(-1, num_blocks)


def _tokens_per_block(split: Split, owner: int, block: int) -> Tensor:
    places = (split.owners == owner).nonzero().flatten()
    return (places // block).bincount(minlength=-(-split.num_tokens // block))


def _wide_rows(pairs: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Which rows travel: those that read most of a rank, if that spares the others' keys often enough."""
    wide = (pairs * keys).sum(dim=1) > _WIDE * keys.sum()
    spared = pairs.any(dim=0) & ~pairs[~wide].any(dim=0)
    return wide if _WORTH * queries[wide].sum() <= keys[spared].sum() else torch.zeros_like(wide)


def _marked(length: int, index: Tensor) -> Tensor:
    marks = torch.zeros(length, dtype=torch.bool, device="cpu")
    marks[index] = True
    return marks


# -- laying out tokens -------------------------------------------------------------------------------------------------


def _kinds(split: Split, tokens: Tensor) -> Tensor:
    return torch.where(split.owners[tokens] == REPLICATED, _EVERYONES, _OWN)


def _counted(parts: list[Tensor]) -> Tensor:
    """The number of the part for every token of several parts."""
    sizes = torch.tensor([len(part) for part in parts], device="cpu")
    return torch.arange(len(parts), device="cpu").repeat_interleave(sizes)


def _slotted(
    tokens: Tensor, kinds: Tensor, block: int, num_blocks: int, num_kinds: int
) -> tuple[Slots, Tensor]:
    """Tokens of one block and kind get a slot together, in the order in which they first come.

    Returns also the slot of each kind and block, `[kinds, blocks]`, -1 where there is none.
    """
    count = len(tokens)
    present, group, sizes = (kinds * num_blocks + tokens // block).unique(
        return_inverse=True, return_counts=True
    )
    first = torch.full_like(present, count).scatter_reduce_(
        0, group, torch.arange(count, device="cpu"), "amin"
    )
    slot = first.argsort().argsort()
    order = group.argsort(stable=True)
    offset = torch.empty_like(order)
    offset[order] = torch.arange(count, device="cpu") - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    place = slot[group] * block + offset
    lookup = torch.full((num_kinds * num_blocks,), -1, dtype=torch.int64, device="cpu")
    lookup[present] = slot
    length = int(place.max()) + 1
    if torch.equal(place, torch.arange(length, device="cpu")):
        slots = Slots(None, place, None, length)
    else:
        index = torch.zeros(length, dtype=torch.int64, device="cpu")
        index[place] = torch.arange(count, device="cpu")
        holes = ~_marked(length, place)
        slots = Slots(index, place, holes if bool(holes.any()) else None, length)
    return slots, lookup.view(num_kinds, num_blocks)


def _part(
    plan: Plan, entries: tuple[Tensor, Tensor, Tensor], reads: list[_Reads], queries: Slots, keys: Slots
) -> Plan:
    """The part of a plan that lies between given slots."""
    rows_here, columns_here = (torch.stack(slots).amax(dim=0) >= 0 for slots in zip(*reads, strict=True))
    mine = rows_here[entries[1]] & columns_here[entries[2]]
    number, row, column = (part[mine] for part in entries)
    found = []
    for rows, columns in reads:
        there, here = rows[row], columns[column]
        chosen = (there >= 0) & (here >= 0)
        found.append(torch.stack([number[chosen], there[chosen], here[chosen]]))
    number, row, column = torch.cat(found, dim=1)
    num_rows, num_columns = -(-queries.length // plan.q_block), -(-keys.length // plan.k_block)
    batch, heads = plan.blocks.shape[:2]
    order = ((number * num_rows + row) * num_columns + column).argsort()
    number, row, column = number[order], row[order], column[order]

    counts = (
        (number * num_rows + row).bincount(minlength=batch * heads * num_rows).view(batch * heads, num_rows)
    )
    offsets = torch.nn.functional.pad(counts.cumsum(dim=1), (1, 0))
    totals = offsets[:, -1]
    blocks = torch.zeros(batch * heads, int(totals.max()), dtype=torch.int32, device="cpu")
    blocks[number, torch.arange(len(number), device="cpu") - (totals.cumsum(0) - totals)[number]] = (
        column.int()
    )
    return Plan(
        offsets.int().view(batch, heads, -1),
        blocks.view(batch, heads, -1),
        plan.q_block,
        plan.k_block,
        queries.length,
        keys.length,
        uniform=bool((counts == counts[0, 0]).all()),
        check=False,
    )


def _moved(call: Call, device: torch.device) -> Call:
    return Call(call.queries.to(device), call.keys.to(device), call.plan.to(device))
