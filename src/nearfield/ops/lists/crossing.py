"""How a plan crosses an operator, which takes tensors and numbers alone: flattened outside, put together inside."""

from collections.abc import Iterator
from typing import Any

from nearfield.ops.lists.api import transposed
from nearfield.plan import Boxes, Packed, Plan

SLOTS = (
    *(("Tensor", name) for name in ("offsets", "blocks", "extent")),
    *(("Tensor?", name) for name in ("order", "transposed_offsets", "transposed_blocks", "transposed_order")),
    *(("Tensor?", name) for name in ("box_offsets", "boxes", "packed_bounds", "packed_blocks")),
    ("int[]", "sizes"),  # both blocks, whether rows are similar, and how lists were merged
)
"""The types and names of what `flatten` gives, as the schema of an operator writes them."""


def flatten(
    plan: Plan, batch: int, heads: int, key_heads: int, *, by_kernels: bool, differentiated: bool
) -> tuple[Any, ...]:
    """A plan as tensors and numbers.

    Args:
        batch, heads, key_heads: of the call.
        by_kernels: kernels will walk the lists, so the order in which rows start goes with them.
        differentiated: the transpose goes with them, unless the plan says that it is made later.
    """
    backward = None
    if differentiated and not plan.prepared.transposes_later:
        backward = transposed(plan) if by_kernels else plan.transpose()
    order = plan.longest_first(batch, heads) if by_kernels else None
    backward_order = backward.longest_first(batch, key_heads) if by_kernels and backward else None
    packed = plan.prepared.packed
    return (
        plan.offsets,
        plan.blocks,
        plan.extent,
        order,
        backward.offsets if backward else None,
        backward.blocks if backward else None,
        backward_order,
        *(plan.prepared.boxes or (None, None)),
        *(packed[:2] if packed else (None, None)),
        [plan.q_block, plan.k_block, int(plan.similar_rows), *(packed[2:] if packed else (0, 0))],
    )


def restore(slots: Iterator[Any], batch: int, heads: int, key_heads: int) -> Plan:
    """The plan of the next slots, with everything that was derived of it outside. Rows without an order need none."""
    offsets, blocks, extent, order, *backward, backward_order = (next(slots) for _ in range(7))
    box_offsets, boxes, bounds, packed_blocks = (next(slots) for _ in range(4))
    q_block, k_block, similar_rows, *packing = next(slots)
    num_queries, num_keys = extent.shape[:2]
    alike = bool(similar_rows)
    plan = Plan.of_known(
        offsets, blocks, q_block, k_block, num_queries, num_keys, uniform=order is None, similar_rows=alike
    )
    prepared = plan.prepared
    if order is not None:
        prepared.orders[batch, heads] = order
    if backward[0] is not None:
        sizes = k_block, q_block, num_keys, num_queries
        prepared.transpose = Plan.of_known(
            backward[0], backward[1], *sizes, uniform=backward_order is None, similar_rows=alike
        )
        if backward_order is not None:
            prepared.transpose.prepared.orders[batch, key_heads] = backward_order
    if box_offsets is not None:
        prepared.boxes = Boxes(box_offsets, boxes)
    if bounds is not None:
        prepared.packed = Packed(bounds, packed_blocks, *packing)
    return plan
