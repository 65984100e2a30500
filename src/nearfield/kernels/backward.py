"""The backward kernels in plain Triton: the query gradient over the plan, the key gradients over its transpose.

Every gradient is summed by one program, in the order of its list. There are no atomics, so equal inputs give equal
bits. The price is that weights are computed in both passes.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield._types import Gradients, Positions
from nearfield.kernels import is_interpreted
from nearfield.kernels.launch import (
    LOG2_E,
    Tiles,
    key_gradient_tiles,
    list_strides,
    optional_inputs,
    options_for,
    padded,
    query_gradient_tiles,
    tile_sources,
)
from nearfield.kernels.walk import (
    INF,
    LOG2E,
    copy_rows,
    dot,
    load_rows,
    masked_logits,
    row_of_program,
    store_rows,
    tile_counts,
    tile_tokens,
)
from nearfield.plan import Plan


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
    products = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    grad_lse += batch * stride_lb + head * stride_lh
    products -= tl.load(grad_lse + long_token * stride_ln, mask=exists, other=0.0)
    log_sum = tl.load(lse + batch_head * num_queries + token, mask=exists, other=0.0)
    read_nothing = log_sum == -INF
    # The log of nothing has no gradient; merging two of them by lse gives NaN, which must not spread.
    tl.store(delta + batch_head * num_queries + token, tl.where(read_nothing, 0.0, products), mask=exists)
    log_sum = tl.where(read_nothing, INF, log_sum * LOG2E)
    tl.store(lse_log2 + batch_head * num_queries + token, log_sum, mask=exists)


@triton.jit
def _query_gradient_tile(
    tile, entries, count, query, grad_out, accumulator, lse_log2, delta, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, token, exists = tile_tokens(entries, count, tile, num_keys, K_BLOCK, TILE_K, MASKED)
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
    logits = masked_logits(
        dot(query, tl.trans(keys), None, PRECISION), scale, bias, exists[None, :], query_position, key_position,
        MASKED, HAS_BIAS, HAS_POSITIONS,
    )  # fmt: skip
    weights = tl.math.exp2(logits - lse_log2[:, None])
    grad_weights = dot(grad_out, tl.trans(values), None, PRECISION)
    grad_logits = weights * (grad_weights - delta[:, None])
    return dot(grad_logits.to(keys.dtype), keys, accumulator, PRECISION)


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
    batch_head, row, part = row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
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
    whole, total = tile_counts(entries, count, num_keys, K_BLOCK, TILE_K, RAGGED)
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
    store_rows(
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
    first, token, exists = tile_tokens(entries, count, tile, num_queries, Q_BLOCK, TILE_Q, MASKED)
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
    logits = masked_logits(
        dot(keys, tl.trans(queries), None, PRECISION), scale, bias, True, query_position, key_position,
        False, HAS_BIAS, HAS_POSITIONS,
    )  # fmt: skip
    weights = tl.math.exp2(logits - lse_rows[None, :])
    grad_value = dot(weights.to(grads.dtype), grads, grad_value, PRECISION)
    grad_weights = dot(values, tl.trans(grads), None, PRECISION)
    grad_logits = weights * (grad_weights - delta_rows[None, :])
    grad_key = dot(grad_logits.to(queries.dtype), queries, grad_key, PRECISION)
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
    batch_head, row, part = row_of_program(tl.program_id(0), order, num_rows, HAS_ORDER, PARTS)
    batch = (batch_head // num_key_heads).to(tl.int64)
    key_head = (batch_head % num_key_heads).to(tl.int64)
    num_heads = num_key_heads * heads_per_key

    lane = part * TILE_K + tl.arange(0, TILE_K)
    token = row * K_BLOCK + lane
    # Keys that do not exist get gradients too, from zero rows; they are not stored.
    exists = (lane < K_BLOCK) & (token < num_keys)
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
            bias = tl.load(bias_pointer, mask=exists, other=0.0)[:, None] * LOG2E
        bias_accumulator = tl.zeros([TILE_K], tl.float32)
        whole, total = tile_counts(entries, count, num_queries, Q_BLOCK, TILE_Q, RAGGED)
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

    store_rows(
        grad_key + batch * stride_dkb + key_head * stride_dkh, token, exists, stride_dkn, stride_dkd,
        key_accumulator * logit_scale, DIM, PAD,
    )  # fmt: skip
    store_rows(
        grad_value + batch * stride_dvb + key_head * stride_dvh, token, exists, stride_dvn, stride_dvd,
        value_accumulator, DIM, PAD,
    )  # fmt: skip


def _row_statistics(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, num_queries, dim = out.shape
    delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    tile = 128 if not is_interpreted() else 64
    _delta_kernel[(batch * heads, triton.cdiv(num_queries, tile))](
        grad_out, out, lse, grad_lse, delta, lse_log2, *grad_out.stride(), *out.stride(), *grad_lse.stride(),
        heads, num_queries, DIM=dim, PAD=padded(dim), TILE=tile,
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


def attend_together_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    parts: Sequence[tuple[Tensor, Tensor, Plan, Tensor | None]],
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor | None]]]:
    """The gradients of a softmax over several parts, whose `out` and `lse` these are: each part's by itself."""
    delta, lse_log2 = _row_statistics(grad_out, grad_lse, out, lse.contiguous())
    grad_query: Tensor | None = None
    others = []
    for key, value, plan, key_bias in parts:
        inputs = (grad_out, delta, lse_log2, query, key, value, plan, key_bias, None, scale)
        gradient = query_gradient(*inputs)
        grad_query = gradient if grad_query is None else grad_query.add_(gradient)
        others.append(key_gradient(*inputs))
    assert grad_query is not None
    return grad_query, others


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
    extras, extra_strides = optional_inputs(query, key_bias, positions)
    options = options_for(query, tiles, plan.q_block)
    copy_engine, k_desc, v_desc = tile_sources(key, value, plan.k_block, tiles.other)
    grid = (batch * heads * plan.num_rows * options["PARTS"],)
    _query_gradient_kernel[grid](
        query, key, value, k_desc, v_desc, grad_out, grad_query, lse_log2, delta,
        plan.offsets, plan.blocks, plan.offsets if order is None else order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(), *grad_query.stride(),
        *list_strides(plan), *extra_strides,
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
    extras, extra_strides = optional_inputs(query, key_bias, positions)
    options = options_for(query, tiles, plan.k_block)
    copy_engine, q_desc, g_desc = tile_sources(query, grad_out, plan.q_block, tiles.other)
    grid = (batch * key_heads * transposed.num_rows * options["PARTS"],)
    _key_gradient_kernel[grid](
        query, key, value, q_desc, g_desc, grad_out, grad_key, grad_value, query if grad_bias is None else grad_bias,
        lse_log2, delta,
        transposed.offsets, transposed.blocks, transposed.offsets if order is None else order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *grad_out.stride(), *grad_key.stride(), *grad_value.stride(),
        *list_strides(transposed), *extra_strides, key_heads, heads // key_heads, transposed.num_rows,
        num_queries, plan.num_keys, scale * LOG2_E, scale,
        Q_BLOCK=plan.q_block, K_BLOCK=plan.k_block, TILE_Q=tiles.other, TILE_K=tiles.own,
        RAGGED=num_queries % plan.q_block != 0, COPY_ENGINE=copy_engine,
        HAS_ORDER=order is not None, HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None, **options,
    )  # fmt: skip
    return grad_key, grad_value, grad_bias
