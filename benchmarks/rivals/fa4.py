"""FlashAttention-4 (CuTe), dense and with block lists. The sparse backward is the one that is not deterministic."""

from functools import partial
from typing import Any

import torch
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from benchmarks.rivals import Rival, uniform_lists
from nearfield import Plan, planning
from nearfield.cli.check import Inputs


def calls(inputs: Inputs, plan: Plan, grad_out: Tensor | None) -> dict[str, Rival]:
    full = planning.full(plan.num_queries, plan.num_keys, device=plan.device)
    lists = uniform_lists(plan)
    forward = _tensors(
        lists, torch.full(lists.shape[:3], lists.shape[3], dtype=torch.int32, device=lists.device), plan
    )
    query, key, value = (x.transpose(1, 2).contiguous() for x in inputs)  # heads behind tokens
    if grad_out is None:
        return {
            "fa4 dense": Rival(partial(_forward, query, key, value), full),
            "fa4": Rival(partial(_forward, query, key, value, block_sparse_tensors=forward), plan),
        }
    back = _tensors(*_transposed(lists, plan.num_columns), plan)
    gradient = grad_out.transpose(1, 2).contiguous()
    dense = _flash_attn_fwd(query, key, value, return_lse=True)[:2]
    sparse = _flash_attn_fwd(query, key, value, block_sparse_tensors=forward, return_lse=True)[:2]
    return {
        "fa4 dense": Rival(partial(_backward, query, key, value, dense, gradient), full),
        "fa4": Rival(
            partial(_backward, query, key, value, sparse, gradient, block_sparse_tensors=back), plan
        ),
    }


def _forward(*inputs: Tensor, **lists: Any) -> Tensor:
    out: Tensor = _flash_attn_fwd(*inputs, **lists)[0]
    return out.transpose(1, 2)


def _backward(
    query: Tensor, key: Tensor, value: Tensor, result: tuple[Tensor, Tensor], gradient: Tensor, **lists: Any
) -> tuple[Tensor, ...]:
    gradients = _flash_attn_bwd(query, key, value, result[0], gradient, result[1], **lists)
    return tuple(each.transpose(1, 2) for each in gradients[:3])


def _tensors(lists: Tensor, counts: Tensor, plan: Plan) -> Any:
    """Blocks that are read whole; none is masked."""
    none = torch.zeros(*counts.shape, 1, dtype=torch.int32, device=counts.device)
    return BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(counts),
        mask_block_idx=none,
        full_block_cnt=counts,
        full_block_idx=lists,
        block_size=(plan.q_block, plan.k_block),
    )


def _transposed(lists: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """For each block of keys, which blocks of queries read it, padded; and how many do."""
    shape = *lists.shape[:3], columns
    mask = torch.zeros(shape, dtype=torch.bool, device=lists.device).scatter_(3, lists.long(), True).mT
    counts = mask.sum(-1).to(torch.int32)
    order = (~mask).to(torch.int8).argsort(dim=-1, stable=True).to(torch.int32)
    return order[..., : int(counts.max())].contiguous(), counts.contiguous()
