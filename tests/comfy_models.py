"""The nodes on one of ComfyUI's own models, tiny and random: `python comfy_models.py FOLDER flux|sd3|qwen|wan`.

A program, because ComfyUI's package is called `comfy`, as the folder of the nodes is. The model, its attention and the
executor of wrappers are ComfyUI's; so is the patcher, where `comfy.model_patcher` can be imported. What is read is
compared with the same model under masks.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import comfy_standin as standin
from nearfield import Geometry
from tiles import paper

NODES = Path(__file__).resolve().parents[1] / "comfy"
TEXT = 7
JOINED = Geometry((11, 13), text=TEXT)


def flux(operations: Any) -> tuple[Any, tuple[int, ...], list[Geometry], dict[str, Any]]:
    from comfy.ldm.flux.model import Flux, FluxParams

    fields = {
        "in_channels": 4,
        "out_channels": 4,
        "vec_in_dim": 8,
        "context_in_dim": 8,
        "hidden_size": 32,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 2,
        "depth_single_blocks": 3,
        "axes_dim": [4, 6, 6],
        "theta": 10000,
        "patch_size": 2,
        "qkv_bias": True,
        "guidance_embed": True,
    }
    if "txt_ids_dims" in FluxParams.__dataclass_fields__:  # since FLUX.2
        fields["txt_ids_dims"] = []
    model = Flux(**fields, operations=operations)
    references = [torch.randn(2, 4, 12, 16)]
    edited = Geometry((11, 13), text=TEXT, references=((6, 8),))
    conditions = {"y": torch.randn(2, 8), "guidance": torch.full((2,), 3.5), "ref_latents": references}
    return model, (2, 4, 22, 26), [edited] * 5, conditions


def sd3(operations: Any) -> tuple[Any, tuple[int, ...], list[Geometry], dict[str, Any]]:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    model = OpenAISignatureMMDITWrapper(
        input_size=None,
        patch_size=2,
        in_channels=4,
        depth=3,
        adm_in_channels=8,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 8, "out_features": 192},
        },
        pos_embed_max_size=16,
        num_patches=256,
        qk_norm="rms",
        x_block_self_attn_layers=[0, 1],
        operations=operations,
    )
    alone = Geometry((11, 13))
    return model, (2, 4, 22, 26), [JOINED, alone, JOINED, alone, JOINED], {"y": torch.randn(2, 8)}


def qwen(operations: Any) -> tuple[Any, tuple[int, ...], list[Geometry], dict[str, Any]]:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        axes_dims_rope=(4, 6, 6),
        operations=operations,
    )
    references = [torch.randn(2, 4, 1, 12, 16)]
    edited = Geometry((11, 13), text=TEXT, references=((6, 8),))
    return model, (2, 4, 1, 22, 26), [edited] * 4, {"ref_latents": references}


def wan(operations: Any) -> tuple[Any, tuple[int, ...], list[Geometry], dict[str, Any]]:
    from comfy.ldm.wan.model import WanModel

    model = WanModel(
        in_dim=4,
        out_dim=4,
        dim=32,
        ffn_dim=64,
        freq_dim=32,
        text_dim=8,
        num_heads=2,
        num_layers=3,
        operations=operations,
    )
    return model, (2, 4, 3, 16, 20), [Geometry((3, 8, 10))] * 3, {}


class Host(standin.BaseModel):
    """What a patcher holds, with ComfyUI's own executor of wrappers."""

    def apply_model(
        self,
        x: Tensor,
        t: Tensor,
        c_concat: Any = None,
        c_crossattn: Any = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers

        wrappers = get_all_wrappers(WrappersMP.APPLY_MODEL, transformer_options)
        executor = WrapperExecutor.new_class_executor(self._apply_model, self, wrappers)
        return executor.execute(x, t, c_concat, c_crossattn, control, transformer_options, **kwargs)


def patcher(model: nn.Module) -> Any:
    if importlib.util.find_spec("comfy.model_patcher") is None:
        return standin.ModelPatcher(model)
    from comfy.model_patcher import ModelPatcher

    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def node() -> Any:
    place = NODES / "__init__.py"
    spec = importlib.util.spec_from_file_location("nodes", place, submodule_search_locations=[str(NODES)])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["nodes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NODE_CLASS_MAPPINGS["NearfieldHilbert"]()


@torch.inference_mode()
def main(folder: str, name: str) -> None:
    sys.path.insert(0, folder)
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops

    torch.manual_seed(0)
    model, shape, calls, conditions = globals()[name](comfy.ops.disable_weight_init)
    for parameter in [*model.parameters(), *model.buffers()]:
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    plain = patcher(Host(model.eval()))
    latent, text = torch.randn(shape), torch.randn(shape[0], TEXT, 8)

    def run(patched: Any) -> Tensor:
        return standin.sample(patched, latent, text, torch.linspace(1, 0, 6), **conditions)

    dense = run(plain)
    fields = {"near": "tile", "shared": "centre", "summary": "mean", "far": "none", "dense_steps": "0"}
    (sparse,) = node().patch(plain, tiles="4", dense_layers="1", **fields)
    (whole,) = node().patch(plain, tiles="1", dense_layers="0", **fields | {"shared": "none"})
    masked = plain.clone()
    override = standin.Masked(paper(tiles=4), calls)
    masked.model_options["transformer_options"]["optimized_attention_override"] = override
    out, expected = run(sparse), run(masked)
    assert not override.left, f"{len(override.left)} attention calls did not come"
    changed = (out - dense).abs().max()
    wrong = max((out - expected).abs().max(), (run(whole) - dense).abs().max())
    assert torch.equal(run(plain), dense), "the original was touched"
    assert wrong < 1e-3 * changed, f"wrong by {wrong:.1e} where sparse and dense differ by {changed:.1e}"
    print(
        f"{name}, patcher of {type(plain).__module__}: wrong by {wrong:.1e} of {changed:.1e}: as the plans say"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
