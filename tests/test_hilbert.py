"""The Hilbert method's plans against its pattern written token by token: any grid, locality, pairs, caches."""

import dataclasses
import importlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.hilbert_cases import BLOCKS, cases, inputs_for, property_test
from tests.tiles import ORDERS, STATEMENTS, block_cover, labels, num_shared, paper, pattern

from nearfield import Geometry, attend_with, curves
from nearfield.methods.hilbert import layout

HILBERT = importlib.import_module("nearfield.methods.hilbert")


@pytest.mark.parametrize("statement", STATEMENTS)
def test_statement(statement):
    STATEMENTS[statement](HILBERT)


# -- any grid, any fields ----------------------------------------------------------------------------------------------


@given(cases(), BLOCKS, BLOCKS)
@settings(max_examples=120)
def test_a_plan_is_the_smallest_block_cover_of_the_pattern(case, q_block, k_block):
    method, geometry, layer = case
    plan = method.plan(geometry, layer, q_block=q_block, k_block=k_block)
    expected = block_cover(pattern(labels(method, geometry, layer, q_block)), q_block, k_block)
    assert torch.equal(plan.pair_counts()[0, 0], expected.int())
    assert bool(plan.to_mask()[0, 0].diagonal().all()), "a token does not read itself"


@given(cases())
@property_test
def test_a_plan_of_single_tokens_is_exactly_the_pattern(case):
    method, geometry, layer = case
    reads = method.plan(geometry, layer, q_block=1, k_block=1).to_mask()[0, 0]
    found = labels(method, geometry, layer, 1)
    assert torch.equal(reads, pattern(found))
    text = torch.zeros(geometry.num_tokens, dtype=torch.bool)
    text[slice(*geometry.text_span)] = True
    assert bool(reads[text].all()), "the text does not read everything"
    assert bool(reads[:, ~found.on_ring].all()), "text or shared tokens are not read by all"
    if method.share == "two-way":
        assert bool(reads[~found.on_ring].all()), "two-way tokens do not read everything"


@given(cases(), BLOCKS)
@property_test
def test_a_two_way_plan_is_symmetric(case, block):
    method, geometry, layer = case
    method = dataclasses.replace(method, share="two-way")
    plan = method.plan(geometry, layer, q_block=block, k_block=block)
    assert plan.transpose() == plan


@given(cases())
@property_test
def test_an_order_stays_inside_its_image_and_follows_the_curve(case):
    method, geometry, _ = case
    order = method.ordering(geometry).order
    offset = geometry.image_spans[0][0]
    assert len(order) == geometry.num_image_tokens
    for grid, (start, stop) in zip(geometry.images, geometry.image_spans, strict=True):
        count = num_shared(method, grid, (start, stop))
        part = order[start - offset : stop - offset] - (start - offset)
        on_curve = ORDERS[method.curve](grid)
        assert sorted(part.tolist()) == [*range(stop - start)]
        for cells in (part[:count], part[count:]):
            assert torch.equal(cells, on_curve[torch.isin(on_curve, cells)])


@pytest.mark.parametrize("grid", [(24, 24), (32, 32), (36, 36), (64, 64), (45, 80), (128, 128)])
def test_tiles_slide_with_the_blocks_of_every_device(grid):
    """Blocks are as large as the device likes, but never so large that all layers of a cycle are cut alike."""
    for device in ("cpu", "cuda"):
        q_block, k_block = layout.block_sizes(paper(), Geometry(grid, text=512), None, None, device)
        blocks = {"q_block": q_block, "k_block": k_block}
        plans = [paper().plan(Geometry(grid, text=512), layer, **blocks) for layer in range(4)]
        assert len({tuple(plan.blocks.flatten().tolist()) for plan in plans}) >= 2, (device, q_block)


def test_blocks_of_a_gpu_are_large_where_tiles_are():
    sizes = {
        side: layout.block_sizes(paper(), Geometry((side, side)), None, None, "cuda") for side in (16, 32, 64)
    }
    assert sizes == {16: (16, 16), 32: (32, 32), 64: (128, 128)}


@given(cases())
@property_test
def test_the_order_is_the_same_whatever_the_blocks(case):
    """An order made for one device serves another: rings begin where they do for every block."""
    method, geometry, _ = case
    rings = {layout.layout_of(method, geometry, q_block).segments[0].ring for q_block in (1, 16, 128)}
    assert len(rings) == 1


