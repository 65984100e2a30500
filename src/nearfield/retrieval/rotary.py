"""Moves keys to other positions by the model's own rotary embedding.

A rotary embedding rotates a key by an angle that depends on its position. Rotations compose, so a key can be moved to
another position without computing its token again. That holds where the angle depends on the position alone;
`unsupported` names the models where it does not.
"""

import inspect
import sys
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from nearfield._checks import wrong_type, wrong_value
from nearfield.ops import rerotate_keys

_NO_PURE_ROTATION = {
    "dynamic": "dynamic NTK scaling changes its angles with the length of the sequence",
    "longrope": "longrope scaling changes its angles with the length of the sequence",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def check_model(model: Any, *, is_moved: bool = True) -> None:
    """Refuse a model whose keys cannot be moved, or that cannot be run over a cache put together, and say why."""
    if not hasattr(model, "get_decoder"):
        wrong_type("model", "be a decoder of transformers", type(model).__name__)
    reason = unsupported(model) if is_moved else _no_parts(model)
    if reason is not None:
        wrong_value("model", "keep positions in rotations of its keys", type(model).__name__, reason)
    if model.training:
        wrong_value("model", "be in evaluation mode", "training mode", "Call `model.eval()`.")


def unsupported(model: Any) -> str | None:
    """Why the caches of a model cannot be moved; None if nothing is known against it (`verify` measures)."""
    reason = _no_parts(model)
    if reason is not None:
        return reason
    if _apply_rotary(model) is None:
        return "Its code has no `apply_rotary_pos_emb` to turn keys with."
    return _scaling_objection(model.get_decoder())


def _no_parts(model: Any) -> str | None:
    """Why the cache of a model cannot be put together from parts; None if it can."""
    decoder = model.get_decoder()
    if getattr(model.config, "is_encoder_decoder", False):
        return "It has an encoder; only decoders are supported."
    if not hasattr(decoder, "rotary_emb") or not hasattr(decoder, "layers"):
        return "It has no rotary embedding: learned positions and ALiBi cannot be moved."
    foreign = sorted(set(getattr(decoder.config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if foreign:
        return f"Its layers of the type {foreign[0]} keep more than one key and value per token."
    if not all(hasattr(layer, "self_attn") for layer in decoder.layers):
        return "Some of its layers have no attention: a recurrent state cannot be put together from parts."
    return None


def _scaling_objection(decoder: Any) -> str | None:
    for parameters in _rope_parameters(decoder.config):
        kind = parameters.get("rope_type", "default")
        if kind in _NO_PURE_ROTATION:
            return f"Its {_NO_PURE_ROTATION[kind]}."
        if "mrope_section" in parameters:
            return "Its positions have several axes (M-RoPE): see `read_image`."
    return None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The parameters of the rotary embedding: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def check_window(model: Any, num_tokens: int, argument: Literal["chunks", "question"] = "chunks") -> None:
    """Refuse lengths at which a sliding window hides keys: attention here has no window."""
    window = getattr(model.get_decoder().config, "sliding_window", None)
    if window is not None and num_tokens > window:
        together = "together" if argument == "chunks" else "together with its context"
        rule = f"hold at most {window} tokens {together}, the model's sliding window"
        wrong_value(argument, rule, num_tokens, "Give fewer or shorter chunks.")


def _apply_rotary(model: Any) -> Any:
    """The function of the model's own file: it knows which halves or pairs of a key turn together."""
    attention = model.get_decoder().layers[0].self_attn
    return getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)


class Turn:
    """The rotations that move keys from some positions to others, for every layer of a model."""

    def __init__(self, model: Any, source: Tensor, target: Tensor) -> None:
        self._model = model
        self._source, self._target = source, target
        self._apply = _apply_rotary(model)
        types = getattr(model.get_decoder().config, "layer_types", None)
        self._types = types if types and _depends_on_layer(model) else None
        self._tables: dict[str | None, tuple[Tensor, Tensor, Tensor]] = {}

    def write(self, keys: Tensor, out: Tensor, start: int) -> None:
        """Move keys `[layers, G, tokens, D]` of all layers, the first of which stands at place `start`, into `out`.

        Computed in single precision or better, in one go where all layers turn alike.
        """
        if self._types is None:
            self._write(keys, out, start, None)
            return
        for layer, kind in enumerate(self._types):
            self._write(keys[layer, None], out[layer, None], start, kind)

    def _write(self, keys: Tensor, out: Tensor, start: int, kind: str | None) -> None:
        if kind not in self._tables:
            self._tables[kind] = self._channels(*self._difference(kind))
        cos, sin, partner = self._tables[kind]
        places = slice(start, start + keys.shape[2])
        rerotate_keys(keys, out, cos[places], sin[places], partner)

    def _channels(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The factors of each channel of a key and of its partner, and the partner's number.

        They come from the model's own function: keys of ones show which entries of the tables belong to a channel and
        with which sign, and numbered channels show the partners.
        """
        ones, no = torch.ones_like(cos), torch.zeros_like(cos)
        numbers = torch.arange(1, cos.shape[-1] + 1, device=cos.device).to(cos)
        partner = self._turned(numbers[None], no[:1], ones[:1])[0].abs().long() - 1
        return self._turned(ones, cos, no), self._turned(ones, no, sin), partner

    def _turned(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys `[tokens, R]` through the model's own function."""
        keys = keys[None, None]
        turned: Tensor = self._apply(keys[:, :0], keys, cos[None], sin[None])[1]
        return turned[0, 0]

    def _difference(self, kind: str | None) -> tuple[Tensor, Tensor]:
        """Cosine and sine of target angle minus source angle, from the model's own rounded tables of both.

        The angle of the difference of positions would be rounded differently. Some embeddings also scale keys; these
        are scaled already, so the scale is divided out.
        """
        source_cos, source_sin = self._table(self._source, kind)
        target_cos, target_sin = self._table(self._target, kind)
        square = source_cos.square() + source_sin.square()
        cos = (target_cos * source_cos + target_sin * source_sin) / square
        sin = (target_sin * source_cos - target_cos * source_sin) / square
        return cos[0].float(), sin[0].float()

    def _table(self, positions: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        rotary = self._model.get_decoder().rotary_emb
        example = torch.empty(0, dtype=torch.float32, device=positions.device)
        options = {} if kind is None else {"layer_type": kind}
        cos, sin = rotary(example, position_ids=positions[None], **options)
        return cos.double(), sin.double()


def _depends_on_layer(model: Any) -> bool:
    return "layer_type" in inspect.signature(model.get_decoder().rotary_emb.forward).parameters
