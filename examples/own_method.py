"""A method of your own: it only decides who reads whom. `apply` then takes it to any model that it knows.

It needs the extra `diffusers`: `pip install '.[diffusers]'` in a checkout.
"""

from dataclasses import dataclass

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

import nearfield
from nearfield import Geometry, Plan, PlanMethod, planning


@dataclass(frozen=True)
class Window(PlanMethod):
    """A token reads those within `reach` of it on the curve, and the text; text reads everything."""

    name = "window"

    reach: int = 48

    def plan(self, geometry: Geometry, layer: int, *, q_block: int, k_block: int) -> Plan:
        tokens, (text, text_stop) = geometry.num_tokens, geometry.text_span
        first = torch.arange(0, tokens, q_block)  # of each block of queries
        last = (first + q_block).clamp(max=tokens)
        is_text = (first < text_stop) & (last > text)
        start = torch.where(is_text, 0, first - self.reach).clamp(min=0)
        stop = torch.where(is_text, tokens, last + self.reach).clamp(max=tokens)
        starts = torch.stack([torch.full_like(first, text), start], dim=1)
        stops = torch.stack([torch.full_like(first, text_stop), stop], dim=1)
        sizes = {"q_block": q_block, "k_block": k_block, "num_queries": tokens, "num_keys": tokens}
        return planning.from_spans(starts, stops, **sizes)


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
