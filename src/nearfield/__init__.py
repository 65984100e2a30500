"""nearfield: sparse attention for diffusion transformers. A method decides who reads whom; one operation reads."""

from nearfield import curves, planning
from nearfield._types import Attended, Impl, Moment, Positions
from nearfield.adapters import Handle, apply, remove
from nearfield.attend import attend, merge
from nearfield.geometry import Geometry
from nearfield.implementations import explain_choice
from nearfield.methods import (
    BlockTopK,
    FineGrained,
    GatedBlocks,
    GatedBlocksAttention,
    Hilbert,
    HilbertAttention,
    LogLinear,
    LogLinearAttention,
    Merge,
    SparseLinear,
    SparseLinearAttention,
    hilbert_attention,
    log_linear_attention,
)
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering

__version__ = "0.1.0"
__all__ = [
    "Attended",
    "BlockTopK",
    "FineGrained",
    "GatedBlocks",
    "GatedBlocksAttention",
    "Geometry",
    "Handle",
    "Hilbert",
    "HilbertAttention",
    "Impl",
    "LogLinear",
    "LogLinearAttention",
    "Merge",
    "Moment",
    "Ordering",
    "Plan",
    "Positions",
    "SparseLinear",
    "SparseLinearAttention",
    "__version__",
    "apply",
    "attend",
    "curves",
    "explain_choice",
    "hilbert_attention",
    "log_linear_attention",
    "merge",
    "planning",
    "remove",
]
