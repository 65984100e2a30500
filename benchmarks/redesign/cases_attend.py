"""Cases of `attend`, of several parts, of merging two results, and of what is derived from a plan.

This folder serves the redesign alone, and goes away with its last commit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import names
import torch
from ground import DEVICES, Ground, Results, case, differentiated, joint, plain
from names import KeyValuePart, Plan, planning
from torch import Tensor

INF = float("inf")
NOT_INTERPRETED = ("cpu", "cuda")
HALF, BRAIN, DOUBLE = torch.float16, torch.bfloat16, torch.float64
Make = Callable[[Ground], Plan]


def bound(builder: Callable[..., Plan]) -> Callable[..., Make]:
    """A builder whose arguments come first, and the ground later."""

    def bind(*sizes: int, **options: object) -> Make:
        return lambda ground: builder(ground, *sizes, **options)

    return bind


# -- plans -------------------------------------------------------------------------------------------------------------


@bound
def full(ground: Ground, *sizes: int, **blocks: int) -> Plan:
    return planning.full(*sizes, **blocks, device=ground.device)


@bound
def ring(ground: Ground, length: int, run: int, **rest) -> Plan:
    return planning.ring(length, run, **rest, device=ground.device)


@bound
def spans(ground: Ground, q_block: int, k_block: int, queries: int, keys: int) -> Plan:
    rows = -(-queries // q_block)
    first = Ground(torch.device("cpu"), "auto").integers(rows, 3, seed=5, below=keys)
    length = Ground(torch.device("cpu"), "auto").integers(rows, 3, seed=6, below=keys // 3)
    return planning.from_spans(
        first,
        (first + length).clamp(max=keys),
        q_block=q_block,
        k_block=k_block,
        num_queries=queries,
        num_keys=keys,
        device=ground.device,
    )


@bound
def mask(
    ground: Ground,
    q_block: int,
    k_block: int,
    queries: int,
    keys: int,
    lists: tuple[int, ...] = (),
    share: float = 0.4,
    has_empty: bool = False,
    compact: bool = True,
) -> Plan:
    """Lists by hash; the last block, which may be ragged, is read by all rows but the empty ones."""
    rows, columns = -(-queries // q_block), -(-keys // k_block)
    made = ground.share(*lists, rows, columns, seed=7, below=share)
    made[..., -1] = True
    if has_empty:
        made[..., ::2, :] = False
    sizes = {"q_block": q_block, "k_block": k_block, "num_queries": queries, "num_keys": keys}
    return planning.from_mask(made, **sizes, compact=compact)


@bound
def topk(
    ground: Ground, k: int, q_block: int, k_block: int, queries: int, keys: int, has_holes: bool = False
) -> Plan:
    rows, columns = -(-queries // q_block), -(-keys // k_block)
    scores = ground.normal(1, 2, rows, columns, seed=8)
    scores = scores.round(decimals=1)  # some are equal
    if has_holes:
        scores = scores.masked_fill(ground.share(1, 2, rows, columns, seed=9, below=0.6), -INF)
    return planning.topk(scores, k, q_block=q_block, k_block=k_block, num_queries=queries, num_keys=keys)


@bound
def key_lists(
    ground: Ground,
    width: int,
    q_block: int,
    k_block: int,
    queries: int,
    keys: int,
    is_ragged: bool = True,
    check: bool = True,
) -> Plan:
    """Ascending ids, some of them twice."""
    rows, columns = -(-queries // q_block), -(-keys // k_block)
    ids = ground.integers(1, 2, rows, width, seed=10, below=columns).sort(-1).values
    counts = ground.integers(1, 2, rows, seed=11, below=width + 1) if is_ragged else None
    sizes = {"q_block": q_block, "k_block": k_block, "num_queries": queries, "num_keys": keys}
    return planning.key_lists(ids, counts, **sizes, check=check)


# -- one plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attend:
    """One call.

    Args:
        bias: the leading sides of a bias on keys; None for none. Some keys are hidden where `hides`.
        positions: batch of the positions, 0 for none.
        is_strided: tokens stand before heads in memory.
    """

    plan: Make
    batch: int = 1
    heads: int = 2
    groups: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    bias: tuple[int, ...] | None = None
    hides: bool = False
    positions: int = 0
    scale: float | None = None
    is_strided: bool = False
    cotangents: str = "both"
    devices: tuple[str, ...] = DEVICES

    def run(self, ground: Ground) -> Results:
        plan = self.plan(ground)
        sizes = {"batch": self.batch, "heads": self.heads, "groups": self.groups, "dim": self.dim}
        tensors = ground.qkv(plan.num_queries, plan.num_keys, **sizes, dtype=self.dtype)
        if self.is_strided:
            tensors = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
        leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
        if self.bias is not None:
            leaves["key bias"] = bias_of(ground, self.bias, plan.num_keys, self.hides)
        positions = positions_of(ground, self.positions, plan)

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None):
            options = {"key_bias": bias, "positions": positions, "scale": self.scale, "impl": ground.impl}
            return names.attend(query, key, value, plan, **options)

        return differentiated(attend, leaves, ground, self.cotangents)


def bias_of(ground: Ground, sides: tuple[int, ...], keys: int, hides: bool = False, seed: int = 20) -> Tensor:
    bias = ground.normal(*sides, keys, seed=seed)
    return bias.masked_fill(ground.share(*sides, keys, seed=seed + 1, below=0.3), -INF) if hides else bias


def positions_of(ground: Ground, batch: int, plan: Plan):
    if not batch:
        return None
    last = max(plan.num_queries, plan.num_keys)
    query = ground.integers(batch, plan.num_queries, seed=22, below=last)
    return names.Positions(query, ground.integers(batch, plan.num_keys, seed=23, below=last))


ATTEND: dict[str, Attend] = {
    # every builder, odd lengths
    "full odd": Attend(full(77, 93, q_block=32, k_block=16)),
    "full default": Attend(full(150)),
    "full one": Attend(full(1, 1, q_block=16, k_block=16)),
    "ring": Attend(ring(100, 24, shift=5, ring=(7, 100), both=[(0, 7)], q_block=16, k_block=8)),
    "ring keys": Attend(ring(61, 20, ring=(0, 60), keys=[(59, 80)], num_keys=80, q_block=32, k_block=4)),
    "spans": Attend(spans(16, 8, 70, 85)),
    "mask": Attend(mask(32, 16, 90, 75)),
    "mask loose": Attend(mask(32, 16, 90, 75, compact=False)),
    "mask lists": Attend(mask(16, 16, 50, 70, (2, 4)), batch=2, heads=4, groups=2),
    "mask heads": Attend(mask(16, 16, 50, 70, (4,)), batch=2, heads=4, groups=4),
    "mask empty": Attend(mask(16, 16, 70, 50, has_empty=True)),
    "topk": Attend(topk(3, 16, 8, 70, 90)),
    "topk holes": Attend(topk(4, 16, 16, 70, 90, has_holes=True)),
    "key lists": Attend(key_lists(9, 16, 1, 50, 70)),
    "key lists full": Attend(key_lists(6, 32, 8, 50, 70, is_ragged=False, check=False)),
    # grains
    **{f"grain {grain}": Attend(mask(32, grain, 65, 130)) for grain in (1, 2, 4, 8, 16, 32, 64, 128)},
    **{f"rows {block}": Attend(mask(block, 16, 130, 65)) for block in (4, 8, 64, 128)},
    "rows 1": Attend(mask(1, 16, 40, 65)),
    # heads, channels, memory
    "shared keys": Attend(mask(32, 16, 60, 70), batch=2, heads=4, groups=1),
    "shared lists": Attend(mask(32, 16, 60, 70, (2, 1)), batch=2, heads=4, groups=2),
    "8 channels": Attend(mask(16, 16, 40, 40), dim=8),
    "64 channels": Attend(mask(32, 32, 70, 70), dim=64),
    "80 channels": Attend(mask(32, 32, 70, 70), dim=80),
    "128 channels": Attend(mask(64, 64, 100, 100), dim=128),
    "strided": Attend(mask(32, 16, 60, 70), batch=2, is_strided=True),
    # bias, positions, scale
    "bias": Attend(mask(32, 16, 60, 70), batch=2, bias=()),
    "bias batch": Attend(mask(32, 16, 60, 70), batch=2, bias=(2, 1)),
    "bias heads hides": Attend(mask(16, 4, 60, 70), batch=2, bias=(2, 2), hides=True),
    "positions": Attend(mask(32, 32, 50, 70, share=0.7), positions=1),
    "positions batch bias": Attend(mask(32, 32, 50, 70, share=0.7), batch=2, positions=2, bias=(2, 1)),
    "scale": Attend(mask(32, 16, 60, 70), scale=0.6),
    "scale negative": Attend(mask(32, 16, 60, 70), scale=-0.3),
    # cotangents
    "out alone": Attend(mask(32, 16, 60, 70), batch=2, bias=(2, 1), cotangents="out"),
    "lse alone": Attend(mask(32, 16, 60, 70), batch=2, bias=(2, 1), cotangents="lse"),
    "lse alone empty": Attend(mask(16, 16, 70, 50, has_empty=True), cotangents="lse"),
    # types
    "half": Attend(mask(32, 16, 60, 70), dtype=HALF, batch=2, bias=(2, 1)),
    "half 64": Attend(mask(64, 64, 150, 170), dtype=HALF, dim=64, groups=1),
    "brain": Attend(mask(32, 16, 60, 70), dtype=BRAIN, devices=NOT_INTERPRETED),
    "brain 64": Attend(mask(64, 64, 192, 170), dtype=BRAIN, dim=64, devices=NOT_INTERPRETED),
    "brain 128": Attend(
        mask(128, 64, 320, 256), dtype=BRAIN, dim=128, batch=2, heads=4, devices=NOT_INTERPRETED
    ),
    "double": Attend(mask(32, 16, 60, 70), dtype=DOUBLE, batch=2, bias=(2, 1), devices=("cpu",)),
    "double ring": Attend(
        ring(100, 24, shift=5, ring=(7, 100), both=[(0, 7)], q_block=16, k_block=8),
        dtype=DOUBLE,
        devices=("cpu",),
    ),
}


# -- several parts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One part of several."""

    plan: Make
    bias: tuple[int, ...] | None = None
    positions: int = 0
    are_rows_alike: bool = False


