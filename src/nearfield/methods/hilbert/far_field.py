"""The far field: what lies outside the tiles, read in summary."""

from functools import lru_cache

import torch
from torch import Tensor

from nearfield.layout import Geometry, Span
from nearfield.methods.hilbert.layout import Layout, Pattern, layout_of
from nearfield.methods.hilbert.plans import near_plan, per_head, turns_of_heads
from nearfield.methods.layers import FarField
from nearfield.ops import find_boxes
from nearfield.plan import Plan
from nearfield.plan import builders as planning


@lru_cache(maxsize=256)
def far_field_of(
    pattern: Pattern, geometry: Geometry, phase: int, q_block: int, k_block: int, device: str
) -> FarField | None:
    """Every row reads the windows of what it does not read exactly. None where nothing is left to summarise."""
    assert pattern.far is not None
    spans = far_spans(layout_of(pattern, geometry, q_block), geometry, k_block)
    if not spans:
        return None
    near = near_plan(pattern, geometry, phase, q_block, k_block, device)
    # A graph of training saves these: they must not be made in inference mode.
    with torch.inference_mode(False):
        begins = [windows_of(span, pattern.far) for span in spans]
        ends = [torch.tensor([stop], device="cpu") for _, stop in spans]
        sizes = torch.cat([torch.cat(pair).diff() for pair in zip(begins, ends, strict=True)])
        starts = torch.cat(begins).to(device)
        readers = near.block_counts()[0, 0].index_select(1, starts // k_block) == 0
        plan = planning.from_mask(
            readers,
            q_block=q_block,
            k_block=1,
            num_queries=geometry.num_tokens,
            num_keys=len(sizes),
            # Who reads a summary reads its neighbours, but for the edges of what it reads exactly.
            similar_rows=True,
        )
        _prepare_boxes(plan)
        bias = sizes.double().log().float()
        sizes = sizes.int().to(device)
        return FarField(spans, pattern.far, starts, sizes, bias.to(device), plan, readers[None, None])


@lru_cache(maxsize=64)
def interleaved_far_field(
    pattern: Pattern, geometry: Geometry, phase: int, heads: int, q_block: int, k_block: int, device: str
) -> FarField | None:
    """The same where heads slide, too."""
    turns = turns_of_heads(pattern, phase, heads)
    fields = [far_field_of(pattern, geometry, turn, q_block, k_block, device) for turn in turns]
    plans = [field.plan for field in fields if field is not None]
    if fields[0] is None:
        return None
    plan = per_head(plans)
    _prepare_boxes(plan)
    readers = [field.readers for field in fields if field is not None and field.readers is not None]
    return fields[0]._replace(plan=plan, readers=torch.cat(readers, dim=1))


def _prepare_boxes(plan: Plan) -> None:
    """Find the few stretches of summaries that a row reads: all but those of its tiles. Only a kernel uses them."""
    if plan.device.type == "cuda":
        find_boxes(plan)


def far_spans(layout: Layout, geometry: Geometry, k_block: int) -> tuple[Span, ...]:
    """The tokens that are summarised, in pieces of which a row reads all or nothing exactly.

    A ring need not begin and end on a multiple of `k_block`. The block of keys that it shares with its neighbour is
    read whole by whoever reads the neighbour, so its part of that block is a piece of its own; where the neighbour is
    the text or a shared region, everyone reads that part, and it needs no summary.
    """
    always = [geometry.text_span, *(segment.shared for segment in layout.segments)]
    pieces = []
    for start, stop in (segment.ring for segment in layout.segments):
        head = min(-(-start // k_block) * k_block, stop)
        tail = stop if stop == geometry.num_tokens else max(stop // k_block * k_block, head)
        pieces += [(start, head), (head, tail), (tail, stop)]
    return tuple(
        (start, stop)
        for start, stop in pieces
        if start < stop and not any(_meet((start, stop), span, k_block) for span in always)
    )


def _meet(first: Span, second: Span, block: int) -> bool:
    """Whether two spans have tokens in one block."""
    if first[0] == first[1] or second[0] == second[1]:
        return False
    return first[0] // block <= (second[1] - 1) // block and second[0] // block <= (first[1] - 1) // block


def windows_of(span: Span, window: int) -> Tensor:
    """The first token of each window of a span, `[windows]`. Windows end at multiples of `window` in the sequence."""
    start, stop = span
    inner = torch.arange(start // window + 1, -(-stop // window), device="cpu") * window
    return torch.cat([torch.tensor([start], device="cpu"), inner])
