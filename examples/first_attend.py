"""The first call: put an image's tokens in curve order, let tiles read tiles, and compare with reading everything."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from nearfield import attend, curves, planning

GRID, TEXT, TILES = (32, 32), 64, 16
image = GRID[0] * GRID[1]
tokens = TEXT + image

# Tokens that are neighbours in the picture become neighbours in the sequence; the text stays in front.
order = torch.cat([torch.arange(TEXT), TEXT + curves.hilbert(GRID)])
print(f"curve: {curves.choose(GRID)}")

# Every image token reads its tile and the text; the text reads everything.
plan = planning.ring(tokens, image // TILES, ring=(TEXT, tokens), both=[(0, TEXT)], q_block=64, k_block=64)
print(plan)

torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, tokens, 64) for _ in range(3))
query, key, value = (x[:, :, order] for x in (query, key, value))
out, lse = attend(query, key, value, plan)

# The same pairs by a dense mask: slower, and the same answer.
masked = scaled_dot_product_attention(query, key, value, attn_mask=plan.to_mask())
print(f"largest difference to masked dense attention: {(out - masked).abs().max():.1e}")

# Back to raster order.
out = out[:, :, curves.inverse(order)]
assert out.shape == (1, 4, tokens, 64)