@dataclass(frozen=True)
class Parts:
    """One call of `attend` with several parts; they have as many queries."""

    sides: tuple[Side, ...]
    batch: int = 1
    heads: int = 2
    groups: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    cotangents: str = "both"
    devices: tuple[str, ...] = DEVICES

    def run(self, ground: Ground) -> Results:
        plans = [side.plan(ground) for side in self.sides]
        sizes = {"batch": self.batch, "heads": self.heads, "groups": self.groups, "dim": self.dim}
        leaves: dict[str, Tensor] = {}
        positions = [
            positions_of(ground, side.positions, plan) for side, plan in zip(self.sides, plans, strict=True)
        ]
        for number, (side, plan) in enumerate(zip(self.sides, plans, strict=True)):
            made = ground.qkv(
                plan.num_queries, plan.num_keys, **sizes, dtype=self.dtype, seed=1 + 10 * number
            )
            leaves.setdefault("query", made[0])
            leaves |= {f"key {number}": made[1], f"value {number}": made[2]}
            if side.bias is not None:
                leaves[f"bias {number}"] = bias_of(ground, side.bias, plan.num_keys, seed=30 + number)

        def attend(*tensors: Tensor):
            given = dict(zip(leaves, tensors, strict=True))
            parts = [
                KeyValuePart(
                    given[f"key {number}"],
                    given[f"value {number}"],
                    plan,
                    given.get(f"bias {number}"),
                    positions[number],
                    side.are_rows_alike,
                )
                for number, (side, plan) in enumerate(zip(self.sides, plans, strict=True))
            ]
            return names.attend_parts(given["query"], parts, scale=self.scale, impl=ground.impl)

        return differentiated(attend, leaves, ground, self.cotangents)

    @property
    def apart(self) -> Callable[[str, str], bool]:
        return joint if any(side.positions for side in self.sides) else plain


