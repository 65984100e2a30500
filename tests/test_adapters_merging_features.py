"""Composition tokens together with what else is done to models: schedules, guidance, training, LoRA, compiling."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from tests import tiny_models
from tests.remembering import Remembering
from tests.test_adapters import assert_differ, assert_same, double, run, trace
from tests.test_adapters_features import by_groups, gradients, gradients_after, graphs, loss
from tests.test_adapters_merging import ALL, HARD, NAMES, SPARSE, by_hand, geometry_of
from tests.tiles import paper
from tests.tiny_models import (
    MODELS,
    TEXT,
    flux_call,
    flux_pipeline,
    guided_call,
    randn,
    sd3_pipeline,
    sdxl_pipeline,
)
from torch import Tensor

import nearfield
from nearfield import Geometry, Hilbert, LogLinear, Merge
from nearfield.layout.geometry import Shortened
from nearfield.methods import BipartiteMerge, BlockTopK, Composition
from nearfield.methods.composition import DENSE_FID

assert graphs  # a fixture


# -- the schedule --------------------------------------------------------------------------------------------------


class Made:
    """Every map that was made: the batch, and the destinations that were given and found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[Tensor | None] = []
        self.found: list[Tensor] = []
        make = Merge.merging

        def spy(method: Merge, *args: Any, destinations: Any = None, **more: Any) -> Any:
            made = make(method, *args, destinations=destinations, **more)
            self.given.append(destinations)
            self.found.append(made.destinations)
            return made

        monkeypatch.setattr(Merge, "merging", spy)

    def forget(self) -> None:
        self.given, self.found = [], []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


SCHEDULE = Merge(region_size=16, skip_blocks=(0, 0), refresh=(4, 2))


def two_calls_per_step() -> dict[str, Any]:
    negative = {
        "negative_prompt_embeds": randn(1, TEXT, 8, seed=4),
        "negative_pooled_prompt_embeds": randn(1, 8, seed=5),
    }
    return flux_call(steps=6) | negative | {"true_cfg_scale": 2.0}


def test_maps_follow_the_step_and_every_call_of_a_step_has_its_own(made: Made) -> None:
    """Two groups and two calls per step: four maps at steps 0, 2 and 4; those of step 2 keep their destinations."""
    pipe = flux_pipeline()
    with nearfield.apply(pipe, SCHEDULE):
        once = pipe(**two_calls_per_step()).images
        assert [given is None for given in made.given] == [True] * 4 + [False] * 4 + [True] * 4
        assert all(given is found for given, found in zip(made.given[4:8], made.found[:4], strict=True))
        # The text has no influence before the first block, but before the first single one.
        assert torch.equal(made.found[0], made.found[2])
        assert not torch.equal(made.found[1], made.found[3])
        made.forget()
        # Another loop makes its own, also where the text is the same tensor and no phase has passed.
        assert torch.equal(pipe(**two_calls_per_step()).images, once)
        assert len(made.given) == 12
    with nearfield.apply(pipe, Merge(region_size=16, skip_blocks=(0, 0), refresh=(1, 1))):
        assert not torch.equal(pipe(**two_calls_per_step()).images, once)


def test_a_short_loop_does_not_use_the_maps_of_the_last_one(made: Made) -> None:
    pipe, call = flux_pipeline(), flux_call(steps=2)  # the same text tensors both times
    with nearfield.apply(pipe, SCHEDULE):
        pipe(**call)
        assert len(made.given) == 2
        pipe(**call | {"generator": torch.Generator().manual_seed(9)})
        assert made.given == [None] * 4


@pytest.mark.parametrize(("make", "num_groups"), [(sd3_pipeline, 1), (sdxl_pipeline, 4)])
def test_guidance_in_one_batch(make: Any, num_groups: int, made: Made) -> None:
    pipe = make()
    with nearfield.apply(pipe, SCHEDULE) as handle:
        once = pipe(**guided_call(steps=5)).images
        assert [len(found) for found in made.found] == [2] * len(made.found)
        assert len(made.found) % num_groups == 0
        assert len(made.found) < 5 * num_groups
        assert torch.equal(pipe(**guided_call(steps=5)).images, once)
        assert "destinations made anew every 4 steps, shares every 2" in handle.summary()


