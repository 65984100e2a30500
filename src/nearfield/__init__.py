"""nearfield: sparse attention for diffusion transformers. A method decides who reads whom; one operation reads."""

from typing import TYPE_CHECKING

from nearfield import curves, methods, planning
from nearfield._types import Attended, Positions
from nearfield.adapters import Handle, apply, remove
from nearfield.attend import attend, merge
from nearfield.geometry import Geometry
from nearfield.implementations import explain_choice
from nearfield.methods import LayerAttention, Method, PlanMethod, SelfAttention, attend_with
from nearfield.plan import Plan
from nearfield.tokenmap import Ordering

if TYPE_CHECKING:
    from nearfield.methods import FineGrained as FineGrained
    from nearfield.methods import Hilbert as Hilbert
    from nearfield.methods import LogLinear as LogLinear
    from nearfield.methods import Merge as Merge

_methods = {kind.__name__: kind for kind in methods.own_methods() if not kind.is_baseline}
globals().update(_methods)

__version__ = "0.1.0"
__all__ = [
    "Attended",
    "Geometry",
    "Handle",
    "LayerAttention",
    "Method",
    "Ordering",
    "Plan",
    "PlanMethod",
    "Positions",
    "SelfAttention",
    "__version__",
    "apply",
    "attend",
    "attend_with",
    "curves",
    "explain_choice",
    "merge",
    "methods",
    "planning",
    "remove",
    *_methods,
]
