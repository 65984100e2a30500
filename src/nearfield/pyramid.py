"""Pooled levels of tokens, and coarse-to-fine choosing of blocks among them.

Level 0 is the tokens. A token of level `l` is the mean of `block` consecutive tokens of level `l - 1`; the last one of
a level may stand for fewer. So token `i` of level `l` stands for the tokens `i * block**l ...` of level 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield import kernels
from nearfield._types import Impl
from nearfield.reference import select as reference


def level_length(length: int, block: int, level: int) -> int:
    """Tokens of a level above `length` tokens."""
    return -(-length // int(block**level))


def num_represented(length: int, block: int, level: int, device: torch.device | str = "cpu") -> Tensor:
    """How many tokens of level 0 each token of a level stands for."""
    size = block**level
    starts = torch.arange(0, length, size, device=device)
    return (length - starts).clamp(max=size)


def most_levels(length: int, block: int) -> int:
    """The highest level that still has at least a block of tokens, and at least 1."""
    level = 1
    while level_length(length, block, level + 1) >= block:
        level += 1
    return level


def pooled(x: Tensor, block: int, levels: int) -> tuple[Tensor, ...]:
    """Levels 1 to `levels` of `[B, H, N, D]`, each a mean over what it stands for, summed in float32 at least."""
    length = x.shape[2]
    wide = torch.promote_types(x.dtype, torch.float32)
    sums, means = x, []
    for level in range(1, levels + 1):
        short = -sums.shape[2] % block
        if short:  # padding copies, even by nothing
            sums = pad(sums, (0, 0, 0, short))
        sums = sums.unflatten(2, (-1, block)).sum(dim=3, dtype=wide)
        means.append((sums / num_represented(length, block, level, x.device).to(wide)[:, None]).to(x.dtype))
    return tuple(means)


def select_blocks(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    block: int,
    topk: int,
    *,
    keep_own: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, ...]:
    """The keys that queries choose at each level, from the highest down: each looks only at what its parent chose.

    Args:
        queries, keys: levels 1 to L (`pooled`).
        topk: how many keys each query chooses.
        keep_own: a query always chooses the key at its own place.

    Returns:
        For levels 1 to L, `[B, H, n, min(topk, m)]` int32 ids of keys, ascending; unused places hold `m`, the number of
        keys of that level. A key of level 1 is a block of tokens. Never waits for the device, has no gradient.
    """
    chosen: list[Tensor] = []
    parents = None
    with torch.no_grad():
        for query, key in zip(reversed(queries), reversed(keys), strict=True):
            candidates = key.shape[2] if parents is None else parents.shape[3] * block
            count = min(topk, key.shape[2])
            select = _implementation(query, candidates, impl).select
            parents = select(query.detach(), key.detach(), parents, block, count, keep_own)
            chosen.append(parents)
    return tuple(reversed(chosen))


def _implementation(query: Tensor, candidates: int, impl: Impl) -> Any:
    """The module whose `select` runs: the kernel on a GPU where it can, plain torch otherwise."""
    if impl in ("grouped", "reference") or (impl == "auto" and not query.is_cuda):
        return reference
    return kernels.select_module(query, candidates) or reference
