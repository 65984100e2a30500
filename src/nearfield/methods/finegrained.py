"""FG-Attn (arXiv 2509.16518): skips single keys, or a few, instead of whole blocks.

For each block of queries the keys that matter to any of them are gathered into packed tiles. Full attention finds these
keys at a few steps of the denoising loop, and the lists serve until the next of these steps ("cached"); or attention
among means predicts them at every call ("online").
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nearfield._checks import check_bool, check_member, check_share, wrong_type, wrong_value
from nearfield._types import Attended, Impl, Moment
from nearfield.layout import CurveOrder, Geometry
from nearfield.methods.base import Method
from nearfield.methods.dense_parts import DenseSteps
from nearfield.methods.layers import LayerAttention
from nearfield.methods.layers import Memory as LayerMemory
from nearfield.ops import Blocks, Mask, ReadStats, attend, predict
from nearfield.plan import Plan, check_block
from nearfield.plan import builders as planning

Predict = Literal["cached", "online"]

_REFRESH = (0.0, 0.15, 0.3, 0.45, 0.6, 0.8)


@dataclass(frozen=True)
class FineGrained(Method):
    """Key lists from predicted weights.

    Args:
        query_block: queries that share a list.
        grain: keys that are kept or skipped together.
        predict: "cached": lists come from the weights of full attention at some steps, and serve until the next of
            them; "online": from attention among means, at every call.
        threshold: cached: keep what some query of the block gives at least this weight. A number, or "x/N", x times
            the weight each of N keys would have if all were equal. 0 keeps everything.
        top_p: online: the fewest keys that hold this share of the attention among means.
        min_similarity: online: blocks whose tokens are less similar than this (mean cosine with their mean) are read
            whole; None for no such blocks.
        refresh: cached: at which shares of the denoising steps lists are made anew.
        share_branches: cached: one set of lists for all calls of a step (guidance makes several), made by the first.
        memory: cached: GiB of device memory for what all layers of a model remember; what does not fit as lists is
            kept as bits, and what does not fit so, in host memory. None: no bound.
        order: the order of image tokens; consecutive ones are kept or skipped together.
        dense_layers: how many of the first layers stay dense, or the indices of those that do.
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them; two numbers
            are of the first and of the last steps.
    """

    name: ClassVar[str] = "finegrained"
    example: ClassVar[Mapping[str, Any]] = {
        "query_block": 16, "grain": 2, "predict": "online", "top_p": 0.5, "min_similarity": None
    }  # fmt: skip
    everything: ClassVar[Mapping[str, Any]] = {"top_p": 1.0}

    query_block: int = 128
    grain: int = 4
    predict: Predict = "cached"
    threshold: float | str = "0.5/N"
    top_p: float = 0.9
    min_similarity: float | None = 0.6
    refresh: tuple[float, ...] = _REFRESH
    share_branches: bool = False
    memory: float | None = None
    order: CurveOrder = "hilbert"
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: DenseSteps = 0

    def __post_init__(self) -> None:
        check_block("query_block", self.query_block)
        check_block("grain", self.grain)
        check_member("predict", self.predict, get_args(Predict))
        check_member("order", self.order, get_args(CurveOrder))
        _weight_of(self.threshold, 1)
        check_share("top_p", self.top_p)
        if self.min_similarity is not None:
            check_share("min_similarity", self.min_similarity, above=-1.0)
        object.__setattr__(self, "refresh", _checked_refresh(self.refresh))
        check_bool("share_branches", self.share_branches)
        _check_memory(self.memory)
        self.check_dense_parts()

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "FineLayer":
        """What one layer needs to attend, with a memory of its own."""
        del index, heads, device
        return FineLayer(self, geometry)

    def blocks(self, geometry: Geometry) -> Blocks:
        tokens = geometry.num_tokens
        return Blocks(self.query_block, self.grain, tokens, tokens, (geometry.text_span,))

    @property
    def is_stateful(self) -> bool:
        return self.predict == "cached"

    def mask_bytes(self, geometry: Geometry, batch: int, heads: int) -> int:
        """What a layer remembers for one branch takes as bits; as lists at most (if all is kept) 32 times as much."""
        rows, columns = (-(-geometry.num_tokens // block) for block in (self.query_block, self.grain))
        return batch * heads * (rows * -(-columns // 8) + 4 * (rows + 1))

    def refreshes(self, total: int) -> list[int]:
        """The steps, of `total`, at which lists are made anew."""
        return sorted({min(int(share * total), total - 1) for share in self.refresh})

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry."""
        del device
        rows, columns = (-(-geometry.num_tokens // block) for block in (self.query_block, self.grain))
        blocks = f"{rows} blocks of {self.query_block} queries choose among {columns} of {self.grain} keys"
        if self.predict == "online":
            return f"{geometry}: {blocks} at every call: those that hold {self.top_p:.0%} of the attention among means"
        weight = _weight_of(self.threshold, geometry.num_tokens)
        megabytes = self.mask_bytes(geometry, 1, 1) / 2**20
        return (
            f"{geometry}: {blocks} at steps {', '.join(map(str, self.refreshes(50)))} of 50: those with a weight of at "
            f"least {weight:.2e}; masks take {megabytes:.2f} MiB per layer, head and branch as bits"
        )


class Known(NamedTuple):
    """What was found at some step: whom to read, as lists or packed, and what that leaves out."""

    place: int
    lists: Plan | Mask
    kept: Tensor
    dropped: Tensor
    is_on_host: bool = False

    @property
    def num_bytes(self) -> int:
        if isinstance(self.lists, Mask):
            return self.lists.num_bytes
        return self.lists.blocks.nbytes + self.lists.offsets.nbytes

    @property
    def form(self) -> str:
        if isinstance(self.lists, Plan):
            return "lists"
        return "bits in host memory" if self.is_on_host else "bits"


class FineLayer(LayerAttention):
    """What one layer reads. With "cached" prediction, call `set_step` before every call."""

    stats: ReadStats

    def __init__(self, method: FineGrained, geometry: Geometry) -> None:
        self.method, self.geometry = method, geometry
        self.blocks = method.blocks(geometry)
        self.moment: Moment | None = None
        self.known: dict[tuple[str, int], Known] = {}
        """What was found, by branch and batch."""
        self.stats = ReadStats()
        self.most: Counter[str] = Counter()
        """The most bytes that were taken at once, by form."""
        self._allowed = math.inf if method.memory is None else method.memory * 2**30

    @property
    def num_pairs(self) -> None:
        """Pairs read per batch element and head are not known before the calls; `stats` knows them after."""
        return None

    def plans_like(self, device: torch.device) -> tuple[Plan, ...]:
        return (self.blocks.blank(device),)

    def set_step(self, moment: Moment) -> "FineLayer":
        self.moment = moment
        return self

    def set_num_layers(self, number: int) -> "FineLayer":
        self._allowed /= number
        return self

    def forget(self) -> None:
        self.known.clear()
        self.moment = None

    def memory(self, heads: int) -> LayerMemory | None:
        if not self.method.is_stateful:
            return None
        as_bits = self.method.mask_bytes(self.geometry, 1, heads)
        return LayerMemory(as_bits, self.method.memory, self.most)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Impl = "auto",
    ) -> Attended:
        """Attention among tokens in the method's order, `[B, H, N, D]`."""
        if self.method.predict == "online":
            plan = self._predicted(query, key, key_bias, scale, impl)
        elif (known := self._remembered(query)) is not None:
            self.stats.add(known.kept, known.dropped)
            lists = known.lists
            plan = lists.plan(self.blocks, query.device) if isinstance(lists, Mask) else lists
        else:
            plan = planning.full(query.shape[2], key.shape[2], device=query.device)
            attended = attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)
            self.stats.add_full()
            self._remember(query, key, attended.lse, key_bias, scale, impl)
            return attended
        return attend(query, key, value, plan, key_bias=key_bias, scale=scale, impl=impl)

    def _predicted(
        self, query: Tensor, key: Tensor, key_bias: Tensor | None, scale: float | None, impl: Impl
    ) -> Plan:
        method = self.method
        prediction = predict.by_means(
            query,
            key,
            self.blocks,
            mass=method.top_p,
            guard=method.min_similarity,
            key_bias=key_bias,
            scale=scale,
            impl=impl,
        )
        self.stats.add(prediction.kept, prediction.dropped.mean())
        return self.blocks.plan(prediction.keep, compact=False)

    def _key(self, query: Tensor) -> tuple[str, int]:
        assert self.moment is not None
        return "" if self.method.share_branches else self.moment.branch, query.shape[0]

    def _remembered(self, query: Tensor) -> Known | None:
        """What still serves; None where it has to be found."""
        if self.moment is None:
            wrong_value(
                "moment",
                'be set before a call where prediction is "cached"',
                None,
                'Call `layer.set_step(Moment(step, total))` first, or use predict="online".',
            )
        known = self.known.get(self._key(query))
        if known is None or self.moment.step_index < known.place:  # nothing, or of another generation
            return None
        due = [place for place in self.method.refreshes(self.moment.total) if place <= self.moment.step_index]
        return known if not due or known.place >= due[-1] else None

    def _remember(
        self,
        query: Tensor,
        key: Tensor,
        lse: Tensor,
        key_bias: Tensor | None,
        scale: float | None,
        impl: Impl,
    ) -> None:
        assert self.moment is not None
        prediction = predict.by_weights(
            query.detach(),
            key.detach(),
            lse.detach(),
            self.blocks,
            _weight_of(self.method.threshold, key.shape[2]),
            key_bias=key_bias,
            scale=scale,
            impl=impl,
        )
        self.known.pop(self._key(query), None)  # before anything is made that takes its place
        lists, is_on_host = self._fitting(prediction.keep)
        kept, dropped = prediction.kept, prediction.dropped.mean()
        self.known[self._key(query)] = Known(self.moment.step_index, lists, kept, dropped, is_on_host)
        taken: Counter[str] = Counter()
        for known in self.known.values():
            taken[known.form] += known.num_bytes
        self.most = max(self.most, taken, key=Counter.total)

    def _fitting(self, keep: Tensor) -> tuple[Plan | Mask, bool]:
        """A mask in the form that the memory allowed has room for, and whether that is in host memory."""
        if self._allowed == math.inf:
            return self.blocks.plan(keep, compact=True), False
        mask = Mask.of(keep)
        left = self._allowed - sum(known.num_bytes for known in self.known.values() if not known.is_on_host)
        if mask.num_list_bytes <= left:
            return self.blocks.plan(keep, compact=True), False
        return (mask, False) if mask.num_bytes <= left else (mask.on_host(), True)


