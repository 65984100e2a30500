"""The step of a denoising loop, read from its scheduler, never counted."""

import weakref
from typing import Any

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Moment

# Not put together where they are raised: torch.compile could not trace that.
_NO_SCHEDULER = (
    "`scheduler` must be given where the method remembers from step to step; got None. Apply to a pipeline, pass"
    ' `scheduler=`, or let the method decide at every call (predict="online").'
)
_NOT_ITS_LOOP = (
    "`scheduler` must be that of the loop which calls the model; got one whose steps are over. If another pipeline"
    " shares the model, remove first, and then apply to that pipeline, or pass its `scheduler=`."
)


class SchedulerState:
    """The scheduler of a pipeline (also one that was exchanged since), one given by hand, or none.

    The pipeline is not kept alive. If it is gone, its last scheduler is asked.
    """

    def __init__(self, pipeline: Any = None, scheduler: Any = None) -> None:
        self._pipeline = None if pipeline is None or scheduler is not None else weakref.ref(pipeline)
        self._scheduler = scheduler
        self.timestep: Any = None
        """What the model was called with."""

    @property
    def scheduler(self) -> Any:
        pipeline = None if self._pipeline is None else self._pipeline()
        if pipeline is not None:
            self._scheduler = getattr(pipeline, "scheduler", None)
        return self._scheduler

    def check_is_given(self) -> None:
        if self.scheduler is None:
            raise ValueError(_NO_SCHEDULER)

    @property
    def needs_timestep(self) -> bool:
        """Whether the scheduler does not know its step, and only the timestep tells."""
        return self.scheduler is not None and not hasattr(self.scheduler, "step_index")

    def now(self) -> Moment | None:
        """The step that is being computed, or None without a scheduler. Does not wait for the device."""
        scheduler = self.scheduler
        if scheduler is None:
            return None
        total = len(scheduler.timesteps)
        if self.needs_timestep:
            return Moment(self._step_of_timestep(), total)
        index = scheduler.step_index
        if index is None:  # before the first step; image-to-image begins later than at 0
            index = getattr(scheduler, "begin_index", None) or 0
        elif index >= total:
            # Its loop is over, so another one drives this call, and its first steps would not be dense.
            raise ValueError(_NOT_ITS_LOOP)
        return Moment(index, total)

    def total(self) -> int | None:
        """How many steps there are, or None as long as that is not known: before its first loop a scheduler has the
        steps of its training."""
        scheduler = self.scheduler
        signs = (getattr(scheduler, name, None) for name in ("step_index", "num_inference_steps"))
        return None if all(sign is None for sign in signs) else len(scheduler.timesteps)

    def _step_of_timestep(self) -> int:
        """Pipelines walk along `scheduler.timesteps`, so what they pass lies in it: its address says where."""
        timesteps, timestep = self.scheduler.timesteps, self.timestep
        is_tensor = isinstance(timestep, Tensor) and not torch.compiler.is_compiling()
        if is_tensor and _storage(timestep) == _storage(timesteps):
            distance = timestep.data_ptr() - timesteps.data_ptr()
            return int(distance // (timesteps.stride(0) * timesteps.element_size()))
        wrong_value(
            "scheduler",
            "know its step (have `step_index`), or the model be given an item of `scheduler.timesteps` as it is,"
            " where the method goes by steps",
            type(self.scheduler).__name__,
            'Use another scheduler, or fields that do not ask: `dense_steps=0`, `predict="online"`.',
        )

    def is_in_loop(self) -> bool:
        """Whether a denoising loop is under way, behind its first step."""
        scheduler = self.scheduler
        index = getattr(scheduler, "step_index", None)
        return index is not None and 0 < index < len(scheduler.timesteps)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
