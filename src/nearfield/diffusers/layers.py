"""The attention layers of a part: which are sparse, which stay dense and why, and where a processor is put in."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nearfield.diffusers.merging import Merger
from nearfield.diffusers.models.spec import CROSS_ATTENTION, find
from nearfield.diffusers.processor import Switch, sparse_processor
from nearfield.diffusers.target import TargetModule

_LARGEST_HEAD = 128  # that a kernel takes


@dataclass(frozen=True)
class Layer:
    """One attention module of a part.

    Args:
        index: its number among the layers of the model; None where the method has no say (cross-attention).
        name: its path in the model.
        path: its path in the part.
        sees_text: whether its sequence holds the text.
        dense: why it stays dense, or None.
        processor: what was found in it.
        installed: what was put there; the same if it stays as it was.
        group: of the merged block it lies in; None if that is not merged.
    """

    index: int | None
    name: str
    path: str
    attention: Any
    sees_text: bool
    dense: str | None
    processor: Any
    installed: Any
    group: int | None = None

    @property
    def is_sparse(self) -> bool:
        return self.dense is None

    @property
    def is_ours(self) -> bool:
        """Whether a processor was put in: also in dense layers, where tokens are split over ranks or merged."""
        return self.installed is not self.processor


def layers_of(
    part: TargetModule, merger: Merger | None, switch: Switch, first: int, num_layers: int
) -> Iterator[Layer]:
    """All of them, with the processors that will be put in; those of the model's layers are counted from `first`."""
    for layer in _found(part, first, num_layers):
        yield _adapted(layer, part, merger, switch)


def _found(part: TargetModule, first: int, num_layers: int) -> Iterator[Layer]:
    image_only = {name for path in part.spec.image_only for name, _ in find(part.module, path)}
    for path in part.spec.layers:
        for name, attention in find(part.module, path):
            reason = _unfit(attention) or part.method.dense_layer_reason(first, num_layers)
            yield _as_it_is(part, first, name, attention, name not in image_only, reason)
            first += 1
    for path, reason in part.spec.dense.items():
        for name, attention in find(part.module, path):
            yield _as_it_is(part, None, name, attention, False, reason)


def _unfit(attention: Any) -> str | None:
    """Why a layer stays dense whatever the method says."""
    if getattr(attention, "is_cross_attention", False):
        return CROSS_ATTENTION
    head_dim = attention.inner_dim // attention.heads
    return f"head dimension {head_dim} is above {_LARGEST_HEAD}" if head_dim > _LARGEST_HEAD else None


def _as_it_is(
    part: TargetModule, index: int | None, path: str, attention: Any, sees_text: bool, dense: str | None
) -> Layer:
    processor = attention.get_processor()
    return Layer(index, part.path(path), path, attention, sees_text, dense, processor, processor)


def _adapted(layer: Layer, part: TargetModule, merger: Merger | None, switch: Switch) -> Layer:
    """With a processor of ours, where it reads sparsely, over ranks, or among merged tokens that ask for it."""
    is_split = part.ranks is not None and layer.index is not None
    group, is_merged = None, False
    if merger is not None and layer.index is not None and layer.dense != CROSS_ATTENTION:
        group = merger.group_of(layer.path)
        is_merged = group is not None and merger.needs_processors
    if not (layer.is_sparse or is_split or is_merged):
        return replace(layer, group=group)
    heads = layer.attention.heads, layer.attention.inner_dim // layer.attention.heads
    installed = sparse_processor(layer.processor, switch, part.impl, heads, part.spec.rotary)
    return replace(layer, group=group, installed=installed)
