"""Sends some tokens through the layers of a model, with attention by a reader of ours.

The model's own code runs, with its projections, norms and rotations. Only the sum over keys is replaced, by an
attention function that transformers chooses by name. No model is patched. No mask is built, because transformers has
none for the name.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_NAME = "nearfield_reading"

# Options of attention functions that `attend` does not support.
_FOREIGN = {"softcap": "soft caps on logits", "s_aux": "learned attention sinks"}


class Reader(Protocol):
    """Computes attention for the model."""

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        """The output `[B, H, N, D]` of a layer for the fresh queries, keys and values of the tokens that run.

        None ends the run: later layers are not needed.
        """


def read_after(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last tokens of a sequence over all of its keys `[B, G, M, D]`.

    For few queries and many keys torch's kernel is faster than `attend`: it distributes the keys of a head over
    processors, and takes less time to launch.
    """
    size = query.shape[2], key.shape[2]
    mask: Tensor
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        mask = causal_lower_right(*size)  # a name for it: nothing is allocated
    else:
        mask = torch.ones(size, dtype=torch.bool, device=query.device).tril(size[1] - size[0])
    is_grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped)


class _Finished(Exception):
    pass


_current: ContextVar[Reader] = ContextVar("reader")


@torch.no_grad()
def run(
    model: Any,
    tokens: Tensor,
    positions: Tensor,
    reader: Reader,
    embeddings: Tensor | None = None,
    *,
    with_logits: bool = False,
) -> Tensor | None:
    """Send tokens `[N]` at positions `[N]` through the layers, with attention by `reader`.

    The model's attention is replaced meanwhile, so one model serves one thread at a time.

    Args:
        positions: may have several axes, `[axes, N]`.
        embeddings: `[N, hidden]`, inputs of the first layer in place of the tokens' own.

    Returns:
        With `with_logits` the logits `[vocabulary]` of the token after the last; otherwise None.
    """
    what: dict[str, Any] = {"position_ids": positions.unsqueeze(-2), "use_cache": False}
    what |= {"input_ids": tokens[None]} if embeddings is None else {"inputs_embeds": embeddings[None]}
    with _attention_of(model, reader), suppress(_Finished):
        if not with_logits:
            model.get_decoder()(**what)
            return None
        logits: Tensor = model(**what, logits_to_keep=1).logits[0, -1]
        return logits
    return None


@contextmanager
def _attention_of(model: Any, reader: Reader) -> Iterator[None]:
    decoder = model.get_decoder()
    before = decoder.config._attn_implementation
    _check_choice(decoder)
    token = _current.set(reader)
    decoder.config._attn_implementation = _NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = before
        _current.reset(token)


_switchable: set[type] = set()


def _check_choice(decoder: Any) -> None:
    """Refuse classes that do not let their attention be chosen: once each, for transformers reads their source."""
    if type(decoder) in _switchable:
        return
    AttentionInterface.register(_NAME, _attend)
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(_NAME)
    has_switched = decoder.config._attn_implementation == _NAME
    decoder.set_attn_implementation(before)
    if not has_switched:
        raise NotImplementedError(
            f"`model` must let its attention be chosen by name; got {type(decoder).__name__}."
        )
    _switchable.add(type(decoder))


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: the output as `[B, N, H, D]`, and no weights."""
    for option, meaning in _FOREIGN.items():
        if options.get(option) is not None:
            raise NotImplementedError(
                f"`model` must use plain softmax attention; got {meaning} in {type(module).__name__}."
            )
    out = _current.get().read(module.layer_idx, query, key, value, scaling)
    if out is None:
        raise _Finished
    return out.transpose(1, 2).contiguous(), None
