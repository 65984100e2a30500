"""`apply` on whole pipelines: which steps stay dense, references, guidance, image-to-image."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from tests import tiny_models
from tests.tiles import paper
from tests.tiny_models import flux_call, flux_pipeline, guided_call, sd3_pipeline
from torch import Tensor

import nearfield
from nearfield import Hilbert

EVERYTHING = paper(tiles=1, dense_layers=0, dense_steps=0)
TOLERANCE = 1e-5  # of float32, over several steps


def sparse(**fields: Any) -> Hilbert:
    return paper(**({"tiles": 4, "shared": "none", "dense_layers": 0, "dense_steps": 0} | fields))


def images(pipe: Any, call: dict[str, Any], **more: Any) -> Tensor:
    result: Tensor = pipe(**call | more).images
    return result


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def assert_differ(found: Tensor, other: Tensor) -> None:
    assert (found - other).abs().max() > 100 * TOLERANCE * other.abs().max()


def sparse_from(pipe: Any, call: dict[str, Any], first_sparse: int) -> Tensor:
    """The pipeline dense up to a step, counted by the pipeline's own callback, and sparse from there on."""
    handles = []

    def after(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step + 1 == first_sparse:
            handles.append(nearfield.apply(pipe, sparse()))
        return {}

    result = images(pipe, call, callback_on_step_end=after)
    assert len(handles) == 1
    handles[0].remove()
    return result


PIPELINES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "flux": (flux_pipeline, flux_call),
    "sd3": (sd3_pipeline, guided_call),
}


@pytest.mark.parametrize(("dense_steps", "num_dense"), [(2, 2), (0.5, 3)])
@pytest.mark.parametrize("name", PIPELINES)
def test_first_steps_stay_dense(name: str, dense_steps: float, num_dense: int) -> None:
    make, call = PIPELINES[name]
    pipe = make()
    expected = sparse_from(pipe, call(), num_dense)
    with nearfield.apply(pipe, sparse(dense_steps=dense_steps)) as handle:
        found = images(pipe, call())
        assert f"the first {num_dense} of 5 dense" in handle.summary()
    assert_close(found, expected)
    assert_differ(found, images(pipe, call()))
    assert_differ(found, sparse_from(pipe, call(), num_dense - 1))


def test_last_steps_stay_dense() -> None:
    """Of five steps the first and the last two; the oracle is told by the pipeline's own callback."""
    pipe = flux_pipeline()
    handles = []

    def after(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            handles.append(nearfield.apply(pipe, sparse()))
        if step == 2:
            handles[0].remove()
        return {}

    expected = images(pipe, flux_call(), callback_on_step_end=after)
    with nearfield.apply(pipe, sparse(dense_steps=(1, 2))) as handle:
        found = images(pipe, flux_call())
        assert "the first 1 and the last 2 of 5 dense" in handle.summary()
        kept = handle.pairs_kept()
    assert_close(found, expected)
    assert_differ(found, sparse_from(pipe, flux_call(), 1))
    with nearfield.apply(pipe, sparse(dense_steps=(0, 3))) as handle:
        assert_differ(images(pipe, flux_call()), found)
        assert handle.pairs_kept() == kept
        assert "the last 3 of 5 dense" in handle.summary()


def test_image_to_image_begins_where_its_noise_is() -> None:
    """Of 6 steps it does the last 3. Of these one is dense if the first 4 are, and none if the first 2 are."""
    pipe = flux_pipeline("FluxImg2ImgPipeline")
    picture = torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(0))

    def call() -> dict[str, Any]:
        return flux_call(steps=6) | {"image": picture, "strength": 0.5}

    expected = sparse_from(pipe, call(), 1)
    with nearfield.apply(pipe, sparse(dense_steps=4)):
        assert_close(images(pipe, call()), expected)
    with nearfield.apply(pipe, sparse()):
        all_sparse = images(pipe, call())
    with nearfield.apply(pipe, sparse(dense_steps=2)):
        assert_close(images(pipe, call()), all_sparse)
    assert_differ(expected, all_sparse)


