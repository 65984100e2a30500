"""What a chunk depends on besides its text, as a few facts that can be compared and named."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_SAMPLES = 64
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Of a configuration, what says nothing about keys and values.
_PASSING = (
    *("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"),
    *("use_cache", "architectures"),
)


def fingerprint(model: Any, prefix: Tensor) -> dict[str, str]:
    """Facts that must agree between the model that made a chunk and the one that reuses it.

    Of every weight the sum of its bits, read as integers, is compared, which is the same on every device, and 64 evenly
    spaced entries. That is one pass over the weights, and no match for somebody who means to deceive.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _PASSING}
    rope = config.pop("rope_parameters", None)
    return {
        "format": "1",
        "model": type(model).__name__,
        "configuration": _digest(_text(config)),
        "weights": _digest(_weights(model)),
        "precision": str(model.dtype),
        "rope": _text(rope),
        "prefix": _text(prefix.tolist()),
    }


def chunk_id(facts: Mapping[str, str], tokens: Tensor) -> str:
    """The name of a chunk: the same text under the same facts has the same."""
    return _digest(_text(dict(facts)) + _text(tokens.tolist()))


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The facts that do not agree, or that only one side knows."""
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


@torch.no_grad()
def _weights(model: Any) -> str:
    names = []
    taken = []
    for name, weight in model.state_dict().items():
        if not isinstance(weight, Tensor):
            continue
        names.append(f"{name} {list(weight.shape)} {weight.dtype}")
        bits = weight.detach().contiguous().view(-1).view(_BITS[weight.element_size()])
        entries = bits[:: max(1, len(bits) // _SAMPLES)][:_SAMPLES]
        taken += [bits.sum(dtype=torch.int64)[None], entries.to(torch.int64)]
    # Brought from the device in one piece.
    return "\n".join(names) + _text(torch.cat(taken).cpu().tolist())


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
