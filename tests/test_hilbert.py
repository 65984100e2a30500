"""The Hilbert method against its pattern written token by token, its far field against one dense softmax."""

import dataclasses
import functools
import importlib
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attending import Call, assert_within_budget
from tests.tiles import (
    ORDERS,
    STATEMENTS,
    block_cover,
    far_formula,
    has_closed_curve,
    labels,
    num_shared,
    paper,
    pattern,
    times_counted,
    unit_of,
    windows,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from nearfield import Geometry, Hilbert, HilbertAttention, attend, curves, hilbert_attention, planning
from nearfield.methods import hilbert

HILBERT = importlib.import_module("nearfield.methods.hilbert")
BLOCKS = st.sampled_from([1, 2, 4, 8, 16])
FAR = st.integers(2, 24)

property_test = settings(max_examples=80)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_statement(statement):
    STATEMENTS[statement](HILBERT)


# -- any grid, any fields ----------------------------------------------------------------------------------------------

grids = st.one_of(
    st.tuples(st.integers(1, 90)),
    st.tuples(st.integers(1, 14), st.integers(1, 14)),
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 6)),
)


@st.composite
def geometries(draw):
    return Geometry(
        draw(grids),
        text=draw(st.integers(0, 40)),
        text_first=draw(st.booleans()),
        references=tuple(draw(st.lists(grids, max_size=2))),
    )


@st.composite
def methods(draw, geometry, far, interleave):
    tiles, tile_size = draw(
        st.one_of(
            st.tuples(st.none() | st.integers(1, 20), st.none()),
            st.tuples(st.none(), st.integers(1, 120)),
        )
    )
    shared = draw(st.sampled_from(["centre", "distributed", "none"]))
    names = [
        name for name in ORDERS if name != "hilbert-closed" or all(map(has_closed_curve, geometry.images))
    ]
    return paper(
        tiles=tiles,
        tile_size=tile_size,
        cycle=draw(st.integers(1, 5)),
        shared=shared,
        share=draw(st.sampled_from(["two-way", "keys"])),
        shared_tokens=None if shared == "none" else draw(st.none() | st.integers(1, 60)),
        curve=draw(st.sampled_from(names)),
        far=draw(FAR) if far else None,
        interleave=interleave,
    )


@st.composite
def cases(draw, far=False, interleave=False):
    """A method, a geometry and a layer."""
    geometry = draw(geometries())
    return draw(methods(geometry, far, interleave)), geometry, draw(st.integers(0, 9))


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
        q_block, k_block = hilbert._blocks(paper(), Geometry(grid, text=512), None, None, device)
        blocks = {"q_block": q_block, "k_block": k_block}
        plans = [paper().plan(Geometry(grid, text=512), layer, **blocks) for layer in range(4)]
        assert len({tuple(plan.blocks.flatten().tolist()) for plan in plans}) >= 2, (device, q_block)


def test_blocks_of_a_gpu_are_large_where_tiles_are():
    sizes = {
        side: hilbert._blocks(paper(), Geometry((side, side)), None, None, "cuda") for side in (16, 32, 64)
    }
    assert sizes == {16: (16, 16), 32: (32, 32), 64: (128, 128)}


@given(cases())
@property_test
def test_the_order_is_the_same_whatever_the_blocks(case):
    """An order made for one device serves another: rings begin where they do for every block."""
    method, geometry, _ = case
    rings = {hilbert._layout(method, geometry, q_block).segments[0].ring for q_block in (1, 16, 128)}
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
    reader = method.reader(geometry)
    assert reader.num_pairs == two_way_pairs(256, 32, [64] * 4) + 256 * 6
    interleaved = dataclasses.replace(method, interleave=True).reader(geometry, heads=4)
    assert interleaved.num_pairs == reader.num_pairs


# -- the far field -----------------------------------------------------------------------------------------------------


def fitting(method, q_block, k_block):
    """The block of keys, or one that the far field takes."""
    return math.gcd(k_block, unit_of(method, q_block))


@given(cases(far=True), BLOCKS, BLOCKS)
@settings(max_examples=120)
def test_every_query_counts_every_token_once(case, q_block, k_block):
    method, geometry, layer = case
    reader = method.reader(geometry, layer, q_block=q_block, k_block=fitting(method, q_block, k_block))
    counted = times_counted(reader, geometry)
    torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)


