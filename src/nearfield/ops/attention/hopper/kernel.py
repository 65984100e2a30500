"""The list kernels in Gluon for Hopper: the same sum with the work split among specialised warps.

A program stays on its multiprocessor and takes one row of the plan after another. One group of warps, the producer,
walks the row's list and copies keys and values into a ring of shared-memory stages; one to three warpgroups, the
consumers, own 64 queries each and do the matrix products and the softmax. They meet at memory barriers only:

    items         which row comes next, and where its list is
    queries       two buffers per consumer: the next row's queries arrive while this row is read; a row's
                  result leaves through the buffer its queries came in
    keys, values  stages of the ring, filled and freed one tile at a time

A consumer issues the products of the next tile before the softmax of this one, across the end of a row too, so the
tensor cores do not wait. Blocks of 8 keys and more travel by the copy engine (TMA), smaller ones are gathered row
by row with cp.async. The last keys may be in tensors of their own (`first_more`): a copy is issued from both, and one
of them is not carried out. A row that reads nothing is given one tile whose keys are all masked.

After its list a row may read keys of a second set, each with a bias: summaries of what lies further away. They come in
boxes of up to 64 consecutive ones, which the copy engine loads from wherever they begin.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nearfield.ops.attention.hopper.names import gather_load, tma_load, tma_store
from nearfield.ops.attention.hopper.pipe import (
    FAR_BOX,
    GROUP,
    Far,
    Lists,
    Shape,
    boxes_of,
    far_bias_of,
    first_of_box,
    list_of,
    make_pipe,
    num_far_tiles,
    num_tiles,
    num_whole,
    row_of,
    tokens_of,
)

INF = gl.constexpr(float("inf"))
LN_2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


# -- producers ---------------------------------------------------------------------------------------------------


@gluon.jit
def _post(item, turn, lists, pipe, shape, WARPS: gl.constexpr):
    """Tell the consumers which row comes next; -1 ends the work."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    is_row = item < lists.num_items
    flat = item
    if shape.HAS_ORDER:
        flat = gl.load(lists.order + item, mask=is_row, other=0)
    batch, head, row = row_of(flat, lists)
    long_batch, long_head = batch.to(gl.int64), head.to(gl.int64)
    offsets = lists.offsets + long_batch * lists.stride_offsets_b + long_head * lists.stride_offsets_h + row
    start = gl.load(offsets, mask=is_row, other=0)
    count = gl.load(offsets + 1, mask=is_row, other=0) - start
    entries = list_of(batch, head, start, lists)
    whole = num_whole(entries, count, lists.num_keys, shape)
    slot = turn % 2
    mbarrier.wait(pipe.item_empty.index(slot), (turn // 2 & 1) ^ 1)
    pipe.items.index(4 * slot).store(gl.full([1], gl.where(is_row, flat, -1), gl.int32, layout))
    pipe.items.index(4 * slot + 1).store(gl.full([1], start, gl.int32, layout))
    pipe.items.index(4 * slot + 2).store(gl.full([1], count, gl.int32, layout))
    pipe.items.index(4 * slot + 3).store(gl.full([1], whole, gl.int32, layout))
    mbarrier.arrive(pipe.item_full.index(slot), count=1)
    return batch, head, row, entries, count


@gluon.jit
def _next_item(item, counter, shape):
    if shape.DYNAMIC:
        following = gl.atomic_add(counter, 1) + gl.num_programs(0)
    else:
        following = item + gl.num_programs(0)
    return following


@gluon.jit
def _load_queries(q_desc, batch, head, first, turn, pipe, shape):
    for member in gl.static_range(shape.CONSUMERS):
        buffer = turn % 2 * shape.CONSUMERS + member
        mbarrier.wait(pipe.q_empty.index(buffer), (turn // 2 & 1) ^ 1)
        mbarrier.expect(pipe.q_full.index(buffer), GROUP * shape.D * 2)
        tma_load(
            q_desc,
            [batch, head, first + member * GROUP, 0],
            pipe.q_full.index(buffer),
            pipe.queries.index(buffer),
        )


@gluon.jit
def _box_tokens(entries, count, tile, num_keys, shape, BOXES: gl.constexpr):
    """The first key of each of a tile's boxes."""
    tokens = ()
    nowhere = 0
    if shape.HAS_FAR:
        # An empty list loads a tile, too, weighed zero. Here its row may have a result, which a NaN in that tile would
        # spoil: past the end there are zeros.
        nowhere = num_keys // shape.K_BLOCK + 1
    for box in gl.static_range(BOXES):
        if BOXES == 1:
            slot = tile // (shape.K_BLOCK // shape.TILE)
            part = tile % (shape.K_BLOCK // shape.TILE) * shape.TILE
        else:
            slot = tile * BOXES + box
            part = 0
        block = gl.load(entries + gl.minimum(slot, count - 1), mask=count > 0, other=nowhere)
        tokens = tokens + (block * shape.K_BLOCK + part,)  # type: ignore[assignment]
    return tokens


@gluon.jit
def _far_tokens(boxes, count, tile, BOXES: gl.constexpr):
    """The first key of each box of a far tile. Past the last box it comes again, and is masked later."""
    tokens = ()
    for box in gl.static_range(BOXES):
        packed = gl.load(boxes + gl.minimum(tile * BOXES + box, count - 1), mask=count > 0, other=0)
        tokens = tokens + (first_of_box(packed),)  # type: ignore[assignment]
    return tokens


@gluon.jit
def _copy_box(desc, more_desc, batch, key_head, token, barrier, smem, lists, shape):
    """One box of consecutive rows, from the tensor that they are in."""
    if shape.HAS_MORE:
        is_first = token < lists.first_more
        tma_load(desc, [batch, key_head, token, 0], barrier, smem, pred=is_first)
        tma_load(more_desc, [batch, key_head, token - lists.first_more, 0], barrier, smem, pred=is_first == 0)
    else:
        tma_load(desc, [batch, key_head, token, 0], barrier, smem)


@gluon.jit
def _copy_tile(
    desc, more_desc, batch, key_head, tokens, barrier, smem, lists, shape, BOXES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """One tile by the copy engine: a box of consecutive rows for each id."""
    if BOXES == 1:
        _copy_box(desc, more_desc, batch, key_head, tokens[0], barrier, smem, lists, shape)
    else:
        for box in gl.static_range(BOXES):
            part = smem.slice(box * BOX, BOX)
            _copy_box(desc, more_desc, batch, key_head, tokens[box], barrier, part, lists, shape)


@gluon.jit
def _fill(
    k_desc, v_desc, more_k_desc, more_v_desc, batch, key_head, tokens, filled, lists, pipe, shape,
    BOXES: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Copy a tile of keys and one of values into the next stage of the ring."""
    BYTES: gl.constexpr = shape.TILE * shape.D * 2
    stage = filled % shape.STAGES
    phase = (filled // shape.STAGES & 1) ^ 1
    mbarrier.wait(pipe.k_empty.index(stage), phase)
    full = pipe.k_full.index(stage)
    mbarrier.expect(full, BYTES)
    _copy_tile(
        k_desc, more_k_desc, batch, key_head, tokens, full, pipe.keys.index(stage), lists, shape, BOXES, BOX
    )  # fmt: skip
    mbarrier.wait(pipe.v_empty.index(stage), phase)
    full = pipe.v_full.index(stage)
    mbarrier.expect(full, BYTES)
    _copy_tile(
        v_desc, more_v_desc, batch, key_head, tokens, full, pipe.values.index(stage), lists, shape, BOXES, BOX
    )  # fmt: skip


@gluon.jit
def _copying_producer(
    q_desc, k_desc, v_desc, more_k_desc, more_v_desc, counter, heads_per_key, lists, far, pipe, shape,
):  # fmt: skip
    BOXES: gl.constexpr = shape.TILE // shape.K_BLOCK if shape.K_BLOCK < shape.TILE else 1
    BOX: gl.constexpr = shape.TILE // BOXES
    FAR_BOXES: gl.constexpr = shape.TILE // FAR_BOX
    item = gl.program_id(0)
    turn = 0
    filled = 0
    while item < lists.num_items:
        batch, head, row, entries, count = _post(item, turn, lists, pipe, shape, 1)
        key_head = head // heads_per_key
        if shape.HAS_FAR:
            boxes, far_count = boxes_of(batch, head, row, far)
        _load_queries(q_desc, batch, head, row * shape.Q_BLOCK, turn, pipe, shape)
        upcoming = _box_tokens(entries, count, 0, lists.num_keys, shape, BOXES)
        if shape.HAS_FAR:
            far_upcoming = _far_tokens(boxes, far_count, 0, FAR_BOXES)
        for tile in range(num_tiles(count, shape)):
            # Ids are read a tile ahead: their latency passes while this warp waits for a free stage.
            tokens = upcoming
            upcoming = _box_tokens(entries, count, tile + 1, lists.num_keys, shape, BOXES)
            _fill(
                k_desc, v_desc, more_k_desc, more_v_desc, batch, key_head, tokens, filled, lists, pipe, shape, BOXES,
                BOX,
            )  # fmt: skip
            filled += 1
        if shape.HAS_FAR:
            for tile in range(num_far_tiles(far_count, shape)):
                far_tokens = far_upcoming
                far_upcoming = _far_tokens(boxes, far_count, tile + 1, FAR_BOXES)
                _fill(
                    more_k_desc, more_v_desc, more_k_desc, more_v_desc, batch, key_head, far_tokens, filled, lists,
                    pipe, shape, FAR_BOXES, FAR_BOX,
                )  # fmt: skip
                filled += 1
        item = _next_item(item, counter, shape)
        turn += 1
    _post(item, turn, lists, pipe, shape, 1)


@gluon.jit
def _gather_rows(base, tokens, stride_n, smem, D: gl.constexpr, LAYOUT: gl.constexpr):
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    gather_load(smem, base + tokens.to(gl.int64)[:, None] * stride_n + column[None, :])


@gluon.jit
def _gathering_producer(
    q_desc, key, value, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, counter, heads_per_key,
    lists, pipe, shape,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // shape.D, shape.D // 8], [shape.GATHER_WARPS, 1], [1, 0]
    )
    lane = gl.arange(0, shape.TILE, gl.SliceLayout(1, LAYOUT))
    item = gl.program_id(0)
    turn = 0
    filled = 0
    while item < lists.num_items:
        batch, head, row, entries, count = _post(item, turn, lists, pipe, shape, shape.GATHER_WARPS)
        key_head = (head // heads_per_key).to(gl.int64)
        head_key = key + batch.to(gl.int64) * stride_kb + key_head * stride_kh
        head_value = value + batch.to(gl.int64) * stride_vb + key_head * stride_vh
        upcoming, _ = tokens_of(entries, count, 0, lane, lists.num_keys, shape)
        _load_queries(q_desc, batch, head, row * shape.Q_BLOCK, turn, pipe, shape)
        for tile in range(num_tiles(count, shape)):
            # A key past the end belongs to this row's ragged block: read its last key instead, masked later.
            tokens = gl.minimum(upcoming, lists.num_keys - 1)
            upcoming, _ = tokens_of(entries, count, tile + 1, lane, lists.num_keys, shape)
            stage = filled % shape.STAGES
            phase = (filled // shape.STAGES & 1) ^ 1
            mbarrier.wait(pipe.k_empty.index(stage), phase)
            _gather_rows(head_key, tokens, stride_kn, pipe.keys.index(stage), shape.D, LAYOUT)
            async_copy.mbarrier_arrive(pipe.k_full.index(stage), increment_count=False)
            mbarrier.wait(pipe.v_empty.index(stage), phase)
            _gather_rows(head_value, tokens, stride_vn, pipe.values.index(stage), shape.D, LAYOUT)
            async_copy.mbarrier_arrive(pipe.v_full.index(stage), increment_count=False)
            filled += 1
        item = _next_item(item, counter, shape)
        turn += 1
    async_copy.wait_group(0)
    _post(item, turn, lists, pipe, shape, shape.GATHER_WARPS)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, more_k_desc, more_v_desc, key, value,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, counter, heads_per_key, lists, far, pipe, shape,
):  # fmt: skip
    if shape.GATHER_WARPS > 0:
        _gathering_producer(
            q_desc, key, value, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
            counter, heads_per_key, lists, pipe, shape,
        )  # fmt: skip
    else:
        _copying_producer(
            q_desc, k_desc, v_desc, more_k_desc, more_v_desc, counter, heads_per_key, lists, far, pipe, shape
        )


# -- consumers ---------------------------------------------------------------------------------------------------


@gluon.jit
def _receive(turn, pipe):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = turn % 2
    mbarrier.wait(pipe.item_full.index(slot), turn // 2 & 1)
    flat = gl.max(pipe.items.index(4 * slot).load(layout), 0)
    start = gl.max(pipe.items.index(4 * slot + 1).load(layout), 0)
    count = gl.max(pipe.items.index(4 * slot + 2).load(layout), 0)
    whole = gl.max(pipe.items.index(4 * slot + 3).load(layout), 0)
    mbarrier.arrive(pipe.item_empty.index(slot), count=1)
    return flat, start, count, whole


@gluon.jit
def _weigh(
    scores, tile, running_max, scale, entries, count, key_bias, stride_bias, num_keys, lane, shape,
    FIRST: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores to weights: the new maximum, the weights, and the factor by which older sums shrink."""
    if shape.HAS_BIAS:
        token, exists = tokens_of(entries, count, tile, lane, num_keys, shape)
        bias = gl.load(key_bias + token.to(gl.int64) * stride_bias, mask=exists, other=-INF)
        scores = scores * scale + (bias * LOG2E)[None, :]
        new_max = gl.maximum(running_max, gl.max(scores, 1))
    elif MASKED:
        token, exists = tokens_of(entries, count, tile, lane, num_keys, shape)
        # Scaled before masked: a scale of zero would turn -inf into NaN.
        scores = gl.where(exists[None, :], scores * scale, -INF)
        new_max = gl.maximum(running_max, gl.max(scores, 1))
    elif FIRST:
        scores = gl.where(count > 0, scores * scale, -INF)
        new_max = gl.maximum(running_max, gl.max(scores, 1))
    else:
        new_max = gl.maximum(running_max, gl.max(scores, 1) * scale)
        scores = scores * scale
    anchor = new_max
    if FIRST or shape.HAS_BIAS:
        # A row that has seen nothing yet has maximum -inf; subtracting it would give NaN.
        anchor = gl.where(new_max == -INF, 0.0, new_max)
    return new_max, gl.exp2(scores - anchor[:, None]), gl.exp2(running_max - anchor)


@gluon.jit
def _weigh_biased(scores, running_max, scale, bias):
    """The same with a bias that is there already; -inf for keys that are not."""
    scores = scores * scale + (bias * LOG2E)[None, :]
    new_max = gl.maximum(running_max, gl.max(scores, 1))
    anchor = gl.where(new_max == -INF, 0.0, new_max)
    return new_max, gl.exp2(scores - anchor[:, None]), gl.exp2(running_max - anchor)


@gluon.jit
def _weigh_first(
    scores, whole, scale, entries, count, key_bias, stride_bias, num_keys, lane, shape,
    TAILS: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The weights of a row's first tile, which needs a mask only if it is not whole."""
    unseen = gl.full([GROUP], -INF, gl.float32, gl.SliceLayout(1, S_LAYOUT))
    if TAILS:
        if whole > 0:
            running_max, weights, _ = _weigh(
                scores, 0, unseen, scale, entries, count, key_bias, stride_bias, num_keys, lane, shape, True, False
            )  # fmt: skip
        else:
            running_max, weights, _ = _weigh(
                scores, 0, unseen, scale, entries, count, key_bias, stride_bias, num_keys, lane, shape, True, True
            )  # fmt: skip
    else:
        running_max, weights, _ = _weigh(
            scores, 0, unseen, scale, entries, count, key_bias, stride_bias, num_keys, lane, shape, True, False
        )  # fmt: skip
    return running_max, weights


@gluon.jit
def _see_gathered(shape):
    """cp.async wrote through the generic proxy, the matrix unit reads through the asynchronous one."""
    if shape.GATHER_WARPS > 0:
        fence_async_shared()


@gluon.jit
def _wait_filled(used, pipe, shape, has_keys=True):
    """The keys of tile `used` and the values of the tile before it are in shared memory."""
    mbarrier.wait(pipe.k_full.index(used % shape.STAGES), used // shape.STAGES & 1, pred=has_keys)
    mbarrier.wait(pipe.v_full.index((used - 1) % shape.STAGES), (used - 1) // shape.STAGES & 1)
    _see_gathered(shape)


@gluon.jit
def _step(
    tile, used, queries, accumulator, packed, running_max, running_sum, zero, scale, entries, count,
    key_bias, stride_bias, num_keys, lane, pipe, shape, MASKED: gl.constexpr, FAR: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue the scores of this tile and the values of the tile before it; the softmax runs under the latter.

    With FAR, `entries` are boxes and `key_bias` is theirs.
    """
    _wait_filled(used, pipe, shape)
    k_stage = used % shape.STAGES
    v_stage = (used - 1) % shape.STAGES
    scores = warpgroup_mma(
        queries, pipe.keys.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    accumulator = warpgroup_mma(packed, pipe.values.index(v_stage), accumulator, is_async=True)
    if FAR:
        # Read while the scores are computed: box and bias are two loads, one after the other.
        bias = far_bias_of(entries, count, tile, lane, key_bias, stride_bias, shape)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(pipe.k_empty.index(k_stage), count=1)
    if FAR:
        running_max, weights, shrink = _weigh_biased(scores, running_max, scale, bias)
    else:
        running_max, weights, shrink = _weigh(
            scores, tile, running_max, scale, entries, count, key_bias, stride_bias, num_keys, lane, shape, False,
            MASKED,
        )  # fmt: skip
    running_sum = running_sum * shrink + gl.sum(weights, 1)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    mbarrier.arrive(pipe.v_empty.index(v_stage), count=1)
    accumulator = accumulator * gl.convert_layout(shrink, gl.SliceLayout(1, P_LAYOUT.parent))[:, None]
    packed = gl.convert_layout(weights.to(queries.dtype), P_LAYOUT)
    return accumulator, packed, running_max, running_sum


@gluon.jit
def _consumer(
    member: gl.constexpr, o_desc, lse, key_bias, stride_bias_b, stride_bias_h, stride_bias, scale, lists, far, pipe,
    shape,
):  # fmt: skip
    DTYPE: gl.constexpr = o_desc.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, k_width=2)
    # Only ragged ends and lists that fill no whole number of tiles need masks; a bias brings its own.
    TAILS: gl.constexpr = (shape.RAGGED or shape.K_BLOCK < shape.TILE) and not shape.HAS_BIAS
    num_keys = lists.num_keys
    lane = gl.arange(0, shape.TILE, gl.SliceLayout(0, S_LAYOUT))
    zero = gl.zeros([GROUP, shape.TILE], gl.float32, S_LAYOUT)
    turn = 0
    used = 0
    flat, start, count, whole = _receive(turn, pipe)
    mbarrier.wait(pipe.q_full.index(member), 0)
    mbarrier.wait(pipe.k_full.index(0), 0)
    _see_gathered(shape)
    scores = warpgroup_mma(
        pipe.queries.index(member), pipe.keys.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(pipe.k_empty.index(0), count=1)
    while flat >= 0:
        # Scores of the row's first tile are there: they were issued with the last values of the row before.
        batch, head, row = row_of(flat, lists)
        entries = list_of(batch, head, start, lists)
        head_bias = key_bias + batch.to(gl.int64) * stride_bias_b + head.to(gl.int64) * stride_bias_h
        if shape.HAS_FAR:
            boxes, far_count = boxes_of(batch, head, row, far)
        buffer = turn % 2 * shape.CONSUMERS + member
        queries = pipe.queries.index(buffer)
        tiles = num_tiles(count, shape)
        accumulator = gl.zeros([GROUP, shape.D], gl.float32, O_LAYOUT)
        running_max, weights = _weigh_first(
            scores, whole, scale, entries, count, head_bias, stride_bias, num_keys, lane, shape, TAILS, S_LAYOUT
        )  # fmt: skip
        running_sum = gl.sum(weights, 1)
        packed = gl.convert_layout(weights.to(DTYPE), P_LAYOUT)
        used += 1
        # By now the row before has left its buffer, which may take the queries of the row after this.
        tma.store_wait(0)
        mbarrier.arrive(pipe.q_empty.index((turn + 1) % 2 * shape.CONSUMERS + member), count=1, pred=turn > 0)
        whole = gl.maximum(whole, 1) if TAILS else tiles
        for tile in range(1, whole):
            accumulator, packed, running_max, running_sum = _step(
                tile, used, queries, accumulator, packed, running_max, running_sum, zero, scale, entries, count,
                head_bias, stride_bias, num_keys, lane, pipe, shape, False, False, P_LAYOUT,
            )  # fmt: skip
            used += 1
        if TAILS:
            for tile in range(whole, tiles):
                accumulator, packed, running_max, running_sum = _step(
                    tile, used, queries, accumulator, packed, running_max, running_sum, zero, scale, entries, count,
                    head_bias, stride_bias, num_keys, lane, pipe, shape, True, False, P_LAYOUT,
                )  # fmt: skip
                used += 1
        if shape.HAS_FAR:
            far_bias = (
                far.bias + batch.to(gl.int64) * far.stride_bias_b + head.to(gl.int64) * far.stride_bias_h
            )
            for tile in range(num_far_tiles(far_count, shape)):
                accumulator, packed, running_max, running_sum = _step(
                    tile, used, queries, accumulator, packed, running_max, running_sum, zero, scale, boxes, far_count,
                    far_bias, far.stride_bias, num_keys, lane, pipe, shape, False, True, P_LAYOUT,
                )  # fmt: skip
                used += 1

        turn += 1
        next_flat, next_start, next_count, next_whole = _receive(turn, pipe)
        has_next = next_flat >= 0
        next_buffer = turn % 2 * shape.CONSUMERS + member
        mbarrier.wait(pipe.q_full.index(next_buffer), turn // 2 & 1, pred=has_next)
        _wait_filled(used, pipe, shape, has_next)
        k_stage = used % shape.STAGES
        v_stage = (used - 1) % shape.STAGES
        # After the last row these scores are of stale keys and are never looked at.
        scores = warpgroup_mma(
            pipe.queries.index(next_buffer),
            pipe.keys.index(k_stage).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        accumulator = warpgroup_mma(packed, pipe.values.index(v_stage), accumulator, is_async=True)
        scores, accumulator = warpgroup_mma_wait(0, deps=[scores, accumulator])
        mbarrier.arrive(pipe.k_empty.index(k_stage), count=1, pred=has_next)
        mbarrier.arrive(pipe.v_empty.index(v_stage), count=1)

        # A sum of exactly zero means nothing was read; a NaN sum must stay NaN.
        read_nothing = running_sum == 0.0
        divisor = gl.where(read_nothing, 1.0, running_sum)
        log_sum = gl.where(read_nothing, -INF, (running_max + gl.log2(divisor)) * LN_2)
        first_query = row * shape.Q_BLOCK + member * GROUP
        token = first_query + gl.arange(0, GROUP, gl.SliceLayout(1, S_LAYOUT))
        flat_head = (batch * lists.num_heads + head).to(gl.int64)
        gl.store(lse + flat_head * lists.num_queries + token, log_sum, mask=token < lists.num_queries)
        factor = gl.convert_layout(gl.where(read_nothing, 0.0, 1.0 / divisor), gl.SliceLayout(1, O_LAYOUT))[
            :, None
        ]
        # Values that may not be read, yet were multiplied by zero, may be NaN.
        queries.store(gl.where(factor == 0.0, 0.0, accumulator * factor).to(DTYPE))
        fence_async_shared()
        tma_store(o_desc, [batch, head, first_query, 0], queries)
        flat = next_flat
        start = next_start
        count = next_count
        whole = next_whole
    tma.store_wait(0)


# -- the kernel --------------------------------------------------------------------------------------------------


@gluon.jit
def forward_kernel(
    q_desc, k_desc, v_desc, more_k_desc, more_v_desc, o_desc,
    key, value, lse, offsets, blocks, order, counter, key_bias, far_offsets, far_boxes, far_bias,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h, stride_bias_b, stride_bias_h, stride_bias,
    stride_far_offsets_b, stride_far_offsets_h, stride_far_boxes_b, stride_far_boxes_h,
    stride_far_bias_b, stride_far_bias_h, stride_far_bias,
    num_items, num_heads, heads_per_key, num_rows, num_queries, num_keys, first_more, scale,
    D: gl.constexpr, Q_BLOCK: gl.constexpr, K_BLOCK: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr, GATHER_WARPS: gl.constexpr, RAGGED: gl.constexpr,
    HAS_ORDER: gl.constexpr, DYNAMIC: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_MORE: gl.constexpr, HAS_FAR: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    # `more_k_desc` and `more_v_desc` are of the last keys, or of the far part's: nobody asks for both, and two further
    # descriptors would make every launch longer.
    gl.static_assert(not (HAS_MORE and HAS_FAR))
    gl.static_assert(not (HAS_FAR and GATHER_WARPS > 0))
    shape = Shape(
        D, Q_BLOCK, K_BLOCK, TILE, STAGES, CONSUMERS, GATHER_WARPS, RAGGED, HAS_ORDER, DYNAMIC, HAS_BIAS, HAS_MORE,
        HAS_FAR,
    )  # fmt: skip
    lists = Lists(
        offsets, blocks, order, gl.to_tensor(stride_offsets_b), gl.to_tensor(stride_offsets_h),
        gl.to_tensor(stride_blocks_b), gl.to_tensor(stride_blocks_h), gl.to_tensor(num_items), gl.to_tensor(num_heads),
        gl.to_tensor(num_rows), gl.to_tensor(num_queries), gl.to_tensor(num_keys), gl.to_tensor(first_more),
    )  # fmt: skip
    far = Far(
        far_offsets, far_boxes, far_bias, gl.to_tensor(stride_far_offsets_b), gl.to_tensor(stride_far_offsets_h),
        gl.to_tensor(stride_far_boxes_b), gl.to_tensor(stride_far_boxes_h), gl.to_tensor(stride_far_bias_b),
        gl.to_tensor(stride_far_bias_h), gl.to_tensor(stride_far_bias),
    )  # fmt: skip
    pipe = make_pipe(shape, q_desc.dtype)
    PRODUCER_WARPS: gl.constexpr = GATHER_WARPS if GATHER_WARPS > 0 else 1
    producer_args = (
        q_desc, k_desc, v_desc, more_k_desc, more_v_desc, key, value,
        stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, counter, heads_per_key, lists, far, pipe,
        shape,
    )  # fmt: skip
    consumer_args = (
        o_desc,
        lse,
        key_bias,
        stride_bias_b,
        stride_bias_h,
        stride_bias,
        scale,
        lists,
        far,
        pipe,
        shape,
    )
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consumer, (gl.constexpr(0),) + consumer_args), (_producer, producer_args)],
            [PRODUCER_WARPS],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (gl.constexpr(0),) + consumer_args),
                (_consumer, (gl.constexpr(1),) + consumer_args),
                (_producer, producer_args),
            ],
            [4, PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (gl.constexpr(0),) + consumer_args),
                (_consumer, (gl.constexpr(1),) + consumer_args),
                (_consumer, (gl.constexpr(2),) + consumer_args),
                (_producer, producer_args),
            ],
            [4, 4, PRODUCER_WARPS],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
