"""Plan: who reads whom.

An immutable list, for each block of queries, of the key blocks it reads. The lists are compressed rows: row `r` of
head `h` owns `blocks[b, h, offsets[b, h, r] : offsets[b, h, r + 1]]`. `k_block`, the grain, is how many
consecutive keys one id stands for. Everything that reads (the reference, the CPU path, the kernels, forward and
backward) walks these lists and nothing else, so no two of them can disagree about which pairs exist.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nearfield._checks import check_int, check_member, check_tensor, wrong_type, wrong_value
from nearfield._memo import kept
from nearfield.layout import num_represented

_INT32 = 2**31
BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128, 192)
"""Permitted block sizes. 192 is three warpgroups of 64 rows on Hopper; below 16 is meant for the grain of keys."""

Derived = TypeVar("Derived", Tensor, "Plan")


BOX = 64
"""The most keys of one of `Boxes`."""


class Boxes(NamedTuple):
    """Lists of single keys as stretches of consecutive ones: a copy engine loads a stretch at once.

    Args:
        offsets: `[b, h, rows + 1]` int32, as a plan's.
        boxes: `[b, h, capacity]` int32, each `first * 2 * BOX + length`.
    """

    offsets: Tensor
    boxes: Tensor


class Packing(NamedTuple):
    """How the lists of several rows are merged into one.

    Args:
        rows: how many.
        multiple: of how many ids a list is to be; ids of no row fill it up.
    """

    rows: int
    multiple: int


class Packed(NamedTuple):
    """The lists of a plan, merged.

    Args:
        bounds: `[b, h, 2 * lists]` int32: where each starts and how long it is.
        blocks: `[b, h, capacity]` int32, each `id * 2**rows` and a bit for each of the rows that read it.
        rows, multiple: see `Packing`.
    """

    bounds: Tensor
    blocks: Tensor
    rows: int
    multiple: int


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
    check: InitVar[bool] = True
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)
    _extent: Tensor = field(init=False, repr=False)

    def __post_init__(self, check: bool) -> None:
        _check_layout(self)
        # The lengths as the shape of a tensor without elements: torch.compile ties a graph to numbers, not to shapes.
        extent = torch.empty(self.num_queries, self.num_keys, 0, device=self.offsets.device)
        object.__setattr__(self, "_extent", extent)
        for name in ("offsets", "blocks"):  # kernels step through lists by one
            object.__setattr__(self, name, getattr(self, name).contiguous())
        if check:
            _check_lists(self)

    @classmethod
    def _of_known(
        cls,
        offsets: Tensor,
        blocks: Tensor,
        q_block: int,
        k_block: int,
        num_queries: int,
        num_keys: int,
        uniform: bool = False,
    ) -> "Plan":
        """A plan of lists and sizes that are another plan's, or follow from them: nothing is checked again. Every call
        makes several, and checks would take most of their time."""
        plan = cls.__new__(cls)
        vars(plan).update(
            offsets=offsets.contiguous(), blocks=blocks.contiguous(), q_block=q_block, k_block=k_block,
            num_queries=num_queries, num_keys=num_keys, uniform=uniform, _derived={},
            _extent=torch.empty(num_queries, num_keys, 0, device=offsets.device),
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
        return self._derive("transpose", self._transposed)

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
        return Plan(offsets, blocks, self.k_block, self.q_block, self.num_keys, self.num_queries, check=False)

    def longest_first(self, batch: int, heads: int) -> Tensor | None:
        """The order in which to start rows so that no long one starts last.

        Flat ids `(b * heads + h) * rows + row` as int32. Rows of similar length stay grouped by head, so that programs
        that run together share keys in the cache. None where every row is equally long, and where a head (of keys)
        serves several lists and so has no one length to go by.
        """
        if not self._has_order(heads):
            return None
        return self._derive(("order", batch, heads), lambda: self._sorted_rows(batch, heads))

    def _has_order(self, heads: int) -> bool:
        """Whether `longest_first` has something to say."""
        return not self.uniform and self.blocks.shape[1] in (1, heads)

    def _sorted_rows(self, batch: int, heads: int) -> Tensor:
        """What `longest_first` gives, made anew and not kept."""
        counts = self.counts.expand(batch, heads, self.num_rows).flatten()
        similar = (counts.clamp(min=1).float().log2() * 2).round().to(torch.int32)
        return torch.argsort(similar, descending=True, stable=True).to(torch.int32)

    @property
    def boxes(self) -> Boxes | None:
        """What `find_boxes` found, if it was asked."""
        found: Boxes | None = self._derived.get("boxes")
        return found

    def find_boxes(self) -> Boxes:
        """The lists as stretches of consecutive keys, where `k_block` is 1. Waits for the device; computed once.

        Who reads boxes may load what follows a short one, too, and weigh it zero: a NaN there may come out.
        """
        if self.boxes is None:
            with torch.inference_mode(False):
                self._derived["boxes"] = _found_boxes(self)
        assert self.boxes is not None
        return self.boxes

    def lists(self) -> Iterator[Tensor]:
        """Everything along whose last axis a plan may be of any length, with what was derived so far."""
        yield from (self.offsets, self.blocks)
        for value in self._derived.values():
            if isinstance(value, Plan):
                yield from value.lists()
            elif isinstance(value, Boxes):
                yield from value
            elif isinstance(value, Tensor):
                yield value

    def _derive(self, name: Hashable, make: Callable[[], Derived]) -> Derived:
        """What `make` gives, kept for the next time wherever that is safe."""
        if name in self._derived:
            kept: Derived = self._derived[name]
            return kept
        if torch.compiler.is_compiling():
            return make()
        # Made in inference mode it could not serve a training step later.
        with torch.inference_mode(False):
            value = make()
        made = value.offsets if isinstance(value, Plan) else value
        is_real = type(made) is type(self.offsets)  # not a stand-in of a tracer
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if is_real and not is_captured:  # a graph's memory holds nothing before its first replay
            self._derived[name] = value
        return value

    def to(self, device: torch.device | str) -> "Plan":
        """The same plan with its lists on `device`; itself if they are there already."""
        lists = self.offsets.to(device), self.blocks.to(device)
        if lists[0] is self.offsets:  # torch knows that "cuda" and "cuda:0" may be one device
            return self
        sizes = self.q_block, self.k_block, self.num_queries, self.num_keys
        return Plan(*lists, *sizes, uniform=self.uniform, check=False)

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


@kept
def _first_cells(lists: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The number of the first cell of every column of every list, `[lists, columns + 1]`."""
    return torch.arange(lists * (columns + 1), device=device, dtype=dtype).view(lists, -1) * rows


