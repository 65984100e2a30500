"""What a method reads in one layer of a model."""

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nearfield._types import Attended, Impl, Moment
from nearfield.layout import Span
from nearfield.ops import (
    KeyValuePart,
    ReadStats,
    WeightedWindows,
    attend,
    attend_parts,
    merge_attended,
    weighted_windows,
    window_means,
    window_slope,
)
from nearfield.plan import Plan
from nearfield.plan import builders as planning

Summary = Literal["mean", "weighted", "sloped"]


class Memory(NamedTuple):
    """What a layer whose result depends on earlier steps keeps from them.

    Args:
        as_bits: bytes that one sample and one branch of guidance take as bits; as lists up to 32 times as much.
        limit: GiB of device memory that all layers may take; None for no limit.
        taken: the most bytes that were taken at once, by form.
    """

    as_bits: int
    limit: float | None
    taken: Counter[str]


class LayerAttention(ABC):
    """What one layer of a model reads, prepared for a geometry and a device."""

    plans: Sequence[Plan] = ()
    """Who reads whom, where that is known before calls; empty where content decides."""
    summaries: "tuple[FarField, Summary] | None" = None
    """The summaries that the last of `plans` reads, and their kind; None where no plan reads summaries."""
    stats: ReadStats | None = None
    """What calls have read so far, where that is counted."""

    @property
    @abstractmethod
    def num_pairs(self) -> int | None:
        """Pairs read per batch element and head; None where that is known after calls only."""

    @abstractmethod
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

    def prepare(self, batch: int, heads: int, *, training: bool) -> None:
        """Derive from the plans what `attend` keeps, so that compiled layers find it there."""
        for plan in self.plans:
            for each in (plan, plan.transpose()) if training else (plan,):
                if each.device.type == "cuda":
                    each.longest_first(batch, heads)
        self._leave_lengths_open()

    def _leave_lengths_open(self) -> None:
        """Let torch.compile make one graph for lists of any length, since layers differ in it.

        A caller who compiles has loaded the tracer, so a missing tracer is not loaded here.
        """
        tracer = sys.modules.get("torch._dynamo")
        if tracer is None:
            return
        for plan in self.plans:
            tracer.maybe_mark_dynamic(plan.extent, (0, 1))
        for each in self.lists():
            tracer.maybe_mark_dynamic(each, each.dim() - 1)

    def lists(self) -> Sequence[Tensor]:
        """Tensors whose last side differs from layer to layer."""
        return [each for plan in self.plans for each in plan.lists()]

    def plans_like(self, device: torch.device) -> Sequence[Plan]:
        """The plans, or, where calls make them, empty ones of the same kind: for asking what would run them."""
        del device
        return self.plans

    # -- layers whose result depends on earlier steps ----------------------------------------------------------------

    def set_step(self, moment: Moment) -> "LayerAttention":
        """Say, before every call, where the denoising loop stands."""
        del moment
        return self

    def set_num_layers(self, number: int) -> "LayerAttention":
        """Say how many layers share the memory that the method allows."""
        del number
        return self

    def forget(self) -> None:  # noqa: B027, most layers keep nothing
        """Release what is kept from earlier steps."""

    def memory(self, heads: int) -> Memory | None:
        """What is kept from earlier steps; None where nothing is."""
        del heads
        return None


