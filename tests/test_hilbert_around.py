"""The Hilbert method where blocks of queries read what is around them, in the place of their tiles."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from tests import tiny_models
from tests.hilbert_cases import BLOCKS, cases, inputs_for
from tests.tiles import image_places, labels, times_counted
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Geometry, Hilbert, Merge, apply, attend_with
from nearfield.layout.geometry import Shortened
from nearfield.methods.hilbert.layout import block_sizes
from nearfield.methods.hilbert.plans import near_plan

SQUARE = Geometry((32, 32), text=32)


def around(**fields):
    return Hilbert(**{"near": "around", "dense_layers": 0, "dense_steps": 0} | fields)


def around_of(case):
    method, geometry, layer = case
    return dataclasses.replace(method, near="around"), geometry, layer


# -- who reads whom ----------------------------------------------------------------------------------------------------


def box_of(places):
    """The least and the largest of each axis."""
    return [min(axis) for axis in zip(*places, strict=True)], [
        max(axis) for axis in zip(*places, strict=True)
    ]


def gap(first, second):
    """Between two boxes, axis by axis."""
    gaps = [
        max(low - beyond, begin - high, 0.0) for begin, beyond, low, high in zip(*first, *second, strict=True)
    ]
    return math.hypot(*gaps)


def stretches_of(ring, unit):
    """Tokens of a ring in stretches that end on multiples of the unit in the sequence."""
    found = {}
    for place in range(*ring):
        found.setdefault(place // unit, []).append(place)
    return list(found.values())


@pytest.mark.parametrize(
    ("method", "geometry", "q_block", "k_block"),
    [
        (around(tiles=8), SQUARE, 32, 16),
        (around(tiles=4, far=None), SQUARE, 16, 8),
        (around(tiles=4, far=32), SQUARE, 16, 16),
        (around(tile_size=100, far=24), Geometry((24, 40), text=96, text_first=False), 16, 8),
        (around(tiles=6, curve="morton", far=8), Geometry((4, 12, 16)), 32, 16),
        (around(tiles=5, shared="centre", share="keys", shared_tokens=64), Geometry((16, 24)), 16, 16),
    ],
)
def test_rows_read_the_nearest_stretches(method, geometry, q_block, k_block):
    """In plain Python: no stretch that is left out is nearer than one that is read, or touches the row where that does
    not."""
    reads = method.plan(geometry, q_block=q_block, k_block=k_block).to_mask()[0, 0]
    unit = k_block if method.far is None else math.lcm(k_block, method.far)
    ((start, stop),) = geometry.image_spans
    places = image_places(method, geometry).double().tolist()
    ring = start + (method.shared_tokens or 0), stop
    stretches = stretches_of(ring, unit)
    boxes = [box_of([places[token - start] for token in each]) for each in stretches]
    share = (ring[1] - ring[0]) / (method.tile_size or 1)
    tiles = max(1, round(share)) if method.tile_size else method.tiles
    wanted = -(-len(stretches) // tiles)
    checked = 0
    for row in range(0, geometry.num_tokens, q_block):
        tokens = range(row, min(row + q_block, geometry.num_tokens))
        if any(not start <= token < stop for token in tokens) or len(tokens) < q_block:
            assert bool(reads[row].all()) or len(tokens) < q_block
            continue
        eighth = q_block // 8
        pieces = [
            box_of([places[token - start] for token in range(first, first + eighth)])
            for first in range(row, row + q_block, eighth)
        ]
        distance = []
        for box in boxes:
            gaps = [gap(piece, box) for piece in pieces]
            distance.append((min(gaps) > 1, sum(gaps) / len(gaps)))
        read = [bool(reads[row, each].all()) for each in stretches]
        assert all(one == bool(reads[row, each].any()) for one, each in zip(read, stretches, strict=True))
        own = [not set(tokens).isdisjoint(each) for each in stretches]
        assert sum(read) == max(wanted, sum(own))
        others = [far for far, is_read in zip(distance, read, strict=True) if not is_read]
        for near, is_read, mine in zip(distance, read, own, strict=True):
            if is_read and not mine and others:
                nearest = min(others)
                assert (near[0], near[1] - 0.1) <= nearest  # centres decide what is as near
        assert all(is_read for is_read, mine in zip(read, own, strict=True) if mine)
        checked += 1
    assert checked > 5


def neighbours_apart(method, geometry):
    """How many pairs of tokens, side by side in the image, do not read each other."""
    start, stop = geometry.image_spans[0]
    reads = method.plan(geometry).to_mask()[0, 0, start:stop, start:stop]
    place = image_places(method, geometry)
    at = torch.empty(geometry.grid, dtype=torch.long)
    at[place[:, 0], place[:, 1]] = torch.arange(len(place))
    sides = (at[1:], at[:-1]), (at[:, 1:], at[:, :-1])
    return sum(int((~reads[one, other] | ~reads[other, one]).sum()) for one, other in sides)


@pytest.mark.parametrize(
    ("geometry", "tiles"),
    [
        (Geometry((64, 64), text=64), 16),
        (Geometry((64, 64), text=77), 16),
        (Geometry((45, 80)), 12),
        (Geometry((64, 64), text=64), 32),
        (Geometry((96, 170), text=512), 16),
    ],
)
def test_neighbours_read_each_other(geometry, tiles):
    """Where tiles cut the image, all tokens read those next to them, unless there are too few to be read."""
    method = around(tiles=tiles)
    assert neighbours_apart(method, geometry) == 0
    assert neighbours_apart(dataclasses.replace(method, near="tile"), geometry) > 0


def test_few_tokens_around_leave_some_neighbours_out():
    """A block of 16 has up to eight stretches of 16 around it; with four read, some are missing. So are few where rows
    are no squares: a long one has more that touch it."""
    for geometry, tiles, share in (
        (Geometry((64, 64), text=64), 64, 0.5),
        (Geometry((48, 80), text=512), 16, 0.1),
    ):
        apart = neighbours_apart(around(tiles=tiles), geometry)
        assert 0 < apart < share * neighbours_apart(around(tiles=tiles, near="tile"), geometry)


def test_blocks_and_tokens_of_the_usual_size():
    plan = around(tiles=16).plan(Geometry((64, 64), text=64))
    assert (plan.q_block, plan.k_block) == (64, 16)
    assert set(plan.to_mask()[0, 0, 64:, 64:].sum(1).tolist()) == {256}


@pytest.mark.parametrize(
    ("side", "fields", "tokens", "blocks"),
    [
        (128, {}, 1024, (128, 128)),
        (64, {}, 512, (128, 64)),
        (32, {}, 256, (64, 16)),
        (16, {}, 64, (16, 16)),
        (64, {"tiles": 16}, 256, (64, 16)),
        (32, {"tiles": 4}, 256, (64, 16)),
    ],
)
def test_tokens_and_blocks_unless_somebody_says_how_many(side, fields, tokens, blocks):
    """512 tokens, of large images a sixteenth, of small ones a quarter; in blocks that are the same on every device."""
    method, geometry = around(**fields), Geometry((side, side), text=512)
    for device in ("cpu", "cuda"):
        assert block_sizes(method, geometry, None, None, device) == blocks
    plan = method.plan(geometry)
    assert (plan.q_block, plan.k_block) == blocks
    assert plan.num_pairs == 512 * geometry.num_tokens + side**2 * (512 + tokens)
    words = f"around: {tokens} tokens, those nearest to each block of {blocks[0]} (asked for: {tokens})\n"
    assert words in method.describe(geometry)
    assert method.describe(geometry, device="cuda") == method.describe(geometry)


def test_number_of_tiles_is_said_by_their_size_around_blocks():
    assert around().tiles_in(0) is None
    assert around(tiles=16).tiles_in(0) == 16
    assert Hilbert().tiles_in(0) is None
    assert Hilbert(near="tile").tiles_in(0) == 16
    assert Hilbert(near="tile", tile_size=64).tiles_in(0) is None


@pytest.mark.parametrize("sides", [((64, 64), 512), ((48, 80), 512), ((8, 32, 32), 512), ((20, 30), 150)])
def test_default_is_the_same_as_by_size(sides):
    """Of oblong images, of videos, and of those whose tokens are no power of two."""
    grid, size = sides
    geometry = Geometry(grid, text=64)
    assert around().layer(geometry).near == around(tile_size=size).layer(geometry).near


def test_blocks_suit_the_tiles_of_merged_tokens():
    """A quarter is left: tiles of 256 tokens are of 64."""
    short = Shortened.of(Geometry((64, 64)), [(64, 16)] * 64)
    for method in (around(tile_size=256), around(tiles=16)):
        plan = method.plan(short)
        assert (plan.q_block, plan.k_block) == (16, 16)
        assert plan.to_mask()[0, 0].sum(1).unique().tolist() == [64]
    plan = around().plan(short)  # of 512 tokens
    assert (plan.q_block, plan.k_block) == (32, 16)
    assert plan.to_mask()[0, 0].sum(1).unique().tolist() == [128]


@given(cases(far=True).map(around_of), BLOCKS, BLOCKS)
@settings(max_examples=120)
def test_every_query_counts_every_token_once(case, q_block, k_block):
    method, geometry, layer = case
    reader = method.layer(geometry, layer, q_block=q_block, k_block=k_block)
    counted = times_counted(reader, geometry)
    torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)


@given(cases(far=False).map(around_of))
@settings(max_examples=40)
def test_text_and_shared_tokens_are_as_with_tiles(case):
    """What is read by all, and who reads all, does not hang on tiles."""
    method, geometry, layer = case
    reads = method.plan(geometry, layer, q_block=4, k_block=4).to_mask()[0, 0]
    found = labels(method, geometry, layer, 4)
    assert bool(reads[found.reads_all].all())
    assert bool(reads[:, ~found.on_ring].all())
    assert bool(reads.diagonal().all())


def test_layers_read_alike_and_may_differ_in_their_number_of_tiles():
    method = around(tiles=(16, 16, 4))
    plans = [method.plan(SQUARE, layer) for layer in range(4)]
    assert plans[0] is plans[1]
    assert plans[2] is plans[3]
    assert plans[2].num_pairs > plans[0].num_pairs
    assert method.phases == 1
    assert Hilbert(cycle=3).phases == 1
    assert Hilbert(near="tile", cycle=3).phases == 3


def test_plans_are_the_same_whatever_torch_computes_in_by_default():
    """A short default dtype would round coordinates, another default device would hold them."""
    geometry = Geometry((40, 56), text=5, references=((20, 30),))
    method = around(tiles=7, far=8)
    want = method.layer(geometry, q_block=32, k_block=16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        near_plan.cache_clear()
        got = method.layer(geometry, q_block=32, k_block=16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.near == want.near
    assert got.near is not want.near
    near_plan.cache_clear()
    with torch.device("meta"):
        assert method.plan(geometry, q_block=32, k_block=16) == want.near


def test_references_are_read_where_they_correspond():
    """The corner of an image reads the corner of one of half its size, and of the opposite corner nothing."""
    geometry = Geometry((32, 32), references=((16, 16),))
    method = around(tiles=16, far=None)
    reads = method.plan(geometry, q_block=16, k_block=16).to_mask()[0, 0]
    order = method.ordering(geometry).order
    first, second = order[:1024], order[1024:] - 1024
    corner = int((first == 0).nonzero())
    assert bool(reads[corner, 1024 + int((second == 0).nonzero())])
    assert not bool(reads[corner, 1024 + int((second == 255).nonzero())])


def test_merged_tokens_are_read_around_where_they_were():
    whole = Geometry((32, 32), text=16)
    method = around(tiles=8)
    short = Shortened.of(whole, [(64, 32)] * 16)
    counted = times_counted(method.layer(short), short)
    torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)
    # Half of each run of 64 is left: as when every second token is.
    reads = method.plan(short, q_block=16, k_block=16).to_mask()[0, 0, 16:, 16:]
    rows = reads[::16].sum(1)
    assert set(rows.tolist()) == {64}
    places = image_places(method, whole)[1::2].double()
    for row in range(0, 512, 16):
        low, high = places[row : row + 16].amin(0), places[row : row + 16].amax(0)
        read = places[reads[row]]
        assert bool(((read >= low - 16) & (read <= high + 16)).all())


# -- attending ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("summary", ["mean", "weighted"])
def test_gradients_are_those_of_one_dense_softmax(summary):
    geometry = Geometry((12, 12), text=5)
    reader = around(tiles=4, far=4, summary=summary).layer(geometry)
    inputs = [x.requires_grad_() for x in inputs_for(geometry, dtype=torch.float64)]
    query, key, value = inputs
    got = reader.attend(query, key, value)
    if summary == "mean":
        keys, values = (reader.far.pooled(x) for x in (key, value))
        bias = reader.far.bias.double().expand(1, 2, -1)
    else:
        keys, values, bias = reader.far.weighted(query, key, value, None)
    exact = (query @ key.mT / math.sqrt(8)).masked_fill(~reader.near.to_mask(), -torch.inf)
    coarse = query @ keys.mT / math.sqrt(8) + bias[:, :, None]
    coarse = coarse.masked_fill(~reader.far.plan.to_mask(), -torch.inf)
    want = torch.cat([exact, coarse], -1).softmax(-1) @ torch.cat([value, values], 2)
    torch.testing.assert_close(got.out, want)
    grad = torch.randn_like(want)
    for own, dense in zip(
        torch.autograd.grad(got.out, inputs, grad, retain_graph=True),
        torch.autograd.grad(want, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(own, dense)


def test_one_tile_is_dense_attention():
    inputs = inputs_for(SQUARE)
    got = attend_with(around(tiles=1), *inputs, SQUARE, 0)
    torch.testing.assert_close(got, scaled_dot_product_attention(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [around(tiles=1), Merge(0.0) | around(tiles=1)])
def test_a_model_that_reads_all_around_gives_what_it_gave(method):
    model = tiny_models.flux()
    arguments = tiny_models.flux_inputs((12, 10))
    want = model(**arguments)[0]
    with apply(model, method):
        got = model(**arguments)[0]
    torch.testing.assert_close(got, want)


# -- words -------------------------------------------------------------------------------------------------------------


def test_text_beside_image_tokens_reads_what_is_around_these():
    """A block that holds both reads, exactly, what its image tokens would read without the text, and the text."""
    geometry = Geometry((32, 32), text=24)
    method = around(tiles=8, text_reads="summary")
    reader = method.layer(geometry, q_block=16, k_block=8)
    near, far = reader.near.to_mask()[0, 0], reader.far.plan.to_mask()[0, 0]
    assert bool((near[:24, :24]).all())
    assert not bool(near[0, 24:].any()), "a block of text alone"
    assert bool(far[0].all())
    assert bool(near[16, 24:32].all()), "its own image tokens"
    stretches = [len((near[row].nonzero() // 16).unique()) for row in (16, 64)]
    assert stretches[0] == stretches[1], "as many as others read"
    assert torch.equal(near[16], near[31])
    place = image_places(method, geometry)
    away = torch.cdist(place.double(), place[:8].double()).amin(1)
    read, others = away[near[16, 24:]], away[~near[16, 24:]]
    assert read.max() < others.median() / 1.5, "they are near the block's image tokens"
    words = method.describe(geometry)
    assert "\n  text reads images in summary\n" in words
    assert "in summary\n" not in around(tiles=8).describe(geometry)
    assert "in summary\n" not in method.describe(Geometry((32, 32)))


@pytest.mark.parametrize("text_first", [True, False])
def test_text_that_reads_summaries_in_a_model_of_one_tile(text_first):
    """Where everything is read exactly nothing is left to summarise, and all is dense but what text reads."""
    geometry = Geometry((8, 8), text=16, text_first=text_first)
    inputs = inputs_for(geometry, dtype=torch.float64)
    whole = attend_with(around(tiles=1), *inputs, geometry, 0)
    found = attend_with(around(tiles=1, text_reads="summary"), *inputs, geometry, 0)
    text, image = slice(*geometry.text_span), slice(*geometry.image_spans[0])
    torch.testing.assert_close(found[:, :, image], whole[:, :, image])
    assert not torch.allclose(found[:, :, text], whole[:, :, text])


def test_description_says_how_many_tokens_are_read():
    words = around(tiles=16).describe(Geometry((64, 64), text=64))
    assert "    around: 256 tokens, those nearest to each block of 64 (asked for: 256)\n" in words
    assert "tiles:" not in words


def test_borders_are_those_of_blocks_of_queries():
    """Nothing is cut; what may show is that the tokens of the next block read a little else."""
    borders = around(tiles=16).borders(Geometry((64, 64)))
    assert borders.right.unique().tolist() == [0, 1]
    lines = borders.right.sum(0).nonzero().flatten().tolist()
    assert lines == [7, 15, 23, 31, 39, 47, 55]  # between squares of 8 x 8
    assert bool((borders.right[:, 7] == 1).all())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"near": "ring"}, "`near` must be one of 'tile', 'around'; got 'ring'."),
        *(
            (
                fields | {"interleave": True},
                '`interleave` must be False where `near` is "around"; got True. '
                'Nothing slides there; tiles do: near="tile".',
            )
            for fields in ({}, {"near": "around"})
        ),
        ({"text_reads": "some"}, "`text_reads` must be one of 'all', 'summary'; got 'some'."),
        *(
            (
                {"text_reads": "summary", "far": far},
                "`text_reads` must be \"all\" where `far` is None; got 'summary'. There are no summaries to read.",
            )
            for far in (None, 0)
        ),
    ],
)
def test_fields_that_do_not_go_together(fields, message):
    with pytest.raises(ValueError) as error:
        Hilbert(**fields)
    assert str(error.value) == message
