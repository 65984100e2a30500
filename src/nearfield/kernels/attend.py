"""The list kernels in plain Triton: any GPU Triton runs on, and the interpreter.

Three loops over the same lists. `_forward_kernel` and `_query_gradient_kernel` walk the plan, one program per
query block; `_key_gradient_kernel` walks its transpose, one program per key block. There are no atomics, so equal
inputs give equal bits. Logits are kept in powers of two: `scale` and `key_bias` arrive multiplied by log2(e).

A tile of the loop is TILE consecutive places of a row's list, counted in tokens: part of one block where blocks are
at least a tile long, several gathered blocks otherwise. Tiles that may reach past the end (the last, and those with
the ragged last block) run in a second, masked loop; the first loop has no masks at all.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nearfield._types import Attended, Gradients, Positions
from nearfield.kernels import is_interpreted
from nearfield.plan import Plan

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(0.6931471805599453)
_INF = tl.constexpr(float("inf"))


# -- walking a list ----------------------------------------------------------------------------------------------


@triton.jit
def _row_of_program(program, order, num_rows, HAS_ORDER: tl.constexpr, PARTS: tl.constexpr):
    """The (head of all batches, row, part of the row) a program works on."""
    flat = program // PARTS
    if HAS_ORDER:
        flat = tl.load(order + flat)
    return flat // num_rows, flat % num_rows, program % PARTS


@triton.jit
def _tile_counts(entries, count, length, BLOCK: tl.constexpr, TILE: tl.constexpr, RAGGED: tl.constexpr):
    """How many tiles are surely whole, and how many there are.

    Ids ascend, so the ragged last block can only stand at the end of the list (more than once if repeated).
    """
    whole = count
    if RAGGED:
        ragged_block = length // BLOCK
        last = tl.load(entries + whole - 1, mask=whole > 0, other=-1)
        while last == ragged_block:
            whole -= 1
            last = tl.load(entries + whole - 1, mask=whole > 0, other=-1)
    if BLOCK >= TILE:
        return whole * (BLOCK // TILE), count * (BLOCK // TILE)
    else:
        return whole // (TILE // BLOCK), tl.cdiv(count, TILE // BLOCK)


@triton.jit
def _tile_tokens(entries, count, tile, length, BLOCK: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """The first token of a tile, the tokens relative to it, and which of them exist."""
    lane = tl.arange(0, TILE)
    if BLOCK >= TILE:
        block = tl.load(entries + tile // (BLOCK // TILE))
        first = block * BLOCK + tile % (BLOCK // TILE) * TILE
        exists = first + lane < length
        return first.to(tl.int64), lane, exists
    else:
        slot = tile * (TILE // BLOCK) + lane // BLOCK
        if MASKED:
            block = tl.load(entries + slot, mask=slot < count, other=0)
        else:
            block = tl.load(entries + slot)
        token = block * BLOCK + lane % BLOCK
        exists = (slot < count) & (token < length)
        return tl.full([], 0, tl.int64), token.to(tl.int64), exists


@triton.jit
def _load_rows(
    base, first, token, exists, stride_n, stride_d, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr
):
    """Rows of a [tokens, DIM] matrix, zero where they do not exist, padded to PAD columns."""
    column = tl.arange(0, PAD)
    pointer = (base + first * stride_n) + token[:, None] * stride_n + column[None, :] * stride_d
    if MASKED and PAD != DIM:
        return tl.load(pointer, mask=exists[:, None] & (column < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(pointer, mask=exists[:, None], other=0.0)
    elif PAD != DIM:
        return tl.load(pointer, mask=(column < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def _copy_rows(descriptor, batch, head, first, TILE: tl.constexpr, PAD: tl.constexpr):
    """Consecutive rows by the copy engine (TMA), zero past the end."""
    return tl.reshape(
        descriptor.load([batch.to(tl.int32), head.to(tl.int32), first.to(tl.int32), 0]), [TILE, PAD]
    )


@triton.jit
def _store_rows(base, token, exists, stride_n, stride_d, values, DIM: tl.constexpr, PAD: tl.constexpr):
    column = tl.arange(0, PAD)
    pointer = base + token.to(tl.int64)[:, None] * stride_n + column[None, :] * stride_d
    tl.store(pointer, values.to(base.dtype.element_ty), mask=exists[:, None] & (column < DIM)[None, :])


@triton.jit
def _dot(a, b, accumulator, PRECISION: tl.constexpr):
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def _masked_logits(
    logits, scale, bias, exists, query_position, key_position,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Scaled logits; every argument is already shaped to broadcast against `logits`."""
    logits = logits * scale
    if HAS_BIAS:
        logits += bias
    if MASKED:
        logits = tl.where(exists, logits, -_INF)
    if HAS_POSITIONS:
        logits = tl.where(key_position <= query_position, logits, -_INF)
    return logits