class FarField(NamedTuple):
    """Summaries of stretches of the sequence, and who reads them.

    Args:
        spans: the tokens that are summarised, as consecutive ones as possible.
        window: tokens per summary; windows lie on multiples of it in the sequence, and end where a span does.
        starts: `[windows]` int64, the first token of each.
        sizes: `[windows]` int32, how many tokens each holds.
        bias: `[windows]`, the log of that.
        plan: which rows read which windows.
        readers: the same as `[1, 1 or H, rows, windows]` bool, where summaries are sloped.
    """

    spans: tuple[Span, ...]
    window: int
    starts: Tensor
    sizes: Tensor
    bias: Tensor
    plan: Plan
    readers: Tensor | None = None

    def pooled(self, x: Tensor, impl: Impl = "auto") -> Tensor:
        """The mean of every window, `[B, G, M, D]` to `[B, G, windows, D]`."""
        return window_means(x, self.starts, self.sizes, self.window, impl)

    def weighted(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, impl: Impl = "auto"
    ) -> WeightedWindows:
        """Keys, values and biases of all windows, weighted."""
        windows = self.starts, self.sizes, self.window
        return weighted_windows(query, key, value, *windows, scale=scale, impl=impl)

    def sloped(
        self, query: Tensor, key: Tensor, value: Tensor, near: KeyValuePart, scale: float | None, impl: Impl
    ) -> Attended:
        """What `near` and weighted windows give, the windows' part following each query to first order."""
        assert self.readers is not None
        windows = self.weighted(query, key, value, scale, impl)
        far = KeyValuePart(windows.keys, windows.values, self.plan, windows.bias)
        exact, summarised = (
            attend(query, *part[:3], key_bias=part.key_bias, scale=scale, impl=impl) for part in (near, far)
        )
        whole = merge_attended(exact, summarised)
        # What was not read has no share; minus infinity from itself would be no number.
        share = torch.exp(summarised.lse - whole.lse.masked_fill(whole.lse == -torch.inf, 0))
        slope = window_slope(
            query, key, value, windows, self.starts, self.sizes, self.window, self.readers, self.plan.q_block,
            scale=scale, impl=impl,
        )  # fmt: skip
        with torch.autocast(query.device.type, enabled=False):
            change = share.to(slope.matrix.dtype).unsqueeze(-1) * slope.changes(query)
            return Attended(whole.out + change.to(whole.out.dtype), whole.lse)

    def part(
        self, query: Tensor, key: Tensor, value: Tensor, summary: Summary, scale: float | None, impl: Impl
    ) -> KeyValuePart:
        """What a call reads of the windows."""
        if summary == "weighted":
            keys, values, bias = self.weighted(query, key, value, scale, impl)
            return KeyValuePart(keys, values, self.plan, bias)
        return KeyValuePart(self.pooled(key, impl), self.pooled(value, impl), self.plan, self.bias)


@dataclass(frozen=True)
class PlanLayer(LayerAttention):
    """A layer in which the geometry decides who reads whom.

    Args:
        near: what is read exactly.
        far: summaries of the rest, and who reads them.
        summary: of which kind they are.
    """

    near: Plan
    far: FarField | None = None
    summary: Summary = "mean"

    @property
    def plans(self) -> Sequence[Plan]:  # type: ignore[override]
        return (self.near,) if self.far is None else (self.near, self.far.plan)

    @property
    def summaries(self) -> tuple[FarField, Summary] | None:  # type: ignore[override]
        return None if self.far is None else (self.far, self.summary)

    @property
    def num_pairs(self) -> int:
        """Pairs read per batch element and head, on average over heads."""
        return round(sum(plan.num_pairs / plan.blocks.shape[1] for plan in self.plans))

    def lists(self) -> Sequence[Tensor]:
        windows = (
            () if self.far is None else (self.far.starts, self.far.sizes, self.far.bias, self.far.readers)
        )
        return [*super().lists(), *(x for x in windows if x is not None)]

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
        """Attention among tokens in the method's order, `[B, H, N, D]`.

        A far field knows nothing of `key_bias`: it may hide what has no summary (text).
        """
        if self.far is None:
            return attend(query, key, value, self.near, key_bias=key_bias, scale=scale, impl=impl)
        near = KeyValuePart(key, value, self.near, key_bias)
        if self.summary == "sloped":
            return self.far.sloped(query, key, value, near, scale, impl)
        far = self.far.part(query, key, value, self.summary, scale, impl)
        return attend_parts(query, [near, far], scale=scale, impl=impl)


@lru_cache(maxsize=64)
def full_layer(num_tokens: int, device: str) -> PlanLayer:
    """Everyone reads everyone."""
    with torch.inference_mode(False):
        return PlanLayer(planning.full(num_tokens, num_tokens, device=device))
