"""The curves: what they promise is locality, so steps and bounding boxes are tested, not only round trips."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nearfield import curves

REAL_GRIDS = [(64, 64), (45, 80), (90, 160), (128, 128), (48, 80), (72, 128), (21, 30, 52), (21, 45, 80)]
AWKWARD_GRIDS = [
    *[(1,), (7,), (1, 1), (1, 7), (7, 1), (2, 2), (2, 3), (3, 3), (3, 50), (50, 3), (51, 2)],
    *[(1, 1, 1), (2, 3, 1), (2, 2, 2), (3, 3, 3), (2, 1, 50), (2, 31, 31), (5, 4, 41), (1, 9, 9)],
]

# The largest (longest side of the bounding box of a run)^d / (length of the run) that the generalised curve
# may show on grids of aspect at most 2. Measured over every such grid up to 33 x 33 and 12 x 12 x 12 and 45 run
# lengths from 2 to 256, the worst are 8.0 and 42.7; raster order has no bound.
SPREAD_BOUND = {2: 9, 3: 48}


sides = st.integers(1, 20)
small_grids = st.one_of(
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(sides, sides, sides),
)


@st.composite
def compact_grids(draw: st.DrawFn) -> tuple[int, ...]:
    """Two or three sides, the longest at most twice the shortest."""
    dims = draw(st.integers(2, 3))
    shortest = draw(st.integers(2, 24 if dims == 2 else 9))
    others = [draw(st.integers(shortest, 2 * shortest)) for _ in range(dims - 1)]
    return tuple(draw(st.permutations([shortest, *others])))


def has_closed_curve(grid: tuple[int, ...]) -> bool:
    num_cells = math.prod(grid)
    return num_cells <= 2 or (num_cells % 2 == 0 and sum(side > 1 for side in grid) >= 2)


def is_permutation(order: Tensor, num_cells: int) -> bool:
    return (
        order.dtype == torch.int64 and order.tolist() != [] and sorted(order.tolist()) == [*range(num_cells)]
    )


def coordinates(order: Tensor, grid: tuple[int, ...]) -> Tensor:
    return torch.stack(torch.unravel_index(order, grid))


def extents_of_runs(order: Tensor, grid: tuple[int, ...], run: int, wrap: bool) -> Tensor:
    """Sides of the bounding box of the run at every start: [dims, runs]."""
    path = coordinates(order, grid)
    if wrap:
        path = torch.cat([path, path[:, : run - 1]], dim=1)
    windows = path.unfold(1, run, 1)
    return windows.amax(dim=2) - windows.amin(dim=2) + 1


def worst_spread(order: Tensor, grid: tuple[int, ...], run: int, wrap: bool) -> float:
    return float(extents_of_runs(order, grid, run, wrap).amax()) ** len(grid) / run


# Orders


@given(grid=small_grids)
@settings(max_examples=60, deadline=None)
def test_every_order_visits_every_cell_once(grid: tuple[int, ...]) -> None:
    num_cells = math.prod(grid)
    for order in (
        curves.hilbert(grid),
        curves.hilbert(grid, closed=False, variant="generalised"),
        curves.hilbert(grid, variant="cropped"),
        curves.morton(grid),
        curves.raster(grid),
    ):
        assert is_permutation(order, num_cells)


@given(grid=small_grids)
@settings(max_examples=100, deadline=None)
def test_open_generalised_curve_has_only_unit_steps(grid: tuple[int, ...]) -> None:
    order = curves.hilbert(grid, closed=False, variant="generalised")
    assert is_permutation(order, math.prod(grid))
    assert curves.step_lengths(order, grid, wrap=False).eq(1).all()


@given(grid=small_grids.filter(has_closed_curve))
@settings(max_examples=100, deadline=None)
def test_closed_curve_has_only_unit_steps_wrap_included(grid: tuple[int, ...]) -> None:
    order = curves.hilbert(grid, closed=True)
    assert is_permutation(order, math.prod(grid))
    assert curves.step_lengths(order, grid).eq(1 if math.prod(grid) > 1 else 0).all()


@pytest.mark.parametrize("grid", [*AWKWARD_GRIDS, *itertools.product(range(1, 6), repeat=3)])
def test_unit_steps_on_awkward_grids(grid: tuple[int, ...]) -> None:
    for closed in (False, True) if has_closed_curve(grid) else (False,):
        order = curves.hilbert(grid, closed, variant="generalised")
        assert is_permutation(order, math.prod(grid))
        steps = curves.step_lengths(order, grid, wrap=closed and order.numel() > 1)
        assert steps.eq(1).all()


@given(rows=st.integers(1, 25), columns=st.integers(1, 25))
@settings(max_examples=40, deadline=None)
def test_odd_rectangle_is_as_nearly_closed_as_parity_allows(rows: int, columns: int) -> None:
    grid = (2 * rows + 1, 2 * columns + 1)
    steps = curves.step_lengths(curves.hilbert(grid, variant="generalised"), grid)
    assert steps[:-1].eq(1).all()
    assert steps[-1] == 2


@pytest.mark.parametrize("grid", [(1,), (2,), (9,), (1, 9), (9, 1), (1, 1, 9), (1, 9, 1)])
@pytest.mark.parametrize("variant", ["auto", "generalised", "cropped"])
def test_a_line_keeps_its_order(grid: tuple[int, ...], variant: curves.Variant) -> None:
    assert curves.hilbert(grid, variant=variant).tolist() == [*range(math.prod(grid))]


@pytest.mark.parametrize("grid", [(1, 6, 10), (6, 1, 10), (6, 10, 1)])
def test_sides_of_one_change_nothing(grid: tuple[int, ...]) -> None:
    for closed in (False, True):
        assert torch.equal(curves.hilbert(grid, closed), curves.hilbert((6, 10), closed))
    assert torch.equal(curves.morton(grid), curves.morton((6, 10)))


def test_closed_curve_of_a_small_square_is_moores() -> None:
    """Drawn by hand: two Hilbert curves of 2 x 4 cells, back to back."""
    order = curves.hilbert((4, 4), closed=True)
    ring = [1, 0, 4, 5, 9, 8, 12, 13, 14, 15, 11, 10, 6, 7, 3, 2]
    turned = [coordinates(order, (4, 4)).tolist(), coordinates(order, (4, 4)).flip(0).tolist()]
    paths = [[4 * row + column for row, column in zip(*path, strict=True)] for path in turned]
    rings = [ring[k:] + ring[:k] for k in range(16)]
    rings += [path[::-1] for path in rings]
    assert any(path in rings for path in paths)


def test_same_order_every_time_and_callers_own_their_copy() -> None:
    first = curves.hilbert((12, 20))
    kept = first.clone()
    first.zero_()
    assert torch.equal(curves.hilbert((12, 20)), kept)
    curves._build.cache_clear()
    curves._choose.cache_clear()
    assert torch.equal(curves.hilbert([12, 20]), kept)


def test_orders_stay_on_the_cpu_under_another_default_device() -> None:
    grid = (10, 14)
    expected = [
        curves.hilbert(grid),
        curves.hilbert(grid, variant="cropped"),
        curves.morton(grid),
        curves.raster(grid),
    ]
    curves._build.cache_clear()
    curves._choose.cache_clear()
    with torch.device("meta"):
        orders = [
            curves.hilbert(grid),
            curves.hilbert(grid, variant="cropped"),
            curves.morton(grid),
            curves.raster(grid),
        ]
        score = curves.locality(orders[0], grid)
    assert all(torch.equal(order, wanted) for order, wanted in zip(orders, expected, strict=True))
    assert score == curves.locality(expected[0], grid)


# Oracles for powers of two


def hilbert_rank(size: int, row: int, column: int) -> int:
    """The textbook curve, one cell at a time: add the quadrant's rank, turn the quadrant, go down."""
    rank, half = 0, size // 2
    while half:
        lower, right = int(row & half > 0), int(column & half > 0)
        rank += half * half * ((3 * lower) ^ right)
        if right == 0:
            if lower == 1:
                row, column = size - 1 - row, size - 1 - column
            row, column = column, row
        half //= 2
    return rank


