"""What reading windows changes with the query, to first order: a matrix for each head, in plain torch.

To a query, the value of a window is the mean of its values, with tokens weighed as that query weighs them. Summaries
weigh them as the mean query does. Around the mean query that value has the slope `scale * cov(keys, values)`. One slope
stands for all windows of a head: their mean, each window counting as much as the blocks of queries that read it weigh
it. A window in which scores differ much from query to query is far from linear, so it counts less.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.ops.windows.reference import tokens_of, window_places


class Slope(NamedTuple):
    """How the value of all windows together changes with the query.

    Args:
        matrix: `[B, H, D, D]`, scaled: `(query - centre) @ matrix` is the change.
        centre: the mean query, `[B, H, 1, D]`.
        is_summarised: `[N]` bool, the tokens in windows; the change is that of their queries alone.
    """

    matrix: Tensor
    centre: Tensor
    is_summarised: Tensor

    def changes(self, query: Tensor) -> Tensor:
        """The change of every query, `[B, H, N, D]`, in the precision of the matrix."""
        away = (query.to(self.matrix.dtype) - self.centre).masked_fill(~self.is_summarised[:, None], 0)
        return away @ self.matrix


def slope_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    moments: Tensor,
    bias: Tensor,
    starts: Tensor,
    sizes: Tensor,
    window: int,
    readers: Tensor,
    q_block: int,
    scale: float,
) -> Slope:
    """Differentiable.

    Args:
        query, key, value: `[B, H, N, D]`, and twice `[B, G, N, D]`.
        moments: the means of the queries in windows and of their squares, `[2, B, G, D]`.
        bias: of the windows, `[B, H, windows]`, as `weighted_windows` gives it.
        starts, sizes, window: see `weighted_windows`.
        readers: `[1, 1 or H, rows, windows]` bool: which block of `q_block` queries reads which window.
    """
    shared_by = query.shape[1] // key.shape[1]
    centre, square = moments.unbind()
    keys, values = (tokens_of(x, starts, sizes, window).to(moments.dtype) for x in (key, value))
    place, exists = window_places(starts, sizes, window)
    scores = scale * torch.einsum("bgwnd,bgd->bgwn", keys, centre)
    weights = scores.masked_fill(~exists, float("-inf")).softmax(dim=3)
    mean_key, mean_value = (torch.einsum("bgwn,bgwnd->bgwd", weights, x) for x in (keys, values))
    variance = torch.einsum("bgwn,bgwnd->bgwd", weights, keys.square()) - mean_key.square()
    spread = (square - centre.square()).clamp(min=0)
    unsteady = scale**2 * torch.einsum("bgwd,bgd->bgw", variance.clamp(min=0), spread)

    counted = (_shares(query, mean_key, bias, readers, q_block, scale)).unflatten(1, (-1, shared_by))
    total = counted.sum(dim=3).clamp(min=torch.finfo(counted.dtype).tiny)
    counted = counted / (1 + unsteady)[:, :, None] / total[..., None]
    of_tokens = (counted[..., None] * weights[:, :, None]).flatten(3)
    products = (keys.flatten(2, 3)[:, :, None] * of_tokens[..., None]).mT @ values.flatten(2, 3)[:, :, None]
    matrix = products - (mean_key[:, :, None] * counted[..., None]).mT @ mean_value[:, :, None]
    is_summarised = torch.zeros(query.shape[2] + 1, dtype=torch.bool, device=query.device)
    is_summarised[torch.where(exists, place, query.shape[2]).flatten()] = True
    return Slope(
        scale * matrix.flatten(1, 2),
        centre.repeat_interleave(shared_by, dim=1).unsqueeze(2),
        is_summarised[:-1],
    )


def _shares(
    query: Tensor, mean_key: Tensor, bias: Tensor, readers: Tensor, q_block: int, scale: float
) -> Tensor:
    """How much the blocks of queries that read a window weigh it among all windows, `[B, H, windows]`."""
    rows = readers.shape[2]
    lengths = torch.full((rows,), q_block, device=query.device)
    lengths[-1] = query.shape[2] - (rows - 1) * q_block
    padded = torch.nn.functional.pad(query.to(mean_key.dtype), (0, 0, 0, rows * q_block - query.shape[2]))
    queries = padded.unflatten(2, (rows, q_block)).sum(dim=3) / lengths[:, None]
    shared_by = query.shape[1] // mean_key.shape[1]
    logits = scale * queries @ mean_key.repeat_interleave(shared_by, dim=1).mT + bias[:, :, None]
    found: Tensor = (logits.softmax(dim=3) * readers).sum(dim=2)
    return found
