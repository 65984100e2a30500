"""Whether tokens are inside a part, and what they are computed with: in a call, or again in its backward pass.

Gradient checkpointing computes blocks again, perhaps after other calls. Gradients come in where tokens left, so a hook
on what a call gave knows that its blocks come next, and with what they were computed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nearfield._checks import wrong_value
from nearfield.diffusers.find import TargetModule
from nearfield.diffusers.merged_blocks import MergedCall
from nearfield.session import TokenState

_NO_BACKWARD = -1
_OUTSIDE = "of attention layers that another model shares (a ControlNet)"


class Call(NamedTuple):
    """What a call is computed with."""

    state: TokenState | None = None
    is_dense_step: bool = False
    merged: MergedCall | None = None
    is_lora_off: bool = False


class Calls:
    """The calls of one part; processors ask it what they are in (`ModelCall`).

    Args:
        state: what the part computes with now.
        resume: lets it compute with what a call was computed with.
    """

    def __init__(self, part: TargetModule, state: Callable[[], Call], resume: Callable[[Call], None]) -> None:
        self._part, self._state, self._resume = part, state, resume
        self.is_dense_step = False
        self.is_recomputing = False
        self.dense: Counter[str] = Counter()
        """Calls that were dense, by the reason."""
        self._is_active = False
        self._is_closed = False
        self._last = Call()
        self._paused = Call()
        self._backward = _NO_BACKWARD

    def in_forward(self) -> bool:
        """Whether tokens are inside. Modules may be shared with another model, whose calls are not ours."""
        is_eager = not torch.compiler.is_compiling()
        if is_eager and self.is_recomputing and self._backward != _current_backward():
            self._backward_left()  # no hook ran, because that backward pass raised
        return self._is_active

    def called_outside(self, was_shared: bool) -> None:
        """An attention layer runs while no tokens are inside: in another model that shares it."""
        if _current_backward() == _NO_BACKWARD:
            self.dense[_OUTSIDE] += 1
        elif not was_shared:
            hint = "Gradient checkpointing computes its layers again, and has to know with what."
            rule = f"begin at the output of {type(self._part.module).__name__}"
            wrong_value("backward", rule, "another loss", hint)

    def enter(self) -> None:
        """A call begins."""
        self._is_active, self.is_recomputing = True, False
        if not torch.compiler.is_compiling():
            self._last = self._state()

    def leave(self, output: Any) -> None:
        """A call has given something, or raised: then there is no output."""
        self._is_active = False
        _hook_gradients(output, partial(self._backward_entered, self._last))

    def leave_model(self, output: Any) -> None:
        """The model around the part has: its layers behind the part are computed again before gradients enter."""
        _hook_gradients(output, partial(self._backward_began, self._state()))

    def close(self) -> None:
        """None will follow, and nothing is kept alive."""
        self._last, self._paused = Call(), Call()
        self._is_active, self._is_closed = False, True

    # -- a backward pass -----------------------------------------------------------------------------------------

    def _backward_entered(self, call: Call, gradient: Tensor) -> None:
        """Gradients come in where tokens left: checkpointed blocks will be computed again, as in that call.

        Other calls may have been made since. Those that follow in the same backward pass come in after this one is
        through: autograd goes from the last operation to the first.
        """
        self._backward_began(call, gradient)
        self._is_active = not self._is_closed

    def _backward_began(self, call: Call, gradient: Tensor) -> None:
        """Everything is as it was in a call."""
        if self._is_closed:
            _check_nothing_is_recomputed(self._part.root)
            return
        self.in_forward()  # ends a backward pass that raised
        if self._backward != _current_backward():
            self._backward = _current_backward()
            self._paused = self._state()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_left)
        self._resume(call)
        self.is_recomputing = True

    def _backward_left(self) -> None:
        """Everything is as it was before the backward pass: the last call, or what was made ready since."""
        self._resume(self._paused)
        self._is_active = self.is_recomputing = False
        self._backward = _NO_BACKWARD


def _hook_gradients(output: Any, hook: Callable[[Tensor], None]) -> None:
    if torch.compiler.is_compiling():
        return  # what torch.compile computes again it does not compute with our hooks
    for tensor in _tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)


def _current_backward() -> int:
    """The number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()


def _check_nothing_is_recomputed(model: nn.Module) -> None:
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        hint = "Gradient checkpointing computes layers again: leave the `with` block after `backward()`."
        rule = "come before `remove()` of what the loss was computed with"
        wrong_value("backward", rule, "it after", hint)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
