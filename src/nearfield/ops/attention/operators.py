"""Attention as an operation: which implementation reads and differentiates, and how a call crosses an operator."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Attended, Impl, Positions
from nearfield.ops._op import Gradient, Operation
from nearfield.ops.attention.dispatch import explain_choice, implementation
from nearfield.ops.attention.parts import KeyValuePart, PartGradients, merge_attended
from nearfield.ops.lists import crossing
from nearfield.plan import Plan

MOST_PARTS = 3
"""An operator has at most 64 arguments, which three parts nearly fill. Longer calls are several, merged."""


class Pooling(NamedTuple):
    """The keys and values of the second of two parts are means of those of the first.

    Args:
        block: tokens of the level below that each is the mean of.
        levels: how many levels there are; `layout/levels.py` says how they lie.
    """

    block: int
    levels: int


def lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def check_sizes(plan: Plan, query: Tensor, key: Tensor) -> None:
    if tuple(plan.extent.shape[:2]) != (query.shape[2], key.shape[2]):
        sizes = f"{query.shape[2]} queries and {key.shape[2]} keys"
        wrong_value("plan", f"be made for {sizes}", f"{plan.extent.shape[0]} and {plan.extent.shape[1]}")


# -- what an operator does -----------------------------------------------------------------------------------------


def read(query: Tensor, parts: Sequence[KeyValuePart], scale: float, impl: Impl) -> Attended:
    """What the queries read in all parts, by whatever implementation suits these tensors."""
    with _undisturbed(query):
        choices = [_chosen(query, part, impl) for part in parts]
        if len(parts) == 1:
            attended: Attended = implementation(choices[0]).attend_forward(query, parts[0], scale)
            return attended
        for name in _at_once(parts, choices):
            read_all: Attended | None = implementation(name).attend_parts_forward(query, parts, scale)
            if read_all is not None:
                return read_all
        return _read_in_turn(query, parts, choices, scale)


def _chosen(query: Tensor, part: KeyValuePart, impl: Impl, backward: bool = False) -> str:
    key, _, plan, bias, positions = part
    choice = explain_choice(
        query, key, plan, key_bias=bias, positions=positions, backward=backward, impl=impl
    )
    return choice.impl


_AT_ONCE = {"gluon": ("gluon", "triton"), "triton": ("triton",), "grouped": ("grouped",), "reference": ()}
"""What may read several parts in one pass, where one implementation was chosen for all. The plain kernels can read
whatever the others on a GPU can."""


def _at_once(parts: Sequence[KeyValuePart], choices: Sequence[str]) -> Sequence[str]:
    """Which implementations to ask to read all parts in one pass."""
    if any(part.positions is not None for part in parts):
        return ()
    return _AT_ONCE[choices[0]] if len(set(choices)) == 1 else ("triton",)


def _read_in_turn(
    query: Tensor, parts: Sequence[KeyValuePart], choices: Sequence[str], scale: float
) -> Attended:
    """One part after another. The plain kernel continues what was read before it, so it comes last, which saves the
    merging."""
    attended: Attended | None = None
    for name, part in sorted(zip(choices, parts, strict=True), key=lambda choice: choice[0] == "triton"):
        forward = implementation(name).attend_forward
        if attended is None:
            attended = forward(query, part, scale)
        elif name == "triton":
            attended = forward(query, part, scale, before=attended)
        else:
            attended = merge_attended(attended, forward(query, part, scale))
    assert attended is not None
    return attended


def read_continued(
    query: Tensor,
    part: KeyValuePart,
    more: tuple[Tensor, Tensor],
    scale: float,
    impl: Impl,
) -> Attended | None:
    """The forward over keys in two places; None where no kernel can. No operator: nothing traces what calls it."""
    key, value, plan, *_ = part
    is_same = all(x.dtype == query.dtype and x.device == query.device for x in (key, value, *more))
    if impl not in ("auto", "gluon") or not query.is_cuda or not is_same:
        return None
    if (plan.num_queries, plan.num_keys) != (query.shape[2], key.shape[2] + more[0].shape[2]):
        sizes = f"{query.shape[2]} queries and {key.shape[2]} + {more[0].shape[2]} keys"
        wrong_value("plan", f"be made for {sizes}", f"{plan.num_queries} and {plan.num_keys}")
    if _chosen(query, part, impl) != "gluon":
        return None
    module = implementation("gluon")
    if not module.can_continue(key, more, plan):
        return None
    with _undisturbed(query):
        attended: Attended = module.attend_forward(query, part, scale, more=more)
    return attended


def differentiate(
    grads: Attended,
    query: Tensor,
    parts: Sequence[KeyValuePart],
    attended: Attended,
    scale: float,
    impl: Impl,
    learned: Sequence[bool],
    pooling: Pooling | None = None,
) -> PartGradients:
    """The gradients of `read`.

    Args:
        grads: of what it gave.
        attended: what it gave.
        learned: for each part, whether the gradient of its bias is wanted.
        pooling: where the second part is pooled from the first. An implementation may then add the gradients of the
            means to those of the first part, and give None for the means.
    """
    (name,) = {_chosen(query, part, impl, backward=True) for part in parts}
    with _undisturbed(query):
        found: PartGradients = implementation(name).attend_backward(
            grads, query, parts, attended, scale, learned, pooling
        )
    return found


@contextmanager
def _undisturbed(query: Tensor) -> Iterator[None]:
    """On the GPU of the tensors, whichever is current, and in the precision they came in, whatever autocast says."""
    kind = query.device.type
    autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    with torch.cuda.device_of(query), autocast:
        yield


# -- how a call crosses --------------------------------------------------------------------------------------------

_PART = (
    *(("Tensor", "key"), ("Tensor", "value"), ("Tensor?", "key_bias")),
    *(("Tensor?", "query_positions"), ("Tensor?", "key_positions")),
    *crossing.SLOTS,
)
_CALL = "float scale, str impl"


def _schema(num_parts: int, before: str = "", after: str = "") -> str:
    of_parts = [f"{kind} {name}_{number}" for number in range(num_parts) for kind, name in _PART]
    return ", ".join(each for each in (before, "Tensor query", *of_parts, _CALL, after) if each)


def flatten(query: Tensor, parts: Sequence[KeyValuePart], scale: float, impl: Impl) -> tuple[Any, ...]:
    """A call as tensors and numbers, as `_schema` lists them."""
    batch, heads = query.shape[:2]
    by_kernels = query.is_cuda and impl not in ("grouped", "reference")
    flat: list[Any] = [query]
    for key, value, plan, bias, positions in parts:
        differentiated = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (query, key, value, bias)
        )
        flat += (key, value, bias, *(positions or (None, None)))
        flat += crossing.flatten(
            plan, batch, heads, key.shape[1], by_kernels=by_kernels, differentiated=differentiated
        )
    return *flat, scale, impl


def restore(*flat: Any) -> tuple[Tensor, list[KeyValuePart], float, Impl]:
    """The call that `flatten` was given."""
    query, *others, scale, impl = flat
    batch, heads = query.shape[:2]
    slots, parts = iter(others), []
    for _ in range(len(others) // len(_PART)):
        key, value, bias, *places = (next(slots) for _ in range(5))
        plan = crossing.restore(slots, batch, heads, key.shape[1])
        check_sizes(plan, query, key)
        parts.append(KeyValuePart(key, value, plan, bias, None if places[0] is None else Positions(*places)))
    return query, parts, scale, impl


def leaves(query: Tensor, parts: Sequence[KeyValuePart]) -> list[Tensor | None]:
    """The tensors of a call that may have gradients."""
    return [query, *(x for part in parts for x in (part.key, part.value, part.key_bias))]


def _places(num_parts: int) -> tuple[int, ...]:
    """Where `leaves` stand in the flat call."""
    return 0, *(1 + number * len(_PART) + slot for number in range(num_parts) for slot in range(3))


def shapes(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """What reading gives, without data."""
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=lse_dtype(query))


def attention(
    name: str,
    num_parts: int,
    forward: Any,
    backward: Any,
    after: str = "",
    held: Sequence[int] = (),
) -> Operation:
    """An operation that reads parts.

    Args:
        forward: takes what `restore` gives, and what the operator is given after that.
        backward: takes gradients, what the call gave, for each part whether its bias is learned, the call, and what the
            operator is given after it.
        after: the schema of that.
        held: which of `leaves` have no gradient of their own, because that of another holds it.
    """
    num_more = after.count(",") + 1 if after else 0

    def call_of(*flat: Any) -> tuple[Any, ...]:
        split = len(flat) - num_more
        return *restore(*flat[:split]), *flat[split:]

    def differentiated(
        wanted: list[bool], grad_out: Tensor, grad_lse: Tensor, *saved: Any
    ) -> tuple[Tensor, ...]:
        *flat, out, lse = saved
        call = call_of(*flat)
        biases = [part.key_bias is not None for part in call[1]]
        learned = [has_bias and wish for has_bias, wish in zip(biases, wanted[3::3], strict=True)]
        found = backward(Attended(grad_out, grad_lse), Attended(out, lse), learned, *call)
        # Some implementations give the gradient of every bias; the shapes below promise only those that are learned.
        of_parts = (
            (key, value, bias if wish else None)
            for (key, value, bias), wish in zip(found.parts, learned, strict=True)
        )
        every = (found.query, *(x for part in of_parts for x in part))
        return tuple(lse.new_empty(0) if x is None else x for x in every)  # outputs share no memory

    def gradient_shapes(
        wanted: list[bool], grad_out: Tensor, grad_lse: Tensor, *saved: Any
    ) -> tuple[Tensor, ...]:
        lse, found = saved[-1], []
        for number, place in enumerate(_places(num_parts)):
            x, is_bias = saved[place], number > 0 and number % 3 == 0
            if x is None or number in held or (is_bias and not wanted[number]):
                found.append(lse.new_empty(0))
            else:
                found.append(lse.new_empty(x.shape) if is_bias else torch.empty_like(x))
        return tuple(found)

    grads = "bool[] wanted, Tensor grad_out, Tensor grad_lse"
    results = ", ".join(["Tensor"] * (1 + 3 * num_parts))
    of_backward = Operation(
        f"{name}_backward",
        differentiated,
        gradient_shapes,
        schema=f"({_schema(num_parts, grads, f'{after}, Tensor out, Tensor lse'.removeprefix(', '))}) -> ({results})",
    )

    def gradients(wanted: list[bool], *call: Any) -> list[Tensor | None]:
        found = of_backward(wanted, *call)
        return [x if wish and x.dim() > 1 else None for x, wish in zip(found, wanted, strict=True)]

    def flattened(*call: Any) -> tuple[Any, ...]:
        split = len(call) - num_more
        return *flatten(*call[:split]), *call[split:]

    return Operation(
        name,
        forward,
        shapes,
        gradient=Gradient(of=_places(num_parts), backward=gradients, chooses=True),
        flatten=flattened,
        restore=call_of,
        schema=f"({_schema(num_parts, after=after)}) -> (Tensor, Tensor)",
    )


def _backward(
    grads: Attended,
    attended: Attended,
    learned: Sequence[bool],
    query: Tensor,
    parts: Sequence[KeyValuePart],
    scale: float,
    impl: Impl,
) -> PartGradients:
    return differentiate(grads, query, parts, attended, scale, impl, learned)


OPERATIONS = tuple(
    attention("attend" if number == 1 else f"attend_{number}_parts", number, read, _backward)
    for number in range(1, MOST_PARTS + 1)
)
