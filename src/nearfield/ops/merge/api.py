"""Merging: a map that makes one token of several alike ones, inside regions of the sequence, and its way back.

Regions are runs of consecutive tokens. In each, a few tokens are chosen as destinations
(`reference/destinations.py`), and every token is shared out among them by similarity:

    A = softmax over destinations of sharpness * cosine         [num_left, length], columns sum to one
    enter: X' = rows of A, each divided by its sum, times X     leave: X = A^T X'

Regions of one size stand side by side and are a view of the sequence, so that both ways are batched matrix products
without a gather. On a GPU one kernel does them, and what is added on the way back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from nearfield._checks import check_int, check_same_device, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Impl
from nearfield.ops._op import Operation, is_plain_eager
from nearfield.ops._triton import kernels
from nearfield.ops.merge.reference import destinations as reference
from nearfield.ops.merge.reference.regions import multiplied

_Views = tuple[Tensor, Tensor | None, Tensor | None]


class Group(NamedTuple):
    """Neighbouring regions of one size.

    Args:
        first: the first of the regions.
        num_regions: how many there are.
        length: tokens per region.
        num_left: how many of them are left.
        start: the first token of the first region.
        begin: where its merged tokens begin.
    """

    first: int
    num_regions: int
    length: int
    num_left: int
    start: int
    begin: int

    @property
    def is_kept(self) -> bool:
        """Whether nothing is merged here."""
        return self.num_left == self.length

    def starts(self, device: torch.device) -> Tensor:
        """The first token of each region, `[num_regions, 1]`."""
        return self.start + self.length * torch.arange(self.num_regions, device=device)[:, None]

    def merged(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of merged tokens, those of each region: a view `[..., num_regions, num_left, ...]`."""
        merged = x.narrow(dim, self.begin, self.num_regions * self.num_left)
        return torch.unflatten(merged, dim, (-1, self.num_left))

    def tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of all tokens, those of each region: a view `[..., num_regions, length, ...]`."""
        tokens = x.narrow(dim, self.start, self.num_regions * self.length)
        return torch.unflatten(tokens, dim, (-1, self.length))


@dataclass(frozen=True)
class Regions:
    """How a sequence is cut, and how much of each region is left.

    Args:
        lengths: tokens of each region, one after another.
        counts: how many tokens of each are left.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    groups: tuple[Group, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lengths or len(self.lengths) != len(self.counts):
            got = (len(self.lengths), len(self.counts))
            wrong_value("counts", "have one number for each of `lengths`, and at least one", got)
        for length, count in zip(self.lengths, self.counts, strict=True):
            check_int("lengths", length, at_least=1)
            check_int("counts", count, at_least=1)
            if count > length:
                wrong_value("counts", f"be at most the length of the region ({length})", count)
        object.__setattr__(self, "groups", _grouped(self.lengths, self.counts))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_merged(self) -> int:
        """Tokens that are left."""
        return sum(self.counts)


def _grouped(lengths: Sequence[int], counts: Sequence[int]) -> tuple[Group, ...]:
    groups: list[Group] = []
    first = start = begin = 0
    for (length, count), alike in groupby(zip(lengths, counts, strict=True)):
        number = sum(1 for _ in alike)
        groups.append(Group(first, number, length, count, start, begin))
        first, start, begin = first + number, start + number * length, begin + number * count
    return tuple(groups)


@dataclass(frozen=True, eq=False)
class Merging:
    """Tokens merged inside regions: `enter` merges, `leave` gives every token its share back.

    For hard assignment `leave` is the pseudo-inverse of `enter`; where nothing is merged both are the identity.

    Args:
        regions: where tokens are merged.
        destinations: `[B, merged]` int64: the token of the sequence that each merged token is named after, ascending
            inside a region.
        shares: for each group of regions `[B, num_regions, num_left, length]`: which part of every token goes to which
            destination; columns sum to one. None where tokens stay as they are.
        impl: who multiplies: kernels or plain torch, which also does what kernels cannot, and gradients.
    """

    regions: Regions
    destinations: Tensor
    shares: tuple[Tensor | None, ...]
    impl: Impl = "auto"
    sizes: Tensor = field(init=False)
    _means: tuple[Tensor | None, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes: list[Tensor] = []
        means: list[Tensor | None] = []
        wide = next((shares.dtype for shares in self.shares if shares is not None), torch.float32)
        for group, shares in zip(self.regions.groups, self.shares, strict=True):
            if shares is None:
                held = group.num_regions * group.num_left
                sizes.append(torch.ones(len(self.destinations), held, device=self.device, dtype=wide))
                means.append(None)
            else:
                size = shares.sum(-1, keepdim=True)
                sizes.append(size.flatten(1))
                means.append(shares / size)
        object.__setattr__(self, "sizes", torch.cat(sizes, 1))
        object.__setattr__(self, "_means", tuple(means))

    @property
    def device(self) -> torch.device:
        return self.destinations.device

    @property
    def key_bias(self) -> Tensor:
        """The log of how many tokens each merged one stands for, `[B, 1, merged]`: a `key_bias` of `attend`."""
        return self.sizes.log()[:, None]

    def to(self, dtype: torch.dtype) -> "Merging":
        """The same map, converted once for tokens of a dtype; sizes stay as they are."""

        def cast(matrices: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(None if matrix is None else matrix.to(dtype) for matrix in matrices)

        moved = object.__new__(Merging)
        for name, value in vars(self).items():
            is_matrix = name in ("shares", "_means")
            object.__setattr__(moved, name, cast(value) if is_matrix else value)
        return moved

    def enter(self, x: Tensor, dim: int = 1) -> Tensor:
        """Merged tokens: weighted means of the tokens of `x`, which stand in dimension `dim`."""
        moved = self._checked("x", x, dim, self.regions.num_tokens)
        return self._multiplied(_ENTER, self._means, moved).movedim(-2, dim)

    def leave(self, y: Tensor, dim: int = 1) -> Tensor:
        """All tokens: each the sum of its shares of the merged ones of `y`."""
        moved = self._checked("y", y, dim, self.regions.num_merged)
        return self._multiplied(_LEAVE, self._way_back(), moved).movedim(-2, dim)

    def update(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """All tokens `x [B, tokens, C]`, changed as merged ones were: `x + leave(after - before)`."""
        self._checked("x", x, 1, self.regions.num_tokens)
        for name, y in (("before", before), ("after", after)):
            self._checked(name, y, 1, self.regions.num_merged)
        return self._multiplied(_LEAVE, self._way_back(), after, before, x)

    def at_destinations(self, table: Tensor) -> Tensor:
        """Rows of a table of all tokens, `[tokens, ...]`, for the merged ones, `[B, merged, ...]`; as rotary ones."""
        if not isinstance(table, Tensor) or table.dim() < 1 or table.shape[0] != self.regions.num_tokens:
            got = shape_of(table) if isinstance(table, Tensor) else type(table).__name__
            wrong_value("table", f"have {self.regions.num_tokens} rows", got)
        return table[self.destinations]

    def _way_back(self) -> tuple[Tensor | None, ...]:
        return tuple(None if shares is None else shares.mT for shares in self.shares)

    def _multiplied(
        self,
        way: "_Way",
        matrices: Sequence[Tensor | None],
        x: Tensor,
        minus: Tensor | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """`onto + matrices @ (x - minus)`, region by region."""
        module = self._kernels(matrices, x, minus, onto)
        if module is not None:
            out = x.new_empty(len(x), way.length(self.regions), x.shape[2])
            for group, matrix in zip(self.regions.groups, matrices, strict=True):
                call = way.views(group, x, minus, onto)
                if matrix is None:
                    way.target(group, out, -2).copy_(multiplied(None, *call))
                    continue
                with torch.cuda.device_of(x):
                    module.multiply_into(way.target(group, out, -2), matrix.to(x.dtype), *call)
            return out
        # Heads, or whatever else stands between batch and tokens, share the matrices.
        shared = (slice(None), *[None] * (x.dim() - 3))
        parts = []
        for group, matrix in zip(self.regions.groups, matrices, strict=True):
            matrix = None if matrix is None else matrix[shared].to(x.dtype)
            parts.append(multiplied(matrix, *way.views(group, x, minus, onto)).flatten(-3, -2))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _kernels(self, matrices: Sequence[Tensor | None], x: Tensor, *others: Tensor | None) -> Any:
        """The kernels, where they are wanted and can run. They have no gradient."""
        merged = [group.length for group in self.regions.groups if not group.is_kept]
        if not merged or not is_plain_eager(x, *others, *matrices):
            return None
        others = tuple(other for other in others if other is not None)
        return kernels("merge.triton.regions", self.impl, x, others, max(merged))

    def _checked(self, name: str, x: Tensor, dim: int, length: int) -> Tensor:
        """`x` with its tokens in the last dimension but one."""
        if not isinstance(x, Tensor):
            wrong_type(name, "be a tensor", type(x).__name__)
        if x.dim() < 3:
            wrong_value(
                name, "have at least 3 dimensions", shape_of(x), "Expected [batch, tokens, channels]."
            )
        if not -x.dim() < dim < x.dim() or dim == 0:
            wrong_value("dim", f"be a dimension of `{name}` ({shape_of(x)}) after the batch", dim)
        if x.shape[dim] != length:
            wrong_value(name, f"have {length} tokens in dimension {dim}", shape_of(x))
        if len(x) != len(self.destinations):
            hint = "Every batch element has destinations of its own."
            wrong_value(name, f"have a batch of {len(self.destinations)}", shape_of(x), hint)
        check_same_device(name, x, "destinations", self.device)
        return x.movedim(dim, -2)


class _Way(NamedTuple):
    """Which tokens of a group are multiplied, and which come of it."""

    source: Callable[[Group, Tensor, int], Tensor]
    target: Callable[[Group, Tensor, int], Tensor]
    length: Callable[[Regions], int]

    def views(self, group: Group, x: Tensor, minus: Tensor | None, onto: Tensor | None) -> _Views:
        """Of what is given, the tokens of each region."""
        less = None if minus is None else self.source(group, minus, -2)
        base = None if onto is None else self.target(group, onto, -2)
        return self.source(group, x, -2), less, base


_ENTER = _Way(Group.tokens, Group.merged, lambda regions: regions.num_merged)
_LEAVE = _Way(Group.merged, Group.tokens, lambda regions: regions.num_tokens)


@dataclass(frozen=True, eq=False)
class Assignment:
    """Every token belongs whole to a merged one, anywhere in its image: means by a scatter, and a gather back.

    Args:
        regions: where tokens are merged.
        destinations: `[B, merged]` int64: the token that each merged one is named after, ascending.
        owners: `[B, tokens]` int64: which merged token each one belongs to.
    """

    regions: Regions
    destinations: Tensor
    owners: Tensor
    sizes: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = torch.zeros(self.destinations.shape, device=self.owners.device)
        sizes = sizes.scatter_add(1, self.owners, torch.ones_like(self.owners, dtype=sizes.dtype))
        object.__setattr__(self, "sizes", sizes)

    @property
    def key_bias(self) -> Tensor:
        """The log of how many tokens each merged one stands for, `[B, 1, merged]`."""
        return self.sizes.log()[:, None]

    def to(self, dtype: torch.dtype) -> "Assignment":
        """Itself: it holds no matrices."""
        del dtype
        return self

    def enter(self, x: Tensor) -> Tensor:
        """Means of the tokens of each merged one, `[B, tokens, C]` to `[B, merged, C]`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        index = self.owners[..., None].expand_as(wide)
        sums = wide.new_zeros(len(x), self.regions.num_merged, x.shape[2]).scatter_add(1, index, wide)
        return (sums / self.sizes[..., None].to(sums.dtype)).to(x.dtype)

    def leave(self, y: Tensor) -> Tensor:
        """Every token gets what its merged one holds."""
        return y.gather(1, self.owners[..., None].expand(-1, -1, y.shape[2]))

    def update(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """All tokens `x`, changed as merged ones were."""
        return x + self.leave(after - before)

    def at_destinations(self, table: Tensor) -> Tensor:
        """Rows of a table of all tokens, `[tokens, ...]`, for the merged ones, `[B, merged, ...]`."""
        return table[self.destinations]


def matched(features: Tensor, regions: Regions, is_destination: Tensor) -> Assignment:
    """Merge the tokens that are most like some destination into it; all others stay as they are.

    Args:
        features: `[B, tokens, C]`.
        regions: each keeps its destinations, and as many others as it has to.
        is_destination: `[tokens]` bool, on the CPU; every region has one at least.
    """
    _check_features(features, regions)
    unit = normalize(features.detach().to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
    token = torch.arange(regions.num_tokens, device=features.device)
    owner = token.expand(len(features), -1)
    start = 0
    for length, count in zip(regions.lengths, regions.counts, strict=True):
        mine = is_destination[start : start + length]
        sources, targets = ((start + some.nonzero().flatten()).to(unit.device) for some in (~mine, mine))
        best, nearest = (unit[:, sources] @ unit[:, targets].mT).max(dim=2)
        merged = best.argsort(dim=1, descending=True, stable=True)[:, : length - count]
        owner = owner.scatter(1, sources[merged], targets[nearest.gather(1, merged)])
        start += length
    is_kept = owner == token
    destinations = torch.where(is_kept, token, regions.num_tokens).sort(dim=1).values[:, : regions.num_merged]
    slots = is_kept.cumsum(1) - 1
    return Assignment(regions, destinations, slots.gather(1, owner))


# -- making one ----------------------------------------------------------------------------------------------------


def merging_of(
    features: Tensor,
    regions: Regions,
    *,
    sharpness: float = math.inf,
    destinations: Tensor | None = None,
    impl: Impl = "auto",
) -> Merging:
    """Which tokens become one, by what they hold.

    Choosing destinations has no gradient; soft shares have one.

    Args:
        features: `[B, tokens, C]`: tokens are alike if their directions are.
        regions: where tokens are merged, and how many are left.
        sharpness: how much more of itself a token gives to destinations that are more alike; infinite: all to one.
        destinations: those of an earlier map of the same regions; chosen anew by default.
    """
    _check_features(features, regions)
    if destinations is None:
        destinations = _destinations(features, regions, impl)
    else:
        check_tensor("destinations", destinations, dims=2)
        shape = (len(features), regions.num_merged)
        if destinations.shape != shape:
            wrong_value("destinations", f"have shape {list(shape)}", shape_of(destinations))
        check_same_device("destinations", destinations, "features", features.device)
    shares = tuple(
        None if group.is_kept else _shares(features, destinations, group, sharpness)
        for group in regions.groups
    )
    return Merging(regions, destinations, shares, impl)


def _check_features(features: Tensor, regions: Regions) -> None:
    check_tensor("features", features, dims=3, hint="Expected [batch, tokens, channels].")
    if not features.is_floating_point():
        wrong_type("features", "have a floating dtype", features.dtype)
    if features.shape[1] != regions.num_tokens:
        wrong_value("features", f"have {regions.num_tokens} tokens", shape_of(features))


def _destinations(features: Tensor, regions: Regions, impl: Impl) -> Tensor:
    if all(group.is_kept for group in regions.groups):
        return torch.arange(regions.num_tokens, device=features.device).expand(len(features), -1)
    chosen: Tensor = _choose_destinations(features.detach(), regions.lengths, regions.counts, impl)
    return chosen


def _shares(features: Tensor, destinations: Tensor, group: Group, sharpness: float) -> Tensor:
    """Which part of each token goes to which destination, `[B, num_regions, num_left, length]`."""
    tokens = group.tokens(features)
    unit = normalize(tokens.to(torch.promote_types(tokens.dtype, torch.float32)), dim=-1)
    local = (group.merged(destinations) - group.starts(features.device))[..., None]
    similarity = unit.gather(2, local.expand(-1, -1, -1, unit.shape[3])) @ unit.mT
    if math.isfinite(sharpness):
        return (sharpness * similarity).softmax(2)
    # A destination keeps itself even where another equals it: none is left empty.
    is_own = local == torch.arange(group.length, device=features.device)
    nearest = similarity.nan_to_num(nan=-1.0).masked_fill(is_own, torch.inf).argmax(2, keepdim=True)
    return (nearest == torch.arange(group.num_left, device=features.device)[:, None]).to(unit.dtype)


# -- choosing destinations -----------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """Regions padded to one length: the tokens of all, `[regions * n]`, how many exist and how many are left."""

    tokens: Tensor
    lengths: Tensor
    counts: Tensor


@lru_cache(maxsize=64)
def _layout(regions: Regions, device: str) -> _Layout:
    with torch.inference_mode(False):
        lengths = torch.tensor(regions.lengths, device="cpu")
        starts = (lengths.cumsum(0) - lengths)[:, None]
        place = torch.arange(max(regions.lengths), device="cpu")
        tokens = starts + torch.minimum(place, lengths[:, None] - 1)
        counts = torch.tensor(regions.counts, device="cpu")
        return _Layout(tokens.flatten().to(device), lengths.int().to(device), counts.int().to(device))


_regions = lru_cache(maxsize=64)(Regions)
"""Of many regions every one is checked, which takes longer than choosing in them."""


def _choose_destinations_forward(
    features: Tensor, lengths: Sequence[int], counts: Sequence[int], impl: str
) -> Tensor:
    """The destinations of all regions, `[B, merged]` int64, as ids in the sequence."""
    regions = _regions(tuple(lengths), tuple(counts))
    layout = _layout(regions, str(features.device))
    if len(set(lengths)) > 1:
        features = features.index_select(1, layout.tokens)
    padded = features.unflatten(1, (len(lengths), -1))
    # On the GPU of the tokens, whichever is current; and autocast would round the similarities.
    with torch.cuda.device_of(features), torch.autocast(features.device.type, enabled=False):
        chosen = _implementation(impl, padded).choose_destinations(
            padded, layout.lengths, layout.counts, max(counts)
        )
    ids = [
        chosen.narrow(1, group.first, group.num_regions)[..., : group.num_left]
        + group.starts(features.device)
        for group in regions.groups
    ]
    return torch.cat([some.flatten(1) for some in ids], dim=1)


def _choose_destinations_shape(
    features: Tensor, lengths: Sequence[int], counts: Sequence[int], impl: str
) -> Tensor:
    return features.new_empty(len(features), sum(counts), dtype=torch.int64)


_choose_destinations = Operation(
    "choose_destinations", _choose_destinations_forward, _choose_destinations_shape
)


def _implementation(impl: str, features: Tensor) -> Any:
    """The module that chooses: the kernel where it is wanted and can run; "auto" takes the reference otherwise."""
    module = kernels("merge.triton.destinations", impl, features)
    if module is None and impl in ("triton", "gluon"):
        raise NotImplementedError(
            f"`impl` must be able to choose among these tokens ({features.dtype}, regions of {features.shape[2]}, "
            f"on {features.device}); got {impl!r}. Use impl='auto'."
        )
    return module or reference
