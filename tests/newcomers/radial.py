"""Radial attention: the further away, the fewer blocks are read."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nearfield.layout import Geometry
from nearfield.methods.base import PlanMethod
from nearfield.plan import Plan
from nearfield.plan import builders as planning


@dataclass(frozen=True)
class Radial(PlanMethod):
    """Near blocks are read whole, of farther ones every second or fourth; text reads all and is read by all.

    Args:
        reach: blocks of queries to either side whose keys are all read.
    """

    name = "radial"
    period = 4
    everything: ClassVar = {"reach": 1000}

    reach: int = 1
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: float = 0

    def plan(self, geometry: Geometry, layer: int, *, q_block: int, k_block: int) -> Plan:
        size, (text, text_stop) = geometry.num_tokens, geometry.text_span
        rows, columns = (torch.arange(0, size, block) for block in (q_block, k_block))
        distance = (rows[:, None] - columns).abs() // (self.reach * q_block)
        every = torch.where(distance <= 1, 1, torch.where(distance <= 3, 2, 4))
        reads = (torch.arange(len(columns)) + layer) % every == 0
        reads |= ((rows < text_stop) & ((rows + q_block).clamp(max=size) > text))[:, None]
        reads |= (columns < text_stop) & ((columns + k_block).clamp(max=size) > text)
        return planning.from_mask(reads, q_block=q_block, k_block=k_block, num_queries=size, num_keys=size)
