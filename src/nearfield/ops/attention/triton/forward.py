"""The forward kernel in plain Triton: one program per query block, an online softmax over its list."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield._types import Attended
from nearfield.ops._triton.launch import (
    LOG2_E,
    Tiles,
    forward_tiles,
    nonnegative,
    optional_inputs,
    options_for,
    tile_sources,
)
from nearfield.ops._triton.walk import (
    INF,
    LN_2,
    LOG2E,
    copy_rows,
    dot,
    list_of_row,
    load_rows,
    masked_logits,
    pairs_read,
    row_of_program,
    store_rows,
    tile_counts,
    tile_tokens,
)
from nearfield.ops.attention.parts import KeyValuePart
from nearfield.ops.lists.triton.pack import rows_of


@triton.jit
def _read_tile(
    tile, entries, count, query, accumulator, running_max, running_sum, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale,
    num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    Q_BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax."""
    first, token, exists, entry = tile_tokens(entries, count, tile, num_keys, K_BLOCK, TILE_K, MASKED, PACK)
    if COPY_ENGINE:
        keys = copy_rows(k_desc, batch, key_head, first, TILE_K, PAD)
    else:
        keys = load_rows(key, first, token, exists, stride_kn, stride_kd, DIM, PAD, MASKED)
    logits = dot(query, tl.trans(keys), None, PRECISION)
    if MASKED or HAS_BIAS or HAS_POSITIONS or PACK > 1:
        bias = query_position
        key_position = query_position
        if HAS_BIAS:
            bias = tl.load(key_bias + (first + token) * stride_bias, mask=exists, other=0.0)[None, :] * LOG2E
        if HAS_POSITIONS:
            key_position = tl.load(key_positions + first + token, mask=exists, other=0)[None, :]
        is_read = pairs_read(entry, exists, lane, Q_BLOCK, MASKED, PACK)
        logits = masked_logits(
            logits,
            scale,
            bias,
            is_read,
            query_position,
            key_position,
            MASKED or PACK > 1,
            HAS_BIAS,
            HAS_POSITIONS,
        )
        new_max = tl.maximum(running_max, tl.max(logits, 1))
        # A row that has seen nothing yet has maximum -inf; subtracting it would give NaN.
        anchor = tl.where(new_max == -INF, 0.0, new_max)
        weights = tl.math.exp2(logits - anchor[:, None])
    else:
        new_max = tl.maximum(running_max, tl.max(logits, 1) * scale)
        anchor = new_max
        weights = tl.math.exp2(logits * scale - anchor[:, None])
    shrink = tl.math.exp2(running_max - anchor)
    running_sum = running_sum * shrink + tl.sum(weights, 1)
    accumulator = accumulator * shrink[:, None]
    if COPY_ENGINE:
        values = copy_rows(v_desc, batch, key_head, first, TILE_K, PAD)
    else:
        values = load_rows(value, first, token, exists, stride_vn, stride_vd, DIM, PAD, MASKED)
    accumulator = dot(weights.to(values.dtype), values, accumulator, PRECISION)
    return accumulator, new_max, running_sum


