"""The shapes that are measured: attention calls of real models, and smaller ones for machines without a GPU.

This file imports nothing of weight, so the command line can name the presets before it knows what else it needs.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Preset:
    """One attention call.

    Args:
        batch, heads, head_dim: sizes of the tensors.
        grid: image or video tokens, slowest axis first.
        text: tokens before the image that read everything and are read by everyone.
        kept: share of the keys that a query block reads in the random lists.
        q_block: queries per list of small blocks (192 is three warpgroups of 64 rows).
        layers: calls of that shape in one step of the model.
    """

    name: str
    batch: int
    heads: int
    head_dim: int
    grid: tuple[int, ...]
    text: int
    kept: float
    q_block: int = 192
    layers: int = 57

    def queries_per_list(self, grain: int) -> int:
        """Whole key tiles of 128 wide heads keep two warpgroups busy; smaller blocks are better shared by three."""
        return min(self.q_block, 128) if grain >= 64 and self.head_dim == 128 else self.q_block

    @property
    def image(self) -> int:
        return math.prod(self.grid)

    @property
    def tokens(self) -> int:
        return self.text + self.image

    @property
    def centre(self) -> int:
        """Tokens of the central region, a quarter of each side of the picture (0 where there is no text)."""
        return math.prod(side // 4 for side in self.grid) if self.text else 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.tokens, self.head_dim

    def changed(
        self, grid: tuple[int, ...] | None = None, text: int | None = None, heads: int | None = None
    ) -> "Preset":
        """This preset with another grid, text or number of heads; None keeps a value."""
        return replace(
            self,
            grid=self.grid if grid is None else grid,
            text=self.text if text is None else text,
            heads=self.heads if heads is None else heads,
        )


_TABLE = (
    Preset("flux-1024", 1, 24, 128, (64, 64), 512, kept=0.25),
    Preset("flux-2048", 1, 24, 128, (128, 128), 512, kept=0.121),
    Preset("flux-4096", 1, 24, 128, (256, 256), 512, kept=0.03),
    Preset("wan-480p", 1, 12, 128, (21, 30, 52), 0, kept=0.297, layers=30),
    Preset("pixel-128", 4, 6, 64, (128, 128), 0, kept=0.04, layers=12),
    Preset("pixel-256", 1, 6, 64, (256, 256), 0, kept=0.01, layers=12),
    Preset("cpu-flux-1024", 1, 24, 128, (64, 64), 512, kept=0.25, q_block=128),
    Preset("cpu-pixel-64", 1, 6, 64, (64, 64), 0, kept=0.06, q_block=128, layers=12),
    Preset("cpu-small", 1, 2, 32, (24, 24), 64, kept=0.25, q_block=64, layers=4),
)
PRESETS = {preset.name: preset for preset in _TABLE}

ON_CUDA = tuple(name for name in PRESETS if not name.startswith("cpu-"))
ON_CPU = ("cpu-flux-1024", "cpu-pixel-64")
QUICK_ON_CUDA = ("flux-1024",)
QUICK_ON_CPU = ("cpu-small",)
