"""Blocks chosen by their means, with a gated coarse branch or with linear attention: oracles, identities, gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import nearfield
from nearfield import Geometry, SelfAttention
from nearfield.methods import BlockTopK, GatedBlocks, SparseLinear

GEOMETRY = Geometry((6, 7))  # 42 tokens: the last of 6 blocks of 8 is short
METHODS = [GatedBlocks(block=8, topk=2), SparseLinear(block=8, topk=2)]


def inputs(tokens: int = 42, heads: int = 4, key_heads: int = 2, dim: int = 8, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, heads, tokens, dim), *[(2, key_heads, tokens, dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def extra_of(method: Any, heads: int = 4, dim: int = 8) -> dict[str, Tensor]:
    """What lets a method's second branch in."""
    generator = torch.Generator().manual_seed(9)
    if isinstance(method, GatedBlocks):
        return {"gate": torch.randn(2, heads, 42, dim, generator=generator, dtype=torch.float64)}
    return {"projection": torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64)}


# -- the oracles ---------------------------------------------------------------------------------------------------


def means(x: Tensor, block: int) -> Tensor:
    return torch.stack([x[:, :, i : i + block].mean(2) for i in range(0, x.shape[2], block)], 2)


def kept(method: Any, query: Tensor, key: Tensor) -> Tensor:
    """Which query reads which key, token by token: the blocks with the highest products of means."""
    scores = means(query, method.block) @ means(key, method.block).mT
    mask = torch.zeros(*query.shape[:3], key.shape[2], dtype=torch.bool)
    for index in range(scores.shape[2]):
        for column in scores[:, :, index].topk(method.topk).indices.unbind(-1):
            for batch in range(query.shape[0]):
                for head in range(query.shape[1]):
                    block = int(column[batch, head]) * method.block
                    rows = slice(index * method.block, (index + 1) * method.block)
                    mask[batch, head, rows, block : block + method.block] = True
    return mask


