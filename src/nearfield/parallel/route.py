"""Routes: what travels between ranks and what each rank reads, derived from a plan alone.

Every rank knows the whole plan and who holds which tokens, so all derive the same routes without communicating. Usually
keys and values travel: each block that a row of one rank reads of another rank's, once. But a row that reads most of
what another rank holds, as text and shared tokens do, is smaller than what it reads. Its queries travel instead, and a
partial result with its `lse` comes back.

Rows that every rank holds (replicated text) do not travel. Each rank lets them read the keys that it owns. Every rank
then merges a part of these partial results, and sends it to all.

Plans have blocks, and a split may tear them. So every rank lays out its tokens in whole blocks, with holes where a
block is torn. Where blocks are whole, as with cuts on multiples of the block, no token is moved.

One call over one plan reads the keys that are here and those that came. Where waiting takes longer than merging,
several calls do, of which the first needs nothing that travels.
"""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._checks import check_int, wrong_value
from nearfield.parallel.split import REPLICATED, Split
from nearfield.plan import Plan

_OWN, _EVERYONES, _OTHERS = 0, 1, 2  # kinds of tokens on a rank; from the last on, those of each other rank
_WIDE = 0.5  # a row may travel to a rank if it reads more than this share of the rank's keys
_WORTH = 2  # and if it spares this many times as many keys as queries: its return costs a second exchange


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
        """The tokens that stand in the slots. Gradients take this way, too, because every token has one place."""
        return y if self.tokens is None else y.index_select(2, self.place)

    def to(self, device: torch.device) -> "Slots":
        tokens, place, holes = (
            None if part is None else part.to(device) for part in (self.tokens, self.place, self.holes)
        )
        assert place is not None
        return Slots(tokens, place, holes, self.length)


HERE, CAME = 0, 1
"""Two groups of tokens: those that a rank holds, and those that other ranks sent to it, in the order of ranks."""


class Call(NamedTuple):
    """One call of `attend` on a rank: queries and keys in their slots, and who reads whom.

    Args:
        query_groups, key_groups: what is in the slots: `HERE`, `CAME`, or both in this order.
    """

    queries: Slots
    keys: Slots
    plan: Plan
    query_groups: tuple[int, ...] = (HERE,)
    key_groups: tuple[int, ...] = (HERE,)


