"""The models whose denoising step is measured, their sizes, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the models before it knows what else it needs.
"""

import math
from dataclasses import dataclass, field
from typing import Any

MODELS = ("flux1",)
METHODS = ("hilbert", "merge", "merge+hilbert")
SIZES = ((1024, 1024), (2048, 2048), (4096, 4096))
TINY_SIZES = ((256, 256),)
PIXELS_PER_TOKEN = 16
FULL_LAYERS = (19, 38)
_TINY_LAYERS = (2, 3)

# Speed-up of a step over the best dense one, keys-only sharing, one H200, all layers; half of the tokens merged.
TARGETS = {
    "hilbert": {1024: 1.10, 2048: 1.45, 4096: 3.05},
    "merge": {1024: 1 / 0.7},
    "merge+hilbert": {2048: 2.0, 4096: 4.2},
}
# Of a step, at most so much for making maps, merging and parting.
MERGING_SHARE = 0.03
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
        fields: fields of the Hilbert method that were asked for; the others depend on the size.
        method: one of METHODS.
        merge_fields: fields of Merge that were asked for.
    """

    model: str
    layers: tuple[int, int] | None
    tiny: bool
    fields: dict[str, Any]
    method: str = "hilbert"
    merge_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def merges(self) -> bool:
        return "merge" in self.method

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
        fields: dict[str, Any] = {"share": "keys", "far": None, "dense_layers": 0, "dense_steps": 0}
        if self.fields.get("shared") != "none":
            fields["shared"] = "centre"
        if size.tokens >= _MANY_TOKENS:
            fields |= {"tiles": 64} | ({"shared_tokens": 256} if "shared" in fields else {})
        return fields | self.fields

    def merging_fields(self) -> dict[str, Any]:
        """Fields of Merge: its defaults. A model of few layers leaves out only the first of each kind."""
        few = {} if self.layers is None and not self.tiny else {"skip_blocks": (1, 1)}
        return few | self.merge_fields

    def target(self, size: Size) -> float | None:
        """What to reach, for the whole model and the method it was set for."""
        if not self.is_whole or self.fields or self.merge_fields or size.height != size.width:
            return None
        return TARGETS[self.method].get(size.height)
