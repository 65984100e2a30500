"""Rivals that a mask describes: windows around each token, and bands of the raster order."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import RIVALS
from nearfield import Attended, Geometry, LayerAttention, Method
from nearfield.methods import DenseSteps


@dataclass(frozen=True, eq=False)
class MaskLayer(LayerAttention):
    """Attention under a mask, exact for any pattern: dense, and slow; inside of a graph flex, which skips blocks.

    Args:
        mask: who reads whom, `[tokens, tokens]`.
        blocks: the same for flex.
    """

    mask: Tensor
    blocks: BlockMask

    @classmethod
    def of(cls, mask: Tensor) -> "MaskLayer":
        def reads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return mask[q, k]

        queries, keys = mask.shape
        return cls(mask, create_block_mask(reads, None, None, queries, keys, device=mask.device))

    @property
    def num_pairs(self) -> int:
        return int(self.mask.sum())

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: str = "auto",
    ) -> Attended:
        assert key_bias is None  # nothing is padded here
        if torch.compiler.is_compiling():
            out = flex_attention(query, key, value, block_mask=self.blocks, scale=scale)
        else:
            out = scaled_dot_product_attention(query, key, value, attn_mask=self.mask, scale=scale)
        return Attended(out, torch.full(out.shape[:-1], math.nan, device=out.device))


@dataclass(frozen=True)
class Masked(Method):
    """Windows around each token, in raster order; text is read by all and reads all.

    Args:
        kind: "window": tokens within `radius`; "band": the `width` tokens around it in the sequence.
    """

    order = "raster"

    kind: str
    radius: float = 8
    width: int = 256
    dense_steps: DenseSteps = 0

    def __post_init__(self) -> None:
        self.check_dense_parts()

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "MaskLayer":
        mask = torch.ones(geometry.num_tokens, geometry.num_tokens, dtype=torch.bool)
        start, stop = geometry.image_spans[0]
        mask[start:stop, start:stop] = self._image_mask(geometry.grid)
        return MaskLayer.of(mask.to(device))

    def _image_mask(self, grid: tuple[int, ...]) -> Tensor:
        tokens = torch.arange(math.prod(grid))
        if self.kind == "band":
            return (tokens[:, None] - tokens).abs() <= self.width // 2
        rows, columns = tokens // grid[1], tokens % grid[1]
        squares = (rows[:, None] - rows).square() + (columns[:, None] - columns).square()
        return squares <= self.radius**2

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        kept = self.layer(geometry).num_pairs / geometry.num_tokens**2
        return f"{geometry}: {self.kind}, pairs kept: {kept:.1%}"


RIVALS.update(window=partial(Masked, "window"), band=partial(Masked, "band"))
