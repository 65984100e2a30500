"""Tiny random models of the real diffusers classes, with inputs of any size."""

from collections.abc import Callable
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

Grid = tuple[int, int]
Inputs = dict[str, Any]

HEADS, HEAD_DIM = 2, 16
TEXT = 7


def settle(model: nn.Module) -> Any:
    """Random weights everywhere, also where a fresh model has zeros; evaluation mode; no gradients."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (noise / max(1.0, parameter.shape[-1]) ** 0.5).to(parameter.dtype)
    return model.eval().requires_grad_(False)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- FLUX ----------------------------------------------------------------------------------------------------------


def flux(layers: int = 2, single_layers: int = 3, heads: int = HEADS) -> Any:
    return settle(
        diffusers.FluxTransformer2DModel(
            in_channels=4,
            num_layers=layers,
            num_single_layers=single_layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=heads,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 6, 6),
        )
    )


def image_ids(grid: Grid, image: int = 0, width: int = 3) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    ids = torch.zeros(grid[0] * grid[1], width)
    ids[:, 0], ids[:, 1], ids[:, 2] = image, rows.flatten(), columns.flatten()
    return ids


def flux_inputs(grid: Grid, batch: int = 1, references: tuple[Grid, ...] = ()) -> Inputs:
    ids = torch.cat([image_ids(side, number) for number, side in enumerate((grid, *references))])
    return {
        "hidden_states": randn(batch, len(ids), 4),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "pooled_projections": randn(batch, 8, seed=2),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }


def flux2(layers: int = 2, single_layers: int = 2) -> Any:
    return settle(
        diffusers.Flux2Transformer2DModel(
            in_channels=4,
            num_layers=layers,
            num_single_layers=single_layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=8,
            timestep_guidance_channels=8,
            axes_dims_rope=(4, 4, 4, 4),
        )
    )


def flux2_inputs(grid: Grid, batch: int = 1, references: tuple[Grid, ...] = ()) -> Inputs:
    sides = (grid, *references)
    ids = torch.cat([image_ids(side, 10 * number, width=4) for number, side in enumerate(sides)])
    return {
        "hidden_states": randn(batch, len(ids), 4),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids.expand(batch, -1, -1),
        "txt_ids": torch.zeros(batch, TEXT, 4),
        "guidance": torch.full((batch,), 3.0),
        "return_dict": False,
    }


# -- models that cut a latent into patches -------------------------------------------------------------------------


def sd3(layers: int = 3, dual: tuple[int, ...] = (0, 1)) -> Any:
    return settle(
        diffusers.SD3Transformer2DModel(
            sample_size=32,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=8,
            caption_projection_dim=HEADS * HEAD_DIM,
            pooled_projection_dim=8,
            pos_embed_max_size=40,
            dual_attention_layers=dual,
            qk_norm="rms_norm",
        )
    )


def sd3_inputs(grid: Grid, batch: int = 1) -> Inputs:
    return {
        "hidden_states": randn(batch, 4, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "pooled_projections": randn(batch, 8, seed=2),
        "timestep": torch.full((batch,), 500.0),
        "return_dict": False,
    }


def pixart(layers: int = 3) -> Any:
    return settle(
        diffusers.PixArtTransformer2DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            in_channels=4,
            out_channels=8,
            num_layers=layers,
            cross_attention_dim=HEADS * HEAD_DIM,
            sample_size=32,
            patch_size=2,
            caption_channels=8,
            use_additional_conditions=False,
        )
    )


def pixart_inputs(grid: Grid, batch: int = 1) -> Inputs:
    mask = torch.ones(batch, TEXT)
    mask[-1, -2:] = 0
    return {
        "hidden_states": randn(batch, 4, 2 * grid[0], 2 * grid[1]),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "encoder_attention_mask": mask,
        "timestep": torch.full((batch,), 500),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "return_dict": False,
    }


# -- Qwen-Image and Z-Image ----------------------------------------------------------------------------------------


def qwen(layers: int = 3, **fields: Any) -> Any:
    return settle(
        diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=1,
            num_layers=layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=HEADS,
            joint_attention_dim=8,
            axes_dims_rope=(4, 6, 6),
            **fields,
        )
    )


def qwen_inputs(grid: Grid, batch: int = 1, references: tuple[Grid, ...] = ()) -> Inputs:
    sides = (grid, *references)
    mask = torch.ones(batch, TEXT, dtype=torch.bool)
    mask[-1, -3:] = False
    return {
        "hidden_states": randn(batch, sum(height * width for height, width in sides), 4),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, *side) for side in sides]] * batch,
        "return_dict": False,
    }


def qwen_edit() -> Any:
    """References have a timestep of their own."""
    return qwen(zero_cond_t=True)


def qwen_edit_inputs(grid: Grid, batch: int = 1) -> Inputs:
    return qwen_inputs(grid, batch, references=((6, 4),))


def z_image(layers: int = 3, refiners: int = 2) -> Any:
    return settle(
        diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=HEADS * HEAD_DIM,
            n_layers=layers,
            n_refiner_layers=refiners,
            n_heads=HEADS,
            n_kv_heads=HEADS,
            cap_feat_dim=8,
            axes_dims=[4, 6, 6],
            axes_lens=[128, 64, 64],
        )
    )


def z_image_inputs(grid: Grid, batch: int = 1) -> Inputs:
    return {
        "x": [randn(4, 1, 2 * grid[0], 2 * grid[1], seed=number) for number in range(batch)],
        "t": torch.full((batch,), 0.5),
        # Captions of different lengths: the shorter ones are padded and masked.
        "cap_feats": [randn(TEXT + 40 * number, 8, seed=9) for number in range(batch)],
        "return_dict": False,
    }


def z_image_controlnet(transformer: Any) -> Any:
    """It shares its first layers with the transformer."""
    controlnet = diffusers.ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0, 1],
        control_in_dim=4,
        add_control_noise_refiner="control_noise_refiner",
        dim=HEADS * HEAD_DIM,
        n_refiner_layers=2,
        n_heads=HEADS,
        n_kv_heads=HEADS,
    )
    return diffusers.ZImageControlNetModel.from_transformer(settle(controlnet), transformer)


# -- SDXL ----------------------------------------------------------------------------------------------------------


def sdxl(linear: bool = True, width: int = HEADS * HEAD_DIM) -> Any:
    model = settle(
        diffusers.UNet2DConditionModel(
            sample_size=32,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(16, width),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=8,
            attention_head_dim=(2, HEADS),
            transformer_layers_per_block=(1, 2),
            use_linear_projection=linear,
            addition_embed_type="text_time",
            addition_time_embed_dim=4,
            projection_class_embeddings_input_dim=8 + 6 * 4,
        )
    )
    # Among so many convolutions attention would be lost in rounding.
    for name, parameter in model.named_parameters():
        if ".attn1.to_" in name or ".attentions.0.proj_out" in name:
            parameter.data *= 8
    return model


def sdxl_inputs(grid: Grid, batch: int = 1) -> Inputs:
    """`grid` is that of the first transformer, which works on half of the latent."""
    return {
        "sample": randn(batch, 4, 2 * grid[0], 2 * grid[1]),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "added_cond_kwargs": {"text_embeds": randn(batch, 8, seed=2), "time_ids": torch.ones(batch, 6)},
        "return_dict": False,
    }


# -- videos --------------------------------------------------------------------------------------------------------

VideoGrid = tuple[int, int, int]
WAN_TEXT = 512  # Wan cuts features of an image off its text by this number


def with_contrast(model: nn.Module) -> Any:
    """Queries and keys that are normalised over all heads are small, so that all keys would weigh the same."""
    for name, parameter in model.named_parameters():
        if "attn1.norm_" in name:
            parameter.data *= 10
    return model


def wan(layers: int = 2, image_dim: int | None = None) -> Any:
    model = settle(
        diffusers.WanTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            in_channels=4,
            out_channels=4,
            text_dim=8,
            freq_dim=8,
            ffn_dim=32,
            num_layers=layers,
            image_dim=image_dim,
            added_kv_proj_dim=None if image_dim is None else HEADS * HEAD_DIM,
            rope_max_seq_len=32,
        )
    )
    return with_contrast(model)


def wan_inputs(grid: VideoGrid, batch: int = 1) -> Inputs:
    return {
        "hidden_states": randn(batch, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "return_dict": False,
    }


def wan_i2v() -> Any:
    return wan(image_dim=6)


def wan_i2v_inputs(grid: VideoGrid, batch: int = 1) -> Inputs:
    """With features of a first frame, which cross-attention reads."""
    return wan_inputs(grid, batch) | {
        "encoder_hidden_states": randn(batch, WAN_TEXT, 8, seed=1),
        "encoder_hidden_states_image": randn(batch, 5, 6, seed=2),
    }


def wan_ti2v_inputs(grid: VideoGrid, batch: int = 1) -> Inputs:
    """With a timestep for every token: that of a given first frame is zero."""
    frames, tokens = grid[0], grid[1] * grid[2]
    timestep = torch.full((batch, frames, tokens), 500.0)
    timestep[:, 0] = 0
    return wan_inputs(grid, batch) | {"timestep": timestep.flatten(1)}


def hunyuan(layers: int = 1, single_layers: int = 1, image_condition: str | None = None) -> Any:
    return settle(
        diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            num_layers=layers,
            num_single_layers=single_layers,
            num_refiner_layers=1,
            guidance_embeds=True,
            text_embed_dim=8,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 6, 6),
            image_condition_type=image_condition,
        )
    )


def hunyuan_inputs(grid: VideoGrid, batch: int = 1) -> Inputs:
    mask = torch.ones(batch, TEXT)
    mask[-1, -3:] = 0
    return {
        "hidden_states": randn(batch, 4, grid[0], 2 * grid[1], 2 * grid[2]),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "encoder_attention_mask": mask,
        "pooled_projections": randn(batch, 8, seed=2),
        "guidance": torch.full((batch,), 6000.0),
        "return_dict": False,
    }


def hunyuan_i2v() -> Any:
    return hunyuan(image_condition="token_replace")


def ltx(layers: int = 2) -> Any:
    model = settle(
        diffusers.LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_DIM,
            cross_attention_dim=HEADS * HEAD_DIM,
            num_layers=layers,
            caption_channels=8,
        )
    )
    return with_contrast(model)


def ltx_inputs(grid: VideoGrid, batch: int = 1) -> Inputs:
    frames, height, width = grid
    mask = torch.ones(batch, TEXT)
    mask[-1, -3:] = 0
    return {
        "hidden_states": randn(batch, frames * height * width, 4),
        "encoder_hidden_states": randn(batch, TEXT, 8, seed=1),
        "timestep": torch.full((batch,), 500.0),
        "encoder_attention_mask": mask,
        "num_frames": frames,
        "height": height,
        "width": width,
        "rope_interpolation_scale": (1 / 3, 32, 32),
        "return_dict": False,
    }


def ltx_i2v_inputs(grid: VideoGrid, batch: int = 1) -> Inputs:
    """With a timestep for every token."""
    return ltx_inputs(grid, batch) | {"timestep": wan_ti2v_inputs(grid, batch)["timestep"]}


VIDEO_MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Inputs]]] = {
    "wan": (wan, wan_inputs),
    "wan_i2v": (wan_i2v, wan_i2v_inputs),
    "wan_ti2v": (wan, wan_ti2v_inputs),
    "hunyuan": (hunyuan, hunyuan_inputs),
    "hunyuan_i2v": (hunyuan_i2v, hunyuan_inputs),
    "ltx": (ltx, ltx_inputs),
    "ltx_i2v": (ltx, ltx_i2v_inputs),
}


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Inputs]]] = {
    "flux": (flux, flux_inputs),
    "flux2": (flux2, flux2_inputs),
    "sd3": (sd3, sd3_inputs),
    "pixart": (pixart, pixart_inputs),
    "qwen": (qwen, qwen_inputs),
    "z_image": (z_image, z_image_inputs),
    "sdxl": (sdxl, sdxl_inputs),
}


def first(output: Any) -> Tensor:
    """The tensor in a model's output; a list of samples is stacked."""
    sample = output[0] if isinstance(output, tuple) else output
    return torch.stack(list(sample)) if isinstance(sample, list) else sample


