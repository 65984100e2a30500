"""Predicting what full attention would read: which blocks of keys are worth reading for each block of queries.

Two ways, at any grain. By weights: the largest weight that full attention gives each block, computed exactly in a
second pass over the scores; worth doing once for many calls. By means: attention among the means of blocks, cheap
enough for every call.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from nearfield import kernels
from nearfield._types import Impl
from nearfield.levels import num_represented
from nearfield.plan import Plan
from nearfield.planning import Span, from_mask, key_lists
from nearfield.reference import columns as reference
from nearfield.reference import pool as pooling


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
        return self.keep.float().mean()


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

    def kept(self, keep: Tensor) -> Tensor:
        """A mask with the spans that are always read."""
        for start, stop in self.both:
            if start < stop:
                keep[..., start // self.q_block : -(-stop // self.q_block), :] = True
                keep[..., start // self.k_block : -(-stop // self.k_block)] = True
        return keep

    def plan(self, keep: Tensor, *, compact: bool) -> Plan:
        """`compact` lists take as little memory as they can, and wait for the device to learn how little that is."""
        sizes = self._asdict()
        del sizes["both"]
        if compact:
            return from_mask(keep, **sizes)
        columns = keep.shape[-1]
        ids = torch.arange(columns, device=keep.device, dtype=torch.int32)
        ids = torch.where(keep, ids, columns).sort(dim=-1).values
        return key_lists(ids, keep.sum(-1), check=False, **sizes)


def by_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    blocks: Blocks,
    threshold: float,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Prediction:
    """Keep blocks in which some weight reaches `threshold`, and the best of every row.

    Args:
        lse: of full attention over these keys.
        threshold: 0 keeps everything.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    module = reference
    if impl not in ("grouped", "reference") and (impl != "auto" or query.is_cuda):
        module = kernels.helper("columns", query, blocks.k_block) or reference
    with torch.no_grad():
        maxima, masses = module.column_statistics(
            query, key, lse, blocks.q_block, blocks.k_block, float(scale)
        )
        keep = maxima >= threshold
        keep = keep.scatter(-1, maxima.argmax(-1, keepdim=True), True)
        keep = blocks.kept(keep)
        return Prediction(keep, _dropped(masses, keep, blocks))


def by_means(
    query: Tensor,
    key: Tensor,
    blocks: Blocks,
    *,
    mass: float | None = None,
    topk: int | None = None,
    guard: float | None = None,
    scale: float | None = None,
) -> Prediction:
    """Keep the best blocks by attention among means: the fewest that hold `mass` of it, or the `topk` best.

    Args:
        guard: blocks of queries, and of keys, whose tokens are less alike than that (mean cosine with their mean) are
            read whole: their mean does not stand for them.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    with torch.no_grad():
        repeats = query.shape[1] // key.shape[1]
        queries, keys = _means(query, blocks.q_block), _means(key, blocks.k_block)
        sizes = num_represented(blocks.num_keys, blocks.k_block, 1, key.device).to(queries.dtype)
        scores = scale * queries @ keys.repeat_interleave(repeats, 1).mT + sizes.log()
        weights = torch.softmax(scores, -1)
        order = weights.argsort(dim=-1, descending=True, stable=True)
        ranked = weights.gather(-1, order)
        if topk is not None:
            chosen = torch.arange(ranked.shape[-1], device=ranked.device).expand_as(ranked) < topk
        else:
            # The mass before a block: the one that reaches the wanted mass is still taken.
            chosen = ranked.cumsum(-1) - ranked < (1.0 if mass is None else mass)
        chosen[..., 0] = True
        keep = torch.zeros_like(chosen).scatter(-1, order, chosen)
        if guard is not None:
            unlike_rows = _likeness(query, queries, blocks.q_block) < guard
            unlike_columns = _likeness(key, keys, blocks.k_block) < guard
            keep = keep | unlike_rows[..., None] | unlike_columns.repeat_interleave(repeats, 1)[..., None, :]
        keep = blocks.kept(keep)
        return Prediction(keep, _dropped(weights, keep, blocks))


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


def _means(x: Tensor, block: int) -> Tensor:
    means = pooling.pool_forward(x if x.dtype == torch.float64 else x.float(), block, 1)
    return means[:, :, : -(-x.shape[2] // block)]


def _likeness(x: Tensor, means: Tensor, block: int) -> Tensor:
    """The mean cosine between the tokens of each block and their mean, `[B, H, blocks]`."""
    wide = x.to(means.dtype)
    cosine = cosine_similarity(wide, means.repeat_interleave(block, 2)[:, :, : x.shape[2]], dim=-1)
    return _means(cosine[..., None], block)[..., 0]


def _dropped(masses: Tensor, keep: Tensor, blocks: Blocks) -> Tensor:
    """The mass outside of a mask, averaged over queries."""
    lost = (masses * ~keep).sum(-1)
    sizes = num_represented(blocks.num_queries, blocks.q_block, 1, masses.device).to(masses.dtype)
    return (lost * sizes).sum(-1) / blocks.num_queries
