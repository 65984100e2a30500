"""What the benchmark `retrieval` measures: selectors and ratios; architectures, lengths and what is to be reached.

This file imports nothing of weight, so the command line can name them before it knows what else it needs.
"""

from typing import Any

SELECTORS = ("none", "random", "epic", "cacheblend", "infoflow")
RATIOS = (0.05, 0.15, 0.3)

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
LENGTHS = (8192, 16384, 32768, 65536)

# Speed-up of the time to the first token at ratio 0.15, chunks cached, one H200.
TARGETS = {16384: 4.0, 32768: 5.5}
EMBEDDED = "smollm2-135m"
EMBEDDED_LENGTH, EMBEDDED_TARGET = 4096, 4.0
