"""What the fields come to on a geometry, in words."""

from collections.abc import Iterator

import torch

from nearfield.layout import Geometry, Grid, Segment, Shortened, tiling
from nearfield.methods.hilbert.around import spans_around
from nearfield.methods.hilbert.far_field import far_spans, windows_of
from nearfield.methods.hilbert.layout import Layout, Pattern, curve_of
from nearfield.methods.layers import Summary


def image_lines(
    pattern: Pattern, summary: Summary, geometry: Geometry, layout: Layout, q_block: int, k_block: int
) -> Iterator[str]:
    """Of every image its curve, what is shared of it, its tiles, and its far field."""
    is_line = isinstance(geometry, Shortened)
    for grid, segment in zip(geometry.images, layout.segments, strict=True):
        sides = "x".join(map(str, grid))
        curve = "what was merged" if is_line else curve_of(pattern, grid) or f"the {pattern.curve} order"
        yield f"  {sides} along {curve}"
        yield f"    shared: {_shared_words(pattern, None if is_line else grid, segment)}"
        if pattern.near == "around":
            yield f"    around: {_around_words(pattern, geometry, layout, segment, q_block, k_block)}"
        else:
            yield f"    tiles: {_tile_words(layout, segment, pattern.cycle)}"
        if pattern.far is not None:
            number = _num_windows(geometry, layout, segment, k_block, pattern.far)
            weighted = ", weighted" if summary == "weighted" else ""
            yield f"    far field: {number} summaries of {pattern.far} tokens{weighted}"


def _shared_words(pattern: Pattern, grid: Grid | None, segment: Segment) -> str:
    """`grid` is None where tokens are merged: nobody asked for that number."""
    if pattern.shared == "none":
        return "none"
    wanted = segment.num_shared if grid is None else pattern.shared_tokens or tiling.default_shared(grid)
    rounded = "" if wanted == segment.num_shared else f" (asked for {wanted}; rounded to whole blocks)"
    manner = "read all and are read by all" if pattern.share == "two-way" else "are read by all"
    return f"{segment.num_shared} tokens, {pattern.shared}, {manner}{rounded}"


def _tile_words(layout: Layout, segment: Segment, cycle: int) -> str:
    """How many tiles there are after rounding, how large they are, and how far they slide."""
    start, stop = segment.ring
    if start == stop:
        return "none: every token is shared"
    sizes, shifts = [], []
    for phase in range(cycle):
        begins = layout.cuts(segment, phase, cycle)
        sizes.append(begins.diff())
        shifts.append(int(begins[0]))
    real = torch.cat(sizes)
    real = real[real > 0]
    number = int((sizes[0] > 0).sum())
    span = f"{int(real.min())}" if real.min() == real.max() else f"{int(real.min())} to {int(real.max())}"
    exact = (stop - start) / layout.tiles
    slides = "" if cycle == 1 or len(set(shifts)) > 1 else "; too small to slide"
    return (
        f"{number} of {span} tokens, shifted by {', '.join(map(str, shifts))} in turn"
        f" (exactly: {layout.tiles} of {exact:g}, shifted by {exact / cycle:g};"
        f" cuts lie on multiples of {layout.unit}){slides}"
    )


def _around_words(
    pattern: Pattern, geometry: Geometry, layout: Layout, segment: Segment, q_block: int, k_block: int
) -> str:
    """How many tokens are read exactly."""
    start, stop = segment.ring
    if start == stop:
        return "none: every token is shared"
    spans = spans_around(pattern, geometry, q_block, k_block).clamp(start, stop)
    most = int(spans.diff(dim=-1).sum(dim=1).max())
    return f"{most} tokens, those nearest to each block of {q_block} (asked for: {(stop - start) / layout.tiles:g})"


def _num_windows(geometry: Geometry, layout: Layout, segment: Segment, k_block: int, window: int) -> int:
    """Summaries of one image."""
    spans = [span for span in far_spans(layout, geometry, k_block) if span[0] in range(*segment.ring)]
    return sum(len(windows_of(span, window)) for span in spans)