@given(cases(far=True), BLOCKS, BLOCKS)
@settings(max_examples=60)
def test_attending_with_a_far_field_is_one_dense_softmax(case, q_block, k_block):
    method, geometry, layer = case
    k_block = fitting(method, q_block, k_block)
    reader = method.reader(geometry, layer, q_block=q_block, k_block=k_block)
    found = labels(method, geometry, layer, q_block)
    near = block_cover(pattern(found), q_block, k_block)
    generator = torch.Generator().manual_seed(layer)
    shape = 3, 1, 2, geometry.num_tokens, 4
    query, key, value = torch.randn(shape, generator=generator, dtype=torch.float64)
    bias = torch.zeros(1, 1, geometry.num_tokens)
    if geometry.text > 1:  # padded text; its rows still read the image
        bias[..., slice(*geometry.text_span)][..., 1::2] = -torch.inf
    got = reader.attend(query, key, value, key_bias=bias)
    out, lse = far_formula(query, key, value, near, windows(found, method.far, k_block), bias)
    torch.testing.assert_close(got.out, out)
    torch.testing.assert_close(got.lse, lse)


@given(cases(far=True, interleave=True))
@settings(max_examples=30)
def test_interleaved_heads_have_far_fields_of_their_own(case):
    method, geometry, layer = case
    reader = method.reader(geometry, layer, heads=3)
    for head in range(3):
        counted = times_counted(reader, geometry, head)
        torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)


def test_summaries_have_the_size_asked_for():
    geometry = Geometry((16, 16), text=16)
    far = paper(tiles=4, shared="none", far=32).reader(geometry).far
    assert far.spans == ((16, 272),)
    assert far.sizes.tolist() == [16, *[32] * 7, 16]
    torch.testing.assert_close(far.bias.exp(), far.sizes.float())


def test_what_everyone_reads_anyway_is_not_summarised():
    """Ten tokens of text end inside a block of 16: the six image tokens in it are read by all."""
    reader = paper(tiles=4, shared="none", far=32).reader(Geometry((16, 16), text=10))
    assert reader.far.spans == ((16, 266),)
    assert bool(reader.near.to_mask()[0, 0, :, :16].all())


def test_where_nothing_is_far_there_is_no_far_field():
    geometry = Geometry((2, 3), text=4)
    reader = paper(far=8).reader(geometry)
    assert reader.far is None
    assert reader.near == planning.full(10, q_block=16, k_block=16)
    assert paper(far=8, interleave=True).reader(geometry, heads=2).far is None


def test_a_summary_of_equal_tokens_is_exact():
    """Where all tokens of a window are alike, near and far together are dense attention."""
    geometry = Geometry((16, 16), text=16)
    method = paper(tiles=4, shared="none", far=16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 272, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 17, 8, generator=generator, dtype=torch.float64).repeat_interleave(
        16, 3
    )
    got = hilbert_attention(query, key, value, geometry, 1, method=method)
    torch.testing.assert_close(got, scaled_dot_product_attention(query, key, value))


def test_summaries_are_summed_in_full_precision():
    geometry = Geometry((32, 32), text=0)
    far = paper(tiles=4, shared="none", far=512).reader(geometry).far
    tokens = torch.full((1, 1, 1024, 1), 1.0, dtype=torch.bfloat16)
    assert far.pooled(tokens).flatten().tolist() == [1.0, 1.0]
    assert far.pooled(tokens).dtype == torch.bfloat16


# -- attending ---------------------------------------------------------------------------------------------------------


def inputs_for(geometry, heads=2, dim=8, batch=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, heads, geometry.num_tokens, dim, generator=generator, dtype=dtype).unbind()


def test_attention_reads_the_plan_of_its_layer():
    geometry = Geometry((12, 20), text=24, references=((8, 10),))
    inputs = inputs_for(geometry)
    for method in (paper(tiles=5), paper(tiles=5, share="keys", interleave=True)):
        for layer in range(4):
            plan = method.plan(geometry, layer, heads=2)
            out = hilbert_attention(*inputs, geometry, layer, method=method)
            assert torch.equal(out, attend(*inputs, plan).out)
            assert_within_budget(Call(*inputs, plan), "grouped")


