"""Baselines: published ways to choose blocks or to shorten sequences, to compare with."""

from nearfield.methods.baselines.blocks import BlockTopK
from nearfield.methods.baselines.branches import GatedBlocks, SparseLinear
from nearfield.methods.baselines.shortening import BipartiteMerge, StridedKeys

__all__ = ["BipartiteMerge", "BlockTopK", "GatedBlocks", "SparseLinear", "StridedKeys"]
