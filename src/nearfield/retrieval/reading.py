"""Some tokens through the layers of a model, their attention done by a reader of ours.

The model's own code runs, with its projections, norms and rotations. Only the sum over keys is taken over, through the
place where transformers lets attention be chosen by name. No model is patched and no mask is built: a name that
transformers has no mask for gets none.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

_NAME = "nearfield_reading"

# What would change the sum in ways that `attend` does not know.
_FOREIGN = {"softcap": "soft caps on logits", "s_aux": "learned attention sinks"}


class Reader(Protocol):
    """What attends in place of the model."""

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        """The output `[B, H, N, D]` of a layer for the fresh queries, keys and values of the tokens that run.

        None ends the run: later layers are not needed.
        """


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
    """Send tokens `[N]` at positions `[N]` through the layers; `reader` attends, and sees all there is to see.

    Positions may have several axes, `[axes, N]`. Where there are `embeddings` `[N, hidden]` they stand for the tokens.
    The model's attention is exchanged meanwhile, so one model serves one thread at a time.

    Returns the logits `[vocabulary]` of what follows the last token, if they are asked for.
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
    AttentionInterface.register(_NAME, _attend)
    token = _current.set(reader)
    decoder.set_attn_implementation(_NAME)
    try:
        if decoder.config._attn_implementation != _NAME:
            raise NotImplementedError(
                f"`model` must let its attention be chosen by name; got {type(model).__name__}."
            )
        yield
    finally:
        decoder.set_attn_implementation(before)
        _current.reset(token)


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
