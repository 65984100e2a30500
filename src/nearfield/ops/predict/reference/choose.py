"""Choosing, of every row of scores, the columns that are worth reading: the specification."""

import torch
from torch import Tensor


def choose(
    scores: Tensor, whole: Tensor, always: Tensor, *, mass: float | None, count: int
) -> tuple[Tensor, Tensor]:
    """The fewest columns that hold `mass` of a row's softmax, or the `count` best; of equal ones the first.

    Args:
        scores: `[B, H, rows, columns]`. A row whose softmax is not a number is kept whole.
        whole: `[B, H, rows]` bool, rows of which everything is kept.
        always: `[B, G, columns]` bool, columns that every row keeps; `G` divides `H`.
        mass: above 0, below 1; None: `count` decides.

    Returns:
        What is kept, `[B, H, rows, columns]` bool, and the mass that is not, `[B, H, rows]`.
    """
    weights = torch.softmax(scores, -1)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    if mass is None:
        chosen = (torch.arange(scores.shape[-1], device=scores.device) < count).expand_as(scores)
    else:
        ranked = weights.gather(-1, order)
        # The mass before a column: the one that reaches the wanted mass is still taken.
        chosen = ranked.cumsum(-1) - ranked < mass
        chosen[..., 0] = True
    keep = torch.zeros_like(chosen).scatter(-1, order, chosen)
    is_number = weights.sum(-1).isfinite()
    always = always.repeat_interleave(scores.shape[1] // always.shape[1], 1)
    keep = keep | always[:, :, None] | (whole | ~is_number)[..., None]
    return keep, weights.masked_fill(keep, 0).sum(-1)