WEIGHTED = paper(tiles=4, far=8, shared="none", summary="weighted")


def test_weighted_summaries_are_exact_for_the_mean_query():
    """Where all queries are alike, windows stand for their tokens exactly, however these differ."""
    geometry = Geometry((12, 16), text=10)
    query, key, value = inputs_for(geometry, batch=2, dtype=torch.float64)
    query = query[:, :, 20:21].expand_as(query)
    everything = scaled_dot_product_attention(query, 3 * key, value)
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    close(hilbert_attention(query, 3 * key, value, geometry, 1, method=WEIGHTED), everything)
    rough = hilbert_attention(
        query, 3 * key, value, geometry, 1, method=dataclasses.replace(WEIGHTED, summary="mean")
    )
    assert (rough - everything).abs().max() > 0.1


def test_weighted_summaries_are_means_where_keys_are_alike():
    geometry = Geometry((12, 16), text=16)
    query, key, value = inputs_for(geometry, dtype=torch.float64)
    key = key.clone()
    key[:, :, 16:] = key[:, :, 16::8].repeat_interleave(8, 2)
    mean, weighted = (
        hilbert_attention(
            query, key, value, geometry, 2, method=dataclasses.replace(WEIGHTED, summary=summary)
        )
        for summary in ("mean", "weighted")
    )
    torch.testing.assert_close(weighted, mean)


def test_weighted_summaries_are_nearer_to_full_attention():
    geometry = Geometry((24, 24), text=16)
    query, key, value = inputs_for(geometry, dtype=torch.float64)
    query, key = 1.5 * query + 1, key + 0.5
    full = scaled_dot_product_attention(query, key, value)
    errors = [
        (hilbert_attention(query, key, value, geometry, 0, method=method) - full).norm()
        for method in (WEIGHTED, dataclasses.replace(WEIGHTED, summary="mean"))
    ]
    assert errors[0] < 0.9 * errors[1]


def test_weighted_summaries_are_differentiated_and_shared_by_heads():
    geometry = Geometry((6, 8), text=3)
    reader = dataclasses.replace(WEIGHTED, tiles=3).reader(geometry, 1, device="cpu")
    assert reader.far.plan.num_pairs > 0
    shapes = [(1, 2, 51, 2), (1, 1, 51, 2), (1, 1, 51, 2)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *x: reader.attend(*x).out, leaves)
    inputs = [torch.randn(1, heads, 51, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    copied = [inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])]
    # Heads that share keys share a mean query, so the copies agree where their queries do.
    same = inputs[0][:, ::2].repeat_interleave(2, 1)
    torch.testing.assert_close(reader.attend(same, *inputs[1:]).out, reader.attend(same, *copied[1:]).out)


def test_the_default_method_is_the_default():
    geometry = Geometry((16, 16), text=16)
    inputs = inputs_for(geometry)
    expected = hilbert_attention(*inputs, geometry, 3, method=Hilbert(tiles=16, shared="none", far=16))
    assert torch.equal(hilbert_attention(*inputs, geometry, 3), expected)


def test_hidden_keys_are_as_if_they_were_not_there():
    geometry = Geometry((8, 12), text=20)
    method = paper(tiles=3, far=8)
    query, key, value = inputs_for(geometry, batch=2, dtype=torch.float64)
    mask = torch.ones(2, geometry.num_tokens, dtype=torch.bool)
    mask[0, 12:20] = False
    mask[1, 5:20] = False
    out = hilbert_attention(query, key, value, geometry, 1, method=method, key_mask=mask)
    other = torch.where(mask[:, None, :, None], key, 7.0), torch.where(mask[:, None, :, None], value, 7.0)
    again = hilbert_attention(query, *other, geometry, 1, method=method, key_mask=mask)
    torch.testing.assert_close(out, again, rtol=0, atol=0)
    found = labels(method, geometry, 1, 16)
    near = block_cover(pattern(found), 16, 16)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[:, None]
    expected, _ = far_formula(query, key, value, near, windows(found, 8, 16), bias)
    torch.testing.assert_close(out, expected)
    shared = hilbert_attention(query[:1], key[:1], value[:1], geometry, 1, method=method, key_mask=mask[:1])
    torch.testing.assert_close(shared, out[:1])


