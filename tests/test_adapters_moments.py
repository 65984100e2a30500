"""`apply` of methods that remember from step to step: when they look, for whom, and when they forget.

The oracle runs the stock pipeline in raster order. It knows by construction which call is which: so many layers in a
call, so many calls in a step.
"""

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from tests import tiny_models
from tests.remembering import Remembering
from tests.test_adapters import assert_differ, assert_same, double, run, trace
from tests.tiny_models import TEXT, flux_call, flux_pipeline, guided_call, randn, sd3_pipeline
from torch import Tensor
from torch.nn import functional

import nearfield
from nearfield import Geometry, Merge
from nearfield.methods import BlockTopK

LAYERS = 2
METHOD = Remembering()
GEOMETRY = Geometry((12, 10), TEXT)


def raster(geometry: Geometry, method: Remembering) -> tuple[Tensor, Tensor]:
    """The method's order of all tokens, and its inverse."""
    start = geometry.image_spans[0][0]
    order = torch.arange(geometry.num_tokens)
    images = method.ordering(geometry).order
    order[start : start + len(images)] = start + images
    return order, torch.argsort(order)


class Oracle:
    """Stock attention, masked by what was found at the last refresh of the same layer and branch."""

    def __init__(
        self,
        method: Remembering,
        geometry: Geometry,
        branches: int,
        refreshes: list[int],
        layers: int = LAYERS,
    ) -> None:
        self.method, self.geometry, self.branches = method, geometry, branches
        self.refreshes, self.layers = refreshes, layers
        self.masks: dict[tuple[int, int], Tensor] = {}
        self.calls = 0
        self.dense = functional.scaled_dot_product_attention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **kw: Any) -> Tensor:
        tokens = self.geometry.num_tokens
        if (query.shape[2], key.shape[2]) != (tokens, tokens):  # cross-attention, or of an autoencoder
            return self.dense(query, key, value, attn_mask, **kw)
        layer, rest = self.calls % self.layers, self.calls // self.layers
        branch, step = rest % self.branches, rest // self.branches
        self.calls += 1
        branch = 0 if self.method.share_branches else branch
        if step in self.refreshes and (rest % self.branches == branch):
            order, inverse = raster(self.geometry, self.method)
            weights = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1)
            keep = self.method.keep(weights[:, :, order][..., order], self.geometry)
            keep = keep.repeat_interleave(self.method.q_block, 2)[:, :, :tokens]
            keep = keep.repeat_interleave(self.method.k_block, 3)[..., :tokens]
            self.masks[layer, branch] = keep[:, :, inverse][..., inverse]
            return self.dense(query, key, value, attn_mask, **kw)
        return self.dense(query, key, value, self.masks[layer, branch], **kw)


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    def remembered(
        pipe: Any,
        call: dict[str, Any],
        method: Remembering = METHOD,
        geometry: Geometry = GEOMETRY,
        branches: int = 1,
    ) -> Tensor:
        attention = Oracle(method, geometry, branches, method.refreshes(call["num_inference_steps"]))
        with monkeypatch.context() as patch:
            patch.setattr(functional, "scaled_dot_product_attention", attention)
            result: Tensor = pipe(**call).images
        assert attention.calls == LAYERS * branches * call["num_inference_steps"]
        return result

    return remembered


def pipe_of(kind: str = "FluxPipeline", **parts: Any) -> Any:
    return flux_pipeline(kind, transformer=flux_of(), **parts)


def flux_of(layers: int = 1) -> Any:
    return tiny_models.flux(layers=layers, single_layers=1).double()


def call_of(steps: int = 6, seed: int = 1, **more: Any) -> dict[str, Any]:
    call = flux_call(steps=steps) | {"prompt_embeds": randn(1, TEXT, 8, seed=seed)} | more
    return dict(double(call))


def guidance() -> dict[str, Any]:
    """Two calls in a step."""
    return {
        "negative_prompt_embeds": randn(1, TEXT, 8, seed=4),
        "negative_pooled_prompt_embeds": randn(1, 8, seed=5),
        "true_cfg_scale": 2.0,
    }


def remembered(handle: Any) -> list[tuple[str, int]]:
    """What the first layer remembers, by branch and batch."""
    return list(handle._regions[0].state.attentions[0].known)


