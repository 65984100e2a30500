"""Fields of the Hilbert method: where it applies, what it says they come to, and what is refused."""

import dataclasses
import math

import pytest
import torch
from tests.hilbert_cases import inputs_for
from tests.tiles import paper

from nearfield import Geometry, Hilbert, SelfAttention, attend_with
from nearfield.methods.dense_parts import stays_dense

# -- defaults ----------------------------------------------------------------------------------------------------------


def test_defaults():
    """What is measured and told of `Hilbert()` is of these."""
    assert dataclasses.asdict(Hilbert()) == {
        "tiles": None,
        "tile_size": None,
        "near": "around",
        "cycle": 4,
        "shared": "none",
        "share": "two-way",
        "shared_tokens": None,
        "curve": "auto",
        "far": 16,
        "summary": "weighted",
        "text_reads": "all",
        "dense_layers": 0,
        "dense_steps": 0.15,
        "interleave": False,
    }
    assert [Hilbert().num_dense_steps(steps) for steps in (1, 4, 20, 28, 50)] == [
        (1, 0),
        (1, 0),
        (3, 0),
        (5, 0),
        (8, 0),
    ]
    assert all(Hilbert().dense_layer_reason(layer, 57) is None for layer in range(57))


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
    assert paper(dense_steps=steps).num_dense_steps(of) == (dense, 0)


@pytest.mark.parametrize(
    ("steps", "of", "dense"),
    [
        ((1, 2), 16, [0, 14, 15]),
        ((0, 0.1), 20, [18, 19]),
        ([0.1, 0], 20, [0, 1]),
        ((3, 3), 4, [0, 1, 2, 3]),
        ((0, 9), 4, [0, 1, 2, 3]),
        ((0, 0), 4, []),
    ],
)
def test_dense_steps_at_both_ends(steps, of, dense):
    ends = paper(dense_steps=steps).num_dense_steps(of)
    assert [step for step in range(of) if stays_dense(ends, step, of)] == dense
    assert sum(ends) == len(dense)
    assert hash(paper(dense_steps=steps)) == hash(paper(dense_steps=tuple(steps)))


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


