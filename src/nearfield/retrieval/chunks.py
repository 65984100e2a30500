"""Chunks: texts whose keys and values were computed once, alone; and contexts, put together from chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import DynamicCache, DynamicLayer

from nearfield._checks import check_int, check_member, check_tensor, shape_of, wrong_type, wrong_value
from nearfield.retrieval.rotary import Turn, check_model, check_window

Geometry = Literal["global", "local"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Keys and values of a text, computed alone behind a prefix, at positions from 0.

    The prefix (a start token, a chat header) gives attention the sink it has in a whole prompt. Keys are rotated to the
    positions at which they were computed.
    """

    tokens: Tensor  # [prefix + text]
    prefix_length: int
    keys: Tensor  # [layers, G, prefix + text, D]
    values: Tensor  # [layers, G, prefix + text, D]

    @property
    def length(self) -> int:
        """Tokens of the text, without the prefix."""
        return len(self.tokens) - self.prefix_length

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.tokens, self.keys, self.values))


@dataclass(frozen=True, eq=False)
class Context:
    """Chunks put together. `cache` is an ordinary cache of transformers, in which no chunk has seen another."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    owner: Tensor  # [T] which chunk a row belongs to; the prefix belongs to the first
    offset: Tensor  # [T] place of a row in its chunk; 0 in the prefix
    lengths: tuple[int, ...]
    cache: Any
    angles: Tensor | None = None  # [axes, T] positions for the rotary embedding, where they have several axes
    embeddings: Tensor | None = None  # [T, hidden] inputs of the first layer, where tokens do not give them
    roomy: tuple[Tensor, Tensor] | None = None  # [layers, G, more than T, D] memory that the cache begins

    @property
    def next_position(self) -> int:
        """The position of the first token that follows."""
        return int((self.positions if self.angles is None else self.angles).max()) + 1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for sides in self._sides() for x in sides)

    def _sides(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys of all layers, and values."""
        return [layer.keys for layer in self.cache.layers], [layer.values for layer in self.cache.layers]

    def copy(self) -> "Context":
        """A context with a copy of the cache."""
        keys, values = ([side[0].clone() for side in sides] for sides in self._sides())
        return replace(self, cache=cache_of(keys, values), roomy=None)


def check_tokens(model: Any, argument: str, tokens: object, *, at_least: int = 1) -> None:
    """Refuse what are not token ids `[N]` of a model's vocabulary."""
    check_tensor(argument, tokens, dims=1, hint="Token ids of one text, without a batch.")
    assert isinstance(tokens, Tensor)
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        wrong_type(argument, "hold integers", tokens.dtype)
    if len(tokens) < at_least:
        wrong_value(argument, "hold at least one token", shape_of(tokens))
    size = len(model.get_input_embeddings().weight)
    outside = tokens[(tokens < 0) | (tokens >= size)]
    if len(outside):
        wrong_value(argument, f"hold token ids from 0 to {size - 1}", int(outside[0]))


@torch.no_grad()
def prefill_chunk(model: Any, tokens: Tensor, prefix: Tensor | None = None) -> Chunk:
    """Compute the keys and values of a text alone, with the model as it is.

    Args:
        model: a decoder of Hugging Face transformers with rotary positions.
        tokens: `[text]` token ids.
        prefix: `[prefix]` token ids that stand before every text and, in a prompt, before the first one only.
    """
    check_model(model)
    check_tokens(model, "tokens", tokens)
    if prefix is None:
        prefix = tokens[:0]
    check_tokens(model, "prefix", prefix, at_least=0)
    whole = torch.cat([prefix.to(tokens), tokens]).to(model.device)
    check_window(model, len(whole))
    cache = DynamicCache()
    model.get_decoder()(input_ids=whole[None], past_key_values=cache, use_cache=True)
    keys = torch.cat([layer.keys for layer in cache.layers])
    values = torch.cat([layer.values for layer in cache.layers])
    return Chunk(whole, len(prefix), keys, values)


@torch.no_grad()
def assemble(model: Any, chunks: Sequence[Chunk], *, geometry: Geometry = "global", room: int = 0) -> Context:
    """Put chunks one after another: prefix, first text, second text and so on.

    Args:
        geometry: with "global" every key is rotated to its position in the prompt. With "local" each text keeps its own
            positions, as if it stood first. That serves to compare chunks, not to generate.
        room: the number of tokens behind the context that memory is allocated for. A question of at most this length
            is then appended without copying the cache; see `first_logits`.
    """
    check_model(model)
    check_member("geometry", geometry, get_args(Geometry))
    check_int("room", room, at_least=0)
    _check_chunks(model, chunks)
    first = chunks[0]
    device = model.device
    kept = [first.tokens, *(chunk.tokens[chunk.prefix_length :] for chunk in chunks[1:])]
    tokens = torch.cat(kept).to(device)
    check_window(model, len(tokens))
    prefix = torch.zeros(first.prefix_length, dtype=torch.long)
    offset = torch.cat([prefix, *(torch.arange(chunk.length) for chunk in chunks)]).to(device)
    sizes = torch.tensor([len(part) for part in kept])
    owner = torch.arange(len(chunks)).repeat_interleave(sizes).to(device)
    target = torch.arange(len(tokens), device=device)
    # Rows of the first chunk, prefix included, stand where they were made.
    source = torch.where(owner == 0, target, offset + first.prefix_length)
    turn = Turn(model, source, target) if geometry == "global" else None
    positions = target if geometry == "global" else source
    starts = [0, *(chunk.prefix_length for chunk in chunks[1:])]
    lengths = tuple(chunk.length for chunk in chunks)
    keys, values = joined(chunks, starts, turn, device, num_untouched=1, room=room)
    cache = cache_of(keys[:, :, : len(tokens)], values[:, :, : len(tokens)])
    roomy = (keys, values) if room else None
    return Context(tokens, positions, owner, offset, lengths, cache, roomy=roomy)