@pytest.mark.parametrize(
    "method",
    [
        paper(tiles=2, shared="none", far=8),
        paper(tiles=3, shared_tokens=8, share="keys", far=4, interleave=True, cycle=2),
    ],
    ids=["far", "far, interleaved, keys"],
)
def test_gradients_of_attention(method):
    geometry = Geometry((6, 8), text=5)
    inputs = [x.requires_grad_() for x in inputs_for(geometry, heads=1, dim=2, dtype=torch.float64)]
    mask = torch.ones(1, geometry.num_tokens, dtype=torch.bool)
    mask[0, 3:5] = False

    def attention(query, key, value):
        return hilbert_attention(query, key, value, geometry, 1, method=method, key_mask=mask)

    assert method.reader(geometry, 1, heads=1).far.plan.num_pairs > 0
    assert torch.autograd.gradcheck(attention, inputs)


def test_scale_and_implementation_are_passed_on():
    geometry = Geometry((8, 8), text=8)
    method = paper(tiles=2, shared="none", far=8)
    inputs = inputs_for(geometry, dtype=torch.float64)
    outs = [
        hilbert_attention(*inputs, geometry, 1, method=method, scale=0.7, impl=impl)
        for impl in ("reference", "grouped")
    ]
    torch.testing.assert_close(*outs)
    scaled = inputs[0] * 0.7 * math.sqrt(8), *inputs[1:]
    torch.testing.assert_close(hilbert_attention(*scaled, geometry, 1, method=method), outs[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("method", [paper(tiles=4), paper(tiles=4, far=16)], ids=["near", "far"])
def test_a_prepared_reader_compiles_whole(method, backend):
    geometry = Geometry((12, 12), text=16)
    reader = method.reader(geometry, 1)
    bias = torch.zeros(1, 1, geometry.num_tokens)
    bias[..., 10:16] = -torch.inf

    def loss(query, key, value):
        return reader.attend(query, key, value, key_bias=bias).out.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    gradients = []
    for function in (loss, compiled):
        leaves = [x.requires_grad_() for x in inputs_for(geometry, dtype=torch.float64)]
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    torch._dynamo.reset()
    for eager, fast in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, eager)


# torch's remarks on itself: on caches it looks through, and where a graph that is broken is taken up again.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_layer_compiles_in_pieces():
    """With plain tiles, since torch traces how the plan is made."""
    geometry = Geometry((6, 8), text=5)
    layer = make_layer(method=paper(tiles=3, shared="none", curve="raster"))
    x = torch.randn(1, geometry.num_tokens, 24, dtype=torch.float64)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x, geometry), layer(x, geometry))
    torch._dynamo.reset()


# -- the module --------------------------------------------------------------------------------------------------------


def make_layer(**changes):
    torch.manual_seed(0)
    arguments = {"dim": 24, "heads": 3, "layer": 1, "method": paper(tiles=3, far=16)} | changes
    return HilbertAttention(**arguments).double()


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_one_tile_is_dense_attention(bias):
    geometry = Geometry((6, 7), text=5)
    layer = make_layer(method=paper(tiles=1, shared="none"), bias=bias)
    x = torch.randn(2, geometry.num_tokens, 24, dtype=torch.float64)
    query, key, value = layer.to_qkv(x).chunk(3, -1)
    heads = [part.unflatten(-1, (3, 8)).transpose(1, 2) for part in (query, key, value)]
    weights = (heads[0] @ heads[1].mT / math.sqrt(8)).softmax(-1)
    dense = layer.to_out((weights @ heads[2]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, geometry), dense)
    assert (layer.to_qkv.bias is not None) == bias


def test_a_layer_is_the_function_between_projections():
    geometry = Geometry((6, 8), text=5)
    layer = make_layer()
    x = torch.randn(1, geometry.num_tokens, 24, dtype=torch.float64)
    mask = torch.ones(1, geometry.num_tokens, dtype=torch.bool)
    mask[0, 2:5] = False
    query, key, value = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in layer.to_qkv(x).chunk(3, -1))
    out = hilbert_attention(query, key, value, geometry, 1, method=layer.method, key_mask=mask)
    torch.testing.assert_close(layer(x, geometry, mask), layer.to_out(out.transpose(1, 2).flatten(2)))


