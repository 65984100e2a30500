"""Choosing tokens that stand for the others, in Triton: one program per region runs the whole greedy loop.

The similarities are one batched matrix product. A program reads its region's: up to 64 tokens they stay in registers,
up to 256 they are read again for every choice, piece by piece, out of the cache. Beyond that, what each candidate would
add is remembered, and a choice reads the similarities of those tokens alone that it represents better than before: in
all a few times the matrix, not once for every choice. Sums are of whole steps, so both ways choose the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import normalize, pad

from nearfield.ops._triton import unsupported_tensor
from nearfield.ops._triton.launch import next_power_of_two

MOST_TOKENS = 16384
_FEW = 256
"""Tokens of a region up to which all gains are computed anew for every choice."""

_PIECE = 64
"""Candidates that are weighed at once; the similarities of more do not fit in registers."""

_STEPS = tl.constexpr(2**15)
_NEEDS_NOBODY = tl.constexpr(2**30)


@triton.jit
def _load_similarity(base, row, column, length, n):
    """Similarities in whole steps; NaN counts as the least there is, and so does what does not exist."""
    exists = (row < length) & (column < length)
    return _in_steps(tl.load(base + row * n + column, mask=exists, other=-1.0))


@triton.jit
def _load_row(base, row, token, length, n):
    """The same for a row that exists, of a matrix that is `n` wide for the sake of 16-byte loads."""
    steps = _in_steps(tl.load(base + row * n + token, mask=token < n, other=-1.0))
    return tl.where(token < length, steps, -_STEPS)


@triton.jit
def _in_steps(cosine):
    cosine = tl.where(cosine == cosine, cosine, -1.0)
    return tl.floor(cosine * _STEPS + 0.5).to(tl.int32)


@triton.jit
def _choose_destinations_kernel(
    similarity, lengths, counts, chosen, num_regions, n, most, SIDE: tl.constexpr, PIECE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    region = program % num_regions
    length = tl.load(lengths + region)
    count = tl.minimum(tl.load(counts + region), length)
    similarity += program * n * n

    token = tl.arange(0, SIDE)
    candidate = tl.arange(0, PIECE)
    if PIECE == SIDE:
        matrix = _load_similarity(similarity, candidate[:, None], token[None, :], length, n)
    # How well each token is represented so far.
    covered = tl.where(token < length, -_STEPS, _NEEDS_NOBODY)
    is_chosen = tl.zeros([SIDE], tl.int32)
    for _ in range(count):
        most_gain = -1
        best = 0
        for first in range(0, SIDE, PIECE):
            row = first + candidate
            if PIECE != SIDE:
                matrix = _load_similarity(similarity, row[:, None], token[None, :], length, n)
            gain = tl.sum(tl.maximum(matrix - covered[None, :], 0), 1)
            was_chosen = tl.sum(tl.where(row[:, None] == token[None, :], is_chosen[None, :], 0), 1)
            gain = tl.where((row < length) & (was_chosen == 0), gain, -1)
            highest = tl.max(gain, 0)
            winner = tl.min(tl.where(gain == highest, row, SIDE), 0)
            best = tl.where(highest > most_gain, winner, best)  # of equal ones the earlier piece's
            most_gain = tl.maximum(highest, most_gain)
        is_chosen = tl.where(token == best, 1, is_chosen)
        covered = tl.maximum(covered, _load_similarity(similarity, best, token, length, n))
    place = tl.cumsum(is_chosen, 0) - 1
    tl.store(chosen + program * most + place, token, mask=is_chosen > 0)


@triton.jit
def _choose_many_kernel(
    similarity, transposed, lengths, counts, chosen, num_regions, n, most, SIDE: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    region = program % num_regions
    length = tl.load(lengths + region)
    count = tl.minimum(tl.load(counts + region), length)
    similarity += program * n * n
    transposed += program * n * n

    token = tl.arange(0, SIDE)
    exists = token < length
    covered = tl.where(exists, -_STEPS, _NEEDS_NOBODY)
    gain = tl.zeros([SIDE], tl.int32)
    for helped in range(length):
        # Products that are rounded (tf32) may come out below the least there is.
        gain += tl.maximum(_load_row(transposed, helped, token, length, n) + _STEPS, 0)
    is_chosen = tl.zeros([SIDE], tl.int32)
    for _ in range(count):
        is_open = exists & (is_chosen == 0)
        most_gain = tl.max(tl.where(is_open, gain, -1), 0)
        best = tl.min(tl.where(is_open & (gain == most_gain), token, SIDE), 0)
        is_chosen = tl.where(token == best, 1, is_chosen)
        row = _load_row(similarity, best, token, length, n)
        is_helped = row > covered
        helped = tl.min(tl.where(is_helped, token, SIDE), 0)
        while helped < length:
            # Whoever would have represented this token better than before now adds less by it, or nothing.
            before = tl.sum(tl.where(token == helped, covered, 0), 0)
            after = tl.sum(tl.where(token == helped, row, 0), 0)
            by_candidate = _load_row(transposed, helped, token, length, n)
            gain -= tl.maximum(by_candidate - before, 0) - tl.maximum(by_candidate - after, 0)
            helped = tl.min(tl.where(is_helped & (token > helped), token, SIDE), 0)
        covered = tl.maximum(covered, row)
    place = tl.cumsum(is_chosen, 0) - 1
    tl.store(chosen + program * most + place, token, mask=is_chosen > 0)


def unsupported(features: Tensor) -> str | None:
    """Why the kernel cannot choose among these tokens, or None."""
    if features.shape[2] > MOST_TOKENS:
        return f"regions of {features.shape[2]} tokens are larger than {MOST_TOKENS}"
    return unsupported_tensor(features)


def choose_destinations(features: Tensor, lengths: Tensor, counts: Tensor, most: int) -> Tensor:
    """See `nearfield.ops.merge.reference.destinations`."""
    batch, regions, n, _ = features.shape
    unit = normalize(features.float(), dim=-1)
    if n > _FEW:
        unit = pad(unit, (0, 0, 0, -n % 16))
    similarity = (unit @ unit.mT).contiguous()
    chosen = torch.full((batch, regions, most), n, device=features.device, dtype=torch.int32)
    side = max(16, next_power_of_two(n))
    if n > _FEW:
        _choose_many_kernel[(batch * regions,)](
            similarity, similarity.mT.contiguous(), lengths, counts, chosen, regions, unit.shape[2], most,
            SIDE=side, num_warps=16 if side > 1024 else 8,
        )  # fmt: skip
        return chosen
    _choose_destinations_kernel[(batch * regions,)](
        similarity, lengths, counts, chosen, regions, n, most,
        SIDE=side, PIECE=min(side, _PIECE), num_warps=4 if side < 64 else 8,
    )  # fmt: skip
    return chosen
