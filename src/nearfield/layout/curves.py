"""Orders of the cells of a grid in which neighbours in the sequence are neighbours in the image.

Block-sparse attention is fast when the keys that a query reads are consecutive in memory, and good when they
are near it in the image. A Hilbert curve gives both: a run of consecutive tokens is a compact patch. This
module makes such curves for grids of one, two or three sides of any length, open and closed, and measures how
compact their runs are.

An order is an int64 tensor on the CPU: ``order[i]`` is the raster (row-major) index of the i-th token of the
curve, so ``tokens[order]`` follows the curve and ``moved[inverse(order)]`` brings the tokens back.
"""

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

__all__ = ["Choice", "choose", "hilbert", "inverse", "locality", "morton", "raster", "step_lengths"]

Variant = Literal["auto", "generalised", "cropped"]
Grid = tuple[int, ...]

DEFAULT_RUNS = (64, 256, 1024)


class Choice(NamedTuple):
    """Which Hilbert curve serves a grid, and why; ``score`` is its `locality`."""

    variant: str
    closed: bool
    score: float
    reason: str

    def __str__(self) -> str:
        return f"{_curve_name(self.variant, self.closed)}, locality {self.score:.3f} ({self.reason})"


def hilbert(grid: Sequence[int], closed: bool | None = None, variant: Variant = "auto") -> Tensor:
    """The order of a Hilbert curve through every cell of a grid of one to three sides of any length.

    Variants:

    - ``"generalised"``: the box is halved recursively, with parities chosen so that every step has length 1,
      for every grid. With ``closed=True`` the wrap from the last token to the first has length 1 too. The
      open curve of an odd x odd rectangle is laid out as a ring whose ends are 2 apart, the least that parity
      allows.
    - ``"cropped"``: the classic curve of the enclosing power-of-two square or cube, less the cells outside
      the grid. Where the grid is made of aligned 2^k squares (cubes), so are the aligned runs of 4^k (8^k)
      tokens, but the curve jumps wherever it left the grid.
    - ``"auto"``: the one with the lowest `locality` score, as `choose` reports.

    ``closed=None`` takes the closed curve where there is one and its score is the lowest. A closed curve
    exists if and only if the number of cells is even and at least two sides are longer than 1, or there are
    at most two cells; elsewhere ``closed=True`` raises ValueError. A grid with one side longer than 1 is a
    line: its order is the identity.
    """
    sides = _check_grid(grid)
    candidates = _candidates(sides, closed, variant)
    if len(candidates) == 1:
        return _build(sides, *candidates[0]).clone()
    best = _choose(sides, closed, variant)
    return _build(sides, best.variant, best.closed).clone()


def choose(grid: Sequence[int], closed: bool | None = None, variant: Variant = "auto") -> Choice:
    """Which curve ``hilbert(grid, closed, variant)`` returns, its score, and why."""
    sides = _check_grid(grid)
    _candidates(sides, closed, variant)  # checks the arguments before they become keys of a cache
    return _choose(sides, closed, variant)


def morton(grid: Sequence[int]) -> Tensor:
    """Z-order: cells sorted by the interleaved bits of their coordinates, the last axis varying fastest."""
    sides = _check_grid(grid)
    cells = torch.arange(math.prod(sides), device="cpu")
    bits = _bits_of(max(sides))
    return _interleave(_coordinates(cells, _long_sides(sides)), bits).argsort()


def raster(grid: Sequence[int]) -> Tensor:
    """Row-major order: the identity."""
    return torch.arange(math.prod(_check_grid(grid)), device="cpu")


def inverse(order: Tensor) -> Tensor:
    """The position of each raster index on the curve: ``inverse(order)[order[i]] == i``."""
    _check_permutation(order)
    positions = torch.empty_like(order, dtype=torch.int64)
    positions[order.long()] = torch.arange(order.numel(), device=order.device)
    return positions


