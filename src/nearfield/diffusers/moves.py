"""Where tokens change their order: hooks at the places that a spec names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nearfield._checks import wrong_value
from nearfield.diffusers.find import TargetModule
from nearfield.diffusers.models.spec import Arguments, Move, parameter_names
from nearfield.session import TokenState, find


class Place(NamedTuple):
    """A module inside of a part, at which tokens enter or leave, and the module that holds it."""

    path: str
    parent: nn.Module
    module: nn.Module
    move: Move


def places_of(part: TargetModule) -> list[Place]:
    """The places inside a part; each place that its spec names has to be there."""
    places = []
    for move in part.spec.moves:
        found = find(part.module, move.place)
        if not found:
            rule = f"have `{part.path(move.place)}`, where tokens enter or leave"
            wrong_value("target", rule, type(part.root).__name__)
        for path, module in found if move.place else ():
            parent = part.module.get_submodule(path.rpartition(".")[0])
            places.append(Place(path, parent, module, move))
    return places


class Mover:
    """Brings tokens into the method's order and back, during calls of the part.

    Args:
        in_forward: whether a call is under way. Modules may be shared with another model, whose calls are not ours.
    """

    def __init__(self, in_forward: Callable[[], bool]) -> None:
        self._in_forward = in_forward
        self.state: TokenState | None = None
        """None: tokens stay as they are."""
        self._last: tuple[Tensor, Tensor] | None = None

    def hooks(self, places: Sequence[Place]) -> list[RemovableHandle]:
        """Hooks that move an argument, or the result, of a module that is called inside a part."""
        return [self._hook(place.module, place.move) for place in places]

    def _hook(self, module: nn.Module, move: Move) -> RemovableHandle:
        if isinstance(move.what, str):
            argument = partial(self._argument, move, move.what, parameter_names(module))
            return module.register_forward_pre_hook(argument, with_kwargs=True)
        return module.register_forward_hook(partial(self._result, move, move.what))

    def _argument(
        self,
        move: Move,
        name: str,
        names: tuple[str, ...],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        arguments = Arguments(names, args, kwargs)
        arguments.change(name, partial(self._moved_once, move=move))
        return arguments.call

    def _result(
        self, move: Move, index: int | None, module: nn.Module, args: tuple[Any, ...], output: Any
    ) -> Any:
        if index is None:
            return self.moved(output, move)
        return tuple(self.moved(part, move) if place == index else part for place, part in enumerate(output))

    def enter(self, moves: Sequence[Move], arguments: Arguments) -> None:
        """Move those arguments of the part itself that have tokens."""
        for move in moves:
            if move.place == "":
                assert isinstance(move.what, str)
                arguments.change(move.what, partial(self.moved, move=move))

    def moved(self, value: Any, move: Move) -> Any:
        """Tokens in their other order; also inside lists and dictionaries. What follows the images stays in place."""
        if self.state is None or not self._in_forward():
            return value
        if isinstance(value, list | tuple):
            items = [self.moved(item, move) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {name: self.moved(item, move) for name, item in value.items()}
        if move.num_dims not in (None, value.dim()):
            return value
        way: Callable[[Tensor, int], Tensor] = getattr(self.state.ordering, move.way)
        images, length = len(self.state.ordering), value.shape[move.dim]
        if length == 1:  # serves all tokens
            return value
        if length <= images:
            return way(value, move.dim)
        rest = value.narrow(move.dim, images, length - images)
        return torch.cat([way(value.narrow(move.dim, 0, images), move.dim), rest], dim=move.dim)

    def _moved_once(self, value: Tensor, move: Move) -> Tensor:
        """As `moved`, but a tensor that many layers are given is moved once (unless that would keep a graph alive)."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self._in_forward():
            return self.moved(value, move)  # type: ignore[no-any-return]
        if self._last is None or self._last[0] is not value:
            self._last = value, self.moved(value, move)
        return self._last[1]

    def forget(self) -> None:
        """A call begins, or is over: what was moved in it serves no other."""
        self._last = None
