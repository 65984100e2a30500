"""How much each block of queries reads of each block of keys under full attention: the specification."""

import torch
from torch import Tensor
from torch.nn.functional import pad

_CHUNK_CELLS = 2**24


def column_statistics(
    query: Tensor, key: Tensor, lse: Tensor, q_block: int, k_block: int, scale: float
) -> tuple[Tensor, Tensor]:
    """For each block of queries and of keys the largest weight in it, and the mass: the weights' sum per query.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, G, M, D]`, `G` dividing `H`.
        lse: `[B, H, N]`, the log of the sum of each query's weights.

    Returns:
        Two `[B, H, rows, columns]`, float32 (float64 of float64). The masses of a row add up to 1 if `lse` is that of
        full attention. The map of weights is never whole in memory.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    keys = _wide(key).repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    rows = max(1, _CHUNK_CELLS // (num_keys * q_block * query.shape[0] * query.shape[1])) * q_block
    parts = []
    for start in range(0, num_queries, rows):
        some = slice(start, start + rows)
        weights = torch.exp(scale * _wide(query[:, :, some]) @ keys - lse[:, :, some, None])
        parts.append(_reduced(weights, q_block, k_block))
    maxima, masses = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    sizes = torch.full((maxima.shape[2], 1), q_block, device=query.device, dtype=masses.dtype)
    sizes[-1] = num_queries - (maxima.shape[2] - 1) * q_block
    return maxima, masses / sizes


def _reduced(weights: Tensor, q_block: int, k_block: int) -> tuple[Tensor, Tensor]:
    rows, columns = weights.shape[2:]
    padded = pad(weights, (0, -columns % k_block, 0, -rows % q_block))
    cells = padded.unflatten(3, (-1, k_block)).unflatten(2, (-1, q_block))
    return cells.amax((3, 5)), cells.sum((3, 5))


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