def test_schedulers_that_do_not_know_their_step(made: Made) -> None:
    """The timestep tells where it is an item of the scheduler's; where nothing tells, every call makes maps."""
    pipe = sdxl_pipeline(diffusers.DDIMScheduler())
    with nearfield.apply(pipe, SCHEDULE):
        pipe(**guided_call(steps=4))
        by_step = len(made.given)
        made.forget()
        inputs = tiny_models.sdxl_inputs((12, 16))
        for _ in range(2):
            run(pipe.unet, inputs)
        assert made.given == [None] * len(made.given)
        assert len(made.given) == by_step  # two calls of 4 transformers each, as two phases


def test_another_size_or_batch_makes_maps_of_its_own(made: Made) -> None:
    model, schedule = tiny_models.flux(1, 1), diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(8)
    small, large = tiny_models.flux_inputs((6, 8)), tiny_models.flux_inputs((8, 8))
    large["encoder_hidden_states"] = small["encoder_hidden_states"]
    with nearfield.apply(model, Merge(region_size=16, skip_blocks=(0, 0)), scheduler=schedule):
        for step, inputs in enumerate([small, small, large, large]):
            schedule._step_index = step
            run(model, inputs)
    assert len(made.given) == 4
    assert made.given == [None] * 4


def test_the_same_step_again_makes_maps_anew(made: Made) -> None:
    """Nothing says that the second call is about the same image: a training loop has one step for all."""
    model, schedule = tiny_models.flux(1, 1), diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(8)
    schedule._step_index = 3
    inputs = tiny_models.flux_inputs((6, 8))
    with nearfield.apply(model, ALL, scheduler=schedule):
        run(model, inputs)
        run(model, inputs | {"hidden_states": randn(1, 48, 4, seed=8)})
    assert made.given == [None] * 4
    assert not torch.equal(made.found[0], made.found[2])


def test_parts_of_a_panorama_are_not_mixed_up(made: Made) -> None:
    """Two calls of a step with one text: at the next step nothing says which map was whose."""
    model, schedule = tiny_models.flux(1, 1), diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(8)
    inputs = tiny_models.flux_inputs((6, 8))
    with nearfield.apply(model, ALL, scheduler=schedule):
        for step in range(2):
            schedule._step_index = step
            for seed in (8, 9):
                run(model, inputs | {"hidden_states": randn(1, 48, 4, seed=seed)})
        assert made.given == [None] * 8
        assert torch.equal(made.found[0], made.found[4])
        assert not torch.equal(made.found[0], made.found[2])
        made.forget()
        schedule.set_timesteps(8)
        for step in range(2):
            schedule._step_index = step
            run(model, inputs)
        assert made.given == [None] * 2  # another generation, whose second step needs no maps


# -- training ------------------------------------------------------------------------------------------------------


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-6 * scale, name


@pytest.mark.parametrize("placement", ["block", "module"])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_gradients_are_those_of_merging_by_hand(name: str, placement: Any) -> None:
    """The choice is taken as it is; gradients go through the tokens."""
    method = replace(ALL, placement=placement)
    make, inputs_of = MODELS[name]
    model, call = make().double(), double(inputs_of((6, 8), 2))
    with by_hand(name, model, method, geometry_of(name, (6, 8))):
        expected = gradients(model, call)
    with nearfield.apply(model, method):
        found = gradients(model, call)
        assert_same_gradients(found, expected)
        model.train().enable_gradient_checkpointing()
        later = loss(model, name, (6, 8))
        again = gradients(model, call)
        run(model.eval(), double(inputs_of((8, 6))))
        model.train()
        one = gradients_after(later, model)
    assert_same_gradients(again, found)
    model.disable_gradient_checkpointing()
    with nearfield.apply(model.eval(), method):
        assert_same_gradients(one, gradients_after(loss(model, name, (6, 8)), model))


