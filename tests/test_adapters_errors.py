"""What `apply` refuses, in exact words, and that a refusal changes nothing."""

import copy
import inspect
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.models.attention_processor import (
    AttnProcessor,
    FusedJointAttnProcessor2_0,
    JointAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from tests import tiny_models
from tests.test_adapters import EVERYTHING, SPARSE, run, trace
from tests.tiles import paper

import nearfield
from nearfield import Hilbert, Merge
from nearfield.methods import GatedBlocks, SparseLinear
from nearfield.methods.recipes import Recipe

UNKNOWN = (
    "`target` must be, or have, one of FluxTransformer2DModel, Flux2Transformer2DModel, PixArtTransformer2DModel, "
    "UNet2DConditionModel, QwenImageTransformer2DModel, SD3Transformer2DModel, ZImageTransformer2DModel, "
    "HunyuanVideoTransformer3DModel, LTXVideoTransformer3DModel, WanTransformer3DModel; got {}. One spec makes a class "
    "known: it says which attention layers see the image, where tokens enter and leave, and how large the image is "
    "(docs/models.md, Add a model)."
)


class OwnProcessor:
    def __call__(self, attn: Any, hidden_states: Any, **kwargs: Any) -> Any:
        return hidden_states


def with_own_processor() -> Any:
    model = tiny_models.flux()
    model.single_transformer_blocks[1].attn.set_processor(OwnProcessor())
    return model


def adapted() -> Any:
    model = tiny_models.flux()
    nearfield.apply(model, SPARSE)
    return model


def parallel(config: Any) -> Any:
    """As `enable_parallelism` leaves a model."""
    model = tiny_models.flux()
    model._parallel_config = config
    return model


def cut_by_hooks_alone() -> Any:
    model = tiny_models.flux()
    apply_context_parallel(model, diffusers.ContextParallelConfig(ring_degree=2), model._cp_plan)
    return model


BAD_TARGETS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a model": (
        lambda: "flux",
        TypeError,
        "`target` must be a diffusers pipeline with a transformer or unet, or a model; got str.",
    ),
    "unknown model": (
        lambda: torch.nn.Linear(2, 2),
        ValueError,
        UNKNOWN.format("Linear"),
    ),
    "unknown diffusers model": (
        lambda: tiny_models.vae(1),
        ValueError,
        UNKNOWN.format("AutoencoderKL"),
    ),
    "unknown processor": (
        with_own_processor,
        ValueError,
        "`target` must have attention processors of FluxAttnProcessor; got OwnProcessor in "
        "single_transformer_blocks.1.attn. Set or load processors that are known, or leave this model dense.",
    ),
    "applied twice": (
        adapted,
        ValueError,
        "`target` must not be adapted already; got FluxTransformer2DModel. "
        "Call `remove()` on the first handle, or `nearfield.remove(target)`, before applying again.",
    ),
    "copied to several devices": (
        lambda: torch.nn.DataParallel(tiny_models.flux()),
        ValueError,
        "`target` must not be in DataParallel; got FluxTransformer2DModel. Its replicas would share one state among "
        "threads; use DistributedDataParallel, or the model inside.",
    ),
    "parallel in an unknown way": (
        lambda: parallel(object()),
        ValueError,
        "`target` must be parallelised over a mesh, if at all; got object. Call "
        "`enable_parallelism(config=ContextParallelConfig(...))`.",
    ),
    "parallel by hooks alone": (
        cut_by_hooks_alone,
        ValueError,
        "`target` must be parallelised by `enable_parallelism`, if at all; got hooks that cut tokens, and no "
        "configuration.",
    ),
}


@pytest.mark.parametrize("case", BAD_TARGETS)
def test_bad_target(case: str) -> None:
    make, kind, message = BAD_TARGETS[case]
    target = make()
    before = trace(target) if isinstance(target, torch.nn.Module) else None
    with pytest.raises(kind) as error:
        nearfield.apply(target, SPARSE)
    assert str(error.value) == message
    assert before is None or trace(target) == before


