"""Tiles of a curve: shared tokens, cuts on multiples of a unit, and which tile a token is in."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiles import ORDERS, has_closed_curve, round_to, tile_of

from nearfield import Geometry
from nearfield.layout import tiling

property_test = settings(max_examples=150)


@st.composite
def cut_arguments(draw, unit=None, most=600):
    """A ring, tiles, a shift `(phase, cycle)` and a unit."""
    start = draw(st.integers(0, 300))
    ring = start, start + draw(st.integers(1, most))
    cycle = draw(st.integers(1, 6))
    unit = draw(st.sampled_from([1, 2, 3, 8, 16, 48])) if unit is None else unit
    return ring, draw(st.integers(1, 20)), (draw(st.integers(0, cycle - 1)), cycle), unit


def exact_cuts(ring, tiles, shift, unit):
    start, stop = ring
    places = [start + Fraction(stop - start, tiles) * (tile + Fraction(*shift)) for tile in range(tiles)]
    begins = [min(max(round_to(place, unit), start), stop) - start for place in places]
    return [*begins, begins[0] + stop - start]


# -- cuts --------------------------------------------------------------------------------------------------------------


@given(cut_arguments(most=10**6))
@property_test
def test_cuts_are_even_shares_rounded_to_the_unit(arguments):
    assert tiling.cuts(*arguments).tolist() == exact_cuts(*arguments)


def test_cuts_do_not_depend_on_the_default_dtype():
    arguments = (77, 302_477), 50, (3, 7), 16
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = tiling.cuts(*arguments)
    finally:
        torch.set_default_dtype(before)
    assert found.tolist() == exact_cuts(*arguments)


@given(cut_arguments())
@property_test
def test_cuts_ascend_once_round_the_ring(arguments):
    (start, stop), tiles, _, unit = arguments
    begins = tiling.cuts(*arguments)
    assert len(begins) == tiles + 1
    assert bool((begins.diff() >= 0).all())
    assert int(begins.diff().sum()) == stop - start
    for cut in (begins[:-1] + start).tolist():
        assert cut % unit == 0 or cut in (start, stop)


@given(cut_arguments())
@property_test
def test_there_are_as_many_tiles_as_asked_for_and_they_are_even(arguments):
    (start, stop), tiles, _, unit = arguments
    sizes = tiling.cuts(*arguments).diff()
    share = (stop - start) / tiles
    assert bool(((sizes - share).abs() <= unit).all())
    if share >= unit:
        assert int((sizes > 0).sum()) == tiles
    if start % unit == 0 and stop % unit == 0:
        assert int(sizes.max() - sizes.min()) <= unit
    inner = sizes[:-1]  # the last one may hold both ends of the ring, and what does not fill a unit there
    if start % unit == 0 and tiles > 1:
        assert int(inner.max() - inner.min()) <= unit


@given(cut_arguments(), st.data())
@property_test
def test_a_shift_below_a_unit_is_rounded_and_one_of_a_unit_is_not(arguments, data):
    ring, tiles, (_, cycle), unit = arguments
    ring = ring[0] // unit * unit, ring[0] // unit * unit + tiles * cycle * unit
    phase = data.draw(st.integers(0, cycle - 1))
    assert tiling.cuts(ring, tiles, (phase, cycle), unit).tolist() == [
        (tile * cycle + phase) * unit for tile in range(tiles + 1)
    ]


# -- which tile --------------------------------------------------------------------------------------------------------


@given(cut_arguments())
@property_test
def test_spans_partition_the_ring_and_agree_with_tile_at(arguments):
    ring = arguments[0]
    begins = tiling.cuts(*arguments)
    owners = torch.full((ring[1],), -1)
    for tile, pieces in enumerate(tiling.tile_spans(ring, begins).tolist()):
        for start, stop in pieces:
            assert bool((owners[start:stop] == -1).all()), "two tiles hold one token"
            owners[start:stop] = tile
    assert bool((owners[: ring[0]] == -1).all())
    positions = torch.arange(ring[1] - ring[0])
    assert torch.equal(tiling.tile_at(positions, begins), owners[ring[0] :])


@given(cut_arguments(most=120))
@settings(max_examples=60)
def test_tiles_are_those_of_the_definition(arguments):
    ring, tiles, shift, unit = arguments
    found = tiling.tile_at(torch.arange(ring[1] - ring[0]), tiling.cuts(*arguments))
    assert found.tolist() == [tile_of(place, ring, tiles, Fraction(*shift), unit) for place in range(*ring)]


@given(cut_arguments())
@property_test
def test_the_place_after_the_last_is_the_first(arguments):
    ring = arguments[0]
    begins = tiling.cuts(*arguments)
    ends = torch.tensor([0, ring[1] - ring[0]])
    first, after = tiling.tile_at(ends, begins).tolist()
    assert first == after


@given(cut_arguments())
@property_test
def test_over_a_cycle_neighbours_meet(arguments):
    """Where a shift is at least a unit, no place of the ring is a cut in every layer of a cycle."""
    ring, tiles, (_, cycle), unit = arguments
    n = ring[1] - ring[0]
    if cycle == 1 or n < tiles * cycle * unit:
        return
    places = torch.arange(n)
    met = torch.zeros(n, dtype=torch.bool)
    for phase in range(cycle):
        tile = tiling.tile_at(places, tiling.cuts(ring, tiles, (phase, cycle), unit))
        met |= tile == tile.roll(-1)
    assert bool(met.all())


def test_a_shifted_ring_wraps_inside_a_tile():
    begins = tiling.cuts((8, 72), 4, (1, 2), 8)
    assert begins.tolist() == [8, 24, 40, 56, 72]
    assert tiling.tile_spans((8, 72), begins).tolist() == [
        [[16, 32], [8, 8]],
        [[32, 48], [8, 8]],
        [[48, 64], [8, 8]],
        [[64, 72], [8, 16]],
    ]


# -- segments ----------------------------------------------------------------------------------------------------------

grids = st.one_of(
    st.tuples(st.integers(1, 60)),
    st.tuples(st.integers(1, 16), st.integers(1, 16)),
    st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)),
)


@given(
    grids,
    st.lists(grids, max_size=2),
    st.integers(0, 40),
    st.sampled_from([*ORDERS]),
    st.sampled_from(["centre", "distributed", "none"]),
    st.none() | st.integers(1, 80),
    st.sampled_from([1, 4, 16, 24]),
)
@property_test
def test_a_segment_is_its_shared_tokens_then_the_rest_of_the_curve(
    grid, references, text, curve, shared, shared_tokens, unit
):
    geometry = Geometry(grid, text=text, references=tuple(references))
    if curve == "hilbert-closed" and not all(map(has_closed_curve, geometry.images)):
        curve = "auto"
    segments = tiling.segments_of(geometry, curve, shared, shared_tokens, unit)
    assert len(segments) == len(geometry.images)
    for image, span, segment in zip(geometry.images, geometry.image_spans, segments, strict=True):
        on_curve = ORDERS[curve](image).tolist()
        chosen = set(segment.order[: segment.num_shared].tolist())
        assert segment.order[: segment.num_shared].tolist() == [cell for cell in on_curve if cell in chosen]
        ring = [cell for cell in on_curve if cell not in chosen]
        assert segment.order[segment.num_shared :].tolist() == ring
        assert (segment.shared[0], segment.shared[1], segment.ring[1]) == (
            span[0],
            segment.ring[0],
            span[1],
        )
        if shared == "none":
            assert segment.num_shared == 0
        else:
            wanted = shared_tokens or math.prod(max(1, side // 4) for side in image)
            assert segment.num_shared >= 1
            assert segment.ring[0] % unit == 0 or segment.ring[0] == span[1]
            assert abs(segment.num_shared - min(wanted, span[1] - span[0])) <= unit
        before = dict(
            zip(on_curve, itertools.accumulate(cell not in chosen for cell in on_curve), strict=True)
        )
        assert segment.places.tolist() == [
            before[cell] for cell in segment.order.tolist()[: segment.num_shared]
        ]


def shared_mask(grid, shared, tokens=None, unit=1):
    (segment,) = tiling.segments_of(Geometry(grid), "auto", shared, tokens, unit)
    mask = torch.zeros(math.prod(grid), dtype=torch.bool)
    mask[segment.order[: segment.num_shared]] = True
    return mask.view(grid)


def test_the_centre_is_the_middle_quarter_of_each_side():
    for grid, box in (
        ((64, 64), (slice(24, 40), slice(24, 40))),
        ((128, 128), (slice(48, 80), slice(48, 80))),
        ((16, 32, 32), (slice(6, 10), slice(12, 20), slice(12, 20))),
        ((16,), (slice(6, 10),)),
    ):
        expected = torch.zeros(grid, dtype=torch.bool)
        expected[box] = True
        assert torch.equal(shared_mask(grid, "centre"), expected), grid


def test_a_centre_of_another_size_has_the_shape_of_the_image():
    inside = shared_mask((32, 64), "centre", 128).nonzero()
    assert (inside.amax(0) - inside.amin(0) + 1).tolist() == [8, 16]
    assert inside.double().mean(0).tolist() == [15.5, 31.5]


def test_distributed_regions_are_the_centres_of_equal_boxes():
    mask = shared_mask((64, 64), "distributed")
    expected = torch.zeros(64, 64, dtype=torch.bool)
    for row, column in itertools.product(range(4), repeat=2):
        expected[16 * row + 6 : 16 * row + 10, 16 * column + 6 : 16 * column + 10] = True
    assert torch.equal(mask, expected)


@given(grids, st.integers(1, 64))
@property_test
def test_distributed_regions_share_evenly(grid, tokens):
    mask = shared_mask(grid, "distributed", tokens)
    boxes = []
    for side in grid:
        number = min(4, side)
        holds_middle_of = (2 * torch.arange(side) + 1) * number // (2 * side)
        boxes.append([(holds_middle_of == box).nonzero().flatten() for box in range(number)])
    counts, sizes = [], []
    for parts in itertools.product(*boxes):
        box = mask[torch.meshgrid(*parts, indexing="ij")]
        counts.append(int(box.sum()))
        sizes.append(box.numel())
    assert sum(counts) == min(tokens, math.prod(grid))
    fullest = max(counts)
    for count, size in zip(counts, sizes, strict=True):
        assert count >= min(fullest - 1, size), "a region that has room lags behind"


def test_the_default_is_a_quarter_of_each_side_and_at_least_one_token():
    assert [tiling.default_shared(grid) for grid in ((64, 64), (45, 80), (3, 3), (21, 30, 52))] == [
        256,
        220,
        1,
        5 * 7 * 13,
    ]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "name"), [((45, 81), "45x81"), ((9,), "9"), ((3, 5, 7), "3x5x7")])
def test_a_closed_curve_that_does_not_exist_is_refused(grid, name):
    with pytest.raises(ValueError) as caught:
        tiling.curve_order(grid, "hilbert-closed")
    assert str(caught.value) == (
        f'`curve` must be "auto" or "hilbert" for a grid of {name}; got \'hilbert-closed\'. '
        "A closed curve needs an even number of tokens and two sides longer than 1."
    )
