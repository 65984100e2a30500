"""Recomputes rows of a context, which then see the chunks before their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield._checks import check_tensor, wrong_type, wrong_value
from nearfield._types import Positions
from nearfield.ops import KeyValuePart, attend_parts
from nearfield.plan import Plan
from nearfield.plan import builders as planning
from nearfield.retrieval.chunks import Context, check_tokens, grown
from nearfield.retrieval.reading import Reader, read_after, run
from nearfield.retrieval.rotary import check_model, check_window

_K_BLOCK = 64


def recompute(model: Any, context: Context, rows: Tensor) -> Context:
    """Send the tokens of `rows` through all layers and overwrite their keys and values in the context's cache.

    In every layer their queries read the whole cache up to their own positions, fresh rows and reused ones. Other rows
    do not change by a bit.

    Args:
        rows: indices into the context, in any order.
    """
    check_model(model, is_moved=False)
    check_global(context)
    _check_rows(rows, context)
    rows = rows.unique().to(context.tokens.device, torch.int64)
    if len(rows):
        run_rows(model, context, rows, _Overwriting(context, rows))
    return context


@torch.no_grad()
def first_logits(model: Any, context: Context, rows: Tensor, question: Tensor) -> Tensor:
    """Recompute rows and read the question in the same pass. Returns logits `[vocabulary]` of the token after it.

    The result is that of `recompute` and then the model alone on the question, whose keys and values are appended to
    the cache. But the few tokens of the question need no pass of their own through all layers. Where the context was
    assembled with room for them, the cache is not copied.

    Args:
        rows: as for `recompute`.
        question: `[N]` token ids of everything that follows the context.
    """
    check_model(model, is_moved=False)
    check_global(context)
    _check_rows(rows, context)
    check_tokens(model, "question", question)
    check_window(model, context.num_tokens + len(question), "question")
    if context.cache.get_seq_length() != context.num_tokens:
        rule = f"have a cache of its {context.num_tokens} tokens alone"
        wrong_value("context", rule, context.cache.get_seq_length(), "Crop what has been appended to it.")
    rows, question = rows.unique().to(context.tokens.device, torch.int64), question.to(context.tokens)
    places, embeddings = _inputs(context, rows)
    following = context.next_position + torch.arange(len(question), device=rows.device)
    places = torch.cat([places, following.expand(*places.shape[:-1], -1)], -1)
    if embeddings is not None:
        embeddings = torch.cat([embeddings, model.get_input_embeddings()(question).to(embeddings)])
    tokens = torch.cat([context.tokens[rows], question])
    reader = _Overwriting(context, rows, len(question))
    with _feeding_from(len(rows), model.get_decoder().layers[-1]):
        logits = run(model, tokens, places, reader, embeddings, with_logits=True)
    assert logits is not None
    return logits


@contextmanager
def _feeding_from(first: int, layer: Any) -> Iterator[None]:
    """Skip the feed-forward part of a layer for tokens before the `first`, which get zeros.

    The last layer's output for rows of the context is not used.
    """
    module: Any = getattr(layer, "mlp", None)
    if not isinstance(getattr(module, "down_proj", None), torch.nn.Linear):  # experts, or nothing known
        yield
        return
    hooks = [
        module.register_forward_pre_hook(lambda _, args: (args[0][:, first:], *args[1:])),
        module.register_forward_hook(lambda _, args, out: pad(out, (0, 0, first, 0))),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run_rows(model: Any, context: Context, rows: Tensor, reader: Reader) -> None:
    """Send rows of a context through the layers."""
    places, embeddings = _inputs(context, rows)
    run(model, context.tokens[rows], places, reader, embeddings)


def _inputs(context: Context, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rotary positions of rows, and their embeddings where tokens do not give them."""
    places = context.positions[rows] if context.angles is None else context.angles[:, rows]
    return places, None if context.embeddings is None else context.embeddings[rows]


def check_global(context: Context) -> None:
    if not torch.equal(context.positions, torch.arange(context.num_tokens, device=context.positions.device)):
        wrong_value("context", "have the global geometry", "local positions", "Assemble it anew.")


