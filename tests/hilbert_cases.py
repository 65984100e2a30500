"""What tests of the Hilbert method are tried on: any method on any geometry, and inputs for one."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from tests.tiles import ORDERS, has_closed_curve, paper

from nearfield import Geometry

BLOCKS = st.sampled_from([1, 2, 4, 8, 16])
FAR = st.integers(2, 24)

property_test = settings(max_examples=80)

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
        text_reads=draw(st.sampled_from(["all", "summary"])) if far else "all",
        interleave=interleave,
    )


@st.composite
def cases(draw, far=False, interleave=False):
    """A method, a geometry and a layer."""
    geometry = draw(geometries())
    return draw(methods(geometry, far, interleave)), geometry, draw(st.integers(0, 9))


def inputs_for(geometry, heads=2, dim=8, batch=1, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, heads, geometry.num_tokens, dim, generator=generator, dtype=dtype).unbind()
