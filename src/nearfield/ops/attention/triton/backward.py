"""The backward kernels in plain Triton: the query gradient over the plan, the key gradients over its transpose.

Every gradient is summed by one program, in the order of its list. There are no atomics, so equal inputs give equal
bits. The price is that weights are computed in both passes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield._types import Attended
from nearfield.ops._triton import is_interpreted
from nearfield.ops._triton.launch import (
    LOG2_E,
    Tiles,
    ceil_div,
    chunk_of,
    key_gradient_tiles,
    optional_inputs,
    options_for,
    padded,
    query_gradient_tiles,
    tile_sources,
)
from nearfield.ops._triton.walk import (
    INF,
    LOG2E,
    chunks_of_row,
    copy_rows,
    dot,
    list_of_row,
    load_rows,
    masked_logits,
    pairs_read,
    row_of_program,
    shares_of_means,
    store_rows,
    tile_counts,
    tile_tokens,
)
from nearfield.ops.attention.parts import KeyValuePart
from nearfield.ops.lists.triton.pack import Rows, fill_rows, has_room_for_bits, room_for_rows, rows_of
from nearfield.plan import Plan


@triton.jit
def statistics_of(grads, outs, log_sum, grad_lse):
    """delta = sum(grad_out * out) - grad_lse, and the lse in powers of two with +inf for rows that read nothing."""
    read_nothing = log_sum == -INF
    products = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1) - grad_lse
    # The log of nothing has no gradient; merging two of them by lse gives NaN, which must not spread.
    return tl.where(read_nothing, 0.0, products), tl.where(read_nothing, INF, log_sum * LOG2E)


@triton.jit
def _delta_kernel(
    grad_out, out, lse, grad_lse, delta, lse_log2,
    stride_gb, stride_gh, stride_gn, stride_gd, stride_ob, stride_oh, stride_on, stride_od,
    stride_lb, stride_lh, stride_ln, num_heads, num_queries,
    DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = token < num_queries
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    grads = load_rows(
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
    outs = load_rows(
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
    grad_lse += batch * stride_lb + head * stride_lh
    of_lse = tl.load(grad_lse + long_token * stride_ln, mask=exists, other=0.0)
    log_sum = tl.load(lse + batch_head * num_queries + token, mask=exists, other=0.0)
    delta_rows, lse_rows = statistics_of(grads, outs, log_sum, of_lse)
    tl.store(delta + batch_head * num_queries + token, delta_rows, mask=exists)
    tl.store(lse_log2 + batch_head * num_queries + token, lse_rows, mask=exists)


@triton.jit
def _query_gradient_tile(
    tile, entries, count, query, grad_out, accumulator, lse_log2, delta, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale,
    num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    Q_BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    first, token, exists, entry = tile_tokens(entries, count, tile, num_keys, K_BLOCK, TILE_K, MASKED, PACK)
    if COPY_ENGINE:
        keys = copy_rows(k_desc, batch, key_head, first, TILE_K, PAD)
        values = copy_rows(v_desc, batch, key_head, first, TILE_K, PAD)
    else:
        keys = load_rows(key, first, token, exists, stride_kn, stride_kd, DIM, PAD, MASKED)
        values = load_rows(value, first, token, exists, stride_vn, stride_vd, DIM, PAD, MASKED)
    bias = query_position
    key_position = query_position
    if HAS_BIAS:
        bias = tl.load(key_bias + (first + token) * stride_bias, mask=exists, other=0.0)[None, :] * LOG2E
    if HAS_POSITIONS:
        key_position = tl.load(key_positions + first + token, mask=exists, other=0)[None, :]
    is_read = pairs_read(entry, exists, lane, Q_BLOCK, MASKED, PACK)
    logits = masked_logits(
        dot(query, tl.trans(keys), None, PRECISION), scale, bias, is_read, query_position, key_position,
        MASKED or PACK > 1, HAS_BIAS, HAS_POSITIONS,
    )  # fmt: skip
    weights = tl.math.exp2(logits - lse_log2[:, None])
    grad_weights = dot(grad_out, tl.trans(values), None, PRECISION)
    grad_logits = weights * (grad_weights - delta[:, None])
    return dot(grad_logits.to(keys.dtype), keys, accumulator, PRECISION)


@triton.jit
def walk_for_queries(
    row, offsets, blocks, query, grad_out, accumulator, lse_log2, delta, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale,
    num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, RAGGED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    Q_BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Add up the gradient of a row's queries over all that it lists; not yet scaled."""
    start, count = list_of_row(offsets, row, PACK)
    entries = blocks + start
    whole, total = tile_counts(entries, count, num_keys, K_BLOCK, TILE_K, RAGGED, PACK)
    for tile in tl.range(0, whole):
        accumulator = _query_gradient_tile(
            tile, entries, count, query, grad_out, accumulator, lse_log2, delta, key, value, k_desc, v_desc,
            batch, key_head, key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn,
            stride_vd, stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, False, COPY_ENGINE, HAS_BIAS,
            HAS_POSITIONS, PRECISION, Q_BLOCK, PACK,
        )  # fmt: skip
    if RAGGED or (K_BLOCK < TILE_K and PACK == 1):
        for tile in tl.range(whole, total, num_stages=1):
            accumulator = _query_gradient_tile(
                tile, entries, count, query, grad_out, accumulator, lse_log2, delta, key, value, k_desc, v_desc,
                batch, key_head, key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn,
                stride_vd, stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, True, COPY_ENGINE, HAS_BIAS,
                HAS_POSITIONS, PRECISION, Q_BLOCK, PACK,
            )  # fmt: skip
    return accumulator


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
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, CONTINUES: tl.constexpr,
    PRECISION: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """CONTINUES: `grad_query` holds what came from other keys, and gets the sum."""
    batch_head, row, part = row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    key_head = head // heads_per_key
    key += batch * stride_kb + key_head * stride_kh
    value += batch * stride_vb + key_head * stride_vh
    key_bias += batch * stride_bias_b + head * stride_bias_h
    key_positions += batch * stride_key_positions

    lane = part * TILE_Q + tl.arange(0, TILE_Q)
    token = row * Q_BLOCK + lane
    exists = (lane < Q_BLOCK) & (token < num_queries)
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    queries = load_rows(
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
    grads = load_rows(
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
    accumulator = walk_for_queries(
        row, offsets + batch * stride_offsets_b + head * stride_offsets_h,
        blocks + batch * stride_blocks_b + head * stride_blocks_h, queries, grads, accumulator, lse_rows, delta_rows,
        key, value, k_desc, v_desc, batch, key_head, key_bias, key_positions, query_position, lane,
        stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
        K_BLOCK, TILE_K, DIM, PAD, RAGGED, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION, Q_BLOCK, PACK,
    )  # fmt: skip
    accumulator *= logit_scale
    grad_query += batch * stride_dqb + head * stride_dqh
    if CONTINUES:
        before = load_rows(grad_query, origin, long_token, exists, stride_dqn, stride_dqd, DIM, PAD, True)
        accumulator += before.to(tl.float32)
    store_rows(grad_query, token, exists, stride_dqn, stride_dqd, accumulator, DIM, PAD)


@triton.jit
def _key_gradient_tile(
    tile, entries, count, keys, values, grad_key, grad_value, grad_bias, query, grad_out, q_desc, g_desc, batch, head,
    lse_log2, delta, query_positions, key_position, bias, lane, stride_qn, stride_qd, stride_gn, stride_gd, scale,
    num_queries,
    Q_BLOCK: tl.constexpr, TILE_Q: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    K_BLOCK: tl.constexpr, PACK: tl.constexpr, BIAS_GRADIENT: tl.constexpr,
):  # fmt: skip
    """The same step with the roles exchanged: logits are [keys, queries]."""
    first, token, exists, entry = tile_tokens(
        entries, count, tile, num_queries, Q_BLOCK, TILE_Q, MASKED, PACK
    )
    if COPY_ENGINE:
        queries = copy_rows(q_desc, batch, head, first, TILE_Q, PAD)
        grads = copy_rows(g_desc, batch, head, first, TILE_Q, PAD)
    else:
        queries = load_rows(query, first, token, exists, stride_qn, stride_qd, DIM, PAD, MASKED)
        grads = load_rows(grad_out, first, token, exists, stride_gn, stride_gd, DIM, PAD, MASKED)
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
    logits = dot(keys, tl.trans(queries), None, PRECISION)
    is_read = pairs_read(entry, exists, lane, K_BLOCK, False, PACK)
    logits = masked_logits(
        logits, scale, bias, is_read, query_position, key_position, PACK > 1, HAS_BIAS, HAS_POSITIONS
    )
    weights = tl.math.exp2(logits - lse_rows[None, :])
    grad_value = dot(weights.to(grads.dtype), grads, grad_value, PRECISION)
    grad_weights = dot(values, tl.trans(grads), None, PRECISION)
    grad_logits = weights * (grad_weights - delta_rows[None, :])
    grad_key = dot(grad_logits.to(queries.dtype), queries, grad_key, PRECISION)
    if BIAS_GRADIENT:
        grad_bias += tl.sum(grad_logits, 1)
    return grad_key, grad_value, grad_bias


@triton.jit
def _key_gradient_kernel(
    query, key, value, q_desc, g_desc, grad_out, grad_key, grad_value, grad_bias,
    key_partials, value_partials, bias_partials, mean_keys, mean_values, lse_log2, delta,
    offsets, blocks, order, key_bias, query_positions, key_positions,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_gb, stride_gh, stride_gn, stride_gd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    stride_mb, stride_mh, stride_mn, stride_md,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h,
    stride_bias_b, stride_bias_h, stride_bias, stride_query_positions, stride_key_positions,
    num_key_heads, heads_per_key, num_rows, num_queries, num_keys, scale, logit_scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, COPY_ENGINE: tl.constexpr,
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    PACK: tl.constexpr, CHUNK: tl.constexpr, BIAS_GRADIENT: tl.constexpr, POOL: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """CHUNK: after CHUNK steps the next program of the row goes on, the last one to the end. Each leaves what it has
    summed in its part of `partials`; a row that one program finishes is stored at once.

    LEVELS: `mean_keys` and `mean_values` are gradients of LEVELS levels of means, each of POOL below; keys get shares.
    """
    batch_head, row, part = row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)
    num_heads = num_key_heads * heads_per_key

    lane = part * TILE_K + tl.arange(0, TILE_K)
    token = row * K_BLOCK + lane
    # Keys that do not exist get gradients too, from zero rows; they are not stored.
    exists = (lane < K_BLOCK) & (token < num_keys)
    is_finished = exists
    if CHUNK > 0:
        num_chunks = chunks_of_row(
            offsets + batch * stride_offsets_b + key_head * stride_offsets_h, row, Q_BLOCK, TILE_Q, PACK, CHUNK,
            tl.num_programs(1),
        )  # fmt: skip
        exists = exists & (tl.program_id(1) < num_chunks)
        is_finished = exists & (num_chunks == 1)
        is_partial = exists & (num_chunks > 1)
        place = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // PARTS // num_rows) + batch_head
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    keys = load_rows(
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
    values = load_rows(
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
        key_position = tl.load(key_positions + batch * stride_key_positions + token, mask=exists, other=0)
        key_position = key_position[:, None]
        query_positions += batch * stride_query_positions

    key_accumulator = tl.zeros([TILE_K, PAD], tl.float32)
    value_accumulator = key_accumulator
    for member in range(heads_per_key):
        head = key_head * heads_per_key + member
        flat_head = batch * num_heads + head
        start, count = list_of_row(offsets + batch * stride_offsets_b + head * stride_offsets_h, row, PACK)
        entries = blocks + batch * stride_blocks_b + head * stride_blocks_h + start
        head_query = query + batch * stride_qb + head * stride_qh
        head_grad = grad_out + batch * stride_gb + head * stride_gh
        head_lse = lse_log2 + flat_head * num_queries
        head_delta = delta + flat_head * num_queries
        bias = key_position
        if HAS_BIAS:
            bias_pointer = key_bias + batch * stride_bias_b + head * stride_bias_h + long_token * stride_bias
            bias = tl.load(bias_pointer, mask=exists, other=0.0) * LOG2E
            bias = bias[:, None]
        bias_accumulator = tl.zeros([TILE_K], tl.float32)
        whole, total = tile_counts(entries, count, num_queries, Q_BLOCK, TILE_Q, RAGGED, PACK)
        begin = 0
        if CHUNK > 0:
            begin = tl.program_id(1) * CHUNK
            is_last = tl.program_id(1) == tl.num_programs(1) - 1
            total = tl.where(is_last, total, tl.minimum(total, begin + CHUNK))
            whole = tl.minimum(whole, total)
        for tile in tl.range(begin, whole):
            key_accumulator, value_accumulator, bias_accumulator = _key_gradient_tile(
                tile, entries, count, keys, values, key_accumulator, value_accumulator, bias_accumulator,
                head_query, head_grad, q_desc, g_desc, batch, head, head_lse, head_delta, query_positions, key_position,
                bias, lane, stride_qn, stride_qd, stride_gn, stride_gd, scale, num_queries,
                Q_BLOCK, TILE_Q, DIM, PAD, False, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION, K_BLOCK, PACK,
                BIAS_GRADIENT,
            )  # fmt: skip
        if RAGGED or (Q_BLOCK < TILE_Q and PACK == 1):
            for tile in tl.range(tl.maximum(begin, whole), total, num_stages=1):
                key_accumulator, value_accumulator, bias_accumulator = _key_gradient_tile(
                    tile, entries, count, keys, values, key_accumulator, value_accumulator, bias_accumulator,
                    head_query, head_grad, q_desc, g_desc, batch, head, head_lse, head_delta, query_positions,
                    key_position, bias, lane, stride_qn, stride_qd, stride_gn, stride_gd, scale, num_queries,
                    Q_BLOCK, TILE_Q, DIM, PAD, True, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION, K_BLOCK, PACK,
                    BIAS_GRADIENT,
                )  # fmt: skip
        if BIAS_GRADIENT:
            tl.store(grad_bias + flat_head * num_keys + token, bias_accumulator, mask=is_finished)
            if CHUNK > 0:
                tl.store(bias_partials + place * num_keys + token, bias_accumulator, mask=is_partial)

    if CHUNK > 0:
        place *= num_keys * DIM
        store_rows(key_partials + place, token, is_partial, DIM, 1, key_accumulator, DIM, PAD)
        store_rows(value_partials + place, token, is_partial, DIM, 1, value_accumulator, DIM, PAD)
    _store_key_gradients(
        grad_key + batch * stride_dkb + key_head * stride_dkh, grad_value + batch * stride_dvb + key_head * stride_dvh,
        key_accumulator * logit_scale, value_accumulator, token, is_finished,
        stride_dkn, stride_dkd, stride_dvn, stride_dvd,
        mean_keys + batch * stride_mb + key_head * stride_mh, mean_values + batch * stride_mb + key_head * stride_mh,
        stride_mn, stride_md, num_keys, POOL, LEVELS, DIM, PAD,
    )  # fmt: skip


@triton.jit
def _store_key_gradients(
    grad_key, grad_value, key_sum, value_sum, token, exists, stride_dkn, stride_dkd, stride_dvn, stride_dvd,
    mean_keys, mean_values, stride_mn, stride_md, num_keys,
    POOL: tl.constexpr, LEVELS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    if LEVELS > 0:
        key_sum += shares_of_means(
            mean_keys, token, exists, stride_mn, stride_md, num_keys, POOL, LEVELS, DIM, PAD
        )
    store_rows(grad_key, token, exists, stride_dkn, stride_dkd, key_sum, DIM, PAD)
    if LEVELS > 0:
        value_sum += shares_of_means(
            mean_values, token, exists, stride_mn, stride_md, num_keys, POOL, LEVELS, DIM, PAD
        )
    store_rows(grad_value, token, exists, stride_dvn, stride_dvd, value_sum, DIM, PAD)


@triton.jit
def _join_chunks_kernel(
    grad_key, grad_value, grad_bias, key_partials, value_partials, bias_partials, mean_keys, mean_values, offsets,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    stride_mb, stride_mh, stride_mn, stride_md,
    stride_offsets_b, stride_offsets_h, num_heads, num_rows, num_keys, most_chunks, logit_scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, PARTS: tl.constexpr, PACK: tl.constexpr, CHUNK: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr, POOL: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Sum what the programs of one row left, in their order."""
    batch_head, row, part = row_of_program(tl.program_id(0), offsets, num_rows, False, PARTS)
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    row_offsets = offsets + batch * stride_offsets_b + head * stride_offsets_h
    num_chunks = chunks_of_row(row_offsets, row, Q_BLOCK, TILE_Q, PACK, CHUNK, most_chunks)
    if num_chunks > 1:
        lane = part * TILE_K + tl.arange(0, TILE_K)
        token = row * K_BLOCK + lane
        exists = (lane < K_BLOCK) & (token < num_keys)
        long_token = token.to(tl.int64)
        key_sum = tl.zeros([TILE_K, PAD], tl.float32)
        value_sum = tl.zeros([TILE_K, PAD], tl.float32)
        bias_sum = tl.zeros([TILE_K], tl.float32)
        batch_heads = tl.num_programs(0) // PARTS // num_rows
        for chunk in range(num_chunks):
            first = (chunk * batch_heads + batch_head).to(tl.int64) * num_keys
            key_sum += load_rows(key_partials, first, long_token, exists, DIM, 1, DIM, PAD, True)
            value_sum += load_rows(value_partials, first, long_token, exists, DIM, 1, DIM, PAD, True)
            if BIAS_GRADIENT:
                bias_sum += tl.load(bias_partials + first + token, mask=exists, other=0.0)
        _store_key_gradients(
            grad_key + batch * stride_dkb + head * stride_dkh, grad_value + batch * stride_dvb + head * stride_dvh,
            key_sum * logit_scale, value_sum, token, exists, stride_dkn, stride_dkd, stride_dvn, stride_dvd,
            mean_keys + batch * stride_mb + head * stride_mh, mean_values + batch * stride_mb + head * stride_mh,
            stride_mn, stride_md, num_keys, POOL, LEVELS, DIM, PAD,
        )  # fmt: skip
        if BIAS_GRADIENT:
            tl.store(grad_bias + batch_head.to(tl.int64) * num_keys + token, bias_sum, mask=exists)


class RowGradients(NamedTuple):
    """What the gradient kernels need of every query.

    Args:
        out: the gradient of what it read.
        delta: the product of that with what it read, less the gradient of its `lse`.
        lse_log2: its `lse` in powers of two, infinite where it read nothing.
    """

    out: Tensor
    delta: Tensor
    lse_log2: Tensor


def row_gradients(grads: Attended, attended: Attended) -> RowGradients:
    """
    Args:
        attended: its `lse` is contiguous.
    """
    (grad_out, grad_lse), (out, lse) = grads, attended
    batch, heads, num_queries, dim = out.shape
    delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    tile = 128 if not is_interpreted() else 64
    _delta_kernel[(batch * heads, ceil_div(num_queries, tile))](
        grad_out, out, lse, grad_lse, delta, lse_log2, *grad_out.stride(), *out.stride(), *grad_lse.stride(),
        heads, num_queries, DIM=dim, PAD=padded(dim), TILE=tile,
    )  # fmt: skip
    return RowGradients(grad_out, delta, lse_log2)


def query_gradient(
    grads: RowGradients,
    query: Tensor,
    part: KeyValuePart,
    scale: float,
    tiles: Tiles | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """
    Args:
        before: the gradient from other keys, to which this one is added in place.
    """
    grad_out, delta, lse_log2 = grads
    key, value, plan, key_bias, positions = part
    batch, heads, num_queries, _ = query.shape
    grad_query = torch.empty_like(query) if before is None else before
    tiles = tiles or query_gradient_tiles(query, plan.q_block, plan.k_block, similar=plan.similar_rows)
    rows = rows_of(plan, tiles, batch, heads)
    extras, extra_strides = optional_inputs(query, key_bias, positions)
    options = options_for(query, tiles, plan.q_block)
    copy_engine, k_desc, v_desc = tile_sources(key, value, plan.k_block, tiles.other)
    grid = (batch * heads * rows.number * options["PARTS"],)
    _query_gradient_kernel[grid](
        query, key, value, k_desc, v_desc, grad_out, grad_query, lse_log2, delta,
        rows.offsets, rows.blocks, rows.offsets if rows.order is None else rows.order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(), *grad_query.stride(),
        *rows.strides, *extra_strides,
        heads, heads // key.shape[1], rows.number, num_queries, plan.num_keys, scale * LOG2_E, scale,
        Q_BLOCK=rows.size, K_BLOCK=plan.k_block, TILE_Q=tiles.own, TILE_K=tiles.other,
        RAGGED=plan.num_keys % plan.k_block != 0, COPY_ENGINE=copy_engine,
        HAS_ORDER=rows.order is not None, HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None,
        CONTINUES=before is not None, **options,
    )  # fmt: skip
    return grad_query


class KeyRows(NamedTuple):
    """What the programs of the key gradients walk, and in which shape."""

    transposed: Plan
    tiles: Tiles
    rows: Rows

    @classmethod
    def of(cls, query: Tensor, key: Tensor, transposed: Plan, tiles: Tiles | None = None) -> "KeyRows":
        tiles = tiles or _tiles_of(query, key, transposed)
        return cls(transposed, tiles, rows_of(transposed, tiles, query.shape[0], key.shape[1]))

    @classmethod
    def room(cls, query: Tensor, key: Tensor, transposed: Plan) -> "KeyRows":
        """The same of a plan whose lists are not written yet; `fill` is for when they are."""
        tiles = _tiles_of(query, key, transposed)
        return cls(transposed, tiles, room_for_rows(transposed, tiles, query.shape[0], key.shape[1]))

    def fill(self, query: Tensor, key: Tensor) -> None:
        fill_rows(self.rows, self.transposed, self.tiles, query.shape[0], key.shape[1])


def _tiles_of(query: Tensor, key: Tensor, transposed: Plan) -> Tiles:
    blocks = transposed.k_block, transposed.q_block
    tiles = key_gradient_tiles(query, key, *blocks, similar=transposed.similar_rows)
    if has_room_for_bits(transposed, tiles.pack):
        return tiles
    return key_gradient_tiles(query, key, *blocks)


class Means(NamedTuple):
    """Gradients of means of the keys and values, of which each key is to get its share.

    Args:
        key, value: `[B, G, means, D]`, both contiguous, in the layout of `levels.py`.
        block: of how many of the level below each is the mean.
        levels: how many there are.
    """

    key: Tensor
    value: Tensor
    block: int
    levels: int


def key_gradient(
    grads: RowGradients,
    query: Tensor,
    part: KeyValuePart,
    scale: float,
    tiles: Tiles | None = None,
    walked: KeyRows | None = None,
    wants_bias: bool = True,
    means: Means | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """
    Args:
        walked: the plan's transpose and all that follows from it, if it is known already.
        wants_bias: whether the gradient of a bias is.
        means: what else the gradients are to hold.
        dtype: of the gradients of keys and values, if not theirs. They are then contiguous, as `Means` are to be.
    """
    grad_out, delta, lse_log2 = grads
    key, value, plan, key_bias, positions = part
    batch, heads, num_queries, _ = query.shape
    key_heads = key.shape[1]
    transposed, tiles, rows = walked or KeyRows.of(query, key, plan.transpose(), tiles)
    layout = torch.contiguous_format if dtype else torch.preserve_format
    grad_key, grad_value = (torch.empty_like(x, dtype=dtype, memory_format=layout) for x in (key, value))
    grad_bias = None
    if key_bias is not None and wants_bias:
        grad_bias = torch.empty(batch, heads, plan.num_keys, device=query.device, dtype=torch.float32)
    chunk, chunks = _chunks(query, key, transposed, tiles)
    sums = (chunks, batch, key_heads, plan.num_keys)
    partials = [
        torch.empty(sums if shape is None else (*sums, shape), device=query.device, dtype=torch.float32)
        if chunk and (shape is not None or grad_bias is not None)
        else query
        for shape in (query.shape[3], query.shape[3], None)
    ]
    extras, extra_strides = optional_inputs(query, key_bias, positions)
    options = options_for(query, tiles, plan.k_block)
    copy_engine, q_desc, g_desc = tile_sources(query, grad_out, plan.q_block, tiles.other)
    programs = batch * key_heads * rows.number * options["PARTS"]
    shared = {
        "Q_BLOCK": plan.q_block, "K_BLOCK": rows.size, "TILE_Q": tiles.other, "TILE_K": tiles.own, "CHUNK": chunk,
        "BIAS_GRADIENT": grad_bias is not None, "POOL": means.block if means else 1,
        "LEVELS": means.levels if means else 0,
    }  # fmt: skip
    of_means = (means.key, means.value) if means else (query, query)
    results = (grad_key, grad_value, query if grad_bias is None else grad_bias, *partials, *of_means)
    result_strides = (*grad_key.stride(), *grad_value.stride(), *of_means[0].stride())
    _key_gradient_kernel[(programs, chunks)](
        query, key, value, q_desc, g_desc, grad_out, *results, lse_log2, delta,
        rows.offsets, rows.blocks, rows.offsets if rows.order is None else rows.order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(), *result_strides,
        *rows.strides, *extra_strides, key_heads, heads // key_heads, rows.number,
        num_queries, plan.num_keys, scale * LOG2_E, scale,
        RAGGED=num_queries % plan.q_block != 0, COPY_ENGINE=copy_engine, HAS_ORDER=rows.order is not None,
        HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None, **shared, **options,
    )  # fmt: skip
    if chunk:
        _join_chunks_kernel[(programs,)](
            *results, rows.offsets, *result_strides, *rows.strides[:2],
            key_heads, rows.number, plan.num_keys, chunks, scale, **shared, num_warps=4,
            **{name: options[name] for name in ("DIM", "PAD", "PARTS", "PACK")},
        )  # fmt: skip
    return grad_key, grad_value, grad_bias


def _chunks(query: Tensor, key: Tensor, transposed: Plan, tiles: Tiles) -> tuple[int, int]:
    """After how many steps another program goes on with a row (0: none does), and how many programs a row gets."""
    longest = ceil_div(query.shape[2], tiles.other)
    if query.shape[1] != key.shape[1]:  # a key head then walks several lists
        return 0, 1
    chunk = tiles.chunk
    if chunk is None:
        chunk = chunk_of(query.shape[0] * query.shape[1], transposed, tiles)
    return (chunk, ceil_div(longest, chunk)) if 0 < chunk < longest else (0, 1)
