"""Choosing tokens that stand for the others, in Triton: one program per region runs the whole greedy loop.

The similarities are one batched matrix product. A program reads its region's; up to 128 tokens they stay in registers,
beyond that they are read again for every choice, out of the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize

from nearfield.kernels import is_interpreted

MOST_TOKENS = 256
_MOST_HELD = 128
"""256 x 256 numbers would be all the registers of a multiprocessor."""

_STEPS = tl.constexpr(2**15)
_NEEDS_NOBODY = tl.constexpr(2**30)


@triton.jit
def _load_similarity(base, row, column, length, n):
    """Similarities in whole steps; NaN counts as the least there is, and so does what does not exist."""
    exists = (row < length) & (column < length)
    cosine = tl.load(base + row * n + column, mask=exists, other=-1.0)
    cosine = tl.where(cosine == cosine, cosine, -1.0)
    return tl.floor(cosine * _STEPS + 0.5).to(tl.int32)


@triton.jit
def _locate_kernel(
    similarity, lengths, counts, chosen, num_regions, n, most, SIDE: tl.constexpr, HELD: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    region = program % num_regions
    length = tl.load(lengths + region)
    count = tl.minimum(tl.load(counts + region), length)
    similarity += program * n * n

    lane = tl.arange(0, SIDE)
    if HELD:
        matrix = _load_similarity(similarity, lane[:, None], lane[None, :], length, n)
    # How well each token is represented so far.
    covered = tl.where(lane < length, -_STEPS, _NEEDS_NOBODY)
    is_chosen = tl.zeros([SIDE], tl.int32)
    for _ in range(count):
        if not HELD:
            matrix = _load_similarity(similarity, lane[:, None], lane[None, :], length, n)
        gain = tl.sum(tl.maximum(matrix - covered[None, :], 0), 1)
        gain = tl.where((lane < length) & (is_chosen == 0), gain, -1)
        best = tl.min(tl.where(gain == tl.max(gain, 0), lane, SIDE), 0)
        is_chosen = tl.where(lane == best, 1, is_chosen)
        covered = tl.maximum(covered, _load_similarity(similarity, best, lane, length, n))
    place = tl.cumsum(is_chosen, 0) - 1
    tl.store(chosen + program * most + place, lane, mask=is_chosen > 0)


def unsupported(features: Tensor) -> str | None:
    """Why the kernel cannot choose among these tokens, or None."""
    if not features.is_cuda and not is_interpreted():
        return f"the tensors are on {features.device}"
    if features.dtype == torch.float64:
        return "float64 is for the reference"
    if features.shape[2] > MOST_TOKENS:
        return f"regions of {features.shape[2]} tokens are larger than {MOST_TOKENS}"
    return None


def locate(features: Tensor, lengths: Tensor, counts: Tensor, most: int) -> Tensor:
    """See `nearfield.reference.locate`."""
    batch, regions, n, _ = features.shape
    unit = normalize(features.float(), dim=-1)
    similarity = (unit @ unit.mT).contiguous()
    chosen = torch.full((batch, regions, most), n, device=features.device, dtype=torch.int32)
    side = max(16, triton.next_power_of_2(n))
    _locate_kernel[(batch * regions,)](
        similarity, lengths, counts, chosen, regions, n, most,
        SIDE=side, HELD=side <= _MOST_HELD, num_warps=4 if side <= 64 else 8,
    )  # fmt: skip
    return chosen
