"""LLSA (arXiv 2512.16615): trainable attention whose cost grows with N log N.

Tokens are pooled into a pyramid. From its top down every query chooses the best few keys among the children of those
its parent chose, until whole blocks of tokens are chosen. It then reads, in one softmax,

- the tokens of the blocks it chose,
- at each level below the top the children of what was chosen one level above, each counting as often as it has tokens,
- all of the top level, counting likewise.

So near things are read exactly and far things in summary, and what is near is learned. Choosing has no gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nearfield import curves, dense_parts, planning, pyramid
from nearfield._checks import check_int, check_member, check_tensor, wrong_type, wrong_value
from nearfield._types import Attended, Impl
from nearfield.attend import attend, merge
from nearfield.geometry import Geometry
from nearfield.plan import Plan, check_block
from nearfield.tokenmap import Ordering

Order = Literal["hilbert", "morton", "raster"]

_ROWS = (128, 64, 32, 16, 8, 4, 2, 1)
_WIDEST = 128


@dataclass(frozen=True)
class LogLinear:
    """Hierarchical top-k over pooled levels, with the pooled levels read, too.

    Args:
        block: tokens that are pooled into one, at every level; also queries and keys per block.
        topk: keys that a query chooses at every level.
        levels: pooled levels; "auto" goes up as long as a level has at least a block of tokens.
        enrich: up to which level pooled keys are read; all by default, 0 reads chosen tokens only.
        order: the order of image tokens in which consecutive ones are pooled.
        exclude_selected: what is read at a finer level is left out of the coarser ones. (The paper counts it at all.)
        keep_own: a query always chooses the block it is in.
        dense_layers: how many of the first layers stay dense, or the indices of those that do.
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them.
    """

    block: int = 16
    topk: int = 8
    levels: int | Literal["auto"] = "auto"
    enrich: int | None = None
    order: Order = "hilbert"
    exclude_selected: bool = False
    keep_own: bool = False
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: int | float = 0

    def __post_init__(self) -> None:
        check_block("block", self.block)
        if not 2 <= self.block <= _WIDEST or self.block & (self.block - 1):
            wrong_value("block", f"be a power of two from 2 to {_WIDEST}", self.block)
        check_int("topk", self.topk, at_least=1)
        if self.levels != "auto":
            check_int("levels", self.levels, at_least=1)
        if self.enrich is not None:
            check_int("enrich", self.enrich, at_least=0)
        check_member("order", self.order, get_args(Order))
        for name in ("exclude_selected", "keep_own"):
            if not isinstance(getattr(self, name), bool):
                wrong_type(name, "be True or False", repr(getattr(self, name)))
        object.__setattr__(self, "dense_layers", dense_parts.checked_layers(self.dense_layers))
        dense_parts.check_steps(self.dense_steps)

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens (all images, one after another; the text stays where it is)."""
        return _ordering(self.order, geometry, str(device))

    def reader(
        self,
        geometry: Geometry,
        layer: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "LogLinearReader":
        """What a layer needs to attend. What it reads depends on its queries and keys, so little is made beforehand."""
        del layer, heads, device  # every layer and head chooses for itself
        return LogLinearReader(self, geometry)

    def num_levels(self, num_queries: int, num_keys: int) -> int:
        """Pooled levels for so many tokens; each has at least one of either."""
        length = min(num_queries, num_keys)
        most = pyramid.most_levels(length, self.block)
        if self.levels == "auto":
            return most
        highest = max(1, math.ceil(math.log(length, self.block))) if length > 1 else 1
        if self.levels > highest:
            wrong_value(
                "levels", f"be at most {highest} for {length} tokens in blocks of {self.block}", self.levels
            )
        return self.levels

    def keys_per_query(self, num_tokens: int) -> int:
        """The most keys that a query reads: what the cost grows with."""
        levels = self.num_levels(num_tokens, num_tokens)
        lengths = [pyramid.level_length(num_tokens, self.block, level) for level in range(levels + 1)]
        enriched = levels if self.enrich is None else min(self.enrich, levels)
        keys = sum(
            min(lengths[level], min(self.topk, lengths[level + 1]) * self.block)
            for level in range(min(levels, enriched + 1))
        )
        return keys + (lengths[levels] if enriched == levels else 0)

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        return dense_parts.layer_reason(self.dense_layers, layer, num_layers)

    def num_dense_steps(self, num_steps: int) -> int:
        """How many of `num_steps` denoising steps stay dense."""
        return dense_parts.num_steps(self.dense_steps, num_steps)

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry: levels, keys per query, pairs."""
        tokens = geometry.num_image_tokens
        levels = self.num_levels(tokens, tokens)
        lengths = [pyramid.level_length(tokens, self.block, level) for level in range(levels + 1)]
        density = self.reader(geometry, device=device).num_pairs / geometry.num_tokens**2
        return "\n".join(
            [
                f"{geometry}: {geometry.num_tokens} tokens in {self.order} order",
                f"  levels of {', '.join(map(str, lengths))} tokens; each query chooses {self.topk} at each",
                f"  keys per image query: at most {self.keys_per_query(tokens) + geometry.text}",
                f"  pairs kept: {density:.1%} (at most {1 / density:.2f}x faster than dense)",
            ]
        )


class LogLinearReader(NamedTuple):
    """What one layer reads: chosen anew at every call."""

    method: LogLinear
    geometry: Geometry

    @property
    def num_pairs(self) -> int:
        """Pairs read per batch element and head, at most."""
        geometry = self.geometry
        image = geometry.num_image_tokens
        keys = self.method.keys_per_query(image) + geometry.text
        return image * min(keys, geometry.num_tokens) + geometry.text * geometry.num_tokens

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended:
        """Attention among tokens in the method's order, `[B, H, N, D]`. `key_bias` may hide text, not image tokens."""
        text = slice(*self.geometry.text_span)
        if not self.geometry.text:
            return _attend(self.method, query, key, value, None, scale, impl)
        image = _without(self.geometry.text_span, key.shape[2])
        bias = None if key_bias is None else key_bias.expand(*key_bias.shape[:-1], key.shape[2])
        known = _Text(key[:, :, text], value[:, :, text], None if bias is None else bias[..., text])
        picture = _attend(
            self.method, query[:, :, image], key[:, :, image], value[:, :, image], known, scale, impl
        )
        full = _full_plan(self.geometry.text, key.shape[2], str(query.device))
        words = attend(query[:, :, text], key, value, full, key_bias=bias, scale=scale, impl=impl)
        parts = (words, picture) if self.geometry.text_first else (picture, words)
        return Attended(
            torch.cat([part.out for part in parts], 2), torch.cat([part.lse for part in parts], 2)
        )


def log_linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: Geometry | None = None,
    *,
    method: LogLinear | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Log-linear attention for tokens that already stand in an order in which neighbours are consecutive.

    Args:
        query: `[B, H, N, D]`.
        key, value: `[B, G, M, D]`; `M` may differ from `N` where there is no geometry.
        geometry: where text and images stand, in the order of `method.ordering(geometry)`; without it all tokens are
            pooled alike.
        method: its fields; the defaults of `LogLinear` if left out.
        key_mask: `[B, M]` bool, False for text that nobody may read. Needs a geometry.
    """
    check_tensor("query", query, dims=4, hint="Expected [batch, heads, tokens, head_dim].")
    check_tensor("key", key, dims=4, hint="Expected [batch, heads, tokens, head_dim].")
    method = method or LogLinear()
    if geometry is None:
        if key_mask is not None:
            wrong_value("key_mask", "come with a `geometry` that says where the text is", "no geometry")
        return _attend(method, query, key, value, None, scale, impl).out
    if query.shape[2] != geometry.num_tokens or key.shape[2] != geometry.num_tokens:
        got = (query.shape[2], key.shape[2])
        wrong_value(
            "query", f"have the {geometry.num_tokens} tokens of the geometry ({geometry}), as `key`", got
        )
    bias = None
    if key_mask is not None:
        bias = torch.zeros(key_mask.shape, device=key_mask.device).masked_fill(~key_mask, -torch.inf)[:, None]
    reader = method.reader(geometry, device=query.device)
    return reader.attend(query, key, value, key_bias=bias, scale=scale, impl=impl).out


class LogLinearAttention(nn.Module):
    """A self-attention layer for models of one's own: projections around `log_linear_attention`.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        method: fields of the method.
    """

    def __init__(self, dim: int, heads: int, method: LogLinear | None = None, bias: bool = True) -> None:
        super().__init__()
        check_int("heads", heads, at_least=1)
        if dim % heads:
            wrong_value("dim", f"be a multiple of `heads` ({heads})", dim)
        self.heads, self.method = heads, method or LogLinear()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, geometry: Geometry | None = None, key_mask: Tensor | None = None) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        query, key, value = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = log_linear_attention(query, key, value, geometry, method=self.method, key_mask=key_mask)
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected


# -- one call ------------------------------------------------------------------------------------------------------


class _Text(NamedTuple):
    """Keys that every image query reads exactly."""

    key: Tensor
    value: Tensor
    bias: Tensor | None


def _attend(
    method: LogLinear,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    text: _Text | None,
    scale: float | None,
    impl: Impl,
) -> Attended:
    """Chosen blocks are read by blocks of queries; summaries, which siblings share, by wider ones; merged by `lse`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    levels = method.num_levels(num_queries, num_keys)
    keys, values = (pyramid.pooled(x, method.block, levels) for x in (key, value))
    queries = pyramid.pooled(query.detach(), method.block, levels)
    # Choosing compares products: a negative scale would turn best into worst.
    queries = queries if scale is None or scale >= 0 else tuple(-x for x in queries)
    picks = pyramid.select_blocks(
        queries, keys, method.block, method.topk, keep_own=method.keep_own, impl=impl
    )
    fine = _fine_plan(picks[0], method.block, num_queries, num_keys)
    near = attend(query, key, value, fine, scale=scale, impl=impl)
    coarse = _Coarse.of(method, picks, num_queries, num_keys, levels, text)
    if coarse is None:
        return near
    far = attend(
        query,
        coarse.joined(keys, None if text is None else text.key),
        coarse.joined(values, None if text is None else text.value),
        coarse.plan,
        key_bias=coarse.bias,
        scale=scale,
        impl=impl,
    )
    return merge(near, far)


def _fine_plan(picks: Tensor, block: int, num_queries: int, num_keys: int) -> Plan:
    """Every block of queries reads the blocks it chose."""
    counts = (picks < pyramid.level_length(num_keys, block, 1)).sum(-1)
    return planning.key_lists(
        picks, counts, q_block=block, k_block=block, num_queries=num_queries, num_keys=num_keys, check=False
    )


# -- summaries -----------------------------------------------------------------------------------------------------


class _Coarse(NamedTuple):
    """Summaries, and the text, as one row of keys: sections that begin on multiples of the block.

    Args:
        plan: who reads which.
        bias: the log of how many tokens each key stands for, `-inf` for padding, `[B or 1, H or 1, keys]`.
        levels: which pooled levels the first sections are.
        block: sections are padded to it.
    """

    plan: Plan
    bias: Tensor
    levels: range
    block: int

    @classmethod
    def of(
        cls,
        method: LogLinear,
        picks: Sequence[Tensor],
        num_queries: int,
        num_keys: int,
        levels: int,
        text: _Text | None,
    ) -> "_Coarse | None":
        """None where nothing but chosen tokens is read."""
        enriched = levels if method.enrich is None else min(method.enrich, levels)
        if not enriched and text is None:
            return None
        device = picks[0].device
        read = range(1, enriched + 1)
        sections = [_level_bias(num_keys, method.block, level, device) for level in read]
        if text is not None:
            sections.append(_text_bias(text))
        lengths = [section.shape[-1] for section in sections]
        lists = _Lists(method, picks, num_queries, num_keys, levels)
        plan = lists.plan(read, lengths, has_text=text is not None)
        return cls(plan, _joined_bias(sections, method.block), read, method.block)

    def joined(self, pooled: Sequence[Tensor], text: Tensor | None) -> Tensor:
        parts = [pooled[level - 1] for level in self.levels]
        if text is not None:
            parts.append(text)
        return torch.cat([_padded(part, self.block) for part in parts], dim=2)


def _level_bias(length: int, block: int, level: int, device: torch.device | str) -> Tensor:
    """The log of how many tokens each of a level stands for, `[1, 1, n]`."""
    return pyramid.num_represented(length, block, level, device).double().log()[None, None]


def _text_bias(text: _Text) -> Tensor:
    if text.bias is None:
        return torch.zeros(1, 1, text.key.shape[2], dtype=torch.float64, device=text.key.device)
    return text.bias[(None,) * (3 - text.bias.dim())].double()


def _padded(x: Tensor, block: int) -> Tensor:
    short = -x.shape[2] % block
    return pad(x, (0, 0, 0, short)) if short else x


def _joined_bias(sections: Sequence[Tensor], block: int) -> Tensor:
    batch, heads = (max(section.shape[dim] for section in sections) for dim in (0, 1))
    parts = [
        pad(section, (0, -section.shape[-1] % block), value=-torch.inf).expand(batch, heads, -1)
        for section in sections
    ]
    return torch.cat(parts, dim=-1)


class _Lists(NamedTuple):
    """The lists of the plan over summaries. Ids count blocks; single keys where some of a block are left out."""

    method: LogLinear
    picks: Sequence[Tensor]
    num_queries: int
    num_keys: int
    levels: int

    @property
    def q_block(self) -> int:
        """Queries that share their lists: all that have one grandparent, unless exclusion tells siblings apart."""
        block = self.method.block
        if self.method.exclude_selected:
            return block
        return next(rows for rows in _ROWS if block**2 % rows == 0)

    @property
    def k_block(self) -> int:
        return 1 if self.method.exclude_selected else self.method.block

    def plan(self, read: range, lengths: Sequence[int], has_text: bool) -> Plan:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + -(-length // self.method.block) * self.method.block)
        first_ids = [start // self.k_block for start in starts]
        unused = first_ids[-1]  # sorts behind every id
        sections = []
        for level, first in zip(read, first_ids, strict=False):
            ids, is_read = self._top() if level == self.levels else self._children(level)
            sections.append(torch.where(is_read, ids + first, unused))
        if has_text:
            sections.append(self._every(lengths[-1]) + first_ids[-2])
        rows = -(-self.num_queries // self.q_block)
        shape = (*self.picks[0].shape[:2], rows, -1)
        ids = torch.cat([section.expand(shape) for section in sections], dim=-1).sort(dim=-1).values
        return planning.key_lists(
            ids,
            (ids < unused).sum(-1),
            q_block=self.q_block,
            k_block=self.k_block,
            num_queries=self.num_queries,
            num_keys=starts[-1],
            check=False,
        )

    def _children(self, level: int) -> tuple[Tensor, Tensor]:
        """The tokens of a level whose parents were chosen, and which of them are read."""
        parents = self._picked(level + 1)
        is_read = parents < self._length(level + 1)
        if not self.method.exclude_selected:
            return parents, is_read
        block = self.method.block
        ids = (parents[..., None] * block + torch.arange(block, device=parents.device)).flatten(-2)
        is_read = is_read.repeat_interleave(block, -1) & (ids < self._length(level))
        return ids, is_read & ~_is_among(ids, self._picked(level))

    def _top(self) -> tuple[Tensor, Tensor]:
        """All tokens of the highest level."""
        ids = self._every(self._length(self.levels))
        if not self.method.exclude_selected:
            return ids, torch.ones_like(ids, dtype=torch.bool)
        picked = self._picked(self.levels)
        ids = ids.expand(*picked.shape[:3], -1)
        return ids, ~_is_among(ids, picked)

    def _every(self, length: int) -> Tensor:
        return torch.arange(-(-length // self.k_block), device=self.picks[0].device).view(1, 1, 1, -1)

    def _picked(self, level: int) -> Tensor:
        """What the ancestor of each row chose at a level, `[B, H, rows, k]`."""
        rows = torch.arange(0, self.num_queries, self.q_block, device=self.picks[0].device)
        return self.picks[level - 1].index_select(2, rows // self.method.block**level).long()

    def _length(self, level: int) -> int:
        return pyramid.level_length(self.num_keys, self.method.block, level)


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    return (ids[..., None] == others[..., None, :]).any(-1)


# -- layouts -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _ordering(order: Order, geometry: Geometry, device: str) -> Ordering:
    make = {"hilbert": curves.hilbert, "morton": curves.morton, "raster": curves.raster}[order]
    with torch.inference_mode(False):
        return Ordering.joined([make(grid) for grid in geometry.images]).to(device)


@lru_cache(maxsize=64)
def _full_plan(num_queries: int, num_keys: int, device: str) -> Plan:
    with torch.inference_mode(False):
        return planning.full(num_queries, num_keys, device=device)


def _without(text: tuple[int, int], length: int) -> slice:
    """The images: what is left of a sequence whose text stands at one of its ends."""
    return slice(text[1], length) if text[0] == 0 else slice(0, text[0])
