"""What a chunk depends on besides its text, as a few facts that can be compared and named."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SAMPLES = 64

# Of a configuration, what says nothing about keys and values.
_PASSING = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def fingerprint(model: Any, prefix: Tensor) -> dict[str, str]:
    """Facts that must agree between the model that made a chunk and the one that reuses it.

    Of every weight 64 evenly spaced entries are compared, so that fingerprints of large models take no time; models
    that differ elsewhere alone would not be told apart.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _PASSING}
    rope = config.pop("rope_parameters", None)
    return {
        "model": type(model).__name__,
        "configuration": _digest(_text(config)),
        "weights": _digest(_samples(model)),
        "precision": str(model.dtype),
        "rope": _text(rope),
        "prefix": _text(prefix.tolist()),
    }


def chunk_id(facts: Mapping[str, str], tokens: Tensor) -> str:
    """The name of a chunk: the same text under the same facts has the same."""
    return _digest(_text(dict(facts)) + _text(tokens.tolist()))


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The facts that do not agree."""
    return [name for name in ours if ours[name] != theirs.get(name)]


def _samples(model: Any) -> str:
    names = []
    taken = []
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        names.append(f"{name} {list(weight.shape)} {weight.dtype}")
        taken.append(flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].to(torch.float64))
    # Brought from the device in one piece.
    numbers = torch.cat(taken).cpu().tolist()
    return "\n".join(names) + _text([number.hex() for number in numbers])


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