def _weight_of(threshold: float | str, num_keys: int) -> float:
    """A threshold as a weight: "0.5/N" is half of what each key would have if all were equal."""
    if isinstance(threshold, str):
        number, slash, name = threshold.partition("/")
        try:
            value = float(number) / num_keys
        except ValueError:
            value = -1.0
        if slash != "/" or name != "N" or not 0 <= value < float("inf"):
            wrong_value(
                "threshold", 'be a weight, or one times that of equal keys, as "0.5/N"', repr(threshold)
            )
        return value
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        wrong_type("threshold", 'be a number or a text like "0.5/N"', repr(threshold))
    if not 0 <= threshold < float("inf"):
        wrong_value("threshold", "be at least 0", threshold)
    return float(threshold)


def _checked_refresh(shares: object) -> tuple[float, ...]:
    if not isinstance(shares, Sequence) or isinstance(shares, str) or not shares:
        wrong_type("refresh", "be shares of the steps, at least one", repr(shares))
    for share in shares:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            wrong_value("refresh", "hold shares from 0, below 1", repr(share))
    return tuple(float(share) for share in shares)


def _check_memory(memory: object) -> None:
    if memory is None:
        return
    if isinstance(memory, bool) or not isinstance(memory, int | float):
        wrong_type("memory", "be GiB, or None for no bound", repr(memory))
    if not 0 <= memory < float("inf"):
        wrong_value("memory", "be at least 0 GiB", memory, "None is no bound.")
