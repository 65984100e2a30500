"""The order in which rows start, longest first, in one launch: every row counts those that come before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton.launch import ceil_div, list_strides
from nearfield.plan import Plan

_MOST_ROWS = 2**15
"""Each looks at all: beyond, a sort is faster."""
_OWN, _OTHERS = 32, 256


@triton.jit
def _half_octaves(offsets, flat, exists, stride_b, stride_h, num_heads, num_rows):
    """The logarithm of a row's length, rounded: rows of similar length count as equal."""
    batch_head = flat // num_rows
    pointer = (
        offsets + batch_head // num_heads * stride_b + batch_head % num_heads * stride_h + flat % num_rows
    )
    count = tl.load(pointer + 1, mask=exists, other=0) - tl.load(pointer, mask=exists, other=0)
    return tl.floor(tl.math.log2(tl.maximum(count, 1).to(tl.float32)) * 2 + 0.5)


@triton.jit
def _order_kernel(
    offsets, order, stride_b, stride_h, num_heads, num_rows, total, OWN: tl.constexpr, OTHERS: tl.constexpr
):
    mine = tl.program_id(0) * OWN + tl.arange(0, OWN)
    my_length = _half_octaves(offsets, mine, mine < total, stride_b, stride_h, num_heads, num_rows)
    rank = tl.zeros([OWN], tl.int32)
    for start in range(0, total, OTHERS):
        other = start + tl.arange(0, OTHERS)
        exists = other < total
        length = _half_octaves(offsets, other, exists, stride_b, stride_h, num_heads, num_rows)
        is_longer = length[None, :] > my_length[:, None]
        is_earlier = (length[None, :] == my_length[:, None]) & (other[None, :] < mine[:, None])
        rank += tl.sum(((is_longer | is_earlier) & exists[None, :]).to(tl.int32), 1)
    tl.store(order + rank, mine, mask=mine < total)


def longest_first(plan: Plan, batch: int, heads: int) -> Tensor | None:
    """`plan.longest_first`, in one launch where it is not known yet."""
    is_known = (batch, heads) in plan.prepared.orders
    if is_known or batch * heads * plan.num_rows > _MOST_ROWS:
        return plan.longest_first(batch, heads)
    order = room_for_order(plan, batch, heads)
    if order is not None:
        order_into(order, plan, batch, heads)
    return order


def room_for_order(plan: Plan, batch: int, heads: int) -> Tensor | None:
    """What `order_into` writes to; None where rows start as they come."""
    if not plan.has_order(heads):
        return None
    return torch.empty(batch * heads * plan.num_rows, device=plan.device, dtype=torch.int32)


def order_into(order: Tensor, plan: Plan, batch: int, heads: int) -> None:
    """See `longest_first`. All else that is allocated here is temporary."""
    total = order.shape[0]
    if total > _MOST_ROWS:
        order.copy_(plan.sorted_rows(batch, heads))
        return
    strides = list_strides(plan.offsets, plan.blocks)[:2]
    _order_kernel[(ceil_div(total, _OWN),)](
        plan.offsets, order, *strides, heads, plan.num_rows, total, OWN=_OWN, OTHERS=_OTHERS, num_warps=4
    )
