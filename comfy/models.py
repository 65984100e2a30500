"""ComfyUI's models: which are known, by the specs of `nearfield.diffusers`, and how their tokens stand in a call."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nearfield.diffusers import ComfyModel, Spec, all_specs
from nearfield.session import TokenLayout

KNOWN = {spec.comfy: spec for spec in all_specs() if spec.comfy is not None}


def known_model(model: Any) -> tuple[ComfyModel, Spec]:
    """The entry of a model, by the name of its own class: a subclass may do something else with its tokens."""
    kind = type(model).__name__
    for known, spec in KNOWN.items():
        if known.kind == kind:
            return known, spec
    supported = ", ".join(f"{known.title} ({known.kind})" for known in KNOWN)
    raise ValueError(f"`model` must be one of {supported}; got {kind}. Leave the node out for other models.")


def layout_of(
    spec: Spec, model: Any, latent: Tensor, text: Tensor | None, conditions: Mapping[str, Any]
) -> TokenLayout | None:
    """The tokens of a call: the image, reference images after it, and the text that is joined to them.

    None where their number does not tell attention over them from cross-attention; that happens to very small images
    alone.
    """
    sides = list(latent.shape[2:])
    behind = conditions.get("time_dim_concat")
    if behind is not None:
        sides[0] += behind.shape[2]
    references = conditions.get("ref_latents") or []
    grids = [_grid(model, sides), *(_grid(model, reference.shape[2:]) for reference in references)]
    num_text = 0 if text is None else text.shape[1]
    layout = TokenLayout(tuple(grids), num_text if spec.text else 0)
    features = conditions.get("clip_fea")
    others = {num_text, num_text if features is None else features.shape[-2]}
    return None if not spec.text and layout.num_image_tokens in others else layout


def _grid(model: Any, sides: Any) -> tuple[int, ...]:
    """The grid of a latent: models pad it to whole patches. A single frame is an image."""
    patch = model.patch_size
    patch = (patch,) * 2 if isinstance(patch, int) else tuple(patch)
    patch = (1,) * (len(sides) - len(patch)) + patch
    grid = tuple(math.ceil(side / size) for side, size in zip(sides, patch, strict=True))
    return grid[1:] if len(grid) == 3 and grid[0] == 1 else grid