@given(cases(interleave=True), BLOCKS, st.integers(1, 7))
@property_test
def test_interleaved_heads_take_the_tiles_of_later_layers(case, block, heads):
    method, geometry, layer = case
    plan = method.plan(geometry, layer, heads=heads, q_block=block, k_block=block)
    alike = dataclasses.replace(method, interleave=False)
    found = plan.pair_counts()[0]
    assert len(found) == heads
    for head in range(heads):
        expected = alike.plan(geometry, layer + head, q_block=block, k_block=block)
        assert torch.equal(found[head], expected.pair_counts()[0, 0])


@given(cases())
@property_test
def test_layers_repeat_after_a_cycle(case):
    method, geometry, layer = case
    assert method.plan(geometry, layer) is method.plan(geometry, layer + method.cycle)


def test_over_a_cycle_every_token_meets_its_neighbours():
    geometry = Geometry((16, 20), text=16)
    method = paper(tiles=5, shared="none")
    met = torch.zeros(320, dtype=torch.bool)
    apart = 0
    for layer in range(4):
        reads = method.plan(geometry, layer).to_mask()[0, 0, 16:, 16:]
        with_next = reads[torch.arange(320), torch.arange(1, 321) % 320]
        apart += int((~with_next).sum())
        met |= with_next
    assert apart == 20, "each of the five cuts of each layer shall part two neighbours"
    assert bool(met.all())


def test_references_are_read_tile_by_tile():
    """Tile t of one image reads tile t of every other, however large that is."""
    geometry = Geometry((8, 8), references=((4, 8), (16, 8)))
    method = paper(tiles=4, shared="none", cycle=2)
    reads = method.plan(geometry, 0, q_block=8, k_block=8).to_mask()[0, 0]
    for tile in range(4):
        expected = torch.zeros(geometry.num_tokens, dtype=torch.bool)
        for (start, _), size in zip(geometry.image_spans, (16, 8, 32), strict=True):
            expected[start + tile * size : start + (tile + 1) * size] = True
        assert bool((reads[expected] == expected).all())


# -- locality ----------------------------------------------------------------------------------------------------------


# The largest radius of a tile, over that of a cube of as many tokens. Measured: 1.3 to 1.5 for these grids; 2.5 and
# more for raster and Morton order, and for the open curve, whose wrapping tile is torn in two.
LARGEST_RADIUS = 1.5


@pytest.mark.parametrize("grid", [(64, 64), (45, 80), (90, 160), (12, 24, 24)])
def test_tiles_of_every_layer_are_compact(grid):
    assert largest_radius(grid, "auto") < LARGEST_RADIUS
    assert largest_radius(grid, "raster") > 2 * LARGEST_RADIUS


def largest_radius(grid, curve):
    geometry = Geometry(grid)
    method = paper(tiles=16, shared="none", curve=curve)
    axes = torch.meshgrid(*[torch.arange(side).double() for side in grid], indexing="ij")
    places = method.ordering(geometry).enter(torch.stack(axes, -1).flatten(0, -2), dim=0)
    ratios = []
    for layer in range(4):
        plan = method.plan(geometry, layer)
        lists = {tuple(row) for row in rows_of(plan)}
        assert len(lists) == 16
        for blocks in lists:
            tokens = torch.tensor(blocks)[:, None] * plan.k_block + torch.arange(plan.k_block)
            tile = places[tokens.flatten()[tokens.flatten() < len(places)]]
            radius = (tile - tile.mean(0)).square().sum(1).mean().sqrt()
            side = len(tile) ** (1 / len(grid))
            ratios.append(float(radius) / math.sqrt(len(grid) * (side**2 - 1) / 12))
    return max(ratios)


def rows_of(plan):
    cuts = plan.offsets[0, 0].tolist()
    ids = plan.blocks[0, 0].tolist()
    return [ids[begin:end] for begin, end in itertools.pairwise(cuts)]


def test_a_closed_curve_keeps_the_tile_that_wraps_together():
    geometry = Geometry((32, 32))
    longest = {}
    for curve in ("hilbert", "hilbert-closed"):
        method = paper(tiles=16, shared="none", curve=curve)
        reads = method.plan(geometry, 2).to_mask()[0, 0, 0]
        places = torch.stack(torch.unravel_index(method.ordering(geometry).order[reads], (32, 32)))
        longest[curve] = int((places.amax(1) - places.amin(1)).max()) + 1
    assert longest == {"hilbert": 32, "hilbert-closed": 8}


