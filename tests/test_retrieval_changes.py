"""Models that change after documents were added: no chunk of other weights is ever read, nor stored as theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from tests.tiny_language_models import DOCUMENTS, language_model, tiny_tokenizer
from torch import Tensor, nn

from nearfield.retrieval import ChunkStore, ForeignChunk, Reuse, reuse
from nearfield.retrieval.fingerprint import Fingerprints, differences, fingerprint

QUESTION = "Which river flows through Bern?"
OPTIONS: dict[str, Any] = {"ratio": 0, "max_new_tokens": 12, "suppress_tokens": list(range(6))}
PREFIX = torch.tensor([1])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def tiny() -> Any:
    return language_model(dtype=torch.float32, vocab_size=160)


def projection(model: Any) -> Any:
    return model.model.layers[1].self_attn.v_proj


def in_place(model: Any) -> None:
    with torch.no_grad():
        projection(model).weight.mul_(-2)


def one_row(model: Any) -> None:
    with torch.no_grad():
        projection(model).weight[3] += 1


def past_counting(model: Any) -> None:
    before = projection(model).weight._version
    projection(model).weight.data += 0.5 * torch.randn_like(projection(model).weight)
    assert projection(model).weight._version == before  # else this shows no more than the case above


def by_numpy(model: Any) -> None:
    projection(model).weight.detach().numpy()[:] *= -2


def replaced(model: Any) -> None:
    projection(model).weight = nn.Parameter(-2 * projection(model).weight.detach())


def replaced_module(model: Any) -> None:
    old = projection(model)
    model.model.layers[1].self_attn.v_proj = nn.Linear(old.in_features, old.out_features, bias=False)


def trained(model: Any, fused: bool = False) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3, fused=fused)
    model(torch.arange(6, 30)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_fused(model: Any) -> None:
    trained(model, fused=True)


def with_lora(model: Any) -> Any:
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(model, config).eval()


def merged(model: Any) -> None:
    with_lora(model).merge_and_unload()


def converted(model: Any) -> None:
    model.to(torch.bfloat16)


def turned_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3)


def hooked(model: Any) -> None:
    projection(model).register_forward_hook(lambda module, args, out: -2 * out)


def hooked_before(model: Any) -> None:
    projection(model).register_forward_pre_hook(lambda module, args: (-2 * args[0],))


def other_forward(model: Any) -> None:
    """As accelerate replaces it."""
    forward = projection(model).forward
    projection(model).forward = lambda x: -2 * forward(x)


class Rounded(nn.Module):
    """A linear layer with weights that are no parameters, as some packages quantise them."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax() / 7
        self.numbers = (linear.weight.detach() / self.scale).round().to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.numbers * self.scale).T


