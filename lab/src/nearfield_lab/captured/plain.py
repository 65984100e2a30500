"""Rows in plain torch: what an oracle would read, and summaries in levels, read where content asks for them.

They say what a rule is worth before anyone writes a kernel for it. Every function takes a sample and a share of the
pairs, and is free to look at all weights. Blocks of 128 queries along the curve decide together; text is read by all.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nearfield.layout import along
from nearfield_lab.captured.rows import Read, Row
from nearfield_lab.captured.samples import Sample

BLOCK = 128
WINDOWS = (16, 64, 256, 1024)
"""Tokens of a summary, level by level: each holds four of the level before."""
_MORE = (0, 16, 8, 4)
"""So many of the best windows of a level are read in the level below, besides those in which something is read."""
_NEAREST = 128
"""Tokens that are read exactly whatever their score, because they are the nearest."""


def best(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest of every row."""
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    return (
        mask.scatter_(-1, scores.topk(min(count, scores.shape[-1]), -1).indices, True) if count > 0 else mask
    )


# -- a head ------------------------------------------------------------------------------------------------------------


class Summaries(NamedTuple):
    """Windows of consecutive tokens, weighted by the mean query: `p = softmax(mean . key)` over each window.

    Args:
        key, value: `[windows, D]`, the weighted means.
        plain: the log of a window's weight for the mean query.
        log_weight: the same for a typical query. The variance `u` of a window's scores is missing from `plain`, and
            `u / 2`, the second cumulant, would be too much where it is large; `2 log(1 + u / 4)` is damped.
        score: how much a block of queries wants a window: its share of the weights, times how much its keys and its
            values differ.
        share: the mean share of each window, by blocks of queries.
        covariance: `[windows, D, D]`, of keys with values, over `1 + u`.
        pooled_key, pooled_value: the plain means.
    """

    key: Tensor
    value: Tensor
    plain: Tensor
    log_weight: Tensor
    score: Tensor
    share: Tensor
    covariance: Tensor
    pooled_key: Tensor
    pooled_value: Tensor

    @classmethod
    def of(cls, key: Tensor, value: Tensor, mean: Tensor, rest: Tensor, window: int) -> "Summaries":
        keys, values = key.unflatten(0, (-1, window)), value.unflatten(0, (-1, window))
        scores = keys @ mean
        p = scores.softmax(-1)[..., None]
        own_key, own_value = (p * keys).sum(1), (p * values).sum(1)
        key_rest, value_rest = keys - own_key[:, None], values - own_value[:, None]
        variance = (p * key_rest.square()).sum(1) @ rest.square().mean(0)
        plain = scores.logsumexp(-1)
        log_weight = plain + 2 * torch.log1p(variance / 4)
        queries = rest.unflatten(0, (-1, 8, BLOCK // 8)).mean(2)
        share = (queries @ own_key.T + log_weight).softmax(-1).sum(1)
        score = share
        for x in (keys, values):
            score = score * (x - x.mean(1, keepdim=True)).square().sum(2).mean(1).sqrt()
        covariance = torch.einsum("wjx,wjd,wje->wde", p, key_rest, value_rest) / (1 + variance)[:, None, None]
        return cls(
            own_key, own_value, plain, log_weight, score, share, covariance, keys.mean(1), values.mean(1)
        )


class Head:
    """One head of a sample: the image's queries, keys and values along the curve, and the text's keys and values."""

    def __init__(self, sample: Sample, index: int) -> None:
        geometry = sample.geometry
        if geometry.references or geometry.num_image_tokens % BLOCK:
            raise NotImplementedError(
                f"these rows take one image of a multiple of {BLOCK} tokens, not {geometry}"
            )
        self.order = along("hilbert", geometry, str(sample.query.device))
        image, text = sample.image, slice(*geometry.text_span)
        query, key, value = (x[index] for x in (sample.query, sample.key, sample.value))
        self.query = sample.scale * self.order.enter(query[image], 0)
        self.key, self.value = (self.order.enter(x[image], 0) for x in (key, value))
        self.text = key[text], value[text]
        self.windows = [window for window in WINDOWS if len(self.key) % window == 0]
        places = torch.stack(torch.unravel_index(self.order.order, geometry.grid), 1).float()
        rows = [
            torch.cdist(some, places).amin(0).unflatten(0, (-1, 16)).mean(1) for some in places.split(BLOCK)
        ]
        self.nearness = -torch.stack(rows)
        """Of every block of queries and window of 16 tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.text[0]) + len(self.key)

    @cached_property
    def rest(self) -> Tensor:
        """Queries less their mean."""
        return self.query - self.query.mean(0)

    @lru_cache(maxsize=4)  # noqa: B019, heads are few
    def summaries(self, window: int) -> Summaries:
        return Summaries.of(self.key, self.value, self.query.mean(0), self.rest, window)

    @cached_property
    def weights(self) -> Tensor:
        """Those of dense attention on the image's keys, `[image, image]`."""
        scores = self.query @ torch.cat([self.text[0], self.key]).T
        return scores.softmax(-1)[:, len(self.text[0]) :]

    def read(self, block: int, keep: Tensor, *others: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What a block of queries gets, and the share of its weights that is on `others`.

        Args:
            keep: image tokens that are read exactly.
            others: logits, values, and which of them are read.
        """
        query = self.query[block * BLOCK : (block + 1) * BLOCK]
        chosen = [(logits[:, mask], values[mask]) for logits, values, mask in others]
        keys = torch.cat([self.text[0], self.key[keep]])
        logits = torch.cat([query @ keys.T, *(logits for logits, _ in chosen)], 1)
        values = torch.cat([self.text[1], self.value[keep], *(values for _, values in chosen)])
        weights = logits.softmax(-1)
        return weights @ values, weights[:, len(keys) :].sum(1, keepdim=True)


@lru_cache(maxsize=1)
def heads_of(sample: Sample) -> list[Head]:
    return [Head(sample, index) for index in range(len(sample.query))]


def by_heads(read: Callable[[Head, float], Read | None]) -> Row:
    """A row from what reads one head: `out` of the image along the curve, the share, and the weight read."""

    def row(sample: Sample, share: float) -> Read | None:
        heads = heads_of(sample)
        found = [each for each in (read(head, share) for head in heads) if each is not None]
        if len(found) < len(heads):
            return None
        out, kept = sample.dense[0].clone(), sum(each.kept for each in found) / len(found)
        weight = None if found[0].weight is None else torch.ones_like(sample.dense[1])
        for index, (head, each) in enumerate(zip(heads, found, strict=True)):
            out[index, sample.image] = head.order.leave(each.out, 0)
            if weight is not None and each.weight is not None:
                weight[index, sample.image] = head.order.leave(each.weight, 0)
        return Read(out, kept, weight)

    return row


# -- what an oracle reads ----------------------------------------------------------------------------------------------


def cells(grain: int, by: Literal["weights", "means"]) -> Row:
    """Keys in groups of `grain`: those with the largest weights, or those whose mean is nearest to the mean query."""

    def read(head: Head, share: float) -> Read | None:
        if len(head.key) % grain:
            raise NotImplementedError(f"these rows take a multiple of {grain} tokens, not {len(head.key)}")
        if by == "weights":
            scores = head.weights.unflatten(0, (-1, BLOCK)).sum(1).unflatten(1, (-1, grain)).sum(2)
        else:
            means = (
                x.unflatten(0, (-1, size)).mean(1) for x, size in ((head.query, BLOCK), (head.key, grain))
            )
            scores = torch.mm(*(mean.T if place else mean for place, mean in enumerate(means)))
        count = int((share * head.num_tokens - len(head.text[0])) / grain)
        if count < 1:
            return None
        keep = best(scores, count).repeat_interleave(grain, 1)
        out = torch.cat([head.read(block, mask)[0] for block, mask in enumerate(keep)])
        missed = (head.weights * ~keep.repeat_interleave(BLOCK, 0)).sum(1)
        kept = (len(head.text[0]) + count * grain) / head.num_tokens
        return Read(out, kept, 1 - missed)

    return by_heads(read)


def centroids(head: Head, share: float) -> Read | None:
    """Windows of 64 by the product of mean query and mean key exactly, and one plain mean for each other."""
    found, blocks = head.summaries(64), torch.arange(len(head.key) // BLOCK)
    scores = head.query.unflatten(0, (-1, BLOCK)).mean(1) @ found.pooled_key.T
    scores[blocks, 2 * blocks] = scores[blocks, 2 * blocks + 1] = math.inf  # a block reads itself
    windows, text = len(found.pooled_key), len(head.text[0])
    count = int((share * head.num_tokens - text - windows) / 63)
    if count < 2:
        return None
    keep = best(scores, count)
    logits = head.query @ found.pooled_key.T + math.log(64)
    parts = logits.split(BLOCK)
    out = [
        head.read(block, mask.repeat_interleave(64), (parts[block], found.pooled_value, ~mask))[0]
        for block, mask in enumerate(keep)
    ]
    return Read(torch.cat(out), (text + 64 * count + windows - count) / head.num_tokens)


# -- summaries in levels -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Levels:
    """Some tokens exactly, all others by weighted summaries of windows that grow where nothing asks for detail.

    Args:
        rule: what is read exactly. "around": the nearest; "routed": windows of 16 with the best scores; "descended":
            the same, but scores of a window are looked at only where the window that holds it is among the best.
        num: how many levels of summaries.
        is_corrected: count each summary by the damped variance of its scores, and add the slope, which is what
            summaries miss to first order: `share on summaries * (query - mean) @ mean covariance`.
    """

    rule: Literal["around", "routed", "descended"]
    num: int
    is_corrected: bool = True

    def __call__(self, head: Head, share: float) -> Read | None:
        low, high = 0, len(head.key) // 16
        while low < high:  # the most windows of 16 that fit
            middle = (low + high + 1) // 2
            fits = self._share(head, self.chosen(head, middle)) <= share
            low, high = (middle, high) if fits else (low, middle - 1)
        if not low:
            return None
        chosen = self.chosen(head, low)
        return Read(self._out(head, chosen), self._share(head, chosen))

    def chosen(self, head: Head, count: int) -> list[Tensor]:
        """Masks by block of queries: windows of 16 that are read exactly, then windows of each level in summary."""
        if self.num > len(head.windows):
            raise NotImplementedError(
                f"{len(head.key)} tokens have {len(head.windows)} levels, not {self.num}"
            )
        score = head.nearness if self.rule == "around" else head.summaries(16).score.clone()
        if self.rule == "descended":
            score[~self._looked_at(head, count)] = -math.inf
        if self.rule != "around":
            score[best(head.nearness, _NEAREST // 16)] = math.inf
        held = best(score, count)
        masks = [held]
        for level in range(1, self.num):
            opened = held.unflatten(1, (-1, 4)).any(-1)
            more = head.summaries(WINDOWS[level]).score.masked_fill(opened, -math.inf)
            opened = opened | best(more, _MORE[level])
            masks.append(opened.repeat_interleave(4, 1) & ~held)
            held = opened
        return [*masks, ~held]

    def _looked_at(self, head: Head, count: int) -> Tensor:
        """Windows of 16 inside the best larger ones."""
        inside = torch.ones_like(head.summaries(WINDOWS[self.num - 1]).score, dtype=torch.bool)
        for level in range(self.num - 1, 0, -1):
            scores = head.summaries(WINDOWS[level]).score.masked_fill(~inside, -math.inf)
            inside = best(scores, min(count + _MORE[1], int(inside.sum(1).min()))).repeat_interleave(4, 1)
        return inside

    def _share(self, head: Head, chosen: Sequence[Tensor]) -> float:
        sizes = [16, *[1] * self.num]
        read = sum(size * mask.sum(1).float().mean() for size, mask in zip(sizes, chosen, strict=True))
        return float(len(head.text[0]) + read) / head.num_tokens

    def _out(self, head: Head, chosen: Sequence[Tensor]) -> Tensor:
        levels = [head.summaries(window) for window in WINDOWS[: self.num]]
        outs, far = [], []
        for block, keep in enumerate(chosen[0]):
            rest = head.rest[block * BLOCK : (block + 1) * BLOCK]
            others = [
                (
                    rest @ each.key.T + (each.log_weight if self.is_corrected else each.plain),
                    each.value,
                    mask[block],
                )
                for each, mask in zip(levels, chosen[1:], strict=True)
            ]
            out, share = head.read(block, keep.repeat_interleave(16), *others)
            outs.append(out)
            far.append(share)
        out = torch.cat(outs)
        if not self.is_corrected:
            return out
        shares = [(each.share * mask).sum(0) for each, mask in zip(levels, chosen[1:], strict=True)]
        slope = sum(
            torch.einsum("w,wde->de", s, each.covariance) for s, each in zip(shares, levels, strict=True)
        )
        total = sum(s.sum() for s in shares)
        return out + torch.cat(far) * (head.rest @ (slope / total)) if float(total) else out


ROWS: dict[str, Row] = {
    "best keys": cells(1, "weights"),
    "best blocks of 16": cells(16, "weights"),
    "best blocks of 64": cells(64, "weights"),
    "blocks of 64 by means": cells(64, "means"),
    "centroids": by_heads(centroids),
    "around, plain": by_heads(Levels("around", 1, is_corrected=False)),
    "around, 1": by_heads(Levels("around", 1)),
    **{f"routed, {num}": by_heads(Levels("routed", num)) for num in (1, 2, 3, 4)},
    "routed, 3, plain": by_heads(Levels("routed", 3, is_corrected=False)),
    **{f"descended, {num}": by_heads(Levels("descended", num)) for num in (3, 4)},
}
"""By name. A number is that of the levels; "plain" is without corrections."""
