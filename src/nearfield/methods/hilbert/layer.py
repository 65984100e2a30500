"""The method as a function of tensors and as a layer, for models of one's own."""

from torch import Tensor

from nearfield._checks import check_int, check_tensor, wrong_value
from nearfield._types import Impl
from nearfield.geometry import Geometry, check_geometry
from nearfield.methods.hilbert import Hilbert
from nearfield.self_attention import Projections, mask_bias


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
    bias = None if key_mask is None else mask_bias(key_mask, query)
    reader = (method or Hilbert()).reader(geometry, layer, heads=query.shape[1], device=query.device)
    return reader.attend(query, key, value, key_bias=bias, scale=scale, impl=impl).out


class HilbertAttention(Projections):
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
        super().__init__(dim, heads, bias)
        check_int("layer", layer, at_least=0)
        self.layer, self.method = layer, method or Hilbert()

    def forward(self, x: Tensor, geometry: Geometry, key_mask: Tensor | None = None) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        query, key, value = self.heads_of(x)
        out = hilbert_attention(
            query, key, value, geometry, self.layer, method=self.method, key_mask=key_mask
        )
        return self.joined(out)
