"""The method as a function of tensors and as a layer, for models of one's own."""

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
from nearfield._types import Impl
from nearfield.geometry import Geometry, check_geometry
from nearfield.methods.hilbert import Hilbert


def hilbert_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: Geometry,
    layer: int,
    *,
    method: Hilbert | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Attention of one layer for tokens that already stand in the order of `method.ordering(geometry)`.

    Order the tokens (and their rotary table) once before the first layer and bring them back after the last:
    `ordering.enter(x)`, `ordering.leave(y)`. `dense_layers` and `dense_steps` are the model's affair and not looked at.

    Args:
        query, key, value: `[B, H, N, D]`, with `N = geometry.num_tokens`.
        layer: which layer this is; the tiles slide with it.
        method: its fields; the defaults of `Hilbert` if left out.
        key_mask: `[B, N]` bool, False for keys that nobody may read (padded text). Summaries of a far field hold
            image tokens whatever it says.
    """
    check_geometry(geometry)
    check_tensor("query", query, dims=4, hint="Expected [batch, heads, tokens, head_dim].")
    if query.shape[2] != geometry.num_tokens:
        wrong_value(
            "query", f"have the {geometry.num_tokens} tokens of the geometry ({geometry})", query.shape[2]
        )
    bias = None if key_mask is None else _checked_mask_bias(key_mask, query)
    reader = (method or Hilbert()).reader(geometry, layer, heads=query.shape[1], device=query.device)
    return reader.attend(query, key, value, key_bias=bias, scale=scale, impl=impl).out


def _mask_bias(key_mask: Tensor) -> Tensor:
    """A bias `[B, 1, N]` that hides the keys where a mask `[B, N]` is False."""
    check_tensor("key_mask", key_mask, dims=2, hint="Expected [batch, tokens].")
    if key_mask.dtype != torch.bool:
        wrong_type("key_mask", "be bool", key_mask.dtype, "True marks keys that may be read.")
    bias = torch.zeros(key_mask.shape, dtype=torch.float32, device=key_mask.device)
    return bias.masked_fill(~key_mask, float("-inf")).unsqueeze(1)


def _checked_mask_bias(key_mask: Tensor, query: Tensor) -> Tensor:
    bias = _mask_bias(key_mask)
    batch, tokens = query.shape[0], query.shape[2]
    if key_mask.shape[0] not in (1, batch) or key_mask.shape[1] != tokens:
        wrong_value("key_mask", f"have shape [1 or {batch}, {tokens}]", shape_of(key_mask))
    check_same_device("key_mask", key_mask, "query", query.device)
    return bias


class HilbertAttention(nn.Module):
    """A self-attention layer for models of one's own: projections around `hilbert_attention`.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        layer: which layer of the model this is; the tiles slide with it.
        method: fields of the method.
    """

    def __init__(
        self, dim: int, heads: int, layer: int, method: Hilbert | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        check_int("dim", dim, at_least=1)
        check_int("heads", heads, at_least=1)
        if dim % heads:
            wrong_value("dim", f"be a multiple of `heads` ({heads})", dim)
        check_int("layer", layer, at_least=0)
        self.heads, self.layer, self.method = heads, layer, method or Hilbert()
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.to_out = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, geometry: Geometry, key_mask: Tensor | None = None) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        query, key, value = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = hilbert_attention(
            query, key, value, geometry, self.layer, method=self.method, key_mask=key_mask
        )
        projected: Tensor = self.to_out(out.transpose(1, 2).flatten(2))
        return projected
