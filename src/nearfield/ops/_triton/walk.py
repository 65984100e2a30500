"""Walking a row's list inside a kernel: which tokens a tile holds, and how they are loaded.

A tile is TILE consecutive places of a row's list, counted in tokens: part of one block where blocks are at least a tile
long, several gathered blocks otherwise. Tiles that may reach past the end (the last, and those with the ragged last
block) run in a second, masked loop; the first loop has no masks at all. The same functions serve both directions:
queries that walk keys, and keys that walk the transposed plan's queries.
"""

import triton
import triton.language as tl

# Logits are kept in powers of two: the exponential the hardware has.
LOG2E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INF = tl.constexpr(float("inf"))


@triton.jit
def row_of_program(program, order, num_rows, HAS_ORDER: tl.constexpr, PARTS: tl.constexpr):
    """The (head of all batches, row, part of the row) a program works on."""
    flat = program // PARTS
    if HAS_ORDER:
        flat = tl.load(order + flat)
    return flat // num_rows, flat % num_rows, program % PARTS


@triton.jit
def list_of_row(offsets, row, PACK: tl.constexpr):
    """Where the list of a row (of PACK rows, merged: see `pack.py`) starts, and how long it is."""
    if PACK > 1:
        return tl.load(offsets + 2 * row), tl.load(offsets + 2 * row + 1)
    else:
        start = tl.load(offsets + row)
        return start, tl.load(offsets + row + 1) - start


@triton.jit
def tile_counts(
    entries, count, length, BLOCK: tl.constexpr, TILE: tl.constexpr, RAGGED: tl.constexpr, PACK: tl.constexpr
):
    """How many tiles are surely whole, and how many there are.

    Ids ascend, so the ragged last block can only stand at the end of the list (more than once if repeated).
    """
    whole = count
    if RAGGED:
        ragged_block = length // BLOCK
        last = _id_of(tl.load(entries + whole - 1, mask=whole > 0, other=-1), PACK)
        while last == ragged_block:
            whole -= 1
            last = _id_of(tl.load(entries + whole - 1, mask=whole > 0, other=-1), PACK)
    if BLOCK >= TILE:
        return whole * (BLOCK // TILE), count * (BLOCK // TILE)
    else:
        return whole // (TILE // BLOCK), tl.cdiv(count, TILE // BLOCK)


@triton.jit
def chunks_of_row(
    offsets,
    row,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PACK: tl.constexpr,
    CHUNK: tl.constexpr,
    most_chunks,
):
    """How many programs share a row's list, each walking CHUNK tiles of it, the last one all that is left."""
    _, count = list_of_row(offsets, row, PACK)
    if BLOCK >= TILE:
        total = count * (BLOCK // TILE)
    else:
        total = tl.cdiv(count, TILE // BLOCK)
    return tl.maximum(1, tl.minimum(tl.cdiv(total, CHUNK), most_chunks))


@triton.jit
def _id_of(entry, PACK: tl.constexpr):
    if PACK > 1:
        return entry >> PACK
    else:
        return entry


@triton.jit
def tile_tokens(
    entries,
    count,
    tile,
    length,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    PACK: tl.constexpr,
):
    """The first token of a tile, the tokens relative to it, which of them exist, and (with PACK) who reads them."""
    lane = tl.arange(0, TILE)
    if BLOCK >= TILE:
        entry = tl.load(entries + tile // (BLOCK // TILE))
        first = _id_of(entry, PACK) * BLOCK + tile % (BLOCK // TILE) * TILE
        exists = first + lane < length
        return first.to(tl.int64), lane, exists, entry + tl.zeros([TILE], tl.int32)
    else:
        slot = tile * (TILE // BLOCK) + lane // BLOCK
        if MASKED:
            entry = tl.load(entries + slot, mask=slot < count, other=0)
        else:
            entry = tl.load(entries + slot)
        token = _id_of(entry, PACK) * BLOCK + lane % BLOCK
        exists = (slot < count) & (token < length)
        return tl.full([], 0, tl.int64), token.to(tl.int64), exists, entry


@triton.jit
def pairs_read(entry, exists, own_lane, OWN_BLOCK: tl.constexpr, MASKED: tl.constexpr, PACK: tl.constexpr):
    """Which of the own tokens, numbered within the packed rows, read which tokens of a tile; broadcasts to
    `[own, tile]`."""
    if PACK == 1:
        return exists[None, :]
    else:
        is_read = ((entry[None, :] >> (own_lane // (OWN_BLOCK // PACK))[:, None]) & 1) != 0
        if MASKED:
            is_read = is_read & exists[None, :]
        return is_read


@triton.jit
def load_rows(
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
def copy_rows(descriptor, batch, head, first, TILE: tl.constexpr, PAD: tl.constexpr):
    """Consecutive rows by the copy engine (TMA), zero past the end."""
    return tl.reshape(
        descriptor.load([batch.to(tl.int32), head.to(tl.int32), first.to(tl.int32), 0]), [TILE, PAD]
    )


@triton.jit
def store_rows(base, token, exists, stride_n, stride_d, values, DIM: tl.constexpr, PAD: tl.constexpr):
    column = tl.arange(0, PAD)
    pointer = base + token.to(tl.int64)[:, None] * stride_n + column[None, :] * stride_d
    tl.store(pointer, values.to(base.dtype.element_ty), mask=exists[:, None] & (column < DIM)[None, :])


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    if accumulator is None:
        return tl.dot(a, b, input_precision=PRECISION)
    elif PRECISION == "ieee":
        # Each tile is summed by itself: one chain of additions over the whole list would cost float32 users digits.
        # (A plain sum would be folded back into the dot.)
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.fma(product, tl.full(product.shape, 1.0, product.dtype), accumulator)
    else:
        return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def masked_logits(
    logits, scale, bias, exists, query_position, key_position,
    MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Scaled logits; every argument is already shaped to broadcast against `logits`."""
    logits = logits * scale
    if HAS_BIAS:
        logits += bias
    if MASKED:
        logits = tl.where(exists, logits, -INF)
    if HAS_POSITIONS:
        logits = tl.where(key_position <= query_position, logits, -INF)
    return logits


@triton.jit
def shares_of_means(
    grad, token, exists, stride_gn, stride_gd, num_tokens,
    BLOCK: tl.constexpr, LEVELS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Each token's shares of the gradients of its means, level by level in ascending order; float32."""
    total = tl.zeros([token.shape[0], PAD], tl.float32)
    start = tl.full([], 0, tl.int64)
    represents = tl.full([], 1, tl.int32)
    for level in tl.range(LEVELS, num_stages=1):  # not unrolled: what calls this has few registers left
        # Before the level, not after: one power more than the highest level's may not fit.
        represents *= BLOCK
        start += tl.where(level > 0, tl.cdiv(num_tokens, represents) * BLOCK, 0)
        mean = token // represents
        rows = load_rows(grad, start, mean.to(tl.int64), exists, stride_gn, stride_gd, DIM, PAD, True)
        count = tl.minimum(num_tokens - mean * represents, represents)
        total += rows.to(tl.float32) / tl.maximum(count, 1).to(tl.float32)[:, None]
    return total