def test_describe_the_default():
    words = Hilbert().describe(Geometry((64, 64), text=512)).split("\n")
    assert words[0] == "512 text + 64x64: 4608 tokens"
    assert words[1].startswith("  64x64 along generalised closed, locality 1.163 (lowest of: ")
    assert words[2:] == [
        "    shared: none",
        "    around: 512 tokens, those nearest to each block of 128 (asked for: 512)",
        "    far field: 256 summaries of 16 tokens, weighted",
        "  pairs kept: 35.2% (at most 2.84x faster than dense)",
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
    (
        lambda: paper(tiles=()),
        ValueError,
        "`tiles` must hold at least one number; got (). Write one for all layers: tiles=16.",
    ),
    (lambda: paper(tiles=(4, 0)), ValueError, "`tiles` must be at least 1; got 0."),
    (lambda: paper(tiles=(4, 8.0)), TypeError, "`tiles` must be an integer; got float."),
    (lambda: paper(tiles="4,8"), TypeError, "`tiles` must be an integer; got str."),
    (
        lambda: paper(tiles=(4, 8), tile_size=64),
        ValueError,
        "`tile_size` must be given instead of `tiles`, not with it; got ((4, 8), 64).",
    ),
    (lambda: paper(tile_size=(64, 16)), TypeError, "`tile_size` must be an integer; got tuple."),
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
    (
        lambda: paper(dense_steps=(1, 2, 3)),
        ValueError,
        "`dense_steps` must be one number, or two, of the first and of the last steps; got (1, 2, 3).",
    ),
    (lambda: paper(dense_steps=(1, 1.5)), ValueError, f"{STEPS_RULE}; got 1.5."),
    (lambda: paper(dense_steps=-1), ValueError, f"{STEPS_RULE}; got -1."),
    (lambda: paper(dense_steps=1.5), ValueError, f"{STEPS_RULE}; got 1.5."),
    (lambda: paper(dense_steps=math.nan), ValueError, f"{STEPS_RULE}; got nan."),
    (lambda: paper(interleave=1), TypeError, "`interleave` must be True or False; got 1."),
    (lambda: paper().plan((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: paper().layer((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: paper().ordering((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: paper().describe((8, 8)), TypeError, NO_GEOMETRY),
    (lambda: attend_with(Hilbert(), *INPUTS, (8, 8), 0), TypeError, NO_GEOMETRY),
    (lambda: paper().plan(GEOMETRY, -1), ValueError, "`layer` must be at least 0; got -1."),
    (lambda: paper().plan(GEOMETRY, 1.0), TypeError, "`layer` must be an integer; got float."),
    (lambda: paper().layer(GEOMETRY, -1), ValueError, "`layer` must be at least 0; got -1."),
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
        lambda: paper(far=10).layer(GEOMETRY, q_block=16, k_block=64),
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
        lambda: attend_with(Hilbert(), *(x[0] for x in INPUTS), GEOMETRY, 0),
        ValueError,
        "`query` must have 4 dimensions; got shape [2, 68, 8]. Expected [batch, heads, tokens, head_dim].",
    ),
    (
        lambda: attend_with(Hilbert(), [[1.0]], *INPUTS[1:], GEOMETRY, 0),
        TypeError,
        "`query` must be a tensor; got list. Expected [batch, heads, tokens, head_dim].",
    ),
    (
        lambda: attend_with(Hilbert(), *(x[:, :, :-1] for x in INPUTS), GEOMETRY, 0),
        ValueError,
        "`query` must have the 68 tokens of the geometry (4 text + 8x8); got 67.",
    ),
    (
        lambda: attend_with(Hilbert(), INPUTS[0], INPUTS[1][:, :, :-1], INPUTS[2][:, :, :-1], GEOMETRY, 0),
        ValueError,
        "`key` must have the 68 tokens of the geometry (4 text + 8x8); got 67.",
    ),
    (
        lambda: attend_with(Hilbert(), *INPUTS, GEOMETRY, -1),
        ValueError,
        "`layer` must be at least 0; got -1.",
    ),
    (
        lambda: attend_with(Hilbert(), *INPUTS, GEOMETRY, 0, key_mask=torch.ones(1, 68)),
        TypeError,
        "`key_mask` must be bool; got torch.float32. True marks keys that may be read.",
    ),
    (
        lambda: attend_with(Hilbert(), *INPUTS, GEOMETRY, 0, key_mask=torch.ones(68, dtype=torch.bool)),
        ValueError,
        "`key_mask` must have 2 dimensions; got shape [68]. Expected [batch, tokens].",
    ),
    (
        lambda: attend_with(Hilbert(), *INPUTS, GEOMETRY, 0, key_mask=torch.ones(1, 4, dtype=torch.bool)),
        ValueError,
        "`key_mask` must have shape [1 or 1, 68]; got shape [1, 4].",
    ),
    (
        lambda: attend_with(Hilbert(), *INPUTS, GEOMETRY, 0, key_mask=torch.ones(3, 68, dtype=torch.bool)),
        ValueError,
        "`key_mask` must have shape [1 or 1, 68]; got shape [3, 68].",
    ),
    (
        lambda: attend_with(
            Hilbert(), *INPUTS, GEOMETRY, 0, key_mask=torch.ones(1, 68, dtype=torch.bool, device="meta")
        ),
        ValueError,
        "`key_mask` must be on the device of `query` (cpu); got meta. Move it with `.to(device)`.",
    ),
    (
        lambda: SelfAttention(10, 3, Hilbert(), 0),
        ValueError,
        "`dim` must be a multiple of `heads` (3); got 10.",
    ),
    (lambda: SelfAttention(0, 3, Hilbert(), 0), ValueError, "`dim` must be at least 1; got 0."),
    (lambda: SelfAttention(12, 0, Hilbert(), 0), ValueError, "`heads` must be at least 1; got 0."),
    (lambda: SelfAttention(12, 3, Hilbert(), -1), ValueError, "`layer` must be at least 0; got -1."),
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
    assert attend_with(Hilbert(), *INPUTS, GEOMETRY, 0, key_mask=mask).shape == INPUTS[0].shape
    assert paper(far=10).layer(GEOMETRY, q_block=16, k_block=16).near.num_queries == 68
    assert paper(curve="hilbert-closed").plan(Geometry((8, 9))).num_queries == 72
