"""Plan: who reads whom.

An immutable list, for each block of queries, of the key blocks it reads. The lists are compressed rows: row `r` of
head `h` owns `blocks[b, h, offsets[b, h, r] : offsets[b, h, r + 1]]`. `k_block`, the grain, is how many
consecutive keys one id stands for. Everything that reads (the reference, the CPU path, the kernels, forward and
backward) walks these lists and nothing else, so no two of them can disagree about which pairs exist.
"""

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from nearfield._checks import check_int, check_member, check_tensor, wrong_type, wrong_value
from nearfield._memo import tensor_cache
from nearfield.layout import num_represented
from nearfield.plan.prepared import PreparedPlan

_INT32 = 2**31
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 192)
"""Permitted block sizes. 192 is three warpgroups of 64 rows on Hopper; below 16 is meant for the grain of keys."""

Made = TypeVar("Made")


class Layout(NamedTuple):
    """Everything about a plan that is known without reading its lists; hashable, so it can key a cache."""

    batch: int
    heads: int
    capacity: int
    q_block: int
    k_block: int
    num_queries: int
    num_keys: int


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Which key blocks each query block reads.

    Args:
        offsets: `[b, h, rows + 1]` int32, ascending from 0. `b` and `h` may be 1 and then serve every batch and head.
        blocks: `[b, h, capacity]` int32 ids of key blocks, ascending inside a row. A repeated id is read twice.
            Slots from `offsets[..., -1]` on are unused.
        q_block: queries per row.
        k_block: keys per id.
        num_queries, num_keys: true lengths; the last block of either side may be ragged.
        uniform: every row holds equally many ids. Builders know it; it spares a sort.
        similar_rows: neighbouring rows read much the same ids. Kernels may then walk several rows at once, which is
            slower where it is not so; and a NaN or an infinity in what only one of those rows reads (or, in the
            backward, is read by) may reach the others.
        check: verify the lists themselves. This waits for the device, so builders, whose lists are right by
            construction, pass False.
    """

    offsets: Tensor
    blocks: Tensor
    q_block: int
    k_block: int
    num_queries: int
    num_keys: int
    uniform: bool = field(default=False, repr=False)
    similar_rows: bool = field(default=False, repr=False)
    check: InitVar[bool] = True
    prepared: PreparedPlan = field(init=False, repr=False)
    extent: Tensor = field(init=False, repr=False)

    def __post_init__(self, check: bool) -> None:
        _check_layout(self)
        object.__setattr__(self, "prepared", PreparedPlan())
        object.__setattr__(self, "extent", _extent(self.num_queries, self.num_keys, self.offsets.device))
        for name in ("offsets", "blocks"):  # kernels step through lists by one
            object.__setattr__(self, name, getattr(self, name).contiguous())
        if check:
            _check_lists(self)

    @classmethod
    def of_known(
        cls,
        offsets: Tensor,
        blocks: Tensor,
        q_block: int,
        k_block: int,
        num_queries: int,
        num_keys: int,
        *,
        uniform: bool = False,
        similar_rows: bool = False,
    ) -> "Plan":
        """Make a plan of lists and sizes that belong to another plan or follow from one; nothing is checked.

        Every call makes several such plans, and checks would take most of their time.
        """
        plan = cls.__new__(cls)
        vars(plan).update(
            offsets=offsets.contiguous(), blocks=blocks.contiguous(), q_block=q_block, k_block=k_block,
            num_queries=num_queries, num_keys=num_keys, uniform=uniform, similar_rows=similar_rows,
            prepared=PreparedPlan(), extent=_extent(num_queries, num_keys, offsets.device),
        )  # fmt: skip
        return plan

    # -- sizes ---------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return -(-self.num_queries // self.q_block)

    @property
    def num_columns(self) -> int:
        return -(-self.num_keys // self.k_block)

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def layout(self) -> Layout:
        batch, heads, capacity = self.blocks.shape
        return Layout(batch, heads, capacity, self.q_block, self.k_block, self.num_queries, self.num_keys)

    @property
    def counts(self) -> Tensor:
        """Ids per row, `[b, h, rows]`."""
        return self.offsets[..., 1:] - self.offsets[..., :-1]

    @property
    def num_pairs(self) -> int:
        """Query-key pairs read, summed over the plan's own batch and heads; ragged blocks count what they hold."""
        row_sizes = num_represented(self.num_queries, self.q_block, 1, self.device)
        column_sizes = num_represented(self.num_keys, self.k_block, 1, self.device)
        row, used = self.entry_rows()
        row, column = (torch.where(used, ids, 0).long() for ids in (row, self.blocks))
        return int((row_sizes[row] * column_sizes[column] * used).sum())

    @property
    def density(self) -> float:
        """Pairs read over all pairs (above 1 only if ids repeat)."""
        batch, heads = self.blocks.shape[:2]
        return self.num_pairs / (batch * heads * self.num_queries * self.num_keys)

    # -- views ---------------------------------------------------------------------------------------------------

    def entry_rows(self) -> tuple[Tensor, Tensor]:
        """The row of every slot of `blocks` (`rows` for unused slots), and whether the slot is used."""
        batch, heads, capacity = self.blocks.shape
        slot = torch.arange(capacity, device=self.device, dtype=torch.int32).expand(batch, heads, capacity)
        row = torch.searchsorted(
            self.offsets[..., 1:].contiguous(), slot.contiguous(), right=True, out_int32=True
        )
        return row, slot < self.offsets[..., -1:]

    def block_counts(self) -> Tensor:
        """How often each row reads each column, `[b, h, rows, columns]` int32."""
        batch, heads = self.blocks.shape[:2]
        row, used = self.entry_rows()
        cell = row.long() * self.num_columns + self.blocks.long()
        spare = self.num_rows * self.num_columns
        counts = torch.zeros(batch, heads, spare + 1, device=self.device, dtype=torch.int32)
        counts.scatter_add_(-1, torch.where(used, cell, spare), torch.ones_like(cell, dtype=torch.int32))
        return counts[..., :spare].reshape(batch, heads, self.num_rows, self.num_columns)

    def pair_counts(self) -> Tensor:
        """How often each query reads each key, `[b, h, num_queries, num_keys]`: the oracle of every test."""
        rows = self.block_counts().repeat_interleave(self.q_block, -2)[..., : self.num_queries, :]
        return rows.repeat_interleave(self.k_block, -1)[..., : self.num_keys]

    def to_mask(self) -> Tensor:
        """Which query reads which key, `[b, h, num_queries, num_keys]` bool."""
        return self.pair_counts() > 0

    def preview(self, width: int = 64, height: int = 24) -> str:
        """The plan as text: one line per group of rows, darker where more is read (first batch and head)."""
        first = Plan(
            self.offsets[:1, :1], self.blocks[:1, :1], self.q_block, self.k_block, self.num_queries, self.num_keys,
            check=False,
        )  # fmt: skip
        cells = (first.block_counts() > 0).float()
        size = (min(height, self.num_rows), min(width, self.num_columns))
        shares = torch.nn.functional.adaptive_avg_pool2d(cells, size)[0, 0]
        shades = " ░▒▓█"
        levels = (shares * (len(shades) - 1)).ceil().long().tolist()
        return "\n".join("│" + "".join(shades[level] for level in line) + "│" for line in levels)

    def __repr__(self) -> str:
        """Without the lists: they may be long, and on a device that would have to be waited for."""
        return f"Plan({', '.join(f'{name}={value}' for name, value in self.layout._asdict().items())})"

    def __str__(self) -> str:
        batch, heads = self.blocks.shape[:2]
        pairs = self.num_pairs
        density = pairs / (batch * heads * self.num_queries * self.num_keys)
        return (
            f"Plan: {self.num_queries} queries x {self.num_keys} keys, blocks {self.q_block} x {self.k_block}, "
            f"lists for {batch} x {heads} (batch x heads), density {density:.4f}, {pairs:,} pairs"
        )

    # -- derived plans -------------------------------------------------------------------------------------------

    def transpose(self) -> "Plan":
        """The same pairs with the roles exchanged: for each key block, the query blocks that read it.

        Never waits for the device; computed once per plan.
        """
        if self.prepared.transpose is not None:
            return self.prepared.transpose
        made = self.make(self._transposed)
        if self.can_keep(made.offsets):
            self.prepared.transpose = made
        return made

    def _transposed(self) -> "Plan":
        batch, heads, capacity = self.blocks.shape
        row, used = self.entry_rows()
        column = torch.where(used, self.blocks, self.num_columns)
        # List, column and row in one number, and one sort of them all: sorting many lists takes a GPU many launches.
        per_list = (self.num_columns + 1) * self.num_rows
        wide = torch.int32 if batch * heads * per_list < _INT32 else torch.int64
        cells = _first_cells(batch * heads, self.num_rows, self.num_columns, wide, self.device)
        row = torch.where(used, row, 0).to(wide)
        cell = torch.add(row, column.to(wide), alpha=self.num_rows) + cells[:, 0].view(batch, heads, 1)
        ordered = torch.sort(cell.flatten()).values
        # Places among all lists may not fit into 32 bits; places in one do.
        starts = torch.searchsorted(ordered, cells) - _first_slots(batch * heads, capacity, self.device)
        offsets = starts.to(torch.int32).view(batch, heads, -1)
        blocks = (ordered % self.num_rows).to(torch.int32).view(batch, heads, capacity)
        sizes = self.k_block, self.q_block, self.num_keys, self.num_queries
        return Plan(offsets, blocks, *sizes, similar_rows=self.similar_rows, check=False)

    def longest_first(self, batch: int, heads: int) -> Tensor | None:
        """The order in which to start rows so that no long one starts last.

        Flat ids `(b * heads + h) * rows + row` as int32. Rows of similar length stay grouped by head, so that programs
        that run together share keys in the cache. None where every row is equally long, and where a head (of keys)
        serves several lists and so has no one length to go by.
        """
        if not self.has_order(heads):
            return None
        known = self.prepared.orders.get((batch, heads))
        if known is not None:
            return known
        made = self.make(lambda: self.sorted_rows(batch, heads))
        if self.can_keep(made):
            self.prepared.orders[batch, heads] = made
        return made

    def has_order(self, heads: int) -> bool:
        """Whether `longest_first` gives an order."""
        return not self.uniform and self.blocks.shape[1] in (1, heads)

    def sorted_rows(self, batch: int, heads: int) -> Tensor:
        """What `longest_first` gives, made anew and not kept."""
        counts = self.counts.expand(batch, heads, self.num_rows).flatten()
        similar = (counts.clamp(min=1).float().log2() * 2).round().to(torch.int32)
        return torch.argsort(similar, descending=True, stable=True).to(torch.int32)

    def lists(self) -> Iterator[Tensor]:
        """Everything along whose last axis a plan may be of any length, with what was derived so far."""
        yield from (self.offsets, self.blocks)
        if self.prepared.transpose is not None:
            yield from self.prepared.transpose.lists()
        yield from self.prepared.orders.values()
        yield from self.prepared.boxes or ()

    @staticmethod
    def make(make: Callable[[], Made]) -> Made:
        """Make what may be kept: in inference mode it could not serve a training step later."""
        if torch.compiler.is_compiling():
            return make()
        with torch.inference_mode(False):
            return make()

    def can_keep(self, made: Tensor) -> bool:
        """Whether a derived tensor may be kept for later calls.

        A tracer's stand-ins hold no values, and the memory of a graph under capture holds none before its first replay.
        """
        if torch.compiler.is_compiling() or type(made) is not type(self.offsets):
            return False
        return not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def to(self, device: torch.device | str) -> "Plan":
        """The same plan with its lists on `device`; itself if they are there already."""
        lists = self.offsets.to(device), self.blocks.to(device)
        if lists[0] is self.offsets:  # torch knows that "cuda" and "cuda:0" may be one device
            return self
        sizes = self.q_block, self.k_block, self.num_queries, self.num_keys
        return Plan(*lists, *sizes, uniform=self.uniform, similar_rows=self.similar_rows, check=False)

    # -- equality ------------------------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        """Same sizes and same lists, whatever the unused capacity and the device."""
        if not isinstance(other, Plan):
            return NotImplemented
        if self.layout._replace(capacity=0) != other.layout._replace(capacity=0):
            return False
        if not torch.equal(self.offsets.cpu(), other.offsets.cpu()):
            return False
        used = int(self.offsets[..., -1].max())
        mine, theirs = (
            torch.where(plan.entry_rows()[1], plan.blocks, -1)[..., :used].cpu() for plan in (self, other)
        )
        return torch.equal(mine, theirs)

    def __hash__(self) -> int:
        return hash(self.layout._replace(capacity=0))


