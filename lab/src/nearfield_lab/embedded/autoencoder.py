"""TAEF2, a tiny autoencoder with FLUX.2's latent: images in [0, 1] to 32 channels at an eighth of their sides.

The architecture is that of madebyollin/taesd (MIT); its weights are in the folder `weights`, in half precision.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from nearfield._checks import check_tensor, shape_of, wrong_value
from nearfield_lab.storage import read_tensors

WEIGHTS = Path(__file__).parent / "weights"
CHANNELS = 32
PIXELS_PER_TOKEN = 8

_WIDTH = 64


class Autoencoder(nn.Module):
    """Both halves, with the shipped weights unless others are given."""

    def __init__(self, weights: Path = WEIGHTS) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder_layers(), decoder_layers()
        for half, layers in (("encoder", self.encoder), ("decoder", self.decoder)):
            tensors, _ = read_tensors(weights / f"taef2_{half}.safetensors")
            layers.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        self.eval().requires_grad_(False)

    def encode(self, images: Tensor) -> Tensor:
        """`[B, 3, height, width]` in [0, 1] to `[B, 32, height / 8, width / 8]`."""
        check_tensor("images", images, dims=4, hint="Expected [batch, 3, height, width].")
        if images.shape[1] != 3 or any(side % PIXELS_PER_TOKEN for side in images.shape[2:]):
            rule = f"have 3 channels and sides of multiples of {PIXELS_PER_TOKEN}"
            wrong_value("images", rule, shape_of(images))
        return self._through(self.encoder, images)

    def decode(self, latents: Tensor) -> Tensor:
        """`[B, 32, h, w]` to images in [0, 1], `[B, 3, 8 h, 8 w]`."""
        check_tensor("latents", latents, dims=4, hint="Expected [batch, 32, h, w].")
        if latents.shape[1] != CHANNELS:
            wrong_value("latents", f"have {CHANNELS} channels", shape_of(latents))
        return self._through(self.decoder, latents).clamp(0, 1)

    def _through(self, layers: nn.Sequential, x: Tensor) -> Tensor:
        kind = x.device.type
        # Half precision is what the weights were stored in; on a CPU it would only be slow.
        with torch.autocast(kind, dtype=torch.float16, enabled=kind == "cuda"):
            out: Tensor = layers(x)
        return out.float()


class _Block(nn.Module):
    def __init__(self, has_pool: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(_conv(), nn.ReLU(), _conv(), nn.ReLU(), _conv())
        self.pool = _pool() if has_pool else None

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            x = x + self.pool(x)
        return functional.relu(self.conv(x) + x)


class _SoftClamp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


def _conv(inputs: int = _WIDTH, outputs: int = _WIDTH, *, stride: int = 1, bias: bool = True) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=bias)


def _pool() -> nn.Sequential:
    wide = 4 * _WIDTH
    return nn.Sequential(
        nn.Conv2d(_WIDTH, wide, 1, bias=False),
        nn.GroupNorm(4, wide),
        nn.ReLU(),
        nn.Conv2d(wide, _WIDTH, 1, bias=False),
    )


def _blocks(number: int, has_pool: bool = False) -> list[nn.Module]:
    return [_Block(has_pool) for _ in range(number)]


def encoder_layers() -> nn.Sequential:
    """Layers in the order by which the weights are named."""
    return nn.Sequential(
        _conv(3),
        *_blocks(1),
        *(_conv(stride=2, bias=False), *_blocks(3)),
        *(_conv(stride=2, bias=False), *_blocks(3)),
        *(_conv(stride=2, bias=False), *_blocks(3, has_pool=True)),
        _conv(outputs=CHANNELS),
    )


def decoder_layers() -> nn.Sequential:
    """Layers in the order by which the weights are named."""
    return nn.Sequential(
        *(_SoftClamp(), _conv(CHANNELS), nn.ReLU()),
        *(*_blocks(3, has_pool=True), nn.Upsample(scale_factor=2), _conv(bias=False)),
        *(*_blocks(3), nn.Upsample(scale_factor=2), _conv(bias=False)),
        *(*_blocks(3), nn.Upsample(scale_factor=2), _conv(bias=False)),
        *_blocks(1),
        _conv(outputs=3),
    )