@kept
def _first_slots(lists: int, capacity: int, device: torch.device) -> Tensor:
    """Where every list begins among all of them, `[lists, 1]`."""
    return torch.arange(lists, device=device)[:, None] * capacity


def _found_boxes(plan: Plan) -> Boxes:
    if plan.k_block != 1:
        wrong_value("k_block", "be 1 where lists are to be boxes", plan.k_block)
    if plan.num_keys > _INT32 // (2 * BOX):
        wrong_value(
            "num_keys", f"be at most {_INT32 // (2 * BOX)} where lists are to be boxes", plan.num_keys
        )
    blocks = plan.blocks.flatten(0, 1)
    row, used = (x.flatten(0, 1) for x in plan.entry_rows())
    begins = used.clone()
    begins[:, 1:] &= (blocks.diff() != 1) | (row.diff() != 0)
    # Each stretch ends where the next one of its list begins, the last where its list ends; it is cut into boxes.
    of_list, slot = begins.nonzero().unbind(1)
    end = used.sum(1)[of_list]
    end[:-1] = torch.where(of_list[1:] == of_list[:-1], slot[1:], end[:-1])
    pieces = (end - slot + BOX - 1) // BOX
    stretch = torch.repeat_interleave(pieces)
    number = torch.arange(len(stretch), device=plan.device)
    place = slot[stretch] + (number - (pieces.cumsum(0) - pieces)[stretch]) * BOX
    of_list, length = of_list[stretch], (end[stretch] - place).clamp(max=BOX)
    counts = torch.bincount(
        of_list * plan.num_rows + row[of_list, place], minlength=len(blocks) * plan.num_rows
    )
    offsets = torch.nn.functional.pad(counts.view(len(blocks), -1).cumsum(1), (1, 0))
    boxes = blocks.new_zeros(len(blocks), max(1, int(offsets[:, -1].max())))
    before = offsets[:, -1].cumsum(0) - offsets[:, -1]
    boxes[of_list, number - before[of_list]] = blocks[of_list, place] * (2 * BOX) + length.int()
    shape = plan.blocks.shape[:2]
    return Boxes(offsets.int().view(*shape, -1), boxes.view(*shape, -1))


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


KnownPart = tuple[Tensor, Tensor, Plan, Tensor | None, bool]
"""What implementations are given of each part of one softmax: keys, values, who reads them, a bias, and whether rows
that are next to each other are alike."""
