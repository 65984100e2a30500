"""What is known about ComfyUI's models: a table. The code that uses it knows no model by name.

In all of them the text, where it stands in the sequence at all, comes before the image, and reference images after it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nearfield import Geometry

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """The facts about one class of models.

    Args:
        title: what users call it.
        kind: the name of ComfyUI's class.
        blocks: its lists of blocks, each with one attention call over the image's tokens.
        joins_text: whether those calls see the text, too. Otherwise it is read by cross-attention.
        has_second: whether blocks may have a second such call, over the image alone.
    """

    title: str
    kind: str
    blocks: tuple[str, ...]
    joins_text: bool = True
    has_second: bool = False

    def num_layers(self, model: Any) -> int:
        """How many attention calls over the image's tokens one call of the model makes."""
        blocks = [block for name in self.blocks for block in getattr(model, name)]
        return len(blocks) + (sum(map(_has_second, blocks)) if self.has_second else 0)


KNOWN = (
    Known("FLUX", "Flux", ("double_blocks", "single_blocks")),
    Known("Stable Diffusion 3", "OpenAISignatureMMDITWrapper", ("joint_blocks",), has_second=True),
    Known("Qwen-Image", "QwenImageTransformer2DModel", ("transformer_blocks",)),
    Known("Wan", "WanModel", ("blocks",), joins_text=False),
)


def known_model(model: Any) -> Known:
    """The entry of a model, by the name of its own class: a subclass may do something else with its tokens."""
    kind = type(model).__name__
    for known in KNOWN:
        if known.kind == kind:
            return known
    supported = ", ".join(f"{known.title} ({known.kind})" for known in KNOWN)
    raise ValueError(f"`model` must be one of {supported}; got {kind}. Leave the node out for other models.")


def sequences(
    known: Known, model: Any, latent: Tensor, text: Tensor | None, conditions: Mapping[str, Any]
) -> dict[int, Geometry]:
    """The sequences that attention calls over image tokens may have, by their length.

    Empty where a length does not tell such a call from cross-attention; that happens to very small images alone.
    """
    first, *references = _grids(model, latent, conditions)
    image = Geometry(first, references=tuple(references))
    num_text = 0 if text is None else text.shape[1]
    if not known.joins_text:
        features = conditions.get("clip_fea")
        others = {num_text, num_text if features is None else features.shape[-2]}
        return {} if image.num_tokens in others else {image.num_tokens: image}
    found = {image.num_tokens: image} if known.has_second else {}
    joined = Geometry(first, text=num_text, references=tuple(references))
    return found | {joined.num_tokens: joined}


def _grids(model: Any, latent: Tensor, conditions: Mapping[str, Any]) -> list[Grid]:
    sides = list(latent.shape[2:])
    behind = conditions.get("time_dim_concat")
    if behind is not None:
        sides[0] += behind.shape[2]
    references = conditions.get("ref_latents") or []
    return [_tokens(model, sides), *(_tokens(model, reference.shape[2:]) for reference in references)]


def _tokens(model: Any, sides: Any) -> Grid:
    """The grid of a latent: models pad it to whole patches. A single frame is an image."""
    patch = model.patch_size
    patch = (patch,) * 2 if isinstance(patch, int) else tuple(patch)
    patch = (1,) * (len(sides) - len(patch)) + patch
    grid = tuple(math.ceil(side / size) for side, size in zip(sides, patch, strict=True))
    return grid[1:] if len(grid) == 3 and grid[0] == 1 else grid


def _has_second(block: Any) -> bool:
    return bool(getattr(block.x_block, "x_block_self_attn", False))
