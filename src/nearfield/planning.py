"""Builders of plans: from a layout, a mask, scores, or key lists."""

from nearfield.plan import Span, from_mask, from_spans, full, key_lists, ring, topk

__all__ = ["Span", "from_mask", "from_spans", "full", "key_lists", "ring", "topk"]
