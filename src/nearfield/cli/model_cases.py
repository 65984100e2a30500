"""The models whose denoising step is measured, their sizes, and what is to be reached on one H200.

This file imports nothing of weight, so the command line can name the models before it knows what else it needs.
"""

import math
from dataclasses import dataclass, field
from typing import Any

PIXELS_PER_TOKEN = 16
FRAMES_PER_TOKEN = 4
NAMED_SIZES = {"480p": (480, 832), "720p": (720, 1280)}

# Of a step, at most so much for making maps, merging and parting.
MERGING_SHARE = 0.03
_MANY_TOKENS = 65536


@dataclass(frozen=True)
class Architecture:
    """What decides the shapes of a model.

    Args:
        class_name: in diffusers.
        fields, tiny_fields: arguments of that class; of a few narrow layers.
        layer_fields: the arguments that count blocks, one for each kind of them.
        layers, tiny_layers: their values.
        prompt, tiny_prompt: tokens of text that a step is given.
        joins_text: whether they stand in one sequence with the image; otherwise they are read by cross-attention.
        frames, tiny_frames: of a video; 1 for images.
        sizes, tiny_sizes: height and width in pixels.
        methods: that can be applied to it.
        targets: by method, the speed-up of a step over the best dense one by the height of an image: one H200, all
            layers, keys-only sharing, half of the tokens merged, 70 % of the keys skipped.
    """

    class_name: str
    fields: dict[str, Any]
    tiny_fields: dict[str, Any]
    layer_fields: tuple[str, ...]
    layers: tuple[int, ...]
    tiny_layers: tuple[int, ...]
    prompt: int
    tiny_prompt: int
    joins_text: bool
    sizes: tuple[tuple[int, int], ...]
    tiny_sizes: tuple[tuple[int, int], ...]
    methods: tuple[str, ...]
    targets: dict[str, dict[int, float]]
    frames: int = 1
    tiny_frames: int = 1

    @property
    def is_video(self) -> bool:
        return self.frames > 1


