"""Blocks are chosen by how near the means of their tokens are to each other."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from nearfield.methods.select import SelectMethod, Summaries


@dataclass(frozen=True)
class Nearest(SelectMethod):
    """Blocks of queries read the blocks of keys whose means are nearest, wide blocks before narrow ones.

    Args:
        reach: how much the spread of a block of keys counts.
    """

    name = "nearest"
    everything: ClassVar = {"keep": 1.0}

    reach: float = 0.1
    q_block: int = 16
    k_block: int = 8
    keep: float = 0.3
    top_p: float | None = None
    threshold: float | None = None
    rest: Literal["drop", "pooled", "weighted"] = "drop"
    rest_by: Literal["query", "block"] = "query"
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: float = 0

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        distance = (queries.means[:, :, :, None] - keys.means[:, :, None]).square().sum(-1)
        return self.reach * keys.spreads[:, :, None] - distance
