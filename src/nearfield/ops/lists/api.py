"""Lists of a block mask, as an operator: a kernel makes them where one can."""

import torch
from torch import Tensor

from nearfield.ops import _triton
from nearfield.ops.lists import reference


@torch.library.custom_op("nearfield::lists_of", mutates_args=())
def _lists_of(mask: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    module = (_triton.helper("lists", mask) if mask.is_cuda else None) or reference
    with torch.cuda.device_of(mask):
        blocks: Tensor = module.lists_of(mask, offsets, capacity)
    return blocks


@_lists_of.register_fake
def _(mask: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    return offsets.new_empty(*mask.shape[:2], capacity)
