"""Block selection: every block of queries reads the blocks of keys whose means it likes best.

Methods such as VSA and SpargeAttention choose so. It is the baseline for methods that choose single keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from nearfield.layout import CurveOrder
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.select import SelectMethod, Summaries


@dataclass(frozen=True)
class BlockTopK(SelectMethod):
    """The best blocks by attention among their means."""

    name: ClassVar[str] = "blocktopk"
    is_baseline: ClassVar[bool] = True
    example: ClassVar[Mapping[str, Any]] = {"q_block": 16, "k_block": 8, "keep": 0.5}
    everything: ClassVar[Mapping[str, Any]] = {"keep": 1.0}

    q_block: int = 128
    k_block: int = 64
    keep: float = 0.25
    top_p: float | None = None
    min_similarity: float | None = None
    order: CurveOrder = "hilbert"
    dense_layers: int | tuple[int, ...] = 1
    dense_steps: DenseSteps = 0.2

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        return queries.logits(keys)
