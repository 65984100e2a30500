"""The nodes."""

from typing import Any, ClassVar, get_args

from nearfield import Hilbert
from nearfield.layout.tiling import Shared
from nearfield.methods.hilbert import Near, Share, Summary, TextReads

from .models import KNOWN, known_model
from .patching import SparseModel

KEY = "nearfield"
"""Of the wrapper among others; a second node replaces the first."""


class NearfieldHilbert:
    """A model whose image tokens read what is around them, the rest in summary, and the text, not everything."""

    CATEGORY = "advanced/model"
    DESCRIPTION = (
        "Faster attention at high resolution: every token reads what is around it, the rest in summary, and the text."
        f" For {', '.join(known.title for known in KNOWN)}. Quality is not free: compare with the node bypassed."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    TOOLTIPS: ClassVar[dict[str, str]] = {
        "tiles": "Tiles per image: more are faster and see less; 0: as many as suit the size.",
        "shared": "Image tokens that everyone reads: the centre, small regions all over the image, or none.",
        "share": "two-way: shared tokens also read everything. keys: they are read only, which is faster.",
        "far": "Tokens per summary of what is not read exactly; 0 leaves that out.",
        "dense_steps": "Share of the first denoising steps that read everything; they decide the composition.",
        "dense_layers": "How many of the first layers read everything.",
        "near": "around: a token reads those nearest to its block of tokens. tile: as many, those of its tile.",
        "summary": "Of what lies outside: weighted by what its tokens are to the mean query, or their mean.",
        "text_reads": "all: text reads every image token. summary: it reads their summaries, which is faster.",
    }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        fields: dict[str, tuple[Any, dict[str, Any]]] = {
            "tiles": ("INT", {"default": 0, "min": 0, "max": 1024}),
            "shared": (list(get_args(Shared)), {"default": "none"}),
            "share": (list(get_args(Share)), {"default": "two-way"}),
            "far": ("INT", {"default": 16, "min": 0, "max": 4096}),
            # From 1 on it would be a number of steps.
            "dense_steps": ("FLOAT", {"default": 0.15, "min": 0.0, "max": 0.95, "step": 0.05}),
            "dense_layers": ("INT", {"default": 0, "min": 0, "max": 1000}),
        }
        # Not required: prompts for the API that were saved before there were such fields do not name them, and mean
        # what was read then, the defaults of `patch`. Workflows of the page hold values by position; it fills in the
        # rest with what is here.
        later = {
            "near": (list(get_args(Near)), {"default": "around"}),
            "summary": (list(get_args(Summary)), {"default": "weighted"}),
            "text_reads": (list(get_args(TextReads)), {"default": "all"}),
        }
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
        summary: Summary = "mean",
        text_reads: TextReads = "all",
    ) -> tuple[Any]:
        """A clone that reads sparsely; the model itself is not touched."""
        from comfy.patcher_extension import WrappersMP  # ComfyUI's, not this folder

        known_model(model.get_model_object("diffusion_model"))
        method = Hilbert(
            tiles=tiles or None,
            shared=shared,
            share=share,
            far=far or None,
            dense_steps=dense_steps,
            dense_layers=dense_layers,
            near=near,
            summary=summary,
            text_reads=text_reads,
        )
        patched = model.clone()
        patched.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
        patched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, SparseModel(method))
        return (patched,)
