"""FLUX.1 with Kontext, Fill and ControlNet, and FLUX.2."""

from dataclasses import replace

from nearfield.diffusers.models.spec import (
    LEAVE,
    ROTARY,
    TEXT_PROJECTIONS,
    ComfyModel,
    MergedBlocks,
    Move,
    Rows,
    Spec,
    define,
)

FLUX = define(
    Spec(
        "FluxTransformer2DModel",
        name="flux",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(
            Move("", "hidden_states"),
            Move("", "img_ids", dim=-2),
            Move("", "controlnet_block_samples"),
            Move("", "controlnet_single_block_samples"),
            LEAVE,
        ),
        ids="img_ids",
        takes_references=True,
        can_split=True,
        processors=("FluxAttnProcessor",),
        rotary=ROTARY,
        text=512,
        blocks=(
            MergedBlocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                rows=Rows.as_they_are,
                text_parts=(*TEXT_PROJECTIONS, "ff_context"),
                once_parts=("norm1", "norm1_context"),
                parts=("attn",),
            ),
            MergedBlocks(
                "single_transformer_blocks.*",
                "single",
                result=1,
                rows=Rows.as_they_are,
                once_parts=("norm",),
                norm="norm",
            ),
        ),
        comfy=ComfyModel("FLUX", "Flux", ("double_blocks.*", "single_blocks.*")),
    )
)

FLUX2 = define(
    FLUX.like(
        "Flux2Transformer2DModel",
        name="flux2",
        moves=(Move("", "hidden_states"), Move("", "img_ids", dim=-2), LEAVE),
        processors=("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"),
        refused={"kv_cache_mode": "Cached reference images have no place in the order of the tokens."},
        blocks=(
            replace(FLUX.blocks[0], once_parts=()),
            # Attention and MLP are one module.
            MergedBlocks(
                "single_transformer_blocks.*",
                "single",
                holds_text=True,
                rows=Rows.as_they_are,
                parts=("attn",),
            ),
        ),
    )
)