def test_a_layer_keeps_its_state():
    geometry = Geometry((6, 8), text=5)
    layer = make_layer()
    other = HilbertAttention(24, 3, 1, paper(tiles=3, far=16)).double()
    x = torch.randn(1, geometry.num_tokens, 24, dtype=torch.float64)
    assert not torch.equal(layer(x, geometry), other(x, geometry))
    assert set(layer.state_dict()) == {"to_qkv.weight", "to_qkv.bias", "to_out.weight", "to_out.bias"}
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, geometry), other(x, geometry))


def test_gradients_reach_every_parameter_and_token_and_are_bit_equal():
    geometry = Geometry((6, 8), text=5)
    layer = make_layer().float()
    found = []
    for _ in range(2):
        x = torch.randn(1, geometry.num_tokens, 24, generator=torch.Generator().manual_seed(1))
        leaves = [x.requires_grad_(), *layer.parameters()]
        found.append(torch.autograd.grad(layer(x, geometry).square().sum(), leaves))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)
        assert bool(first.abs().sum() > 0)
    assert bool((found[0][0].abs().sum(-1) > 0).all()), "a token without a gradient"


def test_layers_can_be_checkpointed():
    geometry = Geometry((6, 8), text=5)
    layer = make_layer().float()
    x = torch.randn(1, geometry.num_tokens, 24)
    found = []
    for run in (layer, lambda *args: checkpoint(layer, *args, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(run(leaf, geometry).square().sum(), [leaf, *layer.parameters()]))
    assert all(torch.equal(plain, again) for plain, again in zip(*found, strict=True))


# -- caches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cycle", [1, 4, 5])
@pytest.mark.parametrize("interleave", [False, True])
def test_a_geometry_has_at_most_a_cycle_of_plans(cycle, interleave):
    geometry = Geometry((10, 12), text=7)
    for cache in (HILBERT._plan, HILBERT._far_field, HILBERT._interleaved_plan, HILBERT._interleaved_far):
        cache.cache_clear()
    seen, far = set(), set()
    for step in range(3):
        method = paper(
            tiles=3, far=8, cycle=cycle, interleave=interleave, dense_steps=step, dense_layers=step
        )
        for layer in range(57):
            reader = method.reader(geometry, layer, heads=4)
            seen.add(id(reader.near))
            far.add(id(reader.far.plan))
    assert len(seen) == len(far) == cycle
    assert HILBERT._plan.cache_info().currsize == HILBERT._far_field.cache_info().currsize == cycle


def test_equal_questions_have_one_answer():
    geometry = Geometry((10, 12), text=7)
    again = Geometry([10, 12], text=7)
    assert paper(tiles=3).plan(geometry, 5) is paper(tiles=3).plan(again, 1, device=torch.device("cpu"))
    assert paper(tiles=3).ordering(geometry) is paper(tiles=3, dense_layers=0).ordering(again)
    assert paper(tiles=3).plan(geometry) is not paper(tiles=4).plan(geometry)
    assert paper(tiles=3, far=8).reader(geometry).far is paper(tiles=3, far=8).reader(again).far


@pytest.mark.parametrize("interleave", [False, True])
def test_what_was_made_in_inference_mode_can_train(interleave):
    geometry = Geometry((11, 12), text=9)
    method = paper(tiles=3, far=8, interleave=interleave)
    inputs = inputs_for(geometry)
    with torch.inference_mode():
        ordering = method.ordering(geometry)
        quietly = hilbert_attention(*inputs, geometry, 1, method=method)
    assert not ordering.order.is_inference()
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = hilbert_attention(*leaves, geometry, 1, method=method)
    out.square().sum().backward()
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
            made = [method.reader(geometry, 2) for method in methods_at_hand]
            orders = [method.ordering(geometry).order for method in methods_at_hand]
    finally:
        torch.set_default_dtype(torch.float32)
    for cache in (HILBERT._layout, HILBERT._plan, HILBERT._far_field, HILBERT._ordering):
        cache.cache_clear()
    for method, reader, order in zip(methods_at_hand, made, orders, strict=True):
        expected = method.reader(geometry, 2)
        assert reader.near == expected.near
        assert reader.far.plan == expected.far.plan
        assert torch.equal(reader.far.bias, expected.far.bias)
        assert torch.equal(order, method.ordering(geometry).order)


# -- when it applies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "of", "dense"),
    [
        (0.2, 50, 10),
        (0.2, 28, 6),
        (0.2, 4, 1),
        (0.2, 1, 1),
        (0.07, 100, 7),
        (0.55, 100, 55),
        (0.0, 50, 0),
        (0, 50, 0),
        (3, 50, 3),
        (3, 2, 2),
        (1, 50, 1),
        (5.0, 50, 5),
    ],
)
def test_dense_steps(steps, of, dense):
    assert paper(dense_steps=steps).num_dense_steps(of) == dense


