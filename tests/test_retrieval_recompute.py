"""Recomputed rows against full prefill, and against the same rule written out with a mask; the gate."""

import copy
from typing import Any

import pytest
import torch
from tests.test_retrieval import chunks_of, context_of, every_class, layers_of, relative_error
from tests.tiny_language_models import full_prefill, language_model, random_tokens
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer

from nearfield.retrieval import (
    assemble,
    first_logits,
    prefill_chunk,
    recompute,
    recomputing,
    rotary,
    score,
    verify,
)
from nearfield.retrieval.fidelity import next_logits

LONG = (150, 90, 140)


def rows_of(context: Any, step: int = 3) -> Tensor:
    return torch.arange(40, context.num_tokens, step)


@every_class
def test_everything_recomputed_is_full_prefill(name: str) -> None:
    model = language_model(name)
    context = context_of(model)
    recompute(model, context, torch.arange(context.num_tokens))
    for found, expected in zip(layers_of(context), full_prefill(model, context.tokens), strict=True):
        assert relative_error(found[0], expected[0]) < 1e-12
        assert relative_error(found[1], expected[1]) < 1e-12


def test_all_but_the_first_chunk_is_enough() -> None:
    model = language_model()
    context = context_of(model, LONG)
    recompute(model, context, torch.nonzero(context.owner > 0)[:, 0])
    for found, expected in zip(layers_of(context), full_prefill(model, context.tokens), strict=True):
        assert relative_error(found[0], expected[0]) < 1e-12


def test_reuse_alone_is_not_full_prefill() -> None:
    """Else these tests would show nothing."""
    model = language_model()
    context = context_of(model)
    assert relative_error(layers_of(context)[-1][0], full_prefill(model, context.tokens)[-1][0]) > 0.1


