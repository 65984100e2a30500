"""Tiny language models with random weights, of the classes that `nearfield.retrieval` supports and refuses."""

from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_theta": 10000.0}
SCALED = {
    "linear": ROPE | {"rope_type": "linear", "factor": 2.0},
    "llama3": ROPE
    | {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}
CLASSES = {
    "llama": ("Llama", {}),
    "llama-linear": ("Llama", {"rope_parameters": SCALED["linear"]}),
    "llama-llama3": ("Llama", {"rope_parameters": SCALED["llama3"]}),
    "llama-yarn": ("Llama", {"rope_parameters": SCALED["yarn"]}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 256}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 256}),
    "phi3": ("Phi3", {}),
}


def language_model(
    name: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any
) -> Any:
    """A model with weights large enough that attention is far from uniform and chunks miss each other."""
    family, options = CLASSES[name]
    config_name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_name)(**SIZES | options | changes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 * 1.5)
    return model.to(dtype).eval()


def random_tokens(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=generator)


def full_prefill(model: Any, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The oracle: keys and values `[1, G, T, D]` of each layer, by the model alone."""
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(input_ids=tokens[None], past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = TEMPLATE) -> Any:
    """A real tokenizer of 160 tokens: printable characters, some pairs of them, and special tokens."""
    from tokenizers import Tokenizer, decoders, models, trainers

    specials = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<unk>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=160,
        special_tokens=specials,
        initial_alphabet=[chr(code) for code in (10, *range(32, 127))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(DOCUMENTS)], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=chat_template,
    )


DOCUMENTS = (
    "The river Aare rises in the Bernese Alps and flows through Thun and Bern.",
    "Bern is the seat of the Swiss government; a bear is in its coat of arms.",
    "Thun lies where the river leaves the lake.",
)
