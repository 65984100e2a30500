"""Choosing tokens that stand for the others: the specification of the kernel.

Facility location: of the tokens of a region, a few are chosen such that the sum over all of them of the best similarity
to a chosen one is large. Greedy: whoever adds most is chosen next, which is never below 1 - 1/e of the best.

Ties are common: two tokens that help each other and nobody else add the same. So similarities are counted in whole
steps, whose sums are exact: a tie is a tie in whatever order they are added, on every device.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

_STEPS = 2**15
"""Steps from a similarity of 0 to 1."""

_NEEDS_NOBODY = 2**30


def choose_destinations(features: Tensor, lengths: Tensor, counts: Tensor, most: int) -> Tensor:
    """The tokens chosen in every region; of equal gains the lower id wins.

    Args:
        features: `[B, regions, n, D]`; similarity is the cosine. One that is NaN counts as -1, the least there is.
        lengths: `[regions]`: how many of the `n` tokens exist. What stands after them is never looked at.
        counts: `[regions]`: how many to choose; at most all that exist are.
        most: the largest of `counts`.

    Returns:
        `[B, regions, most]` int32 ids inside the region, ascending, each once; `n` where a region chose fewer.
    """
    n = features.shape[2]
    similarity = _similarity(features)
    token = torch.arange(n, device=features.device)
    exists = (token < lengths[:, None]).expand(similarity.shape[:3])
    # How well each token is represented so far.
    covered = torch.where(exists, -_STEPS, _NEEDS_NOBODY).to(torch.int32)
    is_chosen = torch.zeros_like(exists)
    for step in range(min(most, n)):
        gain = (similarity - covered[:, :, None]).clamp(min=0).sum(-1)
        best = gain.masked_fill(is_chosen | ~exists, -1).argmax(-1, keepdim=True)
        wants_more = step < torch.minimum(lengths, counts)[:, None]
        is_chosen = is_chosen | ((token == best) & wants_more)
        row = similarity.gather(2, best[..., None].expand(-1, -1, -1, n))[:, :, 0]
        covered = torch.maximum(covered, row)
    ids = torch.where(is_chosen, token, n).sort(-1).values[..., :most]
    return pad(ids, (0, most - ids.shape[-1]), value=n).to(torch.int32)


def _similarity(features: Tensor) -> Tensor:
    """Cosines in whole steps, `[B, regions, n, n]` int32."""
    unit = normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
    cosine = (unit @ unit.mT).nan_to_num(nan=-1.0)
    return torch.floor(cosine * _STEPS + 0.5).to(torch.int32)
