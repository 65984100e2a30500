"""Where a denoising loop stands: read from its scheduler, never counted."""

from typing import Any, NamedTuple

from nearfield._checks import wrong_value


class Step(NamedTuple):
    place: int
    total: int


class Steps:
    """The scheduler of a pipeline (also one that was exchanged since), one given by hand, or none."""

    def __init__(self, pipeline: Any = None, scheduler: Any = None) -> None:
        self._pipeline, self._scheduler = pipeline, scheduler

    @property
    def scheduler(self) -> Any:
        if self._scheduler is not None:
            return self._scheduler
        return getattr(self._pipeline, "scheduler", None)

    def now(self) -> Step | None:
        """The step that is being computed, or None without a scheduler. Does not wait for the device."""
        scheduler = self.scheduler
        if scheduler is None:
            return None
        if not hasattr(scheduler, "step_index"):
            wrong_value(
                "scheduler",
                "know its step (have `step_index`) where the method keeps first steps dense",
                type(scheduler).__name__,
                "Use another scheduler, or `dense_steps=0`.",
            )
        index = scheduler.step_index
        if index is None:  # before the first step; image-to-image begins later than at 0
            index = getattr(scheduler, "begin_index", None) or 0
        return Step(index, len(scheduler.timesteps))
