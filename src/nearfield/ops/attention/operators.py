"""The operators behind `attend`: opaque to torch.compile, differentiable, with fakes that know shapes and strides.

They take tensors and numbers only, so a plan crosses as its lists (`all_lists`) and is put together again inside, where
an implementation is chosen for the real tensors.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nearfield._checks import wrong_value
from nearfield._types import Attended, Gradients, Impl, Positions
from nearfield.ops import _triton as kernels
from nearfield.ops._op import dispatch, node
from nearfield.ops.attention.dispatch import explain_choice, implementation
from nearfield.plan import Boxes, KnownPart, Packed, Packing, Plan


def lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def check_sizes(extent: Tensor, query: Tensor, key: Tensor) -> None:
    if extent.shape[:2] != (query.shape[2], key.shape[2]):
        sizes = f"{query.shape[2]} queries and {key.shape[2]} keys"
        wrong_value("plan", f"be made for {sizes}", f"{extent.shape[0]} and {extent.shape[1]}")


def all_lists(
    plan: Plan, query: Tensor, key: Tensor, wants_gradient: bool, impl: str
) -> tuple[Tensor | None, ...]:
    """A plan as it crosses an operator: lists and starting order, its own and its transpose's."""
    runs_kernels = query.is_cuda and impl not in ("grouped", "reference")
    transposed = _transposed(plan, runs_kernels) if wants_gradient else None
    order, transposed_order = None, None
    if runs_kernels:
        batch, heads = query.shape[:2]
        order = plan.longest_first(batch, heads)
        transposed_order = transposed.longest_first(batch, key.shape[1]) if transposed else None
    lists = transposed.offsets if transposed else None, transposed.blocks if transposed else None
    return plan.offsets, plan.blocks, order, *lists, transposed_order


def _transposed(plan: Plan, runs_kernels: bool) -> Plan:
    """`plan.transpose()`, in fewer launches where kernels run."""
    if not runs_kernels:
        return plan.transpose()

    def make() -> Plan:
        offsets, blocks = torch.ops.nearfield.transpose(
            plan.offsets, plan.blocks, plan._extent, plan.q_block, plan.k_block
        )
        sizes = plan.k_block, plan.q_block, plan.num_keys, plan.num_queries
        return Plan(offsets, blocks, *sizes, check=False)

    return plan._derive("transpose", make)


@torch.library.custom_op("nearfield::transpose", mutates_args=())
def _transpose(
    offsets: Tensor, blocks: Tensor, extent: Tensor, q_block: int, k_block: int
) -> tuple[Tensor, Tensor]:
    plan = Plan(offsets, blocks, q_block, k_block, extent.shape[0], extent.shape[1], check=False)
    module = kernels.helper("transpose", plan.blocks)
    if module is None:
        transposed = plan.transpose()
        return transposed.offsets, transposed.blocks
    with torch.cuda.device_of(blocks):
        found: tuple[Tensor, Tensor] = module.transpose(plan.offsets, plan.blocks, plan.num_columns)
    return found


