"""Everything that calls of one size need, made once: the order of the tokens, and what each layer reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from nearfield._checks import wrong_value
from nearfield.diffusers.layers import Layer
from nearfield.diffusers.models.spec import TokenLayout
from nearfield.diffusers.target import TargetModule
from nearfield.layout import Geometry, Ordering
from nearfield.methods import Composition, LayerAttention, full_layer
from nearfield.ops import Regions
from nearfield.parallel import Ranks, Share, SplitModel, even_split, split_between_regions

_DENSE_BLOCK = 128  # of plans where everyone reads everyone


@dataclass(frozen=True, eq=False)
class TokenState:
    """Everything a call needs, made for one layout of tokens and one device.

    Args:
        attentions: what each layer reads, in the order of layers; None where it is dense.
        dense_attention: what dense steps read where tokens are split over ranks.
        weighing: what each layer reads in dense steps, or where it is dense, if merged keys have a bias.
        regions: how image tokens are merged; None where they are not.
        own_regions: those of this rank, where tokens are split over several.
        prepared: for which batches, and whether for training, plans have derived what they keep.
    """

    located: TokenLayout
    device: torch.device
    ordering: Ordering | Share
    attentions: tuple[LayerAttention | None, ...]
    dense_attention: LayerAttention | None = None
    weighing: tuple[LayerAttention | None, ...] = ()
    regions: Regions | None = None
    own_regions: Regions | None = None
    prepared: set[tuple[int, bool]] = field(default_factory=set)

    def prepare(self, layers: Sequence[Layer], batch: int) -> None:
        """Let plans derive what `attend` keeps of them, once for a batch and for training."""
        training = torch.is_grad_enabled()
        if (batch, training) in self.prepared:
            return
        for attention, layer in zip(self.attentions + self.weighing, 2 * tuple(layers), strict=True):
            if attention is not None:
                attention.prepare(batch, layer.attention.heads, training=training)
        self.prepared.add((batch, training))


def prepare_tokens(
    part: TargetModule,
    layers: Sequence[Layer],
    located: TokenLayout,
    device: torch.device,
    num_sparse_layers: int,
) -> TokenState:
    """`num_sparse_layers` are those of the whole model: they share the memory that a method allows."""
    whole = {sees: part.geometry(located, sees) for sees in (True, False)}
    ordering = _ordering(part, layers, whole, device)
    regions, short = _merged(part.method, whole)
    attentions: list[LayerAttention | None] = []
    weighing: list[LayerAttention | None] = []
    for layer in layers:
        geometry = (whole if layer.group is None else short)[layer.sees_text]
        attention = None
        if layer.is_sparse and layer.index is not None:
            heads = layer.attention.heads
            attention = part.method.layer(geometry, layer.index, heads=heads, device=device)
            attention.set_num_layers(num_sparse_layers)
        attentions.append(attention)
        is_weighed = layer.group is not None and regions is not None and part.method.weighs
        weighing.append(full_layer(geometry.num_tokens, str(device)) if is_weighed else None)
    ready = TokenState(located, device, ordering, tuple(attentions), None, tuple(weighing), regions)
    return ready if part.ranks is None else _split(part, layers, ready, part.ranks)


def _ordering(
    part: TargetModule, layers: Sequence[Layer], whole: Mapping[bool, Geometry], device: torch.device
) -> Ordering:
    """One order for all layers, whether they see the text or not."""
    kinds = {layer.sees_text for layer in layers if layer.is_sparse} or {True}
    ordering, *others = (part.method.ordering(whole[sees], device=device) for sees in kinds)
    if not all(torch.equal(other.order, ordering.order) for other in others):
        wrong_value("method", "order images alike with and without text", part.method)
    return ordering


def _merged(
    method: Composition, whole: Mapping[bool, Geometry]
) -> tuple[Regions | None, Mapping[bool, Geometry]]:
    """How image tokens are merged, and the geometries of what is left; the same ones if nothing is merged."""
    regions = method.regions(whole[True])
    if regions is None or regions.num_merged == regions.num_tokens:
        return None, whole
    return regions, {sees: method.shortened(geometry, regions) for sees, geometry in whole.items()}


# -- over ranks ----------------------------------------------------------------------------------------------------


class _SplitModels(NamedTuple):
    """Who holds which of all tokens, and of the merged ones; and where this rank merges."""

    whole: SplitModel
    merged: SplitModel
    own_regions: Regions | None = None


def _split(part: TargetModule, layers: Sequence[Layer], ready: TokenState, ranks: Ranks) -> TokenState:
    """The same for the share of one rank. Dense layers read all, wherever it is."""
    assert isinstance(ready.ordering, Ordering)
    geometry = part.geometry(ready.located)
    models = _split_models(part.method, geometry, layers, ready, ranks)
    dense = {id(model): model.dense_layer(ready.device) for model in (models.whole, models.merged)}
    attentions, weighing = list[LayerAttention | None](), list[LayerAttention | None]()
    for layer, attention in zip(layers, ready.attentions, strict=True):
        model = models.whole if layer.group is None else models.merged
        everything = dense[id(model)] if layer.is_ours else None
        attentions.append(everything if attention is None else model.layer(attention))
        weighing.append(everything)
    return replace(
        ready,
        ordering=models.whole.share(ready.ordering, geometry),
        attentions=tuple(attentions),
        dense_attention=dense[id(models.whole)],
        weighing=tuple(weighing),
        own_regions=models.own_regions,
    )


def _split_models(
    method: Composition, geometry: Geometry, layers: Sequence[Layer], ready: TokenState, ranks: Ranks
) -> _SplitModels:
    block = _DENSE_BLOCK
    if method.attention is not None:
        indices = [layer.index for layer in layers if layer.index is not None]
        plans = [
            plan
            for index in indices
            for plan in method.layer(geometry, index, heads=1, device=ready.device).plans
        ]
        block = max(plan.q_block for plan in plans)
    if method.merge is None:
        whole = SplitModel(even_split(method, geometry, ranks.size, block), block, ranks)
        return _SplitModels(whole, whole)
    split = split_between_regions(method, geometry, ranks.size, block)
    whole = SplitModel(split.whole, block, ranks)
    if ready.regions is None:
        return _SplitModels(whole, whole)
    return _SplitModels(whole, SplitModel(split.merged, block, ranks), split.regions[ranks.index])