@triton.jit
def walk_list(
    row, offsets, blocks, query, accumulator, running_max, running_sum, key, value, k_desc, v_desc, batch, key_head,
    key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale,
    num_keys,
    K_BLOCK: tl.constexpr, TILE_K: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, RAGGED: tl.constexpr,
    COPY_ENGINE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
    Q_BLOCK: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Read all that a row lists: tiles that are surely whole, then the others, masked."""
    start, count = list_of_row(offsets, row, PACK)
    entries = blocks + start
    whole, total = tile_counts(entries, count, num_keys, K_BLOCK, TILE_K, RAGGED, PACK)
    for tile in tl.range(0, whole):
        accumulator, running_max, running_sum = _read_tile(
            tile, entries, count, query, accumulator, running_max, running_sum, key, value, k_desc, v_desc, batch,
            key_head, key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn, stride_vd,
            stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, False, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS,
            PRECISION, Q_BLOCK, PACK,
        )  # fmt: skip
    if RAGGED or (K_BLOCK < TILE_K and PACK == 1):
        for tile in tl.range(whole, total, num_stages=1):
            accumulator, running_max, running_sum = _read_tile(
                tile, entries, count, query, accumulator, running_max, running_sum, key, value, k_desc, v_desc,
                batch, key_head, key_bias, key_positions, query_position, lane, stride_kn, stride_kd, stride_vn,
                stride_vd, stride_bias, scale, num_keys, K_BLOCK, TILE_K, DIM, PAD, True, COPY_ENGINE, HAS_BIAS,
                HAS_POSITIONS, PRECISION, Q_BLOCK, PACK,
            )  # fmt: skip
    return accumulator, running_max, running_sum


@triton.jit
def store_result(
    out, lse, token, exists, stride_on, stride_od, accumulator, running_max, running_sum,
    DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    # A sum of exactly zero means nothing was read; a NaN sum must stay NaN.
    read_nothing = running_sum == 0.0
    accumulator = accumulator / tl.where(read_nothing, 1.0, running_sum)[:, None]
    log_sum = tl.where(
        read_nothing, -INF, (running_max + tl.math.log2(tl.where(read_nothing, 1.0, running_sum))) * LN_2
    )
    store_rows(out, token, exists, stride_on, stride_od, accumulator, DIM, PAD)
    tl.store(lse + token, log_sum, mask=exists)


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
    HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr, CONTINUES: tl.constexpr,
    PRECISION: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One block of queries, or a part of it; with PACK, several blocks.

    CONTINUES: `out` and `lse` hold what these queries read elsewhere, and get what they read in all.
    """
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
    origin = tl.full([], 0, tl.int64)
    queries = load_rows(
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

    out += batch * stride_ob + head * stride_oh
    lse += batch_head.to(tl.int64) * num_queries
    running_max = tl.full([TILE_Q], -float("inf"), tl.float32)
    running_sum = tl.zeros([TILE_Q], tl.float32)
    accumulator = tl.zeros([TILE_Q, PAD], tl.float32)
    if CONTINUES:
        # A row that has been read is a sum of one weight, 2 ** lse; one that read nothing holds zeros and -inf.
        running_max = tl.load(lse + token, mask=exists, other=-float("inf")) * LOG2E
        running_sum = tl.where(running_max == -INF, 0.0, 1.0)
        before = load_rows(out, origin, token.to(tl.int64), exists, stride_on, stride_od, DIM, PAD, True)
        accumulator = before.to(tl.float32)
    accumulator, running_max, running_sum = walk_list(
        row, offsets + batch * stride_offsets_b + head * stride_offsets_h,
        blocks + batch * stride_blocks_b + head * stride_blocks_h, queries, accumulator, running_max, running_sum,
        key, value, k_desc, v_desc, batch, key_head, key_bias, key_positions, query_position, lane,
        stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
        K_BLOCK, TILE_K, DIM, PAD, RAGGED, COPY_ENGINE, HAS_BIAS, HAS_POSITIONS, PRECISION, Q_BLOCK, PACK,
    )  # fmt: skip
    store_result(
        out, lse, token, exists, stride_on, stride_od, accumulator, running_max, running_sum, DIM, PAD
    )


def attend_forward(
    query: Tensor,
    part: KeyValuePart,
    scale: float,
    tiles: Tiles | None = None,
    before: Attended | None = None,
) -> Attended:
    """See `nearfield.ops.attention.reference`.

    Args:
        before: what the queries read among other keys: continued, in place, to what they read in all.
    """
    key, value, plan, key_bias, positions = part
    batch, heads, num_queries, _ = query.shape
    if before is None:
        out = torch.empty_like(query)
        lse = torch.empty(batch, heads, num_queries, device=query.device, dtype=torch.float32)
    else:
        out, lse = before
    query, scale = nonnegative(query, scale)
    tiles = tiles or forward_tiles(query, key, plan.q_block, plan.k_block)
    rows = rows_of(plan, tiles, batch, heads)
    extras, extra_strides = optional_inputs(query, key_bias, positions)
    options = options_for(query, tiles, plan.q_block)
    copy_engine, k_desc, v_desc = tile_sources(key, value, plan.k_block, tiles.other)
    grid = (batch * heads * rows.number * options["PARTS"],)
    _forward_kernel[grid](
        query, key, value, k_desc, v_desc, out, lse,
        rows.offsets, rows.blocks, rows.offsets if rows.order is None else rows.order, *extras,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(), *rows.strides, *extra_strides,
        heads, heads // key.shape[1], rows.number, num_queries, plan.num_keys, scale * LOG2_E,
        Q_BLOCK=rows.size, K_BLOCK=plan.k_block, TILE_Q=tiles.own, TILE_K=tiles.other,
        RAGGED=plan.num_keys % plan.k_block != 0, COPY_ENGINE=copy_engine,
        HAS_ORDER=rows.order is not None, HAS_BIAS=key_bias is not None, HAS_POSITIONS=positions is not None,
        CONTINUES=before is not None, **options,
    )  # fmt: skip
    return Attended(out, lse)