@_transpose.register_fake
def _(offsets: Tensor, blocks: Tensor, extent: Tensor, q_block: int, k_block: int) -> tuple[Tensor, Tensor]:
    columns = -(-extent.shape[1] // k_block)
    return offsets.new_empty(*offsets.shape[:2], columns + 1), torch.empty_like(blocks)


def _rebuilt_plan(
    query: Tensor,
    key: Tensor,
    lists: tuple[Tensor, Tensor],
    order: Tensor | None,
    transposed_lists: Sequence[Tensor | None],
    q_block: int,
    k_block: int,
) -> Plan:
    """The plan on the inner side of the operator, with what was already derived from it outside.

    Rows that came without an order need none.
    """
    batch, heads, num_queries = query.shape[:3]
    num_keys = key.shape[2]
    plan = Plan._of_known(*lists, q_block, k_block, num_queries, num_keys, uniform=order is None)
    if order is not None:
        plan._derived["order", batch, heads] = order
    offsets, blocks, key_order = transposed_lists
    if offsets is not None and blocks is not None:
        transposed = Plan._of_known(offsets, blocks, k_block, q_block, num_keys, num_queries)
        transposed._derived["order", batch, key.shape[1]] = key_order
        plan._derived["transpose"] = transposed
    return plan


@contextmanager
def _undisturbed(query: Tensor) -> Iterator[None]:
    """On the GPU of the tensors, whichever is current, and in the precision they came in, whatever autocast says."""
    kind = query.device.type
    autocast = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    with torch.cuda.device_of(query), autocast:
        yield


def _paired(query_positions: Tensor | None, key_positions: Tensor | None) -> Positions | None:
    if query_positions is None or key_positions is None:
        return None
    return Positions(query_positions, key_positions)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    blocks: Tensor,
    order: Tensor | None,
    transposed_offsets: Tensor | None,
    transposed_blocks: Tensor | None,
    transposed_order: Tensor | None,
    key_bias: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    extent: Tensor,
    q_block: int,
    k_block: int,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    check_sizes(extent, query, key)
    plan = _rebuilt_plan(query, key, (offsets, blocks), order, (None, None, None), q_block, k_block)
    positions = _paired(query_positions, key_positions)
    attended = read(query, KeyValuePart(key, value, plan, key_bias, positions), scale, cast(Impl, impl))
    return attended.out, attended.lse


def read(query: Tensor, part: "KeyValuePart", scale: float, impl: Impl) -> Attended:
    """What the operator does: the forward by the implementation that is chosen for these tensors."""
    key, value, plan, key_bias, positions = part[:5]
    name = explain_choice(query, key, plan, key_bias=key_bias, positions=positions, impl=impl).impl
    with _undisturbed(query):
        attended: Attended = implementation(name).attend_forward(
            query, key, value, plan, key_bias, positions, scale
        )
    return attended


_attend_operator = torch.library.custom_op("nearfield::attend", _attend, mutates_args=())


@_attend_operator.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=lse_dtype(query))


def read_continued(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    more: tuple[Tensor, Tensor],
    plan: Plan,
    key_bias: Tensor | None,
    scale: float,
    impl: Impl,
) -> Attended | None:
    """The forward over keys in two places; None where no kernel can. No operator: nothing traces what calls it."""
    is_same = all(x.dtype == query.dtype and x.device == query.device for x in (key, value, *more))
    if impl not in ("auto", "gluon") or not query.is_cuda or not is_same:
        return None
    if (plan.num_queries, plan.num_keys) != (query.shape[2], key.shape[2] + more[0].shape[2]):
        sizes = f"{query.shape[2]} queries and {key.shape[2]} + {more[0].shape[2]} keys"
        wrong_value("plan", f"be made for {sizes}", f"{plan.num_queries} and {plan.num_keys}")
    if explain_choice(query, key, plan, key_bias=key_bias, impl=impl).impl != "gluon":
        return None
    module = implementation("gluon")
    if not module.can_continue(key, more, plan):
        return None
    with _undisturbed(query):
        attended: Attended = module.attend_forward(query, key, value, plan, key_bias, None, scale, more=more)
    return attended


def _attend_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets: Tensor,
    blocks: Tensor,
    order: Tensor | None,
    transposed_offsets: Tensor | None,
    transposed_blocks: Tensor | None,
    transposed_order: Tensor | None,
    key_bias: Tensor | None,
    query_positions: Tensor | None,
    key_positions: Tensor | None,
    extent: Tensor,
    q_block: int,
    k_block: int,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    transposed_lists = (transposed_offsets, transposed_blocks, transposed_order)
    plan = _rebuilt_plan(query, key, (offsets, blocks), order, transposed_lists, q_block, k_block)
    positions = _paired(query_positions, key_positions)
    choice = explain_choice(
        query, key, plan, key_bias=key_bias, positions=positions, backward=True, impl=cast(Impl, impl)
    )
    with _undisturbed(query):
        gradients: Gradients = implementation(choice.impl).attend_backward(
            grad_out, grad_lse, query, key, value, out, lse, plan, key_bias, positions, scale
        )
    bias_gradient = gradients.key_bias
    if bias_gradient is None:
        bias_gradient = lse.new_empty(0)
    return gradients.query, gradients.key, gradients.value, bias_gradient