def test_inpainting() -> None:
    pipe = flux_pipeline("FluxInpaintPipeline")
    picture = torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(1, 1, 24, 20)
    mask[..., 10:] = 1

    def call() -> dict[str, Any]:
        return flux_call() | {"image": picture, "mask_image": mask, "strength": 0.8}

    stock = images(pipe, call())
    with nearfield.apply(pipe, EVERYTHING):
        assert_close(images(pipe, call()), stock)


def test_kontext_reference_image() -> None:
    pipe = flux_pipeline("FluxKontextPipeline")
    picture = torch.rand(1, 3, 16, 12, generator=torch.Generator().manual_seed(0))

    def call() -> dict[str, Any]:
        return flux_call(steps=2) | {"image": picture, "max_area": 24 * 20, "_auto_resize": False}

    stock = images(pipe, call())
    with nearfield.apply(pipe, EVERYTHING) as handle:
        assert_close(images(pipe, call()), stock)
        assert "7 text + 12x10 + 8x6: 175 tokens" in handle.summary()
    with nearfield.apply(pipe, sparse()):
        assert_differ(images(pipe, call()), stock)


def test_controlnet() -> None:
    controlnet = tiny_models.settle(
        diffusers.FluxControlNetModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=tiny_models.HEAD_DIM,
            num_attention_heads=tiny_models.HEADS,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 6, 6),
        )
    )
    pipe = flux_pipeline("FluxControlNetPipeline", controlnet=controlnet)
    picture = torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(0))

    def call(scale: float = 1.0) -> dict[str, Any]:
        return flux_call(steps=2) | {"control_image": picture, "controlnet_conditioning_scale": scale}

    stock = images(pipe, call())
    with nearfield.apply(pipe, EVERYTHING):
        assert_close(images(pipe, call()), stock)
        assert_differ(images(pipe, call(0.0)), stock)


def test_sdxl_pipeline_with_guidance() -> None:
    pipe = tiny_models.sdxl_pipeline()
    stock = images(pipe, guided_call())
    with nearfield.apply(pipe, EVERYTHING):
        assert_close(images(pipe, guided_call()), stock)
    with nearfield.apply(pipe, sparse(dense_steps=5)):
        assert_close(images(pipe, guided_call()), stock)
    with nearfield.apply(pipe, sparse()), pytest.raises(AssertionError):
        assert_close(images(pipe, guided_call()), stock)


def pixart_call() -> dict[str, Any]:
    masks = {"prompt_attention_mask": torch.ones(1, 7), "negative_prompt_attention_mask": torch.ones(1, 7)}
    call = guided_call() | masks | {"negative_prompt": None, "use_resolution_binning": False}
    return {name: value for name, value in call.items() if "pooled" not in name}


def test_pixart_pipeline_with_guidance() -> None:
    pipe = tiny_models.pixart_pipeline()
    stock = images(pipe, pixart_call())
    with nearfield.apply(pipe, EVERYTHING):
        assert_close(images(pipe, pixart_call()), stock)


def test_several_images_per_prompt() -> None:
    pipe = flux_pipeline()
    stock = images(pipe, flux_call(steps=2), num_images_per_prompt=3)
    assert stock.shape[0] == 3
    with nearfield.apply(pipe, EVERYTHING):
        assert_close(images(pipe, flux_call(steps=2), num_images_per_prompt=3), stock)


