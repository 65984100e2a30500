"""How much each block of queries reads of each block of keys under full attention, in Triton.

A second pass over the scores, given the log of the sums: weights live in registers, only their largest and their sum
per block are written. One program serves a block of queries and a stretch of the keys. Scores are computed with keys as
rows, so that what is reduced, the queries of a block, lies within a few threads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import LOG2_E, ceil_div, padded, tile_sources
from nearfield.ops._triton.walk import INF, LOG2E, copy_rows, dot, load_rows

_TILE_Q, _TILE_K = 128, 64
_WARPS = 4
_STRETCH = 4096
"""Keys of one program."""


@triton.jit
def _load_queries(
    query, lse, first, lane, num_queries, stride_qn, stride_qd,
    Q_BLOCK: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Some of a block's queries, and the log of their sums; those that do not exist weigh nothing."""
    place = first + lane
    exists = (lane < Q_BLOCK) & (place < num_queries)
    origin = tl.full([], 0, tl.int64)
    rows = load_rows(query, origin, place.to(tl.int64), exists, stride_qn, stride_qd, DIM, PAD, True)
    log_sum = tl.load(lse + place, mask=exists, other=INF) * LOG2E
    # A query that reads nothing has -inf, which would make its weights infinite.
    return rows, tl.where(log_sum == -INF, INF, log_sum)


@triton.jit
def _weigh(keys, queries, log_sum, scale, largest, total, PRECISION: tl.constexpr):
    """The largest weight of each key so far, and the sum of its weights."""
    weights = tl.math.exp2(dot(keys, tl.trans(queries), None, PRECISION) * scale - log_sum[None, :])
    return tl.maximum(largest, tl.max(weights, 1)), total + tl.sum(weights, 1)


@triton.jit
def _column_kernel(
    query, key, k_desc, lse, maxima, masses,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    num_heads, heads_per_key, num_rows, num_columns, num_queries, num_keys, scale,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, TILE_Q: tl.constexpr, MORE_Q: tl.constexpr, TILE_K: tl.constexpr,
    STEPS: tl.constexpr, COPY_ENGINE: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = TILE_K // K_BLOCK
    # Queries stay where they are while keys pass by: one tile, or one and a smaller one (192 is 128 and 64).
    STAY: tl.constexpr = Q_BLOCK <= TILE_Q + MORE_Q
    PARTS: tl.constexpr = (Q_BLOCK + TILE_Q - 1) // TILE_Q
    batch_head = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    batch, key_head = batch_head // num_heads, batch_head % num_heads // heads_per_key
    query += batch * stride_qb + batch_head % num_heads * stride_qh
    key += batch * stride_kb + key_head * stride_kh
    lse += batch_head * num_queries
    out = (batch_head * num_rows + row) * num_columns
    origin = tl.full([], 0, tl.int64)
    size = tl.minimum(num_queries - row * Q_BLOCK, Q_BLOCK).to(tl.float32)
    lane = tl.arange(0, TILE_Q)
    queries, log_sum = _load_queries(
        query, lse, row * Q_BLOCK, lane, num_queries, stride_qn, stride_qd, Q_BLOCK, DIM, PAD
    )
    if MORE_Q:
        more = TILE_Q + tl.arange(0, MORE_Q)
        more_queries, more_log_sum = _load_queries(
            query, lse, row * Q_BLOCK, more, num_queries, stride_qn, stride_qd, Q_BLOCK, DIM, PAD
        )
    for step in range(STEPS):
        first = (tl.program_id(1) * STEPS + step) * TILE_K
        token = first + tl.arange(0, TILE_K)
        exists = token < num_keys
        if COPY_ENGINE:
            keys = copy_rows(k_desc, batch, key_head, first, TILE_K, PAD)
        else:
            keys = load_rows(key, origin, token.to(tl.int64), exists, stride_kn, stride_kd, DIM, PAD, True)
        largest = tl.zeros([TILE_K], tl.float32)
        total = tl.zeros([TILE_K], tl.float32)
        if STAY:
            largest, total = _weigh(keys, queries, log_sum, scale, largest, total, PRECISION)
            if MORE_Q:
                largest, total = _weigh(keys, more_queries, more_log_sum, scale, largest, total, PRECISION)
        else:
            for part in tl.static_range(PARTS):
                queries, log_sum = _load_queries(
                    query,
                    lse,
                    row * Q_BLOCK,
                    part * TILE_Q + lane,
                    num_queries,
                    stride_qn,
                    stride_qd,
                    Q_BLOCK,
                    DIM,
                    PAD,
                )
                largest, total = _weigh(keys, queries, log_sum, scale, largest, total, PRECISION)
        largest = tl.where(exists, largest, 0.0)
        total = tl.where(exists, total, 0.0) / size
        column = first // K_BLOCK + tl.arange(0, COLUMNS)
        is_column = column < num_columns
        tl.store(maxima + out + column, tl.max(tl.reshape(largest, [COLUMNS, K_BLOCK]), 1), mask=is_column)
        tl.store(masses + out + column, tl.sum(tl.reshape(total, [COLUMNS, K_BLOCK]), 1), mask=is_column)


def unsupported(query: Tensor, k_block: int) -> str | None:
    """Why the kernel cannot run such a call, or None."""
    if k_block & (k_block - 1):
        return f"k_block {k_block} is not a power of two"
    return unsupported_tensor(query, most_channels=128, multiplies=True)


def column_statistics(
    query: Tensor, key: Tensor, lse: Tensor, q_block: int, k_block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """See `nearfield.ops.predict.reference.columns`."""
    batch, heads, num_queries, dim = query.shape
    num_keys = key.shape[2]
    rows, columns = ceil_div(num_queries, q_block), ceil_div(num_keys, k_block)
    shape = (batch, heads, rows, columns)
    maxima, masses = (torch.empty(shape, device=query.device, dtype=torch.float32) for _ in range(2))
    tile_k = max(_TILE_K, k_block)
    steps = max(1, min(_STRETCH // tile_k, ceil_div(num_keys, tile_k)))
    tile_q, more_q = _query_tiles(q_block)
    by_engine, k_desc, _ = tile_sources(key, key, tile_k, tile_k)
    _column_kernel[(batch * heads * rows, ceil_div(num_keys, tile_k * steps))](
        query, key, k_desc, lse.contiguous(), maxima, masses, *query.stride(), *key.stride(),
        heads, heads // key.shape[1], rows, columns, num_queries, num_keys, scale * LOG2_E,
        Q_BLOCK=q_block, K_BLOCK=k_block, TILE_Q=tile_q, MORE_Q=more_q, TILE_K=tile_k, STEPS=steps,
        COPY_ENGINE=by_engine, DIM=dim, PAD=padded(dim),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=_WARPS, num_stages=_stages(more_q),
    )  # fmt: skip
    return maxima, masses


def _query_tiles(q_block: int) -> tuple[int, int]:
    """A tile of queries, and a smaller one (or 0): both together a block, if it is the sum of two powers of two."""
    largest = 1 << (q_block.bit_length() - 1)
    rest = q_block - largest
    if 16 <= largest <= _TILE_Q and (rest == 0 or (rest >= 16 and rest & (rest - 1) == 0)):
        return largest, rest
    return max(16, min(_TILE_Q, q_block & -q_block)), 0


def _stages(more_q: int) -> int:
    """Loads that overlap. One tile of queries leaves room for four programs on a processor, which hide them as well."""
    return 3 if more_q else 1
