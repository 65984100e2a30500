"""What of a denoising step is moved when its tokens are put in another order."""

from typing import NamedTuple

from torch import Tensor

from nearfield.layout.ordering import Ordering


class Moving(NamedTuple):
    """Tensors that enter, each with its dimension of tokens, and the one that leaves."""

    entering: list[tuple[Tensor, int]]
    leaving: Tensor

    def by(self, ordering: Ordering) -> list[Tensor]:
        return [*(ordering.enter(tensor, dim) for tensor, dim in self.entering), ordering.leave(self.leaving)]
