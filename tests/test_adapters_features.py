"""`apply` beside everything else people do to diffusers models."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import accelerate
import diffusers
import peft
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from tests import tiny_models
from tests.attending import NEEDS_TRITON, assert_budget
from tests.test_adapters import EVERYTHING, SPARSE, assert_differ, assert_same, double, run
from tests.tiles import paper
from tests.tiny_models import MODELS, first
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import nearfield


@pytest.fixture
def flux() -> Any:
    return tiny_models.flux().double()


@pytest.fixture
def inputs() -> dict[str, Any]:
    return double(tiny_models.flux_inputs((9, 14), 2))


# -- LoRA ----------------------------------------------------------------------------------------------------------

# Also the layers before the tokens enter and behind the place they leave.
TARGETS = {
    "flux": ["to_q", "to_k", "to_v", "to_out.0", "add_k_proj", "x_embedder", "proj_out", "norm_out.linear"],
    "sd3": ["to_q", "to_k", "to_v", "to_out.0", "pos_embed.proj", "proj_out", "norm_out.linear"],
    "sdxl": ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out"],
    "z_image": ["to_q", "to_k", "to_v", "to_out.0", "all_x_embedder.2-1", "all_final_layer.2-1.linear"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_lora_loaded_and_unloaded_between_calls(name: str) -> None:
    make, inputs_of = MODELS[name]
    model, call = make().double(), double(inputs_of((9, 14)))
    stock = run(model, call)
    with nearfield.apply(model, EVERYTHING):
        run(model, call)
        torch.manual_seed(0)
        model.add_adapter(peft.LoraConfig(r=2, target_modules=TARGETS[name], init_lora_weights=False))
        model.double()
        found = run(model, call)
    with_lora = run(model, call)
    assert_same(found, with_lora)
    assert_differ(found, stock)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, call), with_lora)
        model.unload_lora()
        assert_same(run(model, call), stock)


def test_lora_scale_is_passed_on(flux: Any, inputs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    flux.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    flux.double()
    halved = inputs | {"joint_attention_kwargs": {"scale": 0.5}}
    stock = run(flux, halved)
    assert_differ(stock, run(flux, inputs))
    with nearfield.apply(flux, EVERYTHING):
        assert_same(run(flux, halved), stock)


def test_a_model_in_a_wrapper_of_peft(flux: Any, inputs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    wrapped = peft.get_peft_model(flux, config).double()
    stock = run(wrapped, inputs)
    with nearfield.apply(wrapped, SPARSE):
        assert_differ(run(wrapped, inputs), stock)
    with nearfield.apply(wrapped, EVERYTHING):
        assert_same(run(wrapped, inputs), stock)


def test_fused_projections(flux: Any, inputs: dict[str, Any]) -> None:
    with nearfield.apply(flux, SPARSE):
        separate = run(flux, inputs)
        flux.fuse_qkv_projections()
        assert_same(run(flux, inputs), separate)


# -- caching, casting, offloading ----------------------------------------------------------------------------------


def cached_run(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Two steps of which the second skips all blocks but the first."""
    model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=1.0))
    moved = inputs | {"hidden_states": inputs["hidden_states"] + 0.01}
    with model.cache_context("cond"):
        results = [run(model, inputs), run(model, moved)]
    model.disable_cache()
    return results


def test_first_block_cache(flux: Any, inputs: dict[str, Any]) -> None:
    stock = cached_run(flux, inputs)
    with nearfield.apply(flux, EVERYTHING):
        found = cached_run(flux, inputs)
        uncached = run(flux, inputs | {"hidden_states": inputs["hidden_states"] + 0.01})
    for result, expected in zip(found, stock, strict=True):
        assert_same(result, expected)
    assert_differ(found[1], uncached)  # so the second step was indeed skipped


def test_cache_enabled_before(flux: Any, inputs: dict[str, Any]) -> None:
    stock = run(flux, inputs)
    flux.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.0))
    with nearfield.apply(flux, EVERYTHING), flux.cache_context("cond"):
        assert_same(run(flux, inputs), stock)
    with flux.cache_context("other"):
        assert_same(run(flux, inputs), stock)


