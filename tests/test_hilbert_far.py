"""The Hilbert method's far field against one dense softmax, and summaries that are weighted."""

import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from tests.hilbert_cases import BLOCKS, cases, inputs_for
from tests.tiles import block_cover, far_formula, labels, paper, pattern, times_counted, unit_of, windows
from torch.nn.functional import scaled_dot_product_attention

from nearfield import Geometry, attend_with, planning
from nearfield.ops import weighted_windows, window_slope


def fitting(method, q_block, k_block):
    """The block of keys, or one that the far field takes."""
    return math.gcd(k_block, unit_of(method, q_block))


@given(cases(far=True), BLOCKS, BLOCKS)
@settings(max_examples=120)
def test_every_query_counts_every_token_once(case, q_block, k_block):
    method, geometry, layer = case
    reader = method.layer(geometry, layer, q_block=q_block, k_block=fitting(method, q_block, k_block))
    counted = times_counted(reader, geometry)
    torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)


@given(cases(far=True), BLOCKS, BLOCKS)
@settings(max_examples=60)
def test_attending_with_a_far_field_is_one_dense_softmax(case, q_block, k_block):
    method, geometry, layer = case
    k_block = fitting(method, q_block, k_block)
    reader = method.layer(geometry, layer, q_block=q_block, k_block=k_block)
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
    reader = method.layer(geometry, layer, heads=3)
    for head in range(3):
        counted = times_counted(reader, geometry, head)
        torch.testing.assert_close(counted, torch.ones_like(counted), rtol=0, atol=1e-6)


def test_summaries_have_the_size_asked_for():
    geometry = Geometry((16, 16), text=16)
    far = paper(tiles=4, shared="none", far=32).layer(geometry).far
    assert far.spans == ((16, 272),)
    assert far.sizes.tolist() == [16, *[32] * 7, 16]
    torch.testing.assert_close(far.bias.exp(), far.sizes.float())


def test_what_everyone_reads_anyway_is_not_summarised():
    """Ten tokens of text end inside a block of 16: the six image tokens in it are read by all."""
    reader = paper(tiles=4, shared="none", far=32).layer(Geometry((16, 16), text=10))
    assert reader.far.spans == ((16, 266),)
    assert bool(reader.near.to_mask()[0, 0, :, :16].all())


def test_where_nothing_is_far_there_is_no_far_field():
    geometry = Geometry((2, 3), text=4)
    reader = paper(far=8).layer(geometry)
    assert reader.far is None
    assert reader.near == planning.full(10, q_block=16, k_block=16)
    assert paper(far=8, interleave=True).layer(geometry, heads=2).far is None


def test_a_summary_of_equal_tokens_is_exact():
    """Where all tokens of a window are alike, near and far together are dense attention."""
    geometry = Geometry((16, 16), text=16)
    method = paper(tiles=4, shared="none", far=16)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 272, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 1, 2, 17, 8, generator=generator, dtype=torch.float64).repeat_interleave(
        16, 3
    )
    got = attend_with(method, query, key, value, geometry, 1)
    torch.testing.assert_close(got, scaled_dot_product_attention(query, key, value))


def test_summaries_are_summed_in_full_precision():
    geometry = Geometry((32, 32), text=0)
    far = paper(tiles=4, shared="none", far=512).layer(geometry).far
    tokens = torch.full((1, 1, 1024, 1), 1.0, dtype=torch.bfloat16)
    assert far.pooled(tokens).flatten().tolist() == [1.0, 1.0]
    assert far.pooled(tokens).dtype == torch.bfloat16


# -- weighted summaries ------------------------------------------------------------------------------------------------

WEIGHTED = paper(tiles=4, far=8, shared="none", summary="weighted")


def test_weighted_summaries_are_exact_for_the_mean_query():
    """Where all queries are alike, windows stand for their tokens exactly, however these differ."""
    geometry = Geometry((12, 16), text=10)
    query, key, value = inputs_for(geometry, batch=2, dtype=torch.float64)
    query = query[:, :, 20:21].expand_as(query)
    everything = scaled_dot_product_attention(query, 3 * key, value)
    close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    close(attend_with(WEIGHTED, query, 3 * key, value, geometry, 1), everything)
    rough = attend_with(dataclasses.replace(WEIGHTED, summary="mean"), query, 3 * key, value, geometry, 1)
    assert (rough - everything).abs().max() > 0.1


def test_weighted_summaries_are_means_where_keys_are_alike():
    geometry = Geometry((12, 16), text=16)
    query, key, value = inputs_for(geometry, dtype=torch.float64)
    key = key.clone()
    key[:, :, 16:] = key[:, :, 16::8].repeat_interleave(8, 2)
    mean, weighted = (
        attend_with(dataclasses.replace(WEIGHTED, summary=summary), query, key, value, geometry, 2)
        for summary in ("mean", "weighted")
    )
    torch.testing.assert_close(weighted, mean)


def test_weighted_summaries_are_nearer_to_full_attention():
    geometry = Geometry((24, 24), text=16)
    query, key, value = inputs_for(geometry, dtype=torch.float64)
    query, key = 1.5 * query + 1, key + 0.5
    full = scaled_dot_product_attention(query, key, value)
    errors = [
        (attend_with(method, query, key, value, geometry, 0) - full).norm()
        for method in (WEIGHTED, dataclasses.replace(WEIGHTED, summary="mean"))
    ]
    assert errors[0] < 0.9 * errors[1]


