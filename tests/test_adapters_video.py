"""`apply` on tiny models of the real video classes: the same oracles as for images, over grids of three sides."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import peft
import pytest
import torch
from tests import tiny_models
from tests.remembering import Remembering
from tests.test_adapters import EVERYTHING, SPARSE, assert_differ, assert_same, double, run, trace
from tests.test_adapters import oracle as oracle
from tests.test_adapters_features import cached_run
from tests.test_adapters_moments import Oracle, gradients
from tests.tiles import paper
from tests.tiny_models import TEXT, VIDEO_MODELS, VideoGrid, wan_call, wan_pipeline
from torch import Tensor
from torch.nn import functional

import nearfield
from nearfield import Geometry, Hilbert
from nearfield.methods import BlockTopK

SIZES: list[tuple[VideoGrid, int]] = [((3, 4, 5), 1), ((4, 3, 6), 2), ((1, 7, 9), 1)]


def geometry_of(name: str, grid: VideoGrid) -> Geometry:
    text = TEXT if name.startswith("hunyuan") else 0
    frames, *frame = grid
    if frames == 1:
        return Geometry(tuple(frame), text, text_first=False)
    if name == "hunyuan_i2v":  # its first frame stays first
        return Geometry(tuple(frame), text, text_first=False, references=((frames - 1, *frame),))
    return Geometry(grid, text, text_first=False)


def made(name: str, grid: VideoGrid, batch: int = 1) -> tuple[Any, dict[str, Any]]:
    make, inputs_of = VIDEO_MODELS[name]
    return make().double(), dict(double(inputs_of(grid, batch)))


@pytest.mark.parametrize(("grid", "batch"), SIZES)
@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_sparse_is_the_masked_stock_model(
    name: str, grid: VideoGrid, batch: int, oracle: Callable[..., Tensor]
) -> None:
    """And with everything read, the stock model."""
    model, inputs = made(name, grid, batch)
    stock = run(model, inputs)
    geometry = geometry_of(name, grid)
    expected = oracle(model, inputs, SPARSE, {geometry.num_tokens: geometry})
    with nearfield.apply(model, SPARSE):
        assert_same(run(model, inputs), expected)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, inputs), stock)
    assert_differ(expected, stock)


@pytest.mark.parametrize(
    "method",
    [
        paper(tiles=4, shared="centre", shared_tokens=16, share="keys", dense_layers=0, dense_steps=0),
        paper(tiles=3, shared="distributed", shared_tokens=16, cycle=2, dense_layers=0, dense_steps=0),
    ],
    ids=["centre", "distributed"],
)
@pytest.mark.parametrize("name", ["wan", "hunyuan", "hunyuan_i2v"])
def test_shared_regions_of_videos(name: str, method: Hilbert, oracle: Callable[..., Tensor]) -> None:
    model, inputs = made(name, (4, 6, 8))
    geometry = geometry_of(name, (4, 6, 8))
    expected = oracle(model, inputs, method, {geometry.num_tokens: geometry})
    with nearfield.apply(model, method):
        assert_same(run(model, inputs), expected)
    assert_differ(expected, run(model, inputs))


@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_remove_leaves_no_trace(name: str) -> None:
    model, inputs = made(name, (3, 4, 5))
    stock, before = run(model, inputs), trace(model)
    with nearfield.apply(model, SPARSE):
        assert_differ(run(model, inputs), stock)
        assert trace(model) != before
    assert trace(model) == before
    assert torch.equal(run(model, inputs), stock)


@pytest.mark.parametrize(
    ("method", "whole"),
    [
        (BlockTopK(16, 8, dense_layers=0), {"keep": 1.0}),
        (BlockTopK(16, 2, top_p=0.5, dense_layers=0), {"top_p": 1.0}),
    ],
    ids=["keep", "top_p"],
)
@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan_i2v", "ltx_i2v"])
def test_methods_that_choose_at_calls(name: str, method: Any, whole: dict[str, float]) -> None:
    """If they choose everything, that is the stock model."""
    model, inputs = made(name, (3, 4, 5), 2)
    stock = run(model, inputs)
    with nearfield.apply(model, method) as handle:
        assert_differ(run(model, inputs), stock)
        assert "attention calls kept " in handle.summary()
    with nearfield.apply(model, replace(method, **whole)):
        assert_same(run(model, inputs), stock)


def test_a_mask_of_text_is_kept_out_of_predictions() -> None:
    """What padded text holds does not matter."""
    model, inputs = made("hunyuan", (3, 4, 5), 2)
    method = BlockTopK(16, 2, top_p=0.5, dense_layers=0)
    with nearfield.apply(model, method):
        expected = run(model, inputs)
        blocks = []
        hook = model.transformer_blocks[0].register_forward_pre_hook(
            lambda module, args: (args[0], with_other_padding(args[1], blocks), *args[2:])
        )
        found = run(model, inputs)
        hook.remove()
    assert len(blocks) == 1
    assert_same(found, expected)


def with_other_padding(text: Tensor, seen: list[Tensor]) -> Tensor:
    seen.append(text)
    text = text.clone()
    text[-1, -3:] += 100
    return text


TARGETS = {
    "wan": ["to_q", "to_k", "to_v", "to_out.0", "patch_embedding", "proj_out"],
    "hunyuan": ["to_q", "to_k", "to_v", "add_k_proj", "x_embedder.proj", "proj_out", "norm_out.linear"],
    "ltx": ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_lora_loaded_and_unloaded_between_calls(name: str) -> None:
    model, inputs = made(name, (3, 4, 5))
    stock = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        run(model, inputs)
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=TARGETS[name], init_lora_weights=False))
        model.double()
        found = run(model, inputs)
        model.disable_adapters()
        assert_same(run(model, inputs), stock)
        model.enable_adapters()
    assert_same(found, run(model, inputs))
    assert_differ(found, stock)


@pytest.mark.parametrize("name", ["wan", "hunyuan", "ltx"])
def test_first_block_cache(name: str) -> None:
    model, inputs = made(name, (3, 4, 5))
    stock = cached_run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        for found, expected in zip(cached_run(model, inputs), stock, strict=True):
            assert_same(found, expected)


@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan_i2v", "ltx_i2v"])
def test_gradients_with_and_without_checkpointing(name: str) -> None:
    model, inputs = made(name, (3, 4, 5))
    with nearfield.apply(model, SPARSE):
        plain = gradients(model, inputs)
        model.enable_gradient_checkpointing()
        assert_same(gradients(model.train(), inputs), plain)
    model.disable_gradient_checkpointing()
    assert_differ(plain, gradients(model, inputs))


@pytest.mark.parametrize("name", ["wan_ti2v", "hunyuan", "ltx"])
def test_compiled_blocks(name: str) -> None:
    torch._dynamo.reset()
    model, inputs = made(name, (3, 4, 5))
    with nearfield.apply(model, SPARSE):
        expected = run(model, inputs)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert_same(run(model, inputs), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "pixels", "grid"),
    [
        ("wan", (480, 832, 81), "21x30x52"),
        ("hunyuan", (720, 1280, 129), "33x45x80 + 256 text"),
        ("hunyuan_i2v", (720, 1280, 129), "45x80 + 32x45x80 + 256 text"),
        ("ltx", (512, 704, 161), "21x16x22"),
    ],
)
def test_a_size_in_pixels_and_frames(name: str, pixels: VideoGrid, grid: str) -> None:
    model = VIDEO_MODELS[name][0]()
    height, width, frames = pixels
    with nearfield.apply(model, BlockTopK()) as handle:
        told = handle.summary(height=height, width=width, frames=frames)
        assert f"  {height}x{width} pixels, {frames} frames: {grid}: " in told
        with pytest.raises(ValueError) as error:
            handle.prepare(height=height, width=width)
    kind = type(model).__name__
    assert str(error.value) == f"`frames` must be given: {kind} makes videos; got None. A still image has 1."


def test_the_small_model_of_wan_has_coarser_tokens() -> None:
    model = tiny_models.settle(
        diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=48,
            out_channels=48,
            num_layers=1,
            ffn_dim=8,
        )
    )
    with nearfield.apply(model, BlockTopK()) as handle:
        assert ": 31x22x40: " in handle.summary(height=704, width=1280, frames=121)


def test_frames_are_for_videos() -> None:
    with nearfield.apply(tiny_models.flux(), paper()) as handle:
        with pytest.raises(
            ValueError, match=r"`frames` must be left out: FluxTransformer2DModel makes images; got 9\."
        ):
            handle.summary(height=64, width=64, frames=9)
        with pytest.raises(
            ValueError, match=r"`frames` must be given together with `height` and `width`; got 9\."
        ):
            handle.summary(frames=9)


def test_summary_of_a_size_is_that_of_a_call() -> None:
    model, inputs = made("hunyuan_i2v", (3, 4, 5))
    with nearfield.apply(model, paper(tiles=4)) as handle:
        asked = handle.summary(height=64, width=80, frames=9, text=TEXT)
        run(model, inputs)
        told = handle.summary()
    assert "last call: 4x5 + 2x4x5 + 7 text: 67 tokens" in told
    assert asked == told.replace("last call:", "64x80 pixels, 9 frames:")
    assert "dense, reads text alone: context_embedder.token_refiner.refiner_blocks.0.attn" in told


def test_prepared_and_compiled_as_a_whole() -> None:
    torch._dynamo.reset()
    model, inputs = tiny_models.wan(layers=1).double(), double(tiny_models.wan_inputs((3, 4, 5)))
    with nearfield.apply(model, SPARSE) as handle:
        expected = run(model, inputs)
        handle.prepare(height=64, width=80, frames=9)
        assert_same(run(torch.compile(model, backend="eager", fullgraph=True), inputs), expected)
    torch._dynamo.reset()


def test_ltx_with_positions_one_by_one_is_dense_and_says_so() -> None:
    model, inputs = made("ltx", (3, 4, 5))
    places = torch.arange(60.0).expand(1, 3, 60).double()
    inputs = inputs | {"video_coords": places, "num_frames": None, "height": None, "width": None}
    stock = run(model, inputs)
    with nearfield.apply(model, SPARSE) as handle:
        assert torch.equal(run(model, inputs), stock)
        assert "dense calls: 1, `video_coords` say where tokens are, one by one" in handle.summary()


# -- pipelines -----------------------------------------------------------------------------------------------------

GEOMETRY = Geometry((3, 4, 5))
METHOD = Remembering()


def frames(pipe: Any, **options: Any) -> Tensor:
    return pipe(**wan_call(**options)).frames


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The stock pipeline with the masks that a method would remember."""

    def computed(pipe: Any, refreshes: list[int], is_guided: bool, steps: int) -> Tensor:
        attention = Oracle(METHOD, GEOMETRY, 1 + is_guided, refreshes, layers=2)
        with monkeypatch.context() as patch:
            patch.setattr(functional, "scaled_dot_product_attention", attention)
            result = frames(pipe, is_guided=is_guided, steps=steps)
        assert attention.calls == 2 * (1 + is_guided) * steps
        return result

    return computed