# -- together with -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["block", "module"])
@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_lora_loaded_and_unloaded_between_calls(name: str, placement: Any) -> None:
    method = replace(ALL, placement=placement)
    make, inputs_of = MODELS[name]
    model, call = make().double(), double(inputs_of((6, 8)))
    with nearfield.apply(model, method):
        without = run(model, call)
        torch.manual_seed(0)
        targets = ["to_q", "to_v", "to_out.0", "proj_mlp", "proj_out", "net.2"]
        model.add_adapter(peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
        model.double()
        found = run(model, call)
    assert_differ(found, without)
    with by_hand(name, model, method, geometry_of(name, (6, 8))):
        assert_same(found, run(model, call))
    with nearfield.apply(model, method):
        model.unload_lora()
        assert_same(run(model, call), without)


def test_controlnet_residuals_meet_their_tokens() -> None:
    model, call = tiny_models.flux().double(), double(tiny_models.flux_inputs((6, 8), 2))
    residuals = [randn(2, 48, 32, seed=seed).double() for seed in range(2)]
    call |= {"controlnet_block_samples": residuals, "controlnet_single_block_samples": residuals[1:]}
    with by_hand("flux", model, ALL, geometry_of("flux", (6, 8))):
        expected = run(model, call)
    with nearfield.apply(model, ALL):
        assert_same(run(model, call), expected)


@pytest.mark.parametrize("placement", ["block", "module"])
def test_offloading_by_groups(placement: Any) -> None:
    model, call = tiny_models.flux(), tiny_models.flux_inputs((6, 8))
    with nearfield.apply(model, replace(ALL, placement=placement)):
        expected = run(model, call)
        by_groups(model)
        assert torch.equal(run(model, call), expected)


@pytest.mark.parametrize("placement", ["block", "module"])
@pytest.mark.parametrize("name", ["sd3", "sdxl"])
def test_autocast_keeps_the_residual_stream(name: str, placement: Any) -> None:
    make, inputs_of = MODELS[name]
    model, call, method = make(), inputs_of((6, 8)), replace(HARD, placement=placement)
    with nearfield.apply(model, method), torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(model, call)
    with nearfield.apply(model, method):
        exact = run(model, call)
    assert 0 < (found - exact).abs().max() < 0.05 * exact.abs().max()


CACHES = [
    diffusers.FirstBlockCacheConfig(threshold=1.0),
    diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500
    ),
]


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: type(cache).__name__)
def test_cached_blocks_are_refused(cache: Any) -> None:
    """Also where it is attention inside of blocks that is cached."""
    model, call = tiny_models.flux(), tiny_models.flux_inputs((6, 8))
    model.enable_cache(cache)
    with nearfield.apply(model, ALL):
        with pytest.raises(ValueError, match="must have no cache of diffusers where tokens are merged"):
            run(model, call)
        model.disable_cache()
        run(model, call)


def test_a_layer_that_is_skipped_makes_no_map() -> None:
    """Skip-layer guidance of SD3: whoever comes first makes it."""
    model, call = tiny_models.sd3(dual=()).double(), double(tiny_models.sd3_inputs((6, 8)))
    with nearfield.apply(model, Merge(region_size=16, skip_blocks=(0, 0), groups=2)):
        found = run(model, call | {"skip_layers": [0]})
        assert found.isfinite().all()
        assert_differ(found, run(model, call))


def test_ids_that_describe_no_grid_are_not_merged() -> None:
    model, call = tiny_models.flux(), tiny_models.flux_inputs((6, 8))
    call["img_ids"] = torch.zeros_like(call["img_ids"])
    stock = run(model, call)
    with nearfield.apply(model, ALL) as handle:
        assert torch.equal(run(model, call), stock)
        assert "dense calls: 1" in handle.summary()


# -- torch.compile -------------------------------------------------------------------------------------------------