_attend_backward_operator = torch.library.custom_op(
    "nearfield::attend_backward", _attend_backward, mutates_args=()
)


@_attend_backward_operator.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    key_bias = rest[6]
    shape = (*query.shape[:2], key.shape[2]) if key_bias is not None else (0,)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), lse.new_empty(shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:13], *output)
    ctx.statics = inputs[13:]


def _differentiate(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # which a checkpoint gives only once
    query, key, value, *lists_and_bias, out, lse = saved
    backward = dispatch(_attend_backward, torch.ops.nearfield.attend_backward, grad_out, grad_lse, *saved)
    *gradients, bias_gradient = backward(
        grad_out, grad_lse, query, key, value, out, lse, *lists_and_bias, *ctx.statics
    )
    has_bias = lists_and_bias[6] is not None
    return (*gradients, *[None] * 6, bias_gradient if has_bias else None, *[None] * (3 + len(ctx.statics)))


_attend_operator.register_autograd(_differentiate, setup_context=_save_for_backward)
attend_node = node(_attend, _save_for_backward, _differentiate)


# -- several parts -------------------------------------------------------------------------------------------------


def merge_attended(first: Attended, second: Attended) -> Attended:
    """What reading both key sets at once would have given: each part weighs as much as its `lse` says.

    The two must read different keys, else those in both count twice. Differentiable, except in rows that read nothing
    in either. The shares are rounded to the precision of the outputs: one pass over them, no wider copy.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    # Which part of the weights is the second's. Of two empty rows neither has any, and both give zeros.
    share = torch.sigmoid((second.lse - first.lse).masked_fill(lse == float("-inf"), 0))
    return Attended(torch.lerp(first.out, second.out, share.to(first.out.dtype).unsqueeze(-1)), lse)


class KeyValuePart(NamedTuple):
    """Keys and values beside others, and who reads them; see `attend` for each.

    Args:
        similar_rows: rows of the plan that are next to each other read much the same, and neighbouring keys are read by
            much the same rows. Kernels may then walk several at once, which is slower where it is not so; and
            what is not a number, or not finite, in what only one of them reads (or, in the backward, is read by)
            reaches the others, too.
        packed: the plan's lists as such kernels walk them, if they are known already.
    """

    key: Tensor
    value: Tensor
    plan: Plan
    key_bias: Tensor | None = None
    positions: Positions | None = None
    similar_rows: bool = False
    packed: Packed | None = None


PACKING = Packing(4, 4)
"""How the kernels that walk several rows at once want them merged; see `PAIR` in launch.py."""


class Pooling(NamedTuple):
    """That keys and values of a second part are means of those of the first, as `pool` of `ops/pool_select` makes them.

    Args:
        block: tokens of the level below that each is the mean of.
        levels: how many levels there are.
    """

    block: int
    levels: int


_LISTS = 10  # as `all_lists` gives them, boxes, and packed ones
_SIZES = 5


def _rebuilt_parts(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    sizes: Sequence[int],
    positions: Sequence[Tensor] = (),
    positioned: Sequence[int] = (),
) -> list[KeyValuePart]:
    parts = []
    pairs = dict(zip(positioned, map(Positions, positions[::2], positions[1::2]), strict=True))
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        bias = biases[biased.index(number)] if number in biased else None
        offsets, blocks, order, *transposed, box_offsets, boxes, bounds, packed = lists[
            _LISTS * number : _LISTS * (number + 1)
        ]
        assert offsets is not None
        assert blocks is not None
        q_block, k_block, alike, *packing = sizes[_SIZES * number : _SIZES * (number + 1)]
        plan = _rebuilt_plan(query, key, (offsets, blocks), order, transposed, q_block, k_block)
        if box_offsets is not None and boxes is not None:
            plan._derived["boxes"] = Boxes(box_offsets, boxes)
        known = None if bounds is None or packed is None else Packed(bounds, packed, *packing)
        parts.append(KeyValuePart(key, value, plan, bias, pairs.get(number), bool(alike), known))
    return parts


def _attend_together(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],  # of the parts that have one, whose numbers are `biased`
    biased: Sequence[int],
    learned: Sequence[int],  # parts whose bias gets a gradient
    pooling: Sequence[int],  # if any: the gradients of the second part go to the first, see `Pooling`
    positions: Sequence[Tensor],  # of queries and keys in turns, of the parts `positioned`; without gradients
    positioned: Sequence[int],
    extents: Sequence[Tensor],
    sizes: Sequence[int],  # of each part: `q_block`, `k_block`, whether rows are alike, `Packing`
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    parts = _rebuilt_parts(query, keys, values, lists, biases, biased, sizes, positions, positioned)
    for part, extent in zip(parts, extents, strict=True):
        check_sizes(extent, query, part.key)
    attended = read_together(query, parts, scale, cast(Impl, impl))
    return attended.out, attended.lse


def read_together(query: Tensor, parts: Sequence[KeyValuePart], scale: float, impl: Impl) -> Attended:
    """What the operator does: all parts by one kernel where one can, else one after another."""
    has_positions = any(part.positions is not None for part in parts)
    with _undisturbed(query):
        in_turn = _in_turn(query, parts, impl)
        attended = None if has_positions else _at_once(query, parts, [name for name, _ in in_turn], scale)
        for name, part in in_turn if attended is None else ():
            forward = implementation(name).attend_forward
            call = (query, part.key, part.value, part.plan, part.key_bias, part.positions, scale)
            if attended is None:
                attended = forward(*call)
            elif name == "triton":
                attended = forward(*call, before=attended)
            else:
                attended = merge_attended(attended, forward(*call))
    assert attended is not None
    return attended


def _at_once(
    query: Tensor, parts: Sequence[KeyValuePart], names: Sequence[str], scale: float
) -> Attended | None:
    """All parts in one pass, where something does that; `names`: what would read them apart."""
    # The plain kernels can read whatever the others on a GPU can.
    able = {"grouped": ["grouped"], "gluon": ["gluon", "triton"]}.get(names[0], ["triton"])
    for name in able if len(set(names)) == 1 else ["triton"]:
        forward = implementation(name).attend_parts_forward
        attended: Attended | None = forward(query, _plain(parts), scale)
        if attended is not None:
            return attended
    return None


def _in_turn(query: Tensor, parts: Sequence[KeyValuePart], impl: Impl) -> list[tuple[str, KeyValuePart]]:
    """Parts in the order they are read in, and by what: the plain kernel goes on from what was read before it, so it
    comes last and saves the merging."""
    choices = []
    for part in parts:
        chosen = explain_choice(
            query, part.key, part.plan, key_bias=part.key_bias, positions=part.positions, impl=impl
        )
        choices.append((chosen.impl, part))
    return sorted(choices, key=lambda choice: choice[0] == "triton")


def _plain(parts: Sequence[KeyValuePart]) -> list[KnownPart]:
    """As what knows no positions takes them."""
    for part in parts:
        if part.packed is not None:
            part.plan._derived["packed", part.packed.rows, part.packed.multiple] = part.packed
    return [(part.key, part.value, part.plan, part.key_bias, part.similar_rows) for part in parts]


_together_operator = torch.library.custom_op("nearfield::attend_parts", _attend_together, mutates_args=())


@_together_operator.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=lse_dtype(query))


def _attend_together_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    learned: Sequence[int],
    pooling: Sequence[int],
    sizes: Sequence[int],
    scale: float,
    impl: str,
) -> list[Tensor]:
    """The gradients of the query, of all keys, of all values, and of the biases that are learned. Where the second part
    is pooled from the first, the first one's hold its."""
    parts = _rebuilt_parts(query, keys, values, lists, biases, biased, sizes)
    for part in parts:
        chosen = explain_choice(
            query, part.key, part.plan, key_bias=part.key_bias, backward=True, impl=cast(Impl, impl)
        )
        if chosen.impl != "triton":
            raise NotImplementedError(
                f"parts that were read together by {chosen.impl!r}, without gradients, cannot be differentiated. "
                "Trace the call with inputs that require gradients."
            )
    with _undisturbed(query):
        backward = kernels.load("triton").attend_parts_backward
        grad_query, others = backward(
            grad_out, grad_lse, query, _plain(parts), out, lse, scale, learned, pooling
        )
    kinds = zip(*others, strict=True)
    return [grad_query, *(gradient for kind in kinds for gradient in kind if gradient is not None)]


_together_backward_operator = torch.library.custom_op(
    "nearfield::attend_parts_backward", _attend_together_backward, mutates_args=()
)


@_together_backward_operator.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor,
    query: Tensor,
    out: Tensor,
    lse: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    learned: Sequence[int],
    pooling: Sequence[int],
    *_: Any,
) -> list[Tensor]:
    of_biases = [
        lse.new_empty(bias.shape) for number, bias in zip(biased, biases, strict=True) if number in learned
    ]
    if pooling:
        keys, values = keys[:1], values[:1]
    return [torch.empty_like(query), *map(torch.empty_like, keys), *map(torch.empty_like, values), *of_biases]


