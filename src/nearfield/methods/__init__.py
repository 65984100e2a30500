"""The methods: each decides who reads whom, and nothing else. Frozen dataclasses; the fields are the configuration."""

from typing import Any, Protocol

import torch
from torch import Tensor

from nearfield._types import Attended, Impl, Moment
from nearfield.geometry import Geometry
from nearfield.methods.blocks import BlockTopK
from nearfield.methods.branches import (
    GatedBlocks,
    GatedBlocksAttention,
    SparseLinear,
    SparseLinearAttention,
)
from nearfield.methods.fine import FineGrained
from nearfield.methods.hilbert import Hilbert
from nearfield.methods.hilbert.layer import HilbertAttention, hilbert_attention
from nearfield.methods.loglinear import LogLinear, LogLinearAttention, log_linear_attention
from nearfield.methods.merging import Merge, Merged
from nearfield.methods.peers import BipartiteMerge, StridedKeys
from nearfield.predict import Tally
from nearfield.tokenmap import Ordering

__all__ = [
    "BipartiteMerge",
    "BlockTopK",
    "FineGrained",
    "GatedBlocks",
    "GatedBlocksAttention",
    "Hilbert",
    "HilbertAttention",
    "LogLinear",
    "LogLinearAttention",
    "Merge",
    "Merged",
    "Method",
    "Reader",
    "SparseLinear",
    "SparseLinearAttention",
    "StridedKeys",
    "TimedReader",
    "hilbert_attention",
    "log_linear_attention",
]


class Reader(Protocol):
    """What one layer of a model needs to attend, ready made for a geometry and a device."""

    @property
    def num_pairs(self) -> int | None:
        """Pairs read per batch element and head; None where that is known after calls only."""
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


class TimedReader(Reader, Protocol):
    """A reader that remembers from call to call. Methods whose readers do say `needs_moment`."""

    tally: Tally

    def at(self, moment: Moment) -> Any:
        """Say, before every call, where the denoising loop stands."""
        ...

    def among(self, layers: int) -> Any:
        """Be one of so many layers that share what the method allows them."""
        ...

    def forget(self) -> None:
        """Release what is remembered."""
        ...


class Method(Protocol):
    """What `apply` asks of a method. It warns of the method's `caution`, if there is one and it is not None."""

    def ordering(self, geometry: Geometry, *, device: torch.device | str) -> Ordering:
        """The order the image tokens shall stand in."""
        ...

    def reader(
        self, geometry: Geometry, layer: int, *, heads: int | None, device: torch.device | str
    ) -> Reader: ...

    def dense_layer_reason(self, layer: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        ...

    def dense_ends(self, num_steps: int) -> tuple[int, int]:
        """How many of the first and of the last denoising steps stay dense."""
        ...

    def describe(self, geometry: Geometry, *, device: torch.device | str) -> str: ...
