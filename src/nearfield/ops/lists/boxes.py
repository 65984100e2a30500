"""Lists of single keys as boxes: stretches of consecutive keys, which a copy engine loads at once."""

import torch

from nearfield._checks import wrong_value
from nearfield.plan import BOX, Boxes, Plan

_INT32 = 2**31


def find_boxes(plan: Plan) -> Boxes:
    """The lists as stretches of consecutive keys, where `k_block` is 1. Waits for the device; computed once per plan.

    A kernel that reads boxes may also load what follows a short one, and weigh it zero: a NaN there may come out.
    """
    if plan.prepared.boxes is None:
        with torch.inference_mode(False):
            plan.prepared.boxes = _found_boxes(plan)
    return plan.prepared.boxes


def _found_boxes(plan: Plan) -> Boxes:
    if plan.k_block != 1:
        wrong_value("k_block", "be 1 where lists are to be boxes", plan.k_block)
    if plan.num_keys > _INT32 // (2 * BOX):
        wrong_value(
            "num_keys", f"be at most {_INT32 // (2 * BOX)} where lists are to be boxes", plan.num_keys
        )
    blocks = plan.blocks.flatten(0, 1)
    row, used = (x.flatten(0, 1) for x in plan.entry_rows())
    begins = used.clone()
    begins[:, 1:] &= (blocks.diff() != 1) | (row.diff() != 0)
    # Each stretch ends where the next one of its list begins, the last where its list ends; it is cut into boxes.
    of_list, slot = begins.nonzero().unbind(1)
    end = used.sum(1)[of_list]
    end[:-1] = torch.where(of_list[1:] == of_list[:-1], slot[1:], end[:-1])
    pieces = (end - slot + BOX - 1) // BOX
    stretch = torch.repeat_interleave(pieces)
    number = torch.arange(len(stretch), device=plan.device)
    place = slot[stretch] + (number - (pieces.cumsum(0) - pieces)[stretch]) * BOX
    of_list, length = of_list[stretch], (end[stretch] - place).clamp(max=BOX)
    counts = torch.bincount(
        of_list * plan.num_rows + row[of_list, place], minlength=len(blocks) * plan.num_rows
    )
    offsets = torch.nn.functional.pad(counts.view(len(blocks), -1).cumsum(1), (1, 0))
    boxes = blocks.new_zeros(len(blocks), max(1, int(offsets[:, -1].max())))
    before = offsets[:, -1].cumsum(0) - offsets[:, -1]
    boxes[of_list, number - before[of_list]] = blocks[of_list, place] * (2 * BOX) + length.int()
    shape = plan.blocks.shape[:2]
    return Boxes(offsets.int().view(*shape, -1), boxes.view(*shape, -1))