def quantised(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj = Rounded(projection(model))


CHANGES = (
    *(in_place, one_row, past_counting, by_numpy, replaced, replaced_module, trained, trained_fused),
    *(with_lora, merged, converted, turned_otherwise, hooked, hooked_before, other_forward, quantised),
)


def keys_and_values(made: Reuse, identity: str) -> tuple[Tensor, Tensor]:
    (chunk,) = made.chunks([identity])
    return chunk.keys, chunk.values


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
def test_each_model_gets_its_own_chunks(
    change: Callable[[Any], Any], when: str, tokenizer: Any, tmp_path: Path
) -> None:
    """A document is added before or after the change; a process with the first weights shares the folder."""
    model = tiny()
    made = Reuse(model, tokenizer, ChunkStore(tmp_path))
    first = made.add(DOCUMENTS[0]) if when == "before" else None
    change(model)
    identity = made.add(DOCUMENTS[0])
    assert identity != first

    other = Reuse(tiny(), tokenizer, ChunkStore(tmp_path))
    alone = Reuse(tiny(), tokenizer)
    assert other.add(DOCUMENTS[0]) == alone.add(DOCUMENTS[0]) != identity
    answer = other.answer(QUESTION, [alone.add(DOCUMENTS[0])], **OPTIONS)
    assert answer.text == alone.answer(QUESTION, [alone.add(DOCUMENTS[0])], **OPTIONS).text
    assert answer.report.rebuilt == {}

    changed = Reuse(model, tokenizer)
    assert changed.add(DOCUMENTS[0]) == identity
    answer = made.answer(QUESTION, [identity], **OPTIONS)
    assert answer.text == changed.answer(QUESTION, [identity], **OPTIONS).text
    assert answer.report.rebuilt == {}
    ours, first_weights = keys_and_values(made, identity), keys_and_values(other, other.add(DOCUMENTS[0]))
    assert all(map(torch.equal, ours, keys_and_values(changed, identity)))
    assert not all(map(torch.equal, ours, first_weights))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_kept", [False, True], ids=["memory", "folder"])
def test_outdated_chunks_are_made_anew_and_reported(
    change: Callable[[Any], Any], is_kept: bool, tokenizer: Any, tmp_path: Path
) -> None:
    model = tiny()
    made = Reuse(model, tokenizer, ChunkStore(tmp_path if is_kept else None))
    ids = [made.add(text) for text in DOCUMENTS]
    made.answer(QUESTION, ids, **OPTIONS)
    change(model)
    found = made.answer(QUESTION, ids, **OPTIONS)
    changed = Reuse(model, tokenizer)
    assert found.text == changed.answer(QUESTION, [changed.add(text) for text in DOCUMENTS], **OPTIONS).text
    assert found.report.chunks == tuple(ids)
    assert found.report.rebuilt == dict.fromkeys(ids, "The model has changed since the document was added.")
    assert made.answer(QUESTION, ids, **OPTIONS).report.rebuilt == {}


def test_damage_after_a_change_is_reported_as_damage(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny()
    made = Reuse(model, tokenizer, ChunkStore(tmp_path))
    first = made.add(DOCUMENTS[0])
    in_place(model)
    second = made.add(DOCUMENTS[0])
    path = tmp_path / f"{second}.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    rebuilt = made.answer(QUESTION, [first], **OPTIONS).report.rebuilt
    assert list(rebuilt) == [first]
    assert "must be a whole chunk" in rebuilt[first]


def test_chunks_count_again_with_their_weights(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    made = Reuse(model, tokenizer, ChunkStore(tmp_path))
    ids = [made.add(text) for text in DOCUMENTS]
    expected = made.answer(QUESTION, ids, **OPTIONS).text
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    in_place(model)
    assert [made.add(text) for text in DOCUMENTS] != ids
    assert len(made.store) == 2 * len(ids)
    model.load_state_dict(weights)
    monkeypatch.setattr(reuse, "prefill_chunk", lambda *_: 1 / 0)
    assert [made.add(text) for text in DOCUMENTS] == ids
    found = made.answer(QUESTION, ids, **OPTIONS)
    assert found.text == expected
    assert found.report.rebuilt == {}


def test_lora_is_told_apart_added_merged_and_unmerged(tokenizer: Any) -> None:
    model = tiny()
    made = Reuse(model, tokenizer)
    ids = [made.add(DOCUMENTS[0])]
    wrapped = with_lora(model)
    ids.append(made.add(DOCUMENTS[0]))
    weight = model.model.layers[1].self_attn.v_proj.base_layer.weight
    before = weight._version
    for switch in (wrapped.merge_adapter, wrapped.unmerge_adapter, wrapped.unload):
        switch()
        assert weight._version == before  # peft writes through `.data`
        ids.append(made.add(DOCUMENTS[0]))
    assert len(set(ids)) == 5  # to merge and unmerge leaves errors of rounding
    expected = Reuse(model, tokenizer)
    assert expected.add(DOCUMENTS[0]) == ids[-1]


def test_adapters_are_told_apart_though_no_weight_changes(tokenizer: Any) -> None:
    model = tiny()
    wrapped = with_lora(model)
    wrapped.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    made = Reuse(model, tokenizer)
    layer = projection(model)
    first = made.add(DOCUMENTS[0])
    ids = []
    for switch in (
        lambda: wrapped.set_adapter("other"),
        lambda: wrapped.base_model.disable_adapter_layers(),
        lambda: wrapped.base_model.enable_adapter_layers(),
        lambda: layer.set_scale("other", 0.5),
    ):
        switch()
        ids.append(made.add(DOCUMENTS[0]))
        expected = Reuse(model, tokenizer)
        assert expected.add(DOCUMENTS[0]) == ids[-1]
        assert all(map(torch.equal, keys_and_values(made, ids[-1]), keys_and_values(expected, ids[-1])))
    assert ids[0] == ids[2]
    assert len({first, *ids}) == 4
    layer.set_scale("other", 1)
    wrapped.set_adapter("default")
    assert made.add(DOCUMENTS[0]) == first


def test_weights_of_a_quantised_layer_count(tokenizer: Any) -> None:
    model = tiny()
    quantised(model)
    made = Reuse(model, tokenizer)
    first = made.add(DOCUMENTS[0])
    projection(model).scale *= 2
    assert made.add(DOCUMENTS[0]) != first


def test_what_nobody_added_here_cannot_be_made_anew(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny()
    identity = Reuse(model, tokenizer, ChunkStore(tmp_path)).add(DOCUMENTS[0])
    made = Reuse(model, tokenizer, ChunkStore(tmp_path))
    assert len(made.chunks([identity])) == 1
    in_place(model)
    with pytest.raises(ForeignChunk, match="which differs in weights"):
        made.chunks([identity])


def test_another_configuration_is_another_model(tokenizer: Any) -> None:
    model = tiny()
    made = Reuse(model, tokenizer)
    identity = made.add(DOCUMENTS[0])
    model.config.sliding_window = 100
    assert made.add(DOCUMENTS[0]) != identity


# -- what notices ------------------------------------------------------------------------------------------------


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each reading of all weights."""
    found: list[int] = []
    from nearfield.retrieval import fingerprint as module

    real = module._weights
    monkeypatch.setattr(module, "_weights", lambda model: (found.append(1), real(model))[1])
    return found


def test_weights_are_read_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, model, prints = reads(monkeypatch), tiny(), Fingerprints()
    first = prints.of(model, PREFIX)
    model(torch.arange(6, 30)[None])
    assert prints.of(model, PREFIX) == first == fingerprint(model, PREFIX)
    assert len(counted) == 2  # of which one is ours
    in_place(model)
    assert prints.of(model, PREFIX) != first
    prints.of(model, PREFIX)
    assert len(counted) == 3
    assert prints.of(tiny(), PREFIX) == first
    assert len(counted) == 4


def test_memory_at_the_address_of_memory_that_was_freed() -> None:
    """Neither address nor count of writes differ, and of the entries one, which is none of those compared."""
    model, prints = tiny(), Fingerprints()
    memory = bytearray(4 * 32 * 16)  # of ours, so that what follows begins where it began
    weight = projection(model).weight
    for round in range(3):
        weight.data = torch.empty(0)
        weight.data = torch.frombuffer(memory, dtype=torch.float32).view(16, 32)
        address, version, first = weight.data_ptr(), weight._version, prints.of(model, PREFIX)
        weight.data = torch.empty(0)
        memory[4] += 1
        weight.data = torch.frombuffer(memory, dtype=torch.float32).view(16, 32)
        assert (weight.data_ptr(), weight._version) == (address, version)
        assert prints.of(model, PREFIX) == fingerprint(model, PREFIX) != first, round


def test_parameter_replaced_over_the_same_memory() -> None:
    """The new parameter counts writes from 0 again, as the old one had before it was written to."""
    model, prints = tiny(), Fingerprints()
    projection(model).weight = nn.Parameter(projection(model).weight.detach().clone())
    first, old = prints.of(model, PREFIX), projection(model).weight
    with torch.no_grad():
        old[0, 1] += 1
    projection(model).weight = nn.Parameter(old.data)
    new = projection(model).weight
    assert (new._version, new.data_ptr()) == (0, old.data_ptr())
    assert prints.of(model, PREFIX) != first


def test_same_memory_read_in_another_order() -> None:
    model, prints = tiny(), Fingerprints()
    weight = model.model.layers[0].self_attn.q_proj.weight
    first = prints.of(model, PREFIX)
    weight.data = weight.data.t()
    assert prints.of(model, PREFIX) != first
    weight.data = weight.data.t()
    assert prints.of(model, PREFIX) == first
    model.lm_head.weight.data = model.lm_head.weight.data[:100]
    assert prints.of(model, PREFIX) != first


def test_weights_of_inference_mode_are_watched_by_their_entries() -> None:
    with torch.inference_mode():
        model = tiny()
        prints = Fingerprints()
        first = prints.of(model, PREFIX)
        assert prints.of(model, PREFIX) == first
        projection(model).weight.mul_(2)
        assert prints.of(model, PREFIX) != first


def test_nothing_is_kept_alive() -> None:
    """`.to` frees the weights of before at once: both would not fit."""
    from torch.multiprocessing.reductions import StorageWeakRef

    model, prints = tiny(), Fingerprints()
    prints.of(model, PREFIX)
    old = StorageWeakRef(projection(model).weight.untyped_storage())
    model.to(torch.bfloat16)
    assert old.expired()


def test_compiled_model_is_watched() -> None:
    model, prints = tiny(), Fingerprints()
    compiled = torch.compile(model)
    first = prints.of(compiled, PREFIX)
    assert prints.of(compiled, PREFIX) == first
    in_place(model)
    assert prints.of(compiled, PREFIX) != first


def test_offloaded_weights_are_refused(tokenizer: Any) -> None:
    model = tiny()
    made = Reuse(model, tokenizer)
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"got lm_head.weight on the meta device\. Weights that accelerate"):
        made.add(DOCUMENTS[0])


def doubled(module: Any, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def test_hooks_that_other_processes_cannot_know_are_no_others() -> None:
    """A function that can be imported is known by its name; any other is the one of this process alone."""

    def of_hook(hook: Any) -> dict[str, str]:
        model = tiny()
        handle = projection(model).register_forward_hook(hook)
        facts = fingerprint(model, PREFIX)
        handle.remove()
        assert fingerprint(model, PREFIX) == fingerprint(tiny(), PREFIX)
        return facts

    def local(factor: float) -> Any:
        return lambda module, args, out: factor * out

    assert of_hook(doubled) == of_hook(doubled)
    assert differences(of_hook(local(2)), of_hook(local(2))) == ["modules"]
    one = local(2)
    assert of_hook(one) == of_hook(one) != of_hook(doubled)


def test_models_that_accelerate_places_share_their_chunks() -> None:
    """As `device_map="auto"` does it: its hooks are the same in every process."""

    def placed() -> Any:
        model = tiny()
        accelerate.hooks.add_hook_to_module(projection(model), accelerate.hooks.AlignDevicesHook("cpu"))
        return model

    assert fingerprint(placed(), PREFIX) == fingerprint(placed(), PREFIX)
    assert differences(fingerprint(placed(), PREFIX), fingerprint(tiny(), PREFIX)) == ["modules"]


def test_hooks_that_note_outputs_change_nothing() -> None:
    """transformers leaves them in the model that was asked for its attention once."""
    model = tiny()
    first = fingerprint(model, PREFIX)
    model.set_attn_implementation("eager")
    model(torch.arange(6, 30)[None], output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    assert fingerprint(model, PREFIX) == first


# -- what the fingerprint sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("length", [5, 2**16, 3 * 2**16 + 7, 2**20 + 2**16 + 1])
def test_every_entry_counts_and_its_place_does(dtype: torch.dtype, length: int) -> None:
    model = tiny()
    torch.manual_seed(length)
    content = torch.randn(length).to(dtype)

    def print_of(changed: Tensor) -> dict[str, str]:
        model.register_buffer("extra", changed, persistent=False)
        return fingerprint(model, PREFIX)

    first = print_of(content)
    assert print_of(content.clone()) == first
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for place in (0, 3, length // 2, length - 1):
        flipped = content.clone()
        flipped.view(bits)[place] ^= -(2 ** (8 * dtype.itemsize - 1))
        assert print_of(flipped) != first  # the sign of one entry
        flipped.view(bits)[(place + 1) % length] ^= -(2 ** (8 * dtype.itemsize - 1))
        assert print_of(flipped) != first  # and of its neighbour
    swapped = content.clone()
    swapped[[1, length - 1]] = swapped[[length - 1, 1]]
    assert not torch.equal(swapped.view(bits), content.view(bits))
    assert print_of(swapped) != first


def test_tied_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearfield.retrieval import fingerprint as module

    names: list[str] = []
    real = module._sums
    monkeypatch.setattr(module, "_sums", lambda name, weight: (names.append(name), real(name, weight))[1])
    model = language_model(dtype=torch.float32, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fingerprint(model, PREFIX)
    assert "model.layers.3.mlp.up_proj.weight" in names
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & {*names}) == 1


def test_tensors_that_wrap_others_are_watched() -> None:
    """As those of quantised weights, which hold numbers and scales."""
    from torch.testing._internal.two_tensor import TwoTensor

    model, prints = tiny(), Fingerprints()
    numbers, scales = torch.randn(8, 8), torch.randn(8, 8)
    model.extra = nn.Parameter(TwoTensor(numbers, scales), requires_grad=False)
    first = prints.of(model, PREFIX)
    assert prints.of(model, PREFIX) == first
    scales.mul_(2)
    assert prints.of(model, PREFIX) != first


def test_tensors_in_other_state_count() -> None:
    class Packed(nn.Module):
        def __init__(self, middle: float) -> None:
            super().__init__()
            rows = torch.zeros(5000)
            rows[2500] = middle  # which its text leaves out
            self.state = {"rows": (rows, "int8")}

        def get_extra_state(self) -> Any:
            return self.state

    def of_packed(middle: float) -> dict[str, str]:
        model = tiny()
        model.packed = Packed(middle)
        return fingerprint(model, PREFIX)

    assert differences(of_packed(1), of_packed(1)) == []
    assert differences(of_packed(1), of_packed(2)) == ["weights"]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_weights_that_torch_quantises_count() -> None:
    def quantised(scale: float) -> Any:
        model = tiny()
        model.extra = nn.Module()
        model.extra.linear = nn.Linear(8, 8)
        nn.init.constant_(model.extra.linear.weight, scale)
        return model

    made = [quantised(scale) for scale in (1, 2)]
    prints = [Fingerprints(), Fingerprints()]
    before = [one.of(model, PREFIX) for one, model in zip(prints, made, strict=True)]
    for model in made:
        torch.ao.quantization.quantize_dynamic(model.extra, {nn.Linear}, torch.qint8, inplace=True)
    after = [one.of(model, PREFIX) for one, model in zip(prints, made, strict=True)]
    assert len({one["weights"] for one in before + after}) == 4
    made[0].register_buffer("rows", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    ones = prints[0].of(made[0], PREFIX)
    made[0].rows = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8)
    assert prints[0].of(made[0], PREFIX) != ones != after[0]
