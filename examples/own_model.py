"""A small diffusion transformer with SelfAttention: its tokens are put in order once, then it trains."""

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from nearfield import Geometry, Hilbert, SelfAttention

GRID, TEXT, DIM, LAYERS = (16, 16), 16, 32, 4
GEOMETRY = Geometry(GRID, text=TEXT)
METHOD = Hilbert(tiles=4)


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention = SelfAttention(DIM, heads=2, method=METHOD, layer=layer)
        self.mix = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), GEOMETRY)
        return x + self.mix(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(GEOMETRY.num_image_tokens, DIM))
        self.text = nn.Parameter(0.1 * torch.randn(TEXT, DIM))
        self.enter, self.leave, self.time = nn.Linear(1, DIM), nn.Linear(DIM, 1), nn.Linear(1, DIM)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.ordering = METHOD.ordering(GEOMETRY)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        """The velocity of each pixel, `[B, 256, 1]`, from noisy pixels and times `[B, 1]`."""
        tokens = self.ordering.enter(self.enter(image) + self.places)  # raster to curve: once
        text = self.text + self.time(time)[:, None]
        x = torch.cat([text.expand(len(image), -1, -1), tokens], 1)
        for block in self.blocks:
            x = block(x)
        return self.ordering.leave(self.leave(x[:, TEXT:]))  # and back


def discs(count: int) -> Tensor:
    """Bright discs on dark ground, `[count, 256, 1]`."""
    axes = torch.meshgrid(*[torch.linspace(-1, 1, side) for side in GRID], indexing="ij")
    centres, radii = torch.rand(count, 2, 1, 1) - 0.5, 0.3 + 0.3 * torch.rand(count, 1, 1)
    distance = torch.stack(axes).sub(centres).square().sum(1).sqrt()
    return ((distance < radii).float() * 2 - 1).flatten(1)[..., None]


torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
torch.manual_seed(0)
model = Model()
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
print(METHOD.describe(GEOMETRY))
losses = []
for step in range(40):
    image, time = discs(8), torch.rand(8, 1)
    noise = torch.randn_like(image)
    noisy = image + time[:, None] * (noise - image)
    loss = mse_loss(model(noisy, time), noise - image)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    losses.append(loss.item())
    if step % 10 == 9:
        print(f"step {step + 1}: loss {sum(losses[-10:]) / 10:.3f}")
assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