# -- pipelines -----------------------------------------------------------------------------------------------------

NO_ENCODERS = dict.fromkeys(["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"])


def vae(channels: int) -> Any:
    """One that keeps the size of images."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(4,),
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    ).eval()


def pipeline(kind: str, **parts: Any) -> Any:
    pipe = getattr(diffusers, kind)(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux_pipeline(kind: str = "FluxPipeline", transformer: Any = None, **parts: Any) -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    transformer = transformer or flux()
    return pipeline(kind, transformer=transformer, scheduler=scheduler, vae=vae(1), **NO_ENCODERS, **parts)


def flux_call(height: int = 24, width: int = 20, steps: int = 5, batch: int = 1) -> Inputs:
    return {
        "prompt_embeds": randn(batch, TEXT, 8, seed=1),
        "pooled_prompt_embeds": randn(batch, 8, seed=2),
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "guidance_scale": 1.0,
        "generator": torch.Generator().manual_seed(3),
        "output_type": "latent",
    }


def sd3_pipeline() -> Any:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    third = {"text_encoder_3": None, "tokenizer_3": None}
    parts = {"transformer": sd3(), "scheduler": scheduler, "vae": vae(4)}
    return pipeline("StableDiffusion3Pipeline", **parts, **NO_ENCODERS, **third)


def guided_call(height: int = 24, width: int = 32, steps: int = 5) -> Inputs:
    """With classifier-free guidance."""
    return {
        "prompt_embeds": randn(1, TEXT, 8, seed=1),
        "pooled_prompt_embeds": randn(1, 8, seed=2),
        "negative_prompt_embeds": randn(1, TEXT, 8, seed=4),
        "negative_pooled_prompt_embeds": randn(1, 8, seed=5),
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "guidance_scale": 3.0,
        "generator": torch.Generator().manual_seed(3),
        "output_type": "latent",
    }


def sdxl_pipeline(scheduler: Any = None) -> Any:
    parts = {"unet": sdxl(), "scheduler": scheduler or diffusers.EulerDiscreteScheduler(), "vae": vae(4)}
    return pipeline("StableDiffusionXLPipeline", **parts, **NO_ENCODERS)


def pixart_pipeline() -> Any:
    parts = {"transformer": pixart(), "scheduler": diffusers.DPMSolverMultistepScheduler(), "vae": vae(4)}
    return pipeline("PixArtSigmaPipeline", text_encoder=None, tokenizer=None, **parts)


def wan_pipeline(**options: Any) -> Any:
    """With `transformer_2` and `boundary_ratio` it has two models, with `expand_timesteps` one timestep per token."""
    parts = {"transformer": wan(), "scheduler": diffusers.UniPCMultistepScheduler(**FLOW), "vae": None}
    return pipeline("WanPipeline", tokenizer=None, text_encoder=None, **parts | options)


FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "num_train_timesteps": 1000}


def wan_call(
    height: int = 64, width: int = 80, frames: int = 9, steps: int = 4, is_guided: bool = True
) -> Inputs:
    return {
        "prompt_embeds": randn(1, TEXT, 8, seed=1),
        "negative_prompt_embeds": randn(1, TEXT, 8, seed=4) if is_guided else None,
        "height": height,
        "width": width,
        "num_frames": frames,
        "num_inference_steps": steps,
        "guidance_scale": 3.0 if is_guided else 1.0,
        "generator": torch.Generator().manual_seed(3),
        "output_type": "latent",
    }
