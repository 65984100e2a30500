"""torch's flex_attention with the pattern of a plan: what a user would write without this library."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.rivals import Rival
from nearfield import Plan
from nearfield.cli.check import Inputs

_BLOCK = 128
"""Flex's own default: blocks of 128 x 128 tokens that are read whole, masked, or not at all."""


def block_mask(plan: Plan) -> BlockMask:
    """The plan as flex wants it. Blocks that are read whole carry no mask; the others look every pair up."""
    reads = plan.block_counts() > 0
    cells = _in_blocks(plan, reads)
    whole = cells.all(dim=5).all(dim=3)
    whole[..., -1, :] &= plan.num_queries % _BLOCK == 0  # a ragged block is masked
    whole[..., -1] &= plan.num_keys % _BLOCK == 0
    partial = cells.any(dim=5).any(dim=3) & ~whole
    heads, q_block, k_block = reads.shape[1], plan.q_block, plan.k_block

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        head = h if heads > 1 else h * 0
        return reads[0, head, q // q_block, k // k_block]

    return BlockMask.from_kv_blocks(
        *_lists(partial),
        *_lists(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(plan.num_queries, plan.num_keys),
    )


def calls(inputs: Inputs, plan: Plan, grad_out: Tensor | None) -> dict[str, Rival]:
    if grad_out is not None:
        raise NotImplementedError("its backward is not timed")
    return {"flex": Rival(compiled(inputs, plan), plan)}


def compiled(inputs: Inputs, plan: Plan) -> Callable[[], Tensor]:
    """One call, compiled for these shapes alone: with dynamic ones it would be slower."""
    torch._dynamo.reset()
    mask = block_mask(plan)
    function = torch.compile(flex_attention, dynamic=False)
    return lambda: function(*inputs, block_mask=mask)


def _in_blocks(plan: Plan, reads: Tensor) -> Tensor:
    """What is read inside each of flex's blocks: `[b, h, rows, grains, columns, grains]`; past the end nothing is."""
    grains = [math.gcd(block, _BLOCK) for block in (plan.q_block, plan.k_block)]
    fine, padding = reads, list[int]()
    for dim, grain, block, length in zip(
        (-2, -1), grains, (plan.q_block, plan.k_block), (plan.num_queries, plan.num_keys), strict=True
    ):
        count = -(-length // grain)
        fine = fine.repeat_interleave(block // grain, dim).narrow(dim, 0, count)
        padding = [0, -count % (_BLOCK // grain), *padding]
    fine = torch.nn.functional.pad(fine, padding)
    split: Tensor = fine.unflatten(-1, (-1, _BLOCK // grains[1])).unflatten(-3, (-1, _BLOCK // grains[0]))
    return split


def _lists(cells: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row reads, and which, those first."""
    order = cells.int().argsort(dim=-1, descending=True, stable=True)
    return cells.sum(dim=-1, dtype=torch.int32), order.to(torch.int32)
