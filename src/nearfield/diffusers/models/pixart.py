"""PixArt, and the UNets of Stable Diffusion 1.5, 2 and XL, whose blocks are of the same class."""

from typing import Any

from nearfield.diffusers.models.spec import (
    CROSS_ATTENTION,
    LEAVE,
    Arguments,
    MergedBlocks,
    Move,
    Pixels,
    Spec,
    define,
    patches,
)
from nearfield.layout import Grid
from nearfield.session import TokenLayout


def _from_latent(module: Any, arguments: Arguments) -> TokenLayout:
    """A latent that the model cuts into patches; the text is read by cross-attention."""
    patch = module.config.patch_size
    return TokenLayout((patches(arguments, (patch, patch)),))


PIXART = define(
    Spec(
        "PixArtTransformer2DModel",
        name="pixart",
        layers=("transformer_blocks.*.attn1",),
        moves=(Move("pos_embed", None), LEAVE),
        locate=_from_latent,
        can_split=True,
        processors=("AttnProcessor2_0", "FusedAttnProcessor2_0"),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        refused={"attention_mask": "A mask of image tokens is in raster order."},
        attention_kwargs="cross_attention_kwargs",
        blocks=(
            MergedBlocks(
                "transformer_blocks.*",
                "plain",
                text_parts=("attn2.to_k", "attn2.to_v"),
                parts=("attn1", "attn2", "ff"),
            ),
        ),
    )
)


def _from_feature_map(module: Any, arguments: Arguments) -> TokenLayout:
    """A feature map `[B, C, height, width]`, one token per pixel."""
    return TokenLayout((patches(arguments, (1, 1)),))


def _feature_map_size(model: Any, region: str, pixels: Pixels) -> Grid:
    """A UNet works on every eighth pixel and halves its feature map, rounding up, after each block on its way down."""
    deepest = len(model.down_blocks) - 1
    way, _, rest = region.partition(".")
    block = int(rest.partition(".")[0]) if way != "mid_block" else 0
    halvings = {"down_blocks": block, "mid_block": deepest, "up_blocks": deepest - block}[way]
    return -(-(pixels.height // 8) // 2**halvings), -(-(pixels.width // 8) // 2**halvings)


UNET = define(
    PIXART.like(
        "UNet2DConditionModel",
        name="sdxl",
        moves=(
            Move("transformer_blocks.0", "hidden_states"),
            Move("transformer_blocks.-1", None, "leave"),
        ),
        locate=_from_feature_map,
        can_split=False,
        processors=(*PIXART.processors, "IPAdapterAttnProcessor2_0"),
        region="Transformer2DModel",
        regions=("down_blocks.*", "mid_block.*", "up_blocks.*"),
        size=_feature_map_size,
    )
)