def double_pipeline(**options: Any) -> Any:
    pipe = wan_pipeline(**options)
    for model in (pipe.transformer, pipe.transformer_2):
        if model is not None:
            model.double()
    return pipe


def test_a_pipeline_with_guidance_on_and_off(remembered: Callable[..., Tensor]) -> None:
    """Generations in a row, each as if it were alone."""
    pipe = double_pipeline()
    plans = [(True, 4, [0, 2]), (False, 3, [0, 1]), (True, 3, [0, 1]), (False, 4, [0, 2])]
    expected = [remembered(pipe, refreshes, is_guided, steps) for is_guided, steps, refreshes in plans]
    stock = frames(pipe, is_guided=True, steps=4)
    with nearfield.apply(pipe, METHOD) as handle:
        for (is_guided, steps, refreshes), wanted in zip(plans, expected, strict=True):
            assert_same(frames(pipe, is_guided=is_guided, steps=steps), wanted)
            calls = 2 * (1 + is_guided)
            told = f"{calls * len(refreshes)} of {calls * steps} attention calls full"
            assert told in handle.summary()
    assert_differ(expected[0], stock)


def test_a_pipeline_of_two_models(remembered: Callable[..., Tensor]) -> None:
    """The second takes over at the boundary, where it has nothing to remember yet."""
    second = tiny_models.wan()
    for parameter in second.parameters():
        parameter.data.mul_(0.9)
    pipe = double_pipeline(transformer_2=second, boundary_ratio=0.7)
    seen: list[Any] = []
    hook = pipe.transformer.register_forward_hook(lambda *_: seen.append(1))
    frames(pipe, steps=5)
    hook.remove()
    switch = len(seen) // 2
    assert 1 < switch < 4
    expected = remembered(pipe, sorted({0, switch} | set(METHOD.refreshes(5))), True, 5)
    with nearfield.apply(pipe, METHOD) as handle:
        assert_same(frames(pipe, steps=5), expected)
        assert handle.summary().count("WanTransformer3DModel") == 2


