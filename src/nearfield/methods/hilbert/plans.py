"""Who reads whom exactly: a token reads the text, the shared tokens, and of every image the tiles it is in."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield import planning, tiling
from nearfield.geometry import Geometry
from nearfield.methods.hilbert.layout import Layout, Pattern, layout_of
from nearfield.plan import Plan
from nearfield.tiling import Segment


@lru_cache(maxsize=256)
def near_plan(
    pattern: Pattern, geometry: Geometry, phase: int, q_block: int, k_block: int, device: str
) -> Plan:
    """The plan of all layers whose tiles have slid to one `phase` of the cycle."""
    layout = layout_of(pattern, geometry, q_block)
    member = _membership(pattern, geometry, layout, phase, q_block)
    always = [geometry.text_span, *(segment.shared for segment in layout.segments)]
    spans = [
        tiling.tile_spans(segment.ring, _cuts(pattern, layout, segment, phase)).flatten(0, 1)
        for segment in layout.segments
    ]
    in_tile = member.tiles.repeat_interleave(2, dim=1).repeat(1, len(spans))
    everyone = torch.ones(len(in_tile), len(always), dtype=torch.bool, device="cpu")
    reads = torch.cat([member.reads_all[:, None], everyone, in_tile], dim=1)
    read = torch.cat([torch.tensor([(0, geometry.num_tokens), *always], device="cpu"), *spans])
    starts, stops = (torch.where(reads, ends, 0) for ends in read.unbind(-1))
    with torch.inference_mode(False):
        return planning.from_spans(
            starts,
            stops,
            q_block=q_block,
            k_block=k_block,
            num_queries=geometry.num_tokens,
            num_keys=geometry.num_tokens,
            device=device,
        )


@lru_cache(maxsize=64)
def interleaved_near_plan(
    pattern: Pattern, geometry: Geometry, phase: int, heads: int, q_block: int, k_block: int, device: str
) -> Plan:
    """The same where heads slide, too."""
    plans = [near_plan(pattern, geometry, turn, q_block, k_block, device) for turn in range(pattern.cycle)]
    return per_head([plans[turn] for turn in turns_of_heads(pattern, phase, heads)])


def turns_of_heads(pattern: Pattern, phase: int, heads: int) -> list[int]:
    """The phase of each head: every head is one further than the one before."""
    return [(phase + head) % pattern.cycle for head in range(heads)]


def per_head(plans: Sequence[Plan]) -> Plan:
    """One plan whose heads read as the given plans do."""
    capacity = max(plan.blocks.shape[2] for plan in plans)
    with torch.inference_mode(False):
        offsets = torch.cat([plan.offsets for plan in plans], dim=1)
        blocks = [pad(plan.blocks, (0, capacity - plan.blocks.shape[2])) for plan in plans]
        first = plans[0]
        sizes = first.q_block, first.k_block, first.num_queries, first.num_keys
        return Plan(offsets, torch.cat(blocks, dim=1), *sizes, check=False)


class _Membership(NamedTuple):
    """Which tiles the tokens of each row are in, `[rows, tiles]`, and which rows read everything, `[rows]`."""

    tiles: Tensor
    reads_all: Tensor


def _membership(
    pattern: Pattern, geometry: Geometry, layout: Layout, phase: int, q_block: int
) -> _Membership:
    """Tile 0 is a token of no tile; it is cut off at the end."""
    rows = -(-geometry.num_tokens // q_block)
    tile = torch.zeros(rows * q_block, dtype=torch.int64, device="cpu")
    everything = torch.zeros(rows * q_block, dtype=torch.bool, device="cpu")
    everything[slice(*geometry.text_span)] = True
    for segment in layout.segments:
        start, stop = segment.ring
        begins = _cuts(pattern, layout, segment, phase)
        tile[start:stop] = tiling.tile_at(torch.arange(stop - start, device="cpu"), begins) + 1
        if pattern.share == "two-way" or start == stop:
            everything[slice(*segment.shared)] = True
        else:
            tile[slice(*segment.shared)] = tiling.tile_at(segment.places, begins) + 1
    in_tile = torch.zeros(rows, layout.tiles + 1, dtype=torch.bool, device="cpu")
    in_tile.scatter_(1, tile.view(rows, q_block), True)
    return _Membership(in_tile[:, 1:], everything.view(rows, q_block).any(dim=1))


def _cuts(pattern: Pattern, layout: Layout, segment: Segment, phase: int) -> Tensor:
    return tiling.cuts(segment.ring, layout.tiles, (phase, pattern.cycle), layout.unit)
