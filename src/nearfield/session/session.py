"""A method that is applied to a model: what its layers read, by layout of tokens, and at which step that is."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from nearfield._checks import wrong_value
from nearfield._memo import device_name
from nearfield._types import Moment
from nearfield.layout import Geometry, Ordering
from nearfield.methods import Composition, LayerAttention, full_layer
from nearfield.session.counts import Pairs
from nearfield.session.layers import Layer
from nearfield.session.steps import StepTracker, has_dense_steps, is_dense_step
from nearfield.session.tokens import TokenLayout, TokenState

_REMEMBERED = 8


class Session:
    """What any host needs around a method: one for each part of a model that tokens enter and leave.

    Args:
        layers: attention layers of the part, in the order they run.
        text_first: whether the text stands before the image in the joint sequence.
        is_ordered_once: whether tokens are brought into one order for all layers, not in each layer.
        split: makes of a state that of one rank, where tokens are split over several.
    """

    def __init__(
        self,
        method: Composition,
        layers: Sequence[Layer],
        text_first: bool = True,
        is_ordered_once: bool = True,
        split: "Callable[[Session, TokenState], TokenState] | None" = None,
    ) -> None:
        self.method, self.layers, self.text_first = method, tuple(layers), text_first
        self.num_sparse_layers = sum(layer.is_sparse for layer in layers)
        """Of the whole model: they share the memory that a method allows."""
        self.state: TokenState | None = None
        """That of the last call; None if it was dense."""
        self.tracker = StepTracker()
        self.step: Moment | None = None
        """That of the last call, where anybody asked for it."""
        self._is_ordered_once, self._split = is_ordered_once, split
        self._states: OrderedDict[tuple[TokenLayout, torch.device], TokenState] = OrderedDict()

    def geometry(self, layout: TokenLayout, sees_text: bool = True) -> Geometry:
        """Where the tokens of a call stand in layers that see the text, or do not."""
        return layout.geometry(self.text_first, sees_text)

    def set_heads(self, heads: int) -> None:
        """Say how many heads all layers have, where that is known at calls alone."""
        if any(layer.heads != heads for layer in self.layers):
            self.close()
            self.layers = tuple(replace(layer, heads=heads) for layer in self.layers)

    # -- what layers read ----------------------------------------------------------------------------------------

    def is_known(self, layout: TokenLayout, device: torch.device | str) -> bool:
        return (layout, torch.device(device_name(device))) in self._states

    def make(self, layout: TokenLayout, device: torch.device) -> TokenState:
        """The state for a layout, which is not kept."""
        method = self.method
        whole = {sees: self.geometry(layout, sees) for sees in (True, False)}
        regions, short = method.regions(whole[True]), whole
        if regions is not None and regions.num_merged == regions.num_tokens:
            regions = None
        if regions is not None:
            short = {sees: method.shortened(geometry, regions) for sees, geometry in whole.items()}
        attentions: list[LayerAttention | None] = []
        weighing: list[LayerAttention | None] = []
        for layer in self.layers:
            geometry = (whole if layer.group is None else short)[layer.sees_text]
            attention = None
            if layer.is_sparse and layer.index is not None:
                attention = method.layer(geometry, layer.index, heads=layer.heads, device=device)
                attention.set_num_layers(self.num_sparse_layers)
            attentions.append(attention)
            is_weighed = layer.group is not None and regions is not None and method.weighs
            weighing.append(full_layer(geometry.num_tokens, str(device)) if is_weighed else None)
        orders = self._orders(whole, device)
        state = TokenState(layout, device, orders, tuple(attentions), None, tuple(weighing), regions)
        return state if self._split is None else self._split(self, state)

    def _orders(self, whole: Mapping[bool, Geometry], device: torch.device) -> Mapping[bool, Ordering]:
        """The order of image tokens in layers that see the text, and in those that do not."""
        kinds = {layer.sees_text for layer in self.layers if layer.is_sparse} or {True}
        orders = {sees: self.method.ordering(whole[sees], device=device) for sees in kinds}
        one, *others = (ordering.order for ordering in orders.values())
        if self._is_ordered_once and not all(torch.equal(one, other) for other in others):
            wrong_value("method", "order images alike with and without text", self.method)
        return orders

    def prepare(self, layout: TokenLayout, device: torch.device | str, batch: int) -> TokenState:
        """The state for a layout, made once; it becomes that of the call."""
        device = torch.device(device_name(device))
        state = self._states.get((layout, device))
        if state is None:
            state = self._states[layout, device] = self.make(layout, device)
            while len(self._states) > _REMEMBERED:
                self._states.popitem(last=False)
        state.prepare(self.layers, batch)
        if state is not self.state:
            for attention in self.stateful(self.state):
                attention.forget()
            self.state = state
        return state

    def pairs(self, state: TokenState) -> Pairs:
        """How many pairs of tokens are read in a state."""
        found = []
        for layer, attention in zip(self.layers, state.attentions, strict=True):
            if layer.index is None:
                continue
            tokens = self.geometry(state.layout, layer.sees_text).num_tokens
            whole, dense = tokens**2 * layer.heads, state.num_pairs(layer) * layer.heads
            if layer.is_sparse or dense < whole:
                read = state.num_read(layer, attention)
                found.append(Pairs(None if read is None else read * layer.heads, whole, whole, dense))
            else:
                found.append(Pairs(0, 0, whole, dense))
        return Pairs.sum(found)

    # -- what layers keep from step to step ----------------------------------------------------------------------

    def stateful(self, state: TokenState | None) -> Iterator[LayerAttention]:
        """What layers read, where that depends on earlier steps."""
        if state is not None and self.method.is_stateful:
            yield from (attention for attention in state.attentions if attention is not None)

    @property
    def has_dense_steps(self) -> bool:
        return has_dense_steps(self.method)

    def is_dense_step(self, step: Moment | None) -> bool:
        return is_dense_step(self.method, step)

    def begin(self, step: Moment, is_first: bool = False) -> None:
        """A call begins at a step. One that lies back begins another generation.

        Args:
            is_first: whether counts begin anew, too.
        """
        if self.step is not None and step.step_index < self.step.step_index:
            self.forget()
        self.step = step
        for attention in self.stateful(self.state):
            attention.set_step(step)
            if is_first and attention.stats is not None:
                attention.stats.clear()

    def forget(self) -> None:
        """Nothing that layers keep serves any more."""
        for state in self._states.values():
            for attention in self.stateful(state):
                attention.forget()

    def close(self) -> None:
        """Keep nothing alive."""
        self.forget()
        self._states.clear()
        self.state, self.tracker = None, StepTracker()