# -- the schedule --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_guided", [False, True])
def test_lists_are_made_on_schedule_and_serve_until_the_next(
    is_guided: bool, oracle: Callable[..., Tensor]
) -> None:
    pipe = pipe_of()
    more, branches = (guidance(), 2) if is_guided else ({}, 1)
    expected = oracle(pipe, call_of(**more), branches=branches)
    with nearfield.apply(pipe, METHOD) as handle:
        assert "not known before them" in handle.summary(height=192, width=160, text=TEXT)
        found = pipe(**call_of(**more)).images
        told = handle.summary()
    assert_same(found, expected)
    assert_differ(found, pipe(**call_of(**more)).images)
    calls = 6 * LAYERS * branches
    assert f"last generation: {calls // 3} of {calls} attention calls full, the others kept " in told
    assert "lists are made at steps 0, 3 of 6, by full attention" in told


def test_two_generations_with_guidance_off_and_on(oracle: Callable[..., Tensor]) -> None:
    """Each is what it is alone, also where the first has but one step, which is not told from its second."""
    pipe = pipe_of()
    calls = [
        (call_of(1), 1),
        (call_of(1, seed=9), 1),
        (call_of(seed=8, **guidance()), 2),
        (call_of(4), 1),
        (call_of(5, **guidance()), 2),
    ]
    expected = [oracle(pipe, call | fresh(), branches=branches) for call, branches in calls]
    assert_differ(expected[0], expected[1])
    with nearfield.apply(pipe, METHOD):
        for (call, _), wanted in zip(calls, expected, strict=True):
            assert_same(pipe(**call | fresh()).images, wanted)


def fresh() -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(3)}


def test_a_generation_that_was_broken_off_leaves_nothing_to_the_next(oracle: Callable[..., Tensor]) -> None:
    pipe = pipe_of()
    expected = oracle(pipe, call_of(seed=9))

    def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        raise InterruptedError

    with nearfield.apply(pipe, METHOD):
        with pytest.raises(InterruptedError):
            pipe(**call_of(), callback_on_step_end=stop)
        assert_same(pipe(**call_of(seed=9)).images, expected)


@pytest.mark.parametrize("share", [False, True])
def test_calls_without_names_are_told_apart_by_their_text(share: bool, oracle: Callable[..., Tensor]) -> None:
    """This pipeline computes two branches in a step and does not say which is which."""
    pipe = pipe_of("FluxImg2ImgPipeline")
    pipe.vae.double()
    method = Remembering(share_branches=share)
    picture = torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(0)).double()
    more = guidance() | {"image": picture, "strength": 1.0}
    seen: list[list[str]] = []
    expected = oracle(pipe, call_of(4, **more), method, branches=2)
    with nearfield.apply(pipe, method) as handle:
        hook = pipe.transformer.register_forward_hook(
            lambda *_: seen.append(sorted(name for name, _ in remembered(handle)))
        )
        assert_same(pipe(**call_of(4, **more)).images, expected)
        hook.remove()
    assert seen == ([[""]] * 8 if share else [["text 1"]] + [["text 1", "text 2"]] * 7)


def test_guidance_in_a_doubled_batch_is_one_branch(oracle: Callable[..., Tensor]) -> None:
    pipe = sd3_pipeline()
    pipe.transformer.double()
    call = dict(double(guided_call(steps=4)))
    layers = len(pipe.transformer.attn_processors)
    with nearfield.apply(pipe, METHOD) as handle:
        pipe(**call)
        assert remembered(handle) == [("text 1", 2)]
        assert f"{2 * layers} of {4 * layers} attention calls full" in handle.summary()


def test_image_to_image_begins_in_the_middle_of_the_schedule() -> None:
    pipe = pipe_of("FluxImg2ImgPipeline")
    pipe.vae.double()
    picture = torch.rand(1, 3, 24, 20, generator=torch.Generator().manual_seed(0)).double()
    with nearfield.apply(pipe, Remembering(refresh=(0.0, 0.8))) as handle:
        pipe(**call_of(6, image=picture, strength=0.5))
        # Of 6 steps the last 3: lists are made at the first of them, and at the fifth of all.
        assert f"{2 * LAYERS} of {3 * LAYERS} attention calls full" in handle.summary()


def test_dense_steps_come_before_the_first_lists(oracle: Callable[..., Tensor]) -> None:
    pipe = pipe_of()
    method = Remembering(refresh=(0.0,), dense_steps=2)
    with nearfield.apply(pipe, method) as handle:
        pipe(**call_of(6))
        told = handle.summary()
    assert f"{LAYERS} of {4 * LAYERS} attention calls full" in told
    assert "the first 2 of 6 dense" in told
    assert "lists are made at step 2 of 6" in told


