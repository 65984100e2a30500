"""Parts of one softmax: keys with a plan of their own, how results are merged, and how they are differentiated."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._types import Attended, Gradients, Positions
from nearfield.plan import Plan


class KeyValuePart(NamedTuple):
    """Keys and values, and who reads them.

    Args:
        key, value: `[B, G, M, D]`.
        plan: for these keys alone.
        key_bias: added to their logits; see `attend`.
        positions: see `attend`.
    """

    key: Tensor
    value: Tensor
    plan: Plan
    key_bias: Tensor | None = None
    positions: Positions | None = None


class PartGradients(NamedTuple):
    """The gradients of a call of several parts.

    Args:
        query: of the queries, summed over all parts.
        parts: of each part's key, value and bias; None where a gradient is not wanted, or is held by another part's.
    """

    query: Tensor
    parts: list[tuple[Tensor | None, Tensor | None, Tensor | None]]


def merge_attended(first: Attended, second: Attended) -> Attended:
    """What reading both key sets at once would have given: each part weighs as much as its `lse` says.

    The two must read different keys, else those in both count twice. Differentiable, except in rows that read nothing
    in either. The shares are rounded to the precision of the outputs: one pass over them, no wider copy.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    # Which part of the weights is the second's. Of two empty rows neither has any, and both give zeros.
    share = torch.sigmoid((second.lse - first.lse).masked_fill(lse == float("-inf"), 0))
    return Attended(torch.lerp(first.out, second.out, share.to(first.out.dtype).unsqueeze(-1)), lse)


ForwardOfPart = Callable[..., Attended]
"""`(query, part, scale)`."""
BackwardOfPart = Callable[..., Gradients]
"""`(grads, query, part, attended, scale)`."""


def differentiate_in_turn(
    grads: Attended,
    query: Tensor,
    parts: Sequence[KeyValuePart],
    attended: Attended,
    scale: float,
    forward: ForwardOfPart,
    backward: BackwardOfPart,
) -> PartGradients:
    """The gradients of several parts, by what reads and differentiates one.

    With `s_p = exp(lse_p - lse)`, the share of part `p` in the weights of a query, `out = sum of s_p out_p`. So the
    part's output has the gradient `s_p grad_out`, and its `lse` has `s_p (grad_lse + grad_out . (out_p - out))`. What
    each part gave is computed again: it was not kept.
    """
    of_query: Tensor | None = None
    of_parts: list[tuple[Tensor | None, Tensor | None, Tensor | None]] = []
    for part in parts:
        given, own = (grads, attended)
        if len(parts) > 1:
            own = forward(query, part, scale)
            given = gradients_of_part(grads, own, attended)
        found = backward(given, query, part, own, scale)
        of_query = found.query if of_query is None else of_query + found.query
        of_parts.append((found.key, found.value, found.key_bias))
    assert of_query is not None
    return PartGradients(of_query, of_parts)


def gradients_of_part(grads: Attended, part: Attended, whole: Attended) -> Attended:
    """The gradients of what one part gave, or several along a new first dimension, from those of the whole."""
    grad_out, grad_lse = grads.out.to(part.lse.dtype), grads.lse
    # A row that read nothing in this part has no share; minus infinity from itself would be no number.
    share = torch.exp((part.lse - whole.lse).masked_fill(part.lse == -torch.inf, -torch.inf))
    change = torch.linalg.vecdot(grad_out, part.out.to(grad_out.dtype) - whole.out.to(grad_out.dtype))
    return Attended(share.unsqueeze(-1) * grad_out, share * (grad_lse + change))