def test_compiled_blocks(graphs: Any) -> None:
    """Layers share graphs, later steps and a third size need no new ones."""
    model = tiny_models.sdxl()
    calls = [tiny_models.sdxl_inputs(grid, 2) for grid in [(8, 8), (8, 10), (12, 10), (12, 12), (14, 12)]]
    with nearfield.apply(model, ALL):
        expected = [run(model, call) for call in calls]
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        counts = []
        for call, wanted in zip(calls, expected, strict=True):
            assert torch.equal(run(model, call), wanted)
            counts.append(graphs())
    assert counts[2] == counts[-1], counts


def test_compiled_blocks_rotate(graphs: Any) -> None:
    model, call = tiny_models.qwen(), tiny_models.qwen_inputs((6, 8), 2)
    with nearfield.apply(model, HARD | SPARSE):
        expected = run(model, call)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(run(model, call), expected)
        assert graphs() <= 3


def test_compiled_blocks_whose_modules_merge_are_refused(graphs: Any) -> None:
    model, call = tiny_models.flux(1, 1), tiny_models.flux_inputs((6, 8))
    with nearfield.apply(model, Merge(region_size=16, skip_blocks=(1, 0), placement="module")):
        expected = run(model, call)
        model.transformer_blocks[0].compile(fullgraph=True, backend="eager")  # which is not merged
        assert torch.equal(run(model, call), expected)
        model.single_transformer_blocks[0].compile(fullgraph=True, backend="eager")
        with pytest.raises(
            ValueError, match=r"`placement` must be 'block' where single_transformer_blocks\.0 is comp"
        ):
            run(model, call)


def test_a_model_that_is_compiled_as_a_whole_is_refused(graphs: Any) -> None:
    model, call = tiny_models.flux(1, 1), tiny_models.flux_inputs((6, 8))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    message = "must not merge where torch.compile traces the whole model"
    with nearfield.apply(model, ALL) as handle:
        handle.prepare(height=96, width=128, text=TEXT)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            run(compiled, call)


# -- with sparse attention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attention",
    [
        BlockTopK(16, top_p=1.0, dense_layers=0, dense_steps=0),
        LogLinear(block=4, topk=64, enrich=0, dense_layers=0, dense_steps=0),
        paper(tiles=1, shared="none", dense_layers=0, dense_steps=0),
    ],
)
def test_methods_that_read_everything_change_nothing_about_merging(attention: Any) -> None:
    model, call = tiny_models.flux().double(), double(tiny_models.flux_inputs((6, 8), 2))
    with by_hand(
        "flux", model, Composition(HARD, paper(tiles=1, shared="none")), geometry_of("flux", (6, 8))
    ):
        expected = run(model, call)
    with nearfield.apply(model, HARD | attention):
        assert_same(run(model, call), expected)


def test_attention_among_merged_tokens_is_dense_in_dense_steps() -> None:
    model, call = tiny_models.flux().double(), double(tiny_models.flux_inputs((12, 14)))
    schedule = diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(4)
    attention = paper(tiles=4, shared="none", dense_layers=0, dense_steps=2)
    weighed = Merge(region_size=16, skip_blocks=(0, 0), size_bias=True)
    # The order of the attention, in which tokens are merged, without its tiles.
    with nearfield.apply(model, weighed | paper(tiles=1, shared="none", dense_layers=0, dense_steps=0)):
        expected = run(model, call)
    with nearfield.apply(model, weighed | attention, scheduler=schedule):
        schedule._step_index = 1
        assert_same(run(model, call), expected)
        schedule._step_index = 2
        assert_differ(run(model, call), expected)


