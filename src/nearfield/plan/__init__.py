"""Who reads whom, as data: `Plan`, and its pure builders."""

from nearfield.plan import builders
from nearfield.plan.builders import Span, from_mask, from_spans, full, key_lists, ring, topk
from nearfield.plan.plan import BOX, Boxes, KnownPart, Packed, Packing, Plan, check_block

__all__ = [
    "BOX",
    "Boxes",
    "KnownPart",
    "Packed",
    "Packing",
    "Plan",
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
