"""A method of one's own: it only decides who reads whom. `apply` then takes it to any model that it knows.

It needs the extra `diffusers`: `pip install '.[diffusers]'` in a checkout.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

import nearfield
from nearfield import Attended, Geometry, Ordering, Plan, attend, curves, planning

BLOCK = 16


class Reader(NamedTuple):
    """What a layer needs to attend, ready made."""

    plan: Plan

    @property
    def num_pairs(self) -> int:
        return self.plan.num_pairs

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options) -> Attended:
        return attend(query, key, value, self.plan, **options)


@dataclass(frozen=True)
class Window:
    """A token reads those within `reach` of it on the curve, and the text; text reads everything."""

    reach: int = 48

    def ordering(self, geometry: Geometry, *, device) -> Ordering:
        return Ordering.joined([curves.hilbert(grid) for grid in geometry.images]).to(device)

    def reader(self, geometry: Geometry, layer: int, *, heads, device) -> Reader:
        tokens, (_, text) = geometry.num_tokens, geometry.text_span
        assert geometry.text_first, "this sketch wants the text in front"
        first = torch.arange(0, tokens, BLOCK)  # of each block of queries
        window = (first - self.reach).clamp(min=text), (first + BLOCK + self.reach).clamp(max=tokens)
        everything = first < text
        starts = torch.stack([torch.zeros_like(first), torch.where(everything, 0, window[0])], 1)
        stops = torch.stack([torch.full_like(first, text), torch.where(everything, tokens, window[1])], 1)
        sizes = {"q_block": BLOCK, "k_block": BLOCK, "num_queries": tokens, "num_keys": tokens}
        return Reader(planning.from_spans(starts, stops, **sizes, device=device))

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        return "the first layer" if layer == 0 else None

    def dense_ends(self, num_steps: int) -> tuple[int, int]:
        return 0, 0

    def describe(self, geometry: Geometry, *, device) -> str:
        density = self.layer(geometry, 0, heads=None, device="cpu").plan.density
        return f"windows of {2 * self.reach + BLOCK} tokens on a curve: {density:.0%} of the pairs"


torch.manual_seed(0)
model = FluxTransformer2DModel(
    num_layers=1,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=8,
    pooled_projection_dim=8,
    axes_dims_rope=(4, 6, 6),
).eval()
places = torch.cartesian_prod(torch.zeros(1), torch.arange(24.0), torch.arange(32.0))
inputs = {
    "hidden_states": torch.randn(1, 768, 64),
    "encoder_hidden_states": torch.randn(1, 20, 8),
    "pooled_projections": torch.randn(1, 8),
    "timestep": torch.ones(1),
    "img_ids": places,
    "txt_ids": torch.zeros(20, 3),
}


@torch.no_grad()
def run() -> Tensor:
    return model(**inputs).sample


dense = run()
with nearfield.apply(model, Window()) as handle:
    sparse = run()
    print(handle.summary())
with nearfield.apply(model, Window(reach=768)):
    assert torch.allclose(run(), dense, atol=1e-5)  # a window over everything is the stock model
assert not torch.allclose(sparse, dense, atol=1e-5)
assert torch.equal(run(), dense)
