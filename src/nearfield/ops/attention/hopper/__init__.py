"""Launching the Hopper kernel (`kernel.py`): what it can run, how its programs are built, and the call."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nearfield._types import Attended, Positions
from nearfield.ops._triton.launch import (
    LOG2_E,
    compute_capability,
    descriptor_strides,
    list_strides,
    nonnegative,
    suits_copy_engine,
)
from nearfield.ops.attention.hopper.kernel import forward_kernel
from nearfield.ops.attention.parts import KeyValuePart
from nearfield.ops.attention.triton.pair import attend_backward
from nearfield.plan import BOX, Plan

__all__ = ["attend_backward", "attend_forward", "attend_parts_forward", "can_continue", "unsupported"]
# The backward is that of the plain kernels: none has been specialised for Hopper.


class Launch(NamedTuple):
    """How one program is built: keys per step, ring stages, who loads, and how registers are shared out."""

    tile: int
    stages: int
    gather_warps: int
    consumer_registers: int
    producer_registers: int

    def box(self, k_block: int) -> int:
        """Rows of one copy by the copy engine."""
        return min(k_block, self.tile) if self.gather_warps == 0 else 64


_COPIED_GRAIN = 8  # the copy engine writes whole 8-row swizzle groups; smaller blocks are gathered


def launch_for(q_block: int, k_block: int, dim: int) -> Launch:
    gather_warps = 0 if k_block >= _COPIED_GRAIN else 4
    if q_block == 192:
        return Launch(64, 4, gather_warps, *((144, 80) if gather_warps else (160, 24)))
    if q_block == 128 and k_block in (64, 128):  # not 192, which wide tiles do not cut evenly
        # Two consumers have the registers for wide tiles, which halve the waiting per product.
        return Launch(128, 256 // dim, 0, 240, 24)
    return Launch(64, 4, gather_warps, *((208, 96) if gather_warps else (240, 24)))


def constants(
    launch: Launch,
    dim: int,
    q_block: int,
    k_block: int,
    *,
    is_ragged: bool,
    has_order: bool,
    has_bias: bool,
    has_more: bool = False,
    has_far: bool = False,
) -> dict[str, object]:
    """What `forward_kernel` is compiled for."""
    return {
        "D": dim,
        "Q_BLOCK": q_block,
        "K_BLOCK": k_block,
        "TILE": launch.tile,
        "STAGES": launch.stages,
        "CONSUMERS": q_block // 64,
        "GATHER_WARPS": launch.gather_warps,
        "RAGGED": is_ragged,
        "HAS_ORDER": has_order,
        # Rows of unequal length are handed out as programs become free, equal ones in fixed turns.
        "DYNAMIC": has_order,
        "HAS_BIAS": has_bias,
        "HAS_MORE": has_more,
        "HAS_FAR": has_far,
        "CONSUMER_REGISTERS": launch.consumer_registers,
        "PRODUCER_REGISTERS": launch.producer_registers,
    }


def unsupported(
    query: Tensor,
    key: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    backward: bool,
) -> str | None:
    """Why the Hopper kernels cannot run this call, or None."""
    if not query.is_cuda:
        return f"the tensors are on {query.device}"
    if compute_capability(query.device) != (9, 0):
        return "the GPU is not a Hopper (compute capability 9.0)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the tensor cores take float16 and bfloat16, not {query.dtype}"
    if query.shape[-1] not in (64, 128):
        return f"head dimension {query.shape[-1]} is not 64 or 128"
    if plan.q_block not in (64, 128, 192):
        return f"q_block {plan.q_block} is not 64, 128 or 192 (whole warpgroups)"
    if positions is not None:
        return "positions are not built in"
    for name, x in (("query", query), ("key", key)):
        if not suits_copy_engine(x):
            return f"`{name}`'s strides {tuple(x.stride())} do not suit the copy engine (16-byte rows)"
    return None


def can_continue(key: Tensor, more: tuple[Tensor, Tensor], plan: Plan) -> bool:
    """Whether a plan's last keys and values can be read from other tensors than its first."""
    is_copied = plan.k_block >= _COPIED_GRAIN and key.shape[2] % plan.k_block == 0
    return is_copied and all(suits_copy_engine(x) for x in more)