NAMED = (
    "`method` must be a method, or name a recipe; got {}. Write a method as nearfield.Hilbert(), without quotes; "
    "recipes that ship: cats-close, cats-fast."
)
NO_METHOD = "`method` must be a method such as nearfield.Hilbert(); got {}."
BAD_METHODS: dict[str, tuple[Any, type[Exception], str]] = {
    "a name": ("hilbert", ValueError, NAMED.format("'hilbert'")),
    "its words": ("Hilbert()", ValueError, NAMED.format("'Hilbert()'")),
    "no words": ("", ValueError, NAMED.format("''")),
    "its class": (Hilbert, TypeError, NO_METHOD.format("the class Hilbert") + " Write Hilbert()."),
    "a class that merges": (Merge, TypeError, NO_METHOD.format("the class Merge") + " Write Merge()."),
    "another class": (int, TypeError, NO_METHOD.format("the class int")),
    "none": (None, TypeError, NO_METHOD.format("NoneType")),
    "no recipe": (
        "none.json",
        ValueError,
        "`recipe` must name a file that can be read, or one that ships (cats-close, cats-fast); got 'none.json' "
        "(No such file or directory).",
    ),
}


@pytest.mark.parametrize("case", BAD_METHODS)
def test_bad_method(case: str) -> None:
    method, kind, message = BAD_METHODS[case]
    model = tiny_models.flux()
    before = trace(model)
    with pytest.raises(kind) as error:
        nearfield.apply(model, method)
    assert str(error.value) == message
    assert trace(model) == before


def test_without_a_method_it_is_hilbert() -> None:
    with nearfield.apply(tiny_models.flux()) as handle:
        assert handle.method == Hilbert()


def test_a_recipe_in_a_file_without_a_suffix(tmp_path: Path) -> None:
    path = tmp_path / "hilbert"
    path.write_text(json.dumps(Recipe(SPARSE).as_document()), encoding="utf-8")
    with nearfield.apply(tiny_models.flux(), str(path)) as handle:
        assert handle.method == SPARSE


def test_bad_impl() -> None:
    with pytest.raises(ValueError) as wrong:
        nearfield.apply(tiny_models.flux(), SPARSE, impl="fast")  # type: ignore[arg-type]
    assert str(wrong.value).startswith("`impl` must be one of 'auto',")


@pytest.mark.parametrize("method", [GatedBlocks(), SparseLinear(), Merge() | GatedBlocks()], ids=str)
def test_methods_for_images_alone_are_refused_before_a_call(method: Any) -> None:
    model = tiny_models.flux()
    before = trace(model)
    with pytest.raises(ValueError) as error:
        nearfield.apply(model, method)
    name = type(getattr(method, "attention", method)).__name__
    assert str(error.value) == (
        f"`method` must take the text of FluxTransformer2DModel; got {name}. It reads images alone, as in "
        "PixArtTransformer2DModel, UNet2DConditionModel, LTXVideoTransformer3DModel, WanTransformer3DModel. Layers "
        "that see text may be named in `dense_layers`."
    )
    assert trace(model) == before


def test_methods_for_images_alone_take_the_layers_that_see_no_text() -> None:
    """SD3.5 has layers of both kinds, in turn: here the second of each pair sees the image alone."""
    model, inputs = tiny_models.sd3(layers=3, dual=(0, 1)), tiny_models.sd3_inputs((8, 12))
    with torch.no_grad():
        dense = tiny_models.first(model(**inputs))
        with nearfield.apply(model, GatedBlocks(block=4, topk=1, dense_layers=(0, 2, 4))):
            sparse = tiny_models.first(model(**inputs))
    assert not torch.allclose(sparse, dense, atol=1e-4)
    with pytest.raises(ValueError, match="`method` must take the text of SD3Transformer2DModel"):
        nearfield.apply(model, GatedBlocks(block=4, topk=1, dense_layers=(0, 2)))


@pytest.mark.parametrize("layer", [5, -6, 99])
def test_dense_layers_that_are_none(layer: int) -> None:
    with pytest.raises(ValueError) as error:
        nearfield.apply(tiny_models.flux(), paper(dense_layers=(0, layer)))
    assert str(error.value) == f"`dense_layers` must hold indices from -5 to 4; got {layer}."


