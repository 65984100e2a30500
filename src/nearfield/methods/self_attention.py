"""A method in a model of one's own: as a function of queries, keys and values, and as a self-attention layer."""

import torch
from torch import Tensor, nn

from nearfield._checks import check_int, check_same_device, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Impl
from nearfield.layout import Geometry, check_geometry
from nearfield.methods.base import Method
from nearfield.ops import check_tensors


def attend_with(
    method: Method,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    geometry: Geometry | None = None,
    layer: int = 0,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
    **extra: Tensor,
) -> Tensor:
    """What one layer reads, for tokens that already stand in the order of `method.ordering(geometry)`.

    Order the tokens (and their rotary table) once before the first layer and bring them back after the last:
    `ordering.enter(x)`, `ordering.leave(y)`. `dense_layers` and `dense_steps` are the model's affair and not looked at.

    Args:
        query: `[B, H, N, D]`, with `N = geometry.num_tokens`.
        key, value: `[B, G, M, D]`; `M` is `N`, or, without a geometry, what the method can do.
        geometry: where text and images stand; by default the queries are one line of image tokens.
        layer: which layer this is, where layers differ.
        key_mask: `[B, M]` bool, False for keys that nobody may read (padded text). Summaries hold image tokens whatever
            it says. Needs a geometry.
        extra: further arguments that the method takes, as its `module` gives them.
    """
    _check_method(method)
    check_tensors(query, key, value)
    for name, x in (("query", query), ("key", key)):
        if not (x.shape[0] and x.shape[2]):
            wrong_value(name, "have at least one sample and one token", shape_of(x))
    if geometry is None:
        if key_mask is not None:
            wrong_value("key_mask", "come with a `geometry` that says where the text is", "no geometry")
        geometry = Geometry((query.shape[2],))
    else:
        check_geometry(geometry)
        for name, x in (("query", query), ("key", key)):
            if x.shape[2] != geometry.num_tokens:
                rule = f"have the {geometry.num_tokens} tokens of the geometry ({geometry})"
                wrong_value(name, rule, x.shape[2])
    bias = None if key_mask is None else mask_bias(key_mask, query)
    reading = method.layer(geometry, layer, heads=query.shape[1], device=query.device)
    return reading.attend(query, key, value, key_bias=bias, scale=scale, impl=impl, **extra).out


def _check_method(method: object) -> None:
    if not isinstance(method, Method):
        name = method.__name__ if isinstance(method, type) else type(method).__name__
        wrong_type("method", "be a method such as nearfield.Hilbert()", name)


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


class SelfAttention(Projections):
    """A self-attention layer for models of one's own: projections around a method, and the parameters it has.

    Args:
        dim: channels of the tokens.
        heads: number of heads; divides `dim`.
        method: who reads whom.
        layer: which layer of the model this is, where layers differ.
    """

    def __init__(self, dim: int, heads: int, method: Method, layer: int = 0, bias: bool = True) -> None:
        super().__init__(dim, heads, bias)
        _check_method(method)
        check_int("layer", layer, at_least=0)
        self.method, self.layer = method, layer
        self.extra = method.module(dim, heads)

    def forward(self, x: Tensor, geometry: Geometry | None = None, key_mask: Tensor | None = None) -> Tensor:
        """`x` is `[B, N, dim]`, in the order of `method.ordering(geometry)`."""
        extra = {} if self.extra is None else self.extra(x)
        heads = self.heads_of(x)
        return self.joined(attend_with(self.method, *heads, geometry, self.layer, key_mask=key_mask, **extra))
