"""Where tokens stand: spans that follow each other and cover the sequence."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearfield import Geometry

grids = st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple)
geometries = st.builds(
    Geometry,
    grid=grids,
    text=st.integers(0, 600),
    text_first=st.booleans(),
    references=st.lists(grids, max_size=3).map(tuple),
)


@given(geometries)
def test_spans_follow_each_other_and_cover_the_sequence(geometry):
    spans = list(geometry.image_spans)
    spans.insert(0 if geometry.text_first else len(spans), geometry.text_span)
    ends = [0, *(stop for _, stop in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends[-1] == geometry.num_tokens == geometry.text + geometry.num_image_tokens


@given(geometries)
def test_every_span_holds_its_tokens(geometry):
    start, stop = geometry.text_span
    assert stop - start == geometry.text
    sizes = [stop - start for start, stop in geometry.image_spans]
    assert sizes == [math.prod(grid) for grid in (geometry.grid, *geometry.references)]


def test_text_stands_first_unless_told_otherwise():
    geometry = Geometry((4, 8), text=10, references=((2, 3),))
    assert (geometry.text_span, geometry.image_spans) == ((0, 10), ((10, 42), (42, 48)))
    geometry = dataclasses.replace(geometry, text_first=False)
    assert (geometry.text_span, geometry.image_spans) == ((38, 48), ((0, 32), (32, 38)))


def test_lists_become_tuples_so_that_geometries_key_caches():
    geometry = Geometry([4, 8], references=[[2, 3]])
    assert geometry == Geometry((4, 8), references=((2, 3),))
    assert hash(geometry) == hash(Geometry((4, 8), references=((2, 3),)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.text = 5


@pytest.mark.parametrize(
    ("geometry", "words"),
    [
        (Geometry((64, 64)), "64x64"),
        (Geometry((64, 64), text=512), "512 text + 64x64"),
        (Geometry((21, 30, 52), text=7, text_first=False), "21x30x52 + 7 text"),
        (Geometry((64, 48), text=77, references=((32, 32), (9,))), "77 text + 64x48 + 32x32 + 9"),
    ],
    ids=str,
)
def test_words(geometry, words):
    assert str(geometry) == words


SIDES = "must hold integers (height, width) or (frames, height, width)"
SINGLE = "Write ((height, width),) for a single one."

BAD = [
    (lambda: Geometry(64), TypeError, f"`grid` {SIDES}; got 64."),
    (lambda: Geometry("64x64"), TypeError, f"`grid` {SIDES}; got '64x64'."),
    (lambda: Geometry((64, 4.0)), TypeError, f"`grid` {SIDES}; got (64, 4.0)."),
    (lambda: Geometry((64, True)), TypeError, f"`grid` {SIDES}; got (64, True)."),
    (lambda: Geometry((64, 0)), ValueError, "`grid` must have sides of at least 1; got (64, 0)."),
    (lambda: Geometry(()), ValueError, "`grid` must have one to three sides; got ()."),
    (
        lambda: Geometry((2, 2, 2, 2)),
        ValueError,
        "`grid` must have one to three sides; got (2, 2, 2, 2).",
    ),
    (lambda: Geometry((8, 8), text=-1), ValueError, "`text` must be at least 0; got -1."),
    (lambda: Geometry((8, 8), text=1.5), TypeError, "`text` must be an integer; got float."),
    (lambda: Geometry((8, 8), text_first=1), TypeError, "`text_first` must be True or False; got 1."),
    (
        lambda: Geometry((8, 8), references=8),
        TypeError,
        "`references` must be a sequence of grids; got int.",
    ),
    (lambda: Geometry((8, 8), references=(8, 8)), TypeError, f"`references` {SIDES}; got 8. {SINGLE}"),
    (
        lambda: Geometry((8, 8), references=((8, -8),)),
        ValueError,
        "`references` must have sides of at least 1; got (8, -8).",
    ),
    (
        lambda: Geometry((8, 8), references=((),)),
        ValueError,
        "`references` must have one to three sides; got ().",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[message[:60] for _, _, message in BAD])
def test_bad_calls_are_refused(call, kind, message):
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == message