def test_applied_twice_where_every_layer_is_dense() -> None:
    model = tiny_models.flux()
    with nearfield.apply(model, paper(dense_layers=99)), pytest.raises(ValueError, match="adapted already"):
        nearfield.apply(model, SPARSE)


def test_a_pipeline_is_not_half_applied() -> None:
    """The second of two models is refused: the first stays as it was."""

    class Pipe:
        transformer = tiny_models.flux()
        transformer_2 = with_own_processor()

    before = trace(Pipe.transformer)
    with pytest.raises(ValueError, match="OwnProcessor"):
        nearfield.apply(Pipe(), SPARSE)
    assert trace(Pipe.transformer) == before


REPLACED = (
    "`transformer_blocks.{block}.attn.processor` must stay as it was when nearfield was applied; got {found}. "
    "Load IP-Adapters, fuse projections and set processors first, then apply; `handle.remove()` now."
)


def test_fused_projections_that_exchange_processors_are_noticed() -> None:
    model, inputs = tiny_models.sd3(dual=()), tiny_models.sd3_inputs((9, 14))
    handle = nearfield.apply(model, SPARSE)
    model.fuse_qkv_projections()
    with pytest.raises(ValueError) as error:
        run(model, inputs)
    assert str(error.value) == REPLACED.format(block=0, found="FusedJointAttnProcessor2_0")
    handle.remove()
    # What was put there since stays there.
    kinds = {type(processor) for processor in model.attn_processors.values()}
    assert kinds == {FusedJointAttnProcessor2_0}
    stock = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        assert (run(model, inputs) - stock).abs().max() <= 1e-5 * stock.abs().max()


def test_a_replaced_processor_of_a_dense_layer_is_noticed() -> None:
    model, inputs = tiny_models.sd3(), tiny_models.sd3_inputs((9, 14))
    with nearfield.apply(model, paper(tiles=4, dense_layers=(2,), dense_steps=0)):
        model.transformer_blocks[1].attn.set_processor(JointAttnProcessor2_0())
        with pytest.raises(ValueError) as error:
            run(model, inputs)
    assert str(error.value) == REPLACED.format(block=1, found="JointAttnProcessor2_0")


def test_a_replaced_module_where_tokens_leave_is_noticed() -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    other = tiny_models.flux().norm_out
    with nearfield.apply(model, SPARSE):
        model.norm_out = torch.compile(model.norm_out, backend="eager")
        run(model, inputs)  # still the same module inside
        model.norm_out = other
        with pytest.raises(ValueError) as error:
            run(model, inputs)
    assert str(error.value) == (
        "`norm_out` must stay as it was when nearfield was applied; got AdaLayerNormContinuous. "
        "Call `handle.remove()` and apply again."
    )


def test_a_replaced_cross_attention_processor_is_noticed() -> None:
    model, inputs = tiny_models.sdxl(), tiny_models.sdxl_inputs((9, 14))
    with nearfield.apply(model, SPARSE):
        name = "mid_block.attentions.0.transformer_blocks.0.attn2"
        model.get_submodule(name).set_processor(AttnProcessor())
        with pytest.raises(ValueError, match=f"^`{name}.processor` must stay"):
            run(model, inputs)


