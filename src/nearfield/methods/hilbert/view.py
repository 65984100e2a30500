"""What is drawn of the method: tiles as they slide, or blocks of queries, and what is shared."""

import torch
from torch import Tensor

from nearfield.layout import Geometry, Segment, tiling
from nearfield.methods.hilbert.layout import Pattern, curve_of, layout_of
from nearfield.methods.layers import Summary
from nearfield.methods.view import View, blocks_in_picture
from nearfield.plan import Plan


def view_of(pattern: Pattern, summary: Summary, geometry: Geometry, phase: int, near: Plan) -> View:
    """The first image of a geometry.

    Args:
        near: what a layer of this phase reads exactly.
    """
    layout = layout_of(pattern, geometry, near.q_block)
    segment = layout.segments[0]
    is_shared = torch.zeros(len(segment.order), dtype=torch.bool)
    is_shared[segment.order[: segment.num_shared]] = True
    is_tiled = pattern.near == "tile"
    cuts = layout.cuts(segment, phase, pattern.cycle)
    group = (
        _tile_of_cell(segment, cuts)
        if is_tiled
        else blocks_in_picture(segment.order, segment.start, near.q_block)
    )
    return View(
        curve=tiling.curve_order(geometry.grid, pattern.curve),
        curve_name=_curve_name(pattern, geometry),
        sequence=segment.order,
        group=group,
        group_name="Tiles" if is_tiled else "Blocks of queries",
        reads_group=is_tiled,
        is_shared=is_shared,
        shared_reads_all=pattern.share == "two-way",
        subtitle=f"slid by {int(cuts[0])}" if is_tiled else "",
        facts=_facts(pattern, summary, geometry, segment, cuts if is_tiled else None, near),
    )


def _tile_of_cell(segment: Segment, cuts: Tensor) -> Tensor:
    """The tile of every token in raster order; shared tokens lie where the curve passes them."""
    start, stop = segment.ring
    tile = torch.zeros(len(segment.order), dtype=torch.long)
    if start < stop:
        positions = torch.cat([segment.places, torch.arange(stop - start)])
        tile[segment.order] = tiling.tile_at(positions, cuts)
    return tile


def _curve_name(pattern: Pattern, geometry: Geometry) -> str:
    curve = curve_of(pattern, geometry.grid)
    if curve is None:
        return f"{pattern.curve.capitalize()} order"
    return f"Hilbert curve, {'closed' if curve.closed else 'open'}"


def _facts(
    pattern: Pattern, summary: Summary, geometry: Geometry, segment: Segment, cuts: Tensor | None, near: Plan
) -> list[str]:
    facts = [
        f"{_num_around(segment, near):,} tokens around each block of {near.q_block}"
        if cuts is None
        else _tile_fact(cuts)
    ]
    if segment.num_shared:
        manner = "read and are read by all" if pattern.share == "two-way" else "are read by all"
        facts.append(f"{segment.num_shared} shared tokens {manner}")
    if pattern.text_reads == "summary" and geometry.text:
        facts.append("text reads the image in summary")
    if pattern.far is not None:
        weighted = "weighted " if summary == "weighted" else ""
        facts.append(f"far field: {weighted}means of {pattern.far} tokens")
    return facts


def _tile_fact(cuts: Tensor) -> str:
    sizes = [size for size in cuts.diff().tolist() if size]
    span = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{max(sizes, default=0)}"
    return f"{len(sizes)} tiles of {span} tokens"


def _num_around(segment: Segment, near: Plan) -> int:
    """Tokens of the ring that the block in its middle reads."""
    start, stop = segment.ring
    begins = torch.arange(near.num_columns) * near.k_block
    inside = ((begins + near.k_block).clamp(max=stop) - begins.clamp(min=start)).clamp(min=0)
    row = min((start + stop) // 2 // near.q_block, near.num_rows - 1)
    return int(inside[near.block_counts()[0, 0, row] > 0].sum())
