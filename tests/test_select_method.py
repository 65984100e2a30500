"""A method in which content decides is a class with `scores`; what it reads is compared with masks written out."""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from tests import tiny_models
from tests.test_adapters import assert_differ, assert_same, double, run
from torch import Tensor
from torch.nn import functional

import nearfield
from nearfield import Geometry, Merge, SelectMethod, attend_with, recipes
from nearfield.methods import BlockTopK, Composition, Summaries, fields, registry
from nearfield.methods.recipes import Recipe
from nearfield.methods.select import SelectLayer
from nearfield.parallel.model import check_splittable


@dataclass(frozen=True)
class Nearest(SelectMethod):
    """Blocks of queries read the blocks of keys whose means are nearest, wide blocks before narrow ones.

    Args:
        reach: how much the spread of a block of keys counts.
    """

    name = "nearest"

    reach: float = 0.1
    q_block: int = 16
    k_block: int = 8
    keep: float = 0.3
    top_p: float | None = None
    rest: Literal["drop", "pooled"] = "drop"
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: float = 0

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        distance = (queries.means[:, :, :, None] - keys.means[:, :, None]).square().sum(-1)
        return self.reach * keys.spreads[:, :, None] - distance


class Likest(Nearest):
    """As `BlockTopK`: attention among means."""

    name = ""

    def scores(self, queries: Summaries, keys: Summaries) -> Tensor:
        return queries.scale * queries.means @ keys.means.mT + keys.log_masses[..., None, :]


METHOD = Nearest()
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
    """What it reads, by masked softmax in float64; the rest pooled where the method says so."""
    shared_by = query.shape[1] // key.shape[1]
    mask = mask_of(by_hand(method, geometry, query.detach(), key.detach()), method, query.shape[2])
    key, value = (x.repeat_interleave(shared_by, 1) for x in (key, value))
    logits = (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~mask, -math.inf)
    if method.rest == "pooled":
        keys, values = (torch.stack([b.mean(2) for b in x.split(method.k_block, 2)], 2) for x in (key, value))
        sizes = torch.tensor([float(b.shape[2]) for b in key.split(method.k_block, 2)], dtype=torch.float64)
        pooled = query @ keys.mT * query.shape[3] ** -0.5 + sizes.log()
        logits = torch.cat([logits, pooled.masked_fill(mask[..., :: method.k_block], -math.inf)], -1)
        value = torch.cat([value, values], 2)
    return torch.softmax(logits, -1) @ value


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
@pytest.mark.parametrize("rest", ["drop", "pooled"])
@pytest.mark.parametrize("heads", [2, 4])
def test_it_reads_what_it_chose(heads: int, rest: str, impl: Any) -> None:
    method = Nearest(rest=rest)
    query, key, value = tensors(heads)
    layer = method.layer(GEOMETRY)
    assert torch.equal(layer.choose(query, key).keep, by_hand(method, GEOMETRY, query, key))
    found = layer.attend(query, key, value, impl=impl).out
    expected = masked(query, key, value, method, GEOMETRY)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    dense = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    assert (expected - dense).abs().max() > 0.05


@pytest.mark.parametrize("rest", ["drop", "pooled"])
@pytest.mark.parametrize("everything", [{"keep": 1.0}, {"top_p": 1.0}])
def test_everything_kept_is_dense_attention(everything: dict[str, float], rest: str) -> None:
    query, key, value = tensors(4)
    found = attend_with(Nearest(rest=rest, **everything), query, key, value, GEOMETRY)
    expected = functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_pooled_blocks_of_equal_tokens_lose_nothing() -> None:
    query, key, value = tensors()
    key, value = (x[:, :, ::8].repeat_interleave(8, 2)[:, :, :TOKENS] for x in (key, value))
    found = attend_with(Nearest(rest="pooled", keep=0.01), query, key, value, GEOMETRY)
    expected = functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("share", [{"keep": 0.01}, {"keep": 0.4}, {"top_p": 0.6}])
