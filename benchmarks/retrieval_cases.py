"""The prompts whose first token is timed, and the speed-up over full prefill to be reached on one H200."""

from typing import Any

from benchmarks.cases import CPU, CUDA, QUICK, Case, named

EMBEDDED = "smollm2-135m"
SELECTORS = ("none", "random", "epic", "cacheblend", "infoflow")
RATIOS = (0.05, 0.15, 0.3)
DEFAULTS: dict[str, Any] = {
    "model": EMBEDDED,
    "length": 4096,
    "chunk": 1024,
    "question": 64,
    "ratio": 0.15,
    "selector": "infoflow",
}
"""What is asked: a model (of those below with random weights, or a folder of transformers), tokens of context, of each
chunk and of the question, the share of tokens to compute again, and what selects them."""

# Of the models' published configurations, what decides their shapes.
_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 131072,
}
# Name: the class of the configuration, and its fields.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("Llama", _LLAMA),
    "qwen3-14b": ("Qwen3", _QWEN),
    "tiny-llama": ("Llama", _TINY),
    "tiny-qwen3": ("Qwen3", _TINY),
}
_LARGE = ("llama-3.1-8b", "qwen3-14b")
_LENGTHS = {8192: None, 16384: 4.0, 32768: 5.5, 65536: None}


def _case(model: str, length: int, target: float | None, where: str, **on: Any) -> Case:
    targets = {"speed": target} if target else {}
    given = DEFAULTS | {"model": model, "length": length} | on
    return Case(f"{model}-{length}", given, targets=targets, where=(where,))


CASES = named([
    _case(EMBEDDED, 4096, 4.0, CPU),
    *(_case(name, length, target, CUDA) for name in _LARGE for length, target in _LENGTHS.items()),
    *(_case(name, 256, None, QUICK, chunk=64) for name in ("tiny-llama", "tiny-qwen3")),
])  # fmt: skip
