"""Log-linear attention against a dense oracle: all levels side by side, who reads whom written out token by token."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attending import assert_budget
from torch import Tensor

import nearfield
from nearfield import Geometry, LogLinear, SelfAttention, attend_with
from nearfield.layout import levels
from nearfield.methods.loglinear import choose
from nearfield.ops.pool_select import api as pyramid
from nearfield.ops.pool_select.reference import select as reference
from nearfield.plan import Packing

INF = float("inf")


# -- the oracle --------------------------------------------------------------------------------------------------


def pooled_by_hand(x: Tensor, block: int, level: int) -> Tensor:
    """Means over the tokens that each token of a level stands for, one after another."""
    size = block**level
    return torch.stack([x[:, :, i : i + size].mean(2) for i in range(0, x.shape[2], size)], dim=2)


def visible(method: LogLinear, picks: tuple[Tensor, ...], num_queries: int, lengths: list[int]) -> Tensor:
    """Which query reads which key of all levels side by side, by the words of the paper."""
    batch, heads = picks[0].shape[:2]
    top = len(picks)
    enriched = top if method.enrich is None else min(method.enrich, top)
    starts = [sum(lengths[:level]) for level in range(top + 1)]
    seen = torch.zeros(batch, heads, num_queries, sum(lengths), dtype=torch.bool)

    def chosen(b: int, h: int, query: int, level: int) -> list[int]:
        mine = picks[level - 1][b, h, query // method.block**level].tolist()
        return [key for key in mine if key < lengths[level]]

    def children(parents: list[int], level: int) -> set[int]:
        every = {parent * method.block + child for parent in parents for child in range(method.block)}
        return {child for child in every if child < lengths[level]}

    for b in range(batch):
        for h in range(heads):
            for query in range(num_queries):
                for level in range(min(top, enriched + 1)):
                    read = children(chosen(b, h, query, level + 1), level)
                    if method.exclude_selected and level:
                        read -= set(chosen(b, h, query, level))
                    seen[b, h, query, [starts[level] + key for key in read]] = True
                if enriched == top:
                    read = set(range(lengths[top]))
                    if method.exclude_selected:
                        read -= set(chosen(b, h, query, top))
                    seen[b, h, query, [starts[top] + key for key in read]] = True
    return seen


def oracle(
    method: LogLinear, query: Tensor, key: Tensor, value: Tensor, picks: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """One dense softmax over all levels, with `log(tokens it stands for)` added to the logits; `out` and `lse`."""
    all_levels = range(len(picks) + 1)
    repeats = query.shape[1] // key.shape[1]
    keys, values = (
        [pooled_by_hand(x, method.block, level).repeat_interleave(repeats, 1) for level in all_levels]
        for x in (key, value)
    )
    lengths = [x.shape[2] for x in keys]
    stands_for = [
        1 if not method.weighted else min(method.block**level, key.shape[2] - i * method.block**level)
        for level in all_levels
        for i in range(lengths[level])
    ]
    bias = torch.tensor(stands_for, dtype=torch.float64).log().to(query.dtype)
    logits = query @ torch.cat(keys, 2).mT * query.shape[3] ** -0.5 + bias
    logits = logits.masked_fill(~visible(method, picks, query.shape[2], lengths), -INF)
    return torch.softmax(logits, -1) @ torch.cat(values, 2), torch.logsumexp(logits, -1)


def picked(method: LogLinear, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    number = method.num_levels(query.shape[2], key.shape[2])
    queries, keys = (pyramid.pool(x, method.block, number) for x in (query, key))
    return pyramid.select_blocks(queries, keys, method.topk, keep_own=method.keep_own)


def inputs(
    num_queries: int, num_keys: int | None = None, *, heads: int = 4, key_heads: int = 2, batch: int = 2,
    dim: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    num_keys = num_queries if num_keys is None else num_keys
    shapes = [(batch, heads, num_queries, dim), *[(batch, key_heads, num_keys, dim)] * 2]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2].requires_grad_()


CASES: dict[str, tuple[LogLinear, int, int]] = {
    "two levels": (LogLinear(block=4, topk=2, levels=2), 64, 64),
    "odd length": (LogLinear(block=4, topk=3), 70, 70),
    "other lengths": (LogLinear(block=4, topk=2, levels=2), 70, 53),
    "one level": (LogLinear(block=4, topk=3, levels=1), 37, 37),
    "four levels": (LogLinear(block=2, topk=3, levels=4), 45, 45),
    "more than there are": (LogLinear(block=4, topk=99, levels=2), 40, 40),
    "excluded": (LogLinear(block=4, topk=2, levels=3, exclude_selected=True), 70, 70),
    "excluded, one level": (LogLinear(block=4, topk=2, levels=1, exclude_selected=True), 30, 30),
    "own kept": (LogLinear(block=8, topk=2, keep_own=True), 70, 70),
    "enriched by one": (LogLinear(block=4, topk=2, levels=2, enrich=1), 70, 70),
    "not enriched": (LogLinear(block=4, topk=2, levels=2, enrich=0), 70, 70),
    "not weighted": (LogLinear(block=4, topk=2, levels=2, weighted=False), 70, 70),
    "block of 16": (LogLinear(topk=2, levels=1), 100, 100),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_oracles(name: str) -> None:
    method, num_queries, num_keys = CASES[name]
    leaves = inputs(num_queries, num_keys)
    got = attend_with(method, *leaves)
    want, _ = oracle(method, *leaves, picked(method, leaves[0], leaves[1]))
    cotangent = torch.randn_like(want)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(got, leaves, cotangent), torch.autograd.grad(want, leaves, cotangent), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_lse_is_the_oracles() -> None:
    method, leaves = LogLinear(block=4, topk=2), inputs(72, heads=2)
    got = method.layer(Geometry((8, 9))).attend(*leaves)
    _, lse = oracle(method, *leaves, picked(method, leaves[0], leaves[1]))
    torch.testing.assert_close(got.lse, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_lower_precision_is_within_its_budget(dtype: torch.dtype) -> None:
    """Twice what the oracle in that precision is wrong by, for the same picks."""
    method = LogLinear(block=4, topk=2)
    leaves = inputs(70, dtype=dtype)
    picks = picked(method, leaves[0], leaves[1])
    exact, _ = oracle(method, *(x.detach().double() for x in leaves), picks)
    low, _ = oracle(method, *(x.detach() for x in leaves), picks)
    got = attend_with(method, *(x.detach() for x in leaves))
    assert_budget("out", got, exact, low)


def test_gradcheck() -> None:
    method, leaves = LogLinear(block=2, topk=2, levels=2), inputs(11, heads=2, key_heads=1, batch=1, dim=3)
    assert torch.autograd.gradcheck(lambda *x: attend_with(method, *x), leaves)


# -- pooling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "block", "number"), [(64, 4, 2), (70, 4, 3), (5, 8, 1), (33, 2, 4), (1, 2, 2)]
)
def test_pooled_levels_are_means_of_what_they_stand_for(length: int, block: int, number: int) -> None:
    x = torch.randn(2, 3, length, 5, dtype=torch.float64)
    pooled = pyramid.pool(x, block, number)
    for level in range(1, number + 1):
        torch.testing.assert_close(pooled.level(level), pooled_by_hand(x, block, level))
    starts = levels.level_starts(length, block, number)
    assert all(start % block == 0 for start in starts)
    used = torch.cat([pooled.level(level).flatten(0, 1) for level in range(1, number + 1)], dim=1)
    assert torch.isclose(pooled.data.abs().sum(), used.abs().sum())  # what pads is zero


def test_pooling_differentiates_and_is_a_proper_operator() -> None:
    x = torch.randn(1, 2, 11, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pyramid.pool(x, 2, 3).data, [x])
    torch.library.opcheck(torch.ops.nearfield.pool.default, (x, 2, 3, "auto"))


@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("packing", [None, Packing(4, 4)])
def test_pooling_and_choosing_is_each_of_them_and_a_proper_operator(
    packing: Packing | None, negated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query's means only choose: they have no gradient."""
    monkeypatch.setattr(pyramid, "packing_for", lambda *_: packing)
    query, key, value = (x.detach().requires_grad_() for x in inputs(37))
    found = pyramid.pool_and_select(query, key, value, 4, 2, 3, keep_own=True, negate_scores=negated)
    queries, keys, values = (pyramid.pool(x, 4, 2) for x in (query, key, value))
    assert torch.equal(found.keys.data, keys.data)
    assert torch.equal(found.values.data, values.data)
    chooser = queries._replace(data=-queries.data) if negated else queries
    assert all(map(torch.equal, found.picks, pyramid.select_blocks(chooser, keys, 3, keep_own=True)))
    assert (found.packed is None) == (packing is None)
    if found.packed:
        assert found.packed.bounds[..., 1::2].amin() >= 4
    loss = (found.keys.data * torch.randn_like(keys.data)).sum()
    (of_key,) = torch.autograd.grad(loss, [key], retain_graph=True)
    assert of_key.abs().min() > 0
    both = torch.autograd.grad(found.keys.data.sum() + found.values.data.sum(), [key, value])
    alone = torch.autograd.grad(keys.data.sum() + values.data.sum(), [key, value])
    assert all(map(torch.equal, both, alone))
    leaves = [x.detach().requires_grad_(x is not query) for x in (query, key, value)]
    arguments = (*leaves, 4, 2, 3, True, negated, *(packing or (0, 0)), "auto")
    torch.library.opcheck(torch.ops.nearfield.pool_and_select.default, arguments)