@pytest.mark.parametrize(
    ("layers", "dense"),
    [
        (1, {0}),
        (0, set()),
        (3, {0, 1, 2}),
        ((0, 5), {0, 5}),
        ([0, -1], {0, 56}),
        ((-2, -1), {55, 56}),
        ((), set()),
    ],
)
def test_dense_layers(layers, dense):
    method = paper(dense_layers=layers)
    reasons = {layer: method.dense_layer_reason(layer, 57) for layer in range(57)}
    assert {layer for layer, reason in reasons.items() if reason is not None} == dense
    words = f"dense_layers={layers if isinstance(layers, int) else tuple(layers)}"
    assert {reason for reason in reasons.values() if reason is not None} <= {words}


# -- words -------------------------------------------------------------------------------------------------------------


def test_describe_says_what_the_fields_come_to():
    words = paper().describe(Geometry((64, 64), text=512), q_block=128).split("\n")
    assert words[0] == "512 text + 64x64: 4608 tokens"
    assert words[1].startswith("  64x64 along generalised closed, locality 1.163 (lowest of: ")
    assert words[2:] == [
        "    shared: 256 tokens, centre, read all and are read by all",
        "    tiles: 16 of 128 to 256 tokens, shifted by 0, 0, 128, 128 in turn "
        "(exactly: 16 of 240, shifted by 60; cuts lie on multiples of 128)",
        "  pairs kept: 35.0% (at most 2.85x faster than dense)",
    ]


def test_describe_says_what_was_rounded():
    geometry = Geometry((20, 31), text=77, references=((6, 6),))
    words = paper(tile_size=100, share="keys", shared="distributed", far=32, curve="morton").describe(
        geometry
    )
    assert "20x31 along the morton order" in words
    assert "shared: 51 tokens, distributed, are read by all (asked for 35; rounded to whole blocks)" in words
    assert "tiles: 6 of 89 to 96 tokens, shifted by 0, 32, 32, 64 in turn" in words
    assert "far field: 18 summaries of 32 tokens" in words
    assert "6x6 along the morton order" in words
    assert words.count("far field") == 2


def test_describe_without_a_shared_region():
    words = paper(shared="none", tiles=4, curve="hilbert", interleave=True).describe(Geometry((32, 32)))
    assert "shared: none" in words
    assert "tiles: 4 of 256 tokens, shifted by 0, 64, 128, 192 in turn" in words
    assert "pairs kept: 25.0% (at most 4.00x faster than dense)" in words


def test_describe_an_image_that_is_shared_whole():
    words = paper().describe(Geometry((3, 3), text=5))
    assert (
        "shared: 9 tokens, centre, read all and are read by all (asked for 1; rounded to whole blocks)"
        in words
    )
    assert "tiles: none: every token is shared" in words
    assert "pairs kept: 100.0% (at most 1.00x faster than dense)" in words


# -- errors ------------------------------------------------------------------------------------------------------------

GEOMETRY = Geometry((8, 8), text=4)
INPUTS = inputs_for(GEOMETRY)
BLOCK_RULE = "must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192"
NO_GEOMETRY = "`geometry` must be a Geometry; got tuple. Write Geometry(grid=(64, 64), text=512)."
STEPS_RULE = "`dense_steps` must be a share from 0 to 1 or a whole number of steps"

