"""HunyuanVideo and SkyReels."""

from typing import Any

from nearfield.diffusers.models.spec import (
    LEAVE,
    Arguments,
    Move,
    Pixels,
    Spec,
    define,
    latent_frames,
    num_text,
    patches,
    without_single_frame,
)
from nearfield.layout import Grid
from nearfield.session import TokenLayout


def _from_latent(module: Any, arguments: Arguments) -> TokenLayout:
    """A latent that the model cuts into patches; the text is joined to the video."""
    config = module.config
    grid = patches(arguments, (config.patch_size_t, config.patch_size, config.patch_size))
    return TokenLayout(_images(module, grid), num_text(arguments))


def _images(module: Any, grid: Grid) -> tuple[Grid, ...]:
    """Where a given image replaces the first frame, the model treats the first tokens of the sequence, which are those
    of that frame, by themselves: so they stay first, as an image of their own."""
    grid = without_single_frame(grid)
    if module.config.image_condition_type != "token_replace" or len(grid) == 2:
        return (grid,)
    frames, *frame = grid
    return tuple(frame), without_single_frame((frames - 1, *frame))


def _size(model: Any, region: str, pixels: Pixels) -> Grid:
    return latent_frames(pixels.frames, 4), pixels.height // 16, pixels.width // 16


HUNYUAN = define(
    Spec(
        "HunyuanVideoTransformer3DModel",
        name="hunyuan",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(Move("x_embedder", None), Move("rope", 0, dim=0), Move("rope", 1, dim=0), LEAVE),
        locate=_from_latent,
        processors=("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0"),
        text_first=False,
        dense={"context_embedder.token_refiner.refiner_blocks.*.attn": "reads text alone"},
        attention_kwargs="attention_kwargs",
        size=_size,
        images=_images,
        text=256,
        is_video=True,
    )
)
