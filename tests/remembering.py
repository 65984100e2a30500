"""A method whose result depends on earlier steps, for the tests of what serves any such method."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nearfield import Geometry, LayerAttention, Method, Plan, attend, planning
from nearfield._types import Attended
from nearfield.methods import Memory, registry
from nearfield.ops import Blocks, ReadStats


@dataclass(frozen=True)
class Remembering(Method):
    """Blocks of keys that had weight in full attention at one step serve until lists are made anew.

    Args:
        q_block: queries that share a list.
        k_block: keys that are read together.
        least: the weight that some query of a block must give some key, in units of that of equal keys.
        refresh: at which shares of the denoising steps lists are made anew.
        share_branches: one set of lists for all calls of a step.
    """

    q_block: int = 16
    k_block: int = 2
    least: float = 1.0
    refresh: tuple[float, ...] = (0.0, 0.5)
    share_branches: bool = False
    dense_layers: int | tuple[int, ...] = 0
    dense_steps: float = 0

    def layer(self, geometry: Geometry, index: int = 0, **_: Any) -> "RememberingLayer":
        return RememberingLayer(self, geometry)

    @property
    def is_stateful(self) -> bool:
        return True

    def refreshes(self, num_steps: int) -> list[int]:
        return sorted({min(int(share * num_steps), num_steps - 1) for share in self.refresh})

    def mask_bytes(self, geometry: Geometry, batch: int, heads: int) -> int:
        rows, columns = (-(-geometry.num_tokens // block) for block in (self.q_block, self.k_block))
        return batch * heads * rows * columns

    def keep(self, weights: Tensor, geometry: Geometry) -> Tensor:
        """Which blocks are read, from the weights of full attention `[B, H, N, N]`."""
        rows = [part.amax(2) for part in weights.split(self.q_block, 2)]
        largest = torch.stack([part.amax(-1) for part in torch.stack(rows, 2).split(self.k_block, -1)], -1)
        keep = (largest >= self.least / geometry.num_tokens) | (largest == largest.amax(-1, keepdim=True))
        start, stop = geometry.text_span
        if start < stop:
            keep[:, :, start // self.q_block : -(-stop // self.q_block)] = True
            keep[..., start // self.k_block : -(-stop // self.k_block)] = True
        return keep


class Known(NamedTuple):
    """What was found at a step: whom to read, and which shares of keys and of weights that are."""

    step: int
    lists: Plan
    kept: Tensor
    dropped: Tensor


class RememberingLayer(LayerAttention):
    """What one layer reads; call `set_step` before every call."""

    num_pairs = None
    stats: ReadStats

    def __init__(self, method: Remembering, geometry: Geometry) -> None:
        self.method, self.geometry, self.stats = method, geometry, ReadStats()
        tokens = geometry.num_tokens
        self.blocks = Blocks(method.q_block, method.k_block, tokens, tokens)
        self.known: dict[tuple[str, int], Known] = {}
        self.taken: Counter[str] = Counter()
        self.moment: Any = None

    def plans_like(self, device: torch.device) -> tuple[Plan, ...]:
        return (self.blocks.blank(device),)

    def set_step(self, moment: Any) -> "RememberingLayer":
        self.moment = moment
        return self

    def forget(self) -> None:
        self.known.clear()

    def memory(self, heads: int) -> Memory:
        return Memory(self.method.mask_bytes(self.geometry, 1, heads), None, self.taken)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_bias: Tensor | None = None,
        scale: float | None = None,
        impl: Any = "auto",
    ) -> Attended:
        step, total, branch = self.moment
        name = "" if self.method.share_branches else branch, query.shape[0]
        due = max((at for at in self.method.refreshes(total) if at <= step), default=-1)
        known = self.known.get(name)
        given: dict[str, Any] = {"key_bias": key_bias, "scale": scale, "impl": impl}
        if known is not None and due <= known.step <= step:
            self.stats.add(known.kept, known.dropped)
            return attend(query, key, value, known.lists, **given)
        self.stats.add_full()
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query @ keys.mT * (query.shape[3] ** -0.5 if scale is None else scale)
        weights = (logits if key_bias is None else logits + key_bias[..., None, :]).softmax(-1).detach()
        keep = self.method.keep(weights, self.geometry)
        plan = self.blocks.plan(keep, compact=True)
        read = keep.repeat_interleave(self.method.q_block, 2)[:, :, : query.shape[2]]
        read = read.repeat_interleave(self.method.k_block, 3)[..., : key.shape[2]]
        dropped = weights.masked_fill(read, 0).sum(-1).mean()
        self.known[name] = Known(step, plan, keep.float().mean(), dropped)
        self.taken = max(self.taken, Counter(lists=plan.blocks.nbytes * len(self.known)), key=Counter.total)
        return attend(query, key, value, planning.full(*logits.shape[2:], device=query.device), **given)


def registered(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The same class under a name by which commands, recipes and nodes find it, until the test is over."""
    monkeypatch.setattr(registry, "_CLASSES", dict(registry._CLASSES))
    return type(kind.__name__, (kind,), {"name": kind.__name__.lower(), "__module__": kind.__module__})
