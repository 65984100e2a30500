"""Lists of plans made on the device: of block masks and transposed, by kernels where they can run."""

from typing import Any

import torch
from torch import Tensor

from nearfield.ops._op import Operation
from nearfield.ops._triton import kernels
from nearfield.ops.lists import reference
from nearfield.plan import Packed, Plan


def _lists_of_forward(mask: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    module: Any = kernels("lists.triton.lists", "auto", mask) or reference
    with torch.cuda.device_of(mask):
        blocks: Tensor = module.lists_of(mask, offsets, capacity)
    return blocks


def _lists_of_shape(mask: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    return offsets.new_empty(*mask.shape[:2], capacity)


lists_of = Operation("lists_of", _lists_of_forward, _lists_of_shape)
"""The ascending lists of a block mask. Builders of plans, which may not import this room, call its operator."""


def _transpose_forward(
    offsets: Tensor, blocks: Tensor, extent: Tensor, q_block: int, k_block: int
) -> tuple[Tensor, Tensor]:
    plan = Plan.of_known(offsets, blocks, q_block, k_block, extent.shape[0], extent.shape[1])
    module = kernels("lists.triton.transpose", "triton", plan.blocks)
    if module is None:
        transposed = plan.transpose()
        return transposed.offsets, transposed.blocks
    with torch.cuda.device_of(blocks):
        found: tuple[Tensor, Tensor] = module.transpose(plan.offsets, plan.blocks, plan.num_columns)
    return found


def _transpose_shapes(
    offsets: Tensor, blocks: Tensor, extent: Tensor, q_block: int, k_block: int
) -> tuple[Tensor, Tensor]:
    columns = -(-extent.shape[1] // k_block)
    return offsets.new_empty(*offsets.shape[:2], columns + 1), torch.empty_like(blocks)


_transpose = Operation("transpose", _transpose_forward, _transpose_shapes)


def for_one_call(plan: Plan, packed: Packed | None = None) -> None:
    """Say of a plan that it serves one call alone: it is transposed in the backward pass of that call.

    Args:
        packed: its lists merged for several rows, where they are known already.
    """
    plan.prepared.transposes_later = True
    plan.prepared.packed = packed


def transposed(plan: Plan) -> Plan:
    """`plan.transpose()`, in fewer launches than plain torch takes. Kept with the plan, as that is."""
    if plan.prepared.transpose is not None:
        return plan.prepared.transpose

    def make() -> Plan:
        lists = _transpose(plan.offsets, plan.blocks, plan.extent, plan.q_block, plan.k_block)
        sizes = plan.k_block, plan.q_block, plan.num_keys, plan.num_queries
        return Plan(lists[0], lists[1], *sizes, similar_rows=plan.similar_rows, check=False)

    made = plan.make(make)
    if plan.can_keep(made.offsets):
        plan.prepared.transpose = made
    return made
