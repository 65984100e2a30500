"""What is known about each model: a table. The code that uses it knows no model by name.

A new model is a new entry: where its attention layers are and in which order they run, where tokens enter and leave,
which arguments say how large the image is. Everything else follows. Models of images are here, of videos in
`video_specs.py`.
"""

from typing import Any

from torch import nn

from nearfield.diffusers.blocks import ROTARY
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
from nearfield.diffusers.video_specs import VIDEO_SPECS
from nearfield.layout import Grid

# -- how large the image is ----------------------------------------------------------------------------------------


def _from_ids(module: nn.Module, arguments: Arguments, reader: GridReader) -> "TokenLayout | str":
    """Packed tokens: the grid is known from the values of `img_ids` alone."""
    text = arguments.get("encoder_hidden_states").shape[1]
    images = reader.read(arguments.get("img_ids"))
    return "`img_ids` describe no grid" if images is None else TokenLayout(images, text)


def _from_latent(module: nn.Module, arguments: Arguments, _: GridReader) -> TokenLayout:
    """A latent `[B, C, height, width]` that the model cuts into patches; its text is joined to the image."""
    return _patches(module, arguments)._replace(text=arguments.get("encoder_hidden_states").shape[1])


def _from_latent_alone(module: nn.Module, arguments: Arguments, _: GridReader) -> TokenLayout:
    """The same, but the text is read by cross-attention."""
    return _patches(module, arguments)


def _patches(module: Any, arguments: Arguments) -> TokenLayout:
    height, width = arguments.get("hidden_states").shape[-2:]
    patch = module.config.patch_size
    return TokenLayout(((height // patch, width // patch),))


def _from_feature_map(module: nn.Module, arguments: Arguments, _: GridReader) -> TokenLayout:
    """A feature map `[B, C, height, width]`, one token per pixel."""
    height, width = arguments.get("hidden_states").shape[-2:]
    return TokenLayout(((height, width),))


def _from_image_shapes(module: nn.Module, arguments: Arguments, _: GridReader) -> TokenLayout:
    """`img_shapes`: for each sample of the batch the (frames, height, width) of its images; all samples alike."""
    shapes = arguments.get("img_shapes")
    shapes = shapes[0] if isinstance(shapes, list) else shapes
    shapes = shapes if isinstance(shapes, list) else [shapes]
    images = tuple(without_single_frame(tuple(shape)) for shape in shapes)
    return TokenLayout(images, arguments.get("encoder_hidden_states").shape[1])


def _from_list_of_latents(module: nn.Module, arguments: Arguments, _: GridReader) -> "TokenLayout | str":
    """A list of latents `[C, frames, height, width]`, and one of captions."""
    latents, captions = arguments.get("x"), arguments.get("cap_feats")
    if isinstance(latents[0], list):
        return "several images per sample"
    if any(latent.shape != latents[0].shape for latent in latents):
        return "images of different sizes in one batch"
    patch, frame_patch = arguments.get("patch_size", 2), arguments.get("f_patch_size", 1)
    frames, height, width = latents[0].shape[1:]
    grid = without_single_frame((frames // frame_patch, height // patch, width // patch))
    return TokenLayout((grid,), max(len(caption) for caption in captions))


def _feature_map_size(model: Any, region: str, pixels: Pixels) -> Grid:
    """A UNet works on every eighth pixel and halves its feature map, rounding up, after each block on its way down."""
    deepest = len(model.down_blocks) - 1
    way, _, rest = region.partition(".")
    block = int(rest.partition(".")[0]) if way != "mid_block" else 0
    halvings = {"down_blocks": block, "mid_block": deepest, "up_blocks": deepest - block}[way]
    return -(-(pixels.height // 8) // 2**halvings), -(-(pixels.width // 8) // 2**halvings)


# -- the table -----------------------------------------------------------------------------------------------------

IMAGE_SPECS = (
    Spec(
        "FluxTransformer2DModel",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(
            Move("", "hidden_states"),
            Move("", "img_ids", dim=-2),
            Move("", "controlnet_block_samples"),
            Move("", "controlnet_single_block_samples"),
            LEAVE,
        ),
        locate=_from_ids,
        takes_references=True,
        can_split=True,
        processors=("FluxAttnProcessor",),
        rotary=ROTARY,
        text=512,
    ),
    Spec(
        "Flux2Transformer2DModel",
        layers=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
        moves=(Move("", "hidden_states"), Move("", "img_ids", dim=-2), LEAVE),
        locate=_from_ids,
        takes_references=True,
        can_split=True,
        processors=("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"),
        rotary=ROTARY,
        refused={"kv_cache_mode": "Cached reference images have no place in the order of the tokens."},
        text=512,
    ),
    Spec(
        "SD3Transformer2DModel",
        layers=("transformer_blocks.*.attn|attn2",),
        moves=(Move("pos_embed", None), Move("", "block_controlnet_hidden_states"), LEAVE),
        locate=_from_latent,
        processors=("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0"),
        text_first=False,
        image_only=("transformer_blocks.*.attn2",),
        text=333,
    ),
    Spec(
        "PixArtTransformer2DModel",
        layers=("transformer_blocks.*.attn1",),
        moves=(Move("pos_embed", None), LEAVE),
        locate=_from_latent_alone,
        can_split=True,
        processors=("AttnProcessor2_0", "FusedAttnProcessor2_0"),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        refused={"attention_mask": "A mask of image tokens is in raster order."},
        attention_kwargs="cross_attention_kwargs",
    ),
    Spec(
        "QwenImageTransformer2DModel",
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
    ),
    Spec(
        "ZImageTransformer2DModel",
        layers=("noise_refiner.*.attention", "layers.*.attention"),
        moves=(
            Move("noise_refiner.0", "x"),
            Move("noise_refiner.*", "freqs_cis"),
            Move("layers.*", "freqs_cis"),
            Move("", "controlnet_block_samples"),
            Move("all_final_layer.*", None, "leave"),
        ),
        locate=_from_list_of_latents,
        processors=("ZSingleStreamAttnProcessor",),
        text_first=False,
        image_only=("noise_refiner.*.attention",),
        dense={
            "context_refiner.*.attention": "reads text alone",
            "siglip_refiner.*.attention": "reads features of reference images alone",
        },
        sample="x",
        conditioning="cap_feats",
        text=128,
        multiple=32,
    ),
    Spec(
        "UNet2DConditionModel",
        layers=("transformer_blocks.*.attn1",),
        moves=(
            Move("transformer_blocks.0", "hidden_states"),
            Move("transformer_blocks.-1", None, "leave"),
        ),
        locate=_from_feature_map,
        processors=("AttnProcessor2_0", "FusedAttnProcessor2_0", "IPAdapterAttnProcessor2_0"),
        dense={"transformer_blocks.*.attn2": CROSS_ATTENTION},
        region="Transformer2DModel",
        regions=("down_blocks.*", "mid_block.*", "up_blocks.*"),
        refused={"attention_mask": "A mask of image tokens is in raster order."},
        attention_kwargs="cross_attention_kwargs",
        size=_feature_map_size,
    ),
)


SPECS = IMAGE_SPECS + VIDEO_SPECS


def spec_of(model: nn.Module) -> Spec | None:
    names = {cls.__name__ for cls in type(model).__mro__}
    return next((spec for spec in SPECS if spec.model in names), None)
