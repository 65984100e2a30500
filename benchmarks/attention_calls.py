"""What is timed of an attention call, and what its answer is judged by."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import layouts, special
from benchmarks.cases import Case
from benchmarks.dense import random_inputs
from nearfield import Geometry, Method, Plan, explain_choice
from nearfield.cli.check import Checked, Inputs, check_backward, check_forward, poisoned_memory
from nearfield.cli.presets import PRESETS, Preset
from nearfield.cli.timing import Function
from nearfield.methods import PlanLayer, SelectLayer
from nearfield.ops import attend

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
_TILES = 16


@dataclass(frozen=True)
class Work:
    """One thing that is timed.

    Args:
        judged: runs it, and says whether it was right.
        kept: the share of all pairs that it reads.
        direction: which dense call it stands for.
        parts: of what it consists, or needs.
        in_graph: whether it never waits for the device, so that it can be captured.
        plan: where it says all that is read.
        facts: for its record.
        by_graph: whether the time of the graph counts, where there is one: for many small kernels that the processor
            takes longer to launch than the GPU to run.
    """

    run: Function
    judged: Callable[[], Checked]
    kept: float
    direction: str = FORWARD
    parts: Mapping[str, Function] = field(default_factory=dict)
    in_graph: bool = False
    plan: Plan | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    by_graph: bool = False


class Call:
    """The tensors of a case."""

    def __init__(self, case: Case, device: torch.device, impl: Any) -> None:
        self.case, self.on, self.device, self.impl = case, case.on, device, impl
        self.preset = preset_of(case)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.geometry = Geometry(self.preset.grid, text=self.preset.text)
        self.method: Method | None = case.made() if case.method else None

    @cached_property
    def inputs(self) -> Inputs:
        return random_inputs(self.preset, self.device, self.dtype)

    @cached_property
    def alike(self) -> Inputs:
        """Tensors whose neighbours are alike, as in a picture: of pure noise every key would be worth the same."""
        batch, heads, tokens, dim = self.preset.shape
        generator = torch.Generator(self.device).manual_seed(0)
        shapes = ((3, batch, heads, count, dim) for count in (-(-tokens // 64), tokens))
        rough, fine = (torch.randn(shape, generator=generator, device=self.device) for shape in shapes)
        made = (rough.repeat_interleave(64, 3)[:, :, :, :tokens] + fine).to(self.dtype)
        return made[0], made[1], made[2]

    @cached_property
    def grad_out(self) -> Tensor:
        return random_inputs(self.preset, self.device, self.dtype, seed=1)[0]

    def gradients(self, attention: Callable[..., Tensor], inputs: Inputs) -> Callable[[], Inputs]:
        """A function that differentiates one forward call again and again."""
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        out = attention(*leaves)

        def backward() -> Inputs:
            query, key, value = torch.autograd.grad(out, leaves, self.grad_out, retain_graph=True)
            return query, key, value

        return backward

    def differentiated(self, attention: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
        """One forward call and its backward."""
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(attention(*leaves), leaves, self.grad_out)

    def works(self) -> dict[str, Work]:
        """What is timed, by name."""
        if self.method is None:
            return dict(plan_works(self))
        if works := special.of(self.case.method).works:
            return dict(works(self, self.method))
        return {FORWARD: method_work(self, self.method)}

    @property
    def tensors(self) -> Inputs:
        """What its works are called with."""
        chooses = self.method is not None and not self.method.can_split
        return self.alike if chooses else self.inputs


def preset_of(case: Case) -> Preset:
    """The tensors of a case: a preset by name, or sizes."""
    given = case.on["preset"]
    if isinstance(given, str):
        if given not in PRESETS:
            raise ValueError(f"`preset` must be one of {', '.join(PRESETS)}; got {given!r}.")
        return PRESETS[given]
    return Preset(case.name, **{"kept": 0.25, **given, "grid": tuple(given["grid"])})


def line(batch: int, heads: int, tokens: int, head_dim: int) -> dict[str, Any]:
    """Sizes of tensors whose tokens stand in one line, as `preset_of` takes them."""
    return {"batch": batch, "heads": heads, "head_dim": head_dim, "grid": [tokens], "text": 0}


# -- a plan ------------------------------------------------------------------------------------------------------------


def plan_works(call: Call) -> Iterator[tuple[str, Work]]:
    """A plan that is given: forward, or the backward alone."""
    plan, backward = made_plan(call), bool(call.on["backward"])
    ran = explain_choice(*call.inputs[:2], plan, backward=backward, impl=call.impl).impl
    if backward and ran == "gluon":
        ran = "triton"  # whose kernels are the backward of gluon too
    facts = {"q_block": plan.q_block, "k_block": plan.k_block, "impl": ran}
    if not backward:
        run = partial(attend, *call.inputs, plan, impl=call.impl)
        parts = _row_parts(call, plan) if call.on["plan"] == "ragged" else {}
        yield (
            FORWARD,
            Work(run, partial(judge, call, run, plan), plan.density, FORWARD, parts, True, plan, facts),
        )
        return
    with poisoned_memory():
        gradients = call.gradients(lambda q, k, v: attend(q, k, v, plan, impl=call.impl).out, call.inputs)

    def judged() -> Checked:
        with poisoned_memory():
            found = gradients()
        return check_backward(call.inputs, plan, call.grad_out, found)

    yield BACKWARD, Work(gradients, judged, plan.density, BACKWARD, plan=plan, facts=facts)


def made_plan(call: Call) -> Plan:
    kind, grain, preset = call.on["plan"], call.on["grain"], call.preset
    if kind == "random":
        q_block = call.on["q_block"] or preset.queries_per_list(grain)
        return layouts.random_lists(preset, grain, q_block, call.device)
    if kind not in ("tiles", "ragged"):
        raise ValueError(
            f"`plan` must be one of random, tiles, ragged where there is no method; got {kind!r}."
        )
    blocks = {"q_block": call.on["q_block"] or 128, "k_block": grain}
    return layouts.tiles(preset, _TILES, centre=True, **blocks, device=call.device)


def judge(call: Call, run: Function, plan: Plan, rows: tuple[int, ...] = (), **far: Any) -> Checked:
    with poisoned_memory():
        found: Any = run()
    return check_forward(call.tensors, plan, *found, rows=rows, **far)


def _row_parts(call: Call, plan: Plan) -> dict[str, Function]:
    """Rows that read everything and rows that read little, each as a call of its own."""
    full = int((plan.counts[0, 0] == plan.num_columns).sum())
    ends = {"rows that read all": (0, full), "rows that read tiles": (full, plan.num_rows)}
    query, key, value = call.inputs
    parts: dict[str, Function] = {}
    for name, (start, stop) in ends.items():
        part = layouts.rows_of(plan, start, stop)
        rows = query[:, :, start * plan.q_block : start * plan.q_block + part.num_queries]
        parts[name] = partial(attend, rows, key, value, part, impl=call.impl)
    return parts


# -- methods -----------------------------------------------------------------------------------------------------------


def method_work(call: Call, method: Method) -> Work:
    """A layer of a method that knows who reads whom, or whose choice can be asked for."""
    blocks = {name: call.on[name] for name in ("q_block", "k_block") if call.on[name] is not None}
    maker: Any = method.layer
    layer = maker(call.geometry, call.on["layer"], heads=call.preset.heads, device=call.device, **blocks)
    run = partial(layer.attend, *call.tensors, impl=call.impl)
    ordering = method.ordering(call.geometry, device=call.device)
    width = call.preset.heads * call.preset.head_dim
    states = torch.randn(call.preset.batch, len(ordering), width, device=call.device, dtype=call.dtype)
    moved = {"reordering": lambda: ordering.leave(ordering.enter(states))}
    if isinstance(layer, SelectLayer):
        keep = layer.choose(*call.tensors, impl=call.impl).keep
        plan = layer.blocks.plan(keep, compact=False)
        sizes = {"q_block": plan.q_block, "k_block": plan.k_block}
        return Work(run, partial(judge, call, run, plan), plan.density, parts=moved, facts=sizes)
    if not isinstance(layer, PlanLayer):
        raise NotImplementedError(f"nothing here can judge what {type(method).__name__} chooses")
    kept = layer.num_pairs / call.geometry.num_tokens**2
    facts: dict[str, Any] = {
        "q_block": layer.near.q_block,
        "k_block": layer.near.k_block,
        "impl": _implementations(call, layer),
    }
    rows = _rows_of_every_kind(method, call, layer.near)
    judged = partial(judge, call, run, layer.near, rows, far=layer.far, summary=layer.summary)
    only = layer.near if layer.far is None else None
    return Work(run, judged, kept, parts=moved, in_graph=True, plan=only, facts=facts)


def _rows_of_every_kind(method: Method, call: Call, near: Plan) -> tuple[int, ...]:
    """The first row of the text, of the shared tokens, and of the rest."""
    shared = getattr(method, "shared_tokens", None) or 0
    firsts = (call.preset.text, call.preset.text + shared)
    return tuple(min(first // near.q_block, near.num_rows - 1) for first in firsts)


def _implementations(call: Call, layer: PlanLayer) -> str:
    """What runs it; the far field may be a call of its own, and run by another."""
    query, key, _ = call.tensors
    names = [explain_choice(query, key, layer.near, impl=call.impl).impl]
    if layer.far is not None:
        bias = layer.far.bias.expand(*key.shape[:2], -1)
        pooled = layer.far.pooled(key)
        names.append(explain_choice(query, pooled, layer.far.plan, key_bias=bias, impl=call.impl).impl)
    return " + ".join(dict.fromkeys(names))
