"""TokenMap: what the tokens are. A map on the token axis with a way back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nearfield import curves
from nearfield._checks import check_tensor, wrong_value


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
        if x.shape[dim] != len(index):
            wrong_value(name, f"have {len(index)} tokens in dimension {dim}", list(x.shape))
        return x.index_select(dim, index)

    def to(self, device: torch.device | str) -> "Ordering":
        """The same order with its indices on `device`; itself if they are there already."""
        order = self.order.to(device)
        if order is self.order:
            return self
        moved = object.__new__(
            Ordering
        )  # the inverse is known: no need to wait for the device to check it again
        object.__setattr__(moved, "order", order)
        object.__setattr__(moved, "inverse", self.inverse.to(device))
        return moved
