"""What the warps of a Hopper program share: the constants, the plan's lists, shared memory and its barriers."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from nearfield.ops.attention.hopper.names import aggregate, constexpr_function
from nearfield.plan import BOX

GROUP = gl.constexpr(64)  # queries of one warpgroup
FAR_BOX = gl.constexpr(BOX)  # consecutive keys of the far part that travel together


@aggregate
class Shape:
    """The constants a kernel is compiled for."""

    D: gl.constexpr
    Q_BLOCK: gl.constexpr
    K_BLOCK: gl.constexpr
    TILE: gl.constexpr
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    GATHER_WARPS: gl.constexpr  # 0: the copy engine loads
    RAGGED: gl.constexpr
    HAS_ORDER: gl.constexpr
    DYNAMIC: gl.constexpr
    HAS_BIAS: gl.constexpr
    HAS_MORE: gl.constexpr  # keys from `first_more` on are in tensors of their own
    HAS_FAR: gl.constexpr  # after its list a row reads keys of a second plan (`Far`)

    @constexpr_function
    def __init__(
        self, D, Q_BLOCK, K_BLOCK, TILE, STAGES, CONSUMERS, GATHER_WARPS, RAGGED, HAS_ORDER, DYNAMIC, HAS_BIAS,
        HAS_MORE, HAS_FAR,
    ):  # fmt: skip
        self.D = gl.constexpr(D)
        self.Q_BLOCK = gl.constexpr(Q_BLOCK)
        self.K_BLOCK = gl.constexpr(K_BLOCK)
        self.TILE = gl.constexpr(TILE)
        self.STAGES = gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.GATHER_WARPS = gl.constexpr(GATHER_WARPS)
        self.RAGGED = gl.constexpr(RAGGED)
        self.HAS_ORDER = gl.constexpr(HAS_ORDER)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.HAS_BIAS = gl.constexpr(HAS_BIAS)
        self.HAS_MORE = gl.constexpr(HAS_MORE)
        self.HAS_FAR = gl.constexpr(HAS_FAR)


@aggregate
class Lists:
    """The plan: where its lists are and how large it is."""

    offsets: gl.tensor
    blocks: gl.tensor
    order: gl.tensor
    stride_offsets_b: gl.tensor
    stride_offsets_h: gl.tensor
    stride_blocks_b: gl.tensor
    stride_blocks_h: gl.tensor
    num_items: gl.tensor
    num_heads: gl.tensor
    num_rows: gl.tensor
    num_queries: gl.tensor
    num_keys: gl.tensor
    first_more: gl.tensor

    @constexpr_function
    def __init__(
        self, offsets, blocks, order, stride_offsets_b, stride_offsets_h, stride_blocks_b, stride_blocks_h,
        num_items, num_heads, num_rows, num_queries, num_keys, first_more,
    ):  # fmt: skip
        self.offsets = offsets
        self.blocks = blocks
        self.order = order
        self.stride_offsets_b = stride_offsets_b
        self.stride_offsets_h = stride_offsets_h
        self.stride_blocks_b = stride_blocks_b
        self.stride_blocks_h = stride_blocks_h
        self.num_items = num_items
        self.num_heads = num_heads
        self.num_rows = num_rows
        self.num_queries = num_queries
        self.num_keys = num_keys
        self.first_more = first_more


@aggregate
class Far:
    """Other keys that a row reads after its list, each with a bias: where they are, in boxes of consecutive ones."""

    offsets: gl.tensor
    boxes: gl.tensor
    bias: gl.tensor
    stride_offsets_b: gl.tensor
    stride_offsets_h: gl.tensor
    stride_boxes_b: gl.tensor
    stride_boxes_h: gl.tensor
    stride_bias_b: gl.tensor
    stride_bias_h: gl.tensor
    stride_bias: gl.tensor

    @constexpr_function
    def __init__(
        self, offsets, boxes, bias, stride_offsets_b, stride_offsets_h, stride_boxes_b, stride_boxes_h,
        stride_bias_b, stride_bias_h, stride_bias,
    ):  # fmt: skip
        self.offsets = offsets
        self.boxes = boxes
        self.bias = bias
        self.stride_offsets_b = stride_offsets_b
        self.stride_offsets_h = stride_offsets_h
        self.stride_boxes_b = stride_boxes_b
        self.stride_boxes_h = stride_boxes_h
        self.stride_bias_b = stride_bias_b
        self.stride_bias_h = stride_bias_h
        self.stride_bias = stride_bias


@aggregate
class Pipe:
    """Shared memory and the barriers at which its two sides meet: full (may be read) and empty (may be filled)."""

    queries: gl.shared_memory_descriptor
    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    item_full: gl.shared_memory_descriptor
    item_empty: gl.shared_memory_descriptor

    @constexpr_function
    def __init__(
        self, queries, keys, values, items, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_full,
        item_empty,
    ):  # fmt: skip
        self.queries = queries
        self.keys = keys
        self.values = values
        self.items = items
        self.q_full = q_full
        self.q_empty = q_empty
        self.k_full = k_full
        self.k_empty = k_empty
        self.v_full = v_full
        self.v_empty = v_empty
        self.item_full = item_full
        self.item_empty = item_empty


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_pipe(shape, DTYPE: gl.constexpr):
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([shape.TILE, shape.D], DTYPE)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP, shape.D], DTYPE)
    # Every thread of a gathering producer reports its own copies; the copy engine reports once, in bytes.
    FILLS: gl.constexpr = shape.GATHER_WARPS * 32 if shape.GATHER_WARPS > 0 else 1
    pipe = Pipe(
        gl.allocate_shared_memory(DTYPE, [2 * shape.CONSUMERS, GROUP, shape.D], QUERIES),
        gl.allocate_shared_memory(DTYPE, [shape.STAGES, shape.TILE, shape.D], ROWS),
        gl.allocate_shared_memory(DTYPE, [shape.STAGES, shape.TILE, shape.D], ROWS),
        gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        _barriers(2 * shape.CONSUMERS, 1),
        _barriers(2 * shape.CONSUMERS, 1),
        _barriers(shape.STAGES, FILLS),
        _barriers(shape.STAGES, shape.CONSUMERS),
        _barriers(shape.STAGES, FILLS),
        _barriers(shape.STAGES, shape.CONSUMERS),
        _barriers(2, 1),
        _barriers(2, shape.CONSUMERS),
    )
    fence_async_shared()
    return pipe


# -- which row, which tokens -------------------------------------------------------------------------------------


@gluon.jit
def row_of(flat, lists):
    """Batch, head and row of an item."""
    row = flat % lists.num_rows
    head = flat // lists.num_rows % lists.num_heads
    batch = flat // lists.num_rows // lists.num_heads
    return batch, head, row


@gluon.jit
def list_of(batch, head, start, lists):
    """Where a row's list begins."""
    return (
        lists.blocks
        + batch.to(gl.int64) * lists.stride_blocks_b
        + head.to(gl.int64) * lists.stride_blocks_h
        + start
    )