def symmetric_copies(path: Tensor, size: int) -> list[list[list[int]]]:
    copies = []
    for mirror_rows, mirror_columns, transpose in itertools.product((False, True), repeat=3):
        rows = size - 1 - path[0] if mirror_rows else path[0]
        columns = size - 1 - path[1] if mirror_columns else path[1]
        copies.append([columns.tolist(), rows.tolist()] if transpose else [rows.tolist(), columns.tolist()])
    return copies


@pytest.mark.parametrize("size", [2, 4, 8, 32])
@pytest.mark.parametrize("variant", ["cropped", "generalised"])
def test_squares_of_powers_of_two_follow_the_textbook_curve(size: int, variant: curves.Variant) -> None:
    cells = sorted(itertools.product(range(size), repeat=2), key=lambda cell: hilbert_rank(size, *cell))
    wanted = [[row for row, _ in cells], [column for _, column in cells]]
    path = coordinates(curves.hilbert((size, size), closed=False, variant=variant), (size, size))
    assert wanted in symmetric_copies(path, size)


@pytest.mark.parametrize("variant", ["cropped", "generalised"])
def test_cubes_of_powers_of_two_nest(variant: curves.Variant) -> None:
    grid = (8, 8, 8)
    order = curves.hilbert(grid, closed=False, variant=variant)
    assert curves.step_lengths(order, grid, wrap=False).eq(1).all()
    for side in (2, 4):
        assert extents_of_runs(order, grid, side**3, wrap=False)[:, :: side**3].eq(side).all()