def test_remembered_lists_go_with_keys_that_count_several_times() -> None:
    model, call = tiny_models.flux().double(), double(tiny_models.flux_inputs((12, 14)))
    schedule = diffusers.FlowMatchEulerDiscreteScheduler()
    schedule.set_timesteps(4)
    weighed = Merge(region_size=16, skip_blocks=(0, 0), size_bias=True)
    everything = BlockTopK(16, top_p=1.0, dense_layers=0, dense_steps=0)
    with nearfield.apply(model, weighed | everything):
        expected = run(model, call)
    cached = Remembering(least=0, refresh=(0,))
    with nearfield.apply(model, weighed | cached, scheduler=schedule) as handle:
        for step in (0, 1):
            schedule._step_index = step
            assert_same(run(model, call), expected)
        assert "kept 100.0% of the keys" in handle.summary()


def plans_alike(one: Any, other: Any) -> bool:
    return torch.equal(one.to_mask(), other.to_mask())


@pytest.mark.parametrize("share", ["two-way", "keys"])
@pytest.mark.parametrize("text_first", [True, False])
def test_plans_of_a_shorter_curve(share: Any, text_first: bool) -> None:
    whole = Geometry((10, 12), 7, text_first, references=((8, 6),))
    method = paper(tiles=4, shared_tokens=16, share=share)
    pieces = [length for image in method.pieces(whole) for length in image]
    # Nothing merged: the plan of the whole.
    same = Shortened.of(whole, [(length, length) for length in pieces])
    assert all(plans_alike(method.plan(same, layer), method.plan(whole, layer)) for layer in range(4))
    # No shared tokens: the plan of a line.
    plain = paper(tiles=4, shared="none")
    short = Shortened.of(whole, [(20, 10)] * 6 + [(16, 8)] * 3)
    line = Geometry((60,), 7, text_first, references=((24,),))
    flat = paper(tiles=4, shared="none", curve="raster")
    assert all(plans_alike(plain.plan(short, layer), flat.plan(line, layer)) for layer in range(4))


def test_tiles_of_merged_tokens_cover_the_same_part_of_the_image() -> None:
    whole = Geometry((32, 32), 32)
    method = Merge(0.5) | paper(tile_size=256, shared="none")
    by_number = Merge(0.5) | paper(tiles=4, shared="none")
    short = method.shortened(whole)
    assert plans_alike(method.attention.plan(short), by_number.attention.plan(short))


@pytest.mark.parametrize("text", [512, 77, 333, 0])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.7])
def test_rings_of_merged_tokens_begin_on_whole_blocks(text: int, ratio: float) -> None:
    method = Merge(ratio) | paper(tiles=16)
    short = method.shortened(Geometry((64, 64), text))
    shared = [count for length, count in short.runs][: len(short.runs)]
    pieces = method.attention.pieces(short.whole)[0]
    left, tokens = 0, 0
    for (length, _), count in zip(short.runs, shared, strict=True):
        if tokens == pieces[0]:
            break
        tokens, left = tokens + length, left + count
    assert tokens == pieces[0]
    assert (text + left) % 64 == 0
    assert abs(left - (1 - ratio) * pieces[0]) <= 64


# -- what is said, what is left ------------------------------------------------------------------------------------


def test_summary_says_what_is_merged_and_saved() -> None:
    model = tiny_models.flux(3, 4)
    with nearfield.apply(model, Merge(skip_blocks=(1, 2))) as handle:
        lines = handle.summary(height=256, width=256, text=8).splitlines()
    assert "  blocks: 4 on merged tokens, which share 2 maps; 3 on all" in lines
    skipped = "transformer_blocks.0, single_transformer_blocks.0, single_transformer_blocks.1"
    assert f"    on all tokens, skip_blocks: {skipped}" in lines
    assert "  256x256 pixels: 8 text + 16x16: 264 tokens; 128 of 256 image tokens are left" in lines
    pairs = 136**2 / 264**2
    assert f"  pairs: {pairs:.1%} in sparse and merged layers" in "\n".join(lines)
    # Channels 32: in a joint block 12 * 32^2 weights for the image and as many for the text, in a single one 12 * 32^2.
    unit = 12 * 32**2
    single, joint = unit, unit
    once = {"joint": 2 * 6 * 32**2, "single": 3 * 32**2}
    full = 3 * (joint * 264 + once["joint"]) + 4 * (single * 264 + once["single"])
    left = full - 4 * unit * 128
    assert f"  matrix products of all blocks: {left / full:.1%}" in "\n".join(lines)


