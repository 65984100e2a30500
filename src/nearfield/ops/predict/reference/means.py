"""The mean of every block of tokens, and how well it stands for them: the specification."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from nearfield.layout import num_represented


def block_means(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Means over blocks of consecutive tokens, and their likeness: the mean cosine of the tokens with them.

    Args:
        x: `[B, H, N, D]`.

    Returns:
        `[B, H, blocks, D]` and `[B, H, blocks]`, float32 (float64 of float64).
    """
    wide = x if x.dtype == torch.float64 else x.float()
    counts = num_represented(x.shape[2], block, 1, x.device).to(wide.dtype)
    means = _sums(wide, block) / counts[:, None]
    cosine = cosine_similarity(wide, means.repeat_interleave(block, 2)[:, :, : x.shape[2]], dim=-1)
    return means, _sums(cosine[..., None], block)[..., 0] / counts


def _sums(x: Tensor, block: int) -> Tensor:
    blocks: Tensor = pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))
    return blocks.sum(3)
