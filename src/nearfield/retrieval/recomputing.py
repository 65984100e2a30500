"""Rows of a context computed again, now that they can see the chunks before their own."""

from typing import Any

import torch
from torch import Tensor

from nearfield import planning
from nearfield._checks import check_tensor, wrong_type, wrong_value
from nearfield._types import Positions
from nearfield.attend import attend
from nearfield.plan import Plan
from nearfield.retrieval.chunks import Context
from nearfield.retrieval.reading import Reader, run
from nearfield.retrieval.rotary import check_model

_Q_BLOCK, _K_BLOCK = 128, 64


def recompute(model: Any, context: Context, rows: Tensor) -> Context:
    """Send the tokens of `rows` through all layers and overwrite their keys and values in the context's cache.

    In every layer their queries read the whole cache, up to their own positions: fresh rows where there are, reused
    rows elsewhere. Rows that are not named stay as they are, bit for bit.

    Args:
        rows: indices into the context, in any order.
    """
    check_model(model, is_moved=False)
    check_global(context)
    _check_rows(rows, context)
    rows = rows.unique().to(context.tokens.device)
    if len(rows):
        last = len(context.cache.layers) - 1
        run_rows(model, context, rows, _Overwriting(context, rows, last))
    return context


def run_rows(model: Any, context: Context, rows: Tensor, reader: Reader) -> None:
    """Send rows of a context through the layers."""
    places = context.positions[rows] if context.angles is None else context.angles[:, rows]
    embeddings = None if context.embeddings is None else context.embeddings[rows]
    run(model, context.tokens[rows], places, reader, embeddings)


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
    """Writes fresh keys and values into their rows, then reads the mixture."""

    def __init__(self, context: Context, rows: Tensor, last: int) -> None:
        self._cache, self._rows, self._last = context.cache, rows, last
        self._positions = Positions(context.positions[rows][None], context.positions[None])
        self._plan = plan_up_to(context.positions[rows], context.num_tokens)

    def read(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor | None:
        cached = self._cache.layers[layer]
        cached.keys.index_copy_(2, self._rows, key.to(cached.keys))
        cached.values.index_copy_(2, self._rows, value.to(cached.values))
        if layer == self._last:
            return None  # what the last layer makes of them is nobody's key or value
        return attend(
            query, cached.keys, cached.values, self._plan, positions=self._positions, scale=scale
        ).out


def plan_up_to(positions: Tensor, num_keys: int) -> Plan:
    """Every block of queries, in ascending order, reads the blocks of keys up to its last query's position.

    `positions` hides the keys inside the last of them; blocks after it are not even touched.
    """
    num_queries = len(positions)
    ends = torch.arange(_Q_BLOCK, num_queries + _Q_BLOCK, _Q_BLOCK, device=positions.device)
    last = positions[ends.clamp(max=num_queries) - 1]
    columns = torch.arange(0, num_keys, _K_BLOCK, device=positions.device)
    return planning.from_mask(
        columns <= last[:, None],
        q_block=_Q_BLOCK,
        k_block=_K_BLOCK,
        num_queries=num_queries,
        num_keys=num_keys,
    )