def test_layerwise_casting() -> None:
    model, call = tiny_models.flux(), tiny_models.flux_inputs((9, 14))
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    stock = run(model, call)
    with nearfield.apply(model, EVERYTHING) as handle:
        assert (run(model, call) - stock).abs().max() <= 1e-5 * stock.abs().max()
        assert "attend: grouped" in handle.summary()


def sequential(model: nn.Module) -> None:
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


def whole_model(model: nn.Module) -> None:
    accelerate.cpu_offload_with_hook(model, execution_device=torch.device("cpu"))


def by_groups(model: Any) -> None:
    model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


@pytest.mark.parametrize("offload", [sequential, whole_model, by_groups])
@pytest.mark.parametrize("is_first", [True, False])
def test_offloading(flux: Any, inputs: dict[str, Any], offload: Any, is_first: bool) -> None:
    with nearfield.apply(flux, SPARSE):
        expected = run(flux, inputs)
    if is_first:
        offload(flux)
    handle = nearfield.apply(flux, SPARSE)
    if not is_first:
        offload(flux)
    assert_same(run(flux, inputs), expected)
    # A pipeline takes its offloading away and puts it back between images.
    if offload is not by_groups:
        accelerate.hooks.remove_hook_from_module(flux, recurse=True)
        assert_same(run(flux, inputs), expected)
        offload(flux)
        assert_same(run(flux, inputs), expected)
    handle.remove()
    assert_differ(run(flux, inputs), expected)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, on its own norms
def test_autocast() -> None:
    """Norms give float32 where projections give bfloat16; torch casts for its own attention."""
    model, call = tiny_models.sd3(), tiny_models.sd3_inputs((9, 14))
    exact = run(model, call)
    with torch.autocast("cpu", torch.bfloat16):
        stock = run(model, call)
        with nearfield.apply(model, EVERYTHING):
            found = run(model, call)
    assert (found - exact).abs().max() <= 2 * (stock - exact).abs().max()


