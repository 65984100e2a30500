"""Predicting what full attention would read: which blocks of keys are worth reading for each block of queries.

Three ways, at any grain. By weights: the largest weight that full attention gives each block, computed exactly in a
second pass over the scores; worth doing once for many calls. By means: attention among the means of blocks, cheap
enough for every call. By scores: whatever a method computes for each pair of blocks.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield._types import Impl
from nearfield.layout import num_represented
from nearfield.ops._op import Operation
from nearfield.ops._triton import kernels
from nearfield.ops.predict.reference import choose, columns, means
from nearfield.plan import Plan, Span, from_mask

_MOST_CELLS = 2**28
"""Blocks of queries times blocks of keys whose weights are looked at together."""


class Prediction(NamedTuple):
    """Who shall read whom, and what that leaves out.

    Args:
        keep: `[B, H, rows, columns]` bool, in every row at least one.
        dropped: `[B, H]`, the share of the weights that is not read, on average over queries; by means an estimate.
    """

    keep: Tensor
    dropped: Tensor

    @property
    def kept(self) -> Tensor:
        """The share of blocks that are read, a scalar on the device."""
        return self.keep.mean(dtype=torch.float32)  # a copy in float32 would take longer than the choice


class Blocks(NamedTuple):
    """How a prediction is cut, and what is read whatever it says.

    Args:
        both: spans of tokens that read every key and are read by every query (text).
    """

    q_block: int
    k_block: int
    num_queries: int
    num_keys: int
    both: tuple[Span, ...] = ()

    def blank(self, device: torch.device) -> Plan:
        """A plan of such blocks that lists nothing yet: for asking what would run it."""
        rows = -(-self.num_queries // self.q_block)
        offsets, lists = (
            torch.zeros(1, 1, length, device=device, dtype=torch.int32) for length in (rows + 1, 0)
        )
        return Plan(offsets, lists, self.q_block, self.k_block, self.num_queries, self.num_keys, check=False)

    def plan(self, keep: Tensor, *, compact: bool) -> Plan:
        """`compact` lists take as little memory as they can, and wait for the device to learn how little that is."""
        sizes = self._asdict()
        del sizes["both"]
        return from_mask(keep, **sizes, compact=compact)

    def always(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which rows read everything, and which columns everything reads: two vectors of bool."""
        rows = torch.zeros(-(-self.num_queries // self.q_block), device=device, dtype=torch.bool)
        columns = torch.zeros(-(-self.num_keys // self.k_block), device=device, dtype=torch.bool)
        for start, stop in self.both:
            if start < stop:
                rows[start // self.q_block : -(-stop // self.q_block)] = True
                columns[start // self.k_block : -(-stop // self.k_block)] = True
        return rows, columns


def by_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    blocks: Blocks,
    threshold: float,
    *,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Prediction:
    """Keep blocks in which some weight reaches `threshold`, and the best of every row.

    Args:
        lse: of full attention over these keys, with their bias.
        threshold: 0 keeps everything.
        key_bias: `[B, H or 1, M]`, added to the logits of keys: what it hides (`-inf`) has no weight.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    module = (
        kernels("predict.triton.columns", impl, query, blocks.k_block if key_bias is None else 1) or columns
    )
    rows_whole, always = blocks.always(query.device)
    keeps, dropped = [], []
    with torch.no_grad(), torch.cuda.device_of(query):
        # A few key heads at a time: the weights of all would take more memory than the lists.
        # A bias differs from key to key, so its weights are known by the key, and put together afterwards.
        grain = blocks.k_block if key_bias is None else 1
        for some_keys, some_queries in _head_chunks(query, key, blocks._replace(k_block=grain)):
            maxima, masses = module.column_statistics(
                query[:, some_queries],
                key[:, some_keys],
                lse[:, some_queries],
                blocks.q_block,
                grain,
                float(scale),
            )
            if key_bias is not None:
                bias = key_bias if key_bias.shape[1] == 1 else key_bias[:, some_queries]
                maxima, masses = _weighed(maxima, masses, bias.detach(), blocks.k_block)
            keep = maxima >= threshold
            keep |= rows_whole[:, None] | always
            keep.scatter_(-1, maxima.argmax(-1, keepdim=True), True)
            keeps.append(keep)
            dropped.append(_dropped(masses.masked_fill(keep, 0).sum(-1), blocks))
        return Prediction(_joined(keeps), _joined(dropped))


def _weighed(maxima: Tensor, masses: Tensor, key_bias: Tensor, k_block: int) -> tuple[Tensor, Tensor]:
    """Statistics of single keys, to which their bias is added, for blocks of `k_block` keys."""
    bias = key_bias[:, :, None].to(maxima.dtype)
    is_hidden, factor = bias == -math.inf, bias.exp()
    # What is hidden may have had a score so high that its weight is infinite.
    maxima, masses = ((part * factor).masked_fill_(is_hidden, 0) for part in (maxima, masses))
    whole = (0, -maxima.shape[-1] % k_block)
    cells = [pad(part, whole).unflatten(-1, (-1, k_block)) for part in (maxima, masses)]
    return cells[0].amax(-1), cells[1].sum(-1)


def by_means(
    query: Tensor,
    key: Tensor,
    blocks: Blocks,
    *,
    mass: float | None = None,
    topk: int | None = None,
    guard: float | None = None,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Prediction:
    """Keep the best blocks by attention among means: the fewest that hold `mass` of it, or the `topk` best.

    Rows whose means are not numbers are read whole, so that attention is not a number, either.

    Args:
        key_bias: `[B, H or 1, M]`, added to the logits of keys: what it hides (`-inf`) has no mass.
        guard: blocks of queries, and of keys, whose tokens are less alike than that (mean cosine with their mean) are
            read whole: their mean does not stand for them.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    whole, always = blocks.always(query.device)
    keep, lost = _keep_by_means(
        query.detach(), key.detach(), log_masses(blocks, key_bias, query), whole, always,
        blocks.q_block, blocks.k_block, mass, topk, guard, scale, impl,
    )  # fmt: skip
    return Prediction(keep, _dropped(lost, blocks))


def _keep_by_means_forward(
    query: Tensor,
    key: Tensor,
    log_sizes: Tensor,
    whole: Tensor,
    always: Tensor,
    q_block: int,
    k_block: int,
    mass: float | None,
    topk: int | None,
    guard: float | None,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """What is kept, and the mass that each row loses."""
    pool = kernels("predict.triton.means", impl, query) or means
    with torch.cuda.device_of(query):
        queries, query_likeness = pool.block_means(query, q_block)
        keys, key_likeness = pool.block_means(key, k_block)
    whole, always = (part.expand(*x.shape[:2], -1) for part, x in ((whole, query), (always, key)))
    if guard is not None:
        whole, always = whole | (query_likeness < guard), always | (key_likeness < guard)
    scores = _scores_of_means(scale * queries, keys).add_(log_sizes)
    return _chosen(scores, whole, always, mass, topk, impl)


def _keep_by_means_shapes(
    query: Tensor,
    key: Tensor,
    log_sizes: Tensor,
    whole: Tensor,
    always: Tensor,
    q_block: int,
    k_block: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    rows = *query.shape[:2], -(-query.shape[2] // q_block)
    wide = torch.promote_types(query.dtype, torch.float32)
    keep = query.new_empty(*rows, -(-key.shape[2] // k_block), dtype=torch.bool)
    return keep, query.new_empty(rows, dtype=wide)


_keep_by_means = Operation("keep_by_means", _keep_by_means_forward, _keep_by_means_shapes)


def by_scores(
    scores: Tensor,
    blocks: Blocks,
    *,
    mass: float | None = None,
    topk: int | None = None,
    also: Tensor | None = None,
    impl: Impl = "auto",
) -> Prediction:
    """Keep the best blocks by scores `[B, H, rows, columns]`: the fewest that hold `mass` of their softmax, or the
    `topk` best. Rows whose softmax is not a number are read whole.

    Args:
        also: bool, broadcastable to the scores: blocks that are kept whatever their score is.
    """
    scores = scores.detach()
    whole, always = (part.expand(*scores.shape[:2], -1) for part in blocks.always(scores.device))
    keep, lost = _keep_by_scores(scores, whole, always, mass, topk, impl)
    if also is not None:
        keep = keep | also
        lost = torch.softmax(scores, -1).masked_fill(keep, 0).sum(-1)
    return Prediction(keep, _dropped(lost, blocks))


def _keep_by_scores_forward(
    scores: Tensor, whole: Tensor, always: Tensor, mass: float | None, topk: int | None, impl: str
) -> tuple[Tensor, Tensor]:
    return _chosen(scores, whole, always, mass, topk, impl)


def _keep_by_scores_shapes(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape, dtype=torch.bool), scores.new_empty(scores.shape[:3])


_keep_by_scores = Operation("keep_by_scores", _keep_by_scores_forward, _keep_by_scores_shapes)


def _chosen(
    scores: Tensor, whole: Tensor, always: Tensor, mass: float | None, topk: int | None, impl: str
) -> tuple[Tensor, Tensor]:
    """What is kept, and the mass that each row loses."""
    if mass is not None and mass >= 1:
        whole = torch.ones_like(whole)
    pick = kernels("predict.triton.choose", impl, scores) or choose
    count = scores.shape[-1] if topk is None else topk
    with torch.cuda.device_of(scores):
        keep, lost = pick.choose(scores, whole, always, mass=mass, count=count)
    return keep, lost


def _scores_of_means(queries: Tensor, keys: Tensor) -> Tensor:
    repeats = queries.shape[1] // keys.shape[1]
    grouped: Tensor = queries.unflatten(1, (-1, repeats))
    return (grouped @ keys.mT[:, :, None]).flatten(1, 2)


def _head_chunks(query: Tensor, key: Tensor, blocks: Blocks) -> Iterator[tuple[slice, slice]]:
    """Heads of keys and of the queries that read them, few enough for `_MOST_CELLS`."""
    repeats = query.shape[1] // key.shape[1]
    rows, num_columns = -(-blocks.num_queries // blocks.q_block), -(-blocks.num_keys // blocks.k_block)
    step = max(1, _MOST_CELLS // max(1, query.shape[0] * repeats * rows * num_columns))
    for start in range(0, key.shape[1], step):
        stop = min(start + step, key.shape[1])
        yield slice(start, stop), slice(start * repeats, stop * repeats)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Mask(NamedTuple):
    """A mask as it is kept between calls: packed, with what a plan of it needs and could only wait for.

    Args:
        bits: `[B, H, rows, ceil(columns / 8)]` uint8, on any device.
        offsets: of the plan's lists.
        capacity: the most that the lists of one head hold.
        uniform: whether all lists are equally long.
    """

    bits: Tensor
    offsets: Tensor
    capacity: int
    uniform: bool

    @classmethod
    def of(cls, keep: Tensor) -> "Mask":
        """Waits for the device, to learn how long the lists are."""
        counts = keep.sum(-1)
        offsets = pad(counts.cumsum(-1), (1, 0))
        found = torch.stack([offsets[..., -1].max(), counts.min(), counts.max()])
        capacity, shortest, longest = found.tolist()
        return cls(packed(keep), offsets.to(torch.int32), capacity, shortest == longest)

    @property
    def num_bytes(self) -> int:
        return self.bits.nbytes + self.offsets.nbytes

    @property
    def num_list_bytes(self) -> int:
        """What its lists would take."""
        batch, heads = self.bits.shape[:2]
        return 4 * batch * heads * self.capacity + self.offsets.nbytes

    def plan(self, blocks: Blocks, device: torch.device) -> Plan:
        """The lists again, on a device, without waiting for it."""
        columns = -(-blocks.num_keys // blocks.k_block)
        keep = unpacked(self.bits.to(device, non_blocking=True), columns)
        lists = torch.ops.nearfield.lists_of(keep, self.offsets, self.capacity)
        sizes = blocks.q_block, blocks.k_block, blocks.num_queries, blocks.num_keys
        return Plan(self.offsets, lists, *sizes, uniform=self.uniform, check=False)

    def on_host(self) -> "Mask":
        """The same in host memory, from where a GPU fetches it without waiting."""
        bits = self.bits.cpu()
        return self._replace(bits=bits.pin_memory() if self.bits.is_cuda else bits)


class ReadStats:
    """What calls have read: how many read everything, and what the others kept and dropped on average."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_full = self.num_sparse = 0
        self._kept: Tensor | float = 0.0
        self._dropped: Tensor | float = 0.0

    def add_full(self) -> None:
        self.num_full += 1

    def add(self, kept: Tensor, dropped: Tensor) -> None:
        """A sparse call. Where torch.compile traces it, it is not counted."""
        if not torch.compiler.is_compiling():
            self.num_sparse += 1
            self._kept, self._dropped = self._kept + kept, self._dropped + dropped

    @property
    def kept(self) -> float:
        """The share of keys that sparse calls read. Waits for the device."""
        return float(self._kept) / self.num_sparse if self.num_sparse else math.nan

    @property
    def dropped(self) -> float:
        """The share of the weights that sparse calls did not read. Waits for the device."""
        return float(self._dropped) / self.num_sparse if self.num_sparse else math.nan


def packed(keep: Tensor) -> Tensor:
    """A mask with eight columns to a byte, for keeping: `[..., columns]` bool to `[..., ceil(columns / 8)]` uint8."""
    bits: Tensor = pad(keep, (0, -keep.shape[-1] % 8)).unflatten(-1, (-1, 8))
    places = torch.tensor([1 << bit for bit in range(8)], device=keep.device, dtype=torch.uint8)
    return (bits * places).sum(-1, dtype=torch.uint8)


def unpacked(bits: Tensor, columns: int) -> Tensor:
    """The mask that `packed` packed."""
    places = torch.tensor([1 << bit for bit in range(8)], device=bits.device, dtype=torch.uint8)
    mask: Tensor = ((bits[..., None] & places) > 0).flatten(-2)
    return mask[..., :columns]


def log_masses(blocks: Blocks, key_bias: Tensor | None, query: Tensor) -> Tensor:
    """What a block adds to the score of its mean: the log of its number of keys, weighted by their bias.

    `[columns]`, or with a bias `[B, H or 1, 1, columns]`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    if key_bias is None:
        sizes = num_represented(blocks.num_keys, blocks.k_block, 1, query.device)
        return sizes.to(wide).log()
    bias = pad(key_bias.detach().to(wide), (0, -blocks.num_keys % blocks.k_block), value=-math.inf)
    weighted: Tensor = bias.unflatten(-1, (-1, blocks.k_block)).logsumexp(-1)
    return weighted[..., None, :]


def _dropped(lost: Tensor, blocks: Blocks) -> Tensor:
    """The mass that is lost in each row, averaged over queries."""
    sizes = num_represented(blocks.num_queries, blocks.q_block, 1, lost.device).to(lost.dtype)
    return (lost * sizes).sum(-1) / blocks.num_queries