def step_lengths(order: Tensor, grid: Sequence[int], wrap: bool = True) -> Tensor:
    """Manhattan length of each step; with ``wrap`` the last entry is the step from the end to the start."""
    sides = _check_grid(grid)
    _check_order(order, sides)
    coordinates = _coordinates(order.cpu().long(), sides)
    lengths = (coordinates.roll(-1, dims=1) - coordinates).abs().sum(dim=0)
    return lengths if wrap else lengths[:-1]


def locality(
    order: Tensor, grid: Sequence[int], runs: Sequence[int] = DEFAULT_RUNS, wrap: bool = True
) -> float:
    """How compact the runs of an order are: 1 is a square or cube, larger is worse.

    The radius of a run is the root mean square distance of its cells from their centroid. The score of a run
    length is the mean radius over the runs that start at every position, divided by the radius of the most
    cube-like box of as many cells that fits in the grid; the result is the mean over ``runs``. A long step
    needs no extra penalty: every run that contains it is torn in two and has a large radius. With ``wrap``
    runs continue from the end of the order to its start, as sliding tiles do.

    Run lengths above half of the cells are left out; if none is left, half of the cells is the run length.
    Grids of fewer than four cells score 1.
    """
    sides = _check_grid(grid)
    _check_order(order, sides)
    half = order.numel() // 2
    lengths = [run for run in _check_runs(runs) if run <= half] or [half]
    if half < 2:
        return 1.0
    coordinates = _coordinates(order.cpu().long(), _long_sides(sides))
    if wrap:
        coordinates = torch.cat([coordinates, coordinates[:, : max(lengths) - 1]], dim=1)
    sums, square_sums = _prefix_sums(coordinates), _prefix_sums(coordinates * coordinates)
    scores = []
    for run in lengths:
        num_runs = order.numel() if wrap else order.numel() - run + 1
        radii = _radii(sums[:, : num_runs + run], square_sums[:, : num_runs + run], run)
        scores.append(radii.mean().item() / _ideal_radius(run, sides))
    return sum(scores) / len(scores)


def _candidates(sides: Grid, closed: bool | None, variant: str) -> list[tuple[str, bool]]:
    """The (variant, closed) pairs that satisfy a request, in the order that breaks ties."""
    _check_request(sides, closed, variant)
    candidates = []
    if variant != "cropped":
        if closed is not False and _why_not_closed(sides) is None:
            candidates.append(("generalised", True))
        if closed is not True:
            candidates.append(("generalised", False))
    if variant != "generalised" and closed is not True:
        candidates.append(("cropped", False))
    is_line = len(_long_sides(sides)) < 2
    return candidates[:1] if is_line else candidates


@lru_cache(maxsize=256)
def _choose(sides: Grid, closed: bool | None, variant: str) -> Choice:
    scored = [
        (locality(_build(sides, *curve), sides), curve) for curve in _candidates(sides, closed, variant)
    ]
    score, (best, is_closed) = min(scored, key=lambda entry: entry[0])
    if len(scored) == 1:
        return Choice(best, is_closed, score, "the only curve that fits the request")
    table = ", ".join(f"{_curve_name(*curve)} {value:.3f}" for value, curve in scored)
    return Choice(best, is_closed, score, f"lowest of: {table}")


def _curve_name(variant: str, closed: bool) -> str:
    return f"{variant} {'closed' if closed else 'open'}"


def _why_not_closed(sides: Grid) -> str | None:
    """The reason why a grid has no closed curve of unit steps, or None where it has one."""
    num_cells = math.prod(sides)
    if num_cells <= 2:
        return None
    if len(_long_sides(sides)) < 2:
        return f"Its {num_cells} cells form a line, and a line of more than two cells has no way back."
    if num_cells % 2:
        return (
            "Each unit step changes the colour of the chessboard, so a closed curve needs an even number of "
            f"cells, and this grid has {num_cells}."
        )
    return None