NEAR = Side(mask(16, 16, 70, 70, share=0.3))
FAR = Side(mask(16, 1, 70, 19, share=0.5), bias=(), are_rows_alike=True)
THIRD = Side(mask(32, 8, 70, 33))

PARTS: dict[str, Parts] = {
    "two": Parts((NEAR, FAR)),
    "two heads": Parts((NEAR, FAR), batch=2, heads=4, groups=2),
    "two out alone": Parts((NEAR, FAR), cotangents="out"),
    "two scale": Parts((NEAR, FAR), scale=-0.2),
    "three": Parts((NEAR, FAR, THIRD)),
    "one": Parts((NEAR,)),
    "empty in both": Parts((Side(mask(16, 16, 70, 50, has_empty=True)),) * 2),
    "empty in one": Parts((Side(mask(16, 16, 70, 50, has_empty=True)), NEAR), cotangents="lse"),
    "positions": Parts((Side(mask(32, 32, 50, 70), positions=1), Side(full(50, 30)))),
    "half": Parts((NEAR, FAR), dtype=HALF, dim=32),
    "half 64": Parts(
        (Side(mask(64, 64, 200, 200)), Side(mask(64, 1, 200, 40), (), 0, True)),
        dtype=HALF,
        dim=64,
    ),
    "brain 64": Parts(
        (Side(mask(64, 64, 200, 200)), Side(mask(64, 1, 200, 40), (), 0, True)),
        dtype=BRAIN,
        dim=64,
        devices=NOT_INTERPRETED,
    ),
    "double": Parts((NEAR, FAR), dtype=DOUBLE, devices=("cpu",)),
}


