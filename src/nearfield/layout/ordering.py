"""TokenMap: what the tokens are. A map on the token axis with a way back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

import torch
from torch import Tensor

from nearfield._checks import check_same_device, check_tensor, shape_of, wrong_type, wrong_value
from nearfield.layout import curves
from nearfield.layout.geometry import Geometry

CurveOrder = Literal["hilbert", "morton", "raster"]


class TokenMap(Protocol):
    """Tokens enter before the first layer and leave after the last."""

    def enter(self, x: Tensor, dim: int = 1) -> Tensor: ...

    def leave(self, y: Tensor, dim: int = 1) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Ordering:
    """A permutation: `enter` brings raster tokens into this order, `leave` brings them back.

    Args:
        order: `[n]` int64; the i-th token of the order is the raster token `order[i]`.
    """

    order: Tensor
    inverse: Tensor = field(init=False)

    def __post_init__(self) -> None:
        check_tensor("order", self.order, dims=1)
        object.__setattr__(self, "inverse", curves.inverse(self.order))

    @classmethod
    def joined(cls, orders: Sequence[Tensor]) -> "Ordering":
        """Several orders one after another, each over tokens of its own."""
        if not orders:
            wrong_value("orders", "hold at least one order", "none")
        start, shifted = 0, []
        for order in orders:
            shifted.append(order + start)
            start += len(order)
        return cls(torch.cat(shifted))

    def __len__(self) -> int:
        return len(self.order)

    def enter(self, x: Tensor, dim: int = 1) -> Tensor:
        return self._moved("x", x, dim, self.order)

    def leave(self, y: Tensor, dim: int = 1) -> Tensor:
        return self._moved("y", y, dim, self.inverse)

    def _moved(self, name: str, x: Tensor, dim: int, index: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            wrong_type(name, "be a tensor", type(x).__name__)
        if not -x.dim() <= dim < x.dim():
            wrong_value("dim", f"be a dimension of `{name}` ({shape_of(x)})", dim)
        if x.shape[dim] != len(index):
            wrong_value(name, f"have {len(index)} tokens in dimension {dim}", shape_of(x))
        check_same_device(name, x, "order", index.device)
        return x.index_select(dim, index)

    def to(self, device: torch.device | str) -> "Ordering":
        """The same order with its indices on `device`; itself if they are there already."""
        order = self.order.to(device)
        if order is self.order:
            return self
        # The inverse is known: no need to wait for the device to check it again.
        moved = object.__new__(Ordering)
        object.__setattr__(moved, "order", order)
        object.__setattr__(moved, "inverse", self.inverse.to(device))
        return moved


@lru_cache(maxsize=64)
def along(order: CurveOrder, geometry: Geometry, device: str) -> Ordering:
    """Every image of a geometry along a curve of its own, one after another; kept."""
    make = {"hilbert": curves.hilbert, "morton": curves.morton, "raster": curves.raster}[order]
    with torch.inference_mode(False):  # else it could not serve a training step later
        return Ordering.joined([make(grid) for grid in geometry.images]).to(device)
