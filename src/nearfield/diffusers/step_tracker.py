"""Which call of which generation is being computed, for methods that remember from call to call.

The step comes from the scheduler. Guidance computes several branches in a step; what they are is known from the names
that pipelines give their calls, and where they give none, from the text that a call is conditioned on: a pipeline holds
one tensor per branch all through its loop. A branch is never known from the number of calls.
"""

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from nearfield._types import Moment
from nearfield.diffusers.models.spec import Arguments, first_tensor
from nearfield.diffusers.scheduler_state import SchedulerState

_NO_SCHEDULER = (
    "`scheduler` must be given where the method remembers from step to step; got None. Apply to a pipeline, pass"
    ' `scheduler=`, or let the method decide at every call (predict="online").'
)
_NOTHING_REMEMBERED = (
    "Nothing is remembered from step to step: calls bring their text as a new tensor each time, so nothing says which"
    " calls of two steps belong together. Name them by `with model.cache_context(name):`, or hold one tensor per branch"
    " of guidance."
)


class Now(NamedTuple):
    """A moment, and what it ends: all that was remembered is out of date if `is_new`; counts if `is_first`, too."""

    moment: Moment
    is_new: bool
    is_first: bool


class StepTracker:
    """The moments of the calls of one model.

    Args:
        ended: called when a pipeline says that its generation is over.
    """

    def __init__(self, steps: SchedulerState, ended: Callable[[], None]) -> None:
        self._steps, self._ended = steps, ended
        self._listener: Any = None
        self._timesteps: Any = None
        self._place = -1
        self._texts: dict[str, weakref.ref[Tensor]] = {}
        self._text = ""
        self._num_texts = 0
        self._is_text_gone = False
        self._num_lost, self._is_step_lost = 0, False  # steps in a row in which a text was gone
        self._has_warned = False
        self._kinds: set[tuple[str, int]] = set()
        self._is_mixed = False

    def listen(self, model: nn.Module) -> None:
        """Hear the names of calls, where a model passes them on."""
        if hasattr(model, "cache_context"):
            from nearfield.diffusers.listening import Listener

            self._listener = Listener(model, self._ended)

    def leave(self, model: nn.Module) -> None:
        if self._listener is not None:
            self._listener.leave(model)
            self._listener = None

    def conditioned_on(self, text: Tensor | None) -> None:
        """What the call that follows is given."""
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

    def advance(self, batch: int = 1) -> Now:
        """To the call that is being made, with so many samples. Does not wait for the device."""
        step = self._steps.now()
        if step is None:
            raise ValueError(_NO_SCHEDULER)
        # Schedulers make new timesteps for every generation; a step that lies back means one, too.
        timesteps = self._steps.scheduler.timesteps
        is_first = timesteps is not self._timesteps or step.place < self._place
        name = None if self._listener is None else self._listener.name
        branch = self._text if name is None else name
        is_mixed = self._is_of_several_images((branch, batch), is_first, step.place != self._place)
        # Names of texts are not given twice, so what belongs to a text that is gone can only be in the way.
        is_lost = name is None and self._is_text_gone
        is_new = is_first or is_mixed or is_lost
        self._notice(is_lost, is_first, step.place != self._place)
        self._timesteps, self._place, self._is_text_gone = timesteps, step.place, False
        return Now(Moment(step.place, step.total, branch), is_new, is_first)

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


class CallHook:
    """Tells, at the entrance of a model, which timestep it is called with, and which text.

    Args:
        names: the parameters of the model.
        conditioning: that of the text; None if nobody asks.
    """

    def __init__(
        self, steps: SchedulerState, moments: StepTracker, names: tuple[str, ...], conditioning: str | None
    ) -> None:
        self.steps, self.moments, self.names, self.conditioning = steps, moments, names, conditioning

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = Arguments(self.names, args, kwargs)
        if "timestep" in self.names and self.steps.needs_timestep:
            self.steps.timestep = arguments.get("timestep")
        if self.conditioning is not None:
            text = arguments.get(self.conditioning)
            self.moments.conditioned_on(None if text is None else first_tensor(text))


def check_scheduler(steps: SchedulerState) -> None:
    if steps.scheduler is None:
        raise ValueError(_NO_SCHEDULER)
