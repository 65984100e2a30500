"""Chunks and contexts against full prefill of the same tokens by the model alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny_language_models import CLASSES, ROPE, full_prefill, language_model, random_tokens
from torch import Tensor

from nearfield.retrieval import Chunk, Context, assemble, first_logits, prefill_chunk, score, verify

PREFIX = torch.tensor([1, 5])
LENGTHS = (37, 20, 33)
every_class = pytest.mark.parametrize("name", CLASSES)


def chunks_of(model: Any, lengths: tuple[int, ...] = LENGTHS, prefix: Tensor = PREFIX) -> list[Chunk]:
    return [
        prefill_chunk(model, random_tokens(length, seed), prefix.to(model.device))
        for seed, length in enumerate(lengths)
    ]


def context_of(model: Any, lengths: tuple[int, ...] = LENGTHS) -> Context:
    return assemble(model, chunks_of(model, lengths))


def layers_of(context: Context) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in context.cache.layers]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_tokens_stand_in_order_and_the_prefix_stands_once() -> None:
    context = context_of(language_model())
    texts = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    assert torch.equal(context.tokens, torch.cat([PREFIX, *texts]))
    assert torch.equal(context.positions, torch.arange(92))
    assert context.owner.tolist() == [0] * 39 + [1] * 20 + [2] * 33
    assert context.offset.tolist() == [0, 0, *range(37), *range(20), *range(33)]
    assert context.lengths == LENGTHS


@every_class
def test_first_layer_equals_full_prefill(name: str) -> None:
    """Keys of the first layer depend on a token and its position alone: moved, they are those of the whole prompt."""
    model = language_model(name)
    context = context_of(model)
    (keys, values), *_ = layers_of(context)
    expected_keys, expected_values = full_prefill(model, context.tokens)[0]
    assert relative_error(keys, expected_keys) < 1e-6  # angles are rounded to single precision in any model
    assert relative_error(values, expected_values) < 1e-14


@every_class
def test_unmoved_keys_differ(name: str) -> None:
    """The oracle would notice a rotation that is not done."""
    model = language_model(name)
    context = assemble(model, chunks_of(model), geometry="local")
    (keys, _), *_ = layers_of(context)
    assert relative_error(keys, full_prefill(model, context.tokens)[0][0]) > 0.1


@every_class
def test_one_chunk_is_full_prefill(name: str) -> None:
    model = language_model(name)
    context = context_of(model, (40,))
    for found, expected in zip(layers_of(context), full_prefill(model, context.tokens), strict=True):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_first_chunk_is_not_touched_and_values_never_are() -> None:
    model = language_model()
    chunks = chunks_of(model)
    for layer, (keys, values) in enumerate(layers_of(assemble(model, chunks))):
        assert torch.equal(keys[0, :, :39], chunks[0].keys[layer])
        texts = [chunks[0].values[layer], chunks[1].values[layer, :, 2:], chunks[2].values[layer, :, 2:]]
        assert torch.equal(values[0], torch.cat(texts, 1))


def test_a_context_does_not_share_memory_with_its_chunks() -> None:
    model = language_model()
    chunks = chunks_of(model, (10,))
    before = chunks[0].keys.clone()
    assemble(model, chunks).cache.layers[0].keys.zero_()
    assert torch.equal(chunks[0].keys, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_keeps_the_precision_of_the_model(dtype: torch.dtype) -> None:
    model = language_model(dtype=dtype)
    context = context_of(model)
    keys = layers_of(context)[0][0]
    assert keys.dtype == dtype
    # One rounding when the chunk was made, one here.
    assert relative_error(keys, full_prefill(model, context.tokens)[0][0]) < 4 * torch.finfo(dtype).eps


def learned_positions() -> Any:
    import transformers

    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=97)
    ).eval()


def dynamic() -> Any:
    return language_model(rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0})


REFUSED = {
    "learned positions": (
        learned_positions,
        "`model` must keep positions in rotations of its keys; got GPT2LMHeadModel. "
        "It has no rotary embedding: learned positions and ALiBi cannot be moved.",
    ),
    "dynamic": (
        dynamic,
        "`model` must keep positions in rotations of its keys; got LlamaForCausalLM. "
        "Its dynamic NTK scaling changes its angles with the length of the sequence.",
    ),
    "training": (
        lambda: language_model().train(),
        "`model` must be in evaluation mode; got training mode. Call `model.eval()`.",
    ),
    "window": (
        lambda: language_model("mistral", sliding_window=8),
        "`chunks` must hold at most 8 tokens together, the model's sliding window; got 9. "
        "Give fewer or shorter chunks.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_is_refused_with_the_reason(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError) as error:
        prefill_chunk(make(), random_tokens(9))
    assert str(error.value) == message


def assert_refused(calls: Sequence[tuple[type[Exception], str, Callable[[], object]]]) -> None:
    for kind, message, call in calls:
        with pytest.raises(kind, match=message):
            call()


def test_bad_calls() -> None:
    model = language_model()
    one, other = prefill_chunk(model, random_tokens(4), PREFIX), prefill_chunk(model, random_tokens(4))
    empty, short = replace(one, prefix_length=len(one.tokens)), replace(one, values=one.values[:, :, :-1])
    shapes = r"shape \[4, 2, 6, 8\]; got shape \[4, 2, 5, 8\]"
    single, few = language_model(dtype=torch.float32), language_model(num_hidden_layers=2)
    assert_refused(
        [
            (ValueError, "`chunks` must hold at least one chunk; got none", lambda: assemble(model, [])),
            (
                ValueError,
                r"`chunks\[1\]` must stand behind the same prefix as the first; got \[\]",
                lambda: assemble(model, [one, other]),
            ),
            (
                ValueError,
                r"`chunks\[0\]` must have the model's precision, torch.float32; got",
                lambda: assemble(single, [one]),
            ),
            (
                ValueError,
                r"`chunks\[0\]` must have the 2 layers of the model; got 4",
                lambda: assemble(few, [one]),
            ),
            (
                ValueError,
                "`geometry` must be one of 'global', 'local'; got 'true'",
                lambda: assemble(model, [one], geometry="true"),  # type: ignore[arg-type]
            ),
            (
                ValueError,
                r"`chunks\[1\]` must hold at least one token behind its prefix; got",
                lambda: assemble(model, [one, empty]),
            ),
            (
                ValueError,
                rf"`chunks\[1\]` must have keys and values of {shapes}",
                lambda: assemble(model, [one, short]),
            ),
            (
                TypeError,
                "`model` must be a decoder of transformers; got NoneType",
                lambda: assemble(None, [one]),
            ),
            (
                ValueError,
                "`tokens` must hold at least one token",
                lambda: prefill_chunk(model, random_tokens(0)),
            ),
            (
                TypeError,
                r"`tokens` must hold integers; got torch.float32",
                lambda: prefill_chunk(model, torch.zeros(3)),
            ),
        ]
    )


@pytest.mark.parametrize("outside", [-1, 97])
def test_tokens_that_the_model_does_not_have_are_refused(outside: int) -> None:
    model, tokens, wrong = language_model(), random_tokens(4), torch.tensor([4, outside])
    rule = rf"must hold token ids from 0 to 96; got {outside}\."
    context = assemble(model, [prefill_chunk(model, tokens)])
    assert_refused(
        [
            (ValueError, f"`tokens` {rule}", lambda: prefill_chunk(model, wrong)),
            (ValueError, f"`prefix` {rule}", lambda: prefill_chunk(model, tokens, wrong)),
            (ValueError, f"`question` {rule}", lambda: score(model, context, wrong)),
            (ValueError, f"`question` {rule}", lambda: first_logits(model, context, tokens[:0], wrong)),
            (ValueError, f"`tokens` {rule}", lambda: verify(model, wrong)),
        ]
    )