@dataclass(frozen=True, eq=False)
class Route:
    """What one rank sends, receives and computes. Indices number its own tokens.

    Args:
        device: where its tensors are.
        joined: one call of all queries and keys that the rank holds and that came to it.
        keys_out, queries_out: the keys and queries that are sent, in the order of the ranks that they go to.
        travellers: all queries that travel to any rank.
        returned: which travellers have been on each rank (all have been on this one), as indices into a list of all
            travellers for the first rank, then for the second, and so on.
        everyones: the queries that all ranks hold; none if they read nothing.
        kept: what callers derive from the route for tensors of some shape.
    """

    rank: int
    traffic: "Traffic"
    device: torch.device
    joined: Call
    keys_out: Tensor
    queries_out: Tensor
    travellers: Tensor
    returned: Tensor
    everyones: Tensor
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def apart(self) -> tuple[Call, ...]:
        """Up to three calls instead of one: own queries over own keys, over keys that came, and queries that came."""
        keys_came, queries_came = CAME in self.joined.key_groups, CAME in self.joined.query_groups
        groups = [((HERE,), (HERE,))] + [((HERE,), (CAME,))] * keys_came + [((CAME,), (HERE,))] * queries_came
        return tuple(self.traffic.call(self.rank, *pair, self.device) for pair in groups)

    @property
    def num_ranks(self) -> int:
        return self.traffic.num_ranks

    @cached_property
    def num_queries(self) -> int:
        return self.traffic.queries.num_held(self.rank)

    @cached_property
    def num_keys(self) -> int:
        return self.traffic.keys.num_held(self.rank)

    @cached_property
    def num_pairs(self) -> int:
        """Pairs this rank computes, per batch element and head, on average over heads."""
        plan = self.joined.plan
        return round(plan.num_pairs / plan.blocks.shape[1])

    @property
    def is_aligned(self) -> bool:
        """Whether queries and keys are whole blocks as they are."""
        return self.joined.queries.tokens is None and self.joined.keys.tokens is None

    @cached_property
    def everyones_span(self) -> tuple[int, int] | None:
        """Where `everyones` stand, if they stand side by side."""
        index = self.everyones.tolist()
        is_span = len(index) > 0 and index[-1] - index[0] + 1 == len(index)
        return (index[0], index[-1] + 1) if is_span else None


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
    def has_journeys(self) -> bool:
        """Whether any rank has keys or queries for another."""
        return bool(self.num_keys.any() or self.num_queries.any())

    @cached_property
    def num_everyones(self) -> int:
        """Queries that all ranks hold and that read something: text does not read summaries."""
        rows = _tokens_per_block(self.queries, REPLICATED, self.plan.q_block) > 0
        return int((self.queries.owners == REPLICATED).sum()) if bool(self._reads[rows].any()) else 0

    @property
    def has_everyones(self) -> bool:
        """Whether queries that all ranks hold have results on several."""
        return self.num_everyones > 0 and self.num_ranks > 1

    @cached_property
    def has_returns(self) -> bool:
        """Whether any rank has partial results for another."""
        return bool(self.num_queries.any()) or self.has_everyones

    def num_travellers(self, rank: int) -> int:
        """Queries of a rank that travel anywhere."""
        travels = [self._travelling[rank, other] for other in range(self.num_ranks) if other != rank]
        return int(self._rows[rank][torch.stack(travels).any(dim=0)].sum()) if travels else 0

    @cached_property
    def part_sizes(self) -> list[int]:
        """How many of everyone's queries each rank merges."""
        ends = [self.num_everyones * rank // self.num_ranks for rank in range(self.num_ranks + 1)]
        return [stop - start for start, stop in pairwise(ends)]

    def pairs_per_rank(self) -> list[int]:
        """Pairs that each rank computes (of lists that differ between heads, what any of them reads)."""
        return self._work[0]

    @property
    def keepers(self) -> Tensor:
        """For each column with keys that all ranks hold, the rank on which queries that all ranks hold read them."""
        return self._work[1]

    @cached_property
    def _work(self) -> tuple[list[int], Tensor]:
        all_keys = _tokens_per_block(self.keys, REPLICATED, self.plan.k_block)
        all_queries = _tokens_per_block(self.queries, REPLICATED, self.plan.q_block)
        held = torch.cat([self._columns, all_keys[None]]).double()
        # How many tokens of each rank a row reads. The last column is about tokens that all ranks hold.
        read = self._reads.double() @ held.T
        pairs = [int(rows.double() @ read[:, [rank, -1]].sum(1)) for rank, rows in enumerate(self._rows)]
        for (reader, holder), travels in self._travelling.items():
            counts = self._rows[reader] * read[:, holder]
            pairs[reader] += int(counts[~travels].sum())
            pairs[holder] += int(counts[travels].sum())
        for rank in range(self.num_ranks):
            pairs[rank] += int((all_queries * read[:, rank]).sum())
        # A column that all ranks hold is read by one of them, the one that reads least so far.
        keepers = torch.zeros(self.plan.num_columns, dtype=torch.int64, device="cpu")
        of_columns = (all_queries.double() @ self._reads.double()) * all_keys
        for column in all_keys.nonzero().flatten().tolist():
            keepers[column] = keeper = pairs.index(min(pairs))
            pairs[keeper] += int(of_columns[column])
        return pairs, keepers

    @cached_property
    def fingerprint(self) -> str:
        """A text that is equal on ranks that have the same plan and splits."""
        plan = self.plan
        digest = hashlib.sha256(repr(plan.layout._replace(capacity=0)).encode())
        used = int(plan.offsets[..., -1].max())
        for lists in (plan.offsets, torch.where(plan.entry_rows()[1], plan.blocks, -1)[..., :used]):
            digest.update(lists.cpu().contiguous().numpy(force=True).tobytes())
        return f"{digest.hexdigest()[:16]}-{self.queries.fingerprint}-{self.keys.fingerprint}"

    # -- one rank ------------------------------------------------------------------------------------------------

    def route(self, rank: int, device: torch.device | str | None = None) -> Route:
        """The route of one rank. `device` is the one of its tensors, by default that of the plan."""
        check_int("rank", rank, at_least=0)
        if rank >= self.num_ranks:
            wrong_value("rank", f"be below the number of ranks ({self.num_ranks})", rank)
        where = torch.device(self.plan.device if device is None else device)
        my_queries, my_keys = self.queries.held(rank), self.keys.held(rank)
        ranks = range(self.num_ranks)
        queries_out = [torch.searchsorted(my_queries, self._sent_queries(rank, other)) for other in ranks]
        keys_out = [torch.searchsorted(my_keys, self._sent_keys(rank, other)) for other in ranks]
        travellers = torch.cat(queries_out).unique()
        returned = [
            other * len(travellers)
            + torch.searchsorted(travellers, travellers if other == rank else queries_out[other])
            for other in ranks
        ]
        everyones = (self.queries.owners[my_queries] == REPLICATED).nonzero().flatten()[: self.num_everyones]
        query_groups = (HERE, CAME) if self.num_queries[:, rank].any() else (HERE,)
        key_groups = (HERE, CAME) if self.num_keys[:, rank].any() else (HERE,)
        return Route(
            rank,
            self,
            where,
            self.call(rank, query_groups, key_groups, where),
            torch.cat(keys_out).to(where),
            torch.cat(queries_out).to(where),
            travellers.to(where),
            torch.cat(returned).to(where),
            everyones.to(where),
        )

    def call(
        self, rank: int, query_groups: tuple[int, ...], key_groups: tuple[int, ...], device: torch.device
    ) -> Call:
        """The call over some of the tokens that a rank holds, or that came to it."""
        plan, others = self.plan, [other for other in range(self.num_ranks) if other != rank]
        my_queries, my_keys = self.queries.held(rank), self.keys.held(rank)
        query_parts = {HERE: [(_kinds(self.queries, my_queries), my_queries)], CAME: []}
        key_parts = {HERE: [(_kinds(self.keys, my_keys), my_keys)], CAME: []}
        for other in others:
            for parts, came in (
                (query_parts, self._sent_queries(other, rank)),
                (key_parts, self._sent_keys(other, rank)),
            ):
                parts[CAME].append((torch.full_like(came, _OTHERS + other), came))
        num_kinds = _OTHERS + self.num_ranks
        queries, row_of = _slotted(query_parts, query_groups, plan.q_block, plan.num_rows, num_kinds)
        keys, column_of = _slotted(key_parts, key_groups, plan.k_block, plan.num_columns, num_kinds)

        pairs = [(_OWN, _OWN), (_OWN, _EVERYONES), (_EVERYONES, _OWN)]
        reads = [_Reads(row_of[reader], column_of[read]) for reader, read in pairs]
        kept = column_of[_EVERYONES].masked_fill(self.keepers != rank, -1)
        reads.append(_Reads(row_of[_EVERYONES], kept))
        for other in others:
            staying = row_of[_OWN].masked_fill(self._travelling[rank, other], -1)
            reads.append(_Reads(staying, column_of[_OTHERS + other]))
            reads.append(_Reads(row_of[_OTHERS + other], column_of[_OWN]))
        part = _part(plan, _entries(plan), reads, queries, keys)
        return Call(queries.to(device), keys.to(device), part.to(device), query_groups, key_groups)

    def _sent_keys(self, holder: int, reader: int) -> Tensor:
        return self._chosen(self.keys, holder, self._fetched.get((reader, holder)), self.plan.k_block)

    def _sent_queries(self, reader: int, holder: int) -> Tensor:
        return self._chosen(self.queries, reader, self._travelling.get((reader, holder)), self.plan.q_block)

    @staticmethod
    def _chosen(split: Split, rank: int, blocks: Tensor | None, block: int) -> Tensor:
        """Places in the sequence of a rank's own tokens that lie in marked blocks."""
        own = split.own(rank)
        return own[:0] if blocks is None else own[blocks[own // block]]


class _Reads(NamedTuple):
    """Rows and columns of the whole plan as slots of a rank; -1 where it has none."""

    rows: Tensor
    columns: Tensor


@lru_cache(maxsize=64)
def traffic(plan: Plan, queries: Split, keys: Split | None = None) -> Traffic:
    """A cached `Traffic`, because layers with equal tiles share a plan."""
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
    """Which rows travel: those that read most of a rank's keys, if enough keys then need not be sent."""
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


def _slotted(
    parts: dict[int, list[tuple[Tensor, Tensor]]],
    groups: tuple[int, ...],
    block: int,
    num_blocks: int,
    num_kinds: int,
) -> tuple[Slots, Tensor]:
    """Lay out tokens: those of one block and kind share a slot. Whole blocks come first, so ragged ones make no holes.

    Returns:
        The slots, and the slot of each kind and block, `[kinds, blocks]`, -1 where there is none.
    """
    kinds, tokens = (
        torch.cat(some) for some in zip(*(part for group in groups for part in parts[group]), strict=True)
    )
    count = len(tokens)
    present, group, sizes = (kinds * num_blocks + tokens // block).unique(
        return_inverse=True, return_counts=True
    )
    first = torch.full_like(present, count).scatter_reduce_(
        0, group, torch.arange(count, device="cpu"), "amin"
    )
    slot = (first + count * (sizes < block)).argsort().argsort()
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