def test_a_scheduler_that_does_not_know_its_step() -> None:
    """The timestep that the model is called with tells."""
    pipe = tiny_models.pixart_pipeline()
    pipe.scheduler = diffusers.DDIMScheduler()
    masks = {"prompt_attention_mask": torch.ones(1, 7), "negative_prompt_attention_mask": torch.ones(1, 7)}
    call = guided_call(steps=6) | masks | {"negative_prompt": None, "use_resolution_binning": False}
    call = {name: value for name, value in call.items() if "pooled" not in name}
    with nearfield.apply(pipe, METHOD) as handle:
        for _ in range(2):
            call["generator"] = torch.Generator().manual_seed(3)
            pipe(**call)
            assert "6 of 18 attention calls full" in handle.summary()


def test_a_unet_that_is_called_once_for_each_branch() -> None:
    """As loops written by hand do; its transformers see text that the model may have changed."""
    model, scheduler = tiny_models.sdxl(), diffusers.EulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    inputs = tiny_models.sdxl_inputs((8, 8))
    other = inputs | {"encoder_hidden_states": randn(1, TEXT, 8, seed=9)}
    with nearfield.apply(model, METHOD, scheduler=scheduler) as handle:
        for timestep in scheduler.timesteps:
            results = [run(model, call | {"timestep": timestep}) for call in (inputs, other)]
            scheduler.step(results[0], timestep, inputs["sample"])
            assert remembered(handle) == [("text 1", 1), ("text 2", 1)]


# -- forgetting ----------------------------------------------------------------------------------------------------


