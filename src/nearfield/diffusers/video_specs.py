"""What is known about each model of videos: see `specs.py`. Their grids have three sides: frames, height, width."""

from typing import Any

from nearfield.diffusers.grids import GridReader
from nearfield.diffusers.spec import (
    CROSS_ATTENTION,
    LEAVE,
    Arguments,
    Move,
    Pixels,
    Spec,
    TokenLayout,
    without_single_frame,
)
from nearfield.layout import Grid

# -- how large the video is ----------------------------------------------------------------------------------------


def _patches(arguments: Arguments, patch: Grid) -> Grid:
    """A latent `[B, C, frames, height, width]`, cut into patches."""
    sides = arguments.get("hidden_states").shape[-3:]
    return tuple(side // part for side, part in zip(sides, patch, strict=True))


def _wan(module: Any, arguments: Arguments, _: GridReader) -> TokenLayout:
    """Text, and features of a first frame, are read by cross-attention."""
    return TokenLayout((without_single_frame(_patches(arguments, module.config.patch_size)),))


def _hunyuan(module: Any, arguments: Arguments, _: GridReader) -> TokenLayout:
    """Its text is joined to the video."""
    config = module.config
    grid = _patches(arguments, (config.patch_size_t, config.patch_size, config.patch_size))
    return TokenLayout(_hunyuan_images(module, grid), arguments.get("encoder_hidden_states").shape[1])


def _hunyuan_images(module: Any, grid: Grid) -> tuple[Grid, ...]:
    """Where a given image replaces the first frame, the model treats the first tokens of the sequence, which are those
    of that frame, by themselves: so they stay first, as an image of their own."""
    frames, *frame = grid
    if module.config.image_condition_type != "token_replace" or frames == 1:
        return (without_single_frame(grid),)
    return tuple(frame), without_single_frame((frames - 1, *frame))


def _ltx(module: Any, arguments: Arguments, _: GridReader) -> "TokenLayout | str":
    """Packed tokens; sides are given as numbers."""
    if arguments.get("video_coords") is not None:
        return "`video_coords` say where tokens are, one by one"
    sides = tuple(arguments.get(name) for name in ("num_frames", "height", "width"))
    return TokenLayout((without_single_frame(sides),))


def _latent_frames(frames: int, factor: int) -> int:
    """The first frame stands for itself, later ones are put together."""
    return (frames - 1) // factor + 1


def _wan_size(model: Any, region: str, pixels: Pixels) -> Grid:
    """The small model of Wan 2.2, known by its 48 channels, has an autoencoder that compresses twice as much."""
    side = 32 if model.config.out_channels == 48 else 16
    return _latent_frames(pixels.frames, 4), pixels.height // side, pixels.width // side


def _hunyuan_size(model: Any, region: str, pixels: Pixels) -> Grid:
    return _latent_frames(pixels.frames, 4), pixels.height // 16, pixels.width // 16


def _ltx_size(model: Any, region: str, pixels: Pixels) -> Grid:
    return _latent_frames(pixels.frames, 8), pixels.height // 32, pixels.width // 32


# -- the table -----------------------------------------------------------------------------------------------------

VIDEO_SPECS = (
    Spec(
        "WanTransformer3DModel",
        layers=("blocks.*.attn1",),
        moves=(
            Move("blocks.0", "hidden_states"),
            Move("rope", 0),
            Move("rope", 1),
            # One timestep per token, where a first frame is given (TI2V). What scales tokens behind `norm_out` stays.
            Move("condition_embedder", 1, num_dims=3),
            LEAVE,
        ),
        locate=_wan,
        can_split=True,
        processors=("WanAttnProcessor",),
        dense={"blocks.*.attn2": CROSS_ATTENTION},
        attention_kwargs="attention_kwargs",
        size=_wan_size,
        is_video=True,
    ),
    Spec(
        "HunyuanVideoTransformer3DModel",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(Move("x_embedder", None), Move("rope", 0, dim=0), Move("rope", 1, dim=0), LEAVE),
        locate=_hunyuan,
        processors=("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0"),
        text_first=False,
        dense={"context_embedder.token_refiner.refiner_blocks.*.attn": "reads text alone"},
        attention_kwargs="attention_kwargs",
        size=_hunyuan_size,
        images=_hunyuan_images,
        text=256,
        is_video=True,
    ),
    Spec(
        "LTXVideoTransformer3DModel",
        layers=("transformer_blocks.*.attn1",),
        moves=(
            Move("", "hidden_states"),
            Move("rope", 0),
            Move("rope", 1),
            # One timestep per token, where frames are given. What scales tokens behind `norm_out` stays in order.
            Move("transformer_blocks.*", "temb"),
            LEAVE,
        ),
        locate=_ltx,
        can_split=True,
        processors=("LTXVideoAttnProcessor",),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        attention_kwargs="attention_kwargs",
        size=_ltx_size,
        is_video=True,
    ),
)
