"""Who reads whom exactly: a token reads the text, what is shared, and of every image its tiles or what is around."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield.layout import Geometry, tiling
from nearfield.methods.hilbert.around import spans_around
from nearfield.methods.hilbert.layout import Layout, Pattern, layout_of
from nearfield.plan import Plan
from nearfield.plan import builders as planning


@lru_cache(maxsize=256)
def near_plan(
    pattern: Pattern, geometry: Geometry, phase: int, q_block: int, k_block: int, device: str
) -> Plan:
    """The plan of all layers whose tiles have slid to one `phase` of the cycle."""
    layout = layout_of(pattern, geometry, q_block)
    if pattern.near == "around":
        of_images = spans_around(pattern, geometry, q_block, k_block)
    else:
        of_images = _tile_spans(pattern, geometry, layout, phase, q_block)
    always = [geometry.text_span, *(segment.shared for segment in layout.segments)]
    of_everyone = torch.tensor(always, device="cpu").expand(len(of_images), -1, -1)
    everything = torch.tensor([[(0, geometry.num_tokens)]], device="cpu")
    reads_all = _reads_all(pattern, geometry, layout, q_block)
    of_some = torch.where(reads_all[:, None, None], everything, 0)
    starts, stops = torch.cat([of_some, of_everyone, of_images], dim=1).unbind(-1)
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
        return Plan(offsets, torch.cat(blocks, dim=1), *sizes, similar_rows=first.similar_rows, check=False)


def _tile_spans(pattern: Pattern, geometry: Geometry, layout: Layout, phase: int, q_block: int) -> Tensor:
    """The spans of every image that the tiles of each row's tokens are, `[rows, spans, 2]`; empty ones of the others.

    Tile 0 is a token of no tile; it is cut off at the end.
    """
    rows = -(-geometry.num_tokens // q_block)
    tile = torch.zeros(rows * q_block, dtype=torch.int64, device="cpu")
    spans = []
    for segment in layout.segments:
        start, stop = segment.ring
        begins = layout.cuts(segment, phase, pattern.cycle)
        spans.append(tiling.tile_spans(segment.ring, begins).flatten(0, 1))
        tile[start:stop] = tiling.tile_at(torch.arange(stop - start, device="cpu"), begins) + 1
        if pattern.share == "keys" and start < stop:
            tile[slice(*segment.shared)] = tiling.tile_at(segment.places, begins) + 1
    is_member = torch.zeros(rows, layout.tiles + 1, dtype=torch.bool, device="cpu")
    is_member.scatter_(1, tile.view(rows, q_block), True)
    reads = is_member[:, 1:].repeat_interleave(2, dim=1).repeat(1, len(spans))
    return torch.where(reads[..., None], torch.cat(spans), 0)


def _reads_all(pattern: Pattern, geometry: Geometry, layout: Layout, q_block: int) -> Tensor:
    """Which rows hold a token that reads everything, `[rows]`: what is shared two-way, and text, unless it reads
    summaries."""
    rows = -(-geometry.num_tokens // q_block)
    everything = torch.zeros(rows * q_block, dtype=torch.bool, device="cpu")
    everything[slice(*geometry.text_span)] = pattern.text_reads == "all"
    for segment in layout.segments:
        if pattern.share == "two-way" or segment.num_shared == len(segment.order):
            everything[slice(*segment.shared)] = True
    return everything.view(rows, q_block).any(dim=1)
