"""The ascending lists of a mask, closed up one behind the other: the specification."""

import torch
from torch import Tensor


def lists_of(mask: Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """The columns each row keeps, in ascending order, row after row.

    Args:
        mask: `[b, h, rows, columns]` bool.
        offsets: `[b, h, rows + 1]` int32, where each row begins; the last is where all end, at most `capacity`.

    Returns:
        `[b, h, capacity]` int32, zero behind the last row.
    """
    places = offsets[..., :-1, None] + mask.cumsum(-1) - 1
    places = torch.where(mask, places, capacity)  # one place too many, for all that is not kept
    columns = torch.arange(mask.shape[-1], device=mask.device, dtype=torch.int32).expand_as(mask)
    blocks = columns.new_zeros(*mask.shape[:2], capacity + 1)
    blocks.scatter_(-1, places.flatten(2).long(), columns.flatten(2))
    return blocks[..., :capacity].contiguous()