# -- merged results, and what is derived from a plan -------------------------------------------------------------------


def merged(ground: Ground) -> Results:
    """Two results over different keys, merged, and differentiated through both."""
    plans = [make(ground) for make in (mask(16, 16, 70, 50, has_empty=True), mask(32, 8, 70, 33))]
    query, *first = ground.qkv(70, 50)
    _, *second = ground.qkv(70, 33, seed=9)

    def attend(query: Tensor, *tensors: Tensor):
        found = [
            names.attend(query, *tensors[2 * part : 2 * part + 2], plan, impl=ground.impl)
            for part, plan in enumerate(plans)
        ]
        return names.merge(*found)

    named = ("query", "key 0", "value 0", "key 1", "value 1")
    return differentiated(attend, dict(zip(named, (query, *first, *second), strict=True)), ground)


PLANS: dict[str, Make] = {name: call.plan for name, call in ATTEND.items() if call.dtype == torch.float32}
PLANS["single keys"] = mask(16, 1, 70, 150, (2, 3))


def derived(make: Make, ground: Ground) -> Results:
    """The lists, and all that follows from them. What stands behind the last list is not looked at."""
    plan = make(ground)
    found = dict[str, object]()
    for side, lists in (("", plan), ("transposed ", names.transpose(plan))):
        used = torch.arange(lists.blocks.shape[-1], device=ground.device) < lists.offsets[..., -1:]
        found |= {f"{side}offsets": lists.offsets, f"{side}blocks": lists.blocks.masked_fill(~used, -1)}
        own, heads = lists.blocks.shape[:2]
        for batch, number in ((own, heads), (max(2, own), 2 * heads)):
            found[f"{side}order {batch} {number}"] = names.start_order(lists, batch, number)
    found |= {
        "sizes": (plan.q_block, plan.k_block, plan.num_queries, plan.num_keys, plan.uniform),
        "pairs": (plan.num_pairs, plan.density, plan.num_rows, plan.num_columns),
        "counts": plan.counts,
        "block counts": plan.block_counts(),
        "pair counts": plan.pair_counts(),
        "mask": plan.to_mask(),
    }
    if plan.k_block == 1:
        offsets, boxes = names.boxes(plan)
        found |= {"box offsets": offsets, "boxes": boxes[..., : int(offsets[..., -1].max())]}
    return found


for _name, _call in ATTEND.items():
    case(f"attend/{_name}", _call.run, devices=_call.devices, every_impl=True)
for _name, _parts in PARTS.items():
    case(f"parts/{_name}", _parts.run, devices=_parts.devices, every_impl=True, apart=_parts.apart)
case("merge", merged, every_impl=True)
for _name, _make in PLANS.items():
    case(f"plan/{_name}", partial(derived, _make), devices=NOT_INTERPRETED)