def _extent(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """The lengths as the shape of a tensor without elements: torch.compile ties a graph to numbers, not to shapes."""
    return torch.empty(num_queries, num_keys, 0, device=device)


@tensor_cache
def _first_cells(lists: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of the first cell of every column of every list, `[lists, columns + 1]`."""
    return torch.arange(lists * (columns + 1), device=device, dtype=dtype).view(lists, -1) * rows


@tensor_cache
def _first_slots(lists: int, capacity: int, device: torch.device) -> Tensor:
    """Where every list begins among all of them, `[lists, 1]`."""
    return torch.arange(lists, device=device)[:, None] * capacity


def check_block(name: str, block: object) -> None:
    if isinstance(block, bool) or not isinstance(block, int):
        wrong_type(name, "be an integer", type(block).__name__)
    check_member(name, block, BLOCKS)


def _check_layout(plan: Plan) -> None:
    check_block("q_block", plan.q_block)
    check_block("k_block", plan.k_block)
    check_int("num_queries", plan.num_queries, at_least=1)
    check_int("num_keys", plan.num_keys, at_least=1)
    for name, lists in (("offsets", plan.offsets), ("blocks", plan.blocks)):
        check_tensor(name, lists, dims=3)
        if lists.dtype != torch.int32:
            wrong_type(name, "be int32", lists.dtype, "Convert it with `.to(torch.int32)`.")
    if 0 in plan.offsets.shape[:2]:
        wrong_value("offsets", "have a batch and heads of at least 1", list(plan.offsets.shape))
    if plan.offsets.shape[:2] != plan.blocks.shape[:2]:
        shapes = f"{list(plan.offsets.shape)} and {list(plan.blocks.shape)}"
        wrong_value("offsets", "have the batch and heads of `blocks`", shapes)
    if plan.offsets.shape[2] != plan.num_rows + 1:
        wrong_value(
            "offsets",
            f"end in ceil(num_queries / q_block) + 1 = {plan.num_rows + 1}",
            list(plan.offsets.shape),
        )
    if plan.offsets.device != plan.blocks.device:
        wrong_value("offsets", f"be on the device of `blocks` ({plan.blocks.device})", plan.offsets.device)


def _check_lists(plan: Plan) -> None:
    capacity = plan.blocks.shape[2]
    if bool((plan.offsets[..., 0] != 0).any()) or bool((plan.counts < 0).any()):
        wrong_value("offsets", "ascend from 0", plan.offsets.flatten()[:8].tolist(), "First values shown.")
    if bool((plan.offsets[..., -1] > capacity).any()):
        last = int(plan.offsets[..., -1].max())
        wrong_value("offsets", f"end within `blocks` (capacity {capacity})", last)
    row, used = plan.entry_rows()
    outside = used & ((plan.blocks < 0) | (plan.blocks >= plan.num_columns))
    if bool(outside.any()):
        wrong_value(
            "blocks",
            f"hold ids from 0 to {plan.num_columns - 1} (ceil(num_keys / k_block) - 1)",
            int(plan.blocks[outside][0]),
        )
    descends = (
        (plan.blocks[..., 1:] < plan.blocks[..., :-1]) & (row[..., 1:] == row[..., :-1]) & used[..., 1:]
    )
    if bool(descends.any()):
        wrong_value(
            "blocks",
            "ascend inside each row",
            f"a descent in row {int(row[..., 1:][descends][0])}",
            "Sort each row's ids; reading order does not change the result.",
        )
