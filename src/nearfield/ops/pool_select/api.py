"""Pooled levels of tokens, and coarse-to-fine choosing of blocks among them. `levels.py` has their layout."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Impl
from nearfield.layout import level_length, level_starts, num_represented
from nearfield.ops import _triton as kernels
from nearfield.ops._op import dispatch, node
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
    read = dispatch(_pool, torch.ops.nearfield.pool, x, differentiable=_pool_node)
    return Pyramid(read(x, block, levels, impl), x.shape[2], block, levels)


class Picked(NamedTuple):
    """What was pooled and chosen.

    Args:
        keys, values: pooled.
        picks: as `select_blocks` gives them.
        packed: the choices of the lowest level, merged by so many queries at a time, if that was asked for.
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
    turned: bool = False,
    packing: Packing | None = None,
    impl: Impl = "auto",
) -> Picked:
    """`pool` of all three and `select_blocks`, in one operator.

    The means of keys and values are differentiable; those of `query` only choose.

    Args:
        turned: the lowest products are chosen, not the highest.
        packing: how to merge the lists that were chosen.
    """
    inputs = query.detach(), key, value
    operator = torch.ops.nearfield.pool_and_select
    choose = dispatch(_pooled_and_chosen, operator, *inputs, differentiable=_pool_and_select_node)
    found = choose(*inputs, block, levels, topk, keep_own, turned, list(packing or ()), impl)
    keys, values = (Pyramid(data, key.shape[2], block, levels) for data in found[:2])
    picks = tuple(found[2 : 2 + levels])
    packed = Packed(found[-2], found[-1], *packing) if packing else None
    return Picked(keys, values, picks, packed)


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
        chosen: list[Tensor] = torch.ops.nearfield.select(
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


def _kernels(name: str, impl: Impl, x: Tensor, *call: Any) -> Any:
    """The module with the kernels of that name, where they are wanted and can run."""
    return kernels.helper(name, x, *call) if kernels.are_wanted(impl, x) else None


# -- the operators -----------------------------------------------------------------------------------------------


def _chosen(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    block: int,
    topk: int,
    keep_own: bool,
    packing: Sequence[int],
    impl: Impl,
) -> list[Tensor]:
    """The choices of each level, from the lowest up; then those of the lowest merged, where packing is asked for."""
    chosen: list[Tensor] = []
    packed: list[Tensor] = []
    parents = None
    for query, key in zip(reversed(queries), reversed(keys), strict=True):
        candidates = key.shape[2] if parents is None else parents.shape[3] * block
        module = _kernels("select", impl, query, candidates) or select_reference
        call = (query, key, parents, block, min(topk, key.shape[2]), keep_own)
        if packing and len(chosen) == len(queries) - 1:
            parents, *packed = module.select_packed(*call, *packing)
        else:
            parents = module.select(*call)
        chosen.append(parents)
    return chosen[::-1] + packed


@torch.library.custom_op("nearfield::select", mutates_args=())
def _select(
    queries: Sequence[Tensor], keys: Sequence[Tensor], block: int, topk: int, keep_own: bool, impl: str
) -> list[Tensor]:
    with torch.cuda.device_of(queries[0]):
        return _chosen(queries, keys, block, topk, keep_own, (), cast(Impl, impl))


@_select.register_fake
def _(
    queries: Sequence[Tensor], keys: Sequence[Tensor], block: int, topk: int, keep_own: bool, impl: str
) -> list[Tensor]:
    return [
        query.new_empty(*query.shape[:3], min(topk, key.shape[2]), dtype=torch.int32)
        for query, key in zip(queries, keys, strict=True)
    ]


def _pool(x: Tensor, block: int, levels: int, impl: str) -> Tensor:
    module = _kernels("pool", impl, x, block, levels) or pool_reference  # type: ignore[arg-type]
    with torch.cuda.device_of(x):
        pooled: Tensor = module.pool_forward(x, block, levels)
    return pooled


_pool_operator = torch.library.custom_op("nearfield::pool", _pool, mutates_args=())


@_pool_operator.register_fake
def _(x: Tensor, block: int, levels: int, impl: str) -> Tensor:
    return x.new_empty(*x.shape[:2], level_starts(x.shape[2], block, levels)[-1], x.shape[3])


def _pooled_and_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: int,
    levels: int,
    topk: int,
    keep_own: bool,
    turned: bool,
    packing: Sequence[int],
    impl: str,
) -> list[Tensor]:
    """Pooled keys and values, the choices of each level, and those of the lowest merged, if they are to be."""
    asked = cast(Impl, impl)
    module = _kernels("pool", asked, query, block, levels) or pool_reference
    with torch.cuda.device_of(query):
        queries, keys, values = module.pool_together([query, key, value], block, levels)
        made = [
            Pyramid(-data if turned and data is queries else data, x.shape[2], block, levels)
            for data, x in ((queries, query), (keys, key))
        ]
        of_queries, of_keys = ([pooled.level(level) for level in range(1, levels + 1)] for pooled in made)
        return [keys, values, *_chosen(of_queries, of_keys, block, topk, keep_own, packing, asked)]


