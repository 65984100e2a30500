"""A denoising loop, as far as `apply` asks for one: its steps are told by hand."""

from collections.abc import Callable

FOREVER = 2**30


class Loop:
    """Every call is a later step of one long generation."""

    def __init__(self) -> None:
        self.step_index = 0
        self.timesteps = range(FOREVER)

    def later(self, step: Callable[[], object]) -> Callable[[], object]:
        """The next step: what was remembered serves."""

        def run() -> object:
            self.step_index += 1
            return step()

        return run

    def anew(self, step: Callable[[], object]) -> Callable[[], object]:
        """The first step of another generation: nothing is remembered."""

        def run() -> object:
            self.step_index, self.timesteps = 0, range(FOREVER)
            return step()

        return run
