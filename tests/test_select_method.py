"""A method in which content decides is a class with `scores`; what it reads is compared with masks written out."""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests import tiny_models
from tests.newcomers.nearest import Nearest
from tests.test_adapters import assert_differ, assert_same, double, run
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

import nearfield
from nearfield import Geometry, Merge, SelectMethod, attend_with, recipes
from nearfield.methods import BlockTopK, Composition, Summaries, fields, registry
from nearfield.methods.recipes import Recipe
from nearfield.methods.select import SelectLayer
from nearfield.ops import predict, weighted_windows
from nearfield.parallel.model import check_splittable


@dataclass(frozen=True)
class SolAttn(SelectMethod):
    """The rule of Sol-Attn (arXiv 2607.24027): blocks whose score is some deviations above the mean of its row.

    The blocks next to a query's own are read exactly. Of the others, the mean query of a block reads the means.
    """

    q_block = k_block = 16
    threshold: float | None = 0.7
    rest = "pooled"
    rest_by = "block"

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        centred = keys.means - keys.means.mean(2, keepdim=True)
        variance = queries.means.square() @ centred.square().mean(2)[..., None]
        return queries.means @ centred.mT / variance.sqrt()

    def forced(self, geometry: Geometry) -> list[Any]:
        tokens, block = geometry.num_tokens, self.q_block
        spans = [(start, min(start + block, tokens)) for start in range(0, tokens, block)]
        near = [(max(0, start - block), min(stop + block, tokens)) for start, stop in spans]
        return [*super().forced(geometry), *zip(spans, near, strict=True)]


@dataclass(frozen=True)
class SubBlock(SelectMethod):
    """The rule of SubBlock (SGLang): the mass of a block is that among the means of a quarter of it each."""

    q_block = k_block = 16
    granularity = 4
    keep: float = 0.3

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        return queries.by_block(keys, queries.logits(keys)).logsumexp(-1)


@dataclass(frozen=True)
class ErrorOverCost(SelectMethod):
    """The rule of SVG-EAR (arXiv 2603.08982): blocks whose mean would be most wrong for the mean query, for their cost.

    In place of clusters it takes blocks of the order.
    """

    q_block = k_block = 16
    keep: float = 0.3
    rest = "pooled"

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        shared_by = queries.means.shape[1] // keys.tokens.shape[1]
        tokens, values = (
            x.repeat_interleave(shared_by, 1) for x in (keys.tokens, keys.value_tokens) if x is not None
        )
        logits = queries.scale * queries.means @ tokens.mT
        most = logits.amax(-1, keepdim=True)
        missing = -tokens.shape[2] % keys.size
        weights = pad((logits - most).exp(), (0, missing)).unflatten(-1, (-1, keys.size))
        blocks = pad(values, (0, 0, 0, missing)).unflatten(2, (-1, keys.size))
        exact = torch.einsum("bhrct,bhctd->bhrcd", weights, blocks)
        pooled = (queries.logits(keys) - most).exp()[..., None] * keys.values[:, :, None]
        return (exact - pooled).norm(dim=-1) / keys.log_masses.exp()


METHOD = Nearest()
RESTS: list[dict[str, Any]] = [
    {"rest": "drop"},
    {"rest": "pooled"},
    {"rest": "weighted"},
    {"rest": "pooled", "rest_by": "block"},
]
GRID, BATCH = (12, 14), 2
GEOMETRY = Geometry(GRID, tiny_models.TEXT)
TOKENS = GEOMETRY.num_tokens  # 175: the last block of either side is not full
del registry._CLASSES["nearest"]  # other tests ask for all methods


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_CLASSES", {**registry._CLASSES, "nearest": Nearest})


