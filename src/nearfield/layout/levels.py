"""The layout of pooled levels: how long they are, what they stand for, and where they stand.

Level 0 is the tokens. A token of level `l` stands for `block` consecutive tokens of level `l - 1`, the last one perhaps
for fewer; so token `i` of level `l` stands for the tokens from `i * block**l` on. Pooled levels are kept one after
another in one tensor, each padded to a multiple of the block.
"""

import torch
from torch import Tensor


def level_length(length: int, block: int, level: int) -> int:
    """Tokens of a level above `length` tokens."""
    return -(-length // int(block**level))


def most_levels(length: int, block: int) -> int:
    """The highest level that still has at least a block of tokens, and at least 1."""
    level = 1
    while level_length(length, block, level + 1) >= block:
        level += 1
    return level


def num_represented(length: int, block: int, level: int, device: torch.device | str = "cpu") -> Tensor:
    """How many of `length` tokens each token of a level stands for."""
    size = block**level
    counts = torch.full((level_length(length, block, level),), size, device=device)
    # Written, not computed from where each begins: torch.compile's GPU code cannot join levels that are.
    counts[-1:] = (length - 1) % size + 1
    return counts


def level_starts(length: int, block: int, levels: int) -> list[int]:
    """Where levels 1 to `levels` begin in the pooled tensor, and where it ends."""
    starts = [0]
    for level in range(1, levels + 1):
        starts.append(starts[-1] + level_length(length, block, level + 1) * block)
    return starts