BAD_CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention mask of all tokens": (
        "flux",
        {"joint_attention_kwargs": {"attention_mask": torch.ones(1, 1, 133, 133)}},
        "`joint_attention_kwargs` must hold `scale` at most under nearfield; got attention_mask. "
        "What processors are told about tokens would be in raster order.",
    ),
    "cached references": (
        "flux2",
        {"kv_cache_mode": "extract"},
        "`kv_cache_mode` must be None under nearfield; got str. "
        "Cached reference images have no place in the order of the tokens.",
    ),
    "mask of image tokens": (
        "pixart",
        {"attention_mask": torch.ones(1, 126)},
        "`attention_mask` must be None under nearfield; got Tensor. A mask of image tokens is in raster order.",
    ),
    "shapes of another image": (
        "qwen",
        {"img_shapes": [[(1, 9, 13)]]},
        "`hidden_states` must hold the 117 tokens of 9x13; got 126.",
    ),
    "ids of another image": (
        "flux",
        {"img_ids": tiny_models.image_ids((9, 13))},
        "`hidden_states` must hold the 117 tokens of 9x13; got 126.",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(case: str) -> None:
    name, wrong, message = BAD_CALLS[case]
    make, inputs_of = tiny_models.MODELS[name]
    model, inputs = make(), inputs_of((9, 14))
    with nearfield.apply(model, SPARSE):
        expected = run(model, inputs)
        with pytest.raises(ValueError) as error:
            run(model, inputs | wrong)
        assert str(error.value) == message
        assert torch.equal(run(model, inputs), expected)


@pytest.mark.skipif(not hasattr(diffusers, "TensorParallelConfig"), reason="needs diffusers 0.40 or later")
def test_tensor_parallelism_is_refused() -> None:
    model = parallel(diffusers.ParallelConfig(tensor_parallel_config=diffusers.TensorParallelConfig()))
    with pytest.raises(ValueError) as error:
        nearfield.apply(model, SPARSE)
    assert str(error.value) == (
        "`target` must not be under tensor parallelism; got ParallelConfig. Plans are made for all heads of a layer, "
        "of which each rank would have some."
    )


def test_parallel_models_are_refused() -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    with nearfield.apply(model, SPARSE):
        model.transformer_blocks[0].attn.processor._parallel_config = object()
        with pytest.raises(ValueError) as error:
            run(model, inputs)
    assert str(error.value) == (
        "`transformer_blocks.0.attn.processor` must not be parallelised; got a parallel configuration."
    )


def test_a_model_that_was_made_parallel_since_is_refused() -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    with nearfield.apply(model, SPARSE):
        model._parallel_config = object()
        with pytest.raises(ValueError, match=r"^`target` must be parallelised before nearfield is applied"):
            run(model, inputs)


def test_heads_that_were_split_since_are_refused() -> None:
    """As they are by tensor parallelism that a model does not tell of."""
    model, inputs = tiny_models.pixart(), tiny_models.pixart_inputs((9, 14))
    with nearfield.apply(model, SPARSE):
        attention = model.transformer_blocks[0].attn1
        attention.heads = 1
        with pytest.raises(ValueError) as error:
            run(model, inputs)
    assert str(error.value) == (
        "`processor` must have the 2 heads of 16 it had; got 1 of 32. Tensor parallelism is not supported: plans are "
        "made for the heads there were."
    )


@pytest.mark.parametrize("name", ["flux", "sdxl"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())]
)
def test_an_adapted_model_is_not_copied(name: str, copied: Callable[[Any], Any]) -> None:
    model = tiny_models.MODELS[name][0]()
    with nearfield.apply(model, paper(tiles=4, dense_layers=0), scheduler=diffusers.DDIMScheduler()):
        with pytest.raises(ValueError) as error:
            copied(model)
        assert str(error.value) == (
            f"`model` must be without nearfield to be copied or pickled; got {type(model).__name__} with it. Call "
            "`nearfield.remove(model)` first; `save_pretrained` and `state_dict` work also while it is on."
        )
        with pytest.raises(ValueError, match="to be copied or pickled"):
            copied(next(part.processor for part in model.modules() if hasattr(part, "processor")))
    copied(model)