def _save_parts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, lists, biases, biased, learned, pooling, _, _, _, *statics = inputs
    ctx.save_for_backward(query, *output, *keys, *values, *biases, *lists)
    ctx.num_keys, ctx.statics = len(keys), (biased, learned, pooling, *statics)


class _OfParts(NamedTuple):
    """Gradients of several parts; None for keys and values that get theirs by way of what they are pooled from."""

    query: Tensor
    keys: list[Tensor | None]
    values: list[Tensor | None]
    biases: list[Tensor | None]
    lists: list[None] | None


def _gradients_of_parts(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> _OfParts:
    saved = ctx.saved_tensors
    query, out, lse, *rest = saved
    biased, learned, pooling = ctx.statics[:3]
    parts = ctx.num_keys
    ends = parts, 2 * parts, 2 * parts + len(biased)
    keys, values, biases, lists = (
        rest[start:stop] for start, stop in zip((0, *ends), (*ends, None), strict=True)
    )
    operator = torch.ops.nearfield.attend_parts_backward
    backward = dispatch(_attend_together_backward, operator, grad_out, grad_lse, *saved)
    grad_query, *others = backward(
        grad_out, grad_lse, query, out, lse, keys, values, lists, biases, *ctx.statics
    )
    known = 1 if pooling else parts
    gap = [None] * (parts - known)
    of_learned = iter(others[2 * known :])
    return _OfParts(
        grad_query,
        [*others[:known], *gap],
        [*others[known : 2 * known], *gap],
        [next(of_learned) if number in learned else None for number in biased],
        # torch wants a list for a list of tensors, even if nothing in it has a gradient, and None for one with gaps.
        None if any(x is None for x in lists) else [None] * len(lists),
    )


def _differentiate_parts(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    # An empty list counts as one of tensors; parts with positions do not come here.
    none_of_numbers: list[list[None] | None] = [None if numbers else [] for numbers in ctx.statics[:3]]
    found = _gradients_of_parts(ctx, grad_out, grad_lse)
    return (
        *(found.query, found.keys, found.values, found.lists, found.biases, *none_of_numbers),
        *([], [], [None] * ctx.num_keys, None, None, None),
    )


_together_operator.register_autograd(_differentiate_parts, setup_context=_save_parts)


def _listed(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What the operator takes, from what `together_node` gives a node."""
    num_parts, lists, others, query, *tensors = inputs
    keys, values, biases = tensors[:num_parts], tensors[num_parts : 2 * num_parts], tensors[2 * num_parts :]
    return query, keys, values, lists, biases, *others


def _together(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _attend_together(*_listed(inputs))


def _save_listed_parts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save_parts(ctx, _listed(inputs), output)


def _differentiate_listed_parts(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    found = _gradients_of_parts(ctx, grad_out, grad_lse)
    return None, None, None, found.query, *found.keys, *found.values, *found.biases


_together_node = node(_together, _save_listed_parts, _differentiate_listed_parts)


def together_node(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],
    *others: Any,
) -> tuple[Tensor, Tensor]:
    """The operator `attend_parts` as a plain node. Autograd does not look for tensors in lists, so what may have a
    gradient is given one by one. Lists of plans are many and have none: they are only saved."""
    found: tuple[Tensor, Tensor]
    found = _together_node(len(keys), lists, others, query, *keys, *values, *biases)
    return found
