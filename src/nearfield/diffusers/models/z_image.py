"""Z-Image."""

from torch import nn

from nearfield.diffusers.models.spec import Arguments, Move, Spec, define, without_single_frame
from nearfield.session import TokenLayout


def _from_list_of_latents(module: nn.Module, arguments: Arguments) -> "TokenLayout | str":
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


Z_IMAGE = define(
    Spec(
        "ZImageTransformer2DModel",
        name="z_image",
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
    )
)