@pytest.mark.parametrize("grid", [(48, 80), (72, 128), (16, 40), (16, 24, 40)])
def test_cropped_tiles_are_exact_squares_where_the_sides_allow(grid: tuple[int, ...]) -> None:
    order = curves.hilbert(grid, variant="cropped")
    assert extents_of_runs(order, grid, 8 ** len(grid), wrap=False)[:, :: 8 ** len(grid)].eq(8).all()


def test_cropped_is_the_enclosing_curve_without_the_cells_outside() -> None:
    rows, columns = coordinates(curves.hilbert((16, 16), variant="cropped"), (16, 16))
    inside = (rows < 11) & (columns < 13)
    assert torch.equal((rows * 13 + columns)[inside], curves.hilbert((11, 13), variant="cropped"))


def test_morton_interleaves_bits() -> None:
    assert curves.morton((2, 4)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert curves.morton((3, 3)).tolist() == [0, 1, 3, 4, 2, 5, 6, 7, 8]
    assert curves.morton((2, 2, 2)).tolist() == [*range(8)]


@pytest.mark.parametrize("size", [4, 16])
def test_against_hilbertsfc(size: int) -> None:
    hilbertsfc = pytest.importorskip("hilbertsfc", reason="hilbertsfc needs Python 3.12")
    bits = (size - 1).bit_length()
    wanted = [
        [*axis]
        for axis in zip(*(hilbertsfc.hilbert_decode_2d(i, nbits=bits) for i in range(size**2)), strict=True)
    ]
    path = coordinates(curves.hilbert((size, size), variant="cropped"), (size, size))
    assert wanted in symmetric_copies(path, size)


# Locality


@given(grid=compact_grids(), run=st.integers(1, 300))
@settings(max_examples=80, deadline=None)
def test_every_run_fits_a_small_box(grid: tuple[int, ...], run: int) -> None:
    run = min(run, math.prod(grid))
    bound = SPREAD_BOUND[len(grid)]
    assert worst_spread(curves.hilbert(grid, False, "generalised"), grid, run, wrap=False) <= bound
    if has_closed_curve(grid):
        assert worst_spread(curves.hilbert(grid, True), grid, run, wrap=True) <= bound


@pytest.mark.parametrize("grid", REAL_GRIDS)
def test_the_box_bound_tells_curves_from_raster_and_open_from_closed(grid: tuple[int, ...]) -> None:
    bound = SPREAD_BOUND[len(grid)]
    assert worst_spread(curves.hilbert(grid, True), grid, 64, wrap=True) <= bound
    assert worst_spread(curves.raster(grid), grid, 64, wrap=False) > bound
    assert worst_spread(curves.hilbert(grid, False, "generalised"), grid, 64, wrap=True) > bound


@pytest.mark.parametrize("grid", REAL_GRIDS)
def test_hilbert_beats_morton_beats_raster(grid: tuple[int, ...]) -> None:
    for wrap in (False, True):
        morton = curves.locality(curves.morton(grid), grid, wrap=wrap)
        assert 1.1 * curves.locality(curves.hilbert(grid), grid, wrap=wrap) < morton
        assert 1.5 * morton < curves.locality(curves.raster(grid), grid, wrap=wrap)


@pytest.mark.parametrize("grid", REAL_GRIDS)
def test_the_inverse_used_by_mistake_is_not_local(grid: tuple[int, ...]) -> None:
    order = curves.hilbert(grid)
    backwards = curves.inverse(order)
    assert curves.step_lengths(order, grid).double().mean() == 1
    assert curves.step_lengths(backwards, grid).double().mean() > 4
    assert curves.locality(backwards, grid) > 1.5 * curves.locality(order, grid)


def slow_locality(order: Tensor, grid: tuple[int, ...], run: int, wrap: bool, ideal: list[float]) -> float:
    points = coordinates(order, grid).T.double()
    starts = range(len(points) if wrap else len(points) - run + 1)
    runs = [points[[(start + k) % len(points) for k in range(run)]] for start in starts]
    radii = [float(((cells - cells.mean(dim=0)) ** 2).sum(dim=1).mean().sqrt()) for cells in runs]
    return sum(radii) / len(radii) / math.sqrt(sum((side**2 - 1) / 12 for side in ideal))


@pytest.mark.parametrize(
    ("grid", "run", "ideal"),
    [
        ((6, 8), 9, [3, 3]),
        ((2, 12), 12, [2, 6]),
        ((4, 3, 5), 27, [3, 3, 3]),
        ((2, 4, 8), 18, [2, 3, 3]),
        ((9,), 4, [4]),
    ],
)
@pytest.mark.parametrize("wrap", [False, True])
def test_locality_is_what_its_definition_says(
    grid: tuple[int, ...], run: int, ideal: list[float], wrap: bool
) -> None:
    order = curves.hilbert(grid, closed=False)
    assert curves.locality(order, grid, (run,), wrap) == pytest.approx(
        slow_locality(order, grid, run, wrap, ideal)
    )


def test_locality_averages_over_runs_that_fit() -> None:
    order, grid = curves.hilbert((8, 8)), (8, 8)
    four, sixteen = curves.locality(order, grid, (4,)), curves.locality(order, grid, (16,))
    assert curves.locality(order, grid, (4, 16)) == pytest.approx((four + sixteen) / 2)
    assert curves.locality(order, grid, (4, 16, 33)) == curves.locality(order, grid, (4, 16))
    assert curves.locality(order, grid, (33,)) == curves.locality(order, grid, (32,))
    assert curves.locality(curves.raster((3,)), (3,)) == 1


# Choosing


@pytest.mark.parametrize("grid", [*REAL_GRIDS, (45, 81), (4, 63, 63), (7,), (1, 2), (1, 1)])
@pytest.mark.parametrize("closed", [None, False])
@pytest.mark.parametrize("variant", ["auto", "generalised", "cropped"])
def test_choice_describes_what_hilbert_returns(
    grid: tuple[int, ...], closed: bool | None, variant: curves.Variant
) -> None:
    choice = curves.choose(grid, closed, variant)
    order = curves.hilbert(grid, closed, variant)
    assert torch.equal(order, curves.hilbert(grid, choice.closed, choice.variant))
    assert choice.score == curves.locality(order, grid)
    assert choice.closed <= bool(curves.step_lengths(order, grid).max() <= 1)


def test_automatic_choice_has_the_lowest_score() -> None:
    chosen = {grid: curves.choose(grid)[:2] for grid in [(45, 80), (45, 81), (4, 63, 63)]}
    assert chosen == {
        (45, 80): ("generalised", True),
        (45, 81): ("generalised", False),
        (4, 63, 63): ("cropped", False),
    }
    assert curves.choose((72, 128), closed=False).variant == "cropped"
    for grid in [(45, 80), (45, 81), (4, 63, 63), (6, 5)]:
        rivals = [curves.choose(grid, variant=variant).score for variant in ("generalised", "cropped")]
        assert curves.choose(grid).score == min(rivals)


def test_choice_prints_its_reason() -> None:
    assert str(curves.choose((64, 64))) == (
        "generalised closed, locality 1.163 "
        "(lowest of: generalised closed 1.163, generalised open 1.257, cropped open 1.257)"
    )
    assert (
        str(curves.choose((1, 7)))
        == "generalised open, locality 1.633 (the only curve that fits the request)"
    )


# inverse, step_lengths


@given(grid=small_grids)
@settings(max_examples=30, deadline=None)
def test_inverse_gives_positions(grid: tuple[int, ...]) -> None:
    order = curves.hilbert(grid)
    positions = curves.inverse(order)
    assert all(positions[cell] == i for i, cell in enumerate(order.tolist()))
    assert torch.equal(curves.inverse(order.int()), positions)


def test_step_lengths_by_hand() -> None:
    assert curves.step_lengths(curves.raster((2, 3)), (2, 3)).tolist() == [1, 1, 3, 1, 1, 3]
    assert curves.step_lengths(curves.raster((2, 3)), (2, 3), wrap=False).tolist() == [1, 1, 3, 1, 1]
    assert curves.step_lengths(torch.tensor([0, 7, 1, 2, 3, 4, 5, 6]), (2, 2, 2)).tolist() == [
        3,
        2,
        2,
        1,
        3,
        1,
        2,
        2,
    ]


# Errors

SIDES = "Pass the sides in raster order, such as (45, 80) or (21, 30, 52)."
MADE = "Pass what hilbert, morton or raster returned."
BEST = "Pass closed=None for the best curve that exists."
PARITY = (
    "Each unit step changes the colour of the chessboard, so a closed curve needs an even number of cells, and this "
    "grid has"
)
BAD_CALLS = [
    (lambda: curves.hilbert(7), TypeError, f"`grid` must be a tuple of whole numbers; got int. {SIDES}"),
    (lambda: curves.morton("45"), TypeError, f"`grid` must be a tuple of whole numbers; got str. {SIDES}"),
    (
        lambda: curves.raster((4, 2.0)),
        TypeError,
        f"`grid` must be a tuple of whole numbers; got (4, 2.0). {SIDES}",
    ),
    (
        lambda: curves.choose((True, 4)),
        TypeError,
        f"`grid` must be a tuple of whole numbers; got (True, 4). {SIDES}",
    ),
    (lambda: curves.hilbert(()), ValueError, f"`grid` must have one, two or three sides; got 0. {SIDES}"),
    (
        lambda: curves.hilbert((2, 2, 2, 2)),
        ValueError,
        f"`grid` must have one, two or three sides; got 4. {SIDES}",
    ),
    (
        lambda: curves.hilbert((4, 0)),
        ValueError,
        f"`grid` must have sides of at least 1; got (4, 0). {SIDES}",
    ),
    (lambda: curves.hilbert([-3]), ValueError, f"`grid` must have sides of at least 1; got (-3,). {SIDES}"),
    (
        lambda: curves.hilbert((4, 4), closed=1),
        TypeError,
        "`closed` must be True, False or None; got int. None takes the better curve.",
    ),
    (
        lambda: curves.hilbert((4, 4), variant=None),
        TypeError,
        "`variant` must be a string; got NoneType. Use one of 'auto', 'generalised', 'cropped'.",
    ),
    (
        lambda: curves.choose((4, 4), variant="gilbert"),
        ValueError,
        "`variant` must be one of 'auto', 'generalised', 'cropped'; got 'gilbert'. Use 'auto' if in doubt.",
    ),
    (
        lambda: curves.hilbert((5, 7), closed=True),
        ValueError,
        f"`closed` must be False or None for a grid of 5x7; got True. {PARITY} 35. {BEST}",
    ),
    (
        lambda: curves.choose((3, 5, 7), closed=True),
        ValueError,
        f"`closed` must be False or None for a grid of 3x5x7; got True. {PARITY} 105. {BEST}",
    ),
    (
        lambda: curves.hilbert((1, 8), closed=True),
        ValueError,
        "`closed` must be False or None for a grid of 1x8; got True. Its 8 cells form a line, and a line of more than "
        f"two cells has no way back. {BEST}",
    ),
    (
        lambda: curves.hilbert((4, 4), closed=True, variant="cropped"),
        ValueError,
        "`closed` must be False or None for the cropped curve; got True. Cropping leaves jumps; use "
        "variant='generalised'.",
    ),
    (lambda: curves.inverse([0, 1]), TypeError, f"`order` must be a tensor; got list. {MADE}"),
    (
        lambda: curves.inverse(torch.zeros(3)),
        TypeError,
        f"`order` must hold integers; got torch.float32. {MADE}",
    ),
    (
        lambda: curves.inverse(torch.zeros(2, 2, dtype=torch.int64)),
        ValueError,
        f"`order` must have one axis with at least one entry; got shape (2, 2). {MADE}",
    ),
    (
        lambda: curves.inverse(torch.tensor([0, 2, 2])),
        ValueError,
        f"`order` must hold each of 0 ... 2 once; got repeated or missing ones. {MADE}",
    ),
    (
        lambda: curves.inverse(torch.tensor([0, 1, 3])),
        ValueError,
        f"`order` must hold each of 0 ... 2 once; got repeated or missing ones. {MADE}",
    ),
    (
        lambda: curves.inverse(torch.tensor([-1, 1, 2])),
        ValueError,
        f"`order` must hold each of 0 ... 2 once; got repeated or missing ones. {MADE}",
    ),
    (
        lambda: curves.step_lengths(torch.arange(6), (2, 4)),
        ValueError,
        "`order` must have one entry for each of the 8 cells of the grid 2x4; got 6. Pass the grid that the order was "
        "made for.",
    ),
    (
        lambda: curves.locality(torch.arange(8), (2, 4), runs=4),
        TypeError,
        "`runs` must be a tuple of whole numbers; got 4. Pass run lengths such as (64, 256).",
    ),
    (
        lambda: curves.locality(torch.arange(8), (2, 4), runs=(1,)),
        ValueError,
        "`runs` must hold at least one length, each at least 2; got (1,). Pass run lengths such as (64, 256).",
    ),
    (
        lambda: curves.locality(torch.arange(8), (2, 4), runs=()),
        ValueError,
        "`runs` must hold at least one length, each at least 2; got (). Pass run lengths such as (64, 256).",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS)
def test_bad_calls_say_what_is_wrong(call, kind, message) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
    assert type(error.value) is kind