# Small, because an order of a long video is megabytes.
@lru_cache(maxsize=16)
def _build(sides: Grid, variant: str, closed: bool) -> Tensor:
    long_sides = _long_sides(sides)
    if len(long_sides) < 2:
        return torch.arange(math.prod(sides), device="cpu")
    if variant == "cropped":
        return _cropped(long_sides)
    box = long_sides + (1,) * (3 - len(long_sides))
    pieces = _closed_layout(box) if closed else _open_layout(box)
    coordinates = _join(pieces, {})
    return (coordinates[0] * box[1] + coordinates[1]) * box[2] + coordinates[2]


def _cropped(sides: Grid) -> Tensor:
    """Cells sorted by their rank on the Hilbert curve of the enclosing power-of-two cube.

    From the highest bit down, the half of the cube in which a cell lies decides how the curve inside that
    half is mirrored or transposed; undoing this leaves coordinates whose interleaved bits are the Gray code
    of the rank.
    """
    cells = torch.arange(math.prod(sides), device="cpu")
    coordinates = _coordinates(cells, sides)
    # The curve moves first along the last axis: as the longest, it keeps a flat grid in one part of it.
    axes = [coordinates[axis] for axis in sorted(range(len(sides)), key=lambda axis: sides[axis])]
    bits = _bits_of(max(sides))
    for bit in range(bits - 1, 0, -1):
        lower = (1 << bit) - 1
        for axis in range(len(axes)):
            in_upper_half = (axes[axis] >> bit) & 1 == 1
            mirrored = torch.where(in_upper_half, lower, 0)
            exchanged = torch.where(in_upper_half, 0, (axes[0] ^ axes[axis]) & lower)
            axes[axis] = axes[axis] ^ exchanged
            axes[0] = axes[0] ^ exchanged ^ mirrored
    return _from_gray(_interleave(torch.stack(axes), bits), bits * len(axes)).argsort()


def _from_gray(code: Tensor, bits: int) -> Tensor:
    shift = 1
    while shift < bits:
        code = code ^ (code >> shift)
        shift *= 2
    return code


def _interleave(coordinates: Tensor, bits: int) -> Tensor:
    key = torch.zeros(coordinates.shape[1], dtype=torch.int64, device="cpu")
    for bit in range(bits - 1, -1, -1):
        for axis in coordinates:
            key = key * 2 + ((axis >> bit) & 1)
    return key


def _bits_of(side: int) -> int:
    return max(1, (side - 1).bit_length())


# The generalised curve. A box (a; b, c) is traced from one corner to the other end of its edge of length a,
# its travel axis. Colour the cells as a chessboard: unit steps can join these ends only if a is even or b and
# c are both odd ("fair" boxes). Each split below turns a fair box into fair boxes, end to start, so no step is
# longer than 1. A box depends on its three lengths only, and a grid leads to few different ones (about a
# hundred for 21x90x160), so each is traced once and the work is that of joining tensors.


class Span(NamedTuple):
    """One axis of a piece: the axis of its parent it lies on, its start, its direction and its length."""

    axis: int
    first: int
    sign: int
    length: int


Piece = tuple[Span, Span, Span]
Box = tuple[int, int, int]


def _up(axis: int, first: int, length: int) -> Span:
    return Span(axis, first, 1, length)


def _down(axis: int, end: int, length: int) -> Span:
    """The ``length`` cells before ``end``, from the last one."""
    return Span(axis, end - 1, -1, length)


