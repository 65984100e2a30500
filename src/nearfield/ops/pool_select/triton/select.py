"""Choosing the best candidates of every query, in Triton: scores live in registers and are never written.

One program serves a group of queries that choose among the same candidates. Choosing is a loop of `count` maxima over
the tile of scores; what was chosen is a mask, and its running sum says where each id is to be stored, in ascending
order without a sort.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import ceil_div, next_power_of_two, padded
from nearfield.ops._triton.walk import dot, load_rows

MOST_CANDIDATES = 1024
_ROWS = 16
"""Queries of one program, the least a dot takes: more of them, and the scores no longer fit in registers."""
_MOST_WIDE = 128 * 128
"""Numbers of float32 that a program may hold of its candidates: products of full precision go through shared memory, of
which GPUs smaller than Hopper's have 99 KiB."""
_PER_WARP = 128
"""Candidates for which a program has one warp more, up to 8 of them."""
_REGISTERS: int | None = None
"""The most per thread."""


@triton.jit
def _select_kernel(
    query, key, parents, chosen, bounds, packed,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    num_heads, heads_per_key, num_queries, num_keys, num_groups, num_parents, group, tiles_per_group, count,
    BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, HAS_PARENTS: tl.constexpr, KEEP_OWN: tl.constexpr, PRECISION: tl.constexpr,
    PACK: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    """PACK: the lists of PACK queries are merged, too, as `pack.py` would: here it is known who chose what."""
    program = tl.program_id(0)
    tile = program % tiles_per_group
    member = program // tiles_per_group % num_groups
    batch_head = (program // tiles_per_group // num_groups).to(tl.int64)
    batch = batch_head // num_heads
    head = batch_head % num_heads

    lane = tl.arange(0, CANDIDATES)
    if HAS_PARENTS:
        slot = lane // BLOCK
        pointer = parents + (batch_head * num_groups + member) * num_parents + slot
        candidate = tl.load(pointer, mask=slot < num_parents, other=0) * BLOCK + lane % BLOCK
        exists = (slot < num_parents) & (candidate < num_keys)
    else:
        candidate = lane
        exists = lane < num_keys
    offset = tile * ROWS + tl.arange(0, ROWS)
    row = member * group + offset
    in_group = (offset < group) & (row < num_queries)
    origin = tl.full([], 0, tl.int64)
    rows = load_rows(
        query + batch * stride_qb + head * stride_qh, origin, row.to(tl.int64), in_group, stride_qn, stride_qd,
        DIM, PAD, True,
    )  # fmt: skip
    keys = load_rows(
        key + batch * stride_kb + head // heads_per_key * stride_kh, origin, candidate.to(tl.int64), exists,
        stride_kn, stride_kd, DIM, PAD, True,
    )  # fmt: skip
    scores = dot(rows, tl.trans(keys), None, PRECISION)
    lowest = -3.4028234663852886e38
    scores = tl.where(scores > lowest, scores, lowest)  # NaN and -inf, too
    if KEEP_OWN:
        scores = tl.where(candidate[None, :] == row[:, None], float("inf"), scores)
    may_choose = exists[None, :] & in_group[:, None]
    scores = tl.where(may_choose, scores, -float("inf"))
    picked = tl.zeros([ROWS, CANDIDATES], tl.int32)
    for _ in range(count):
        best, first = tl.max(scores, 1, return_indices=True)  # of equal ones the first
        now = (lane[None, :] == first[:, None]) & (best > -float("inf"))[:, None]
        picked = tl.where(now, 1, picked)
        scores = tl.where(now, -float("inf"), scores)
    place = tl.cumsum(picked, 1) - 1
    out = chosen + (batch_head * num_queries + row.to(tl.int64)[:, None]) * count
    ids = tl.broadcast_to(candidate[None, :], [ROWS, CANDIDATES])
    tl.store(out + place, ids, mask=picked > 0)
    # Where there were fewer candidates than wanted.
    slot = tl.arange(0, SLOTS)[None, :]
    is_left = (slot >= tl.sum(picked, 1)[:, None]) & (slot < count) & in_group[:, None]
    tl.store(out + slot, tl.zeros([ROWS, SLOTS], tl.int32) + num_keys, mask=is_left)
    if PACK > 1:
        members = tl.reshape(picked, [ROWS // PACK, PACK, CANDIDATES])
        bits = tl.sum(members << tl.arange(0, PACK)[None, :, None], 1)
        is_read = bits > 0
        place = tl.cumsum(is_read.to(tl.int32), 1) - 1
        number = tl.sum(is_read.to(tl.int32), 1)
        filled = tl.cdiv(number, MULTIPLE) * MULTIPLE
        width = tl.cdiv(PACK * count, MULTIPLE) * MULTIPLE
        packed_rows = (num_queries + PACK - 1) // PACK
        packed_row = (member * group + tile * ROWS) // PACK + tl.arange(0, ROWS // PACK)
        # The last program of a group may reach into the next one's rows.
        exists_packed = (packed_row * PACK < num_queries) & (
            tile * ROWS + tl.arange(0, ROWS // PACK) * PACK < group
        )
        packed += batch_head * packed_rows * width
        pointer = packed + (packed_row * width)[:, None]
        entry = candidate[None, :] * (1 << PACK) + bits
        tl.store(pointer + place, entry, mask=is_read & exists_packed[:, None])
        last = tl.max(tl.where(is_read, candidate[None, :], 0), 1)
        for step in tl.static_range(MULTIPLE - 1):
            tl.store(
                packed + packed_row * width + number + step, last * (1 << PACK),
                mask=exists_packed & (number + step < filled),
            )  # fmt: skip
        bounds += (batch_head * packed_rows + packed_row) * 2
        tl.store(bounds, packed_row * width, mask=exists_packed)
        tl.store(bounds + 1, filled, mask=exists_packed)


def unsupported(query: Tensor, num_candidates: int) -> str | None:
    """Why the kernel cannot run this selection, or None."""
    if num_candidates > MOST_CANDIDATES:
        return f"{num_candidates} candidates are more than the {MOST_CANDIDATES} that fit in registers"
    lanes = max(16, next_power_of_two(num_candidates))
    if query.dtype == torch.float32 and lanes * padded(query.shape[3]) > _MOST_WIDE:
        return (
            f"{num_candidates} candidates of {query.shape[3]} channels in float32 do not fit in shared memory"
        )
    return unsupported_tensor(query, most_channels=128, multiplies=True)


def select(
    query: Tensor, key: Tensor, parents: Tensor | None, block: int, count: int, keep_own: bool
) -> Tensor:
    """See `nearfield.ops.pool_select.reference.select`."""
    return _select(query, key, parents, block, count, keep_own, 1, 1)[0]


def select_packed(
    query: Tensor,
    key: Tensor,
    parents: Tensor | None,
    block: int,
    count: int,
    keep_own: bool,
    pack: int,
    multiple: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `nearfield.ops.pool_select.reference.select`. `block` is a multiple of `pack`."""
    return _select(query, key, parents, block, count, keep_own, pack, multiple)


def _select(
    query: Tensor,
    key: Tensor,
    parents: Tensor | None,
    block: int,
    count: int,
    keep_own: bool,
    pack: int,
    multiple: int,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, num_queries, dim = query.shape
    num_keys = key.shape[2]
    num_parents = 0 if parents is None else parents.shape[3]
    group = num_queries if parents is None else block
    num_groups = ceil_div(num_queries, group)
    candidates = num_keys if parents is None else num_parents * block
    tiles = ceil_div(group, _ROWS)
    lanes = max(16, next_power_of_two(candidates))
    chosen = torch.empty(batch, heads, num_queries, count, device=query.device, dtype=torch.int32)
    bounds, packed = chosen, chosen
    if pack > 1:
        rows, width = ceil_div(num_queries, pack), ceil_div(pack * count, multiple) * multiple
        bounds = torch.empty(batch, heads, 2 * rows, device=query.device, dtype=torch.int32)
        packed = torch.empty(batch, heads, rows * width, device=query.device, dtype=torch.int32)
    lists = chosen if parents is None else parents.contiguous()
    _select_kernel[(batch * heads * num_groups * tiles,)](
        query, key, lists, chosen, bounds, packed, *query.stride(), *key.stride(),
        heads, heads // key.shape[1], num_queries, num_keys, num_groups, num_parents, group, tiles, count,
        BLOCK=block, CANDIDATES=lanes, ROWS=_ROWS, SLOTS=next_power_of_two(count),
        DIM=dim, PAD=padded(dim), HAS_PARENTS=parents is not None, KEEP_OWN=keep_own,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", PACK=pack, MULTIPLE=multiple,
        num_warps=min(8, max(1, lanes // _PER_WARP)), num_stages=1, maxnreg=_REGISTERS,
    )  # fmt: skip
    return chosen, bounds, packed