def test_two_pipelines_at_once_share_a_model_class_and_nothing_else() -> None:
    pipes = [flux_pipeline(), flux_pipeline()]
    methods = [sparse(dense_steps=1), sparse(tiles=2, dense_steps=3)]
    expected = []
    for pipe, method in zip(pipes, methods, strict=True):
        with nearfield.apply(pipe, method):
            expected.append(images(pipe, flux_call()))
    with nearfield.apply(pipes[0], methods[0]), nearfield.apply(pipes[1], methods[1]):
        assert torch.equal(images(pipes[1], flux_call()), expected[1])
        assert torch.equal(images(pipes[0], flux_call()), expected[0])
    assert_differ(expected[0], expected[1])


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_pipeline_is_not_kept_alive(is_removed: bool) -> None:
    """Its transformer still knows its steps."""
    pipe = flux_pipeline()
    transformer, scheduler, alive = pipe.transformer, pipe.scheduler, weakref.ref(pipe)
    expected = sparse_from(pipe, flux_call(), 2)
    handle = nearfield.apply(pipe, sparse(dense_steps=2))
    images(pipe, flux_call())
    if is_removed:
        handle.remove()
    del pipe
    gc.collect()
    assert alive() is None
    if not is_removed:
        other = flux_pipeline(transformer=transformer)
        other.scheduler = scheduler
        assert_close(images(other, flux_call()), expected)


def test_removed_from_one_of_two_models() -> None:
    """The other one goes on, with its scheduler."""
    pipe = flux_pipeline()
    pipe.transformer_2 = tiny_models.flux()
    expected = sparse_from(pipe, flux_call(), 2)
    with nearfield.apply(pipe, sparse(dense_steps=2)) as handle:
        nearfield.remove(pipe.transformer_2)
        assert_close(images(pipe, flux_call()), expected)
        assert handle.summary().count("FluxTransformer2DModel") == 1


def test_an_exchanged_scheduler_is_asked() -> None:
    pipe = flux_pipeline()
    expected = sparse_from(pipe, flux_call(), 2)
    with nearfield.apply(pipe, sparse(dense_steps=2)):
        images(pipe, flux_call())
        pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        assert_close(images(pipe, flux_call()), expected)


def test_a_model_alone_takes_a_scheduler() -> None:
    pipe = flux_pipeline()
    expected = sparse_from(pipe, flux_call(), 2)
    with nearfield.apply(pipe.transformer, sparse(dense_steps=2), scheduler=pipe.scheduler):
        assert_close(images(pipe, flux_call()), expected)
    with nearfield.apply(pipe.transformer, sparse(dense_steps=2)) as handle:
        assert_differ(images(pipe, flux_call()), expected)
        assert "without a scheduler no step is known to be a first or last one" in handle.summary()


def test_a_scheduler_whose_loop_is_over_drives_no_call() -> None:
    """A second pipeline shares the model, with a scheduler of its own."""
    pipe = flux_pipeline()
    other = flux_pipeline(transformer=pipe.transformer)
    with nearfield.apply(pipe, sparse(dense_steps=2)) as handle:
        expected = images(pipe, flux_call())
        assert "the first 2 of 5 dense" in handle.summary()
        with pytest.raises(ValueError) as error:
            images(other, flux_call())
    assert str(error.value) == (
        "`scheduler` must be that of the loop which calls the model; got one whose steps are over. If another "
        "pipeline shares the model, remove first, and then apply to that pipeline, or pass its `scheduler=`."
    )
    with nearfield.apply(pipe, sparse(dense_steps=2), scheduler=other.scheduler):
        assert torch.equal(images(other, flux_call()), expected)


