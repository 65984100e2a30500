"""Wan 2.1 and 2.2: text, image, text and image to video."""

from typing import Any

from nearfield.diffusers.models.spec import (
    CROSS_ATTENTION,
    LEAVE,
    Arguments,
    ComfyModel,
    Move,
    Pixels,
    Spec,
    define,
    latent_frames,
    patches,
)
from nearfield.layout import Grid
from nearfield.session import TokenLayout


def _from_latent(module: Any, arguments: Arguments) -> TokenLayout:
    """Text, and features of a first frame, are read by cross-attention."""
    return TokenLayout((patches(arguments, module.config.patch_size),))


def _size(model: Any, region: str, pixels: Pixels) -> Grid:
    """The small model of Wan 2.2, known by its 48 channels, has an autoencoder that compresses twice as much."""
    side = 32 if model.config.out_channels == 48 else 16
    return latent_frames(pixels.frames, 4), pixels.height // side, pixels.width // side


WAN = define(
    Spec(
        "WanTransformer3DModel",
        name="wan",
        layers=("blocks.*.attn1",),
        moves=(
            Move("blocks.0", "hidden_states"),
            Move("rope", 0),
            Move("rope", 1),
            # One timestep per token, where a first frame is given (TI2V). What scales tokens behind `norm_out` stays.
            Move("condition_embedder", 1, num_dims=3),
            LEAVE,
        ),
        locate=_from_latent,
        can_split=True,
        processors=("WanAttnProcessor",),
        dense={"blocks.*.attn2": CROSS_ATTENTION},
        attention_kwargs="attention_kwargs",
        size=_size,
        is_video=True,
        comfy=ComfyModel("Wan", "WanModel", ("blocks.*",)),
    )
)
