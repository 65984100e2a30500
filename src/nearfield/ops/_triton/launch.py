"""What the host decides before a launch: tile shapes, how tokens are loaded, and the arguments all kernels share."""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nearfield._types import Positions
from nearfield.ops._triton import is_interpreted
from nearfield.plan import Plan

LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """The shape of one program.

    Args:
        own: tokens it owns.
        other: tokens of the other side per step.
        warps, stages: threads in groups of 32, and steps whose loads overlap.
        registers: the most per thread.
        pack: rows of the plan that it walks together; see `pack.py`. Not-a-number and infinite values of what only
            some of them read then reach the others, too.
        chunk: steps after which another program goes on, where lists differ much in length; for gradients of keys.
    """

    own: int
    other: int
    warps: int
    stages: int
    registers: int | None = None
    pack: int = 1
    chunk: int | None = None


_LEAST_TILE = 16
"""Tokens that a dot takes at least."""


def _fit(block: int, wanted: int) -> int:
    """The largest power-of-two tile up to `wanted` that cuts `block` evenly; at least what a dot takes."""
    return max(_LEAST_TILE, min(block & -block, wanted))


def _other_tile(block: int, wanted: int) -> int:
    """A tile that cuts blocks evenly, or gathers several small ones."""
    return min(block & -block, wanted) if block >= wanted else wanted


def forward_tiles(query: Tensor, key: Tensor, q_block: int, k_block: int) -> Tiles:
    if query.dtype == torch.float32:
        return Tiles(_fit(q_block, 64), _other_tile(k_block, 32), 4, 2)
    if q_block % 128 == 0 and query.shape[-1] == 128 and k_block >= 64 and suits_copy_engine(key):
        # Half the registers for two programs per processor: one multiplies while the other exponentiates.
        return Tiles(128, 64, 8, 2, registers=128)
    own = _fit(q_block, 64)
    if own == 16 and k_block < 32 and _is_narrow(query) and _are_many(query, own):
        # Several warps would exchange maxima and sums of every step. (16 x 64 with four of them: 1.8 times the time.)
        return Tiles(16, 32, 1, 2)
    return Tiles(own, _other_tile(k_block, 64), 4, 3)


PAIR: Tiles | None = Tiles(64, 64, 4, 2, registers=128, pack=4)
PAIR_GRADIENT: Tiles | None = PAIR
"""How one kernel reads two parts, if it does (`pair.py`), and the query gradient of both. Measured, as all shapes below
that are for narrow heads, on an H200 with 64 channels in bf16; see benchmarks/notes/kernels.md."""


def pair_tiles(query: Tensor, near: Plan, far: Plan) -> Tiles | None:
    """How one kernel reads two parts, rows of the first packed; None: each is read by its own."""
    return _if_fit(PAIR, query, near, far)


def pair_gradient_tiles(query: Tensor, near: Plan, far: Plan) -> Tiles | None:
    """The same for the gradient of queries."""
    return _if_fit(PAIR_GRADIENT, query, near, far)


def _if_fit(tiles: Tiles | None, query: Tensor, near: Plan, far: Plan) -> Tiles | None:
    if tiles is None or not _is_narrow(query):
        return None
    fits = near.q_block * tiles.pack == tiles.own and far.q_block % tiles.own == 0
    if not fits or max(near.k_block, far.k_block) > tiles.other:
        return None
    return tiles if _is_hopper(query) else tiles._replace(registers=None)


def query_gradient_tiles(query: Tensor, q_block: int, k_block: int, *, similar: bool = False) -> Tiles:
    """
    Args:
        similar: neighbouring rows read much the same ids, and may be packed.
    """
    if query.dtype == torch.float32:
        return Tiles(_fit(q_block, 32), _other_tile(k_block, 32), 4, 1)
    own, other = _fit(q_block, 64), _other_tile(k_block, 64)
    if not _is_narrow(query) or k_block >= 64:
        return Tiles(own, other, 4, 3)
    limit = 128 if _is_hopper(query) else None  # for four programs per processor
    if similar and q_block == 16:
        return Tiles(64, 64, 4, 2, registers=limit, pack=4)
    if own == 16 and _are_many(query, own):
        return Tiles(16, 32, 1, 2)
    return Tiles(own, other, 4, 2, registers=limit) if own == 64 else Tiles(own, other, 4, 3)