@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_pipeline_with_tiles(is_expanded: bool) -> None:
    """Also with a timestep for every token."""
    pipe = double_pipeline(expand_timesteps=is_expanded)
    stock = frames(pipe)
    with nearfield.apply(pipe, EVERYTHING):
        assert_same(frames(pipe), stock)
    with nearfield.apply(pipe, paper(tiles=4, shared="none", dense_layers=0)) as handle:
        assert_differ(frames(pipe), stock)
        assert "the first 1 of 4 dense" in handle.summary()


def ltx_pipeline() -> tuple[Any, dict[str, Any]]:
    parts = {"transformer": tiny_models.ltx(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    pipe = tiny_models.pipeline("LTXPipeline", vae=None, text_encoder=None, tokenizer=None, **parts)
    masks = {
        "prompt_attention_mask": torch.ones(1, TEXT),
        "negative_prompt_attention_mask": torch.ones(1, TEXT),
    }
    return pipe, wan_call(height=128, width=160, frames=17) | masks


def hunyuan_pipeline() -> tuple[Any, dict[str, Any]]:
    parts = {"transformer": tiny_models.hunyuan(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    pipe = tiny_models.pipeline("HunyuanVideoPipeline", vae=None, **tiny_models.NO_ENCODERS, **parts)
    mask = torch.ones(1, TEXT)
    mask[:, -2:] = 0
    more = {
        "prompt_attention_mask": mask,
        "pooled_prompt_embeds": tiny_models.randn(1, 8, seed=2),
        "negative_prompt_attention_mask": mask,
        "negative_pooled_prompt_embeds": tiny_models.randn(1, 8, seed=5),
        "true_cfg_scale": 2.0,
    }
    return pipe, wan_call() | more


@pytest.mark.parametrize(
    ("make", "calls", "branches"), [(ltx_pipeline, 4, 1), (hunyuan_pipeline, 8, 2)], ids=["ltx", "hunyuan"]
)
def test_other_pipelines(make: Callable[[], Any], calls: int, branches: int) -> None:
    """Guidance in a doubled batch, and in two calls that have names."""
    pipe, call = make()
    stock = pipe(**call | fresh()).frames
    seen: list[int] = []
    with nearfield.apply(pipe, EVERYTHING):
        found = pipe(**call | fresh()).frames
        assert (found - stock).abs().max() <= 1e-4 * stock.abs().max()
    with nearfield.apply(pipe, Remembering()) as handle:
        hook = pipe.transformer.register_forward_hook(
            lambda *_: seen.append(len(handle._regions[0].state.attentions[0].known))
        )
        pipe(**call | fresh())
        hook.remove()
        layers = sum(layer.is_sparse for layer in handle._regions[0].layers)
        assert f"{layers * calls // 2} of {layers * calls} attention calls full" in handle.summary()
    assert seen == [1, *[branches] * (calls - 1)]


def fresh() -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(3)}
