"""How many pairs of tokens are read: numbers, without words."""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

from nearfield.methods import Method


class Pairs(NamedTuple):
    """Pairs of tokens in a model, times heads.

    Args:
        read: pairs that sparse or merged layers read; None where that is not known before calls.
        there: pairs that there are in those layers.
        whole: pairs in all self-attention layers.
        dense: pairs that dense steps read of these (fewer if tokens are merged).
    """

    read: float | None = 0
    there: int = 0
    whole: int = 0
    dense: int = 0

    @staticmethod
    def sum(found: "Iterable[Pairs]") -> "Pairs":
        return reduce(Pairs._plus, found, Pairs())

    def _plus(self, other: "Pairs") -> "Pairs":
        read = None if self.read is None or other.read is None else self.read + other.read
        counts = (mine + its for mine, its in zip(self[1:], other[1:], strict=True))
        return Pairs(read, *counts)

    @property
    def kept(self) -> float | None:
        """The share of all pairs that is read in sparse steps; None where that is not known."""
        if self.read is None or not self.whole:
            return None
        return (self.whole - self.there + self.read) / self.whole

    def kept_over(self, num_steps: int | None, method: Method) -> float | None:
        """The same over a number of steps, of which some are dense."""
        if num_steps is None or self.kept is None:
            return self.kept
        dense = sum(method.num_dense_steps(num_steps)) / num_steps
        return dense * self.dense / self.whole + (1 - dense) * self.kept
