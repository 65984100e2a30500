"""nearfield: sparse attention for diffusion transformers. A method decides who reads whom; one operation reads."""

from typing import TYPE_CHECKING

from nearfield import methods, planning
from nearfield._types import Attended
from nearfield.diffusers import Handle, apply, remove
from nearfield.layout import Geometry, Ordering, curves
from nearfield.methods import (
    LayerAttention,
    Method,
    PlanMethod,
    SelectMethod,
    SelfAttention,
    attend_with,
    recipes,
)
from nearfield.ops import KeyValuePart, attend, attend_parts, explain_choice, merge_attended
from nearfield.plan import Plan

if TYPE_CHECKING:
    from nearfield.methods import *  # noqa: F403, type checkers know the methods from there

_methods = {kind.__name__: kind for kind in methods.own_methods() if not kind.is_baseline}
globals().update(_methods)

__version__ = "0.1.0"
__all__ = [
    "Attended",
    "Geometry",
    "Handle",
    "KeyValuePart",
    "LayerAttention",
    "Method",
    "Ordering",
    "Plan",
    "PlanMethod",
    "SelectMethod",
    "SelfAttention",
    "__version__",
    "apply",
    "attend",
    "attend_parts",
    "attend_with",
    "curves",
    "explain_choice",
    "merge_attended",
    "methods",
    "planning",
    "recipes",
    "remove",
    *_methods,
]
