"""Qwen-Image with Edit and Layered."""

from typing import Any

import torch
from torch import nn

from nearfield.diffusers.models.spec import (
    LEAVE,
    TEXT_PROJECTIONS,
    Arguments,
    ComfyModel,
    MergedBlocks,
    Move,
    Rows,
    Spec,
    define,
    num_text,
    without_single_frame,
)
from nearfield.session import TokenLayout


def _from_image_shapes(module: nn.Module, arguments: Arguments) -> TokenLayout:
    """`img_shapes`: for each sample of the batch the (frames, height, width) of its images; all samples alike."""
    shapes = arguments.get("img_shapes")
    shapes = shapes[0] if isinstance(shapes, list) else shapes
    shapes = shapes if isinstance(shapes, list) else [shapes]
    images = tuple(without_single_frame(tuple(shape)) for shape in shapes)
    return TokenLayout(images, num_text(arguments))


def _of_complex(rotary: Any) -> Rows:
    """Rows of the image and of the text, complex, one number for two channels."""
    image, text = rotary
    joint = torch.cat([text, image]).repeat_interleave(2, dim=-1)
    return Rows(joint.real, joint.imag)


QWEN = define(
    Spec(
        "QwenImageTransformer2DModel",
        name="qwen",
        layers=("transformer_blocks.*.attn",),
        moves=(
            Move("", "hidden_states"),
            Move("", "controlnet_block_samples"),
            Move("pos_embed", 0, dim=0),
            # Which of two timesteps each token has (Edit). The same for all of an image, so that only shares differ.
            Move("transformer_blocks.*", "modulate_index"),
            LEAVE,
        ),
        locate=_from_image_shapes,
        takes_references=True,
        can_split=True,
        processors=("QwenDoubleStreamAttnProcessor2_0",),
        attention_kwargs="attention_kwargs",
        text=256,
        blocks=(
            MergedBlocks(
                "transformer_blocks.*",
                "joint",
                result=1,
                rows=_of_complex,
                per_token=("modulate_index",),
                text_parts=(*TEXT_PROJECTIONS, "txt_mlp"),
                once_parts=("img_mod", "txt_mod"),
                parts=("attn",),
            ),
        ),
        comfy=ComfyModel("Qwen-Image", "QwenImageTransformer2DModel", ("transformer_blocks.*",)),
    )
)