def oracle(method: Any, query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Tensor]) -> Tensor:
    """By dense matrices."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    mask = kept(method, query.detach(), key.detach())
    near = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    if "gate" in extra:
        block, tokens = method.block, key.shape[2]
        sizes = torch.tensor([min(block, tokens - i) for i in range(0, tokens, block)]).double()
        scores = means(query, block) @ means(key, block).mT / math.sqrt(query.shape[3]) + sizes.log()
        coarse = torch.softmax(scores, -1) @ means(value, block)
        return near + extra["gate"] * coarse.repeat_interleave(block, 2)[:, :, :tokens]
    weights = (query.softmax(-1) @ key.softmax(-1).mT).masked_fill(mask, 0)
    return near + weights / weights.sum(-1, keepdim=True) @ value @ extra["projection"]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("key_heads", [1, 4])
def test_results_and_gradients_are_the_oracles(method: Any, key_heads: int) -> None:
    leaves = inputs(key_heads=key_heads)
    extra = {name: value.requires_grad_() for name, value in extra_of(method).items()}
    got = method.layer(GEOMETRY).attend(*leaves, **extra).out
    want = oracle(method, *leaves, extra)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    everything = [*leaves, *extra.values()]
    cotangent = torch.randn_like(want)
    found = (torch.autograd.grad(out, everything, cotangent) for out in (got, want))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "method", [GatedBlocks(2, 2), SparseLinear(2, 2)], ids=lambda method: type(method).__name__
)
def test_gradcheck(method: Any) -> None:
    leaves = [x.detach()[:1].requires_grad_() for x in inputs(7, heads=2, key_heads=1, dim=3)]
    extra = torch.randn(1, 2, 7, 3) if isinstance(method, GatedBlocks) else torch.randn(3, 3)
    (name,) = extra_of(method)
    reader = method.layer(Geometry((7,)))
    everything = [*leaves, extra.double().requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: reader.attend(*x[:3], **{name: x[3]}).out, everything)


# -- identities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_closed_second_branch_leaves_block_selection(method: Any) -> None:
    leaves = inputs(48)
    closed = {name: torch.zeros_like(value)[..., :42, :] for name, value in extra_of(method).items()}
    if "gate" in closed:
        closed = {"gate": torch.zeros(())}
    geometry = Geometry((6, 8))
    got = method.layer(geometry).attend(*leaves, **closed)
    plain = method.layer(geometry).attend(*leaves)
    torch.testing.assert_close(got.out, plain.out)
    assert torch.equal(got.lse, plain.lse)
    chosen = BlockTopK(q_block=8, k_block=8, keep=2 / 6).layer(geometry).attend(*leaves)
    torch.testing.assert_close(plain.out, chosen.out)
    torch.testing.assert_close(plain.lse, chosen.lse)


@pytest.mark.parametrize(
    "method", [GatedBlocks(8, 99), SparseLinear(8, 99)], ids=lambda method: type(method).__name__
)
def test_all_blocks_chosen_is_full_attention(method: Any) -> None:
    query, key, value = inputs()
    extra = {"gate": torch.zeros(())} if isinstance(method, GatedBlocks) else extra_of(method)
    got = (
        method.layer(GEOMETRY).attend(query, key, value, **extra).out
    )  # nothing is left for linear attention
    want = scaled_dot_product_attention(query, *(x.repeat_interleave(2, 1) for x in (key, value)))
    torch.testing.assert_close(got, want)


def test_linear_attention_to_everything_unchosen_is_a_mean_of_values() -> None:
    """With equal keys all features are equal, so every token that was not chosen weighs the same."""
    query, key, value = (x.detach() for x in inputs(key_heads=4))
    key = key[:, :, :1].expand_as(key)
    method = SparseLinear(block=8, topk=1)  # of equal scores block 0
    near = method.layer(GEOMETRY).attend(query, key, value).out
    both = method.layer(GEOMETRY).attend(query, key, value, projection=torch.eye(8).double()).out
    torch.testing.assert_close(both - near, value[:, :, 8:].mean(2, keepdim=True).expand_as(value))


def test_negative_scale_chooses_the_lowest_products() -> None:
    query, key, value = (x.detach() for x in inputs())
    for method in METHODS:
        reader = method.layer(GEOMETRY)
        turned = reader.attend(-query, key, value, scale=0.3).out
        torch.testing.assert_close(reader.attend(query, key, value, scale=-0.3).out, turned)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_comes_out_where_it_went_in(method: Any, which: int) -> None:
    leaves = [x.detach().clone() for x in inputs()]
    leaves[which][0, 0, 13, 2] = math.nan
    out = method.layer(GEOMETRY).attend(*leaves, **extra_of(method)).out
    assert bool(out[0, 0].isnan().any())
    assert not bool(out[1].isnan().any())


# -- layers, compile, words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [GatedBlocks, SparseLinear])
def test_a_layer_starts_as_block_selection_and_learns_its_branch(kind: Any) -> None:
    torch.manual_seed(0)
    method = kind(8, 2)
    layer = SelfAttention(16, 2, method).double()
    x = torch.randn(2, 42, 16, dtype=torch.float64)
    query, key, value = layer.to_qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    plain = method.layer(GEOMETRY).attend(query, key, value).out
    torch.testing.assert_close(layer(x, GEOMETRY), layer.to_out(plain.transpose(1, 2).flatten(2)))
    layer(x, GEOMETRY).square().mean().backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in layer.parameters())


@pytest.mark.parametrize("order", ["hilbert", "morton", "raster"])
def test_tokens_stand_along_the_curve(order: Any) -> None:
    for kind in (GatedBlocks, SparseLinear):
        ordering = kind(order=order).ordering(GEOMETRY)
        assert torch.equal(ordering.order, getattr(nearfield.curves, order)((6, 7)))


def test_describe_and_pairs() -> None:
    geometry = Geometry((128, 128))
    assert "256 blocks of 64 tokens choose 8 each, and read all means" in GatedBlocks().describe(geometry)
    assert "choose 8 each, and read the others by linear attention" in SparseLinear().describe(geometry)
    for method in (GatedBlocks(), SparseLinear(), GatedBlocks(topk=999)):
        pairs = method.layer(geometry).num_pairs
        assert pairs == 16384 * min(16384, method.topk * 64)


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (lambda: GatedBlocks(block=192), ValueError, "`block` must be a power of two from 2 to 128; got 192."),
    (lambda: SparseLinear(block=1), ValueError, "`block` must be a power of two from 2 to 128; got 1."),
    (lambda: SparseLinear(topk=0), ValueError, "`topk` must be at least 1; got 0."),
    (
        lambda: GatedBlocks(order="spiral"),
        ValueError,
        "`order` must be one of 'hilbert', 'morton', 'raster'; got 'spiral'.",
    ),
    (
        lambda: GatedBlocks().layer(Geometry((4, 4), text=3)),
        ValueError,
        "`geometry` must have no text for this method; got 3 text + 4x4.",
    ),
    (
        lambda: SparseLinear(8).layer(GEOMETRY).attend(*inputs(), projection=torch.eye(4).double()),
        ValueError,
        "`projection` must be [8, 8], or one such matrix per head; got shape [4, 4].",
    ),
    (
        lambda: (
            GatedBlocks(8).layer(GEOMETRY).attend(*inputs(), gate=torch.ones(()), key_bias=torch.zeros(42))
        ),
        ValueError,
        "`key_bias` must be None with a `gate`: a mean cannot hide some of its tokens; got both.",
    ),
    (
        lambda: SelfAttention(10, 3, GatedBlocks()),
        ValueError,
        "`dim` must be a multiple of `heads` (3); got 10.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[bad[2][:40] for bad in BAD_CALLS])
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message