def tensors(heads: int = 2, groups: int = 2, tokens: int = TOKENS, channels: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, each, tokens, channels) for each in (heads, groups, groups)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_hand(method: SelectMethod, geometry: Geometry, query: Tensor, key: Tensor) -> Tensor:
    """Which blocks `Nearest` reads, by loops over blocks."""
    q_block, k_block = method.q_block, method.k_block
    rows, columns = query.split(q_block, 2), key.split(k_block, 2)
    count = max(1, round(len(columns) * method.keep))
    start, stop = geometry.text_span
    shared_by = query.shape[1] // key.shape[1]
    keep = torch.zeros(*query.shape[:2], len(rows), len(columns), dtype=torch.bool)
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            of_keys = [block[batch, head // shared_by] for block in columns]
            means = torch.stack([block.mean(0) for block in of_keys])
            spreads = torch.stack([((block - block.mean(0)) ** 2).sum(1).mean() for block in of_keys])
            for row, block in enumerate(rows):
                scores = 0.1 * spreads - ((block[batch, head].mean(0) - means) ** 2).sum(1)
                keep[batch, head, row, scores.topk(count).indices] = True
    is_text = torch.arange(geometry.num_tokens)
    is_text = (is_text >= start) & (is_text < stop)
    keep |= torch.stack([part.any() for part in is_text.split(q_block)])[:, None]
    keep |= torch.stack([part.any() for part in is_text.split(k_block)])
    return keep


def mask_of(keep: Tensor, method: SelectMethod, tokens: int) -> Tensor:
    rows = keep.repeat_interleave(method.q_block, 2)[:, :, :tokens]
    return rows.repeat_interleave(method.k_block, 3)[..., :tokens]


def masked(query: Tensor, key: Tensor, value: Tensor, method: SelectMethod, geometry: Geometry) -> Tensor:
    """What it reads, by masked softmax in float64."""
    keep = by_hand(method, geometry, query.detach(), key.detach())
    return written_out(keep, query, key, value, method, geometry)


def written_out(
    keep: Tensor, query: Tensor, key: Tensor, value: Tensor, method: SelectMethod, geometry: Geometry
) -> Tensor:
    """What a method reads that chose these blocks, by masked softmax; the rest in summaries where it says so."""
    shared_by, tokens = query.shape[1] // key.shape[1], query.shape[2]
    mask, scale = mask_of(keep, method, tokens), query.shape[3] ** -0.5
    summaries = summaries_of(query, key, value, method, geometry)
    key, value = (x.repeat_interleave(shared_by, 1) for x in (key, value))
    logits = (query @ key.mT * scale).masked_fill(~mask, -math.inf)
    if method.rest != "drop":
        readers = query
        if method.rest_by == "block":
            means = torch.stack([b.mean(2) for b in query.split(method.q_block, 2)], 2)
            readers = means.repeat_interleave(method.q_block, 2)[:, :, :tokens]
        keys, values, bias = summaries
        rest = readers @ keys.mT * scale + bias[..., None, :]
        logits = torch.cat([logits, rest.masked_fill(mask[..., :: method.k_block], -math.inf)], -1)
        value = torch.cat([value, values], 2)
    return torch.softmax(logits, -1) @ value


def summaries_of(
    query: Tensor, key: Tensor, value: Tensor, method: SelectMethod, geometry: Geometry
) -> tuple[Tensor, ...]:
    """Keys, values and biases of all blocks of keys, for all heads of queries."""
    shared_by, blocks = query.shape[1] // key.shape[1], key.split(method.k_block, 2)
    sizes = torch.tensor([block.shape[2] for block in blocks])
    if method.rest == "weighted":
        # The text has no summaries, so its queries are not in the mean.
        starts = torch.arange(len(sizes)) * method.k_block
        unforced = (starts >= geometry.text_span[1]) | (starts + sizes <= geometry.text_span[0])
        windows = starts[unforced], sizes[unforced].to(torch.int32), method.k_block
        found = weighted_windows(query, key, value, *windows)
        wide = [x.new_zeros(*x.shape[:2], len(sizes), *x.shape[3:]) for x in found]
        keys, values, bias = (
            empty.index_copy(2, unforced.nonzero()[:, 0], x) for empty, x in zip(wide, found, strict=True)
        )
    else:
        keys, values = (
            torch.stack([block.mean(2) for block in x.split(method.k_block, 2)], 2) for x in (key, value)
        )
        bias = sizes.double().log().expand(*query.shape[:2], -1)
    return keys.repeat_interleave(shared_by, 1), values.repeat_interleave(shared_by, 1), bias


# -- the class ---------------------------------------------------------------------------------------------------------


def test_a_method_is_its_name_its_fields_and_scores() -> None:
    lines = [line for line in inspect.getsource(Nearest).splitlines() if line.strip()]
    assert len(lines) < 50
    own = {name for name, value in vars(Nearest).items() if inspect.isfunction(value)}
    assert {name for name in own if not name.startswith("_")} == {"scores"}


def test_description_and_label() -> None:
    chosen = "at every call 11 blocks of 16 queries choose among 22 of 8 keys: "
    assert METHOD.describe(GEOMETRY) == f"7 text + 12x14: 175 tokens\n  {chosen}30% of them"
    pooled = Nearest(top_p=0.9, rest="pooled")
    words = "those that hold 90% of the softmax of its scores; the rest is read pooled"
    assert pooled.describe(GEOMETRY) == f"7 text + 12x14: 175 tokens\n  {chosen}{words}"
    assert pooled.label == "Nearest(top_p=0.9, rest='pooled')"


# -- what is computed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("rest", RESTS, ids=str)
@pytest.mark.parametrize("heads", [2, 4])
def test_it_reads_what_it_chose(heads: int, rest: Any, impl: Any) -> None:
    method = Nearest(**rest)
    query, key, value = tensors(heads)
    layer = method.layer(GEOMETRY)
    assert torch.equal(layer.choose(query, key).keep, by_hand(method, GEOMETRY, query, key))
    found = layer.attend(query, key, value, impl=impl).out
    expected = masked(query, key, value, method, GEOMETRY)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    dense = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert (expected - dense).abs().max() > 0.05


@pytest.mark.parametrize("rest", RESTS, ids=str)
@pytest.mark.parametrize("everything", [{"keep": 1.0}, {"top_p": 1.0}])
def test_everything_kept_is_dense_attention(everything: dict[str, float], rest: Any) -> None:
    query, key, value = tensors(4)
    found = attend_with(Nearest(**rest, **everything), query, key, value, GEOMETRY)
    expected = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_pooled_blocks_of_equal_tokens_lose_nothing() -> None:
    query, key, value = tensors()
    key, value = (x[:, :, ::8].repeat_interleave(8, 2)[:, :, :TOKENS] for x in (key, value))
    found = attend_with(Nearest(rest="pooled", keep=0.01), query, key, value, GEOMETRY)
    expected = functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("share", [{"keep": 0.01}, {"keep": 0.4}, {"top_p": 0.6}])
@pytest.mark.parametrize("similarity", [None, 0.3])
@pytest.mark.parametrize("hides", [False, True])
def test_block_topk_chooses_by_attention_among_means(
    share: dict[str, float], hides: bool, similarity: float | None
) -> None:
    query, key, _ = tensors(4)
    bias = torch.zeros(BATCH, 1, TOKENS, dtype=torch.float64)
    if hides:
        bias[1, :, 60:70] = -math.inf
    count = max(1, round(22 * share["keep"])) if "keep" in share else None
    blocks = predict.Blocks(16, 8, TOKENS, TOKENS, (GEOMETRY.text_span,))
    chosen = {"mass": share.get("top_p"), "topk": count, "key_bias": bias, "scale": 0.7, "guard": similarity}
    expected = predict.by_means(query, key, blocks, **chosen)
    method = BlockTopK(16, 8, **share, min_similarity=similarity)
    found = method.layer(GEOMETRY).choose(query, key, key_bias=bias, scale=0.7)
    assert torch.equal(found.keep, expected.keep)
    torch.testing.assert_close(found.dropped, expected.dropped)
    assert bool(found.keep.any(-1).all())


def test_hidden_blocks_come_last() -> None:
    geometry = Geometry((8, 8))
    query, key, value = tensors(tokens=64)
    bias = torch.zeros(BATCH, 1, 64, dtype=torch.float64)
    bias[:, :, 8:] = -math.inf
    layer = Nearest(keep=0.01).layer(geometry)
    keep = layer.choose(query, key, key_bias=bias).keep
    assert bool(keep[..., 0].all())
    assert int(keep.sum()) == keep[..., 0].numel()
    found = layer.attend(query, key, value, key_bias=bias).out
    expected = functional.scaled_dot_product_attention(query, key[:, :, :8], value[:, :, :8])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_text_reads_all_and_is_read_by_all_unless_the_method_says_otherwise(rest: Any) -> None:
    query, key, value = tensors()
    method = Nearest(keep=0.01, **rest)
    keep = method.layer(GEOMETRY).choose(query, key).keep
    assert bool(keep[:, :, 0].all())
    assert bool(keep[..., 0].all())
    assert int(keep.sum(-1)[:, :, 1:].max()) == 2
    found = attend_with(method, query, key, value, GEOMETRY)
    expected = functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found[:, :, :16], expected[:, :, :16])
    assert (found - expected)[:, :, 16:].abs().max() > 0.05

    class LastToo(Nearest):
        name = ""

        def forced(self, geometry: Geometry) -> list[Any]:
            last, everything = (geometry.num_tokens - 3, geometry.num_tokens), (0, geometry.num_tokens)
            return [*super().forced(geometry), (last, everything), (everything, last)]

    keep = LastToo(keep=0.01, **rest).layer(GEOMETRY).choose(query, key).keep
    assert bool(keep[:, :, -1].all())
    assert bool(keep[..., -1].all())
    assert not bool(keep.all())


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_gradients(rest: Any) -> None:
    geometry = Geometry((3, 4), 3)
    method = Nearest(q_block=4, k_block=2, keep=0.4, **rest)
    leaves = [x.requires_grad_() for x in tensors(2, 1, 15, 2)]

    def read(*leaves: Tensor) -> Tensor:
        return attend_with(method, *leaves, geometry)

    torch.testing.assert_close(read(*leaves), masked(*leaves, method, geometry))
    weights = torch.randn(read(*leaves).shape, dtype=torch.float64)
    found = torch.autograd.grad((read(*leaves) * weights).sum(), leaves)
    expected = torch.autograd.grad((masked(*leaves, method, geometry) * weights).sum(), leaves)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(read, leaves)


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_half_precision_is_near(rest: Any) -> None:
    method = Nearest(**rest, keep=0.5)
    rounded = [x.bfloat16() for x in tensors(4)]
    found = attend_with(method, *rounded, GEOMETRY)
    assert found.dtype == torch.bfloat16
    exact = [x.double() for x in rounded]
    assert torch.equal(
        method.layer(GEOMETRY).choose(*rounded[:2]).keep, method.layer(GEOMETRY).choose(*exact[:2]).keep
    )
    expected = attend_with(method, *exact, GEOMETRY)
    budget = 2 * (masked_in(torch.bfloat16, *exact) - masked_in(torch.float64, *exact)).abs().max()
    assert (found - expected).abs().max() <= budget


def masked_in(dtype: torch.dtype, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same mask under torch's eager attention, in a precision."""
    mask = mask_of(METHOD.layer(GEOMETRY).choose(query, key).keep, METHOD, TOKENS)
    query, key, value = (
        x.to(dtype) for x in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    )
    logits = (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~mask, -math.inf)
    return (torch.softmax(logits, -1) @ value).double()


def test_autocast_does_not_round_scores() -> None:
    query, key, _ = (x.float() for x in tensors())
    layer = BlockTopK(16, 8).layer(GEOMETRY)
    expected = layer.choose(query, key)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer.choose(query, key)
    assert torch.equal(found.dropped, expected.dropped)


def test_a_layer_made_in_inference_mode_can_be_trained() -> None:
    query, key, value = tensors()
    with torch.inference_mode():
        layer = Nearest(rest="pooled").layer(GEOMETRY)
        layer.attend(query, key, value)
    key.requires_grad_()
    layer.attend(query, key, value).out.sum().backward()
    assert key.grad is not None
    assert bool((key.grad != 0).any())


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_what_is_not_a_number_stays_in_its_sample(rest: Any, place: int) -> None:
    given = tensors()
    clean = attend_with(Nearest(**rest), *given, GEOMETRY)
    given[place][0, :, 100] = math.nan
    found = attend_with(Nearest(**rest), *given, GEOMETRY)
    assert torch.equal(found[1], clean[1])
    assert bool(found[0].isnan().any())


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_it_counts_what_it_reads(rest: Any) -> None:
    query, key, value = tensors()
    layer = Nearest(**rest).layer(GEOMETRY)
    # The share of the image's keys for its queries; text reads everything and is read by everyone.
    pairs = 7 * 175 + 168 * (round(0.3 * 175) + 7)
    assert layer.num_pairs == (pairs if layer.method.rest == "drop" else None)
    layer.attend(query, key, value)
    layer.attend(query, key, value)
    share = float(by_hand(METHOD, GEOMETRY, query, key).double().mean())
    expected = share
    if layer.method.rest != "drop":
        expected += (1 - share) / (8 * (16 if layer.method.rest_by == "block" else 1))
    assert layer.stats.num_sparse == 2
    assert layer.stats.kept == pytest.approx(expected, rel=1e-6)
    assert 0 < layer.stats.dropped < 1


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_it_compiles_in_one_graph(rest: Any) -> None:
    torch._dynamo.reset()
    query, key, value = tensors()
    layer = Nearest(**rest).layer(GEOMETRY)
    compiled = torch.compile(layer.attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value).out, layer.attend(query, key, value).out)
    torch._dynamo.reset()


def test_choosing_by_scores_is_a_proper_operator() -> None:
    scores = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    whole, always = torch.zeros(2, 3, 4, dtype=torch.bool), torch.zeros(2, 1, 5, dtype=torch.bool)
    for mass, count in ((0.6, None), (None, 2)):
        torch.library.opcheck(
            torch.ops.nearfield.keep_by_scores, (scores, whole, always, mass, count, "auto")
        )


# -- published rules ---------------------------------------------------------------------------------------------------

RULES = (SolAttn(), SubBlock(), ErrorOverCost())


def everything_of(method: SelectMethod) -> SelectMethod:
    if method.threshold is not None:
        return replace(method, threshold=-math.inf)  # type: ignore[type-var]
    return replace(method, keep=1.0)  # type: ignore[type-var]


@pytest.mark.parametrize("method", RULES, ids=lambda method: type(method).__name__)
class TestRules:
    def test_it_is_short(self, method: SelectMethod) -> None:
        assert len(inspect.getsource(type(method)).splitlines()) < 50

    def test_everything_read_is_dense_attention(self, method: SelectMethod) -> None:
        query, key, value = tensors(4)
        found = attend_with(everything_of(method), query, key, value, GEOMETRY)
        expected = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    def test_it_reads_what_it_chose(self, method: SelectMethod) -> None:
        leaves = [x.requires_grad_() for x in tensors(4)]
        layer: SelectLayer = method.layer(GEOMETRY)
        keep = layer.choose(*leaves).keep
        assert 0.2 < keep.double().mean() < 0.8
        found = layer.attend(*leaves).out
        expected = written_out(keep, *leaves, method, GEOMETRY)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        weights = torch.randn(found.shape, dtype=torch.float64)
        gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected)]
        torch.testing.assert_close(*gradients)

    def test_text_is_read_exactly_and_what_pads_it_is_hidden(self, method: SelectMethod) -> None:
        query, key, value = tensors()
        bias = torch.zeros(BATCH, 1, TOKENS, dtype=torch.float64)
        bias[:, :, 4:7] = -math.inf
        layer: SelectLayer = method.layer(GEOMETRY)
        keep = layer.choose(query, key, value, key_bias=bias).keep
        assert bool(keep[:, :, 0].all())
        assert bool(keep[..., 0].all())
        found = layer.attend(query, key, value, key_bias=bias).out
        key[:, :, 4:7], value[:, :, 4:7] = 100.0, 100.0
        there = torch.ones(TOKENS, dtype=torch.bool)
        there[4:7] = False
        dense = functional.scaled_dot_product_attention(query, key[:, :, there], value[:, :, there])
        torch.testing.assert_close(found[:, :, :4], dense[:, :, :4])

    def test_blocks_of_equal_tokens_lose_nothing_but_what_is_dropped(self, method: SelectMethod) -> None:
        query, key, value = (x[:, :, ::16].repeat_interleave(16, 2)[:, :, :TOKENS] for x in tensors())
        found = attend_with(method, query, key, value, GEOMETRY)
        expected = functional.scaled_dot_product_attention(query, key, value)
        if method.rest == "drop":
            dropped = method.layer(GEOMETRY).choose(query, key).dropped  # type: ignore[attr-defined]
            # Here the estimate is exact, and what is left out moves a result by twice its share at most.
            assert float((found - expected).abs().mean()) <= float(2 * dropped.max() * value.abs().max())
        else:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    def test_a_model_runs_and_compiles(self, method: SelectMethod) -> None:
        torch._dynamo.reset()
        model, inputs = model_and_inputs()
        stock = run(model, inputs)
        with nearfield.apply(model, everything_of(method)):
            assert_same(run(model, inputs), stock)
        with nearfield.apply(model, method):
            expected = run(model, inputs)
            model.compile_repeated_blocks(fullgraph=True, backend="eager")
            assert_same(run(model, inputs), expected)
        assert_differ(expected, stock)
        torch._dynamo.reset()


