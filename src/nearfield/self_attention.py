"""What the layers that methods offer to models of one's own have in common: projections, and masks of keys."""

import torch
from torch import Tensor, nn

from nearfield._checks import (
    check_int,
    check_same_device,
    check_tensor,
    shape_of,
    wrong_type,
    wrong_value,
)


class Projections(nn.Module):
    """The projections of a self-attention layer, and how tokens become heads."""

    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        check_int("dim", dim, at_least=1)
        check_int("heads", heads, at_least=1)
        if dim % heads:
            wrong_value("dim", f"be a multiple of `heads` ({heads})", dim)
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, heads, N, dim / heads]` of tokens `[B, N, dim]`."""
        # Taken apart by `unbind`, gradients are put together in place; selected one by one, they would be added up.
        parts = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value

    def joined(self, out: Tensor) -> Tensor:
        """What the heads have read, as tokens again."""
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected


def mask_bias(key_mask: Tensor, query: Tensor) -> Tensor:
    """A bias `[B, 1, N]` that hides the keys where a mask `[B, N]` is False; there are as many keys as queries."""
    check_tensor("key_mask", key_mask, dims=2, hint="Expected [batch, tokens].")
    if key_mask.dtype != torch.bool:
        wrong_type("key_mask", "be bool", key_mask.dtype, "True marks keys that may be read.")
    batch, tokens = query.shape[0], query.shape[2]
    if key_mask.shape[0] not in (1, batch) or key_mask.shape[1] != tokens:
        wrong_value("key_mask", f"have shape [1 or {batch}, {tokens}]", shape_of(key_mask))
    check_same_device("key_mask", key_mask, "query", query.device)
    bias = torch.zeros(key_mask.shape, dtype=torch.float32, device=key_mask.device)
    return bias.masked_fill(~key_mask, float("-inf")).unsqueeze(1)