def key_gradient_tiles(
    query: Tensor, key: Tensor, q_block: int, k_block: int, *, similar: bool = False
) -> Tiles:
    """See `query_gradient_tiles`: what is packed here are blocks of keys, as many small ones as fill a tile."""
    pack = max(1, _LEAST_TILE // k_block) if similar else 1
    if query.dtype == torch.float32:
        return Tiles(_fit(k_block * pack, 32), _other_tile(q_block, 32), 4, 1, pack=pack)
    own = _fit(k_block * pack, 64)
    if similar and q_block == k_block == 16 and _is_narrow(query):
        return Tiles(64, 32, 4, 2, pack=4)
    warps = 2 if own == 16 and _is_narrow(query) and _are_many(key, own) else 4
    return Tiles(own, _other_tile(q_block, 64), warps, 2, pack=pack)


def _is_narrow(query: Tensor) -> bool:
    """Heads for which the shapes of small tiles were measured, or that need less: half precision, up to 64 channels."""
    return query.element_size() == 2 and padded(query.shape[-1]) <= 64


_MANY = 1024
"""Programs that fill a large GPU even if they have one or two warps each: eight to a processor."""


def _are_many(owned: Tensor, own: int) -> bool:
    return owned.shape[0] * owned.shape[1] * owned.shape[2] // own >= _MANY


def _is_hopper(query: Tensor) -> bool:
    return is_interpreted() or compute_capability(query.device) >= (9, 0)


_AT_ONCE = 512
"""Programs that a large GPU runs at once, roughly."""
_MOST_CHUNKS, _LEAST_CHUNK, _MOST_ROWS = 8, 32, 4096


def chunk_of(num_heads: int, transposed: Plan, tiles: Tiles) -> int:
    """After how many steps another program goes on with a row of a plan that was transposed; 0: never.

    Where some blocks of keys are read by all queries (summaries of a whole picture), one program would still walk such
    a row when all others are done: if its steps are more than each program's share of all steps. Not where rows are
    many: the programs that find nothing to do would cost too much.
    """
    longest = transposed.num_keys / tiles.other
    # Small blocks that fill a tile together are read by the same queries, or nearly.
    alike = tiles.pack if transposed.q_block < _LEAST_TILE else 1
    share = num_heads * transposed.blocks.shape[2] / alike * (transposed.k_block / tiles.other) / _AT_ONCE
    rows = math.ceil(transposed.num_rows / alike)
    if num_heads * rows > _MOST_ROWS or longest <= max(share, 2 * _LEAST_CHUNK):
        return 0
    return max(_LEAST_CHUNK, math.ceil(longest / _MOST_CHUNKS))


def ceil_div(number: int, by: int) -> int:
    """The quotient, rounded up. Triton's own functions take ten times as long as these, and every call asks often."""
    return -(-number // by)


def next_power_of_two(number: int) -> int:
    """The least that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def padded(dim: int) -> int:
    """The next power of two, at least 16."""
    return max(16, next_power_of_two(dim))


def options_for(query: Tensor, tiles: Tiles, own_block: int) -> dict[str, Any]:
    dim = query.shape[-1]
    return {
        "DIM": dim,
        "PAD": padded(dim),
        "PARTS": max(1, own_block * tiles.pack // tiles.own),
        "PACK": tiles.pack,
        # The tensor cores' tf32 would cost float32 users three digits.
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
    }


def list_strides(offsets: Tensor, blocks: Tensor) -> tuple[int, ...]:
    """Strides of both over batch and heads; 0 where one list serves all."""
    return (*_strides_of(offsets), *_strides_of(blocks))


def _strides_of(lists: Tensor) -> tuple[int, int]:
    (batch, heads, _), (batch_stride, head_stride, _) = lists.shape, lists.stride()
    return 0 if batch == 1 else batch_stride, 0 if heads == 1 else head_stride


def optional_inputs(
    query: Tensor, key_bias: Tensor | None, positions: Positions | None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Pointers and strides of the optional inputs; `query` stands in where there is none and is never read."""
    bias = query if key_bias is None else key_bias
    bias_strides = (0, 0, 0) if key_bias is None else key_bias.stride()
    if positions is None:
        return (bias, query, query), (*bias_strides, 0, 0)
    positions = Positions(*(x.contiguous() for x in positions))
    position_strides = tuple(0 if x.shape[0] == 1 else x.stride(0) for x in positions)
    return (bias, *positions), (*bias_strides, *position_strides)


def nonnegative(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The forward takes maxima before it scales, which a negative scale would turn into minima."""
    return (query, scale) if scale >= 0 else (-query, -scale)


@lru_cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """NVIDIA's number for a GPU; (0, 0) for those of others, which count differently."""
    return torch.cuda.get_device_capability(device) if torch.version.hip is None else (0, 0)


def suits_copy_engine(x: Tensor) -> bool:
    """Whether the tensor memory accelerator of Hopper and later can walk `x`: half types, rows of whole 16 bytes."""
    has_engine = is_interpreted() or compute_capability(x.device) >= (9, 0)
    aligned = all(
        size == 1 or (stride > 0 and stride * x.element_size() % 16 == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )
    whole_rows = x.stride(-1) == 1 and x.shape[-1] == padded(x.shape[-1]) and x.data_ptr() % 16 == 0
    return has_engine and aligned and whole_rows and x.element_size() == 2


def descriptor_strides(x: Tensor) -> list[int]:
    """Strides for the copy engine, which checks even those of single elements, though it never uses them."""
    return [
        stride if size > 1 else x.shape[-1]
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ] + [1]


def tile_sources(first: Tensor, second: Tensor, block: int, tile: int) -> tuple[bool, object, object]:
    """Whether the copy engine loads these two by whole tiles, and what it needs for that (else the tensors)."""
    if block < tile or not (suits_copy_engine(first) and suits_copy_engine(second)):
        return False, first, second
    return True, *(
        TensorDescriptor(x, list(x.shape), descriptor_strides(x), [1, 1, tile, x.shape[-1]])
        for x in (first, second)
    )