# -- pairs -------------------------------------------------------------------------------------------------------------


def even_cuts(ring, tiles, phase, cycle, unit):
    """Sizes of tiles of a ring that begins and ends on multiples of the unit."""
    begins = [
        math.floor((tile + phase / cycle) * ring / tiles / unit + 0.5) * unit for tile in range(tiles + 1)
    ]
    return [later - earlier for earlier, later in itertools.pairwise(begins)]


def two_way_pairs(ring, always, sizes):
    """Text and shared tokens read all and are read by all; the ring reads tiles."""
    return always * (always + ring) + ring * always + sum(size**2 for size in sizes)


@pytest.mark.parametrize(
    ("side", "tiles", "bound"), [(64, 4, 2.09), (64, 16, 2.87), (128, 4, 2.63), (128, 16, 4.44)]
)
def test_pairs_of_flux_two_way_in_exact_arithmetic(side, tiles, bound):
    """The blocks divide every tile and every shift, so nothing is rounded."""
    shared = side**2 // 16
    ring, always = side**2 - shared, 512 + shared
    exact = two_way_pairs(ring, always, [ring // tiles] * tiles)
    block = math.gcd(ring // tiles // 4, 16)
    geometry = Geometry((side, side), text=512)
    for layer in range(4):
        plan = paper(tiles=tiles).plan(geometry, layer, q_block=block, k_block=block)
        assert plan.num_pairs == exact
    assert round(geometry.num_tokens**2 / exact, 2) == bound


def test_pairs_without_a_shared_region_in_exact_arithmetic():
    geometry = Geometry((64, 64), text=512)
    plan = paper(tiles=16, shared="none").plan(geometry, 1, q_block=64, k_block=64)
    assert plan.num_pairs == two_way_pairs(4096, 512, [256] * 16)
    assert round(geometry.num_tokens**2 / plan.num_pairs, 2) == 3.86


@pytest.mark.parametrize(("side", "bound"), [(64, "2.85"), (128, "4.44")])
def test_pairs_of_flux_two_way_on_a_gpu(side, bound):
    """Blocks of 128 queries: tiles of 240 tokens are rounded, those of 960 as well."""
    geometry = Geometry((side, side), text=512)
    ring, always = side**2 * 15 // 16, 512 + side**2 // 16
    total = 0
    for layer in range(4):
        plan = paper(tiles=16).plan(geometry, layer, q_block=128, k_block=128)
        assert plan.num_pairs == two_way_pairs(ring, always, even_cuts(ring, 16, layer, 4, 128))
        total += plan.num_pairs
    assert f"{4 * geometry.num_tokens**2 / total:.2f}" == bound
    assert f"(at most {bound}x faster than dense)" in paper().describe(geometry, device="cuda")


@pytest.mark.parametrize(
    ("side", "tiles", "shared", "bound"),
    [(128, 16, 1024, "5.75"), (128, 16, 256, "7.56"), (256, 64, 256, "28.89")],
)
def test_pairs_of_flux_keys_only_on_a_gpu(side, tiles, shared, bound):
    """A block of shared queries reads the tiles of all its tokens; how many those are, the curve decides."""
    geometry = Geometry((side, side), text=512)
    method = paper(tiles=tiles, share="keys", shared_tokens=shared)
    ring, always = side**2 - shared, 512 + shared
    order = method.ordering(geometry).order
    centre = torch.zeros(side**2, dtype=torch.bool)
    centre[order[:shared]] = True
    on_curve = centre[curves.hilbert((side, side))]
    places = (~on_curve).cumsum(0)[on_curve]
    total = 0
    for layer in range(4):
        sizes = even_cuts(ring, tiles, layer, 4, 128)
        first = math.floor(layer / 4 * ring / tiles / 128 + 0.5) * 128
        ends = torch.tensor(sizes).cumsum(0)
        tile = torch.searchsorted(ends, (places - first) % ring, right=True)
        seen = [sum(sizes[one] for one in set(block.tolist())) for block in tile.split(128)]
        pairs = 512 * geometry.num_tokens + side**2 * always
        pairs += sum(size**2 for size in sizes) + 128 * sum(seen)
        assert method.plan(geometry, layer, q_block=128, k_block=128).num_pairs == pairs
        total += pairs
    assert f"{4 * geometry.num_tokens**2 / total:.2f}" == bound
    assert f"(at most {bound}x faster than dense)" in method.describe(geometry, device="cuda")


def test_a_reader_counts_its_summaries():
    geometry = Geometry((16, 16), text=32)
    method = paper(tiles=4, shared="none", far=32)
    reader = method.layer(geometry)
    assert reader.num_pairs == two_way_pairs(256, 32, [64] * 4) + 256 * 6
    interleaved = dataclasses.replace(method, interleave=True).layer(geometry, heads=4)
    assert interleaved.num_pairs == reader.num_pairs


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [1, 4, 5])
@pytest.mark.parametrize("interleave", [False, True])
def test_a_geometry_has_at_most_a_cycle_of_plans(cycle, interleave):
    geometry = Geometry((10, 12), text=7)
    for cache in (
        HILBERT.near_plan,
        HILBERT.far_field_of,
        HILBERT.interleaved_near_plan,
        HILBERT.interleaved_far_field,
    ):
        cache.cache_clear()
    seen, far = set(), set()
    for step in range(3):
        method = paper(
            tiles=3, far=8, cycle=cycle, interleave=interleave, dense_steps=step, dense_layers=step
        )
        for layer in range(57):
            reader = method.layer(geometry, layer, heads=4)
            seen.add(id(reader.near))
            far.add(id(reader.far.plan))
    assert len(seen) == len(far) == cycle
    assert HILBERT.near_plan.cache_info().currsize == HILBERT.far_field_of.cache_info().currsize == cycle


def test_equal_questions_have_one_answer():
    geometry = Geometry((10, 12), text=7)
    again = Geometry([10, 12], text=7)
    assert paper(tiles=3).plan(geometry, 5) is paper(tiles=3).plan(again, 1, device=torch.device("cpu"))
    assert paper(tiles=3).ordering(geometry) is paper(tiles=3, dense_layers=0).ordering(again)
    assert paper(tiles=3).plan(geometry) is not paper(tiles=4).plan(geometry)
    assert paper(tiles=3, far=8).layer(geometry).far is paper(tiles=3, far=8).layer(again).far


@pytest.mark.parametrize("interleave", [False, True])
def test_what_was_made_in_inference_mode_can_train(interleave):
    geometry = Geometry((11, 12), text=9)
    method = paper(tiles=3, far=8, interleave=interleave)
    inputs = inputs_for(geometry)
    with torch.inference_mode():
        ordering = method.ordering(geometry)
        quietly = attend_with(method, *inputs, geometry, 1)
    assert not ordering.order.is_inference()
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend_with(method, *leaves, geometry, 1)
    out.square().sum().backward()
    with torch.no_grad():
        assert torch.equal(attend_with(method, *inputs, geometry, 1), quietly)
    assert torch.equal(out, quietly)
    assert all(bool(leaf.grad.abs().sum() > 0) for leaf in leaves)
    image = torch.randn(1, 132, 4, requires_grad=True)
    ordering.leave(ordering.enter(image)).sum().backward()
    assert torch.equal(image.grad, torch.ones_like(image))


def test_plans_go_where_they_are_asked_to():
    geometry = Geometry((10, 12), text=7)
    plan = paper(tiles=3).plan(geometry, device="meta")
    assert plan.device.type == "meta"
    assert plan.layout == paper(tiles=3).plan(geometry).layout
    assert paper(tiles=3).ordering(geometry, device="meta").order.device.type == "meta"


def test_torch_defaults_do_not_matter():
    """Models are made under `torch.device("meta")` or with half precision as the default."""
    geometry = Geometry((23, 31), text=19, references=((10, 11),))
    methods_at_hand = [paper(tiles=7, far=24, share=share, cycle=3) for share in ("two-way", "keys")]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            made = [method.layer(geometry, 2) for method in methods_at_hand]
            orders = [method.ordering(geometry).order for method in methods_at_hand]
    finally:
        torch.set_default_dtype(torch.float32)
    for cache in (HILBERT.layout_of, HILBERT.near_plan, HILBERT.far_field_of, HILBERT.ordering_of):
        cache.cache_clear()
    for method, reader, order in zip(methods_at_hand, made, orders, strict=True):
        expected = method.layer(geometry, 2)
        assert reader.near == expected.near
        assert reader.far.plan == expected.far.plan
        assert torch.equal(reader.far.bias, expected.far.bias)
        assert torch.equal(order, method.ordering(geometry).order)