BAD = [
    (
        lambda: paper(tiles=4, tile_size=64),
        ValueError,
        "`tile_size` must be given instead of `tiles`, not with it; got (4, 64).",
    ),
    (lambda: paper(tiles=0), ValueError, "`tiles` must be at least 1; got 0."),
    (lambda: paper(tiles=4.0), TypeError, "`tiles` must be an integer; got float."),
    (lambda: paper(tiles=True), TypeError, "`tiles` must be an integer; got bool."),
    (lambda: paper(tile_size=0), ValueError, "`tile_size` must be at least 1; got 0."),
    (lambda: paper(cycle=0), ValueError, "`cycle` must be at least 1; got 0."),
    (lambda: paper(cycle=None), TypeError, "`cycle` must be an integer; got NoneType."),
    (
        lambda: paper(shared="center"),
        ValueError,
        "`shared` must be one of 'centre', 'distributed', 'none'; got 'center'.",
    ),
    (lambda: paper(share="both"), ValueError, "`share` must be one of 'two-way', 'keys'; got 'both'."),
    (lambda: paper(shared_tokens=0), ValueError, "`shared_tokens` must be at least 1; got 0."),
    (
        lambda: paper(shared="none", shared_tokens=16),
        ValueError,
        '`shared_tokens` must be left out where `shared` is "none"; got 16.',
    ),
    (
        lambda: paper(curve="peano"),
        ValueError,
        "`curve` must be one of 'auto', 'hilbert', 'hilbert-closed', 'morton', 'raster'; got 'peano'.",
    ),
    (lambda: paper(far=1), ValueError, "`far` must be at least 2; got 1."),
    (lambda: paper(far=64.0), TypeError, "`far` must be an integer; got float."),
    (
        lambda: paper(dense_layers=0.5),
        TypeError,
        "`dense_layers` must be a number of layers or their indices; got 0.5.",
    ),
    (lambda: paper(dense_layers=-1), ValueError, "`dense_layers` must be at least 0; got -1."),
    (lambda: paper(dense_layers=(0, 1.5)), TypeError, "`dense_layers` must hold integers; got 1.5."),
    (
        lambda: paper(dense_steps="half"),
        TypeError,
        "`dense_steps` must be a number of steps, or a share of them below 1; got 'half'.",
    ),
    (lambda: paper(dense_steps=-1), ValueError, f"{STEPS_RULE}; got -1."),
    (lambda: paper(dense_steps=1.5), ValueError, f"{STEPS_RULE}; got 1.5."),
    (lambda: paper(dense_steps=math.nan), ValueError, f"{STEPS_RULE}; got nan."),
    (lambda: paper(interleave=1), TypeError, "`interleave` must be True or False; got 1."),
    (lambda: paper().plan((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: paper().reader((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: paper().ordering((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: paper().describe((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: hilbert_attention(*INPUTS, (8, 8), 0), TypeError, NO_GEOMETRY),
    (lambda: paper().plan(GEOMETRY, -1), ValueError, "`layer` must be at least 0; got -1."),
    (lambda: paper().plan(GEOMETRY, 1.0), TypeError, "`layer` must be an integer; got float."),
    (lambda: paper().reader(GEOMETRY, -1), ValueError, "`layer` must be at least 0; got -1."),
    (lambda: paper().plan(GEOMETRY, q_block=0), ValueError, f"`q_block` {BLOCK_RULE}; got 0."),
    (lambda: paper().plan(GEOMETRY, q_block=-16), ValueError, f"`q_block` {BLOCK_RULE}; got -16."),
    (lambda: paper().plan(GEOMETRY, k_block=0), ValueError, f"`k_block` {BLOCK_RULE}; got 0."),
    (lambda: paper().plan(GEOMETRY, k_block="64"), TypeError, "`k_block` must be an integer; got str."),
    (
        lambda: paper(interleave=True).plan(GEOMETRY),
        ValueError,
        "`heads` must be given where heads are interleaved; got None. Pass the number of heads.",
    ),
    (
        lambda: paper(interleave=True).plan(GEOMETRY, heads=0),
        ValueError,
        "`heads` must be at least 1; got 0.",
    ),
    (
        lambda: paper(far=10).reader(GEOMETRY, q_block=16, k_block=64),
        ValueError,
        "`k_block` must divide lcm(q_block, far) = 80, on multiples of which tiles are cut; got 64.",
    ),
    (
        lambda: paper(curve="hilbert-closed").plan(Geometry((7, 9))),
        ValueError,
        '`curve` must be "auto" or "hilbert" for a grid of 7x9; got \'hilbert-closed\'. '
        "A closed curve needs an even number of tokens and two sides longer than 1.",
    ),
    (
        lambda: hilbert_attention(*(x[0] for x in INPUTS), GEOMETRY, 0),
        ValueError,
        "`query` must have 4 dimensions; got shape [2, 68, 8]. Expected [batch, heads, tokens, head_dim].",
    ),
    (
        lambda: hilbert_attention([[1.0]], *INPUTS[1:], GEOMETRY, 0),
        TypeError,
        "`query` must be a tensor; got list. Expected [batch, heads, tokens, head_dim].",
    ),
    (
        lambda: hilbert_attention(*(x[:, :, :-1] for x in INPUTS), GEOMETRY, 0),
        ValueError,
        "`query` must have the 68 tokens of the geometry (4 text + 8x8); got 67.",
    ),
    (
        lambda: hilbert_attention(INPUTS[0], INPUTS[1][:, :, :-1], INPUTS[2][:, :, :-1], GEOMETRY, 0),
        ValueError,
        "`plan` must be made for 68 queries and 67 keys; got 68 and 68.",
    ),
    (lambda: hilbert_attention(*INPUTS, GEOMETRY, -1), ValueError, "`layer` must be at least 0; got -1."),
    (
        lambda: hilbert_attention(*INPUTS, GEOMETRY, 0, key_mask=torch.ones(1, 68)),
        TypeError,
        "`key_mask` must be bool; got torch.float32. True marks keys that may be read.",
    ),
    (
        lambda: hilbert_attention(*INPUTS, GEOMETRY, 0, key_mask=torch.ones(68, dtype=torch.bool)),
        ValueError,
        "`key_mask` must have 2 dimensions; got shape [68]. Expected [batch, tokens].",
    ),
    (
        lambda: hilbert_attention(*INPUTS, GEOMETRY, 0, key_mask=torch.ones(1, 4, dtype=torch.bool)),
        ValueError,
        "`key_mask` must have shape [1 or 1, 68]; got shape [1, 4].",
    ),
    (
        lambda: hilbert_attention(*INPUTS, GEOMETRY, 0, key_mask=torch.ones(3, 68, dtype=torch.bool)),
        ValueError,
        "`key_mask` must have shape [1 or 1, 68]; got shape [3, 68].",
    ),
    (
        lambda: hilbert_attention(
            *INPUTS, GEOMETRY, 0, key_mask=torch.ones(1, 68, dtype=torch.bool, device="meta")
        ),
        ValueError,
        "`key_mask` must be on the device of `query` (cpu); got meta. Move it with `.to(device)`.",
    ),
    (lambda: HilbertAttention(10, 3, 0), ValueError, "`dim` must be a multiple of `heads` (3); got 10."),
    (lambda: HilbertAttention(0, 3, 0), ValueError, "`dim` must be at least 1; got 0."),
    (lambda: HilbertAttention(12, 0, 0), ValueError, "`heads` must be at least 1; got 0."),
    (lambda: HilbertAttention(12, 3, -1), ValueError, "`layer` must be at least 0; got -1."),
]


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    BAD,
    ids=[f"{number} {message[:50]}" for number, (_, _, message) in enumerate(BAD)],
)
def test_bad_calls_are_refused(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message


def test_the_arguments_of_the_table_are_good():
    mask = torch.ones(1, 68, dtype=torch.bool)
    assert hilbert_attention(*INPUTS, GEOMETRY, 0, key_mask=mask).shape == INPUTS[0].shape
    assert paper(far=10).reader(GEOMETRY, q_block=16, k_block=16).near.num_queries == 68
    assert paper(curve="hilbert-closed").plan(Geometry((8, 9))).num_queries == 72
