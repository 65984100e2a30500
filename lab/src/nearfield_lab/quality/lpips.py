"""LPIPS v0.1 with AlexNet (Zhang et al. 2018): how different two pictures look to a network trained on judgements.

The weights (4.9 MB, BSD-2-Clause) come with the package: `weights/lpips_alex.safetensors`, `weights/LICENSE`.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d, relu

from nearfield._checks import shape_of, wrong_value
from nearfield_lab.quality.similarity import PEAK, check_images
from nearfield_lab.storage import read_tensors

WEIGHTS = Path(__file__).with_name("weights") / "lpips_alex.safetensors"

_MEAN, _DEVIATION = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_LEAST_PIXELS = 32
_EPSILON = 1e-10


class _Layer(NamedTuple):
    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    is_pooled: bool


_LAYERS = (
    _Layer(3, 64, 11, 4, 2, False),
    _Layer(64, 192, 5, 1, 2, True),
    _Layer(192, 384, 3, 1, 1, True),
    _Layer(384, 256, 3, 1, 1, False),
    _Layer(256, 256, 3, 1, 1, False),
)


class Lpips(nn.Module):
    """Distances `[B]` of two batches of images `[B, 3, H, W]`, from 0 to 255: 0 for equal ones, about 1 at most."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(_LAYERS):
            shape = layer.outputs, layer.inputs, layer.kernel, layer.kernel
            for name, size in (("weight", shape), ("bias", shape[:1]), ("judge", (1, layer.outputs, 1, 1))):
                self.register_buffer(f"{name}{index}", torch.zeros(size))
        self.register_buffer("mean", torch.tensor(_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(_DEVIATION).view(3, 1, 1), persistent=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        check_images(first, second)
        if first.shape[1] != 3 or min(first.shape[2:]) < _LEAST_PIXELS:
            rule = f"have 3 channels and at least {_LEAST_PIXELS} pixels per side"
            wrong_value("first", rule, shape_of(first))
        x = torch.cat([first, second]).to(self.mean.dtype) * (2 / PEAK) - 1
        x = (x - self.mean) / self.deviation
        distance = x.new_zeros(len(first))
        for index, layer in enumerate(_LAYERS):
            x = max_pool2d(x, 3, stride=2) if layer.is_pooled else x
            weight, bias = self.get_buffer(f"weight{index}"), self.get_buffer(f"bias{index}")
            x = relu(conv2d(x, weight, bias, layer.stride, layer.padding))
            here, there = _unit_length(x).chunk(2)
            judged = conv2d((here - there).square(), self.get_buffer(f"judge{index}"))
            distance = distance + judged.mean(dim=(1, 2, 3))
        return distance


def _unit_length(x: Tensor) -> Tensor:
    return x / (x.square().sum(dim=1, keepdim=True).sqrt() + _EPSILON)


def load_lpips(path: Path = WEIGHTS, device: torch.device | str = "cpu") -> Lpips:
    """The network with its weights, which come with the package."""
    stored, _ = read_tensors(path)
    names = {"weight": "conv{}.w", "bias": "conv{}.b", "judge": "lin{}.w"}
    wanted = {
        f"{own}{index}": theirs.format(index)
        for own, theirs in names.items()
        for index in range(len(_LAYERS))
    }
    if set(stored) != set(wanted.values()):
        raise ValueError(f"{path} does not hold the weights of LPIPS with AlexNet.")
    network = Lpips()
    network.load_state_dict({own: stored[theirs].float() for own, theirs in wanted.items()})
    return network.eval().to(device)