def test_summary_says_which_modules_are_merged() -> None:
    """In a joint block of 32 channels 4 * 32^2 weights belong to attention, which alone is merged there."""
    model = tiny_models.flux(3, 4)
    with nearfield.apply(model, Merge(skip_blocks=(1, 2), placement="module")) as handle:
        told = handle.summary(height=256, width=256, text=8)
    assert "  blocks: 4 on merged tokens, which share 2 maps; 3 on all" in told
    assert "    merged one by one, after norms: attn\n" in told
    once = 3 * 2 * 6 * 32**2 + 4 * 3 * 32**2
    full = 7 * 12 * 32**2 * 264 + once
    left = full - 2 * 4 * 32**2 * 128 - 2 * 12 * 32**2 * 128
    assert f"  matrix products of all blocks: {left / full:.1%}" in told


@pytest.mark.parametrize("placement", ["block", "module"])
@pytest.mark.parametrize("name", NAMES)
def test_remove_leaves_no_trace(name: str, placement: Any) -> None:
    make, inputs_of = MODELS[name]
    model, inputs = make(), inputs_of((6, 8), 2)
    stock, before = run(model, inputs), trace(model)
    handle = nearfield.apply(model, replace(ALL, placement=placement) | SPARSE)
    assert trace(model) != before
    assert not torch.equal(run(model, inputs), stock)
    handle.remove()
    assert trace(model) == before
    assert torch.equal(run(model, inputs), stock)


@pytest.mark.parametrize("placement", ["block", "module"])
@pytest.mark.parametrize("part", ["transformer_blocks.1.attn.norm_q", "single_transformer_blocks.0.act_mlp"])
def test_a_call_that_raises_leaves_nothing_behind(part: str, placement: Any) -> None:
    model, call = tiny_models.flux(), tiny_models.flux_inputs((6, 8))
    with nearfield.apply(model, replace(ALL, placement=placement)):
        expected = run(model, call)
        hook = model.get_submodule(part).register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(model, call)
        hook.remove()
        assert torch.equal(run(model, call), expected)


def test_a_block_that_raised_when_it_was_computed_again_leaves_nothing() -> None:
    model, call = tiny_models.flux().requires_grad_(True).train(), tiny_models.flux_inputs((6, 8))
    plain = call | {"img_ids": torch.zeros_like(call["img_ids"])}  # describe no grid, so nothing is merged
    stock = run(model, plain)
    model.enable_gradient_checkpointing()
    with nearfield.apply(model, ALL):
        out = tiny_models.first(model(**call))
        hook = model.transformer_blocks[1].ff.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        hook.remove()
        assert torch.equal(run(model, plain), stock)


def test_cross_attention_in_the_place_of_self_attention_is_not_weighed() -> None:
    """Upscalers have UNets whose blocks read the text twice, but for those in the middle."""
    fields = {name: value for name, value in tiny_models.sdxl().config.items() if not name.startswith("_")}
    model = tiny_models.settle(diffusers.UNet2DConditionModel(**fields | {"only_cross_attention": True}))
    model, call = model.double(), double(tiny_models.sdxl_inputs((6, 8)))
    stock = run(model, call)
    with nearfield.apply(model, Merge(0.5, region_size=16, size_bias=True)) as handle:
        assert_differ(run(model, call), stock)
        assert "changed: 2 attention processors" in handle.summary()  # those of the middle
    with nearfield.apply(model, Merge(0, size_bias=True)):
        assert_same(run(model, call), stock)


# -- what apply says of it ------------------------------------------------------------------------------------------


