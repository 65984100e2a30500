"""The nodes."""

from typing import Any, ClassVar, get_args

from nearfield import Hilbert
from nearfield.methods.hilbert import Near, Share
from nearfield.tiling import Shared

from .models import KNOWN, known_model
from .patching import SparseModel

KEY = "nearfield"
"""Of the wrapper among others; a second node replaces the first."""


class NearfieldHilbert:
    """A model whose image tokens read sliding tiles of a curve, shared tokens and the text, not everything."""

    CATEGORY = "advanced/model"
    DESCRIPTION = (
        "Faster attention at high resolution: every token reads its tile of a Hilbert curve, some shared tokens and the"
        f" text. For {', '.join(known.title for known in KNOWN)}. Quality is not free: compare with the node bypassed."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    TOOLTIPS: ClassVar[dict[str, str]] = {
        "tiles": "Tiles per image: more are faster and see less.",
        "shared": "Image tokens that everyone reads: the centre, small regions all over the image, or none.",
        "share": "two-way: shared tokens also read everything. keys: they are read only, which is faster.",
        "far": "Tokens per summary of what lies outside a tile; 0 leaves that out.",
        "dense_steps": "Share of the first denoising steps that read everything; they decide the composition.",
        "dense_layers": "How many of the first layers read everything.",
        "near": "tile: a token reads its tile. around: as many tokens, those nearest to its block of tokens.",
    }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        fields: dict[str, tuple[Any, dict[str, Any]]] = {
            "tiles": ("INT", {"default": 16, "min": 1, "max": 1024}),
            "shared": (list(get_args(Shared)), {"default": "none"}),
            "share": (list(get_args(Share)), {"default": "two-way"}),
            "far": ("INT", {"default": 16, "min": 0, "max": 4096}),
            # From 1 on it would be a number of steps.
            "dense_steps": ("FLOAT", {"default": 0.2, "min": 0.0, "max": 0.95, "step": 0.05}),
            "dense_layers": ("INT", {"default": 1, "min": 0, "max": 1000}),
        }
        # Not required: prompts that were saved before there was such a field do not name it.
        later = {"near": (list(get_args(Near)), {"default": "tile"})}
        required, optional = (
            {
                name: (kind, options | {"tooltip": cls.TOOLTIPS[name]})
                for name, (kind, options) in some.items()
            }
            for some in (fields, later)
        )
        return {"required": {"model": ("MODEL",)} | required, "optional": optional}

    def patch(
        self,
        model: Any,
        tiles: int,
        shared: Shared,
        share: Share,
        far: int,
        dense_steps: float,
        dense_layers: int,
        near: Near = "tile",
    ) -> tuple[Any]:
        """A clone that reads sparsely; the model itself is not touched."""
        from comfy.patcher_extension import WrappersMP  # ComfyUI's, not this folder

        known_model(model.get_model_object("diffusion_model"))
        method = Hilbert(
            tiles=tiles,
            shared=shared,
            share=share,
            far=far or None,
            dense_steps=dense_steps,
            dense_layers=dense_layers,
            near=near,
        )
        patched = model.clone()
        patched.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
        patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, SparseModel(method))
        return (patched,)