class Masked(DynamicLayer):  # type: ignore[misc]
    """The oracle's cache: writes rows, returns all."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.rows = keys.clone(), values.clone(), rows

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self.rows], self.values[:, :, self.rows] = key_states, value_states
        return self.keys, self.values


@every_class
def test_some_rows_equal_the_rule_with_a_mask(name: str) -> None:
    """The stock attention of the model over the mixed cache, with every visible pair written out."""
    model = language_model(name)
    context = context_of(model)
    rows = rows_of(context)
    oracle = Cache(layers=[Masked(keys, values, rows) for keys, values in layers_of(context)])
    mask = (torch.arange(context.num_tokens) <= rows[:, None])[None, None]
    masks = {"full_attention": mask, "sliding_attention": mask} if name == "gemma3" else mask
    with torch.no_grad():
        model.get_decoder()(
            input_ids=context.tokens[rows][None],
            position_ids=rows[None],
            attention_mask=masks,
            past_key_values=oracle,
        )
    recompute(model, context, rows.flip(0).int())  # in any order, of either type
    for (keys, values), layer in zip(layers_of(context), oracle.layers, strict=True):
        assert relative_error(keys, layer.keys) < 1e-12
        assert relative_error(values, layer.values) < 1e-12


def test_other_rows_stay_bit_for_bit() -> None:
    model = language_model(dtype=torch.float32)
    context = context_of(model)
    before = [(keys.clone(), values.clone()) for keys, values in layers_of(context)]
    rows = rows_of(context)
    recompute(model, context, rows)
    others = torch.ones(context.num_tokens, dtype=torch.bool)
    others[rows] = False
    for (keys, values), (old_keys, old_values) in zip(layers_of(context), before, strict=True):
        assert torch.equal(keys[:, :, others], old_keys[:, :, others])
        assert torch.equal(values[:, :, others], old_values[:, :, others])
    assert not torch.equal(layers_of(context)[-1][0], before[-1][0])


def test_no_rows_is_plain_reuse() -> None:
    model = language_model()
    context = context_of(model)
    before = copy.deepcopy(layers_of(context))
    recompute(model, context, torch.empty(0, dtype=torch.long))
    for found, expected in zip(layers_of(context), before, strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_model_attends_as_before() -> None:
    model = language_model(dtype=torch.float32)
    tokens = random_tokens(20)[None]
    before, name = model(tokens).logits, model.config._attn_implementation
    context = context_of(model)
    recompute(model, context, rows_of(context))
    assert model.config._attn_implementation == name
    assert torch.equal(model(tokens).logits, before)


def test_attention_is_given_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    context = context_of(model)
    name = model.config._attn_implementation
    monkeypatch.setattr(recomputing, "attend_parts", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recompute(model, context, rows_of(context))
    assert model.config._attn_implementation == name


def test_blocks_after_the_last_position_are_not_read() -> None:
    positions = torch.tensor([0, 70, 700])
    plan = recomputing.plan_up_to(positions, 1000)
    assert plan.blocks.flatten().tolist() == list(range(11))
    plan = recomputing.plan_up_to(torch.arange(384), 384)
    assert plan.offsets.flatten().tolist() == [0, 3, 9]  # of 192 queries, and of as many more


def test_keys_that_a_block_sees_may_be_read_apart() -> None:
    model = language_model()
    context, plain = context_of(model, LONG), context_of(model, LONG)
    rows = torch.arange(160, context.num_tokens)
    recompute(model, context, rows)
    whole = full_prefill(model, context.tokens)
    reader = recomputing._Overwriting(plain, rows)
    (_, without), (_, positions) = reader._plans
    assert without is None
    reader._plans = [(recomputing.plan_up_to(rows, len(plain.tokens)), positions)]
    recomputing.run_rows(model, plain, rows, reader)
    for found, same, exact in zip(layers_of(context), layers_of(plain), whole, strict=True):
        assert relative_error(found[0], same[0]) < 1e-12
        assert relative_error(found[1], same[1]) < 1e-12
        assert relative_error(found[0][:, :, :152], exact[0][:, :, :152]) < 1e-12


@pytest.mark.parametrize("step", [1, 3, 7])
def test_two_plans_are_one(step: int) -> None:
    positions = torch.arange(5, 900, step)
    both = recomputing.plans_apart(positions, 1000)
    whole = recomputing.plan_up_to(positions, 1000)
    counts = [plan.pair_counts() for plan in both]
    assert torch.equal(counts[0] + counts[1], whole.pair_counts())
    visible = torch.arange(1000) <= positions[:, None]
    assert bool((counts[0][0, 0] <= visible).all())
    # What is not read apart is at most what the queries of a block stand in, and the two blocks that cuts.
    assert int(counts[1].sum(-1).max()) < 192 * step + 128


@every_class
@pytest.mark.parametrize("step", [3, 1000])
def test_the_question_read_with_the_rows(name: str, step: int) -> None:
    """The same cache and logits as in two passes; with a step of 1000 one row, with none below."""
    model = language_model(name)
    question = random_tokens(11, seed=5)
    context, other = context_of(model, (120, 50)), context_of(model, (120, 50))
    rows = torch.arange(125, context.num_tokens, step)
    logits = first_logits(model, context, rows, question)
    expected = next_logits(model, question, recompute(model, other, rows))
    assert relative_error(logits, expected) < 1e-12
    assert isinstance(context.cache, DynamicCache)
    assert context.cache.get_seq_length() == context.num_tokens + 11
    for found, wanted in zip(layers_of(context), layers_of(other), strict=True):
        assert relative_error(found[0], wanted[0]) < 1e-12
        assert relative_error(found[1], wanted[1]) < 1e-12
    # Whatever was not computed again is as it was, bit for bit.
    untouched = torch.ones(context.num_tokens, dtype=torch.bool)
    untouched[rows] = False
    for found, before in zip(layers_of(context), layers_of(context_of(model, (120, 50))), strict=True):
        assert torch.equal(found[0][:, :, :172][:, :, untouched], before[0][:, :, untouched])
        assert torch.equal(found[1][:, :, :172][:, :, untouched], before[1][:, :, untouched])


@pytest.mark.parametrize("room", [11, 20])
def test_a_context_with_room_grows_in_place(room: int) -> None:
    model = language_model()
    question, rows = random_tokens(11, seed=5), torch.arange(60, 90, 2)
    chunks, plain = chunks_of(model), context_of(model)
    context = assemble(model, chunks, room=room)
    for found, expected in zip(layers_of(context), layers_of(plain), strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    before = layers_of(context)[0][0].data_ptr()
    logits = first_logits(model, context, rows, question)
    assert layers_of(context)[0][0].data_ptr() == before
    assert relative_error(logits, first_logits(model, plain, rows, question)) < 1e-12
    for found, expected in zip(layers_of(context), layers_of(plain), strict=True):
        assert relative_error(found[0], expected[0]) < 1e-12
        assert relative_error(found[1], expected[1]) < 1e-12
    with pytest.raises(ValueError, match="`context` must have a cache of its 92 tokens alone; got 103"):
        first_logits(model, context, rows, question)
    # Generation goes on from it as from any cache.
    prompt = torch.cat([context.tokens, question, logits.argmax()[None]])[None]
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    texts = [model.generate(prompt, past_key_values=one.cache, **options) for one in (context, plain)]
    assert torch.equal(*texts)


def test_a_copy_has_memory_of_its_own() -> None:
    model = language_model()
    context = assemble(model, chunks_of(model), room=11)
    copied = context.copy()
    first_logits(model, copied, torch.tensor([60]), random_tokens(11, seed=5))
    for found, expected in zip(layers_of(context), layers_of(context_of(model)), strict=True):
        assert torch.equal(found[0], expected[0])
    assert copied.cache.get_seq_length() == 103


def test_the_last_layer_is_fed_with_the_question_alone() -> None:
    model = language_model()
    context, fed = context_of(model), list[int]()
    parts = [layer.mlp.down_proj for layer in model.model.layers]
    hooks = [part.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1])) for part in parts]
    first_logits(model, context, torch.tensor([60, 70]), random_tokens(11, seed=5))
    assert fed == [13, 13, 13, 11]
    fed.clear()
    model(random_tokens(20)[None])  # nothing is left behind
    assert fed == [20, 20, 20, 20]
    for hook in hooks:
        hook.remove()


def test_the_question_alone_is_the_model_alone() -> None:
    model = language_model()
    question, none = random_tokens(11, seed=5), torch.empty(0, dtype=torch.long)
    context = context_of(model)
    logits = first_logits(model, context, none, question)
    assert relative_error(logits, next_logits(model, question, context_of(model))) < 1e-12


def test_everything_and_the_question_are_full_prefill() -> None:
    model = language_model()
    question = random_tokens(11, seed=5)
    context = context_of(model, LONG)
    logits = first_logits(model, context, torch.arange(context.num_tokens), question)
    whole = torch.cat([context.tokens, question])
    assert relative_error(logits, next_logits(model, whole)) < 1e-12
    for found, expected in zip(layers_of(context), full_prefill(model, whole), strict=True):
        assert relative_error(found[0], expected[0]) < 1e-12


def test_bad_questions() -> None:
    model = language_model("mistral")
    context = context_of(model, (130, 120))
    rows = torch.tensor([200])
    with pytest.raises(ValueError, match="`question` must hold at least one token; got"):
        first_logits(model, context, rows, random_tokens(0))
    with pytest.raises(TypeError, match=r"`question` must hold integers; got torch.float32"):
        first_logits(model, context, rows, torch.zeros(3))
    message = "`question` must hold at most 256 tokens together with its context, the model's sliding window; got 257"
    with pytest.raises(ValueError, match=message):
        first_logits(model, context, rows, random_tokens(5))


def test_next_tokens_are_those_of_full_prefill() -> None:
    model = language_model(dtype=torch.float32)
    context = context_of(model)
    recompute(model, context, torch.arange(context.num_tokens))
    prompt = torch.cat([context.tokens, random_tokens(9, seed=9)])[None]
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    found = model.generate(prompt, past_key_values=context.cache, **options)
    assert isinstance(context.cache, DynamicCache)
    assert torch.equal(found, expected)


def test_softcap_is_refused() -> None:
    import transformers
    from tests.tiny_language_models import SIZES

    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES | {"head_dim": 8})).eval()
    chunks = [prefill_chunk(model, random_tokens(9, seed)) for seed in range(2)]
    with pytest.raises(
        NotImplementedError, match="`model` must use plain softmax attention; got soft caps on logits"
    ):
        recompute(model, assemble(model, chunks), torch.tensor([12]))


def test_bad_rows() -> None:
    model = language_model()
    context = context_of(model)
    with pytest.raises(ValueError, match="`rows` must lie between 0 and 91; got 92"):
        recompute(model, context, torch.tensor([3, 92]))
    with pytest.raises(TypeError, match=r"`rows` must hold int32 or int64; got torch.bool"):
        recompute(model, context, context.owner > 0)
    chunks = [prefill_chunk(model, random_tokens(9, seed)) for seed in range(2)]
    with pytest.raises(ValueError, match="`context` must have the global geometry; got local positions"):
        recompute(model, assemble(model, chunks, geometry="local"), torch.tensor([3]))


@every_class
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_opens(name: str, dtype: torch.dtype) -> None:
    found = verify(language_model(name, dtype))
    assert found.one_chunk == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_opens_on_a_gpu(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """And what is recomputed there is wrong by at most twice what the CPU is in the same precision."""
    wide = {"hidden_size": 128, "head_dim": 32}  # heads as kernels want them
    verify(language_model(name, dtype, **wide).to(device))
    rows = torch.arange(45, 118, 5)

    def recomputed(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        model = language_model(name, dtype, **wide).to(device)
        chunks = [prefill_chunk(model, random_tokens(40, seed).to(device)) for seed in range(3)]
        context = recompute(model, assemble(model, chunks), rows.to(device))
        return [part.cpu().double() for layer in layers_of(context) for part in layer]

    cpu = torch.device("cpu")
    for mine, plain, exact in zip(
        recomputed(dtype, device), recomputed(dtype, cpu), recomputed(torch.float64, cpu), strict=True
    ):
        assert relative_error(mine, exact) <= 2 * relative_error(plain, exact)


def test_gate_is_shut_where_keys_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary.Turn, "write", lambda self, keys, out, start: out.copy_(keys))
    with pytest.raises(
        ValueError, match="`model` must give the first layer's keys after a move; got a relative error"
    ):
        verify(language_model(dtype=torch.float32))


def test_gate_is_shut_where_recompute_reads_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = recomputing.plans_apart
    monkeypatch.setattr(recomputing, "plans_apart", lambda positions, keys: plans(positions - 64, keys))
    with pytest.raises(ValueError, match="`model` must give full prefill when every row is recomputed; got"):
        verify(language_model(dtype=torch.float32))


def wide_model(name: str, dtype: torch.dtype) -> Any:
    """With heads that the fastest kernel reads; weights are those of half precision."""
    sizes = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 2048}
    return language_model(name, torch.bfloat16, **sizes).to(dtype)


def scores_and_logits(model: Any) -> list[Tensor]:
    question = random_tokens(40, seed=9).to(model.device)
    context = assemble(model, chunks_of(model, (300, 500, 411)), room=len(question))
    rows = torch.arange(320, context.num_tokens, 3, device=model.device)
    scores = score(model, context, question)
    logits = first_logits(model, context, rows, question)
    return [x.double().cpu() for x in (context.cache.layers[1].keys, scores, logits)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4"])
def test_on_a_gpu(name: str) -> None:
    """Moved keys, scores and logits are as near to exact ones as those of plain torch in the same precision."""
    exact, low = (scores_and_logits(wide_model(name, dtype)) for dtype in (torch.float64, torch.bfloat16))
    model = wide_model(name, torch.bfloat16).to("cuda")
    for found, wanted, allowed in zip(scores_and_logits(model), exact, low, strict=True):
        assert relative_error(found, wanted) <= 2 * relative_error(allowed, wanted)
    verify(model)