def test_choosing_is_a_proper_operator() -> None:
    query, key, _ = (x.detach() for x in inputs(20))
    for keep_own in (False, True):
        arguments = ([query, query[:, :, :5]], [key, key[:, :, :5]], 4, 3, keep_own, "auto")
        torch.library.opcheck(torch.ops.nearfield.select.default, arguments)


# -- choosing ----------------------------------------------------------------------------------------------------


def chosen_by_hand(
    query: Tensor, key: Tensor, candidates: list[int], count: int, own: int | None
) -> list[int]:
    scores = {id_: float(query @ key[id_]) for id_ in candidates}
    if own in scores:
        scores[own] = INF
    return sorted(sorted(scores, key=lambda id_: (-scores[id_], id_))[:count])


@settings(max_examples=40, deadline=None)
@given(
    num_queries=st.integers(1, 40),
    num_keys=st.integers(1, 40),
    block=st.sampled_from([2, 4, 8]),
    topk=st.integers(1, 6),
    keep_own=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_query_chooses_the_best_of_its_candidates(
    num_queries: int, num_keys: int, block: int, topk: int, keep_own: bool, seed: int
) -> None:
    query, key, _ = (x.detach() for x in inputs(num_queries, num_keys, batch=1, dim=4, seed=seed))
    highest = 2
    queries, keys = (pyramid.pool(x, block, highest) for x in (query, key))
    picks = pyramid.select_blocks(queries, keys, topk, keep_own=keep_own)
    for level in (1, 2):
        rows, ids = queries.level(level), keys.level(level)
        for head in range(4):
            for row in range(rows.shape[2]):
                if level == highest:
                    candidates = list(range(ids.shape[2]))
                else:
                    parents = picks[level][0, head, row // block].tolist()
                    candidates = [p * block + c for p in parents for c in range(block)]
                    candidates = [c for c in candidates if c < ids.shape[2]]
                own = row if keep_own else None
                want = chosen_by_hand(rows[0, head, row], ids[0, head // 2], candidates, topk, own)
                assert picks[level - 1][0, head, row].tolist() == want


def test_equal_scores_go_to_lower_ids_and_nan_is_worst() -> None:
    query = torch.ones(1, 1, 2, 1)
    key = torch.tensor([2.0, math.nan, 2.0, 1.0, -INF, 2.0]).view(1, 1, 6, 1)
    for count, want in (
        (2, [0, 2]),
        (4, [0, 2, 3, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
        (8, [0, 1, 2, 3, 4, 5, 6, 6]),
    ):
        assert reference.select(query, key, None, 4, count, False)[0, 0, 1].tolist() == want


def test_own_block_is_kept_all_the_way_down() -> None:
    query, key, _ = inputs(200, dim=4, seed=3)
    for level, picks in enumerate(picked(LogLinear(block=4, topk=2, keep_own=True), query, key), start=1):
        own = torch.arange(levels.level_length(200, 4, level))[:, None]
        assert bool((picks == own).any(-1).all())


# -- identities ---------------------------------------------------------------------------------------------------


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def test_choosing_everything_without_summaries_is_full_attention() -> None:
    leaves = inputs(70)
    got = attend_with(LogLinear(block=4, topk=999, levels=2, enrich=0), *leaves)
    torch.testing.assert_close(got, dense(*leaves), rtol=1e-12, atol=1e-12)


def test_choosing_everything_and_excluding_it_is_full_attention() -> None:
    leaves = inputs(70)
    method = LogLinear(block=4, topk=999, levels=2, exclude_selected=True)
    got = attend_with(method, *leaves)
    torch.testing.assert_close(got, dense(*leaves), rtol=1e-12, atol=1e-12)


def test_summaries_of_equal_tokens_are_those_tokens() -> None:
    """Where keys and values are constant inside blocks, and what is read finely is left out, nothing is lost."""
    query, key, value = inputs(48)
    key, value = (x.detach()[:, :, ::16].repeat_interleave(16, 2) for x in (key, value))
    method = LogLinear(block=4, topk=1, levels=2, exclude_selected=True)
    got = attend_with(method, query, key, value)
    torch.testing.assert_close(got, dense(query, key, value), rtol=1e-11, atol=1e-11)


def test_negative_scale_chooses_the_lowest_products() -> None:
    query, key, value = (x.detach() for x in inputs(64))
    method = LogLinear(block=4, topk=2)
    turned = attend_with(method, -query, key, value, scale=0.3)
    torch.testing.assert_close(attend_with(method, query, key, value, scale=-0.3), turned)


def test_two_calls_are_bit_equal() -> None:
    leaves = inputs(70, dtype=torch.float32)
    runs = []
    for _ in range(2):
        out = attend_with(LogLinear(block=4, topk=2), *leaves)
        runs.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_comes_out_and_breaks_nothing(which: int) -> None:
    leaves = [x.detach().clone() for x in inputs(70)]
    leaves[which][0, 0, 13, 2] = math.nan
    out = attend_with(LogLinear(block=4, topk=2), *leaves)
    assert bool(out[0, 0].isnan().any())
    assert not bool(out[1].isnan().any())


# -- text, geometry, models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text_first", [True, False])
def test_text_reads_all_and_is_read_by_all(text_first: bool) -> None:
    geometry = Geometry((6, 7), text=5, text_first=text_first)
    method = LogLinear(block=4, topk=999, levels=1, enrich=0)
    leaves = inputs(47)
    mask = torch.ones(2, 47, dtype=torch.bool)
    mask[1, geometry.text_span[0] + 2 : geometry.text_span[1]] = False
    got = attend_with(method, *leaves, geometry, key_mask=mask)
    torch.testing.assert_close(got, dense(*leaves, mask[:, None, None]), rtol=1e-12, atol=1e-12)


def test_images_beside_text_choose_as_they_would_alone() -> None:
    """With text that nobody may read, the image's part is that of a call without it."""
    geometry, method = Geometry((6, 7), text=5), LogLinear(block=4, topk=2)
    query, key, value = inputs(47)
    mask = torch.ones(2, 47, dtype=torch.bool)
    mask[:, :5] = False
    got = attend_with(method, query, key, value, geometry, key_mask=mask)
    alone = attend_with(method, query[:, :, 5:], key[:, :, 5:], value[:, :, 5:])
    torch.testing.assert_close(got[:, :, 5:], alone, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("order", ["hilbert", "morton", "raster"])
def test_ordering_is_the_curve_of_each_image(order: Any) -> None:
    geometry = Geometry((4, 6), text=3, references=((2, 5),))
    ordering = LogLinear(order=order).ordering(geometry)
    make = getattr(nearfield.curves, order)
    assert torch.equal(ordering.order, torch.cat([make((4, 6)), make((2, 5)) + 24]))


def test_levels_are_joined_by_compiled_code_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch.compile writes several pooled levels in one kernel, which it does here only if it must."""
    monkeypatch.setattr("torch._inductor.config.force_pointwise_cat", True)
    query, key, value = (torch.randn(1, 1, 70, 8) for _ in range(3))
    attention = partial(attend_with, LogLinear(block=4, topk=2, levels=2))
    torch._dynamo.reset()
    found = torch.compile(attention, fullgraph=True)(query, key, value)
    torch.testing.assert_close(found, attention(query, key, value))


def test_module_is_its_formula_and_learns() -> None:
    torch.manual_seed(0)
    module = SelfAttention(16, 2, LogLinear(block=4, topk=99, levels=1, enrich=0)).double()
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    query, key, value = module.to_qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    want = module.to_out(dense(query, key, value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), want)
    module = SelfAttention(16, 2, LogLinear(block=4, topk=2)).double()
    module(x).square().mean().backward()
    assert all(bool((parameter.grad != 0).any()) for parameter in module.parameters())


def test_a_diffusers_model_takes_it() -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 6, 6),
    ).double()  # fmt: skip
    rows, columns = torch.meshgrid(torch.arange(6.0), torch.arange(7.0), indexing="ij")
    arguments = {
        "hidden_states": torch.randn(2, 42, 4).double(),
        "encoder_hidden_states": torch.randn(2, 5, 8).double(),
        "pooled_projections": torch.randn(2, 8).double(),
        "timestep": torch.tensor([0.5, 0.5]).double(),
        "img_ids": torch.stack([torch.zeros(6, 7), rows, columns], -1).view(42, 3),
        "txt_ids": torch.zeros(5, 3),
    }
    with torch.no_grad():
        stock = model(**arguments).sample
        with pytest.raises(
            UserWarning, match="made for models that are trained with it"
        ):  # an error in tests
            nearfield.apply(model, LogLinear(block=4, topk=999, levels=1, enrich=0))
        assert torch.equal(model(**arguments).sample, stock)  # so nothing was applied
        with pytest.warns(UserWarning, match="docs/loglinear.md") as warned:
            handle = nearfield.apply(model, LogLinear(block=4, topk=999, levels=1, enrich=0))
        assert len(warned) == 1
        assert warned[0].filename == __file__
        with handle:
            torch.testing.assert_close(model(**arguments).sample, stock, rtol=1e-9, atol=1e-9)
            assert "LogLinear" in handle.summary()
        with pytest.warns(UserWarning, match="trained with it"):
            handle = nearfield.apply(model, LogLinear(block=4, topk=1, levels=1))
        with handle:
            assert float((model(**arguments).sample - stock).abs().max()) > 1e-4
        assert torch.equal(model(**arguments).sample, stock)


# -- cost and words ------------------------------------------------------------------------------------------------


def test_no_query_reads_more_keys_than_said() -> None:
    for name, (method, num_queries, num_keys) in CASES.items():
        if num_queries != num_keys:
            continue
        leaves = inputs(num_queries, batch=1, heads=2)
        picks = picked(method, leaves[0], leaves[1])
        lengths = [levels.level_length(num_keys, method.block, level) for level in range(len(picks) + 1)]
        most = int(visible(method, picks, num_queries, lengths).sum(-1).max())
        said = method.keys_per_query(num_keys)
        assert most <= said, name
        if not method.exclude_selected:
            assert most == said, name


def test_cost_is_log_linear_where_levels_grow_and_quadratic_where_they_do_not() -> None:
    lengths = [16**3 * 4**i for i in range(6)]
    growing = [LogLinear().keys_per_query(n) for n in lengths]
    # A level adds topk * block keys; the top level stays between one and 16 blocks.
    assert all(keys <= 8 * 16 * math.log(n, 16) + 256 for keys, n in zip(growing, lengths, strict=True))
    fixed = [LogLinear(levels=2).keys_per_query(n) for n in lengths]
    assert all(keys == 2 * 8 * 16 + n // 256 for keys, n in zip(fixed, lengths, strict=True))


def test_pairs_of_the_lists_grow_with_the_length_times_its_logarithm() -> None:
    """Counted in the plans themselves: four times the tokens, four times the pairs and as many again for a level."""
    method = LogLinear(block=4, topk=2)
    counted = []
    for length in (256, 1024, 4096):
        query, key, value = (torch.randn(1, 1, length, 4) for _ in range(3))
        chosen = choose(method, query, key, value)
        assert chosen.far is not None
        pairs = chosen.near.num_pairs + chosen.far.num_pairs
        assert pairs == length * method.keys_per_query(length)
        counted.append(pairs // length)
    assert counted[1] - counted[0] == counted[2] - counted[1] == method.topk * method.block


def test_paper_counts_keys_so() -> None:
    assert LogLinear(levels=2).keys_per_query(16384) == 320
    assert LogLinear(levels=2).keys_per_query(65536) == 512


def test_describe_says_levels_keys_and_pairs() -> None:
    words = LogLinear().describe(Geometry((256, 256)))
    assert "65536 tokens in hilbert order" in words
    assert "levels of 65536, 4096, 256, 16 tokens; each query chooses 8 at each" in words
    assert "keys per image query: at most 400" in words
    assert "pairs kept: 0.6%" in words


BAD_CALLS: list[tuple[Any, type[Exception], str]] = [
    (
        lambda: LogLinear(block=3),
        ValueError,
        "`block` must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192; got 3.",
    ),
    (lambda: LogLinear(block=192), ValueError, "`block` must be a power of two from 2 to 128; got 192."),
    (lambda: LogLinear(block=1), ValueError, "`block` must be a power of two from 2 to 128; got 1."),
    (lambda: LogLinear(topk=0), ValueError, "`topk` must be at least 1; got 0."),
    (lambda: LogLinear(levels=0), ValueError, "`levels` must be at least 1; got 0."),
    (lambda: LogLinear(levels="all"), TypeError, "`levels` must be an integer; got str."),
    (lambda: LogLinear(enrich=-1), ValueError, "`enrich` must be at least 0; got -1."),
    (
        lambda: LogLinear(order="zigzag"),
        ValueError,
        "`order` must be one of 'hilbert', 'morton', 'raster'; got 'zigzag'.",
    ),
    (lambda: LogLinear(keep_own=1), TypeError, "`keep_own` must be True or False; got 1."),
    (
        lambda: attend_with(LogLinear(levels=3), *inputs(20)),
        ValueError,
        "`levels` must be at most 2 for 20 tokens in blocks of 16; got 3.",
    ),
    (
        lambda: attend_with(LogLinear(), *inputs(20), Geometry((3, 4))),
        ValueError,
        "`query` must have the 12 tokens of the geometry (3x4); got 20.",
    ),
    (
        lambda: attend_with(LogLinear(), *inputs(20), key_mask=torch.ones(2, 20, dtype=torch.bool)),
        ValueError,
        "`key_mask` must come with a `geometry` that says where the text is; got no geometry.",
    ),
    (
        lambda: attend_with(LogLinear(), *inputs(20), Geometry((4, 4), text=4), key_mask=torch.ones(2, 20)),
        TypeError,
        "`key_mask` must be bool; got torch.float32. True marks keys that may be read.",
    ),
    (
        lambda: attend_with(LogLinear(), *(x[:, :, :0] for x in inputs(20))),
        ValueError,
        "`query` must have at least one sample and one token; got shape [2, 4, 0, 8].",
    ),
    (
        lambda: attend_with(LogLinear(), *(x[:0] for x in inputs(20))),
        ValueError,
        "`query` must have at least one sample and one token; got shape [0, 4, 20, 8].",
    ),
    (
        lambda: attend_with(LogLinear(), inputs(20)[0], *(x[..., :3] for x in inputs(20)[1:])),
        ValueError,
        "`key` must have the batch (2) and head dimension (8) of `query`; got shape [2, 2, 20, 3]."
        " Expected [batch, heads, tokens, head_dim].",
    ),
    (
        lambda: attend_with(LogLinear(), torch.randn(2, 3, 20, 8), *[torch.randn(2, 2, 20, 8)] * 2),
        ValueError,
        "`key` must have a number of heads that divides `query`'s (3); got 2.",
    ),
    (
        lambda: SelfAttention(10, 3, LogLinear()),
        ValueError,
        "`dim` must be a multiple of `heads` (3); got 10.",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[bad[2][:40] for bad in BAD_CALLS])
def test_bad_calls_say_what_is_wrong(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert str(raised.value) == message