def test_inference_mode(flux: Any, inputs: dict[str, Any]) -> None:
    with torch.inference_mode():
        made_here = {
            name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        stock = first(flux(**made_here))
        with nearfield.apply(flux, EVERYTHING):
            for _ in range(2):
                assert_same(first(flux(**made_here)), stock)
    with nearfield.apply(flux, EVERYTHING):
        flux.requires_grad_(True)
        first(flux(**inputs)).sum().backward()
    assert flux.x_embedder.weight.grad is not None


@pytest.fixture
def _own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_attention_backend` of a model also sets that of the process."""
    monkeypatch.setattr(
        _AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend
    )


@pytest.mark.usefixtures("_own_backend")
def test_attention_backend_of_dense_parts(flux: Any, inputs: dict[str, Any]) -> None:
    method = paper(tiles=4, shared="none", dense_layers=1, dense_steps=0)
    with nearfield.apply(flux, method):
        expected = run(flux, inputs)
        flux.set_attention_backend("_native_math")
        backends = {
            type(processor).__name__: processor._attention_backend
            for processor in flux.attn_processors.values()
        }
        assert_same(run(flux, inputs), expected)
    assert {name: backend.value for name, backend in backends.items()} == {
        "FluxAttnProcessor": "_native_math",
        "SparseFluxAttnProcessor": "_native_math",
    }


class ImageEmbeddings(nn.Module):
    """Stands for the projection that an IP-Adapter brings."""

    def forward(self, embeddings: list[Tensor]) -> list[Tensor]:
        return embeddings


def test_ip_adapter_of_a_unet() -> None:
    """Loaded before: its cross-attention stays as it is."""
    model, call = tiny_models.sdxl().double(), double(tiny_models.sdxl_inputs((9, 14)))
    width = tiny_models.HEADS * tiny_models.HEAD_DIM
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if name.endswith("attn2"):
            module.set_processor(IPAdapterAttnProcessor2_0(width, cross_attention_dim=8).double())
    model.register_to_config(encoder_hid_dim_type="ip_image_proj")
    model.encoder_hid_proj = ImageEmbeddings()
    call["added_cond_kwargs"]["image_embeds"] = [tiny_models.randn(1, 1, 4, 8, seed=3).double()]
    stock = run(model, call)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, call), stock)
    with nearfield.apply(model, SPARSE):
        assert_differ(run(model, call), stock)
        masks = {"ip_adapter_masks": [torch.ones(1, 1, 18, 28)]}
        with pytest.raises(
            ValueError, match="`cross_attention_kwargs` must hold `scale` at most under nearfield"
        ):
            run(model, call | {"cross_attention_kwargs": masks})


@pytest.mark.usefixtures("_own_backend")
def test_sparse_layers_do_not_take_another_backend(flux: Any, inputs: dict[str, Any]) -> None:
    """One that never calls `scaled_dot_product_attention` would leave nothing to take over."""
    with nearfield.apply(flux, SPARSE):
        expected = run(flux, inputs)
    flux.set_attention_backend("flex")
    with nearfield.apply(flux, SPARSE):
        assert_same(run(flux, inputs), expected)
        assert flux.transformer_blocks[0].attn.processor._attention_backend.value == "flex"


# -- training ------------------------------------------------------------------------------------------------------


def gradients(model: Any, call: dict[str, Any]) -> dict[str, Tensor]:
    model.requires_grad_(True).zero_grad()
    out = first(model(**call))
    (out * tiny_models.randn(*out.shape, seed=7).to(out)).sum().backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("name", ["flux", "sd3", "sdxl", "z_image"])
def test_gradients_with_and_without_checkpointing(name: str) -> None:
    make, inputs_of = MODELS[name]
    model, call = make().double(), double(inputs_of((9, 14)))
    stock = gradients(model, call)
    with nearfield.apply(model, EVERYTHING):
        everything = gradients(model, call)
    with nearfield.apply(model, SPARSE):
        plain = gradients(model, call)
        model.enable_gradient_checkpointing()
        model.train()
        checkpointed = gradients(model, call)
    assert stock.keys() == everything.keys() == checkpointed.keys()
    for parameter, expected in stock.items():
        assert torch.allclose(everything[parameter], expected, rtol=1e-4, atol=1e-5), parameter
        assert torch.allclose(checkpointed[parameter], plain[parameter], rtol=1e-4, atol=1e-5), parameter
    assert any(not torch.allclose(plain[name], stock[name], rtol=1e-2) for name in stock)


def checkpointed(name: str) -> Any:
    model = MODELS[name][0]().double().requires_grad_(True).train()
    model.enable_gradient_checkpointing()
    return model


def loss(model: Any, name: str, size: tuple[int, int]) -> Tensor:
    out = first(model(**double(MODELS[name][1](size))))
    return (out * tiny_models.randn(*out.shape, seed=7).to(out)).sum()


def gradients_after(total: Tensor, model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    total.backward()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("other", [(14, 9), (12, 16)])
@pytest.mark.parametrize("name", ["flux", "sdxl", "z_image"])
def test_checkpointed_blocks_are_computed_again_as_in_their_call(name: str, other: tuple[int, int]) -> None:
    """Other calls since, of another size, change nothing; nor does a second one in the same backward pass."""
    sizes = [(9, 14), other]
    model = MODELS[name][0]().double().requires_grad_(True)
    with nearfield.apply(model, SPARSE):
        expected = [gradients_after(loss(model, name, size), model) for size in sizes]
        both = gradients_after(sum(loss(model, name, size) for size in sizes), model)  # type: ignore[arg-type]
    model = checkpointed(name)
    with nearfield.apply(model, SPARSE) as handle:
        before = loss(model, name, sizes[0])
        after = run(model, double(MODELS[name][1](sizes[1])))
        told = handle.summary()
        assert_same_gradients(gradients_after(before, model), expected[0])
        assert handle.summary() == told
        assert torch.equal(run(model, double(MODELS[name][1](sizes[1]))), after)
        together = loss(model, name, sizes[0]) + loss(model, name, sizes[1])
        assert_same_gradients(gradients_after(together, model), both)


def test_what_was_made_ready_stays_ready_after_a_backward_pass() -> None:
    model = checkpointed("flux")
    with nearfield.apply(model, SPARSE) as handle:
        total = loss(model, "flux", (9, 14))
        handle.prepare(height=16 * 16, width=12 * 16)
        told = handle.summary()
        total.backward()
        assert handle.summary() == told


def test_backward_after_remove() -> None:
    model = tiny_models.flux().double().requires_grad_(True)
    with nearfield.apply(model, SPARSE):
        expected = gradients_after(loss(model, "flux", (9, 14)), model)
        late = loss(model, "flux", (9, 14))
    assert_same_gradients(gradients_after(late, model), expected)  # nothing is computed again
    model.enable_gradient_checkpointing()
    with nearfield.apply(model, SPARSE):
        late = loss(model, "flux", (9, 14))
    with pytest.raises(ValueError) as error:
        late.backward()
    assert str(error.value) == (
        "`backward` must come before `remove()` of what the loss was computed with; got it after. Gradient "
        "checkpointing computes layers again: leave the `with` block after `backward()`."
    )


def test_checkpointed_layers_want_a_loss_of_the_output() -> None:
    model = checkpointed("flux")
    seen: list[Tensor] = []
    with nearfield.apply(model, SPARSE):
        model.transformer_blocks[1].register_forward_hook(lambda module, args, output: seen.append(output[1]))
        loss(model, "flux", (9, 14))
        with pytest.raises(
            ValueError, match=r"^`backward` must begin at the output of FluxTransformer2DModel"
        ):
            seen[0].sum().backward()


# -- layers that another model shares ------------------------------------------------------------------------------


def controlled(transformer: Any, controlnet: Any) -> Tensor:
    """One step of Z-Image with its ControlNet."""
    call = double(tiny_models.z_image_inputs((12, 10)))
    control = [tiny_models.randn(4, 1, 24, 20, seed=5).double()]
    residuals = controlnet(call["x"], call["t"], call["cap_feats"], control)
    return first(transformer(**call, controlnet_block_samples=residuals))


def interrupted(module: nn.Module, args: Any) -> None:
    raise KeyError("stop")


def test_a_controlnet_that_shares_layers_stays_dense() -> None:
    model = tiny_models.z_image().double()
    controlnet = tiny_models.z_image_controlnet(model).double()
    with torch.no_grad():
        stock = controlled(model, controlnet)
        with nearfield.apply(model, EVERYTHING) as handle:
            for _ in range(3):
                assert_same(controlled(model, controlnet), stock)
            told = handle.summary()
            # A call that raised leaves no tokens inside, either.
            interrupt = model.layers[1].register_forward_pre_hook(interrupted)
            with pytest.raises(KeyError, match="stop"):
                controlled(model, controlnet)
            interrupt.remove()
            assert_same(controlled(model, controlnet), stock)
        with nearfield.apply(model, SPARSE):
            first_step = controlled(model, controlnet)
            assert_differ(first_step, stock)
            assert torch.equal(controlled(model, controlnet), first_step)
    assert "dense calls: 6, of attention layers that another model shares (a ControlNet)" in told


def test_shared_layers_are_not_computed_again() -> None:
    model = tiny_models.z_image().double()
    controlnet = tiny_models.z_image_controlnet(model).double()
    controlnet.gradient_checkpointing = False  # asked for, and forgotten, by diffusers 0.42
    model.requires_grad_(True).enable_gradient_checkpointing()
    with nearfield.apply(model, SPARSE):
        with pytest.raises(
            ValueError, match=r"^`backward` must not compute layers again that two models share"
        ):
            controlled(model, controlnet).sum().backward()
        model.disable_gradient_checkpointing()
        controlled(model, controlnet).sum().backward()


# -- torch.compile -------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[Any]:
    """How many graphs were made so far."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    torch._dynamo.reset()


def shallow(name: str) -> Any:
    """With one block of each kind: most of the time goes into tracing them, one by one."""
    sizes = {"flux": (1, 1), "flux2": (1, 1), "sd3": (2,), "sdxl": (), "z_image": (1, 1)}.get(name, (1,))
    return MODELS[name][0](*sizes)


@pytest.mark.parametrize(("name", "most"), [("flux", 4), ("qwen", 2), ("z_image", 6), ("sdxl", 3)])
def test_compiled_blocks_are_shared_by_layers(name: str, most: int, graphs: Any) -> None:
    """Tiles are back where they began after four layers; the number of graphs does not grow with that of layers."""
    make, inputs_of = MODELS[name]
    model = make(*{"flux": (4, 5), "sdxl": (), "z_image": (5, 1)}.get(name, (5,)))
    call = inputs_of((9, 14), 2)
    with nearfield.apply(model, SPARSE):
        expected = run(model, call)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(run(model, call), expected)
        once = graphs()
        assert 0 < once <= most
        assert torch.equal(run(model, call), expected)
        assert graphs() == once


SIZES = [(12, 10), (14, 10), (16, 12), (18, 12), (20, 14)]


def calls_of_many_sizes(name: str) -> list[dict[str, Any]]:
    return [MODELS[name][1](size) for size in SIZES]


def calls_of_many_lengths() -> list[dict[str, Any]]:
    call = tiny_models.qwen_inputs((9, 14)) | {"encoder_hidden_states_mask": None}
    return [call | {"encoder_hidden_states": tiny_models.randn(1, length, 8)} for length in range(7, 17, 2)]


@pytest.mark.parametrize("name", ["flux", "flux2", "qwen", "z_image", "sdxl", "lengths of text"])
def test_compiled_blocks_take_any_size(name: str, graphs: Any) -> None:
    """Sizes become symbols at the second one; no later one makes another graph. Of qwen with several layers."""
    is_text = name == "lengths of text"
    model = tiny_models.qwen() if name == "qwen" else shallow("qwen" if is_text else name)
    calls = calls_of_many_lengths() if is_text else calls_of_many_sizes(name)
    with nearfield.apply(model, SPARSE):
        expected = [run(model, call) for call in calls]
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        made = []
        for call, wanted in zip(calls, expected, strict=True):
            assert (run(model, call) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
            made.append(graphs())
    assert made[2] == made[-1], made


def test_compiled_blocks_share_graphs_whatever_the_lengths_of_lists(graphs: Any) -> None:
    """Layers whose lists differ in length, and methods whose lists do, for calls of one size."""
    model, call = tiny_models.flux(1, 4), tiny_models.flux_inputs((9, 14))
    model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="eager")
    lengths, made = set(), []
    for tiles in (4, 3):
        method = paper(tiles=tiles, far=4, shared="distributed", share="keys", dense_layers=0, dense_steps=0)
        with nearfield.apply(model, method) as handle:
            run(model, call)
            lengths |= {reader.near.blocks.shape[-1] for reader in handle._regions[0].state.attentions}
        made.append(graphs())
    assert len(lengths) > 2
    assert made == [3, 3]  # a kind of block each, and one more where tokens come from a slice


class Schedule:
    """A scheduler as far as `apply` asks."""

    step_index: int | None = None
    timesteps = range(6)


def test_compiled_blocks_with_dense_steps(graphs: Any) -> None:
    model, call, schedule = tiny_models.flux(1, 1), tiny_models.flux_inputs((9, 14)), Schedule()
    stock = run(model, call)
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    with nearfield.apply(model, paper(tiles=4, dense_layers=0, dense_steps=2), scheduler=schedule):
        differences, made = [], []
        for step in range(6):
            schedule.step_index = step or None
            differences.append((run(model, call) - stock).abs().max().item())
            made.append(graphs())
    assert max(differences[:2]) < 1e-5 < 1e-2 < min(differences[2:])
    assert made[0] == made[1] < made[2] == made[-1]


@pytest.mark.parametrize("name", ["sd3", "pixart", "qwen", "z_image", "sdxl"])
def test_whole_model_compiled(name: str, graphs: Any) -> None:
    """The others of `MODELS` are compiled for two sizes, below."""
    model, call = shallow(name), MODELS[name][1]((9, 14))
    with nearfield.apply(model, SPARSE):
        expected = run(model, call)
    with nearfield.apply(model, SPARSE) as handle:
        handle.prepare(height=9 * 16, width=14 * 16, text=tiny_models.TEXT)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(run(compiled, call), expected)
        once = graphs()
        assert torch.equal(run(compiled, call), expected)
        assert graphs() == once


@pytest.mark.parametrize(
    ("name", "is_whole"), [("flux", True), ("flux", False), ("sdxl", False), ("z_image", False)]
)
def test_applied_to_and_removed_from_a_model_that_ran_compiled(
    name: str, is_whole: bool, graphs: Any
) -> None:
    """What was compiled without hooks must not run where there are some, and the other way round."""
    model, call = shallow(name), MODELS[name][1]((9, 14))
    with nearfield.apply(model, SPARSE):
        expected = run(model, call)
    if is_whole:
        compiled = torch.compile(model, fullgraph=True, backend="eager")
    else:
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        compiled = model
    stock = run(compiled, call)
    with nearfield.apply(model, SPARSE) as handle:
        handle.prepare(height=9 * 16, width=14 * 16, text=tiny_models.TEXT)
        assert torch.equal(run(compiled, call), expected)
    assert torch.equal(run(compiled, call), stock)


def test_whole_model_compiled_with_dense_steps(graphs: Any) -> None:
    model, call, schedule = tiny_models.flux(1, 1), tiny_models.flux_inputs((9, 14)), Schedule()
    stock = run(model, call)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    method = paper(tiles=4, dense_layers=0, dense_steps=2)
    with nearfield.apply(model, method, scheduler=schedule) as handle:
        handle.prepare(height=9 * 16, width=14 * 16, text=tiny_models.TEXT)
        differences, made = [], []
        for step in range(6):
            schedule.step_index = step or None
            differences.append((run(compiled, call) - stock).abs().max().item())
            made.append(graphs())
    assert max(differences[:2]) < 1e-5 < 1e-2 < min(differences[2:])
    assert made[3] == made[-1]


def test_whole_model_compiled_in_pieces_is_sparse_from_its_first_call() -> None:
    """Where graphs may break, nothing need be made ready: the grid is read in the break."""
    torch._dynamo.reset()
    model, call, schedule = tiny_models.flux(1, 2), tiny_models.flux_inputs((9, 14)), Schedule()
    method = paper(tiles=4, dense_layers=0, dense_steps=(1, 2))
    dense = run(model, call)
    with nearfield.apply(model, dataclasses.replace(method, dense_steps=0)):
        sparse = run(model, call)
    with nearfield.apply(model, method, scheduler=schedule) as handle:
        compiled = torch.compile(model, backend="eager")
        for step, want in ((None, dense), (1, sparse), (4, dense), (3, sparse)):
            schedule.step_index = step
            with torch.no_grad():
                torch.testing.assert_close(compiled(**call)[0], want)
        assert "dense calls" not in handle.summary()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["flux", "flux2"])
def test_whole_model_compiled_but_not_for_another_size_of_as_many_tokens(name: str, graphs: Any) -> None:
    make, inputs_of = MODELS[name]
    model = make(1, 1)
    calls = {grid: inputs_of(grid) for grid in ((9, 14), (14, 9))}
    with nearfield.apply(model, SPARSE):
        expected = {grid: run(model, call) for grid, call in calls.items()}
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with nearfield.apply(model, SPARSE) as handle:
        for height, width in calls:
            handle.prepare(height=16 * height, width=16 * width, text=tiny_models.TEXT)
            assert torch.equal(run(compiled, calls[height, width]), expected[height, width])
            once = graphs()
            assert torch.equal(run(compiled, calls[height, width]), expected[height, width])
            assert graphs() == once
            with pytest.raises(RuntimeError, match="`img_ids` must be those of the size that was made ready"):
                run(compiled, calls[width, height])


def test_whole_model_compiled_says_what_is_missing(graphs: Any) -> None:
    model, call = tiny_models.sd3(1), tiny_models.sd3_inputs((9, 14))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with nearfield.apply(compiled, SPARSE) as handle:
        with pytest.raises(Exception, match=r"handle.prepare\(height=..., width=...\)"):
            run(compiled, call)
        handle.prepare(height=14 * 16, width=9 * 16, text=tiny_models.TEXT)
        with pytest.raises(Exception, match=r"handle.prepare\(height=..., width=...\)"):
            run(compiled, call)
        handle.prepare(height=9 * 16, width=14 * 16, text=tiny_models.TEXT)
        assert run(compiled, call).isfinite().all()


def test_whole_model_compiled_for_another_device(graphs: Any) -> None:
    model, call = tiny_models.sd3(1), tiny_models.sd3_inputs((9, 14))
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    with nearfield.apply(model, SPARSE) as handle:
        handle.prepare(height=9 * 16, width=14 * 16, text=tiny_models.TEXT)
        region = handle._regions[0]
        assert region.state is not None
        region.session.state = dataclasses.replace(region.state, device=torch.device("cuda:0"))
        with pytest.raises(Exception, match=r"handle.prepare\(height=..., width=..., device=...\)"):
            run(compiled, call)


def test_a_device_is_found_again_whether_or_not_it_was_numbered(
    flux: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with nearfield.apply(flux, SPARSE) as handle:
        region = handle._regions[0]
        monkeypatch.setattr(region.session, "make", lambda layout, device: asked.append(device))
        with pytest.raises(AttributeError):  # there is nothing to go on with
            handle.prepare(height=64, width=64, device="cuda")
    assert asked == [torch.device("cuda:1")]


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # looked at by torch.compile
@pytest.mark.parametrize(
    ("name", "is_checkpointed"), [("flux", False), ("flux", True), ("sdxl", True), ("z_image", True)]
)
def test_compiled_training_step(name: str, is_checkpointed: bool, graphs: Any) -> None:
    """Blocks that are computed again make the graphs of those that are not, and others."""
    model, call = shallow(name).double(), double(MODELS[name][1]((9, 14)))
    with nearfield.apply(model, SPARSE):
        expected = gradients(model, call)
        if is_checkpointed:
            model.train().enable_gradient_checkpointing()
        model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
        later = loss(model, name, (9, 14))
        loss(model, name, (14, 9))  # another call before the backward pass
        assert_same_gradients(gradients_after(later, model), expected)
        assert graphs()


# -- rotation ------------------------------------------------------------------------------------------------------


def _moved(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in inputs.items()}


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["flux", "flux2"])
def test_sparse_layers_rotate_by_a_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Two samples of one table: the kernel's rows serve both."""
    from nearfield.ops.rotary.triton import rotate

    turned: list[tuple[int, ...]] = []
    right = rotate.rotate
    monkeypatch.setattr(rotate, "rotate", lambda x, *rows: turned.append(tuple(x.shape)) or right(x, *rows))
    make, inputs_of = MODELS[name]
    model = make().to(device)
    inputs = _moved(inputs_of((4, 6), 2), device)
    first_is_dense = dataclasses.replace(SPARSE, dense_layers=1)
    found = {}
    for impl in ("grouped", "triton"):
        with nearfield.apply(model, first_is_dense, impl=impl):
            found[impl] = run(model, inputs)
        # Queries and keys of every layer but one, text and image.
        expected = 2 * (len(model.transformer_blocks) + len(model.single_transformer_blocks) - 1)
        assert len(turned) == (expected if impl == "triton" else 0)
    with nearfield.apply(model.double(), first_is_dense, impl="grouped"):
        exact = run(model, double(inputs))
    assert_budget("output", found["triton"], exact, found["grouped"])


@NEEDS_TRITON
def test_models_that_are_trained_rotate_by_themselves(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The kernel has no gradient."""
    from nearfield.ops.rotary.triton import rotate

    monkeypatch.setattr(rotate, "rotate", lambda *_: pytest.fail("called"))
    model = tiny_models.flux().requires_grad_(True).to(device)
    inputs = _moved(tiny_models.flux_inputs((2, 4), 1), device)
    with nearfield.apply(model, SPARSE, impl="triton"):
        assert first(model(**inputs)).requires_grad


@NEEDS_TRITON
@pytest.mark.parametrize("more", [-1, 1])
def test_rotary_rows_that_are_too_few_or_too_many_are_refused(more: int, device: torch.device) -> None:
    """The kernel would read past their end, or turn by the wrong ones."""
    model = tiny_models.flux().to(device)
    inputs = _moved(tiny_models.flux_inputs((4, 6), 1), device)
    ids = inputs["txt_ids"]
    inputs["txt_ids"] = ids[:more] if more < 0 else torch.cat([ids, ids[:more]])
    with nearfield.apply(model, SPARSE, impl="triton"), pytest.raises(ValueError, match="image_rotary_emb"):
        run(model, inputs)


@NEEDS_TRITON
def test_tracers_see_the_rotation(device: torch.device) -> None:
    """A kernel's launch would not be part of what they see."""
    model = tiny_models.flux().to(device)
    inputs = _moved(tiny_models.flux_inputs((2, 4), 1), device)
    with nearfield.apply(model, SPARSE, impl="triton"):
        wanted = run(model, inputs)
        hidden = inputs.pop("hidden_states")
        with torch.no_grad():
            traced = make_fx(lambda x: first(model(hidden_states=x, **inputs)))(hidden)
            torch.testing.assert_close(traced(hidden), wanted)