# -- forward -----------------------------------------------------------------------------------------------------


@triton.jit
def _read_tile(
    tile, entries, count, query, accumulator, running_max, running_sum, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax."""
    first, token, exists = _tile_tokens(entries, count, tile, num_keys, K_BLOCK, TILE_K, MASKED)
    if COPY_ENGINE:
        keys = _copy_rows(k_desc, batch, key_head, first, TILE_K, PAD)
    else:
        keys = _load_rows(key, first, token, exists, stride_kn, stride_kd, DIM, PAD, MASKED)
    logits = _dot(query, tl.trans(keys), None, PRECISION)
    if MASKED or HAS_BIAS or HAS_POSITIONS:
        bias = query_position
        key_position = query_position
        if HAS_BIAS:
            bias = (
                tl.load(key_bias + (first + token) * stride_bias, mask=exists, other=0.0)[None, :] * _LOG2_E
            )
        if HAS_POSITIONS:
            key_position = tl.load(key_positions + first + token, mask=exists, other=0)[None, :]
        logits = _masked_logits(
            logits,
            scale,
            bias,
            exists[None, :],
            query_position,
            key_position,
            MASKED,
            HAS_BIAS,
            HAS_POSITIONS,
        )
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        # A row that has seen nothing yet has maximum -inf; subtracting it would give NaN.
        anchor = tl.where(new_max == -_INF, 0.0, new_max)
        weights = tl.math.exp2(logits - anchor[:, None])
    else:
        new_max = tl.maximum(running_max, tl.max(logits, 1) * scale)
        anchor = new_max
        weights = tl.math.exp2(logits * scale - anchor[:, None])
    shrink = tl.math.exp2(running_max - anchor)
    running_sum = running_sum * shrink + tl.sum(weights, 1)
    accumulator = accumulator * shrink[:, None]
    if COPY_ENGINE:
        values = _copy_rows(v_desc, batch, key_head, first, TILE_K, PAD)
    else:
        values = _load_rows(value, first, token, exists, stride_vn, stride_vd, DIM, PAD, MASKED)
    accumulator = _dot(weights.to(values.dtype), values, accumulator, PRECISION)
    return accumulator, new_max, running_sum


@triton.jit
def _forward_kernel(
    query, key, value, k_desc, v_desc, out, lse, offsets, blocks, order, key_bias, query_positions, key_positions,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_on, stride_od,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h,
    stride_bias_b, stride_bias_h, stride_bias, stride_query_positions, stride_key_positions,
    num_heads, heads_per_key, num_rows, num_queries, num_keys, scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch_head, row, part = _row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    key_head = head // heads_per_key
    offsets += batch * stride_offsets_b + head * stride_offsets_h + row
    start = tl.load(offsets)
    count = tl.load(offsets + 1) - start
    entries = blocks + batch * stride_blocks_b + head * stride_blocks_h + start
    key += batch * stride_kb + key_head * stride_kh
    value += batch * stride_vb + key_head * stride_vh
    key_bias += batch * stride_bias_b + head * stride_bias_h
    key_positions += batch * stride_key_positions

    lane = part * TILE_Q + tl.arange(0, TILE_Q)
    token = row * Q_BLOCK + lane
    exists = (lane < Q_BLOCK) & (token < num_queries)
    origin = tl.full([], 0, tl.int64)
    queries = _load_rows(
        query + batch * stride_qb + head * stride_qh,
        origin,
        token.to(tl.int64),
        exists,
        stride_qn,
        stride_qd,
        DIM,
        PAD,
        True,
    )
    query_position = tl.zeros([TILE_Q, 1], tl.int32)
    if HAS_POSITIONS:
        query_position = tl.load(
            query_positions + batch * stride_query_positions + token, mask=exists, other=0
        )[:, None]

    running_max = tl.full([TILE_Q], -float("inf"), tl.float32)
    running_sum = tl.zeros([TILE_Q], tl.float32)
    accumulator = tl.zeros([TILE_Q, PAD], tl.float32)
    whole, total = _tile_counts(entries, count, num_keys, K_BLOCK, TILE_K, RAGGED)
    for tile in tl.range(0, whole):
        accumulator, running_max, running_sum = _read_tile(
            tile, entries, count, queries, accumulator, running_max, running_sum, key, value, k_desc, v_desc, batch,
            key_head, key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias,
            scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, False, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION,
        )  # fmt: skip
    if RAGGED or K_BLOCK < TILE_K:
        for tile in tl.range(whole, total, num_stages=1):
            accumulator, running_max, running_sum = _read_tile(
                tile, entries, count, queries, accumulator, running_max, running_sum, key, value, k_desc, v_desc,
                batch, key_head, key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd,
                stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, True, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS,
                PRECISION,
            )  # fmt: skip

    # A sum of exactly zero means nothing was read; a NaN sum must stay NaN.
    read_nothing = running_sum == 0.0
    accumulator = accumulator / tl.where(read_nothing, 1.0, running_sum)[:, None]
    log_sum = tl.where(
        read_nothing, -_INF, (running_max + tl.math.log2(tl.where(read_nothing, 1.0, running_sum))) * _LN_2
    )
    _store_rows(
        out + batch * stride_ob + head * stride_oh, token, exists, stride_on, stride_od, accumulator, DIM, PAD
    )
    tl.store(lse + batch_head.to(tl.int64) * num_queries + token, log_sum, mask=exists)


# -- backward ----------------------------------------------------------------------------------------------------


@triton.jit
def _delta_kernel(
    grad_out, out, lse, grad_lse, delta, lse_log2,
    stride_gb, stride_gh, stride_gn, stride_gd, stride_ob, stride_oh, stride_on, stride_od,
    stride_lb, stride_lh, stride_ln, num_heads, num_queries,
    DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """delta = sum(grad_out * out) - grad_lse, and the lse in powers of two with +inf for rows that read nothing."""
    batch_head = tl.program_id(0).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = token < num_queries
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    grads = _load_rows(
        grad_out + batch * stride_gb + head * stride_gh,
        origin,
        long_token,
        exists,
        stride_gn,
        stride_gd,
        DIM,
        PAD,
        True,
    )
    outs = _load_rows(
        out + batch * stride_ob + head * stride_oh,
        origin,
        long_token,
        exists,
        stride_on,
        stride_od,
        DIM,
        PAD,
        True,
    )
    products = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    grad_lse += batch * stride_lb + head * stride_lh
    products -= tl.load(grad_lse + long_token * stride_ln, mask=exists, other=0.0)
    log_sum = tl.load(lse + batch_head * num_queries + token, mask=exists, other=0.0)
    read_nothing = log_sum == -_INF
    # The log of nothing has no gradient; merging two of them by lse gives NaN, which must not spread.
    tl.store(delta + batch_head * num_queries + token, tl.where(read_nothing, 0.0, products), mask=exists)
    log_sum = tl.where(read_nothing, _INF, log_sum * _LOG2_E)
    tl.store(lse_log2 + batch_head * num_queries + token, log_sum, mask=exists)


@triton.jit
def _query_gradient_tile(
    tile, entries, count, query, grad_out, accumulator, lse_log2, delta, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, token, exists = _tile_tokens(entries, count, tile, num_keys, K_BLOCK, TILE_K, MASKED)
    if COPY_ENGINE:
        keys = _copy_rows(k_desc, batch, key_head, first, TILE_K, PAD)
        values = _copy_rows(v_desc, batch, key_head, first, TILE_K, PAD)
    else:
        keys = _load_rows(key, first, token, exists, stride_kn, stride_kd, DIM, PAD, MASKED)
        values = _load_rows(value, first, token, exists, stride_vn, stride_vd, DIM, PAD, MASKED)
    bias = query_position
    key_position = query_position
    if HAS_BIAS:
        bias = tl.load(key_bias + (first + token) * stride_bias, mask=exists, other=0.0)[None, :] * _LOG2_E
    if HAS_POSITIONS:
        key_position = tl.load(key_positions + first + token, mask=exists, other=0)[None, :]
    logits = _masked_logits(
        _dot(query, tl.trans(keys), None, PRECISION), scale, bias, exists[None, :], query_position, key_position,
        MASKED, HAS_BIAS, HAS_POSITIONS,
    )  # fmt: skip
    weights = tl.math.exp2(logits - lse_log2[:, None])
    grad_weights = _dot(grad_out, tl.trans(values), None, PRECISION)
    grad_logits = weights * (grad_weights - delta[:, None])
    return _dot(grad_logits.to(keys.dtype), keys, accumulator, PRECISION)


@triton.jit
def _query_gradient_kernel(
    query, key, value, k_desc, v_desc, grad_out, grad_query, lse_log2, delta, offsets, blocks, order,
    key_bias, query_positions, key_positions,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h,
    stride_bias_b, stride_bias_h, stride_bias, stride_query_positions, stride_key_positions,
    num_heads, heads_per_key, num_rows, num_queries, num_keys, scale, logit_scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch_head, row, part = _row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    key_head = head // heads_per_key
    offsets += batch * stride_offsets_b + head * stride_offsets_h + row
    start = tl.load(offsets)
    count = tl.load(offsets + 1) - start
    entries = blocks + batch * stride_blocks_b + head * stride_blocks_h + start
    key += batch * stride_kb + key_head * stride_kh
    value += batch * stride_vb + key_head * stride_vh
    key_bias += batch * stride_bias_b + head * stride_bias_h
    key_positions += batch * stride_key_positions

    lane = part * TILE_Q + tl.arange(0, TILE_Q)
    token = row * Q_BLOCK + lane
    exists = (lane < Q_BLOCK) & (token < num_queries)
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    queries = _load_rows(
        query + batch * stride_qb + head * stride_qh,
        origin,
        long_token,
        exists,
        stride_qn,
        stride_qd,
        DIM,
        PAD,
        True,
    )
    grads = _load_rows(
        grad_out + batch * stride_gb + head * stride_gh,
        origin,
        long_token,
        exists,
        stride_gn,
        stride_gd,
        DIM,
        PAD,
        True,
    )
    statistics = batch_head.to(tl.int64) * num_queries + token
    lse_rows = tl.load(lse_log2 + statistics, mask=exists, other=float("inf"))
    delta_rows = tl.load(delta + statistics, mask=exists, other=0.0)
    query_position = tl.zeros([TILE_Q, 1], tl.int32)
    if HAS_POSITIONS:
        query_position = tl.load(
            query_positions + batch * stride_query_positions + token, mask=exists, other=0
        )[:, None]

    accumulator = tl.zeros([TILE_Q, PAD], tl.float32)
    whole, total = _tile_counts(entries, count, num_keys, K_BLOCK, TILE_K, RAGGED)
    for tile in tl.range(0, whole):
        accumulator = _query_gradient_tile(
            tile, entries, count, queries, grads, accumulator, lse_rows, delta_rows, key, value, k_desc, v_desc,
            batch, key_head, key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd,
            stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, False, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS,
            PRECISION,
        )  # fmt: skip
    if RAGGED or K_BLOCK < TILE_K:
        for tile in tl.range(whole, total, num_stages=1):
            accumulator = _query_gradient_tile(
                tile, entries, count, queries, grads, accumulator, lse_rows, delta_rows, key, value, k_desc, v_desc,
                batch, key_head, key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd,
                stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, True, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS,
                PRECISION,
            )  # fmt: skip
    _store_rows(
        grad_query + batch * stride_dqb + head * stride_dqh, token, exists, stride_dqn, stride_dqd,
        accumulator * logit_scale, DIM, PAD,
    )  # fmt: skip


@triton.jit
def _key_gradient_tile(
    tile, entries, count, keys, values, grad_key, grad_value, grad_bias, query, grad_out, q_desc, g_desc, batch, head,
    lse_log2, delta, query_positions, key_position, bias, stride_qn, stride_qd, stride_gn, stride_gd, scale,
    num_queries,
    Q_BLOCK: tl.constexpr, TILE_Q: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same step with the roles exchanged: logits are [keys, queries]."""
    first, token, exists = _tile_tokens(entries, count, tile, num_queries, Q_BLOCK, TILE_Q, MASKED)
    if COPY_ENGINE:
        queries = _copy_rows(q_desc, batch, head, first, TILE_Q, PAD)
        grads = _copy_rows(g_desc, batch, head, first, TILE_Q, PAD)
    else:
        queries = _load_rows(query, first, token, exists, stride_qn, stride_qd, DIM, PAD, MASKED)
        grads = _load_rows(grad_out, first, token, exists, stride_gn, stride_gd, DIM, PAD, MASKED)
    query_position = key_position
    if MASKED:
        # +inf makes the weights of queries that do not exist zero.
        lse_rows = tl.load(lse_log2 + first + token, mask=exists, other=float("inf"))
        delta_rows = tl.load(delta + first + token, mask=exists, other=0.0)
    else:
        lse_rows = tl.load(lse_log2 + first + token)
        delta_rows = tl.load(delta + first + token)
    if HAS_POSITIONS:
        query_position = tl.load(query_positions + first + token, mask=exists, other=0)[None, :]
    logits = _masked_logits(
        _dot(keys, tl.trans(queries), None, PRECISION), scale, bias, True, query_position, key_position,
        False, HAS_BIAS, HAS_POSITIONS,
    )  # fmt: skip
    weights = tl.math.exp2(logits - lse_rows[None, :])
    grad_value = _dot(weights.to(grads.dtype), grads, grad_value, PRECISION)
    grad_weights = _dot(values, tl.trans(grads), None, PRECISION)
    grad_logits = weights * (grad_weights - delta_rows[None, :])
    grad_key = _dot(grad_logits.to(queries.dtype), queries, grad_key, PRECISION)
    if HAS_BIAS:
        grad_bias += tl.sum(grad_logits, 1)
    return grad_key, grad_value, grad_bias


@triton.jit
def _key_gradient_kernel(
    query, key, value, q_desc, g_desc, grad_out, grad_key, grad_value, grad_bias, lse_log2, delta,
    offsets, blocks, order, key_bias, query_positions, key_positions,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h,
    stride_bias_b, stride_bias_h, stride_bias, stride_query_positions, stride_key_positions,
    num_key_heads, heads_per_key, num_rows, num_queries, num_keys, scale, logit_scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch_head, row, part = _row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)
    num_heads = num_key_heads * heads_per_key

    lane = part * TILE_K + tl.arange(0, TILE_K)
    token = row * K_BLOCK + lane
    # Keys that do not exist get gradients too, from zero rows; they are not stored.
    exists = (lane < K_BLOCK) & (token < num_keys)
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    keys = _load_rows(
        key + batch * stride_kb + key_head * stride_kh,
        origin,
        long_token,
        exists,
        stride_kn,
        stride_kd,
        DIM,
        PAD,
        True,
    )
    values = _load_rows(
        value + batch * stride_vb + key_head * stride_vh,
        origin,
        long_token,
        exists,
        stride_vn,
        stride_vd,
        DIM,
        PAD,
        True,
    )
    key_position = tl.zeros([TILE_K, 1], tl.int32)
    if HAS_POSITIONS:
        key_position = tl.load(key_positions + batch * stride_key_positions + token, mask=exists, other=0)[
            :, None
        ]
        query_positions += batch * stride_query_positions

    key_accumulator = tl.zeros([TILE_K, PAD], tl.float32)
    value_accumulator = tl.zeros([TILE_K, PAD], tl.float32)
    for member in range(heads_per_key):
        head = key_head * heads_per_key + member
        flat_head = batch * num_heads + head
        row_offsets = offsets + batch * stride_offsets_b + head * stride_offsets_h + row
        start = tl.load(row_offsets)
        count = tl.load(row_offsets + 1) - start
        entries = blocks + batch * stride_blocks_b + head * stride_blocks_h + start
        head_query = query + batch * stride_qb + head * stride_qh
        head_grad = grad_out + batch * stride_gb + head * stride_gh
        head_lse = lse_log2 + flat_head * num_queries
        head_delta = delta + flat_head * num_queries
        bias = key_position
        if HAS_BIAS:
            bias_pointer = key_bias + batch * stride_bias_b + head * stride_bias_h + long_token * stride_bias
            bias = tl.load(bias_pointer, mask=exists, other=0.0)[:, None] * _LOG2_E
        bias_accumulator = tl.zeros([TILE_K], tl.float32)
        whole, total = _tile_counts(entries, count, num_queries, Q_BLOCK, TILE_Q, RAGGED)
        for tile in tl.range(0, whole):
            key_accumulator, value_accumulator, bias_accumulator = _key_gradient_tile(
                tile, entries, count, keys, values, key_accumulator, value_accumulator, bias_accumulator,
                head_query, head_grad, q_desc, g_desc, batch, head, head_lse, head_delta, query_positions, key_position,
                bias, stride_qn, stride_qd, stride_gn, stride_gd, scale, num_queries,
                Q_BLOCK, TILE_Q, DIM, PAD, False, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION,
            )  # fmt: skip
        if RAGGED or Q_BLOCK < TILE_Q:
            for tile in tl.range(whole, total, num_stages=1):
                key_accumulator, value_accumulator, bias_accumulator = _key_gradient_tile(
                    tile, entries, count, keys, values, key_accumulator, value_accumulator, bias_accumulator,
                    head_query, head_grad, q_desc, g_desc, batch, head, head_lse, head_delta, query_positions,
                    key_position, bias, stride_qn, stride_qd, stride_gn, stride_gd, scale, num_queries,
                    Q_BLOCK, TILE_Q, DIM, PAD, True, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION,
                )  # fmt: skip
        if HAS_BIAS:
            tl.store(grad_bias + flat_head * num_keys + token, bias_accumulator, mask=exists)

    _store_rows(
        grad_key + batch * stride_dkb + key_head * stride_dkh, token, exists, stride_dkn, stride_dkd,
        key_accumulator * logit_scale, DIM, PAD,
    )  # fmt: skip
    _store_rows(
        grad_value + batch * stride_dvb + key_head * stride_dvh, token, exists, stride_dvn, stride_dvd,
        value_accumulator, DIM, PAD,
    )  # fmt: skip


# -- launching ---------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """The shape of one program: rows it owns, columns per step, warps, pipeline stages, registers per thread."""

    own: int
    other: int
    warps: int
    stages: int
    registers: int | None = None


def _fit(block: int, wanted: int) -> int:
    """The largest power-of-two tile up to `wanted` that cuts `block` evenly; at least 16, the least a dot takes."""
    return max(16, min(block & -block, wanted))


def _other_tile(block: int, wanted: int) -> int:
    """A tile that cuts blocks evenly, or gathers several small ones."""
    return min(block & -block, wanted) if block >= wanted else wanted


def forward_tiles(query: Tensor, key: Tensor, q_block: int, k_block: int) -> Tiles:
    if query.dtype == torch.float32:
        return Tiles(_fit(q_block, 64), _other_tile(k_block, 32), 4, 2)
    if q_block % 128 == 0 and query.shape[-1] == 128 and k_block >= 64 and suits_copy_engine(key):
        # Half the registers for two programs per processor: one multiplies while the other exponentiates.
        return Tiles(128, 64, 8, 2, registers=128)
    return Tiles(_fit(q_block, 64), _other_tile(k_block, 64), 4, 3)


def query_gradient_tiles(query: Tensor, q_block: int, k_block: int) -> Tiles:
    if query.dtype == torch.float32:
        return Tiles(_fit(q_block, 32), _other_tile(k_block, 32), 4, 1)
    return Tiles(_fit(q_block, 64), _other_tile(k_block, 64), 4, 3)


def key_gradient_tiles(query: Tensor, q_block: int, k_block: int) -> Tiles:
    if query.dtype == torch.float32:
        return Tiles(_fit(k_block, 32), _other_tile(q_block, 32), 4, 1)
    return Tiles(_fit(k_block, 64), _other_tile(q_block, 64), 4, 2)


def unsupported(
    query: Tensor,
    key: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    backward: bool,
) -> str | None:
    """Why the plain Triton kernels cannot run this call, or None."""
    if not query.is_cuda and not is_interpreted():
        return f"the tensors are on {query.device}"
    if query.dtype == torch.float64:
        return "float64 is for the reference"
    if query.dtype == torch.bfloat16 and is_interpreted():
        return "Triton's interpreter computes wrong bfloat16 products"
    if query.shape[-1] > 256:
        return f"head dimension {query.shape[-1]} is above 256"
    return None


def _pad(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _options(query: Tensor, tiles: Tiles, own_block: int) -> dict[str, object]:
    dim = query.shape[-1]
    return {
        "DIM": dim,
        "PAD": _pad(dim),
        "PARTS": max(1, own_block // tiles.own),
        # The tensor cores' tf32 would cost float32 users three digits.
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
    }


def _list_strides(plan: Plan) -> tuple[int, ...]:
    """Strides of offsets and blocks over batch and heads; 0 where one list serves all."""
    strides = []
    for lists in (plan.offsets, plan.blocks):
        strides += [
            0 if size == 1 else stride
            for size, stride in zip(lists.shape[:2], lists.stride()[:2], strict=True)
        ]
    return tuple(strides)


def _extras(
    query: Tensor, key_bias: Tensor | None, positions: Positions | None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Pointers and strides of the optional inputs; `query` stands in where there is none and is never read."""
    bias = query if key_bias is None else key_bias
    bias_strides = (0, 0, 0) if key_bias is None else key_bias.stride()
    if positions is None:
        return (bias, query, query), (*bias_strides, 0, 0)
    position_strides = tuple(0 if x.shape[0] == 1 else x.stride(0) for x in positions)
    return (bias, *(x.contiguous() for x in positions)), (*bias_strides, *position_strides)


def _nonnegative(query: Tensor, scale: float) -> tuple[Tensor, float]:
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
    whole_rows = x.stride(-1) == 1 and x.shape[-1] == _pad(x.shape[-1]) and x.data_ptr() % 16 == 0
    return has_engine and aligned and whole_rows and x.element_size() == 2


def descriptor_strides(x: Tensor) -> list[int]:
    """Strides for the copy engine, which checks even those of single elements, though it never uses them."""
    return [
        stride if size > 1 else x.shape[-1]
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ] + [1]


def _sources(first: Tensor, second: Tensor, block: int, tile: int) -> tuple[bool, object, object]:
    """Whether the copy engine loads these two by whole tiles, and what it needs for that (else the tensors)."""
    if block < tile or not (suits_copy_engine(first) and suits_copy_engine(second)):
        return False, first, second
    return True, *(
        TensorDescriptor(x, list(x.shape), descriptor_strides(x), [1, 1, tile, x.shape[-1]])
        for x in (first, second)
    )


def attend_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    scale: float,
    tiles: Tiles | None = None,
) -> Attended:
    batch, heads, num_queries, _ = query.shape
    out = torch.empty_like(query)
    lse = torch.empty(batch, heads, num_queries, device=query.device, dtype=torch.float32)
    query, scale = _nonnegative(query, scale)
    order = plan.longest_first(batch, heads)
    tiles = tiles or forward_tiles(query, key, plan.q_block, plan.k_block)
    extras, extra_strides = _extras(query, key_bias, positions)
    options = _options(query, tiles, plan.q_block)
    copy_engine, k_desc, v_desc = _sources(key, value, plan.k_block, tiles.other)
    grid = (batch * heads * plan.num_rows * options["PARTS"],)  # type: ignore[operator]
    _forward_kernel[grid](
        query, key, value, k_desc, v_desc, out, lse,
        plan.offsets, plan.blocks, plan.offsets if order is None else order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(), *_list_strides(plan), *extra_strides,
        heads, heads // key.shape[1], plan.num_rows, num_queries, plan.num_keys, scale * LOG2_E,
        Q_BLOCK=plan.q_block, K_BLOCK=plan.k_block, TILE_Q=tiles.own, TILE_K=tiles.other,
        RAGGED=plan.num_keys % plan.k_block != 0, COPY_ENGINE=copy_engine,
        HAS_ORDER=order is not None, HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None, **options,
    )  # fmt: skip
    return Attended(out, lse)


def _row_statistics(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, dim = out.shape
    delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    tile = 128 if not is_interpreted() else 64
    _delta_kernel[(batch * heads, triton.cdiv(num_queries, tile))](
        grad_out, out, lse, grad_lse, delta, lse_log2, *grad_out.stride(), *out.stride(), *grad_lse.stride(),
        heads, num_queries, DIM=dim, PAD=_pad(dim), TILE=tile,
    )  # fmt: skip
    return delta, lse_log2


def attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    scale: float,
) -> Gradients:
    statistics = _row_statistics(grad_out, grad_lse, out, lse.contiguous())
    inputs = (grad_out, *statistics, query, key, value, plan, key_bias, positions, scale)
    return Gradients(query_gradient(*inputs), *key_gradient(*inputs))


def query_gradient(
    grad_out: Tensor,
    delta: Tensor,
    lse_log2: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    scale: float,
    tiles: Tiles | None = None,
) -> Tensor:
    batch, heads, num_queries, _ = query.shape
    grad_query = torch.empty_like(query)
    order = plan.longest_first(batch, heads)
    tiles = tiles or query_gradient_tiles(query, plan.q_block, plan.k_block)
    extras, extra_strides = _extras(query, key_bias, positions)
    options = _options(query, tiles, plan.q_block)
    copy_engine, k_desc, v_desc = _sources(key, value, plan.k_block, tiles.other)
    grid = (batch * heads * plan.num_rows * options["PARTS"],)  # type: ignore[operator]
    _query_gradient_kernel[grid](
        query, key, value, k_desc, v_desc, grad_out, grad_query, lse_log2, delta,
        plan.offsets, plan.blocks, plan.offsets if order is None else order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(), *grad_query.stride(),
        *_list_strides(plan), *extra_strides,
        heads, heads // key.shape[1], plan.num_rows, num_queries, plan.num_keys, scale * LOG2_E, scale,
        Q_BLOCK=plan.q_block, K_BLOCK=plan.k_block, TILE_Q=tiles.own, TILE_K=tiles.other,
        RAGGED=plan.num_keys % plan.k_block != 0, COPY_ENGINE=copy_engine,
        HAS_ORDER=order is not None, HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None, **options,
    )  # fmt: skip
    return grad_query


def key_gradient(
    grad_out: Tensor,
    delta: Tensor,
    lse_log2: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    scale: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    batch, heads, num_queries, _ = query.shape
    key_heads = key.shape[1]
    transposed = plan.transpose()
    grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
    grad_bias = None
    if key_bias is not None:
        grad_bias = torch.empty(batch, heads, plan.num_keys, device=query.device, dtype=torch.float32)
    order = transposed.longest_first(batch, key_heads)
    tiles = tiles or key_gradient_tiles(query, plan.q_block, plan.k_block)
    extras, extra_strides = _extras(query, key_bias, positions)
    options = _options(query, tiles, plan.k_block)
    copy_engine, q_desc, g_desc = _sources(query, grad_out, plan.q_block, tiles.other)
    grid = (batch * key_heads * transposed.num_rows * options["PARTS"],)  # type: ignore[operator]
    _key_gradient_kernel[grid](
        query, key, value, q_desc, g_desc, grad_out, grad_key, grad_value, query if grad_bias is None else grad_bias,
        lse_log2, delta,
        transposed.offsets, transposed.blocks, transposed.offsets if order is None else order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(), *grad_key.stride(), *grad_value.stride(),
        *_list_strides(transposed), *extra_strides, key_heads, heads // key_heads, transposed.num_rows,
        num_queries, plan.num_keys, scale * LOG2_E, scale,
        Q_BLOCK=plan.q_block, K_BLOCK=plan.k_block, TILE_Q=tiles.other, TILE_K=tiles.own,
        RAGGED=num_queries % plan.q_block != 0, COPY_ENGINE=copy_engine,
        HAS_ORDER=order is not None, HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None, **options,
    )  # fmt: skip
    return grad_key, grad_value, grad_bias