def _open_layout(sides: Grid) -> list[Piece]:
    """Fair pieces that cover the grid, travelling along the longest side where its parity allows."""
    longest, second, third = _axes_by_length(sides)
    if sides[third] == 1 and sides[longest] % 2 and sides[second] % 2:
        return _ring(sides, second, longest)
    even_axes = [axis for axis in (longest, second, third) if sides[axis] % 2 == 0]
    travel = longest if not even_axes or longest in even_axes else even_axes[0]
    if travel == longest or 2 * sides[longest] <= 3 * sides[travel]:
        return [_whole(sides, travel)]
    # A long box with an odd long side: travel along it to the last part, and there along the even side.
    length = sides[longest]
    part = min(max(sides[travel], sides[second] // 2), length // 2) // 2 * 2 + 1
    rest = length - min(part, length - 2)
    along_longest, along_even = _whole(sides, longest), _whole(sides, travel)
    return [
        _replace(along_longest, _up(longest, 0, rest)),
        _replace(along_even, _up(longest, rest, length - rest)),
    ]


def _replace(piece: Piece, new: Span) -> Piece:
    first, second, third = (new if span.axis == new.axis else span for span in piece)
    return first, second, third


def _closed_layout(sides: Grid) -> list[Piece]:
    """Two fair halves, there and back along the cut between them."""
    longest, second, third = _axes_by_length(sides)
    # The first cut that parity allows: at most 5.2 % worse than the best cut on 1,358 random grids (sides of
    # 16-130, in space 8-50); thinner boxes were not compared.
    for travel, cut in ((second, longest), (longest, second), (longest, third)):
        across = 3 - travel - cut
        if sides[travel] % 2 == 0 or (sides[cut] % 2 == 0 and sides[across] % 2):
            return _ring(sides, travel, cut)
    raise AssertionError(f"no closed layout for {_grid_name(sides)}; `_why_not_closed` must refuse it")


def _ring(sides: Grid, travel: int, cut: int) -> list[Piece]:
    across = 3 - travel - cut
    half = sides[cut] // 2 if sides[travel] % 2 == 0 else _odd_near(sides[cut] // 2)
    there = (_up(travel, 0, sides[travel]), _down(cut, half, half), _up(across, 0, sides[across]))
    back = (
        _down(travel, sides[travel], sides[travel]),
        _up(cut, half, sides[cut] - half),
        _up(across, 0, sides[across]),
    )
    return [there, back]


def _whole(sides: Grid, travel: int) -> Piece:
    others = [axis for axis in _axes_by_length(sides) if axis != travel]
    return (
        _up(travel, 0, sides[travel]),
        _up(others[0], 0, sides[others[0]]),
        _up(others[1], 0, sides[others[1]]),
    )


def _axes_by_length(sides: Grid) -> list[int]:
    return sorted(range(3), key=lambda axis: -sides[axis])


def _join(pieces: list[Piece], traced: dict[Box, Tensor]) -> Tensor:
    parts = []
    for piece in pieces:
        local = _trace((piece[0].length, piece[1].length, piece[2].length), traced)
        rows = {span.axis: span.first + span.sign * local[k] for k, span in enumerate(piece)}
        parts.append(torch.stack([rows[0], rows[1], rows[2]]))
    return torch.cat(parts, dim=1)


def _trace(box: Box, traced: dict[Box, Tensor]) -> Tensor:
    """Coordinates [3, cells] of the curve through a box, in the box's own axes."""
    if box not in traced:
        if box[1:] == (1, 1):
            line = torch.zeros(3, box[0], dtype=torch.int64, device="cpu")
            line[0] = torch.arange(box[0], device="cpu")
            traced[box] = line
        else:
            traced[box] = _join(_split(*box), traced)
    return traced[box]


def _split(a: int, b: int, c: int) -> list[Piece]:
    """Cut a box into pieces of better proportions."""
    if a == 1:  # only the last two cells of an unfair box: see `_split_three`
        return [(_up(1, 0, b), _up(0, 0, 1), _up(2, 0, c))]
    if 2 * a > 3 * max(b, c):
        return _split_two(a, b, c)
    is_flat = 3 * max(b, c) > 4 * min(b, c)
    if is_flat or a % 2:  # the parities of five pieces cannot all be met if a, b and c are odd
        return _split_three(a, b, c, (1, 2)) if b >= c else _split_three(a, c, b, (2, 1))
    has_only_b_even = b % 2 == 0 and c % 2
    return _split_five(a, c, b, (2, 1)) if has_only_b_even else _split_five(a, b, c, (1, 2))


def _split_two(a: int, b: int, c: int) -> list[Piece]:
    first = min(_even_near(a // 2), a - 2)
    first -= first % 2
    return [
        (_up(0, 0, first), _up(1, 0, b), _up(2, 0, c)),
        (_up(0, first, a - first), _up(1, 0, b), _up(2, 0, c)),
    ]


def _split_three(a: int, b: int, c: int, axes: tuple[int, int]) -> list[Piece]:
    """Out along b, over along a, back along b: the step of the two-dimensional Hilbert curve.

    One unfair box occurs, as the end of the ring of an odd x odd rectangle: a odd, b even, c = 1. With odd
    cuts only its last piece is unfair, and so on down to two cells, so that the curve ends one cell from the
    corner.
    """
    b_axis, c_axis = axes
    if a % 2 and b % 2 == 0:
        low, left = min(_odd_near(b // 2 + 1), b - 1), _odd_near(a // 2)
    else:
        low, left = min(_even_near(b // 2), b - 1), a // 2
    return [
        (_up(b_axis, 0, low), _up(0, 0, left), _up(c_axis, 0, c)),
        (_up(0, 0, a), _up(b_axis, low, b - low), _up(c_axis, 0, c)),
        (_down(b_axis, low, low), _down(0, a, a - left), _up(c_axis, 0, c)),
    ]


def _split_five(a: int, b: int, c: int, axes: tuple[int, int]) -> list[Piece]:
    """Out along b, up along c, over along a, down along c, back along b: the octants, some of them joined."""
    b_axis, c_axis = axes
    low, left, front = min(_even_near(b // 2), b - 1), a // 2 if c % 2 == 0 else _odd_near(a // 2), c // 2
    return [
        (_up(b_axis, 0, low), _up(c_axis, 0, front), _up(0, 0, left)),
        (_up(c_axis, 0, c), _up(0, 0, left), _up(b_axis, low, b - low)),
        (_up(0, 0, a), _down(b_axis, low, low), _down(c_axis, c, c - front)),
        (_down(c_axis, c, c), _down(0, a, a - left), _up(b_axis, low, b - low)),
        (_down(b_axis, low, low), _up(c_axis, 0, front), _down(0, a, a - left)),
    ]


def _even_near(length: int) -> int:
    return length + length % 2


def _odd_near(length: int) -> int:
    return length if length % 2 else max(1, length - 1)


def _coordinates(cells: Tensor, sides: Grid) -> Tensor:
    """Coordinates [len(sides), cells] of raster indices."""
    rows = []
    for side in reversed(sides):
        rows.append(cells % side)
        cells = cells // side
    return torch.stack(rows[::-1]) if rows else torch.zeros(1, len(cells), dtype=torch.int64, device="cpu")


def _long_sides(sides: Grid) -> Grid:
    """The sides longer than 1: the others change neither raster indices nor steps."""
    return tuple(side for side in sides if side > 1)


def _prefix_sums(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(dim=1), (1, 0))


def _radii(sums: Tensor, square_sums: Tensor, run: int) -> Tensor:
    total = sums[:, run:] - sums[:, :-run]
    square_total = square_sums[:, run:] - square_sums[:, :-run]
    return (run * square_total - total * total).sum(dim=0).double().sqrt() / run


def _ideal_radius(run: int, sides: Grid) -> float:
    """Radius of the box of ``run`` cells, of real sides, that is as near to a cube as the grid allows."""
    variance, cells_left = 0.0, float(run)
    for axes_left, side in zip(range(len(sides), 0, -1), sorted(sides), strict=True):
        extent = min(float(side), cells_left ** (1 / axes_left))
        variance += (extent * extent - 1) / 12
        cells_left /= extent
    return math.sqrt(variance)


def _grid_name(sides: Grid) -> str:
    return "x".join(str(side) for side in sides)


def _check_grid(grid: Sequence[int]) -> Grid:
    hint = "Pass the sides in raster order, such as (45, 80) or (21, 30, 52)."
    if not isinstance(grid, (tuple, list)):
        raise TypeError(f"`grid` must be a tuple of whole numbers; got {type(grid).__name__}. {hint}")
    if not 1 <= len(grid) <= 3:
        raise ValueError(f"`grid` must have one, two or three sides; got {len(grid)}. {hint}")
    for side in grid:
        if isinstance(side, (bool, Tensor)) or not hasattr(side, "__index__"):
            raise TypeError(f"`grid` must be a tuple of whole numbers; got {grid!r}. {hint}")
        if side < 1:
            raise ValueError(f"`grid` must have sides of at least 1; got {tuple(grid)!r}. {hint}")
    return tuple(operator.index(side) for side in grid)


def _check_request(sides: Grid, closed: bool | None, variant: str) -> None:
    if closed is not None and not isinstance(closed, bool):
        raise TypeError(
            f"`closed` must be True, False or None; got {type(closed).__name__}. None takes the better curve."
        )
    if not isinstance(variant, str):
        raise TypeError(
            f"`variant` must be a string; got {type(variant).__name__}. Use one of {_variants()}."
        )
    if variant not in get_args(Variant):
        raise ValueError(f"`variant` must be one of {_variants()}; got {variant!r}. Use 'auto' if in doubt.")
    if not closed:
        return
    if variant == "cropped":
        raise ValueError(
            "`closed` must be False or None for the cropped curve; got True. Cropping leaves jumps; use "
            "variant='generalised'."
        )
    if reason := _why_not_closed(sides):
        raise ValueError(
            f"`closed` must be False or None for a grid of {_grid_name(sides)}; got True. {reason} Pass "
            "closed=None for the best curve that exists."
        )


def _variants() -> str:
    return ", ".join(repr(name) for name in get_args(Variant))


def _check_order(order: Tensor, sides: Grid) -> None:
    _check_permutation(order)
    if order.numel() != math.prod(sides):
        raise ValueError(
            f"`order` must have one entry for each of the {math.prod(sides)} cells of the grid "
            f"{_grid_name(sides)}; got {order.numel()}. Pass the grid that the order was made for."
        )


def _check_permutation(order: Tensor) -> None:
    hint = "Pass what hilbert, morton or raster returned."
    if not isinstance(order, Tensor):
        raise TypeError(f"`order` must be a tensor; got {type(order).__name__}. {hint}")
    if order.is_floating_point() or order.is_complex() or order.dtype == torch.bool:
        raise TypeError(f"`order` must hold integers; got {order.dtype}. {hint}")
    if order.dim() != 1 or order.numel() == 0:
        raise ValueError(
            f"`order` must have one axis with at least one entry; got shape {tuple(order.shape)}. {hint}"
        )
    seen = torch.zeros(order.numel(), dtype=torch.bool, device=order.device)
    seen[order.long().clamp(0, order.numel() - 1)] = True
    if not bool(seen.all()) or int(order.min()) < 0 or int(order.max()) >= order.numel():
        last = order.numel() - 1
        raise ValueError(f"`order` must hold each of 0 ... {last} once; got repeated or missing ones. {hint}")


def _check_runs(runs: Sequence[int]) -> list[int]:
    hint = "Pass run lengths such as (64, 256)."
    if not isinstance(runs, (tuple, list)) or any(
        isinstance(run, bool) or not isinstance(run, int) for run in runs
    ):
        raise TypeError(f"`runs` must be a tuple of whole numbers; got {runs!r}. {hint}")
    if not runs or min(runs) < 2:
        raise ValueError(f"`runs` must hold at least one length, each at least 2; got {runs!r}. {hint}")
    return list(runs)