@pytest.mark.parametrize("hides", [False, True])
def test_attention_among_means_chooses_as_block_topk(share: dict[str, float], hides: bool) -> None:
    query, key, _ = tensors(4)
    bias = torch.zeros(BATCH, 1, TOKENS, dtype=torch.float64)
    if hides:
        bias[1, :, 60:70] = -math.inf
    given = {"keep": share.get("keep"), "mass": share.get("top_p")}
    expected = BlockTopK(16, 8, **given).predict(query, key, GEOMETRY, 0.7, bias)
    found = Likest(**share).layer(GEOMETRY).choose(query, key, key_bias=bias, scale=0.7)
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


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_text_reads_all_and_is_read_by_all_unless_the_method_says_otherwise(rest: str) -> None:
    query, key, value = tensors()
    method = Nearest(keep=0.01, rest=rest)
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

        def forced(self, geometry: Geometry) -> list[tuple[int, int]]:
            return [geometry.text_span, (geometry.num_tokens - 3, geometry.num_tokens)]

    keep = LastToo(keep=0.01, rest=rest).layer(GEOMETRY).choose(query, key).keep
    assert bool(keep[:, :, -1].all())
    assert bool(keep[..., -1].all())
    assert not bool(keep.all())


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_gradients(rest: str) -> None:
    geometry = Geometry((3, 4), 3)
    method = Nearest(q_block=4, k_block=2, keep=0.4, rest=rest)
    leaves = [x.requires_grad_() for x in tensors(2, 1, 15, 2)]

    def read(*leaves: Tensor) -> Tensor:
        return attend_with(method, *leaves, geometry)

    torch.testing.assert_close(read(*leaves), masked(*leaves, method, geometry))
    weights = torch.randn(read(*leaves).shape, dtype=torch.float64)
    found = torch.autograd.grad((read(*leaves) * weights).sum(), leaves)
    expected = torch.autograd.grad((masked(*leaves, method, geometry) * weights).sum(), leaves)
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(read, leaves)


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_half_precision_is_near(rest: str) -> None:
    method = Nearest(rest=rest, keep=0.5)
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
    layer = Likest().layer(GEOMETRY)
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
@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_what_is_not_a_number_stays_in_its_sample(rest: str, place: int) -> None:
    given = tensors()
    clean = attend_with(Nearest(rest=rest), *given, GEOMETRY)
    given[place][0, :, 100] = math.nan
    found = attend_with(Nearest(rest=rest), *given, GEOMETRY)
    assert torch.equal(found[1], clean[1])
    assert bool(found[0].isnan().any())


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_it_counts_what_it_reads(rest: str) -> None:
    query, key, value = tensors()
    layer = Nearest(rest=rest).layer(GEOMETRY)
    assert layer.num_pairs is None
    layer.attend(query, key, value)
    layer.attend(query, key, value)
    share = float(by_hand(METHOD, GEOMETRY, query, key).double().mean())
    expected = share if rest == "drop" else share + (1 - share) / 8
    assert layer.stats.num_sparse == 2
    assert layer.stats.kept == pytest.approx(expected, rel=1e-6)
    assert 0 < layer.stats.dropped < 1


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_it_compiles_in_one_graph(rest: str) -> None:
    torch._dynamo.reset()
    query, key, value = tensors()
    layer = Nearest(rest=rest).layer(GEOMETRY)
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


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_a_model_reads_what_was_chosen(rest: str) -> None:
    model, inputs = model_and_inputs()
    method = Nearest(rest=rest)
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
    assert known["rest"].choices == ("drop", "pooled")
    assert known["reach"].help == "how much the spread of a block of keys counts."


@pytest.mark.parametrize("rest", ["drop", "pooled"])
def test_merged_tokens_read_as_it_says(rest: Any) -> None:
    model, inputs = model_and_inputs()
    merge = Merge(0.5, region_size=16, skip_blocks=(1, 1))
    with nearfield.apply(model, merge):
        expected = run(model, inputs)
    with nearfield.apply(model, merge | Nearest(keep=1.0, rest=rest)):
        assert_same(run(model, inputs), expected)
    with nearfield.apply(model, merge | Nearest(rest=rest)):
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
    (lambda: Nearest(rest="weighted"), ValueError, "`rest` must be one of 'drop', 'pooled'; got 'weighted'."),
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
        lambda: of_spans([(0, 176)]),
        ValueError,
        "`forced` must give spans from 0 to 175; got (0, 176).",
    ),
    (
        lambda: of_spans((), rest="pooled"),
        ValueError,
        '`forced` must hold the text (0, 7) where `rest` is "pooled"; got (). What pads text is hidden by a bias,'
        " of which pooled keys know nothing.",
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
