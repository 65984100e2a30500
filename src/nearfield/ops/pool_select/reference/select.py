"""Choosing the best candidates of every query: the specification of the selection kernels."""

import torch
from torch import Tensor

_CHUNK_CELLS = 2**22


def select(
    query: Tensor, key: Tensor, parents: Tensor | None, block: int, count: int, keep_own: bool
) -> Tensor:
    """The `count` keys with the highest scores among each query's candidates, of equal ones those with lower ids.

    Args:
        query: `[B, H, n, D]`.
        key: `[B, G, m, D]`, `G` dividing `H`.
        parents: `[B, H, ceil(n / block), w]` int32: for each `p` of `parents[..., i // block, :]` query `i` may choose
            among the keys `p * block` to `p * block + block - 1`. None: among all keys.
        keep_own: key `i` is always chosen by query `i`, if it is a candidate.

    Returns:
        `[B, H, n, count]` int32 ids, ascending; where there were fewer candidates the rest is `m`. A score that is NaN
        is the worst there is, but a candidate still.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    if parents is None:
        every = torch.arange(num_keys, device=query.device, dtype=torch.int32)
        candidates = every.expand(*query.shape[:2], 1, -1)
        block = num_queries
    else:
        children = torch.arange(block, device=query.device, dtype=torch.int32)
        candidates = (parents[..., None] * block + children).flatten(-2)
    groups = candidates.shape[2]
    chosen = []
    step = max(1, _CHUNK_CELLS // (candidates.shape[3] * block * query.shape[0] * query.shape[1]))
    for start in range(0, groups, step):
        some = slice(start, start + step)
        rows = query[:, :, start * block : (start + step) * block]
        first = start * block
        chosen.append(_best(rows, first, key, candidates[:, :, some], block, count, keep_own))
    return torch.cat(chosen, dim=2)


def select_packed(
    query: Tensor,
    key: Tensor,
    parents: Tensor | None,
    block: int,
    count: int,
    keep_own: bool,
    pack: int,
    multiple: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`select`, and the choices of `pack` queries at a time merged, each id once and ascending.

    Returns:
        What `select` does; for each merged list where it starts and how long it is, `[B, H, 2 * lists]`; and the lists
        `[B, H, entries]`, of `id * 2**pack` and a bit for each of the queries that chose it. They are filled up to a
        multiple with their last id, of no query.
    """
    chosen = select(query, key, parents, block, count, keep_own)
    num_keys = key.shape[2]
    width = -(-pack * count // multiple) * multiple
    whole = torch.nn.functional.pad(chosen, (0, 0, 0, -chosen.shape[2] % pack), value=num_keys)
    member = torch.arange(pack, device=chosen.device, dtype=torch.int32)[:, None]
    ids = whole.unflatten(2, (-1, pack)).flatten(3)
    bits = (1 << member).expand(pack, count).flatten().expand_as(ids)
    ids, place = ids.sort(dim=-1, stable=True)
    is_read = ids < num_keys
    bits = torch.where(is_read, bits.gather(-1, place), 0)
    is_new = torch.ones_like(is_read)
    is_new[..., 1:] = ids[..., 1:] != ids[..., :-1]
    slot = (is_new.cumsum(-1) - 1).clamp(max=width - 1)
    merged = torch.zeros(*ids.shape[:3], width, device=ids.device, dtype=torch.int32)
    merged.scatter_add_(-1, slot, torch.where(is_new & is_read, ids << pack, 0) + bits)
    number = (is_new & is_read).sum(-1, keepdim=True)
    filled = -(-number // multiple) * multiple
    last = torch.where(is_read, ids, 0).amax(-1, keepdim=True)
    slots = torch.arange(width, device=ids.device)
    merged = torch.where((slots >= number) & (slots < filled), last << pack, merged)
    starts = torch.arange(ids.shape[2], device=ids.device)[:, None] * width
    bounds = torch.cat([starts.expand_as(filled), filled], -1).to(torch.int32)
    return chosen, bounds.flatten(2), merged.flatten(2)


def _best(
    query: Tensor, first: int, key: Tensor, candidates: Tensor, block: int, count: int, keep_own: bool
) -> Tensor:
    """As `select`, for some groups of queries, of which the first is query `first`."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    groups, width = candidates.shape[2:]
    short = groups * block - num_rows
    rows = torch.nn.functional.pad(query, (0, 0, 0, short)).unflatten(2, (groups, block))
    index = candidates.clamp(max=num_keys - 1).long().flatten(2)[..., None].expand(-1, -1, -1, key.shape[3])
    keys = key.gather(2, index).unflatten(2, (groups, width))
    scores = _wide(rows) @ _wide(keys).mT
    lowest = torch.finfo(scores.dtype).min
    scores = torch.where(scores > lowest, scores, lowest)  # NaN and -inf, too
    candidates = candidates[:, :, :, None].expand(-1, -1, -1, block, -1)
    if keep_own:
        own = first + torch.arange(groups * block, device=query.device).view(groups, block, 1)
        scores = scores.masked_fill(candidates == own, torch.inf)
    scores = scores.masked_fill(candidates >= num_keys, -torch.inf)
    best, place = scores.sort(dim=-1, descending=True, stable=True)
    ids = candidates.gather(-1, place[..., :count])
    ids = torch.where(best[..., :count] > -torch.inf, ids, num_keys)
    ids = torch.nn.functional.pad(ids, (0, count - ids.shape[-1]), value=num_keys)
    return ids.sort(dim=-1).values.flatten(2, 3)[:, :, :num_rows].to(torch.int32)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