def _check_rows(rows: Tensor, context: Context) -> None:
    check_tensor("rows", rows, dims=1)
    if rows.dtype not in (torch.int32, torch.int64):
        wrong_type("rows", "hold int32 or int64", rows.dtype)
    outside = rows[(rows < 0) | (rows >= context.num_tokens)]
    if len(outside):
        wrong_value("rows", f"lie between 0 and {context.num_tokens - 1}", int(outside[0]))


class _Overwriting:
    """Writes fresh keys and values into their rows, then reads the whole cache.

    Args:
        num_following: the number of tokens behind the context that run with the rows. They are appended to the cache.
            In the last layer only they read, because its output for the rows gives no key or value.
    """

    def __init__(self, context: Context, rows: Tensor, num_following: int = 0) -> None:
        self._context, self._rows, self._num_following = context, rows, num_following
        self._last = len(context.cache.layers) - 1
        length = context.num_tokens + num_following
        every = torch.arange(length, device=rows.device, dtype=torch.int32)
        places = torch.cat([rows.to(every), every[context.num_tokens :]])
        # On a GPU keys that all queries of a block see are read by the fastest kernel, which knows no positions; on a
        # CPU no mask is made for them.
        seen_by_all, others = plans_apart(places, length)
        self._plans: list[tuple[Plan, Positions | None]] = [(others, Positions(places[None], every[None]))]
        if seen_by_all.blocks.numel():
            self._plans.insert(0, (seen_by_all, None))

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        keys, values = self._written(layer, key, value)
        if layer == self._last and not self._num_following:
            return None
        count = len(self._rows)
        if count and layer < self._last:
            parts = [KeyValuePart(keys, values, plan, positions=seen) for plan, seen in self._plans]
            return attend_parts(query, parts, scale=scale).out
        return pad(read_after(query[:, :, count:], keys, values, scale), (0, 0, count, 0))

    def _written(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cached, count = self._context.cache.layers[layer], len(self._rows)
        key, value = key.to(cached.keys), value.to(cached.values)
        if self._num_following:
            grown(self._context, layer, key[:, :, count:], value[:, :, count:])
        cached.keys.index_copy_(2, self._rows, key[:, :, :count])
        cached.values.index_copy_(2, self._rows, value[:, :, :count])
        return cached.keys, cached.values


def plan_up_to(positions: Tensor, num_keys: int) -> Plan:
    """Every block of queries, in ascending order, reads the blocks of keys up to its last query's position.

    `positions` hides the keys inside the last of them; blocks after it are not even touched.
    """
    return _plan(_blocks_up_to(positions, num_keys), positions, num_keys)


def plans_apart(positions: Tensor, num_keys: int) -> tuple[Plan, Plan]:
    """The plan of `plan_up_to` in two: keys that all queries of a block see, and the others."""
    first = positions[:: _q_block(positions.device)]
    ends = torch.arange(_K_BLOCK, num_keys + _K_BLOCK, _K_BLOCK, device=positions.device)
    seen_by_all = ends <= first[:, None] + 1
    others = _blocks_up_to(positions, num_keys) & ~seen_by_all
    return _plan(seen_by_all, positions, num_keys), _plan(others, positions, num_keys)


def _blocks_up_to(positions: Tensor, num_keys: int) -> Tensor:
    """`[rows, columns]` bool."""
    num_queries, q_block = len(positions), _q_block(positions.device)
    ends = torch.arange(q_block, num_queries + q_block, q_block, device=positions.device)
    last = positions[ends.clamp(max=num_queries) - 1]
    columns = torch.arange(0, num_keys, _K_BLOCK, device=positions.device)
    return columns <= last[:, None]


def _plan(mask: Tensor, positions: Tensor, num_keys: int) -> Plan:
    q_block = _q_block(positions.device)
    return planning.from_mask(
        mask, q_block=q_block, k_block=_K_BLOCK, num_queries=len(positions), num_keys=num_keys
    )


def _q_block(device: torch.device) -> int:
    """Queries that share a list. With more of them more keys are read and hidden; with fewer a CPU is inefficient."""
    return 128 if device.type == "cuda" else 192
