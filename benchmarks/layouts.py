"""The plans that are measured and explained: random lists, tiles of the curve, and slices of a plan."""

import math

import torch

from nearfield import Plan, planning
from nearfield.cli.presets import Preset

CYCLE = 4
"""Layers after which the sliding tiles are back where they started."""

_CHUNK_CELLS = 2**25


def random_lists(preset: Preset, grain: int, q_block: int, device: torch.device | str, seed: int = 0) -> Plan:
    """Sorted random ids for every query block, as many as the preset keeps.

    Every head has its own lists, except below grain 16, where they would be large and are shared.
    """
    tokens = preset.tokens
    rows, columns = -(-tokens // q_block), -(-tokens // grain)
    count = kept_ids(preset, grain)
    heads = preset.heads if grain >= 16 else 1
    generator = torch.Generator(device).manual_seed(seed)
    chunk = max(1, _CHUNK_CELLS // columns)
    pieces = []
    for start in range(0, heads * rows, chunk):
        size = min(chunk, heads * rows - start)
        scores = torch.rand(size, columns, generator=generator, device=device)
        pieces.append(scores.topk(count, dim=1, sorted=False).indices.to(torch.int32).sort(dim=1).values)
    blocks = torch.cat(pieces).view(1, heads, rows * count)
    offsets = torch.arange(rows + 1, device=device, dtype=torch.int32) * count
    lists = offsets.expand(1, heads, rows + 1).contiguous(), blocks
    return Plan(*lists, q_block, grain, tokens, tokens, uniform=True, check=False)


def kept_ids(preset: Preset, grain: int) -> int:
    """Ids per row: the kept share of the keys in whole steps of 128 keys, the widest compute tile."""
    keys = round(preset.kept * preset.tokens / 128) * 128
    columns = -(-preset.tokens // grain)
    return max(1, min(columns, keys // grain))


def tiles(
    preset: Preset,
    count: int,
    *,
    layer: int = 0,
    centre: bool = False,
    q_block: int = 128,
    k_block: int = 64,
    device: torch.device | str = "cpu",
) -> Plan:
    """Tiles along the curve, sliding with the layer; the text, and on request the centre, reads and is read by all.

    A shared centre stands after the text and before the rest of the image, so the two are one span. The ring of what
    is left no longer divides by `count`: its tiles are rounded to whole blocks, so that no row reads a block for the
    sake of a few tokens, and there may be one more or one less of them.
    """
    shared = preset.text + (preset.centre if centre else 0)
    run = run_length(preset, count)
    if centre:
        run = rounded_run(preset.tokens - shared, count, max(q_block, k_block))
    return planning.ring(
        preset.tokens,
        run,
        shift=layer_shift(run, layer),
        ring=(shared, preset.tokens),
        both=((0, shared),) if shared else (),
        q_block=q_block,
        k_block=k_block,
        device=device,
    )


def run_length(preset: Preset, count: int) -> int:
    """Tokens per tile; where `count` does not divide the image, the last tile is shorter."""
    return math.ceil(preset.image / count)


def rounded_run(length: int, count: int, block: int) -> int:
    """Tokens per tile of a ring of `length` tokens, in whole blocks, for about `count` tiles."""
    return max(1, round(length / count / block)) * block


def layer_shift(run: int, layer: int) -> int:
    """How far the tiles of a layer slide: a quarter of a tile per layer, over a cycle of four."""
    return run * (layer % CYCLE) // CYCLE


def rows_of(plan: Plan, start: int, stop: int) -> Plan:
    """The plan of query blocks `start` to `stop` alone (lists shared by batch and heads only)."""
    first, last = plan.offsets[0, 0, [start, stop]].tolist()
    offsets = plan.offsets[..., start : stop + 1] - first
    queries = min(stop * plan.q_block, plan.num_queries) - start * plan.q_block
    blocks = plan.blocks[..., first:last].contiguous()
    return Plan(offsets.contiguous(), blocks, plan.q_block, plan.k_block, queries, plan.num_keys, check=False)