@gluon.jit
def num_tiles(count, shape):
    if shape.K_BLOCK >= shape.TILE:
        tiles = count * (shape.K_BLOCK // shape.TILE)
    else:
        tiles = (count + shape.TILE // shape.K_BLOCK - 1) // (shape.TILE // shape.K_BLOCK)
    return gl.maximum(tiles, 1)


@gluon.jit
def num_whole(entries, count, num_keys, shape):
    """Tiles that surely reach no key past the end: ids ascend, so the ragged block can only stand last."""
    whole = count
    if shape.RAGGED:
        ragged_block = num_keys // shape.K_BLOCK
        last = gl.load(entries + whole - 1, mask=whole > 0, other=-1)
        while last == ragged_block:
            whole -= 1
            last = gl.load(entries + whole - 1, mask=whole > 0, other=-1)
    if shape.K_BLOCK >= shape.TILE:
        tiles = whole * (shape.K_BLOCK // shape.TILE)
    else:
        tiles = whole // (shape.TILE // shape.K_BLOCK)
    return tiles


@gluon.jit
def tokens_of(entries, count, tile, lane, num_keys, shape):
    """The keys of a tile and which of them exist. Places past the list's end repeat its last block."""
    if shape.K_BLOCK >= shape.TILE:
        slot = tile // (shape.K_BLOCK // shape.TILE)
        block = gl.load(entries + gl.minimum(slot, count - 1), mask=count > 0, other=0)
        token = block * shape.K_BLOCK + tile % (shape.K_BLOCK // shape.TILE) * shape.TILE + lane
    else:
        slot = tile * (shape.TILE // shape.K_BLOCK) + lane // shape.K_BLOCK
        block = gl.load(entries + gl.minimum(slot, count - 1), mask=count > lane * 0, other=0)
        token = block * shape.K_BLOCK + lane % shape.K_BLOCK
    return token, (slot < count) & (token < num_keys)


# -- the far part ------------------------------------------------------------------------------------------------


@gluon.jit
def boxes_of(batch, head, row, far):
    """The boxes of a row (`nearfield.plan.Boxes`), and how many there are."""
    long_batch, long_head = batch.to(gl.int64), head.to(gl.int64)
    offsets = far.offsets + long_batch * far.stride_offsets_b + long_head * far.stride_offsets_h + row
    start = gl.load(offsets)
    boxes = far.boxes + long_batch * far.stride_boxes_b + long_head * far.stride_boxes_h + start
    return boxes, gl.load(offsets + 1) - start


@gluon.jit
def num_far_tiles(count, shape):
    return (count + shape.TILE // FAR_BOX - 1) // (shape.TILE // FAR_BOX)


@gluon.jit
def first_of_box(box):
    return box // (2 * FAR_BOX)


@gluon.jit
def far_bias_of(boxes, count, tile, lane, bias, stride_bias, shape):
    """The bias of the keys of a tile that is there; -inf for those that a box lacks, and for boxes past the last."""
    slot = tile * (shape.TILE // FAR_BOX)
    box = gl.load(boxes + slot)
    first, length = first_of_box(box).to(gl.int64), box % (2 * FAR_BOX)
    for later in gl.static_range(1, shape.TILE // FAR_BOX):
        box = gl.load(boxes + slot + later, mask=slot + later < count, other=0)  # else a box of no keys
        first = gl.where(lane < later * FAR_BOX, first, first_of_box(box).to(gl.int64))
        length = gl.where(lane < later * FAR_BOX, length, box % (2 * FAR_BOX))
    place = lane % FAR_BOX
    token = first + place.to(gl.int64)
    return gl.load(bias + token * stride_bias, mask=place < length, other=-float("inf"))
