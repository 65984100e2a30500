"""The gate: measures on a model whether reuse gives what full prefill gives, before its answers are trusted."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nearfield._checks import wrong_value
from nearfield.retrieval.chunks import Context, assemble, check_tokens, prefill_chunk
from nearfield.retrieval.recomputing import recompute
from nearfield.retrieval.rotary import check_model

_LENGTHS = (48, 31, 67)
_CHECKS = {
    "first_layer": "give the first layer's keys after a move",
    "one_chunk": "give full prefill from one chunk",
    "everything": "give full prefill when every row is recomputed",
}


@dataclass(frozen=True)
class Verification:
    """Relative errors against full prefill by the model alone, and the errors that were allowed."""

    first_layer: float
    one_chunk: float
    everything: float
    allowed_first_layer: float
    allowed: float


def verify(model: Any, tokens: Tensor | None = None) -> Verification:
    """Compare reuse with full prefill on a prompt of three chunks; raise ValueError where they disagree.

    Args:
        tokens: `[N]` ids to make the prompt of, at least 6. By default 146 random ones.

    Three things must hold: moved keys of the first layer equal those of the whole prompt, a single chunk equals the
    whole prompt, and so does a context that is recomputed entirely. The error that is allowed follows from the model's
    own keys, which differ a little when it computes the same prompt in two parts.
    """
    check_model(model)
    tokens = _random_tokens(model) if tokens is None else tokens
    check_tokens(model, "tokens", tokens)
    tokens = tokens.to(model.device)
    if len(tokens) < 6:
        wrong_value("tokens", "hold at least 6 tokens", len(tokens))
    expected = _prefill(model, tokens)
    epsilon = torch.finfo(model.dtype).eps
    noise = _distance(_prefill(model, tokens, parts=2), expected)
    # Angles are rounded to single precision in any model, and are as large as the positions.
    allowed_first = 4 * epsilon + len(tokens) * torch.finfo(torch.float32).eps

    parts = tokens.split(_lengths(len(tokens)))
    context = assemble(model, [prefill_chunk(model, part) for part in parts])
    first = _distance(_layers(context)[:1], expected[:1])
    single = _distance(_layers(assemble(model, [prefill_chunk(model, tokens)])), expected)
    recompute(model, context, torch.arange(context.num_tokens))
    everything = _distance(_layers(context), expected)
    found = Verification(first, single, everything, allowed_first, 8 * noise + 32 * epsilon)
    _require(model, found)
    return found


def _require(model: Any, found: Verification) -> None:
    for name, rule in _CHECKS.items():
        error = getattr(found, name)
        allowed = found.allowed_first_layer if name == "first_layer" else found.allowed
        if not error <= allowed:
            wrong_value(
                "model",
                rule,
                f"a relative error of {error:.1e} in {type(model).__name__}, above {allowed:.1e}",
                "Do not reuse caches of this model.",
            )


def _lengths(total: int) -> list[int]:
    """Three different lengths of parts."""
    shares = [total * length // sum(_LENGTHS) for length in _LENGTHS[:2]]
    return [*shares, total - sum(shares)]


def _random_tokens(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = model.get_decoder().config.vocab_size
    return torch.randint(size, (sum(_LENGTHS),), generator=generator).to(model.device)


@torch.no_grad()
def _prefill(model: Any, tokens: Tensor, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
    cache = DynamicCache()
    for part in tokens.chunk(parts):
        model.get_decoder()(input_ids=part[None], past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def _layers(context: Context) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in context.cache.layers]


def _distance(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error of a layer's keys or values."""
    pairs = [
        (one.double(), two.double())
        for ours, theirs in zip(found, expected, strict=True)
        for one, two in zip(ours, theirs, strict=True)
    ]
    return max(float((one - two).norm() / two.norm()) for one, two in pairs)