def test_weighted_summaries_are_differentiated_and_shared_by_heads():
    geometry = Geometry((6, 8), text=3)
    reader = dataclasses.replace(WEIGHTED, tiles=3).layer(geometry, 1, device="cpu")
    assert reader.far.plan.num_pairs > 0
    shapes = [(1, 2, 51, 2), (1, 1, 51, 2), (1, 1, 51, 2)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *x: reader.attend(*x).out, leaves)
    inputs = [torch.randn(1, heads, 51, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    copied = [inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])]
    # Heads that share keys share a mean query, so the copies agree where their queries do.
    same = inputs[0][:, ::2].repeat_interleave(2, 1)
    torch.testing.assert_close(reader.attend(same, *inputs[1:]).out, reader.attend(same, *copied[1:]).out)


# -- sloped summaries --------------------------------------------------------------------------------------------------

SLOPED = dataclasses.replace(WEIGHTED, summary="sloped")


def lively(geometry, dim=8):
    """Inputs in which neighbours are alike, and values follow keys."""
    query, key, value = inputs_for(geometry, dtype=torch.float64, dim=dim)
    place = torch.linspace(0, 6, geometry.num_tokens, dtype=torch.float64)[:, None]
    waves = torch.sin(place * torch.arange(1, dim + 1))
    return query, key + waves, value + 2 * waves + key


def test_a_slope_is_the_derivative_at_the_mean_query():
    """One window, read by all: the error is of second order in how far queries are from their mean."""
    length, window = 32, 32
    starts, sizes = torch.tensor([0]), torch.tensor([window], dtype=torch.int32)
    away, key, value = torch.randn(3, 1, 2, length, 4, dtype=torch.float64)
    centre = torch.randn(1, 2, 1, 4, dtype=torch.float64)
    away = away - away.mean(2, keepdim=True)
    readers = torch.ones(1, 1, 2, 1, dtype=torch.bool)
    errors = []
    for size in (0.02, 0.01):
        query = centre + size * away
        found = weighted_windows(query, key, value, starts, sizes, window)
        slope = window_slope(query, key, value, found, starts, sizes, window, readers, 16)
        exact = scaled_dot_product_attention(query, key, value)
        errors.append((found.values + slope.changes(query) - exact).norm())
        assert errors[-1] < 0.05 * (found.values - exact).norm()
    assert 3.5 < errors[0] / errors[1] < 4.5


def test_a_window_that_nobody_reads_has_no_part_in_the_slope():
    geometry = Geometry((8, 8), text=0)
    query, key, value = lively(geometry)
    starts, sizes = torch.arange(0, 64, 16), torch.full((4,), 16, dtype=torch.int32)
    readers = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    readers[..., 3] = False
    found = []
    for changed in (value, torch.cat([value[:, :, :48], 9 * value[:, :, 48:]], 2)):
        windows = weighted_windows(query, key, changed, starts, sizes, 16)
        found.append(window_slope(query, key, changed, windows, starts, sizes, 16, readers, 16))
    torch.testing.assert_close(found[0].matrix, found[1].matrix)
    assert found[0].matrix.abs().max() > 0.01


def test_sloped_summaries_are_nearer_to_full_attention():
    geometry = Geometry((24, 24), text=16)
    query, key, value = lively(geometry)
    full = scaled_dot_product_attention(query, key, value)
    errors = [
        (attend_with(method, query, key, value, geometry, 0) - full).norm() for method in (SLOPED, WEIGHTED)
    ]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("interleave", [False, True])
def test_text_reads_as_before(interleave):
    """A slope is of queries that are in windows: others are too far from their mean."""
    geometry = Geometry((24, 24), text=16)
    query, key, value = lively(geometry)
    found = [
        attend_with(dataclasses.replace(method, interleave=interleave), query, key, value, geometry, 0)
        for method in (SLOPED, WEIGHTED)
    ]
    torch.testing.assert_close(found[0][:, :, :16], found[1][:, :, :16])
    assert (found[0] - found[1])[:, :, 16:].abs().max() > 0.01


def test_sloped_summaries_are_differentiated_and_shared_by_heads():
    geometry = Geometry((6, 8), text=3)
    reader = dataclasses.replace(SLOPED, tiles=3).layer(geometry, 1, device="cpu")
    shapes = [(1, 2, 51, 2), (1, 1, 51, 2), (1, 1, 51, 2)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda *x: reader.attend(*x).out, leaves)
    inputs = [torch.randn(1, heads, 51, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    copied = [inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:])]
    same = inputs[0][:, ::2].repeat_interleave(2, 1)
    torch.testing.assert_close(reader.attend(same, *inputs[1:]).out, reader.attend(same, *copied[1:]).out)


def test_a_sloped_layer_compiles_to_the_same():
    geometry = Geometry((12, 16), text=10)
    inputs = [x.float() for x in lively(geometry)]
    reader = SLOPED.layer(geometry, 1, device="cpu")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: reader.attend(*x).out, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (lambda *x: reader.attend(*x).out, compiled):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        gradients.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch._dynamo.reset()
    for plain, traced in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, traced)


def test_half_precision_stays_half_precision():
    geometry = Geometry((12, 16), text=10)
    query, key, value = (x.bfloat16() for x in lively(geometry))
    out = attend_with(SLOPED, query, key, value, geometry, 1)
    wide = attend_with(SLOPED, *(x.double() for x in (query, key, value)), geometry, 1)
    assert out.dtype == torch.bfloat16
    assert (out.double() - wide).norm() < 0.02 * wide.norm()


def test_slopes_do_not_go_over_ranks():
    assert WEIGHTED.can_split
    assert not SLOPED.can_split
