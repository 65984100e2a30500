"""Choosing, of every row of scores, the columns that are worth reading, in Triton: without a sort.

One program holds a row. The least score that is still kept is found by halving the range of numbers: 32 sums over the
row. Scores compare as their bits do, once those of negative numbers are turned round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import next_power_of_two

MOST_COLUMNS = 32768


@triton.jit
def _choose_kernel(
    scores, whole, always, keep, dropped, num_rows, num_columns, num_heads, heads_per_key, goal,
    BY_MASS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    batch_head = program // num_rows
    key_head = (
        batch_head // num_heads * (num_heads // heads_per_key) + batch_head % num_heads // heads_per_key
    )
    column = tl.arange(0, COLUMNS)
    exists = column < num_columns
    score = tl.load(scores + program * num_columns + column, mask=exists, other=-float("inf"))
    best = tl.max(score, 0)
    weight = tl.where(exists, tl.exp(score - best), 0.0)
    total = tl.sum(weight, 0)

    bits = (score + 0.0).to(tl.int32, bitcast=True)  # one zero instead of two
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    worth = weight if BY_MASS else tl.where(exists, 1.0, 0.0)
    wanted = goal * total if BY_MASS else goal
    # Kept are the ranks from `least` on, where `least` is enough and `above` is not.
    least = tl.full([], -2147483648, tl.int64)
    above = tl.full([], 2147483648, tl.int64)
    for _ in range(32):
        middle = (least + above) >> 1
        held = tl.sum(tl.where(rank >= middle.to(tl.int32), worth, 0.0), 0)
        least = tl.where(held >= wanted, middle, least)
        above = tl.where(held >= wanted, above, middle)
    last = least.to(tl.int32)
    is_better = (rank > last) & exists
    is_last = (rank == last) & exists
    held = tl.sum(tl.where(is_better, worth, 0.0), 0)
    one = tl.max(tl.where(is_last, worth, 0.0), 0)
    # Of equal ones the first, until the goal is reached.
    before = tl.cumsum(is_last.to(tl.int32), 0) - 1
    chosen = is_better | (is_last & (held + before.to(tl.float32) * one < wanted))

    is_number = (total == total) & (total < float("inf"))
    is_whole = (tl.load(whole + program) != 0) | (is_number == 0)
    always_here = tl.load(always + key_head * num_columns + column, mask=exists, other=0) != 0
    kept = chosen | always_here | is_whole
    tl.store(keep + program * num_columns + column, kept.to(tl.int8), mask=exists)
    lost = tl.sum(tl.where(kept, 0.0, weight), 0) / total
    tl.store(dropped + program, tl.where(is_whole, 0.0, lost))


def unsupported(scores: Tensor) -> str | None:
    """Why the kernel cannot choose among these scores, or None."""
    if scores.dtype != torch.float32:
        return f"scores are {scores.dtype}, not float32"
    if scores.shape[-1] > MOST_COLUMNS:
        return f"{scores.shape[-1]} columns are more than the {MOST_COLUMNS} that a program holds"
    return unsupported_tensor(scores)


def choose(
    scores: Tensor, whole: Tensor, always: Tensor, *, mass: float | None, count: int
) -> tuple[Tensor, Tensor]:
    """See `nearfield.ops.predict.reference.choose`."""
    batch, heads, rows, columns = scores.shape
    keep = torch.empty(scores.shape, device=scores.device, dtype=torch.bool)
    dropped = torch.empty(batch, heads, rows, device=scores.device, dtype=torch.float32)
    lanes = max(32, next_power_of_two(columns))
    _choose_kernel[(batch * heads * rows,)](
        scores.contiguous(), whole.contiguous().view(torch.uint8), always.contiguous().view(torch.uint8),
        keep.view(torch.uint8), dropped, rows, columns, heads, heads // always.shape[1],
        float(min(count, columns)) if mass is None else float(mass),
        BY_MASS=mass is not None, COLUMNS=lanes, num_warps=max(4, min(16, lanes // 1024)),
    )  # fmt: skip
    return keep, dropped