def suits_far(near: KeyValuePart, far: KeyValuePart) -> bool:
    """Whether one kernel can read `far` after the list of `near`: single keys with a bias, known as boxes."""
    (near_key, _, near_plan, *_), (far_key, _, far_plan, far_bias, _) = near, far
    return (
        far_plan.prepared.boxes is not None
        and far_bias is not None
        and far_plan.q_block == near_plan.q_block
        and far_key.shape[1] == near_key.shape[1]
        and launch_for(near_plan.q_block, near_plan.k_block, near_key.shape[3]).gather_warps == 0
    )


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    block = [1, 1, rows, x.shape[-1]]
    return TensorDescriptor(
        x, list(x.shape), descriptor_strides(x), block, shared_layout(rows, x.shape[-1], x.dtype)
    )


@lru_cache
def shared_layout(rows: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(
        [1, 1, rows, dim], gl.float16 if dtype == torch.float16 else gl.bfloat16
    )


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend_forward(
    query: Tensor,
    part: KeyValuePart,
    scale: float,
    more: tuple[Tensor, Tensor] | None = None,
    far: KeyValuePart | None = None,
) -> Attended:
    """
    Args:
        more: keys and values that follow the others in the plan (`can_continue`).
        far: others that are read in the same softmax (`suits_far`); not together with `more`.
    """
    assert more is None or far is None
    key, value, plan, key_bias, _ = part
    batch, heads, num_queries, dim = query.shape
    value = _copyable(value)
    out = torch.empty_like(query)
    lse = torch.empty(batch, heads, num_queries, device=query.device, dtype=torch.float32)
    query, scale = nonnegative(query, scale)
    order = plan.longest_first(batch, heads)
    launch = launch_for(plan.q_block, plan.k_block, dim)
    counter = torch.zeros(1, device=query.device, dtype=torch.int32) if order is not None else plan.offsets
    num_items = batch * heads * plan.num_rows
    box = launch.box(plan.k_block)
    sides = _descriptor(key, box), _descriptor(value, box)
    more_sides = sides if more is None else (_descriptor(more[0], box), _descriptor(more[1], box))
    # Without a far part others stand in its place and are never read.
    far_tensors = plan.offsets, plan.blocks, lse
    far_strides: tuple[int, ...] = (0,) * 7
    if far is not None:
        more_sides = _descriptor(far.key, BOX), _descriptor(_copyable(far.value), BOX)
        far_tensors, far_strides = _boxes_and_bias(far)
    forward_kernel[(min(num_items, _num_processors(query.device)),)](
        _descriptor(query, 64), *sides, *more_sides, _descriptor(out, 64), key, value, lse,
        plan.offsets, plan.blocks, plan.offsets if order is None else order, counter,
        lse if key_bias is None else key_bias, *far_tensors,
        *key.stride()[:3], *value.stride()[:3], *list_strides(plan.offsets, plan.blocks),
        *((0, 0, 0) if key_bias is None else key_bias.stride()), *far_strides,
        num_items, heads, heads // key.shape[1], plan.num_rows, num_queries, plan.num_keys, key.shape[2],
        scale * LOG2_E,
        **constants(
            launch, dim, plan.q_block, plan.k_block, is_ragged=plan.num_keys % plan.k_block != 0,
            has_order=order is not None, has_bias=key_bias is not None, has_more=more is not None,
            has_far=far is not None,
        ),
        num_warps=4,
    )  # fmt: skip
    return Attended(out, lse)


def _copyable(value: Tensor) -> Tensor:
    return value if suits_copy_engine(value) else value.clone(memory_format=torch.contiguous_format)


def _boxes_and_bias(far: KeyValuePart) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...]]:
    """What the kernel needs of a far part beside its keys: tensors, and their strides."""
    _, _, plan, bias, _ = far
    boxes = plan.prepared.boxes
    assert boxes is not None
    assert bias is not None
    return (*boxes, bias), (*list_strides(*boxes), *bias.stride())


def attend_parts_forward(query: Tensor, parts: Sequence[KeyValuePart], scale: float) -> Attended | None:
    """What the queries read in all parts, if one kernel reads them; None where each part is to have its own."""
    if len(parts) != 2:
        return None
    near, far = parts
    return attend_forward(query, near, scale, far=far) if suits_far(near, far) else None