def test_a_processor_that_never_attends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were diffusers to change its processors, the method must not be lost in silence."""
    monkeypatch.setattr(
        FluxAttnProcessor, "__call__", lambda self, attn, hidden_states, *args, **kwargs: hidden_states
    )
    model, inputs = tiny_models.flux(0, 1), tiny_models.flux_inputs((9, 14))
    with nearfield.apply(model, SPARSE), pytest.raises(ValueError) as error:
        run(model, inputs)
    assert str(error.value) == (
        "`processor` must call `scaled_dot_product_attention` once; got 0 calls in FluxAttnProcessor. "
        "Set another processor, then apply."
    )


@pytest.mark.parametrize("kind", ["blurred queries", "no scores", "no attention"])
def test_guidance_that_perturbs_attention(kind: str) -> None:
    """Hooks that take queries for a picture, or wait for torch's attention, are refused; one that skips it works."""
    model, inputs = tiny_models.pixart(), tiny_models.pixart_inputs((9, 14))
    if kind == "blurred queries":
        config = SmoothedEnergyGuidanceConfig([1], fqn="transformer_blocks")
        _apply_smoothed_energy_guidance_hook(model, config, 1.0)
    else:
        skips = {"skip_attention": kind == "no attention", "skip_attention_scores": kind == "no scores"}
        config = diffusers.LayerSkipConfig([1], fqn="transformer_blocks", skip_ff=False, **skips)
        diffusers.apply_layer_skip(model, config)
    stock = run(model, inputs)
    with nearfield.apply(model, EVERYTHING):
        if kind == "no attention":
            assert (run(model, inputs) - stock).abs().max() <= 1e-5 * stock.abs().max()
            return
        with pytest.raises(ValueError) as error:
            run(model, inputs)
    hook = "SmoothedEnergyGuidanceHook" if kind == "blurred queries" else "AttentionProcessorSkipHook"
    assert str(error.value) == (
        f"`transformer_blocks.1.attn1` must have no guidance that perturbs attention; got {hook}. It goes by the order "
        "of the image, or by attention that sparse layers do not compute."
    )


def test_prepare_and_summary_want_whole_sizes() -> None:
    with nearfield.apply(tiny_models.flux(), SPARSE) as handle:
        with pytest.raises(TypeError) as error:
            handle.prepare(height=16.0, width=16)  # type: ignore[arg-type]
        assert str(error.value) == "`height` must be an integer; got float."
        with pytest.raises(ValueError) as wrong:
            handle.summary(height=512)
        assert str(wrong.value) == "`width` must be given together with `height`; got None."
        with pytest.raises(
            ValueError, match=r"^`text` must be given together with `height` and `width`; got 7"
        ):
            handle.summary(text=7)
        with pytest.raises(ValueError) as small:
            handle.summary(height=512, width=15)
        assert str(small.value) == (
            "`width` must be enough pixels for a token of FluxTransformer2DModel; got 15."
        )
        with pytest.raises(ValueError, match=r"^`height` must be enough pixels"):
            handle.prepare(height=1, width=512)
        with pytest.raises(ValueError, match=r"^`references` must be enough pixels"):
            handle.prepare(height=16, width=16, references=[(64, 8)])
    with nearfield.apply(tiny_models.sd3(), SPARSE) as handle:
        with pytest.raises(ValueError) as none:
            handle.prepare(height=64, width=64, references=[(64, 64)])
        assert str(none.value) == (
            "`references` must be left out: SD3Transformer2DModel takes none; got [(64, 64)]."
        )


def test_offloaded_weights_do_not_say_where_to_prepare() -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    with nearfield.apply(model, SPARSE) as handle:
        with pytest.raises(ValueError) as error:
            handle.prepare(height=144, width=224)
        assert str(error.value) == (
            "`device` must be given; got None. The weights of the model are offloaded, so it is not known where it "
            "runs."
        )
        assert "9x14" in handle.summary(height=144, width=224)
        handle.prepare(height=144, width=224, device="cpu")
        run(model, inputs)
        handle.prepare(height=144, width=224)  # where the last call was


def test_processors_look_like_those_they_stand_for() -> None:
    """Attention modules pass on what they find in the signature, and diffusers sets these attributes."""
    model = tiny_models.flux()
    stock = inspect.signature(model.transformer_blocks[0].attn.processor.__call__)
    with nearfield.apply(model, SPARSE):
        processor = model.transformer_blocks[0].attn.processor
        assert inspect.signature(processor.__call__) == stock
        assert processor._attention_backend is None
        assert processor._parallel_config is None
