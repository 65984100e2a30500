"""A method that is applied to a model: what its layers read, by layout of tokens, and at which step that is."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch

from nearfield._checks import wrong_value
from nearfield._memo import device_name
from nearfield._types import Moment
from nearfield.layout import Geometry, Ordering
from nearfield.methods import Composition, LayerAttention
from nearfield.session.layers import Layer
from nearfield.session.steps import Now, is_dense_step
from nearfield.session.tokens import TokenLayout, TokenState, make_tokens

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
        self.step: Moment | None = None
        """That of the last call, where anybody asked for it."""
        self._is_ordered_once, self._split = is_ordered_once, split
        self._kept: OrderedDict[tuple[TokenLayout, torch.device], TokenState] = OrderedDict()

    def geometry(self, layout: TokenLayout, sees_text: bool = True) -> Geometry:
        """Where the tokens of a call stand in layers that see the text, or do not."""
        return layout.geometry(self.text_first, sees_text)

    # -- what layers read ----------------------------------------------------------------------------------------

    def is_known(self, layout: TokenLayout, device: torch.device | str) -> bool:
        return (layout, torch.device(device_name(device))) in self._kept

    def make(self, layout: TokenLayout, device: torch.device) -> TokenState:
        """The state for a layout, which is not kept."""
        whole = {sees: self.geometry(layout, sees) for sees in (True, False)}
        state = make_tokens(self.method, self.layers, layout, whole, device, self.num_sparse_layers)
        if self._is_ordered_once:
            _check_one_order(self.method, state)
        return state if self._split is None else self._split(self, state)

    def prepare(self, layout: TokenLayout, device: torch.device | str, batch: int) -> TokenState:
        """The state for a layout, made once; it becomes that of the call."""
        device = torch.device(device_name(device))
        state = self._kept.get((layout, device))
        if state is None:
            state = self._kept[layout, device] = self.make(layout, device)
            while len(self._kept) > _REMEMBERED:
                self._kept.popitem(last=False)
        state.prepare(self.layers, batch)
        if state is not self.state:
            for attention in self.stateful(self.state):
                attention.forget()
            self.state = state
        return state

    # -- what layers keep from step to step ----------------------------------------------------------------------

    def stateful(self, state: TokenState | None) -> Iterator[LayerAttention]:
        """What layers read, where that depends on earlier steps."""
        if state is not None and self.method.is_stateful:
            yield from (attention for attention in state.attentions if attention is not None)

    @property
    def is_dense_step(self) -> bool:
        return is_dense_step(self.method, self.step)

    def begin(self, now: Now) -> None:
        """A call begins at a step. One that lies back begins another generation."""
        if now.is_new or (self.step is not None and now.step.step_index < self.step.step_index):
            self.forget()
        self.step = now.step
        for attention in self.stateful(self.state):
            attention.set_step(now.step)
            if now.is_first and attention.stats is not None:
                attention.stats.clear()

    def forget(self) -> None:
        """Nothing that layers keep serves any more."""
        for state in self._kept.values():
            for attention in self.stateful(state):
                attention.forget()

    def close(self) -> None:
        """Keep nothing alive."""
        self.forget()
        self._kept.clear()
        self.state = None


def _check_one_order(method: Composition, state: TokenState) -> None:
    orders = [each.order for each in state.orders.values() if isinstance(each, Ordering)]
    if not all(torch.equal(order, orders[0]) for order in orders):
        wrong_value("method", "order images alike with and without text", method)