def joined(
    chunks: Sequence[Chunk],
    starts: Sequence[int],
    turn: Turn | None,
    device: torch.device,
    num_untouched: int = 0,
    room: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keys and values `[layers, G, T + room, D]` of chunks one after another.

    Args:
        starts: the first row of each chunk that is taken.
        turn: moves the keys; None where they are not moved.
        num_untouched: how many chunks at the beginning are not moved.
        room: the number of rows at the end that are left empty.
    """
    like = chunks[0].keys
    sizes = [len(chunk.tokens) - start for chunk, start in zip(chunks, starts, strict=True)]
    shape = (*like.shape[:2], sum(sizes) + room, like.shape[3])
    keys, values = (torch.empty(shape, dtype=like.dtype, device=device) for _ in range(2))
    place = 0
    for index, (chunk, start, size) in enumerate(zip(chunks, starts, sizes, strict=True)):
        here = slice(place, place + size)
        _copy(chunk.values, start, values[:, :, here])
        if turn is None or index < num_untouched:
            _copy(chunk.keys, start, keys[:, :, here])
        else:
            turn.write(chunk.keys.to(device)[:, :, start:], keys[:, :, here], place)
        place += size
    return keys, values


def _copy(source: Tensor, start: int, target: Tensor) -> None:
    source = source.to(target.device).contiguous()[:, :, start:]
    if source.shape[-1] * source.element_size() % 8 == 0:
        source, target = source.view(torch.int64), target.view(torch.int64)  # fewer, wider accesses
    target.copy_(source)


def grown(context: "Context", layer: int, key: Tensor, value: Tensor) -> None:
    """Append keys and values `[1, G, N, D]` to a layer of the cache, without copying it if there is room."""
    cached = context.cache.layers[layer]
    start, stop = cached.keys.shape[2], cached.keys.shape[2] + key.shape[2]
    if context.roomy is None or stop > context.roomy[0].shape[2]:
        cached.update(key, value)
        return
    keys, values = (side[layer, None, :, :stop] for side in context.roomy)
    keys[:, :, start:].copy_(key)
    values[:, :, start:].copy_(value)
    cached.keys, cached.values = keys, values


def cache_of(keys: Sequence[Tensor] | Tensor, values: Sequence[Tensor] | Tensor) -> Any:
    """An ordinary cache with keys and values `[G, T, D]` of each layer. Its own constructor would copy them."""
    cache = DynamicCache()
    for key, value in zip(keys, values, strict=True):
        layer = DynamicLayer()
        layer.keys, layer.values = key[None], value[None]
        layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
        cache.layers.append(layer)
    return cache


def _check_chunks(model: Any, chunks: Sequence[Chunk]) -> None:
    if len(chunks) == 0:
        wrong_value("chunks", "hold at least one chunk", "none")
    num_layers = len(model.get_decoder().layers)
    for index, chunk in enumerate(chunks):
        name = f"chunks[{index}]"
        if chunk.length < 1:
            wrong_value(name, "hold at least one token behind its prefix", shape_of(chunk.tokens))
        if len(chunk.keys) != num_layers:
            wrong_value(name, f"have the {num_layers} layers of the model", len(chunk.keys))
        shape = (num_layers, chunks[0].keys.shape[1], len(chunk.tokens), chunks[0].keys.shape[-1])
        for side in (chunk.keys, chunk.values):
            if side.shape != shape:
                wrong_value(name, f"have keys and values of shape {list(shape)}", shape_of(side))
        if chunk.keys.dtype != model.dtype:
            wrong_value(name, f"have the model's precision, {model.dtype}", chunk.keys.dtype)
    prefixes = [chunk.tokens[: chunk.prefix_length] for chunk in chunks]
    stranger = _first_unlike(prefixes)
    if stranger is not None:
        rule = "stand behind the same prefix as the first"
        wrong_value(f"chunks[{stranger}]", rule, prefixes[stranger].tolist(), "Prefill it again.")


def _first_unlike(prefixes: Sequence[Tensor]) -> int | None:
    """The index of the first prefix that differs from the first one. Waits for the device once."""
    for index, prefix in enumerate(prefixes):
        if len(prefix) != len(prefixes[0]):
            return index
    together = torch.stack([prefix.to(prefixes[0]) for prefix in prefixes])
    unlike = (together != together[0]).any(1).tolist()
    return unlike.index(True) if True in unlike else None
