"""The attention layers of a model: how they are found, which are sparse, and why others stay dense."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model.

    Args:
        index: its number among the layers of the model; None where the method has no say (cross-attention).
        heads: how many it has; 0 as long as nobody has said.
        sees_text: whether its sequence holds the text.
        dense: why it stays dense, or None.
        group: the group of merged blocks it lies in; None if its tokens are not merged.
    """

    index: int | None
    heads: int
    sees_text: bool
    dense: str | None
    group: int | None

    @property
    def is_sparse(self) -> bool:
        return self.dense is None


def find(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The modules at a path below a module, by name. Children that are None are left out.

    Args:
        path: names between dots. `*` is every child, `a|b` are two of them, and a number counts children, from the end
            if negative.
    """
    found = [("", module)]
    for piece in path.split(".") if path else []:
        found = [
            (f"{name}.{child}" if name else child, module)
            for name, parent in found
            for child, module in _children(parent, piece)
        ]
    return found


def _children(parent: nn.Module, piece: str) -> list[tuple[str, nn.Module]]:
    children = list(parent.named_children())
    if piece == "*":
        return children
    if piece.lstrip("-").isdigit() and children:
        return [children[int(piece)]]
    return [(name, child) for name, child in children if name in piece.split("|")]


def attention_modules(
    module: nn.Module, layers: Sequence[str], image_only: Sequence[str]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Those at some paths, by name, with whether they see the text, in the order they run."""
    without_text = {name for path in image_only for name, _ in find(module, path)}
    for path in layers:
        for name, attention in find(module, path):
            yield name, attention, name not in without_text
