"""The sum over a plan, written as dense attention: the specification of `nearfield.attend`.

Every pair gets a logit, `scale * query . key + key_bias + log(times read)`, and a pair that is not read gets `-inf`.
Half-precision inputs are computed in float32 and rounded once, at the end. Being dense it multiplies values that are
not read by zero: a NaN among them shows here, and only here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nearfield._types import Attended, Gradients
from nearfield.ops.attention.parts import KeyValuePart, PartGradients, differentiate_in_turn


def attend_forward(query: Tensor, part: KeyValuePart, scale: float) -> Attended:
    logits = _logits(query, part, scale)
    lse = torch.logsumexp(logits, -1)
    out = _weights(logits, lse) @ _per_query_head(part.value, query)
    return Attended(_like(query, out), lse)


def attend_backward(
    grads: Attended,
    query: Tensor,
    parts: Sequence[KeyValuePart],
    attended: Attended,
    scale: float,
    learned: Sequence[bool],
    pooling: object = None,
) -> PartGradients:
    del learned, pooling  # every bias gets its gradient, and means theirs
    return differentiate_in_turn(grads, query, parts, attended, scale, attend_forward, _backward_of_part)


def _backward_of_part(
    grads: Attended, query: Tensor, part: KeyValuePart, attended: Attended, scale: float
) -> Gradients:
    (grad_out, grad_lse), (out, lse) = grads, attended
    weights = _weights(_logits(query, part, scale), lse)
    grad_out, out_wide = _wide(grad_out), _wide(out)
    # The log of nothing has no gradient; merging two of them by lse gives NaN, which must not spread.
    delta = ((grad_out * out_wide).sum(-1) - grad_lse).masked_fill(lse == -torch.inf, 0)
    grad_weights = grad_out @ _per_query_head(part.value, query).mT
    # The softmax derivative; lse adds its own gradient to every logit of its row, in proportion to the weight.
    grad_logits = weights * (grad_weights - delta[..., None])
    grad_query = scale * grad_logits @ _per_query_head(part.key, query)
    grad_key = scale * _sum_per_key_head(grad_logits.mT @ _wide(query), part.key)
    grad_value = _sum_per_key_head(weights.mT @ grad_out, part.value)
    return Gradients(
        _like(query, grad_query),
        _like(part.key, grad_key),
        _like(part.value, grad_value),
        None if part.key_bias is None else grad_logits.sum(-2),
    )


def _logits(query: Tensor, part: KeyValuePart, scale: float) -> Tensor:
    """`[B, H, N, M]`, `-inf` where a query does not read a key."""
    key, _, plan, key_bias, positions = part
    logits = scale * _wide(query) @ _per_query_head(key, query).mT
    times_read = plan.pair_counts()
    logits = (logits + times_read.to(logits.dtype).log()).masked_fill(times_read == 0, -torch.inf)
    if key_bias is not None:
        logits = logits + key_bias[:, :, None, :]
    if positions is not None:
        visible = positions.key[:, None, None, :] <= positions.query[:, None, :, None]
        logits = logits.masked_fill(~visible, -torch.inf)
    return logits


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """Softmax; a row that reads nothing has weights of zero."""
    return torch.softmax(logits, -1).masked_fill((lse == -torch.inf)[..., None], 0)


def _per_query_head(key: Tensor, query: Tensor) -> Tensor:
    """Keys or values once per query head: `[B, G, M, D]` to `[B, H, M, D]`."""
    return _wide(key).repeat_interleave(query.shape[1] // key.shape[1], 1)


def _sum_per_key_head(grad: Tensor, key: Tensor) -> Tensor:
    batch, key_heads, num_keys, dim = key.shape
    return grad.view(batch, key_heads, grad.shape[1] // key_heads, num_keys, dim).sum(2)


def _like(tensor: Tensor, result: Tensor) -> Tensor:
    """The result in the dtype and memory layout of `tensor`."""
    return torch.empty_like(tensor).copy_(result)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