def blocks_of(x: Tensor, head: int, heads: int) -> tuple[Tensor, ...]:
    """The blocks of 16 tokens that a head of queries sees of the first sample."""
    return x[0, head * x.shape[1] // heads].split(16)


def chosen_by(score: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """The best 3 of 11 blocks for each of the 11 of the first sample, and the text in the first of them."""
    keep = torch.zeros(4, 11, 11, dtype=torch.bool)
    for head in range(4):
        of_all = [blocks_of(x, head, 4) for x in given]
        for row, block in enumerate(of_all[0]):
            scores = torch.stack([score(block, *of_keys) for of_keys in zip(*of_all[1:], strict=True)])
            keep[head, row, scores.topk(3).indices] = True
    keep[:, 0] = keep[:, :, 0] = True
    return keep


def test_sub_blocks_are_scored_by_the_mass_among_their_means() -> None:
    query, key, _ = tensors(4)

    def score(rows: Tensor, columns: Tensor) -> Tensor:
        masses = [
            float(row.mean(0) @ column.mean(0)) * 8**-0.5 + math.log(len(column))
            for row in rows.split(4)
            for column in columns.split(4)
        ]
        return torch.tensor(masses, dtype=torch.float64).exp().sum()

    found = SubBlock().layer(GEOMETRY).choose(query, key).keep  # type: ignore[attr-defined]
    assert torch.equal(found[0], chosen_by(score, query, key))


def test_error_over_cost_reads_where_a_mean_is_most_wrong() -> None:
    query, key, value = tensors(4)

    def score(rows: Tensor, columns: Tensor, values: Tensor) -> Tensor:
        mean = rows.mean(0) * 8**-0.5
        exact = (mean @ columns.T).exp() @ values
        pooled = len(columns) * (mean @ columns.mean(0)).exp() * values.mean(0)
        return (exact - pooled).norm() / len(columns)

    layer: SelectLayer = ErrorOverCost().layer(GEOMETRY)
    assert torch.equal(layer.choose(query, key, value).keep[0], chosen_by(score, query, key, value))


def test_sol_attn_reads_neighbours_and_what_stands_out() -> None:
    query, key, _ = tensors(4)
    keep = SolAttn().layer(GEOMETRY).choose(query, key).keep[0]  # type: ignore[attr-defined]
    for head in range(4):
        rows, columns = (torch.stack([b.mean(0) for b in blocks_of(x, head, 4)]) for x in (query, key))
        centred = columns - columns.mean(0)
        for row, mean in enumerate(rows):
            stands_out = (centred @ mean) ** 2 > 0.49 * (mean**2 * (centred**2).mean(0)).sum()
            expected = stands_out & (centred @ mean > 0)
            expected[max(0, row - 1) : row + 2] = True
            expected[0] = True
            assert torch.equal(keep[head, row], expected | (row == 0))


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_a_threshold_keeps_the_best_block_at_least(rest: Any) -> None:
    query, key, _ = tensors(tokens=168)
    layer = Nearest(threshold=math.inf, rest=rest).layer(Geometry(GRID))
    keep = layer.choose(query, key).keep
    assert torch.equal(keep, Nearest(keep=0.01).layer(Geometry(GRID)).choose(query, key).keep)


def test_summaries_of_finer_grain_say_what_a_block_holds() -> None:
    query, key, value = tensors(4)
    seen: list[Summaries] = []

    class Watching(SubBlock):
        def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
            seen[:] = queries, keys
            return super().scores(queries, keys)

    Watching().layer(GEOMETRY).choose(query, key, value)  # type: ignore[attr-defined]
    queries, keys = seen
    assert queries.means.shape == (BATCH, 4, 44, 8)
    assert (queries.size, queries.per_block, keys.per_block) == (4, 4, 4)
    parts = [torch.stack([part[1, 1] for part in x.split(4, 2)][:43]) for x in (key, value)]
    for tokens, means, spreads in (
        (parts[0], keys.means, keys.spreads),
        (parts[1], keys.values, keys.value_spreads),
    ):
        torch.testing.assert_close(means[1, 3, :43], tokens.mean(1))
        centred = tokens - tokens.mean(1, keepdim=True)
        torch.testing.assert_close(spreads[1, 2, :43], centred.square().sum(-1).mean(-1))
    cosine = functional.cosine_similarity(parts[0], parts[0].mean(1, keepdim=True), dim=-1)
    torch.testing.assert_close(keys.similarities[1, 2, :43], cosine.mean(-1))
    torch.testing.assert_close(keys.log_masses.exp(), torch.tensor([4.0] * 43 + [3.0], dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^`values` must be asked of keys, in a call that has values"):
        _ = queries.values


# -- in models ---------------------------------------------------------------------------------------------------------


def model_and_inputs() -> tuple[Any, dict[str, Any]]:
    make, inputs_of = tiny_models.MODELS["flux"]
    return make().double(), double(inputs_of(GRID, BATCH))


@contextmanager
def as_masked(method: SelectMethod) -> Iterator[None]:
    """The stock model's attention hides what the method does not choose, among tokens in its order."""
    dense = functional.scaled_dot_product_attention
    ordering = method.ordering(GEOMETRY)

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, **_: Any) -> Tensor:
        assert attn_mask is None
        order = torch.arange(TOKENS)
        start, stop = GEOMETRY.image_spans[0]
        order[start:stop] = start + ordering.order
        out = torch.empty_like(query)
        out[:, :, order] = masked(*(x[:, :, order] for x in (query, key, value)), method, GEOMETRY)
        return out

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = dense


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_a_model_reads_what_was_chosen(rest: Any) -> None:
    model, inputs = model_and_inputs()
    method = Nearest(**rest)
    stock = run(model, inputs)
    with as_masked(method):
        expected = run(model, inputs)
    with nearfield.apply(model, method) as handle:
        assert_same(run(model, inputs), expected)
        summary = handle.summary()
    assert_differ(expected, stock)
    assert f"nearfield: {method.label}\n" in summary
    assert "attention: 5 sparse" in summary
    assert "pairs: " in summary
    with nearfield.apply(model, replace(method, keep=1.0)):
        assert_same(run(model, inputs), stock)


def test_blocks_compile() -> None:
    torch._dynamo.reset()
    model, inputs = model_and_inputs()
    with nearfield.apply(model, METHOD):
        expected = run(model, inputs)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert_same(run(model, inputs), expected)
    torch._dynamo.reset()


def test_recipes_name_it() -> None:
    for method in (Nearest(0.2, dense_layers=(0, -1)), Merge(0.25) | Nearest(rest="pooled")):
        document = json.loads(json.dumps(Recipe(method, model="FluxTransformer2DModel").as_document()))
        assert recipes.read(document) == Recipe(method, model="FluxTransformer2DModel")


def test_commands_make_it_from_texts_and_know_what_its_fields_mean() -> None:
    made = fields.made("nearest", {"keep": "0.5", "top_p": "none", "rest": "pooled", "q_block": "32"})
    assert made == Nearest(keep=0.5, rest="pooled", q_block=32)
    known = {field.name: field for field in fields.fields_of(Nearest)}
    assert known["q_block"].help == "queries that choose together."
    assert known["rest"].choices == ("drop", "pooled", "weighted")
    assert known["reach"].help == "how much the spread of a block of keys counts."


@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_merged_tokens_read_as_it_says(rest: Any) -> None:
    model, inputs = model_and_inputs()
    merge = Merge(0.5, region_size=16, skip_blocks=(1, 1))
    with nearfield.apply(model, merge):
        expected = run(model, inputs)
    with nearfield.apply(model, merge | Nearest(keep=1.0, **rest)):
        assert_same(run(model, inputs), expected)
    with nearfield.apply(model, merge | Nearest(**rest)):
        assert_differ(run(model, inputs), expected)


def test_merged_tokens_that_weigh_are_not_pooled() -> None:
    merge = Merge(0.5, region_size=16, size_bias=True)
    assert isinstance(merge | METHOD, Composition)
    with pytest.raises(ValueError, match=r"^`size_bias` must be False together with Nearest as it is set"):
        merge | Nearest(rest="pooled")


# -- errors ------------------------------------------------------------------------------------------------------------


def of_scores(made: Callable[[Tensor], Any]) -> SelectLayer:
    kind = type("Made", (Nearest,), {"name": "", "scores": lambda self, queries, keys: made(keys.means)})
    layer: SelectLayer = kind().layer(GEOMETRY)
    return layer


def of_spans(spans: Any, **fields: Any) -> SelectLayer:
    layer: SelectLayer = type("Made", (Nearest,), {"name": "", "forced": lambda *_: spans})(**fields).layer(
        GEOMETRY
    )
    return layer


BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: Nearest(q_block=3),
        ValueError,
        "`q_block` must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192; got 3.",
    ),
    (
        lambda: Nearest(k_block=3),
        ValueError,
        "`k_block` must be one of 1, 2, 4, 8, 16, 32, 64, 128, 192; got 3.",
    ),
    (lambda: Nearest(keep=0.0), ValueError, "`keep` must lie above 0, up to 1; got 0.0."),
    (lambda: Nearest(top_p=1.5), ValueError, "`top_p` must lie above 0, up to 1; got 1.5."),
    (lambda: Nearest(keep="a"), TypeError, "`keep` must be a number; got 'a'."),  # type: ignore[arg-type]
    (
        lambda: Nearest(rest="none"),  # type: ignore[arg-type]
        ValueError,
        "`rest` must be one of 'drop', 'pooled', 'weighted'; got 'none'.",
    ),
    (
        lambda: Nearest(rest_by="head"),  # type: ignore[arg-type]
        ValueError,
        "`rest_by` must be one of 'query', 'block'; got 'head'.",
    ),
    (lambda: Nearest(threshold="a"), TypeError, "`threshold` must be a number; got 'a'."),  # type: ignore[arg-type]
    (
        lambda: Nearest(threshold=0.5, top_p=0.5),
        ValueError,
        "`threshold` must be given instead of `top_p`, not with it; got (0.5, 0.5).",
    ),
    (
        lambda: type("Finer", (Nearest,), {"name": "", "granularity": 3})(),
        ValueError,
        "`granularity` must divide `q_block` (16) and `k_block` (8); got 3.",
    ),
    (lambda: Nearest(dense_layers=-1), ValueError, "`dense_layers` must be at least 0; got -1."),
    (
        lambda: of_scores(lambda x: x).choose(*tensors()[:2]),
        ValueError,
        "`scores` must have shape [2, 2, 11, 22]; got shape [2, 2, 22, 8].",
    ),
    (
        lambda: of_scores(lambda x: x.new_zeros(2, 2, 11, 22, dtype=torch.int32)).choose(*tensors()[:2]),
        TypeError,
        "`scores` must be floating point; got torch.int32.",
    ),
    (
        lambda: of_scores(lambda x: None).choose(*tensors()[:2]),
        TypeError,
        "`scores` must be a tensor; got NoneType.",
    ),
    (
        lambda: METHOD.layer(GEOMETRY).choose(*tensors(tokens=64)[:2]),
        ValueError,
        "`query` must have the 175 tokens of the geometry; got 64.",
    ),
    (
        lambda: of_spans([((0, 16), (0, 176))]),
        ValueError,
        "`forced` must give spans from 0 to 175; got (0, 176).",
    ),
    (
        lambda: of_spans([(0, 175)]),
        TypeError,
        "`forced` must give pairs of spans, (queries, keys); got ((0, 175),).",
    ),
    (
        lambda: of_spans((), rest="pooled"),
        ValueError,
        '`forced` must hold the text (0, 7) for all queries where `rest` is "pooled"; got (). What pads text is hidden'
        " by a bias, of which pooled keys know nothing.",
    ),
    (
        lambda: check_splittable(Composition.of(METHOD)),
        ValueError,
        "`method` must decide by the geometry alone who reads whom to be split over ranks; got Nearest().",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD, ids=[bad[2][:40] for bad in BAD])
def test_bad_calls_say_what_is_wrong(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
