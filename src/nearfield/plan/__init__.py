"""Who reads whom, as data: `Plan`, and its pure builders."""

from nearfield.plan import builders
from nearfield.plan.builders import Span, from_mask, from_spans, full, key_lists, ring, topk
from nearfield.plan.plan import Plan, check_block
from nearfield.plan.prepared import BOX, Boxes, Packed, Packing, PreparedPlan, Run, Runs

__all__ = [
    "BOX",
    "Boxes",
    "Packed",
    "Packing",
    "Plan",
    "PreparedPlan",
    "Run",
    "Runs",
    "Span",
    "builders",
    "check_block",
    "from_mask",
    "from_spans",
    "full",
    "key_lists",
    "ring",
    "topk",
]
