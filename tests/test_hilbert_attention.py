"""Attending by the Hilbert method, as a function and as a module: values, gradients, compiled."""

import math

import pytest
import torch
from tests.attending import Call, assert_within_budget
from tests.hilbert_cases import inputs_for
from tests.tiles import block_cover, far_formula, labels, paper, pattern, windows
from torch.utils.checkpoint import checkpoint

from nearfield import Geometry, Hilbert, SelfAttention, attend, attend_with


def test_attention_reads_the_plan_of_its_layer():
    geometry = Geometry((12, 20), text=24, references=((8, 10),))
    inputs = inputs_for(geometry)
    for method in (paper(tiles=5), paper(tiles=5, share="keys", interleave=True)):
        for layer in range(4):
            plan = method.plan(geometry, layer, heads=2)
            out = attend_with(method, *inputs, geometry, layer)
            assert torch.equal(out, attend(*inputs, plan).out)
            assert_within_budget(Call(*inputs, plan), "grouped")


def test_the_default_method_is_the_default():
    geometry = Geometry((16, 16), text=16)
    inputs = inputs_for(geometry)
    by_default = attend_with(Hilbert(), *inputs, geometry, 3)
    fields = {"tile_size": 64, "near": "around", "shared": "none", "far": 16, "summary": "weighted"}
    assert torch.equal(by_default, attend_with(Hilbert(**fields), *inputs, geometry, 3))
    for change in ({"near": "tile"}, {"summary": "mean"}, {"tile_size": 32}, {"far": None}):
        other = attend_with(Hilbert(**fields | change), *inputs, geometry, 3)
        assert not torch.allclose(by_default, other, rtol=1e-3, atol=1e-3), change


def test_hidden_keys_are_as_if_they_were_not_there():
    geometry = Geometry((8, 12), text=20)
    method = paper(tiles=3, far=8)
    query, key, value = inputs_for(geometry, batch=2, dtype=torch.float64)
    mask = torch.ones(2, geometry.num_tokens, dtype=torch.bool)
    mask[0, 12:20] = False
    mask[1, 5:20] = False
    out = attend_with(method, query, key, value, geometry, 1, key_mask=mask)
    other = torch.where(mask[:, None, :, None], key, 7.0), torch.where(mask[:, None, :, None], value, 7.0)
    again = attend_with(method, query, *other, geometry, 1, key_mask=mask)
    torch.testing.assert_close(out, again, rtol=0, atol=0)
    found = labels(method, geometry, 1, 16)
    near = block_cover(pattern(found), 16, 16)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)[:, None]
    expected, _ = far_formula(query, key, value, near, windows(found, 8, 16), bias)
    torch.testing.assert_close(out, expected)
    shared = attend_with(method, query[:1], key[:1], value[:1], geometry, 1, key_mask=mask[:1])
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
        return attend_with(method, query, key, value, geometry, 1, key_mask=mask)

    assert method.layer(geometry, 1, heads=1).far.plan.num_pairs > 0
    assert torch.autograd.gradcheck(attention, inputs)


def test_scale_and_implementation_are_passed_on():
    geometry = Geometry((8, 8), text=8)
    method = paper(tiles=2, shared="none", far=8)
    inputs = inputs_for(geometry, dtype=torch.float64)
    outs = [
        attend_with(method, *inputs, geometry, 1, scale=0.7, impl=impl) for impl in ("reference", "grouped")
    ]
    torch.testing.assert_close(*outs)
    scaled = inputs[0] * 0.7 * math.sqrt(8), *inputs[1:]
    torch.testing.assert_close(attend_with(method, *scaled, geometry, 1), outs[0])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("method", [paper(tiles=4), paper(tiles=4, far=16)], ids=["near", "far"])
def test_a_prepared_reader_compiles_whole(method, backend):
    geometry = Geometry((12, 12), text=16)
    reader = method.layer(geometry, 1)
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
    return SelfAttention(**arguments).double()


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
    out = attend_with(layer.method, query, key, value, geometry, 1, key_mask=mask)
    torch.testing.assert_close(layer(x, geometry, mask), layer.to_out(out.transpose(1, 2).flatten(2)))


def test_a_layer_keeps_its_state():
    geometry = Geometry((6, 8), text=5)
    layer = make_layer()
    other = SelfAttention(24, 3, paper(tiles=3, far=16), 1).double()
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