LOST = (
    "Merging loses much of a picture: {} where dense attention has 31 (500 pictures of the embedded model; see "
    "docs/merging.md). Use Hilbert() instead, or compare pictures of your own model with and without merging."
)
CAUTIONS = [
    (Merge(), "Merge(ratio=0.5) has an FID of 155"),
    (Merge(0.25), "Merge(ratio=0.25) has an FID of 56"),
    (Merge(0.49), "Merge(ratio=0.25) has an FID of 56"),
    (Merge(0.9), "Merge(ratio=0.75) has an FID of 286"),
    (Merge() | Hilbert(), "Merge(ratio=0.5) has an FID of 155, and of 252 to 306 with tiles,"),
    (Merge(0.3) | Hilbert(), "Merge(ratio=0.25) has an FID of 56"),
    (BipartiteMerge(), "BipartiteMerge(ratio=0.5) has an FID of 296"),
]


@pytest.mark.parametrize(("method", "words"), CAUTIONS, ids=lambda value: str(value)[:40])
def test_apply_warns_once_of_what_merging_loses(method: Any, words: str) -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((6, 8))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with nearfield.apply(model, method):
            run(model, inputs)
            run(model, inputs)
    assert [str(one.message) for one in warned] == [LOST.format(words)]
    assert warned[0].filename == __file__


def test_both_parts_warn_in_one_line() -> None:
    with pytest.warns(UserWarning, match="Merging loses") as warned:
        nearfield.apply(tiny_models.flux(), Merge() | LogLinear()).remove()
    (told,) = (str(one.message) for one in warned)
    assert told.endswith(f"without merging. {LogLinear().warning}")
    assert "\n" not in told


def test_ratios_below_all_that_was_measured_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in (Merge(0.24), Merge(0.0), Merge(0.2) | Hilbert(), BipartiteMerge(0.2)):
            nearfield.apply(tiny_models.flux(), method).remove()


def test_figures_in_warnings_are_the_measured_ones() -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "quality-merge512-h200.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    found = {row["pattern"]: f"{row['fid']:.0f}" for row in rows}
    assert {row["samples"] for row in rows} == {500}
    assert found["dense"] == str(DENSE_FID)
    assert Merge.fids == {ratio: found[f"merge {ratio}, run"] for ratio in (0.25, 0.5, 0.75)}
    assert BipartiteMerge.fids == {ratio: found[f"bipartite {ratio}"] for ratio in (0.25, 0.5, 0.75)}
    tiles = f"{found['merge 0.5, 4 tiles']} to {found['merge 0.5, 16 tiles']}"
    assert Merge.fids_with_attention == {0.5: f"{Merge.fids[0.5]}, and of {tiles} with tiles,"}


WINDOW = "`region` must not be 'window' together with attention along a curve; got 'window'."
BAD = [
    (
        lambda: nearfield.apply(tiny_models.z_image(), ALL),
        ValueError,
        "`target` must be, or have, one of Flux",
    ),
    (
        lambda: Merge(placement="layer"),  # type: ignore[arg-type]
        ValueError,
        "`placement` must be one of 'block', 'module'; got 'layer'.",
    ),
    (lambda: ALL | Hilbert, TypeError, "`attention` must be a method such as nearfield.Hilbert(); got"),
    (
        lambda: ALL | (ALL | paper()),
        TypeError,
        "`attention` must be a method such as nearfield.Hilbert(); got",
    ),
    (lambda: Merge(region="window") | paper(), ValueError, WINDOW),
    (
        lambda: Merge(size_bias=True) | LogLinear(),
        ValueError,
        "`size_bias` must be False together with LogLinear",
    ),
    (
        lambda: Merge(size_bias=True) | paper(far=16),
        ValueError,
        "`size_bias` must be False together with Hilbert",
    ),
    (
        lambda: Shortened.of(Geometry((4, 4)), [(8, 4)]),
        ValueError,
        "`runs` must make up the 16 tokens of (4, 4)",
    ),
    (
        lambda: paper(shared_tokens=16).plan(Shortened.of(Geometry((8, 8)), [(64, 32)])),
        ValueError,
        "`runs` must end where the 16 shared tokens do; got [(64, 32)].",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD)
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value).startswith(message)
