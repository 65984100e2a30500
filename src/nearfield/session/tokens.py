"""The tokens of a call, and everything that calls with such tokens need, made once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nearfield.layout import Geometry, Grid
from nearfield.methods import LayerAttention
from nearfield.ops import ReadStats, Regions
from nearfield.session.layers import Layer


class TokenLayout(NamedTuple):
    """The tokens of one call, in plain numbers.

    Args:
        images: the grids of all images, the one that is made first.
        text: tokens of the joint sequence that belong to no image.
        num_padding: those of them that follow the image even in layers that do not see the text.
    """

    images: tuple[Grid, ...]
    text: int = 0
    num_padding: int = 0

    @property
    def num_image_tokens(self) -> int:
        return sum(math.prod(grid) for grid in self.images)

    def geometry(self, text_first: bool, sees_text: bool) -> Geometry:
        """The sequence of a layer that sees the text, or does not."""
        text = self.text if sees_text else self.num_padding
        return Geometry(self.images[0], text, text_first, references=self.images[1:])


class TokenOrder(Protocol):
    """What brings image tokens into the order of the method, or the share of one rank, and back."""

    def __len__(self) -> int: ...

    def enter(self, x: Tensor, dim: int = 1) -> Tensor: ...

    def leave(self, y: Tensor, dim: int = 1) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class TokenState:
    """Everything a call needs, made for one layout of tokens and one device.

    Args:
        orders: the order of the image tokens in layers that see the text (True), and in those that do not.
        attentions: what each layer reads, in the order of layers; None where it is dense.
        dense_attention: what dense steps read where tokens are split over ranks.
        weighing: what each layer reads in dense steps, or where it is dense, if merged keys have a bias.
        regions: how image tokens are merged; None where they are not.
        own_regions: those of this rank, where tokens are split over several.
        prepared: for which batches, and whether for training, plans have derived what they keep.
    """

    layout: TokenLayout
    device: torch.device
    orders: Mapping[bool, TokenOrder]
    attentions: tuple[LayerAttention | None, ...]
    dense_attention: LayerAttention | None = None
    weighing: tuple[LayerAttention | None, ...] = ()
    regions: Regions | None = None
    own_regions: Regions | None = None
    prepared: set[tuple[int, bool]] = field(default_factory=set)

    @property
    def ordering(self) -> TokenOrder:
        """The order of all layers, where it is one."""
        return next(iter(self.orders.values()))

    def num_pairs(self, layer: Layer) -> int:
        """Pairs of a layer, per head, where everyone reads everyone, perhaps after merging."""
        image = self.layout.num_image_tokens
        if layer.group is not None and self.regions is not None:
            image = self.regions.num_merged
        return (image + (self.layout.text if layer.sees_text else self.layout.num_padding)) ** 2

    def num_read(self, layer: Layer, attention: LayerAttention | None) -> float | None:
        """Pairs that a layer reads, per head: as plans say, or on average so far; None where neither is known."""
        most = self.num_pairs(layer)
        if attention is None or not layer.is_sparse:
            return most
        if attention.num_pairs is not None:
            return attention.num_pairs
        stats = attention.stats
        calls = 0 if stats is None else stats.num_full + stats.num_sparse
        if stats is None or not calls:
            return None
        sparse = stats.num_sparse * stats.kept if stats.num_sparse else 0.0
        return most * (stats.num_full + sparse) / calls

    @property
    def stats(self) -> list[ReadStats]:
        """What the layers have read so far, where that is counted."""
        found = [attention.stats for attention in self.attentions if attention is not None]
        return [stats for stats in found if stats is not None and stats.num_full + stats.num_sparse]

    def prepare(self, layers: Sequence[Layer], batch: int) -> None:
        """Let plans derive what `attend` keeps of them, once for a batch and for training."""
        training = torch.is_grad_enabled()
        if (batch, training) in self.prepared:
            return
        for attention, layer in zip(self.attentions + self.weighing, 2 * tuple(layers), strict=True):
            if attention is not None:
                attention.prepare(batch, layer.heads, training=training)
        self.prepared.add((batch, training))


def key_bias(mask: Tensor) -> Tensor:
    """A mask that is the same for every query, `[B, H or 1, 1, M]`, boolean or added to the logits, as a bias."""
    mask = mask[:, :, 0]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, float("-inf"))