@pytest.mark.parametrize("kind", ["DDIMScheduler", "PNDMScheduler", "DDPMScheduler"])
@pytest.mark.parametrize("name", ["sdxl", "pixart"])
def test_a_scheduler_that_does_not_know_its_step(name: str, kind: str) -> None:
    """The step is known from the timestep; PNDM repeats one, so its value alone would not do."""
    pipe = tiny_models.sdxl_pipeline() if name == "sdxl" else tiny_models.pixart_pipeline()
    options = {"skip_prk_steps": True} if kind == "PNDMScheduler" else {}
    pipe.scheduler = getattr(diffusers, kind)(**options)
    model = pipe.unet if name == "sdxl" else pipe.transformer
    seen: list[bool] = []
    with nearfield.apply(pipe, sparse(dense_steps=3)) as handle:
        model.register_forward_hook(lambda *_: seen.append(handle._regions[0].calls.is_dense_step))
        images(pipe, guided_call() if name == "sdxl" else pixart_call())
        assert f"steps: the first 3 of {len(seen)} dense ({kind})" in handle.summary()
    assert seen == [True] * 3 + [False] * (len(seen) - 3)
    assert len(seen) == (6 if kind == "PNDMScheduler" else 5)


def test_a_scheduler_that_does_not_know_its_step_may_come_later() -> None:
    pipe = tiny_models.sdxl_pipeline()
    seen: list[bool] = []
    with nearfield.apply(pipe, sparse(dense_steps=3)) as handle:
        pipe.scheduler = diffusers.DDIMScheduler()
        pipe.unet.register_forward_hook(lambda *_: seen.append(handle._regions[0].calls.is_dense_step))
        images(pipe, guided_call())
    assert seen == [True] * 3 + [False] * 2


def test_a_timestep_that_tells_nothing_is_refused() -> None:
    """FLUX is given a thousandth of it."""
    pipe = flux_pipeline()
    message = (
        "`scheduler` must know its step (have `step_index`), or the model be given an item of `scheduler.timesteps` "
        "as it is, where the method goes by steps; got DDIMScheduler. Use another scheduler, or fields that do not "
        'ask: `dense_steps=0`, `predict="online"`.'
    )
    handle = nearfield.apply(pipe.transformer, sparse(dense_steps=0.2), scheduler=diffusers.DDIMScheduler())
    with handle, pytest.raises(ValueError) as error:
        images(pipe, flux_call())
    assert str(error.value) == message
    with nearfield.apply(pipe.transformer, EVERYTHING, scheduler=diffusers.DDIMScheduler()):
        assert images(pipe, flux_call()).isfinite().all()  # keeps no step dense


SUMMARY = """\
nearfield: Hilbert(tiles=4, near='tile', far=None, summary='mean', dense_layers=1, dense_steps=0.2)
FluxTransformer2DModel
  changed: 4 attention processors; tokens enter at hidden_states, img_ids, controlnet_block_samples, \
controlnet_single_block_samples and leave at norm_out
  attention: 4 sparse, 1 dense
    dense, dense_layers=1: transformer_blocks.0.attn
  steps: the first 1 of 5 dense (FlowMatchEulerDiscreteScheduler)
  last call: 7 text + 24x20: 487 tokens
"""


def test_summary() -> None:
    pipe = flux_pipeline()
    method = sparse(dense_layers=1, dense_steps=0.2)
    with nearfield.apply(pipe, method) as handle:
        before = handle.summary()
        assert before.endswith("not known before the first call; ask with summary(height=..., width=...)")
        assert "steps: some dense; how many there are is not known yet (FlowMatchEuler" in before
        assert "with dense steps" not in handle.summary(height=384, width=320)
        images(pipe, flux_call(height=48, width=40))
        told = handle.summary()
        asked = handle.summary(height=384, width=320)
    assert told.startswith(SUMMARY)
    assert asked == told.replace("last call:", "384x320 pixels:")
    geometry = nearfield.Geometry((24, 20), 7)
    shares = [method.layer(geometry, layer).num_pairs / 487**2 for layer in range(1, 5)]
    share = sum(shares) / 4
    assert f"pairs: {share:.1%} in sparse layers; attention at most {1 / share:.2f}x faster there" in told
    in_model = (1 + 4 * share) / 5
    assert f"{1 / in_model:.2f}x with the dense layers" in told
    assert f"with dense steps {1 / (0.2 + 0.8 * in_model):.2f}x over all 5 steps" in told
    assert "attend: grouped, plain torch" in told
