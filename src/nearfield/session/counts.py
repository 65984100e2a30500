"""How many pairs of tokens the calls of a session read: numbers, without words."""

from collections.abc import Sequence
from typing import NamedTuple

from nearfield.methods import LayerAttention, Method
from nearfield.ops import ReadStats
from nearfield.session.layers import Layer
from nearfield.session.session import Session
from nearfield.session.tokens import TokenState


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

    def plus(self, other: "Pairs") -> "Pairs":
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
        """The same over so many steps, of which some are dense."""
        if num_steps is None or self.kept is None:
            return self.kept
        dense = sum(method.num_dense_steps(num_steps)) / num_steps
        return dense * self.dense / self.whole + (1 - dense) * self.kept


def count_pairs(session: Session, state: TokenState) -> Pairs:
    pairs = Pairs()
    for layer, attention in zip(session.layers, state.attentions, strict=True):
        if layer.index is None:
            continue
        tokens = session.geometry(state.layout, layer.sees_text).num_tokens
        whole, dense = tokens**2 * layer.heads, num_pairs(layer, state) * layer.heads
        if layer.is_sparse or dense < whole:
            read = num_read(layer, attention, state)
            pairs = pairs.plus(Pairs(None if read is None else read * layer.heads, whole, whole, dense))
        else:
            pairs = pairs.plus(Pairs(0, 0, whole, dense))
    return pairs


def num_read(layer: Layer, attention: LayerAttention | None, state: TokenState) -> float | None:
    """Pairs that a layer reads, per head; None where that is not known before calls."""
    most = num_pairs(layer, state)
    if attention is None or not layer.is_sparse:
        return most
    known = attention.num_pairs
    return _read_so_far(attention, most) if known is None else known


def num_pairs(layer: Layer, state: TokenState) -> int:
    """Pairs of a layer where everyone reads everyone, perhaps after merging."""
    image = state.layout.num_image_tokens
    if layer.group is not None and state.regions is not None:
        image = state.regions.num_merged
    return (image + (state.layout.text if layer.sees_text else state.layout.num_padding)) ** 2


def _read_so_far(attention: LayerAttention, there: int) -> float | None:
    """What calls have read of so many pairs, on average; None before the first."""
    stats = attention.stats
    calls = 0 if stats is None else stats.num_full + stats.num_sparse
    if stats is None or not calls:
        return None
    sparse = stats.num_sparse * stats.kept if stats.num_sparse else 0.0
    return there * (stats.num_full + sparse) / calls


def read_stats(state: TokenState | None) -> Sequence[ReadStats]:
    """What the layers of the last calls have read, where that is counted."""
    attentions = state.attentions if state is not None else ()
    found = [attention.stats for attention in attentions if attention is not None]
    return [stats for stats in found if stats is not None and stats.num_full + stats.num_sparse]
