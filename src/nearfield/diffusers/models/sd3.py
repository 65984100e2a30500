"""Stable Diffusion 3 and 3.5."""

from typing import Any

from nearfield.diffusers.models.spec import (
    LEAVE,
    TEXT_PROJECTIONS,
    Arguments,
    ComfyModel,
    MergedBlocks,
    Move,
    Spec,
    define,
    num_text,
    patches,
)
from nearfield.session import TokenLayout


def _from_latent(module: Any, arguments: Arguments) -> TokenLayout:
    """A latent that the model cuts into patches; the text is joined to the image."""
    patch = module.config.patch_size
    return TokenLayout((patches(arguments, (patch, patch)),), num_text(arguments))


SD3 = define(
    Spec(
        "SD3Transformer2DModel",
        name="sd3",
        layers=("transformer_blocks.*.attn|attn2",),
        moves=(Move("pos_embed", None), Move("", "block_controlnet_hidden_states"), LEAVE),
        locate=_from_latent,
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
        text_first=False,
        image_only=("transformer_blocks.*.attn2",),
        text=333,
        blocks=(
            MergedBlocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                text_parts=(*TEXT_PROJECTIONS, "ff_context"),
                once_parts=("norm1", "norm1_context"),
                parts=("attn", "attn2"),
            ),
        ),
        comfy=ComfyModel(
            "Stable Diffusion 3",
            "OpenAISignatureMMDITWrapper",
            ("joint_blocks.*.x_block.attn|attn2",),
            image_only=("joint_blocks.*.x_block.attn2",),
        ),
    )
)
