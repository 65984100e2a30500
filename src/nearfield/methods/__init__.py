"""The methods: each decides who reads whom, and nothing else. Frozen dataclasses; the fields are the configuration."""

from typing import Protocol

import torch
from torch import Tensor

from nearfield._types import Attended, Impl
from nearfield.geometry import Geometry
from nearfield.methods.blocks import BlockTopK, GatedBlocks, GatedBlocksAttention
from nearfield.methods.fine import FineGrained
from nearfield.methods.hilbert import Hilbert, HilbertAttention, hilbert_attention
from nearfield.methods.linear import SparseLinear, SparseLinearAttention
from nearfield.methods.loglinear import LogLinear, LogLinearAttention, log_linear_attention
from nearfield.tokenmap import Ordering

__all__ = [
    "BlockTopK",
    "FineGrained",
    "GatedBlocks",
    "GatedBlocksAttention",
    "Hilbert",
    "HilbertAttention",
    "LogLinear",
    "LogLinearAttention",
    "Method",
    "Reader",
    "SparseLinear",
    "SparseLinearAttention",
    "hilbert_attention",
    "log_linear_attention",
]


class Reader(Protocol):
    """What one layer of a model needs to attend, ready made for a geometry and a device."""

    @property
    def num_pairs(self) -> int:
        """Pairs read per batch element and head."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended: ...


class Method(Protocol):
    """What `apply` asks of a method."""

    def ordering(self, geometry: Geometry, *, device: torch.device | str) -> Ordering:
        """The order the image tokens shall stand in."""
        ...

    def reader(
        self, geometry: Geometry, layer: int, *, heads: int | None, device: torch.device | str
    ) -> Reader: ...

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        ...

    def num_dense_steps(self, num_steps: int) -> int:
        """How many of the first denoising steps stay dense."""
        ...

    def describe(self, geometry: Geometry, *, device: torch.device | str) -> str: ...
