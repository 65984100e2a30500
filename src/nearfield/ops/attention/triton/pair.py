"""Several parts in one softmax, and how one kernel reads two: chosen blocks by packed rows, and what wider rows share.

Apart, the second part's kernel reads queries, results and sums again, and writes results again: for lists of a few
tiles that is as much as the lists themselves.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield._types import Attended
from nearfield.ops._triton.launch import (
    LOG2_E,
    Tiles,
    list_strides,
    nonnegative,
    optional_inputs,
    options_for,
    pair_gradient_tiles,
    pair_tiles,
)
from nearfield.ops._triton.walk import load_rows, store_rows
from nearfield.ops.attention.parts import KeyValuePart, PartGradients
from nearfield.ops.attention.triton.backward import (
    KeyRows,
    Means,
    RowGradients,
    key_gradient,
    query_gradient,
    row_gradients,
    statistics_of,
    walk_for_queries,
)
from nearfield.ops.attention.triton.forward import store_result, walk_list
from nearfield.ops.attention.triton.side_stream import SideStream
from nearfield.ops.lists.triton.pack import rows_of
from nearfield.ops.lists.triton.transpose import room_for_transpose, transpose_into


@triton.jit
def _pair_kernel(
    query, out, lse, key, value, offsets, blocks, key_bias, far_key, far_value, far_offsets, far_blocks, far_bias,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_ob, stride_oh, stride_on, stride_od,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h, stride_bias_b, stride_bias_h, stride_bias,
    stride_fkb, stride_fkh, stride_fkn, stride_fkd, stride_fvb, stride_fvh, stride_fvn, stride_fvd,
    stride_far_offsets_b, stride_far_offsets_h, stride_far_blocks_b, stride_far_blocks_h,
    stride_far_bias_b, stride_far_bias_h, stride_far_bias,
    num_heads, heads_per_key, num_rows, num_queries, num_keys, num_far_keys, scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    FAR_Q_BLOCK: tl.constexpr, FAR_K_BLOCK: tl.constexpr, TILE_K: tl.constexpr,
    RAGGED: tl.constexpr, FAR_RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FAR_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    batch_head = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    key_head = head // heads_per_key
    lane = tl.arange(0, Q_BLOCK)
    token = row * Q_BLOCK + lane
    exists = token < num_queries
    origin = tl.full([], 0, tl.int64)
    queries = load_rows(
        query + batch * stride_qb + head * stride_qh, origin, token.to(tl.int64), exists, stride_qn, stride_qd,
        DIM, PAD, True,
    )  # fmt: skip
    nowhere = tl.zeros([Q_BLOCK, 1], tl.int32)
    key += batch * stride_kb + key_head * stride_kh
    value += batch * stride_vb + key_head * stride_vh
    far_key += batch * stride_fkb + key_head * stride_fkh
    far_value += batch * stride_fvb + key_head * stride_fvh
    running_max = tl.full([Q_BLOCK], -float("inf"), tl.float32)
    running_sum = tl.zeros([Q_BLOCK], tl.float32)
    accumulator = tl.zeros([Q_BLOCK, PAD], tl.float32)
    accumulator, running_max, running_sum = walk_list(
        row * Q_BLOCK // FAR_Q_BLOCK, far_offsets + batch * stride_far_offsets_b + head * stride_far_offsets_h,
        far_blocks + batch * stride_far_blocks_b + head * stride_far_blocks_h,
        queries, accumulator, running_max, running_sum, far_key, far_value, far_key, far_value, batch, key_head,
        far_bias + batch * stride_far_bias_b + head * stride_far_bias_h, far_offsets, nowhere, lane,
        stride_fkn, stride_fkd, stride_fvn, stride_fvd, stride_far_bias, scale, num_far_keys,
        FAR_K_BLOCK, TILE_K, DIM, PAD, FAR_RAGGED, False, HAS_FAR_BIAS, False, PRECISION, FAR_Q_BLOCK, 1,
    )  # fmt: skip
    accumulator, running_max, running_sum = walk_list(
        row, offsets + batch * stride_offsets_b + head * stride_offsets_h,
        blocks + batch * stride_blocks_b + head * stride_blocks_h,
        queries, accumulator, running_max, running_sum, key, value, key, value, batch, key_head,
        key_bias + batch * stride_bias_b + head * stride_bias_h, offsets, nowhere, lane,
        stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
        K_BLOCK, TILE_K, DIM, PAD, RAGGED, False, HAS_BIAS, False, PRECISION, Q_BLOCK, PACK,
    )  # fmt: skip
    store_result(
        out + batch * stride_ob + head * stride_oh, lse + batch_head.to(tl.int64) * num_queries, token, exists,
        stride_on, stride_od, accumulator, running_max, running_sum, DIM, PAD,
    )  # fmt: skip


@triton.jit
def _pair_query_gradient_kernel(
    query, grad_out, out, lse, grad_lse, grad_query, delta, lse_log2, key, value, offsets, blocks, key_bias,
    far_key, far_value, far_offsets, far_blocks, far_bias,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_gb, stride_gh, stride_gn, stride_gd,
    stride_ob, stride_oh, stride_on, stride_od, stride_lb, stride_lh, stride_ln,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    stride_kb, stride_kh, stride_kn, stride_kd, stride_vb, stride_vh, stride_vn, stride_vd,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h, stride_bias_b, stride_bias_h, stride_bias,
    stride_fkb, stride_fkh, stride_fkn, stride_fkd, stride_fvb, stride_fvh, stride_fvn, stride_fvd,
    stride_far_offsets_b, stride_far_offsets_h, stride_far_blocks_b, stride_far_blocks_h,
    stride_far_bias_b, stride_far_bias_h, stride_far_bias,
    num_heads, heads_per_key, num_rows, num_queries, num_keys, num_far_keys, scale, logit_scale,
    DIM: tl.constexpr, PAD: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    FAR_Q_BLOCK: tl.constexpr, FAR_K_BLOCK: tl.constexpr, TILE_K: tl.constexpr,
    RAGGED: tl.constexpr, FAR_RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FAR_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """And the statistics of rows that the gradients of keys need: here `grad_out` is at hand."""
    batch_head = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    batch = (batch_head // num_heads).to(tl.int64)
    head = (batch_head % num_heads).to(tl.int64)
    key_head = head // heads_per_key
    lane = tl.arange(0, Q_BLOCK)
    token = row * Q_BLOCK + lane
    exists = token < num_queries
    long_token = token.to(tl.int64)
    origin = tl.full([], 0, tl.int64)
    query += batch * stride_qb + head * stride_qh
    grad_out += batch * stride_gb + head * stride_gh
    queries = load_rows(query, origin, long_token, exists, stride_qn, stride_qd, DIM, PAD, True)
    grads = load_rows(grad_out, origin, long_token, exists, stride_gn, stride_gd, DIM, PAD, True)
    outs = load_rows(
        out + batch * stride_ob + head * stride_oh, origin, long_token, exists, stride_on, stride_od, DIM, PAD, True
    )  # fmt: skip
    grad_lse += batch * stride_lb + head * stride_lh
    of_lse = tl.load(grad_lse + long_token * stride_ln, mask=exists, other=0.0)
    place = batch_head.to(tl.int64) * num_queries + token
    # Queries that do not exist read nothing.
    log_sum = tl.load(lse + place, mask=exists, other=-float("inf"))
    delta_rows, lse_rows = statistics_of(grads, outs, log_sum, of_lse)
    tl.store(delta + place, delta_rows, mask=exists)
    tl.store(lse_log2 + place, lse_rows, mask=exists)
    nowhere = tl.zeros([Q_BLOCK, 1], tl.int32)
    key += batch * stride_kb + key_head * stride_kh
    value += batch * stride_vb + key_head * stride_vh
    far_key += batch * stride_fkb + key_head * stride_fkh
    far_value += batch * stride_fvb + key_head * stride_fvh
    accumulator = tl.zeros([Q_BLOCK, PAD], tl.float32)
    accumulator = walk_for_queries(
        row * Q_BLOCK // FAR_Q_BLOCK, far_offsets + batch * stride_far_offsets_b + head * stride_far_offsets_h,
        far_blocks + batch * stride_far_blocks_b + head * stride_far_blocks_h,
        queries, grads, accumulator, lse_rows, delta_rows, far_key, far_value, far_key, far_value, batch, key_head,
        far_bias + batch * stride_far_bias_b + head * stride_far_bias_h, far_offsets, nowhere, lane,
        stride_fkn, stride_fkd, stride_fvn, stride_fvd, stride_far_bias, scale, num_far_keys,
        FAR_K_BLOCK, TILE_K, DIM, PAD, FAR_RAGGED, False, HAS_FAR_BIAS, False, PRECISION, FAR_Q_BLOCK, 1,
    )  # fmt: skip
    accumulator = walk_for_queries(
        row, offsets + batch * stride_offsets_b + head * stride_offsets_h,
        blocks + batch * stride_blocks_b + head * stride_blocks_h,
        queries, grads, accumulator, lse_rows, delta_rows, key, value, key, value, batch, key_head,
        key_bias + batch * stride_bias_b + head * stride_bias_h, offsets, nowhere, lane,
        stride_kn, stride_kd, stride_vn, stride_vd, stride_bias, scale, num_keys,
        K_BLOCK, TILE_K, DIM, PAD, RAGGED, False, HAS_BIAS, False, PRECISION, Q_BLOCK, PACK,
    )  # fmt: skip
    grad_query += batch * stride_dqb + head * stride_dqh
    store_rows(grad_query, token, exists, stride_dqn, stride_dqd, accumulator * logit_scale, DIM, PAD)


class _Pair(NamedTuple):
    """What both kernels are launched with."""

    programs: int
    tensors: tuple[Tensor, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, query: Tensor, near: KeyValuePart, far: KeyValuePart, tiles: Tiles) -> "_Pair":
        (key, value, plan, bias, _), (far_key, far_value, far_plan, far_bias, _) = near, far
        batch, heads, num_queries, _ = query.shape
        rows = rows_of(plan, tiles, batch, heads)
        (bias_given, *_), bias_strides = optional_inputs(query, bias, None)
        (far_bias_given, *_), far_bias_strides = optional_inputs(query, far_bias, None)
        options = options_for(query, tiles, plan.q_block)
        del options["PARTS"]  # a program owns a whole row
        options |= {
            "Q_BLOCK": rows.size, "K_BLOCK": plan.k_block, "FAR_Q_BLOCK": far_plan.q_block,
            "FAR_K_BLOCK": far_plan.k_block, "TILE_K": tiles.other, "RAGGED": plan.num_keys % plan.k_block != 0,
            "FAR_RAGGED": far_plan.num_keys % far_plan.k_block != 0,
            "HAS_BIAS": bias is not None, "HAS_FAR_BIAS": far_bias is not None,
        }  # fmt: skip
        return cls(
            batch * heads * rows.number,
            (
                key, value, rows.offsets, rows.blocks, bias_given,
                far_key, far_value, far_plan.offsets, far_plan.blocks, far_bias_given,
            ),
            (
                *key.stride(), *value.stride(), *rows.strides, *bias_strides[:3], *far_key.stride(),
                *far_value.stride(), *list_strides(far_plan.offsets, far_plan.blocks), *far_bias_strides[:3],
            ),
            (heads, heads // key.shape[1], rows.number, num_queries, plan.num_keys, far_plan.num_keys),
            options,
        )  # fmt: skip


def attend_pair(query: Tensor, near: KeyValuePart, far: KeyValuePart, scale: float, tiles: Tiles) -> Attended:
    """
    Args:
        near: its rows, as many as are packed, are what a program owns.
        far: its rows hold as many queries as a program owns, or a multiple.
    """
    out = torch.empty_like(query)
    lse = torch.empty(query.shape[:3], device=query.device, dtype=torch.float32)
    query, scale = nonnegative(query, scale)
    pair = _Pair.of(query, near, far, tiles)
    _pair_kernel[(pair.programs,)](
        query, out, lse, *pair.tensors, *query.stride(), *out.stride(), *pair.strides, *pair.sizes,
        scale * LOG2_E, **pair.options,
    )  # fmt: skip
    return Attended(out, lse)


def query_gradient_of_pair(
    grads: Attended,
    query: Tensor,
    near: KeyValuePart,
    far: KeyValuePart,
    attended: Attended,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, RowGradients]:
    """The gradient of the queries, and what those of the keys need. See `attend_pair`."""
    (grad_out, grad_lse), (out, lse) = grads, attended
    grad_query, delta, lse_log2 = torch.empty_like(query), torch.empty_like(lse), torch.empty_like(lse)
    pair = _Pair.of(query, near, far, tiles)
    _pair_query_gradient_kernel[(pair.programs,)](
        query, grad_out, out, lse, grad_lse, grad_query, delta, lse_log2, *pair.tensors, *query.stride(),
        *grad_out.stride(), *out.stride(), *grad_lse.stride(), *grad_query.stride(), *pair.strides, *pair.sizes,
        scale * LOG2_E, scale, **pair.options,
    )  # fmt: skip
    return grad_query, RowGradients(grad_out, delta, lse_log2)


def _near_and_far(parts: Sequence[KeyValuePart]) -> tuple[KeyValuePart, KeyValuePart] | None:
    """Two parts that one kernel may read: the rows of the first are packed, so they must be similar."""
    if len(parts) != 2 or any(part.positions is not None for part in parts):
        return None
    near, far = sorted(parts, key=lambda part: part.plan.q_block)
    return (near, far) if near.plan.similar_rows else None


def attend_parts_forward(query: Tensor, parts: Sequence[KeyValuePart], scale: float) -> Attended | None:
    """What the queries read in all parts, if one kernel reads them; None where each part is to have its own."""
    pair = _near_and_far(parts)
    tiles = pair and pair_tiles(query, pair[0].plan, pair[1].plan)
    return attend_pair(query, *pair, scale, tiles) if pair and tiles else None


def attend_backward(
    grads: Attended,
    query: Tensor,
    parts: Sequence[KeyValuePart],
    attended: Attended,
    scale: float,
    learned: Sequence[bool],
    pooling: tuple[int, int] | None = None,
) -> PartGradients:
    """The gradients of one softmax over all parts: with its `lse`, the gradients of one part do not depend on the
    others."""
    walked, new = _rows_of_keys(query, parts)
    # Lists are transposed while the gradients of queries, which need none, are computed.
    with SideStream(query, wanted=bool(new)) as beside:
        grad_query, of_rows = _query_gradient(grads, query, parts, attended, scale)
        with beside.branch():
            _transpose(query, parts, walked, new)

    def of_keys(number: int, **wanted: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        known = of_rows, query, parts[number], scale
        return key_gradient(*known, walked=walked[number], wants_bias=learned[number], **wanted)

    if pooling is None:
        return PartGradients(grad_query, [of_keys(number) for number in range(len(parts))])
    far_key, far_value, far_bias = of_keys(1, dtype=torch.float32)
    near = of_keys(0, means=Means(far_key, far_value, *pooling))
    return PartGradients(grad_query, [near, (None, None, far_bias)])


def _rows_of_keys(query: Tensor, parts: Sequence[KeyValuePart]) -> tuple[list[KeyRows], list[int]]:
    """What the key gradients of each part walk; and the numbers of parts that were not transposed before, for which
    there is only room yet: `_transpose` fills it."""
    walked, new = [], []
    for number, (key, _, plan, *_) in enumerate(parts):
        if plan.prepared.transpose is not None:
            walked.append(KeyRows.of(query, key, plan.prepared.transpose))
        else:
            walked.append(KeyRows.room(query, key, room_for_transpose(plan)))
            new.append(number)
    return walked, new


def _transpose(
    query: Tensor, parts: Sequence[KeyValuePart], walked: Sequence[KeyRows], new: Sequence[int]
) -> None:
    if not new:
        return
    transpose_into([walked[number].transposed for number in new], [parts[number].plan for number in new])
    for number in new:
        walked[number].fill(query, parts[number].key)


def _query_gradient(
    grads: Attended, query: Tensor, parts: Sequence[KeyValuePart], attended: Attended, scale: float
) -> tuple[Tensor, RowGradients]:
    attended = Attended(attended.out, attended.lse.contiguous())
    pair = _near_and_far(parts)
    tiles = pair and pair_gradient_tiles(query, pair[0].plan, pair[1].plan)
    if pair and tiles:
        return query_gradient_of_pair(grads, query, *pair, attended, scale, tiles)
    of_rows = row_gradients(grads, attended)
    grad_query: Tensor | None = None
    for part in parts:
        grad_query = query_gradient(of_rows, query, part, scale, before=grad_query)
    assert grad_query is not None
    return grad_query, of_rows