ARCHITECTURES = {
    "flux1": Architecture(
        "FluxTransformer2DModel",
        fields={"guidance_embeds": True},
        tiny_fields={
            "guidance_embeds": True,
            "in_channels": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "axes_dims_rope": (8, 12, 12),
        },
        layer_fields=("num_layers", "num_single_layers"),
        layers=(19, 38),
        tiny_layers=(2, 3),
        prompt=512,
        tiny_prompt=32,
        joins_text=True,
        sizes=((1024, 1024), (2048, 2048), (4096, 4096)),
        tiny_sizes=((256, 256),),
        methods=("hilbert", "merge", "merge+hilbert"),
        targets={
            "hilbert": {1024: 1.10, 2048: 1.45, 4096: 3.05},
            "merge": {1024: 1 / 0.7},
            "merge+hilbert": {2048: 2.0, 4096: 4.2},
        },
    ),
    "wan21-1.3b": Architecture(
        "WanTransformer3DModel",
        fields={"num_attention_heads": 12, "ffn_dim": 8960},
        tiny_fields={"num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 96, "text_dim": 32},
        layer_fields=("num_layers",),
        layers=(30,),
        tiny_layers=(2,),
        prompt=512,
        tiny_prompt=32,
        joins_text=False,
        sizes=tuple(NAMED_SIZES.values()),
        tiny_sizes=((128, 192),),
        methods=("fine", "hilbert"),
        targets={"fine": {480: 1.6, 720: 2.0}},
        frames=81,
        tiny_frames=9,
    ),
}
MODELS = tuple(ARCHITECTURES)
METHODS = tuple(dict.fromkeys(method for known in ARCHITECTURES.values() for method in known.methods))
SKIPPED = 0.7
"""The share of keys for which there are targets."""


@dataclass(frozen=True)
class Size:
    """One image or video: pixels, frames, and the grid of tokens they make."""

    height: int
    width: int
    frames: int = 1

    @property
    def grid(self) -> tuple[int, ...]:
        sides = self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN
        return sides if self.frames == 1 else ((self.frames - 1) // FRAMES_PER_TOKEN + 1, *sides)

    @property
    def tokens(self) -> int:
        return math.prod(self.grid)

    @property
    def is_usual(self) -> bool:
        """A square image, or a video of a size that has a name."""
        if self.frames == 1:
            return self.height == self.width
        return (self.height, self.width) in NAMED_SIZES.values()

    def __str__(self) -> str:
        sides = self.height, self.width
        if self.frames > 1:
            names = (name for name, pixels in NAMED_SIZES.items() if pixels == sides)
            return f"{next(names, f'{self.height}x{self.width}')}, {self.frames} frames"
        return str(self.height) if self.height == self.width else f"{self.height}x{self.width}"


@dataclass(frozen=True)
class ModelCase:
    """The architecture to build and the method to apply to it.

    Args:
        model: one of MODELS.
        layers: blocks of each kind; None for those of the model.
        tiny: a few narrow layers instead of the real width.
        fields: fields of the Hilbert method that were asked for; the others depend on the size.
        method: one of METHODS.
        merge_fields: fields of Merge that were asked for.
        fine_fields: fields of FineGrained that were asked for.
        skipped: shares of the keys that FineGrained shall skip, one after another.
    """

    model: str
    layers: tuple[int, ...] | None
    tiny: bool
    fields: dict[str, Any]
    method: str = "hilbert"
    merge_fields: dict[str, Any] = field(default_factory=dict)
    fine_fields: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[float, ...] = (SKIPPED,)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model]

    @property
    def merges(self) -> bool:
        return "merge" in self.method

    @property
    def is_fine(self) -> bool:
        return self.method == "fine"

    @property
    def is_whole(self) -> bool:
        return not self.tiny and self.layers in (None, self.architecture.layers)

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many of each kind."""
        made = self.architecture
        return self.layers or (made.tiny_layers if self.tiny else made.layers)

    @property
    def config(self) -> dict[str, Any]:
        """Arguments of diffusers' class."""
        made = self.architecture
        fields = made.tiny_fields if self.tiny else made.fields
        return fields | dict(zip(made.layer_fields, self.blocks, strict=True))

    @property
    def prompt(self) -> int:
        """Tokens of text that a step is given."""
        return self.architecture.tiny_prompt if self.tiny else self.architecture.prompt

    @property
    def text(self) -> int:
        """Tokens of text that stand in one sequence with those of the image."""
        return self.prompt if self.architecture.joins_text else 0

    @property
    def sizes(self) -> list[Size]:
        """Those that are measured if none are asked for."""
        return [
            self.size(*size)
            for size in (self.architecture.tiny_sizes if self.tiny else self.architecture.sizes)
        ]

    def size(self, height: int, width: int) -> Size:
        return Size(height, width, self.architecture.tiny_frames if self.tiny else self.architecture.frames)

    def method_fields(self, size: Size) -> dict[str, Any]:
        """Nothing is left dense. Tiles: keys-only sharing; where there are many tokens, more tiles and a smaller share.
        Around blocks: what else is by default."""
        if self.is_fine:
            return {"query_block": 16} | self.fine_fields if self.tiny else dict(self.fine_fields)
        if self.fields.get("near") == "around":
            return {"dense_layers": 0, "dense_steps": 0} | self.fields
        fields: dict[str, Any] = {"near": "tile", "share": "keys", "far": None, "summary": "mean"}
        fields |= {"dense_layers": 0, "dense_steps": 0}
        if self.fields.get("shared") != "none":
            fields["shared"] = "centre"
        if size.tokens >= _MANY_TOKENS:
            fields |= {"tiles": 64} | ({"shared_tokens": 256} if "shared" in fields else {})
        return fields | self.fields

    def merging_fields(self) -> dict[str, Any]:
        """Fields of Merge: its defaults. A model of few layers leaves out only the first of each kind."""
        few = {} if self.layers is None and not self.tiny else {"skip_blocks": (1, 1)}
        return few | self.merge_fields

    def target(self, size: Size, skipped: float | None = None) -> float | None:
        """What to reach, for the whole model and the method it was set for."""
        is_other = self.fields or self.merge_fields.keys() - {"placement"}
        if not self.is_whole or is_other or not size.is_usual or skipped not in (None, SKIPPED):
            return None
        return self.architecture.targets.get(self.method, {}).get(size.height)