_pool_and_select = torch.library.custom_op("nearfield::pool_and_select", _pooled_and_chosen, mutates_args=())


@_pool_and_select.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: int,
    levels: int,
    topk: int,
    keep_own: bool,
    turned: bool,
    packing: Sequence[int],
    impl: str,
) -> list[Tensor]:
    pooled = [
        x.new_empty(*x.shape[:2], level_starts(x.shape[2], block, levels)[-1], x.shape[3])
        for x in (key, value)
    ]
    lists = query.shape[:2]

    def ids(*sizes: int) -> Tensor:
        return query.new_empty(*lists, *sizes, dtype=torch.int32)

    counts = [min(topk, level_length(key.shape[2], block, level)) for level in range(1, levels + 1)]
    lengths = [level_length(query.shape[2], block, level) for level in range(1, levels + 1)]
    picks = [ids(*sizes) for sizes in zip(lengths, counts, strict=True)]
    if not packing:
        return pooled + picks
    pack, multiple = packing
    rows = -(-lengths[0] // pack)
    return [*pooled, *picks, ids(2 * rows), ids(rows * (-(-pack * counts[0] // multiple) * multiple))]


def _pool_backward(grad: Tensor, length: int, block: int, levels: int, impl: str) -> Tensor:
    module = _kernels("pool", impl, grad, block, levels) or pool_reference  # type: ignore[arg-type]
    with torch.cuda.device_of(grad):
        spread: Tensor = module.pool_backward(grad, length, block, levels)
    return spread


_pool_backward_operator = torch.library.custom_op("nearfield::pool_backward", _pool_backward, mutates_args=())


@_pool_backward_operator.register_fake
def _(grad: Tensor, length: int, block: int, levels: int, impl: str) -> Tensor:
    return grad.new_empty(*grad.shape[:2], length, grad.shape[3])


def _remember(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    ctx.length, ctx.call = inputs[0].shape[2], inputs[1:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _spread(grad, ctx.length, *ctx.call), None, None, None


def _spread(grad: Tensor, *call: Any) -> Tensor:
    found: Tensor = dispatch(_pool_backward, torch.ops.nearfield.pool_backward, grad)(grad, *call)
    return found


_pool_operator.register_autograd(_differentiate, setup_context=_remember)
_pool_node = node(_pool, _remember, _differentiate)


def _remember_both(ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    ctx.length, ctx.call = inputs[1].shape[2], (*inputs[3:5], inputs[9])
    ctx.has_packing = bool(inputs[8])
    ctx.set_materialize_grads(False)


def _gradients_of_both(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else _spread(grad, ctx.length, *ctx.call) for grad in grads[:2]]


def _differentiate_both(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    # An empty list of numbers counts as one of tensors.
    none_of_packing: list[None] | None = None if ctx.has_packing else []
    return None, *_gradients_of_both(ctx, grads), *[None] * 5, none_of_packing, None


_pool_and_select.register_autograd(_differentiate_both, setup_context=_remember_both)


def _pool_and_select_tuple(*call: Any) -> tuple[Tensor, ...]:
    return tuple(_pooled_and_chosen(*call))


def _differentiate_tuple(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return None, *_gradients_of_both(ctx, grads), *[None] * 7


_pool_and_select_node = node(_pool_and_select_tuple, _remember_both, _differentiate_tuple)
