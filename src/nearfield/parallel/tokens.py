"""What a session prepares for a call, for the share of one rank."""

from dataclasses import replace
from typing import NamedTuple

from nearfield.layout import Ordering
from nearfield.methods import LayerAttention
from nearfield.ops import Regions
from nearfield.parallel.cuts import even_split, split_between_regions
from nearfield.parallel.model import SplitModel
from nearfield.parallel.ranks import Ranks
from nearfield.session import Session, TokenState

_DENSE_BLOCK = 128  # of plans where everyone reads everyone


class _SplitModels(NamedTuple):
    """Who holds which of all tokens, and of the merged ones; and where this rank merges."""

    whole: SplitModel
    merged: SplitModel
    own_regions: Regions | None = None


def split_tokens(session: Session, state: TokenState, ranks: Ranks) -> TokenState:
    """The state for the share of one rank. Dense layers read all tokens, wherever they are."""
    ordering = state.ordering
    assert isinstance(ordering, Ordering)
    models = _split_models(session, state, ranks)
    dense = {id(model): model.dense_layer(state.device) for model in (models.whole, models.merged)}
    attentions, weighing = list[LayerAttention | None](), list[LayerAttention | None]()
    for layer, attention in zip(session.layers, state.attentions, strict=True):
        model = models.whole if layer.group is None else models.merged
        everything = None if layer.index is None else dense[id(model)]
        attentions.append(everything if attention is None else model.layer(attention))
        weighing.append(everything)
    return replace(
        state,
        orders={True: models.whole.share(ordering, session.geometry(state.layout))},
        attentions=tuple(attentions),
        dense_attention=dense[id(models.whole)],
        weighing=tuple(weighing),
        own_regions=models.own_regions,
    )


def _split_models(session: Session, state: TokenState, ranks: Ranks) -> _SplitModels:
    method, geometry = session.method, session.geometry(state.layout)
    block = _DENSE_BLOCK
    if method.attention is not None:
        indices = [layer.index for layer in session.layers if layer.index is not None]
        plans = [
            plan
            for index in indices
            for plan in method.layer(geometry, index, heads=1, device=state.device).plans
        ]
        block = max(plan.q_block for plan in plans)
    if method.merge is None:
        whole = SplitModel(even_split(method, geometry, ranks.size, block), block, ranks)
        return _SplitModels(whole, whole)
    split = split_between_regions(method, geometry, ranks.size, block)
    whole = SplitModel(split.whole, block, ranks)
    if state.regions is None:
        return _SplitModels(whole, whole)
    return _SplitModels(whole, SplitModel(split.merged, block, ranks), split.regions[ranks.index])
