"""Block-sparse attention of cuDNN's front end, in bfloat16 and, forward, in FP8 with its quantisation."""

from functools import partial
from typing import Any

from cudnn.block_sparse_attention import (
    block_sparse_attention_backward,
    block_sparse_attention_forward,
    block_sparse_attention_fp8_forward,
)
from torch import Tensor

from benchmarks.rivals import Rival, uniform_lists
from nearfield import Plan
from nearfield.cli.check import Inputs


def calls(inputs: Inputs, plan: Plan, grad_out: Tensor | None) -> dict[str, Rival]:
    lists = uniform_lists(plan)
    if plan.q_block != plan.k_block or plan.num_queries % plan.q_block or lists.shape[3] % 2:
        raise NotImplementedError("it reads an even number of square blocks of a whole number of them")
    given = lists, lists.shape[3]
    blocks = {"sparse_block_size": plan.q_block}
    if grad_out is None:
        kinds = {"bsa": block_sparse_attention_forward, "bsa fp8": block_sparse_attention_fp8_forward}
        return {
            name: Rival(partial(_forward, kind, *inputs, *given, **blocks), plan)
            for name, kind in kinds.items()
        }
    result = block_sparse_attention_forward(*inputs, *given, **blocks)
    saved = result["o_tensor"], result["lse_tensor"]
    return {"bsa": Rival(partial(_backward, grad_out, *inputs, *saved, *given, **blocks), plan)}


def _forward(kind: Any, *given: Any, **blocks: int) -> Tensor:
    out: Tensor = kind(*given, **blocks)["o_tensor"]
    return out


def _backward(*given: Any, **blocks: int) -> tuple[Tensor, ...]:
    return tuple(block_sparse_attention_backward(*given, **blocks).values())[:3]
