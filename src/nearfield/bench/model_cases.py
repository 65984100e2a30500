"""The models whose denoising step is measured, their sizes, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the models before it knows what else it needs.
"""

import math
from dataclasses import dataclass
from typing import Any

MODELS = ("flux1",)
SIZES = ((1024, 1024), (2048, 2048), (4096, 4096))
TINY_SIZES = ((256, 256),)
PIXELS_PER_TOKEN = 16
FULL_LAYERS = (19, 38)
_TINY_LAYERS = (2, 3)

# Speed-up of a step over the best dense one, keys-only sharing, one H200, all layers.
TARGETS = {1024: 1.10, 2048: 1.45, 4096: 3.05}
_MANY_TOKENS = 65536


@dataclass(frozen=True)
class Size:
    """One image: pixels, and the grid of tokens they make."""

    height: int
    width: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    def __str__(self) -> str:
        return str(self.height) if self.height == self.width else f"{self.height}x{self.width}"


@dataclass(frozen=True)
class ModelCase:
    """The architecture to build and the method to apply to it.

    Args:
        layers: double-stream and single-stream blocks; None for those of the model.
        tiny: a few narrow layers instead of the real width.
        fields: fields of the method that were asked for; the others depend on the size.
    """

    model: str
    layers: tuple[int, int] | None
    tiny: bool
    fields: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        return not self.tiny and self.layers in (None, FULL_LAYERS)

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of diffusers' FluxTransformer2DModel."""
        double, single = self.layers or (_TINY_LAYERS if self.tiny else FULL_LAYERS)
        blocks = {"num_layers": double, "num_single_layers": single, "guidance_embeds": True}
        if not self.tiny:
            return blocks
        sizes = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32}
        heads = {"num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": (8, 12, 12)}
        return blocks | sizes | heads

    @property
    def text(self) -> int:
        return 32 if self.tiny else 512

    def method_fields(self, size: Size) -> dict[str, Any]:
        """Keys-only sharing with nothing left dense; where there are many tokens, more tiles and a smaller share."""
        fields: dict[str, Any] = {"share": "keys", "dense_layers": 0, "dense_steps": 0}
        if size.tokens >= _MANY_TOKENS:
            fields |= {"tiles": 64, "shared_tokens": 256}
        return fields | self.fields

    def target(self, size: Size) -> float | None:
        """What to reach, for the whole model and the method it was set for."""
        if not self.is_whole or self.fields or size.height != size.width:
            return None
        return TARGETS.get(size.height)
