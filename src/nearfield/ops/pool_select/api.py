"""Pooled levels of tokens, and coarse-to-fine choosing of blocks among them. `levels.py` has their layout."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Attended, Impl
from nearfield.layout import level_length, level_starts, num_represented
from nearfield.ops import _triton
from nearfield.ops._op import Gradient, Operation
from nearfield.ops._triton import kernels
from nearfield.ops.attention import operators as attention
from nearfield.ops.attention.api import checked_parts, checked_scale
from nearfield.ops.attention.parts import KeyValuePart, PartGradients
from nearfield.ops.pool_select.reference import pool as pool_reference
from nearfield.ops.pool_select.reference import select as select_reference
from nearfield.plan import Packed, Packing, Plan, check_block
from nearfield.plan import builders as planning

_WIDEST = 128


class Pyramid(NamedTuple):
    """Levels 1 to `levels` above `length` tokens, side by side.

    Args:
        data: `[B, H, pooled, D]`; each level begins at a multiple of the block, what pads it is zero.
    """

    data: Tensor
    length: int
    block: int
    levels: int

    def level(self, level: int) -> Tensor:
        """The tokens of one level, a view."""
        start = level_starts(self.length, self.block, self.levels)[level - 1]
        return self.data.narrow(2, start, level_length(self.length, self.block, level))

    def up_to(self, level: int) -> Tensor:
        """Levels 1 to `level` with their padding, a view."""
        return self.data[:, :, : level_starts(self.length, self.block, level)[-1]]


def pool(x: Tensor, block: int, levels: int, impl: Impl = "auto") -> Pyramid:
    """Means of `[B, H, N, D]` over `block` consecutive tokens, of those means, and so on. Differentiable."""
    return Pyramid(_pool(x, block, levels, impl), x.shape[2], block, levels)


class Picked(NamedTuple):
    """What was pooled and chosen.

    Args:
        keys, values: pooled.
        picks: as `select_blocks` gives them.
        packed: the choices of the lowest level, merged for several queries at a time, where kernels read them so.
    """

    keys: Pyramid
    values: Pyramid
    picks: tuple[Tensor, ...]
    packed: Packed | None


def pool_and_select(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: int,
    levels: int,
    topk: int,
    *,
    keep_own: bool = False,
    negate_scores: bool = False,
    impl: Impl = "auto",
) -> Picked:
    """`pool` of all three and `select_blocks`, in one operation.

    The means of keys and values are differentiable; those of `query` only choose.

    Args:
        negate_scores: choose the lowest products, not the highest.
    """
    packing = packing_for(query, block, impl)
    found = _pool_and_select(
        query.detach(), key, value, block, levels, topk, keep_own, negate_scores, *(packing or (0, 0)), impl
    )
    keys, values = (Pyramid(data, key.shape[2], block, levels) for data in found[:2])
    picks = tuple(found[2 : 2 + levels])
    packed = Packed(found[-2], found[-1], *packing) if packing else None
    return Picked(keys, values, picks, packed)


_PACKING = Packing(4, 4)
"""How the kernel that walks several rows at once wants them merged; see `PAIR` in launch.py."""


def packing_for(query: Tensor, block: int, impl: Impl) -> Packing | None:
    """How kernels would merge the lists of blocks that such queries choose; None where they would not.

    launch.py decides that when it launches; where it thinks otherwise, lists are merged then.
    """
    is_narrow = query.element_size() == 2 and query.shape[-1] <= 64
    by_kernels = _triton.are_wanted(impl, query) and _triton.is_new_enough()
    return _PACKING if by_kernels and is_narrow and block == 16 else None


def select_blocks(
    queries: Pyramid, keys: Pyramid, topk: int, *, keep_own: bool = False, impl: Impl = "auto"
) -> tuple[Tensor, ...]:
    """The keys that queries choose at each level, from the highest down: each looks only at what its parent chose.

    Args:
        topk: how many keys each query chooses.
        keep_own: a query always chooses the key at its own place.

    Returns:
        For levels 1 to L, `[B, H, n, min(topk, m)]` int32 ids of keys, ascending and all used: a query's candidates are
        at least as many. A key of level 1 is a block of tokens. Never waits for the device, has no gradient.
    """
    levels = range(1, queries.levels + 1)
    with torch.no_grad():
        chosen: list[Tensor] = _select(
            [queries.level(level) for level in levels],
            [keys.level(level) for level in levels],
            keys.block,
            topk,
            keep_own,
            impl,
        )
    return tuple(chosen)


def chosen_blocks(
    queries: Pyramid, keys: Pyramid, topk: int, scale: float | None, impl: Impl = "auto"
) -> Plan:
    """Every block of queries reads the `topk` blocks of keys with the highest products of means, `scale` considered.

    Args:
        queries, keys: of one level.
    """
    if scale is not None and scale < 0:  # choosing compares products; this would turn best into worst
        queries = queries._replace(data=-queries.data)
    (picks,) = select_blocks(queries, keys, topk, impl=impl)
    return planning.key_lists(
        picks,
        None,
        q_block=queries.block,
        k_block=keys.block,
        num_queries=queries.length,
        num_keys=keys.length,
        check=False,
    )


def attend_pooled(
    query: Tensor,
    near: KeyValuePart,
    far: KeyValuePart,
    block: int,
    levels: int,
    *,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Attended:
    """`attend_parts` of keys and of their means, where the keys and values of `far` are `pool` of those of `near`.

    The gradients of the means are spread by the kernel that computes those of the keys, not one by one by autograd.
    """
    wanted = level_starts(near.key.shape[2], block, levels)[-1]
    if far.key.shape[2] != wanted:
        wrong_value("far", f"have {wanted} keys, pooled from those of `near`", far.key.shape[2])
    parts = checked_parts(query, [near, far], impl)
    run = _attend_pooled.dispatch(*attention.leaves(query, parts))
    return Attended(*run(query, parts, checked_scale(scale, query), impl, block, levels))


def log_sizes(length: int, block: int, device: torch.device) -> Tensor | None:
    """The log of how many tokens each block holds, `[1, 1, blocks]`; None where all hold equally many."""
    if length % block == 0:
        return None
    return num_represented(length, block, 1, device).double().log().view(1, 1, -1)


def check_pooling(argument: str, block: object) -> None:
    """Blocks that can be pooled, and read as one."""
    check_block(argument, block)
    if not isinstance(block, int) or not 2 <= block <= _WIDEST or block & (block - 1):
        wrong_value(argument, f"be a power of two from 2 to {_WIDEST}", block)


# -- the operations ----------------------------------------------------------------------------------------------


def _chosen(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    block: int,
    topk: int,
    keep_own: bool,
    packing: tuple[int, int],
    impl: Impl,
) -> list[Tensor]:
    """The choices of each level, from the lowest up; then those of the lowest merged, where packing is asked for."""
    chosen: list[Tensor] = []
    packed: list[Tensor] = []
    parents = None
    for query, key in zip(reversed(queries), reversed(keys), strict=True):
        candidates = key.shape[2] if parents is None else parents.shape[3] * block
        module = kernels("pool_select.triton.select", impl, query, candidates) or select_reference
        call = (query, key, parents, block, min(topk, key.shape[2]), keep_own)
        if packing[0] and len(chosen) == len(queries) - 1:
            parents, *packed = module.select_packed(*call, *packing)
        else:
            parents = module.select(*call)
        chosen.append(parents)
    return chosen[::-1] + packed


def _select_forward(
    queries: Sequence[Tensor], keys: Sequence[Tensor], block: int, topk: int, keep_own: bool, impl: str
) -> list[Tensor]:
    with torch.cuda.device_of(queries[0]):
        return _chosen(queries, keys, block, topk, keep_own, (0, 0), cast(Impl, impl))


def _select_shapes(
    queries: Sequence[Tensor], keys: Sequence[Tensor], block: int, topk: int, keep_own: bool, impl: str
) -> list[Tensor]:
    return [
        query.new_empty(*query.shape[:3], min(topk, key.shape[2]), dtype=torch.int32)
        for query, key in zip(queries, keys, strict=True)
    ]


_select = Operation("select", _select_forward, _select_shapes)


def _pool_forward(x: Tensor, block: int, levels: int, impl: str) -> Tensor:
    module = kernels("pool_select.triton.pool", impl, x, block, levels) or pool_reference
    with torch.cuda.device_of(x):
        pooled: Tensor = module.pool_forward(x, block, levels)
    return pooled


def _pool_shape(x: Tensor, block: int, levels: int, impl: str) -> Tensor:
    return x.new_empty(*x.shape[:2], level_starts(x.shape[2], block, levels)[-1], x.shape[3])


def _pool_backward(grad: Tensor, length: int, block: int, levels: int, impl: str) -> Tensor:
    module = kernels("pool_select.triton.pool", impl, grad, block, levels) or pool_reference
    with torch.cuda.device_of(grad):
        spread: Tensor = module.pool_backward(grad, length, block, levels)
    return spread


def _spread_shape(grad: Tensor, length: int, *_: Any) -> Tensor:
    return grad.new_empty(*grad.shape[:2], length, grad.shape[3])


_spread = Operation("pool_backward", _pool_backward, _spread_shape)
_pool = Operation(
    "pool",
    _pool_forward,
    _pool_shape,
    gradient=Gradient(of=(0,), backward=_spread, saves=lambda call, _: (call[0].shape[2], *call[1:])),
)


def _pool_and_select_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: int,
    levels: int,
    topk: int,
    keep_own: bool,
    negate_scores: bool,
    packed_rows: int,
    packed_multiple: int,
    impl: str,
) -> list[Tensor]:
    """Pooled keys and values, the choices of each level, and those of the lowest merged, if they are to be."""
    asked = cast(Impl, impl)
    module = kernels("pool_select.triton.pool", asked, query, block, levels) or pool_reference
    with torch.cuda.device_of(query):
        queries, keys, values = module.pool_together([query, key, value], block, levels)
        made = [
            Pyramid(-data if negate_scores and data is queries else data, x.shape[2], block, levels)
            for data, x in ((queries, query), (keys, key))
        ]
        of_queries, of_keys = ([pooled.level(level) for level in range(1, levels + 1)] for pooled in made)
        packing = packed_rows, packed_multiple
        return [keys, values, *_chosen(of_queries, of_keys, block, topk, keep_own, packing, asked)]


def _pool_and_select_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: int,
    levels: int,
    topk: int,
    keep_own: bool,
    negate_scores: bool,
    packed_rows: int,
    packed_multiple: int,
    impl: str,
) -> list[Tensor]:
    pooled = [_pool_shape(x, block, levels, impl) for x in (key, value)]

    def ids(*sizes: int) -> Tensor:
        return query.new_empty(*query.shape[:2], *sizes, dtype=torch.int32)

    counts = [min(topk, level_length(key.shape[2], block, level)) for level in range(1, levels + 1)]
    lengths = [level_length(query.shape[2], block, level) for level in range(1, levels + 1)]
    picks = [ids(*sizes) for sizes in zip(lengths, counts, strict=True)]
    if not packed_rows:
        return pooled + picks
    rows = -(-lengths[0] // packed_rows)
    most = -(-packed_rows * counts[0] // packed_multiple) * packed_multiple
    return [*pooled, *picks, ids(2 * rows), ids(rows * most)]


def _pool_and_select_backward(*grads_and_saved: Any) -> list[Tensor | None]:
    *grads, length, block, levels, impl = grads_and_saved
    return [None if grad is None else _spread(grad, length, block, levels, impl) for grad in grads[:2]]


_pool_and_select = Operation(
    "pool_and_select",
    _pool_and_select_forward,
    _pool_and_select_shapes,
    gradient=Gradient(
        of=(1, 2),
        backward=_pool_and_select_backward,
        saves=lambda call, _: (call[1].shape[2], *call[3:5], call[10]),
        materializes=False,
    ),
)


def _attend_pooled_forward(
    query: Tensor, parts: Sequence[KeyValuePart], scale: float, impl: Impl, block: int, levels: int
) -> Attended:
    del block, levels  # of the backward pass alone
    return attention.read(query, parts, scale, impl)


def _attend_pooled_backward(
    grads: Attended,
    attended: Attended,
    learned: Sequence[bool],
    query: Tensor,
    parts: Sequence[KeyValuePart],
    scale: float,
    impl: Impl,
    block: int,
    levels: int,
) -> PartGradients:
    """The gradients of means go to what they are means of: in its kernel, or by adding them to its gradients."""
    pooling = attention.Pooling(block, levels)
    found = attention.differentiate(grads, query, parts, attended, scale, impl, learned, pooling)
    (key, value, bias), (mean_key, mean_value, far_bias) = found.parts
    if key is None or value is None or mean_key is None or mean_value is None:
        return found
    length = parts[0].key.shape[2]
    key = key + _pool_backward(mean_key, length, block, levels, impl)
    value = value + _pool_backward(mean_value, length, block, levels, impl)
    return PartGradients(found.query, [(key, value, bias), (None, None, far_bias)])


_attend_pooled = attention.attention(
    "attend_pooled",
    2,
    _attend_pooled_forward,
    _attend_pooled_backward,
    after="int block, int levels",
    held=(4, 5),
)
