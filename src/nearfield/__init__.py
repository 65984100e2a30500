"""nearfield: sparse attention for diffusion transformers. A method decides who reads whom; one operation reads."""

from nearfield import curves, planning
from nearfield._types import Attended, Impl, Positions
from nearfield.attend import attend, explain_choice
from nearfield.plan import Plan

__version__ = "0.1.0"
__all__ = [
    "Attended",
    "Impl",
    "Plan",
    "Positions",
    "__version__",
    "attend",
    "curves",
    "explain_choice",
    "planning",
]
