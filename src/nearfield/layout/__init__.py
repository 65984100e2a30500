"""Where tokens stand: curves, geometry, tiles, orderings, and the layout of pooled levels. Integers alone."""

from nearfield.layout import curves, tiling
from nearfield.layout.geometry import Geometry, Grid, Shortened, Span, check_geometry, check_no_text
from nearfield.layout.levels import level_length, level_starts, most_levels, num_represented
from nearfield.layout.ordering import CurveOrder, Ordering, along
from nearfield.layout.tiling import Curve, Segment, Shared

__all__ = [
    "Curve",
    "CurveOrder",
    "Geometry",
    "Grid",
    "Ordering",
    "Segment",
    "Shared",
    "Shortened",
    "Span",
    "along",
    "check_geometry",
    "check_no_text",
    "curves",
    "level_length",
    "level_starts",
    "most_levels",
    "num_represented",
    "tiling",
]
