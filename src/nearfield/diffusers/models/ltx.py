"""LTX-Video."""

from typing import Any

from torch import nn

from nearfield.diffusers.models.spec import (
    CROSS_ATTENTION,
    LEAVE,
    Arguments,
    Move,
    Pixels,
    Spec,
    define,
    latent_frames,
    without_single_frame,
)
from nearfield.layout import Grid
from nearfield.session import TokenLayout


def _from_sides(module: nn.Module, arguments: Arguments) -> "TokenLayout | str":
    """Packed tokens; sides are given as numbers."""
    if arguments.get("video_coords") is not None:
        return "`video_coords` say where tokens are, one by one"
    sides = tuple(arguments.get(name) for name in ("num_frames", "height", "width"))
    return TokenLayout((without_single_frame(sides),))


def _size(model: Any, region: str, pixels: Pixels) -> Grid:
    return latent_frames(pixels.frames, 8), pixels.height // 32, pixels.width // 32


LTX = define(
    Spec(
        "LTXVideoTransformer3DModel",
        name="ltx",
        layers=("transformer_blocks.*.attn1",),
        moves=(
            Move("", "hidden_states"),
            Move("rope", 0),
            Move("rope", 1),
            # One timestep per token, where frames are given. What scales tokens behind `norm_out` stays in order.
            Move("transformer_blocks.*", "temb"),
            LEAVE,
        ),
        locate=_from_sides,
        can_split=True,
        processors=("LTXVideoAttnProcessor",),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        attention_kwargs="attention_kwargs",
        size=_size,
        is_video=True,
    )
)