def test_memory_is_released_when_a_generation_is_over() -> None:
    pipe = pipe_of()
    kept: list[weakref.ref[Any]] = []

    def look(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        readers = handle._regions[0].state.attentions
        kept.extend(weakref.ref(known.lists) for reader in readers for known in reader.known.values())
        return {}

    with nearfield.apply(pipe, METHOD) as handle:
        pipe(**call_of(2), callback_on_step_end=look)
        gc.collect()
        assert len(kept) == 2 * LAYERS
        assert not any(known() is not None for known in kept)
        assert "  taken: " in handle.summary()  # that is still known


@pytest.mark.parametrize("way", ["remove", "another size", "prepare"])
def test_memory_is_released(way: str) -> None:
    """By a pipeline that does not say when its generation is over."""
    pipe = sd3_pipeline()
    handle = nearfield.apply(pipe, METHOD)
    pipe(**guided_call(steps=2))
    known = weakref.ref(next(iter(handle._regions[0].state.attentions[0].known.values())).lists)
    assert known() is not None
    if way == "remove":
        handle.remove()
    elif way == "prepare":
        handle.prepare(height=256, width=128, text=TEXT)
    else:
        pipe(**guided_call(height=16, width=16, steps=1))
    gc.collect()
    assert known() is None
    handle.remove()


def test_sizes_may_change(oracle: Callable[..., Tensor]) -> None:
    pipe = pipe_of()
    calls = [
        call_of(4, height=height, width=width) for height, width in ((24, 20), (20, 24), (16, 16), (24, 20))
    ]
    grids = [(12, 10), (10, 12), (8, 8), (12, 10)]
    expected = [
        oracle(pipe, call | fresh(), geometry=Geometry(grid, TEXT))
        for call, grid in zip(calls, grids, strict=True)
    ]
    with nearfield.apply(pipe, METHOD):
        for call, wanted in zip(calls, expected, strict=True):
            assert_same(pipe(**call | fresh()).images, wanted)


def test_texts_that_are_gone_are_not_remembered() -> None:
    """A loop by hand that makes its text anew in every call: each call is full, and nothing piles up."""
    model, scheduler = flux_of(), diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    stock = run(model, double(tiny_models.flux_inputs((12, 10))))
    with nearfield.apply(model, METHOD, scheduler=scheduler) as handle:
        for number in range(3):
            assert_same(run(model, double(tiny_models.flux_inputs((12, 10)))), stock)
            assert remembered(handle) == [(f"text {number + 1}", 1)]


@pytest.mark.parametrize("names", [False, True], ids=["without names", "with names"])
def test_a_loop_that_loses_its_texts_is_told_so_once(names: bool) -> None:
    """It pays for full attention at every step; with names its calls remember."""
    model, scheduler = flux_of(), diffusers.FlowMatchEulerDiscreteScheduler()
    with (
        nearfield.apply(model, METHOD, scheduler=scheduler) as handle,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        counts = list[int]()
        for _ in range(2):
            scheduler.set_timesteps(4)
            for timestep in scheduler.timesteps:
                inputs = double(tiny_models.flux_inputs((12, 10))) | {
                    "timestep": timestep[None].double() / 1000
                }
                with model.cache_context("cond") if names else nullcontext():
                    run(model, inputs)
                scheduler.step(torch.zeros(1), timestep, torch.zeros(1))
                counts.append(len([one for one in said if "Nothing is remembered" in str(one.message)]))
        kept = handle.pairs_kept()
    assert counts == ([0] * 8 if names else [0, 0, 1, 1, 1, 1, 1, 1])
    assert kept is not None
    assert (kept < 1) == names


# -- beside other things -------------------------------------------------------------------------------------------


def test_remove_leaves_no_trace() -> None:
    pipe = pipe_of()
    expected = pipe(**call_of(3)).images  # diffusers leaves its registry of hooks at the first call
    before = trace(pipe.transformer)
    with nearfield.apply(pipe, METHOD):
        assert_differ(pipe(**call_of(3)).images, expected)
        assert "nearfield_listener" in dict(pipe.transformer.named_children())
    assert trace(pipe.transformer) == before
    assert torch.equal(pipe(**call_of(3)).images, expected)


def test_with_a_cache_of_diffusers(oracle: Callable[..., Tensor]) -> None:
    """Both hear the names of calls, whichever came first."""
    pipe = pipe_of()
    expected = oracle(pipe, call_of(4, **guidance()), branches=2)
    config = diffusers.FirstBlockCacheConfig(threshold=0.0)
    pipe.transformer.enable_cache(config)
    with nearfield.apply(pipe, METHOD):
        assert_same(pipe(**call_of(4, **guidance())).images, expected)
        pipe.transformer.disable_cache()
        pipe.transformer.enable_cache(config)
        assert_same(pipe(**call_of(4, **guidance())).images, expected)
    pipe.transformer.disable_cache()


def test_offloaded(oracle: Callable[..., Tensor]) -> None:
    """Offloading exchanges `forward`, before and after."""
    pipe = pipe_of()
    expected = oracle(pipe, call_of(4, **guidance()), branches=2)
    _, hook = accelerate.cpu_offload_with_hook(pipe.transformer, execution_device=torch.device("cpu"))
    with nearfield.apply(pipe, METHOD):
        assert_same(pipe(**call_of(4, **guidance())).images, expected)
        hook.remove()
        accelerate.cpu_offload_with_hook(pipe.transformer, execution_device=torch.device("cpu"))
        assert_same(pipe(**call_of(4, **guidance())).images, expected)


def looped(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Three steps by hand."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(3)
    results = []
    with nearfield.apply(model, METHOD, scheduler=scheduler):
        for timestep in scheduler.timesteps:
            results.append(run(model, inputs | {"timestep": timestep[None] / 1000}))
            scheduler.step(results[-1], timestep, inputs["hidden_states"])
    return results


def test_compiled_blocks() -> None:
    """What remembers is left out of their graphs."""
    torch._dynamo.reset()
    model, inputs = flux_of(layers=0), double(tiny_models.flux_inputs((12, 10)))
    expected = looped(model, inputs)
    model.compile_repeated_blocks(backend="eager")
    for found, wanted in zip(looped(model, inputs), expected, strict=True):
        assert_same(found, wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "method",
    [BlockTopK(16, 8, dense_layers=0), BlockTopK(16, 4, top_p=0.5, min_similarity=0.6, dense_layers=0)],
)
def test_compiled_blocks_that_choose_at_every_call(method: Any) -> None:
    torch._dynamo.reset()
    model, inputs = flux_of(layers=0), double(tiny_models.flux_inputs((12, 10)))
    with nearfield.apply(model, method):
        expected = run(model, inputs)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert_same(run(model, inputs), expected)
    torch._dynamo.reset()


def test_a_whole_model_compiled_is_refused() -> None:
    torch._dynamo.reset()
    pipe = pipe_of()
    with nearfield.apply(pipe, METHOD) as handle:
        handle.prepare(height=192, width=160, text=TEXT)
        compiled = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="must not be compiled as a whole where the method remembers"):
            run(compiled, double(tiny_models.flux_inputs((12, 10))))
    torch._dynamo.reset()


def gradients(model: Any, inputs: dict[str, Any]) -> Tensor:
    leaf = inputs["hidden_states"].clone().requires_grad_()
    tiny_models.first(model(**inputs | {"hidden_states": leaf})).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize(
    "method",
    [BlockTopK(16, 8, dense_layers=0), BlockTopK(16, 4, top_p=0.5, min_similarity=0.6, dense_layers=0)],
)
def test_training_chooses_at_every_call(method: Any) -> None:
    model, inputs = flux_of(), double(tiny_models.flux_inputs((12, 10), 2))
    dense = gradients(model, inputs)
    with nearfield.apply(model, method):
        plain = gradients(model, inputs)
        model.enable_gradient_checkpointing()
        assert_same(gradients(model.train(), inputs), plain)
    model.disable_gradient_checkpointing()
    assert_differ(plain, dense)


def test_training_with_a_method_that_remembers() -> None:
    """Needs a scheduler; and layers that are computed again would find what they left."""
    model, inputs = flux_of(), double(tiny_models.flux_inputs((12, 10)))
    with pytest.raises(ValueError) as error:
        nearfield.apply(model, METHOD)
    assert str(error.value) == (
        "`scheduler` must be given where the method remembers from step to step; got None. Apply to a pipeline, pass "
        '`scheduler=`, or let the method decide at every call (predict="online").'
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    model.train().enable_gradient_checkpointing()
    message = (
        "`backward` must not compute layers again that remember; got checkpointing. "
        'Use predict="online", or call `disable_gradient_checkpointing()`.'
    )
    with nearfield.apply(model, METHOD, scheduler=scheduler):
        with pytest.raises(ValueError) as error:
            gradients(model, inputs)
        assert str(error.value) == message
        model.disable_gradient_checkpointing()
        full = gradients(model, inputs)
    assert_same(full, gradients(model, inputs))


def test_two_models_of_a_pipeline_share_its_steps() -> None:
    """The second takes over in the middle, and makes lists of its own there."""
    pipe = pipe_of()
    pipe.transformer_2 = flux_of()
    with nearfield.apply(pipe, METHOD) as handle:
        pipe(**call_of(4))
        summaries = handle.summary().split("FluxTransformer2DModel")
    assert "attention calls full" in summaries[1]
    assert "attention calls full" not in summaries[2]


def test_lists_of_merged_tokens_go_with_their_maps() -> None:
    """Tokens that are merged anew are others, in every branch."""
    pipe = pipe_of()
    merge = Merge(0.5, region_size=16, skip_blocks=(0, 0), refresh=(3, 3))
    method = Remembering(refresh=(0.0,))
    with nearfield.apply(pipe, merge | method) as handle:
        pipe(**call_of(6, **guidance()))
        # At steps 0 and 3, in two branches.
        assert f"{4 * LAYERS} of {12 * LAYERS} attention calls full" in handle.summary()
    assert method.refreshes(6) == [0]


def test_summary_counts_pairs_and_memory_of_merged_tokens() -> None:
    """Everything is read, but among 67 of 127 tokens, in dense steps, too."""
    pipe = pipe_of()
    merge = Merge(0.5, skip_blocks=(0, 0), refresh=(3, 3))
    method = Remembering(least=0.0, refresh=(0.0,), dense_steps=1)
    with nearfield.apply(pipe, merge | method) as handle:
        pipe(**call_of(6))
        assert handle.pairs_kept() == pytest.approx((67 / 127) ** 2)
        told = handle.summary()
    assert "pairs: 27.8% in sparse and merged layers" in told
    assert "with dense steps 3.59x over all 6 steps" in told
    assert "lists are made at steps 1, 3 of 6" in told
    num_bytes = LAYERS * method.mask_bytes(Geometry((60,), TEXT), 1, tiny_models.HEADS)
    assert f"memory: {num_bytes / 1024:.1f} KiB as bits" in told


def test_parts_of_a_panorama_are_not_mixed_up() -> None:
    """A branch that is computed twice in a step is that of two images: every call is full."""
    model, schedule = flux_of(), diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(8)
    inputs = double(tiny_models.flux_inputs((12, 10)))
    parts = [inputs | {"hidden_states": randn(1, 120, 4, seed=seed).double()} for seed in (8, 9)]
    with nearfield.apply(model, METHOD, scheduler=schedule) as handle:
        for step in range(2):
            schedule._step_index = step
            for part in parts:
                run(model, part)
        assert f"last generation: {4 * LAYERS} of {4 * LAYERS} attention calls full" in handle.summary()


def test_blocks_say_what_they_read_and_estimate_what_they_drop() -> None:
    model, inputs = flux_of(), double(tiny_models.flux_inputs((12, 10)))
    with nearfield.apply(model, BlockTopK(16, 8, top_p=0.5, dense_layers=0)) as handle:
        assert "not known before them" in handle.summary(height=192, width=160)
        run(model, inputs)
        told = handle.summary()
    assert "calls so far: 2 attention calls kept " in told
    assert "(estimated by means)" in told
    assert "pairs: " in told
    with nearfield.apply(model, BlockTopK(16, 8, keep=0.25, dense_layers=0)) as handle:
        assert "attention at most " in handle.summary(height=192, width=160)
