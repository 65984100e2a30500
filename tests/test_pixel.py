"""The model on pixels: its formula, its order of tokens, torch.compile, files and pictures."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.attending import NEEDS_TRITON
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from nearfield import LogLinear, curves
from nearfield.methods import GatedBlocks, SparseLinear
from nearfield_lab.embedded.model import num_parameters
from nearfield_lab.embedded.pixel import (
    PixelConfig,
    PixelTransformer,
    compiled_body,
    load_pixel_model,
    noise,
    noise_scale,
    sample,
    save_pixel_model,
)
from nearfield_lab.storage import BadFile, write_tensors

TINY = {"layers": 1, "heads": 2, "head_dim": 16, "size": 12}
SPARSE: dict[str, dict[str, Any]] = {
    "loglinear": {"block": 4, "topk": 2},
    "gatedblocks": {"block": 8, "topk": 2},
    "sparselinear": {"block": 8, "topk": 2},
}
EVERYTHING: dict[str, dict[str, Any]] = {
    "loglinear": {"block": 4, "topk": 999, "levels": 1, "enrich": 0},
    "gatedblocks": {"block": 8, "topk": 999},
    "sparselinear": {"block": 8, "topk": 999},
}


def lively(attention: Any = "full", fields: Any = None, **others: Any) -> PixelTransformer:
    """Random weights also where a new model has zeros, so that its output depends on everything."""
    torch.manual_seed(1)
    model = PixelTransformer(PixelConfig(attention=attention, fields=fields or {}, **(TINY | others)))
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model.double()


def call(height: int = 12, width: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64)
    return images, torch.tensor([0.2, 0.7], dtype=torch.float64)


def same_weights(model: PixelTransformer, other: PixelTransformer) -> PixelTransformer:
    """`model` with the weights of `other`; what only `model` has becomes zero."""
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state | other.state_dict())
    return model


# -- the formula ---------------------------------------------------------------------------------------------------


def by_hand(model: PixelTransformer, images: Tensor, level: Tensor) -> Tensor:
    """One layer of full attention written out, pixel by pixel where it matters: positions."""
    body, config = model.body, model.config
    layer: Any = body.layers[0]
    height, width = images.shape[2:]

    def normalised(x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x: Tensor, weight: Tensor) -> Tensor:
        """`[B, N, heads, dim]`: root mean square 1, then every pair of channels turned by the pixel's place."""
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
        for pixel in range(height * width):
            for pair in range(config.head_dim // 2):
                quarter = config.head_dim // 4
                place = (pixel // width, pixel % width)[pair // quarter]
                place = (place + 0.5) * config.span / max(height, width) - 0.5
                angle = place * 10000 ** (-(pair % quarter) / quarter)
                pairs[:, pixel, :, pair] *= complex(math.cos(angle), math.sin(angle))
        return torch.cat([pairs.real, pairs.imag], -1)

    waves = torch.tensor([10000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
    angles = 1000 * level[:, None] * waves
    known = body.level(torch.cat([angles.cos(), angles.sin()], -1))
    known = known * known.sigmoid()
    x = body.entrance(images.flatten(2).mT)
    one, two, three, four, five, six = layer.modulation(known)[:, None].chunk(6, -1)
    qkv = layer.attention.to_qkv(normalised(x) * (1 + two) + one)
    query, key, value = (part.unflatten(-1, (config.heads, -1)) for part in qkv.chunk(3, -1))
    query, key = (
        turned(query, layer.attention.query_norm.weight),
        turned(key, layer.attention.key_norm.weight),
    )
    scores = torch.einsum("bnhd,bmhd->bhnm", query, key) / math.sqrt(config.head_dim)
    read = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), value).flatten(2)
    x = x + three * layer.attention.to_out(read)
    x = x + six * layer.network(normalised(x) * (1 + five) + four)
    shift, scale = body.modulation(known)[:, None].chunk(2, -1)
    return body.exit(normalised(x) * (1 + scale) + shift).mT.unflatten(2, (height, width))


def test_output_is_the_formula() -> None:
    model = lively()
    with torch.no_grad():
        images, level = call(6, 5)
        # The rotary table is float32.
        torch.testing.assert_close(model(images, level), by_hand(model, images, level), rtol=1e-6, atol=1e-6)


def test_the_paper_model_has_its_size_and_starts_at_zero() -> None:
    model = PixelTransformer(PixelConfig())
    assert (model.config.dim, len(model.body.layers)) == (384, 12)
    assert num_parameters(model) == pytest.approx(32.9e6, rel=0.02)
    with torch.no_grad():
        assert not bool(model(torch.randn(1, 3, 6, 6), torch.rand(1)).any())


@pytest.mark.parametrize("attention", EVERYTHING)
def test_choosing_everything_is_the_full_model(attention: str) -> None:
    """Whatever the order: pixels and their rotary rows move together."""
    full = lively(layers=2)
    sparse = same_weights(lively(attention, EVERYTHING[attention], layers=2), full)
    images, level = call()
    want, got = full(images, level), sparse(images, level)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    raster = same_weights(lively(attention, EVERYTHING[attention] | {"order": "raster"}, layers=2), full)
    torch.testing.assert_close(raster(images, level), want, rtol=1e-5, atol=1e-6)
    gradients = (
        torch.autograd.grad(out.square().sum(), model.body.entrance.weight)[0]
        for out, model in ((want, full), (got, sparse))
    )
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_pixels_enter_along_the_curve() -> None:
    model = lively("loglinear", SPARSE["loglinear"])
    place = model.place(12, 10, torch.device("cpu"))
    assert torch.equal(place.ordering.order, curves.hilbert((12, 10)))
    raster = lively().place(12, 10, torch.device("cpu"))
    assert torch.equal(place.cosine, raster.cosine[place.ordering.order])
    assert model.place(12, 10, torch.device("cpu")) is place


@pytest.mark.parametrize("attention", SPARSE)
def test_every_parameter_learns(attention: str) -> None:
    model = lively(attention, SPARSE[attention])
    model(*call()).square().sum().backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in model.parameters())


def test_dense_layers_stay_full() -> None:
    fields = SPARSE["loglinear"] | {"dense_layers": (0, -1)}
    readers = lively("loglinear", fields, layers=3).place(8, 8, torch.device("cpu")).readers
    assert [reader is None for reader in readers] == [True, False, True]


# -- torch.compile -------------------------------------------------------------------------------------------------


def compile_with(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


@pytest.fixture
def graphs() -> Iterator[Any]:
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("attention", ["full", *SPARSE])
def test_one_graph_serves_all_layers_and_learns_the_same(
    attention: str, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with("aot_eager", monkeypatch)
    model = lively(attention, SPARSE.get(attention), layers=2)
    compiled = compiled_body(model.body)
    images, level = call()
    gradients = []
    for body in (None, compiled, compiled):
        out = model(images, level, body)
        gradients.append(torch.autograd.grad(out.square().sum(), list(model.parameters())))
        assert torch.equal(out, model(images, level))
    assert graphs() == 2  # and one for what follows the layers
    for one, two in zip(gradients[0], gradients[2], strict=True):
        torch.testing.assert_close(one, two)


def test_kernels_of_torch_have_graphs_of_their_own(graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the kernel it was traced with, whatever is asked for when it is called."""
    compile_with("aot_eager", monkeypatch)
    model = lively().float()
    images, level = (x.float() for x in call())
    with torch.no_grad():
        for name, kernel in (("math", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION)):
            with sdpa_kernel(kernel):
                model(images, level, compiled_body(model.body, name))
    assert graphs() == 3  # what follows attention is the same


def test_a_graph_asks_for_its_kernel_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps what it compiled by graphs of calls. If a kernel were only in use around them, graphs would be equal,
    and one kernel be timed as another: that has happened."""
    found: dict[str, list[str]] = {}

    def kept(name: str, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.setdefault(name, []).extend(str(node.target) + str(node.args) for node in graph.graph.nodes)
        return graph.forward

    compile_model = torch.compile
    model = lively().float()
    images, level = (x.float() for x in call())
    for name in ("auto", "math", "flash"):
        torch.compiler.reset()
        monkeypatch.setattr(torch, "compile", partial(compile_model, backend=partial(kept, name)))
        with torch.no_grad():
            out = model(images, level, compiled_body(model.body, name))
        torch.testing.assert_close(out, model(images, level).detach())
    assert found["auto"] != found["math"] != found["flash"]
    for name, kernel in (("math", SDPBackend.MATH), ("flash", SDPBackend.FLASH_ATTENTION)):
        first = next(words for words in found[name] if "_backend_from_string" in words)
        assert kernel.name in first
    assert not any("_sdpa_kernel" in words for words in found["auto"])


@NEEDS_TRITON
def test_the_kernels_compile_as_one_graph(
    graphs: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: pooling, choosing and reading are operators, nothing is decided while tracing."""
    model = lively("loglinear", {"topk": 2}).float().to(device)
    layer: Any = model.body.layers[0]
    layer.attention.impl = "triton"
    images, level = (x.float().to(device)[:1] for x in call(8, 6))
    compile_with("eager", monkeypatch)
    compiled = compiled_body(model.body)
    with torch.no_grad():
        torch.testing.assert_close(model(images, level, compiled), model(images, level))
    assert graphs() == 2  # and one for what follows the layers


# -- pictures and files --------------------------------------------------------------------------------------------


def test_noise_grows_with_the_side_above_64_pixels() -> None:
    assert [noise_scale(side, side) for side in (32, 64, 128, 256)] == [1, 1, 2, 4]
    drawn = noise(range(2), (128, 128), 0)
    assert float(drawn.std()) == pytest.approx(2, rel=0.02)
    assert torch.equal(noise(range(1, 2), (128, 128), 0)[0], drawn[1])


def test_sampling_follows_the_velocity_back() -> None:
    """A model that knows its picture gets there in one step as in twenty, whatever the batch."""
    target = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(3)) * 2 - 1

    class Knows(PixelTransformer):
        def forward(self, images: Tensor, level: Tensor, body: Any = None) -> Tensor:
            return (images - target) / level[:, None, None, None]

    model = Knows(PixelConfig(**TINY))
    want = ((target + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0)
    for steps in (1, 20):
        images = sample(model, range(5, 7), steps=steps)
        assert images.shape == (2, 12, 12, 3)
        assert int((images.int() - want.int()).abs().max()) <= 1
    plain = lively().float()
    assert torch.equal(
        sample(plain, range(2), steps=2, size=(6, 8))[1], sample(plain, range(1, 2), steps=2, size=(6, 8))[0]
    )


@pytest.mark.parametrize("packing", ["int8", "bf16", "none"])
def test_files_give_back_the_model(packing: Any, tmp_path: Path) -> None:
    model = lively("gatedblocks", SPARSE["gatedblocks"]).float()
    save_pixel_model(tmp_path / "model.safetensors", model, {"step": 3}, packing)
    loaded, facts = load_pixel_model(tmp_path / "model.safetensors")
    assert (loaded.config, facts["step"]) == (model.config, 3)
    for name, value in loaded.state_dict().items():
        exact = model.state_dict()[name]
        tolerance = {"int8": 1e-2, "bf16": 4e-3, "none": 0.0}[packing] * float(exact.abs().max())
        torch.testing.assert_close(value, exact, rtol=0, atol=tolerance)


def test_another_attention_starts_from_the_same_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_pixel_model(path, lively().float(), packing="none")
    wanted = PixelConfig(attention="sparselinear", fields=EVERYTHING["sparselinear"], **(TINY | {"size": 24}))
    model, _ = load_pixel_model(path, wanted)
    images, level = (x.float() for x in call())
    torch.testing.assert_close(model(images, level), lively().float()(images, level), rtol=1e-4, atol=1e-4)
    save_pixel_model(path, model)
    with pytest.raises(
        BadFile, match="was trained with attention 'sparselinear', whose own weights 'full' has no"
    ):
        load_pixel_model(path, PixelConfig(**TINY))
    with pytest.raises(BadFile, match="has layers = 1, not 2"):
        load_pixel_model(path, PixelConfig(**(TINY | {"layers": 2})))
    write_tensors(path, {"x": torch.zeros(1)}, {"kind": "other"})
    with pytest.raises(BadFile, match="is no model of `nearfield train pixel`"):
        load_pixel_model(path)


def test_configurations_name_their_method() -> None:
    assert PixelConfig().method() is None
    assert PixelConfig(attention="loglinear", fields={"topk": 4}).method() == LogLinear(topk=4)
    assert PixelConfig(attention="gatedblocks", fields={"dense_layers": [0, 2]}).method() == GatedBlocks(
        dense_layers=(0, 2)
    )
    assert PixelConfig(attention="sparselinear").method() == SparseLinear()


BAD_CALLS: list[tuple[Any, str]] = [
    (
        lambda: PixelConfig(attention="fast"),
        "`method` must be one of ",
    ),
    (
        lambda: PixelConfig(head_dim=6),
        "`head_dim` must be a multiple of 4: half for rows, half for columns; got 6.",
    ),
    (
        lambda: PixelConfig(fields={"topk": 3}),
        "`fields` must be empty where attention is full; got {'topk': 3}.",
    ),
    (lambda: PixelConfig(attention="gatedblocks", fields={"topk": 0}), "`topk` must be at least 1; got 0."),
    (
        lambda: lively()(torch.zeros(3, 4, 4), torch.zeros(1)),
        "`images` must have 4 dimensions; got shape [3, 4, 4].",
    ),
    (
        lambda: lively()(torch.zeros(1, 1, 4, 4), torch.zeros(1)),
        "`images` must have 3 channels; got shape [1, 1, 4, 4].",
    ),
    (lambda: sample(lively(), range(1), steps=0), "`steps` must be at least 1; got 0."),
]


@pytest.mark.parametrize(("wrong", "message"), BAD_CALLS, ids=[bad[1][:30] for bad in BAD_CALLS])
def test_bad_calls_say_what_is_wrong(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        wrong()
    assert str(raised.value).startswith(message)
