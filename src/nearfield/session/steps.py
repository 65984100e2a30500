"""Which call of which generation is being computed, for methods whose result depends on the step.

A host says which step it is. Guidance computes several branches in a step; what they are is known from the names that
a host gives its calls, and where it gives none, from the text that a call is conditioned on: pipelines hold one tensor
per branch all through their loop. A branch is never known from the number of calls.
"""

import warnings
import weakref
from typing import NamedTuple

from torch import Tensor

from nearfield._types import Moment
from nearfield.methods import Method, stays_dense

_MANY = 1000  # steps: a share of them is some

_NOTHING_REMEMBERED = (
    "Nothing is remembered from step to step: calls bring their text as a new tensor each time, so nothing says which"
    " calls of two steps belong together. Name them by `with model.cache_context(name):`, or hold one tensor per branch"
    " of guidance."
)


def has_dense_steps(method: Method) -> bool:
    """Whether a method leaves steps dense, however many there are."""
    return any(method.num_dense_steps(_MANY))


def is_dense_step(method: Method, step: Moment | None) -> bool:
    """Whether a step stays dense; none does where the step is not known."""
    if step is None:
        return False
    return stays_dense(method.num_dense_steps(step.total), step.step_index, step.total)


class Now(NamedTuple):
    """A step, and what it ends: all that was kept is out of date if `is_new`; counts if `is_first`, too."""

    step: Moment
    is_new: bool = False
    is_first: bool = False


class StepTracker:
    """The steps and branches of the calls of one model."""

    def __init__(self) -> None:
        self._schedule: object = None
        self._step_index = -1
        self._texts: dict[str, weakref.ref[Tensor]] = {}
        self._text = ""
        self._num_texts = 0
        self._is_text_gone = False
        self._num_lost, self._is_step_lost = 0, False  # steps in a row in which a text was gone
        self._has_warned = False
        self._kinds: set[tuple[str, int]] = set()
        self._is_mixed = False

    def set_text(self, text: Tensor | None) -> None:
        """Say which text the next call is conditioned on."""
        alive = {name: known for name, known in self._texts.items() if known() is not None}
        self._is_text_gone |= len(alive) < len(self._texts)
        self._texts = alive
        self._text = "" if text is None else self._name_of(text)

    def _name_of(self, text: Tensor) -> str:
        for name, known in self._texts.items():
            if known() is text:
                return name
        self._num_texts += 1
        name = f"text {self._num_texts}"
        self._texts[name] = weakref.ref(text)
        return name

    def advance(self, step: Moment, schedule: object, name: str | None = None, batch: int = 1) -> Now:
        """To the call that is being made. Does not wait for the device.

        Args:
            schedule: the steps of the loop, an object that is another one in every generation.
            name: of the branch of guidance, where the host gives it one.
            batch: samples of the call.
        """
        # A step that lies back means another generation, too.
        is_first = schedule is not self._schedule or step.step_index < self._step_index
        is_next = step.step_index != self._step_index
        branch = self._text if name is None else name
        is_mixed = self._is_of_several_images((branch, batch), is_first, is_next)
        # Names of texts are not given twice, so what belongs to a text that is gone can only be in the way.
        is_lost = name is None and self._is_text_gone
        self._notice(is_lost, is_first, is_next)
        self._schedule, self._step_index, self._is_text_gone = schedule, step.step_index, False
        return Now(step._replace(branch=branch), is_first or is_mixed or is_lost, is_first)

    def _notice(self, is_lost: bool, is_first: bool, is_next: bool) -> None:
        """Say once, of a loop that loses a text in one step after another, that it does. One may be on purpose."""
        if is_first:
            self._num_lost, self._is_step_lost = 0, False
        elif is_next:  # what was lost between two steps is found at the first call of the second
            self._num_lost = self._num_lost if self._is_step_lost else 0
            self._is_step_lost = False
        if is_lost and not is_first and not self._is_step_lost:
            self._is_step_lost = True
            self._num_lost += 1
            if self._num_lost == 2 and not self._has_warned:
                self._has_warned = True
                warnings.warn(_NOTHING_REMEMBERED, stacklevel=2)

    def _is_of_several_images(self, kind: tuple[str, int], is_first: bool, is_next: bool) -> bool:
        """Whether the loop calls a branch several times in a step (parts of a panorama, or training): nothing says then
        which call of an earlier step was about the same image."""
        if is_first:
            self._is_mixed = False
        if is_first or is_next:
            self._kinds.clear()
        self._is_mixed |= kind in self._kinds
        self._kinds.add(kind)
        return self._is_mixed
