"""The public operation: check the call, choose an implementation, run it, differentiate it.

One call travels like this: `attend` checks the arguments and hands the plan's lists to the registered operator
`nearfield::attend`, which is opaque to torch.compile. Inside it `explain_choice` picks an implementation for the real
tensors. Its gradient is the operator `nearfield::attend_backward` over the same lists.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from numbers import Real
from typing import Any, NamedTuple, cast, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nearfield import grouped, kernels
from nearfield._checks import check_member, check_same_device, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Gradients, Impl, Positions
from nearfield.plan import Plan
from nearfield.reference import attend as reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = torch.finfo(torch.float32).max
_LAYOUT_HINT = "Expected [batch, heads, tokens, head_dim]."

# Looked up once: torch.compile does not trace the functions that know.
_HAS_TRITON = (kernels.triton_version() or (0, 0)) >= kernels.OLDEST_TRITON


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    *,
    key_bias: Tensor | None = None,
    positions: Positions | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Attended:
    """Every query reads the keys its plan lists: softmax(scale * q.k + key_bias) over them, times the values.

    Args:
        query: `[B, H, N, D]`, any strides.
        key, value: `[B, G, M, D]`; `G` divides `H` (grouped-query attention).
        plan: who reads whom, for `N` queries and `M` keys, on the same device.
        key_bias: added to the logits of each key; broadcastable to `[B, H, M]`; `-inf`, and on a GPU anything below
            -2.3e38, hides a key. Gradients flow.
        positions: `Positions(query, key)`; a key is visible where its position is not after the query's.
        scale: defaults to `1 / sqrt(D)`.
        impl: "auto" picks the fastest that can run these tensors; any other name runs exactly that or raises.

    Returns:
        `out` like `query`, and `lse` `[B, H, N]`, the natural log of the summed weights. Both are differentiable.
        A query that reads nothing gives zeros and `-inf`.
    """
    _check_call(query, key, value, plan, impl)
    _refuse_forward_mode(query, key, value, key_bias)
    if key_bias is not None:
        key_bias = _expanded_bias(key_bias, query, key)
    if positions is not None:
        positions = _checked_positions(positions, query, key)
    scale = _checked_scale(scale, query)
    wants_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, key_bias)
    )
    out, lse = torch.ops.nearfield.attend(
        query,
        key,
        value,
        *_all_lists(plan, query, key, wants_gradient, impl),
        key_bias,
        positions.query if positions else None,
        positions.key if positions else None,
        plan._extent,
        plan.q_block,
        plan.k_block,
        scale,
        impl,
    )
    return Attended(out, lse)


def merge(first: Attended, second: Attended) -> Attended:
    """What reading both key sets at once would have given: each part weighs as much as its `lse` says.

    The two must read different keys, else those in both count twice. Differentiable, except in rows that read nothing
    in either. The shares are rounded to the precision of the outputs: one pass over them, no wider copy.
    """
    lse = torch.logaddexp(first.lse, second.lse)
    # Which part of the weights is the second's. Of two empty rows neither has any, and both give zeros.
    share = torch.sigmoid((second.lse - first.lse).masked_fill(lse == float("-inf"), 0))
    return Attended(torch.lerp(first.out, second.out, share.to(first.out.dtype).unsqueeze(-1)), lse)


def gradients(
    grads: Attended,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Attended,
    plan: Plan,
    *,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Gradients:
    """The backward pass of one `attend`, for callers that differentiate by hand: tensors as they were given to it.

    Args:
        grads: gradients of what `attend` gave.
        attended: what it gave.
    """
    batch, heads = query.shape[:2]
    bias = None if key_bias is None else _expanded_bias(key_bias, query, key)
    transposed = plan.transpose()
    order = transposed_order = None
    if query.is_cuda and impl not in ("grouped", "reference"):
        order = plan.longest_first(batch, heads)
        transposed_order = transposed.longest_first(batch, key.shape[1])
    lists = plan.offsets, plan.blocks, order, transposed.offsets, transposed.blocks, transposed_order
    to_query, to_key, to_value, to_bias = torch.ops.nearfield.attend_backward(
        *grads, query, key, value, *attended, *lists, bias, None, None,
        plan._extent, plan.q_block, plan.k_block, _checked_scale(scale, query), impl,
    )  # fmt: skip
    return Gradients(to_query, to_key, to_value, None if bias is None else to_bias)


class Part(NamedTuple):
    """Keys and values beside others, and who reads them; see `attend` for each."""

    key: Tensor
    value: Tensor
    plan: Plan
    key_bias: Tensor | None = None


def attend_together(
    query: Tensor, parts: Sequence[Part], *, scale: float | None = None, impl: Impl = "auto"
) -> Attended:
    """Every query reads what several plans list, each among keys of its own, in one softmax.

    The same as attending to each part and merging the results. But where kernels run, the whole is differentiated at
    once: with the `lse` of all parts the gradients of one do not depend on the others, so nothing is kept, and nothing
    computed, for having merged.
    """
    if impl in ("grouped", "reference") or (impl == "auto" and not _suits_kernels(query)):
        attended = (
            attend(query, part.key, part.value, part.plan, key_bias=part.key_bias, scale=scale, impl=impl)
            for part in parts
        )
        return reduce(merge, attended)
    lists: list[Tensor | None] = []
    biases: dict[int, Tensor] = {}
    for number, part in enumerate(parts):
        _check_call(query, part.key, part.value, part.plan, impl)
        _refuse_forward_mode(query, part.key, part.value, part.key_bias)
        bias = None if part.key_bias is None else _expanded_bias(part.key_bias, query, part.key)
        leaves = (query, part.key, part.value, bias)
        wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        lists += _all_lists(part.plan, query, part.key, wants_gradient, impl)
        if bias is not None:
            biases[number] = bias
    out, lse = torch.ops.nearfield.attend_together(
        query,
        [part.key for part in parts],
        [part.value for part in parts],
        lists,
        list(biases.values()),
        list(biases),
        [part.plan._extent for part in parts],
        [size for part in parts for size in (part.plan.q_block, part.plan.k_block)],
        _checked_scale(scale, query),
        impl,
    )
    return Attended(out, lse)


def _suits_kernels(query: Tensor) -> bool:
    """Whether kernels can run any call with such queries, backwards, too; plain, for torch.compile to trace."""
    return _HAS_TRITON and query.is_cuda and query.dtype != torch.float64 and query.shape[-1] <= 128


class Choice(NamedTuple):
    """Which implementation runs, why, and for each faster one why it does not."""

    impl: str
    reason: str
    rejected: dict[str, str]


_REASONS = {
    "gluon": "Hopper GPU: warp-specialised kernels",
    "triton": "a GPU that Triton runs on",
    "grouped": "plain torch: gathers once per group of equal rows, then dense attention",
    "reference": "asked for: the specification, slow and exact",
}

_OFF_DEVICE = {
    "gluon": "the tensors are not on a GPU",
    "triton": "the tensors are not on a GPU, and the interpreter runs only when asked for",
    "grouped": "on a GPU a missing kernel is an error, not a reason to crawl",
}


def explain_choice(
    query: Tensor,
    key: Tensor,
    plan: Plan,
    *,
    key_bias: Tensor | None = None,
    positions: Positions | None = None,
    backward: bool = False,
    impl: Impl = "auto",
) -> Choice:
    """The implementation that would run this call. Reads only shapes, strides, dtypes and devices."""
    check_member("impl", impl, get_args(Impl))
    rejected: dict[str, str] = {}
    candidates = ("gluon", "triton", "grouped") if impl == "auto" else (impl,)
    for name in candidates:
        reason = None
        if impl == "auto":
            reason = _unfit(name, query, backward)
        if reason is None:
            reason = _unsupported(name, query, key, plan, key_bias, positions, backward)
        if reason is None:
            return Choice(name, _REASONS[name], rejected)
        rejected[name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
    hint = "Use impl='grouped' for plain torch." if impl != "grouped" else ""
    raise NotImplementedError(
        f"`impl` must be able to run this call; got {impl!r}. {reasons}. {hint}".rstrip()
    )


def _unfit(name: str, query: Tensor, backward: bool) -> str | None:
    """Why "auto" does not even ask an implementation."""
    if (name == "grouped") == query.is_cuda:
        return _OFF_DEVICE[name]
    if name == "gluon" and backward:
        return "it has no backward of its own"
    return None


def _unsupported(
    name: str,
    query: Tensor,
    key: Tensor,
    plan: Plan,
    key_bias: Tensor | None,
    positions: Positions | None,
    backward: bool,
) -> str | None:
    if name in ("grouped", "reference"):
        return None
    return kernels.unsupported(name, query, key, plan, key_bias, positions, backward)


def _implementation(name: str) -> Any:
    """The module that holds `attend_forward` and `attend_backward` of an implementation."""
    if name == "reference":
        return reference
    return grouped if name == "grouped" else kernels.load(name)


# -- the operators -----------------------------------------------------------------------------------------------


def _all_lists(
    plan: Plan, query: Tensor, key: Tensor, wants_gradient: bool, impl: str
) -> tuple[Tensor | None, ...]:
    """A plan as it crosses an operator: lists and starting order, its own and its transpose's."""
    transposed = plan.transpose() if wants_gradient else None
    order, transposed_order = None, None
    if query.is_cuda and impl not in ("grouped", "reference"):
        batch, heads = query.shape[:2]
        order = plan.longest_first(batch, heads)
        transposed_order = transposed.longest_first(batch, key.shape[1]) if transposed else None
    lists = transposed.offsets if transposed else None, transposed.blocks if transposed else None
    return plan.offsets, plan.blocks, order, *lists, transposed_order


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
    plan = Plan(*lists, q_block, k_block, num_queries, num_keys, uniform=order is None, check=False)
    if order is not None:
        plan._derived["order", batch, heads] = order
    offsets, blocks, key_order = transposed_lists
    if offsets is not None and blocks is not None:
        transposed = Plan(offsets, blocks, k_block, q_block, num_keys, num_queries, check=False)
        transposed._derived["order", batch, key.shape[1]] = key_order
        plan._derived["transpose"] = transposed
    return plan


@contextmanager
def _undisturbed(query: Tensor) -> Iterator[None]:
    """On the GPU of the tensors, whichever is current, and in the precision they came in, whatever autocast says."""
    with torch.cuda.device_of(query), torch.autocast(query.device.type, enabled=False):
        yield


def _paired(query_positions: Tensor | None, key_positions: Tensor | None) -> Positions | None:
    if query_positions is None or key_positions is None:
        return None
    return Positions(query_positions, key_positions)


@torch.library.custom_op("nearfield::attend", mutates_args=())
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
    _check_sizes(extent, query, key)
    plan = _rebuilt_plan(query, key, (offsets, blocks), order, (None, None, None), q_block, k_block)
    positions = _paired(query_positions, key_positions)
    asked = cast(Impl, impl)
    name = explain_choice(query, key, plan, key_bias=key_bias, positions=positions, impl=asked).impl
    with _undisturbed(query):
        out, lse = _implementation(name).attend_forward(query, key, value, plan, key_bias, positions, scale)
    return out, lse


@_attend.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=_lse_dtype(query))


@torch.library.custom_op("nearfield::attend_backward", mutates_args=())
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
    name = explain_choice(
        query,
        key,
        plan,
        key_bias=key_bias,
        positions=positions,
        backward=True,
        impl=cast(Impl, impl),
    ).impl
    with _undisturbed(query):
        gradients: Gradients = _implementation(name).attend_backward(
            grad_out, grad_lse, query, key, value, out, lse, plan, key_bias, positions, scale
        )
    bias_gradient = gradients.key_bias
    if bias_gradient is None:
        bias_gradient = lse.new_empty(0)
    return gradients.query, gradients.key, gradients.value, bias_gradient


@_attend_backward.register_fake
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
    query, key, value, *lists_and_bias, out, lse = ctx.saved_tensors
    *gradients, bias_gradient = torch.ops.nearfield.attend_backward(
        grad_out, grad_lse, query, key, value, out, lse, *lists_and_bias, *ctx.statics
    )
    has_bias = lists_and_bias[6] is not None
    return (*gradients, *[None] * 6, bias_gradient if has_bias else None, *[None] * (3 + len(ctx.statics)))


_attend.register_autograd(_differentiate, setup_context=_save_for_backward)


# -- several parts -------------------------------------------------------------------------------------------------

_LISTS = 6  # as `_all_lists` gives them


def _rebuilt_parts(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],
    biased: Sequence[int],
    sizes: Sequence[int],
) -> list[Part]:
    parts = []
    for number, (key, value) in enumerate(zip(keys, values, strict=True)):
        bias = biases[biased.index(number)] if number in biased else None
        offsets, blocks, order, *transposed = lists[_LISTS * number : _LISTS * (number + 1)]
        assert offsets is not None
        assert blocks is not None
        q_block, k_block = sizes[2 * number : 2 * number + 2]
        plan = _rebuilt_plan(query, key, (offsets, blocks), order, transposed, q_block, k_block)
        parts.append(Part(key, value, plan, bias))
    return parts


@torch.library.custom_op("nearfield::attend_together", mutates_args=())
def _attend_together(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lists: Sequence[Tensor | None],
    biases: Sequence[Tensor],  # of the parts that have one, whose numbers are `biased`
    biased: Sequence[int],
    extents: Sequence[Tensor],
    sizes: Sequence[int],
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    parts = _rebuilt_parts(query, keys, values, lists, biases, biased, sizes)
    for part, extent in zip(parts, extents, strict=True):
        _check_sizes(extent, query, part.key)
    attended: Attended | None = None
    with _undisturbed(query):
        for name, part in _in_turn(query, parts, cast(Impl, impl)):
            forward = _implementation(name).attend_forward
            call = (query, part.key, part.value, part.plan, part.key_bias, None, scale)
            if attended is None:
                attended = forward(*call)
            elif name == "triton":
                attended = forward(*call, before=attended)
            else:
                attended = merge(attended, forward(*call))
    assert attended is not None
    return attended.out, attended.lse


def _most_pairs(plan: Plan) -> int:
    """What the lists have room for, known without asking the device."""
    return plan.blocks.shape[-1] * plan.q_block * plan.k_block


def _in_turn(query: Tensor, parts: Sequence[Part], impl: Impl) -> list[tuple[str, Part]]:
    """Parts in the order they are read in, and by what.

    The plain kernel goes on from what was read before, which saves three passes over the output for merging. So the
    fastest implementation reads one part, the longest it can, and the plain kernel what is left.
    """
    choices = [
        (explain_choice(query, part.key, part.plan, key_bias=part.key_bias, impl=impl).impl, part)
        for part in parts
    ]
    choices.sort(key=lambda choice: (choice[0] == "triton", -_most_pairs(choice[1].plan)))
    if impl == "auto":
        choices[1:] = [("triton", part) for _, part in choices[1:]]
    return choices


@_attend_together.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=_lse_dtype(query))


@torch.library.custom_op("nearfield::attend_together_backward", mutates_args=())
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
    sizes: Sequence[int],
    scale: float,
    impl: str,
) -> list[Tensor]:
    """The gradients of the query, of all keys, of all values, and of the biases."""
    parts = _rebuilt_parts(query, keys, values, lists, biases, biased, sizes)
    for part in parts:
        explain_choice(
            query, part.key, part.plan, key_bias=part.key_bias, backward=True, impl=cast(Impl, impl)
        )
    with _undisturbed(query):
        backward = kernels.load("triton").attend_together_backward
        grad_query, others = backward(grad_out, grad_lse, query, parts, out, lse, scale)
    of_keys, of_values, of_biases = zip(*others, strict=True)
    return [grad_query, *of_keys, *of_values, *(gradient for gradient in of_biases if gradient is not None)]


@_attend_together_backward.register_fake
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
    *_: Any,
) -> list[Tensor]:
    of_biases = [lse.new_empty(bias.shape) for bias in biases]
    return [torch.empty_like(query), *map(torch.empty_like, keys), *map(torch.empty_like, values), *of_biases]


def _save_parts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, keys, values, lists, biases, biased, _, *statics = inputs
    ctx.save_for_backward(query, *output, *keys, *values, *biases, *lists)
    ctx.counts, ctx.statics = (len(keys), len(biases)), (biased, *statics)


def _differentiate_parts(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    query, out, lse, *rest = ctx.saved_tensors
    parts, biased = ctx.counts
    ends = parts, 2 * parts, 2 * parts + biased
    keys, values, biases, lists = (
        rest[start:stop] for start, stop in zip((0, *ends), (*ends, None), strict=True)
    )
    grad_query, *others = torch.ops.nearfield.attend_together_backward(
        grad_out, grad_lse, query, out, lse, keys, values, lists, biases, *ctx.statics
    )
    of_keys, of_values, of_biases = others[: ends[0]], others[ends[0] : ends[1]], others[ends[1] :]
    # torch wants a list for a list of tensors, even if nothing in it has a gradient, and None for a list with gaps.
    none_of_lists = None if any(x is None for x in lists) else [None] * len(lists)
    return grad_query, of_keys, of_values, none_of_lists, of_biases, None, [None] * parts, None, None, None


_attend_together.register_autograd(_differentiate_parts, setup_context=_save_parts)


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


# -- checks ------------------------------------------------------------------------------------------------------


def _check_call(query: Tensor, key: Tensor, value: Tensor, plan: Plan, impl: str) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, dims=4, hint=_LAYOUT_HINT)
    if query.dtype not in _DTYPES:
        wrong_type("query", "be float16, bfloat16, float32 or float64", query.dtype)
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            wrong_type(name, f"have the dtype of `query` ({query.dtype})", x.dtype)
        check_same_device(name, x, "query", query.device)
    if value.shape != key.shape:
        wrong_value("value", f"have the shape of `key` ({list(key.shape)})", shape_of(value))
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        rule = f"have the batch ({query.shape[0]}) and head dimension ({query.shape[3]}) of `query`"
        wrong_value("key", rule, shape_of(key), _LAYOUT_HINT)
    if query.shape[1] == 0 or query.shape[3] == 0:
        wrong_value("query", "have at least one head and one channel", shape_of(query), _LAYOUT_HINT)
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        wrong_value("key", f"have a number of heads that divides `query`'s ({query.shape[1]})", key.shape[1])
    check_member("impl", impl, get_args(Impl))
    _check_plan(plan, query, key)


def _check_plan(plan: Plan, query: Tensor, key: Tensor) -> None:
    if not isinstance(plan, Plan):
        wrong_type("plan", "be a Plan", type(plan).__name__, "Build one with `nearfield.planning`.")
    if (
        not torch.compiler.is_compiling()
    ):  # a traced graph is for all sizes; the operator compares them when it runs
        _check_sizes(plan._extent, query, key)
    for side, size, wanted in zip(("batch", "heads"), plan.blocks.shape[:2], query.shape[:2], strict=True):
        if size not in (1, wanted):
            wrong_value("plan", f"have {side} 1 or {wanted} (that of `query`)", size)
    check_same_device("plan", plan.offsets, "query", query.device)


def _check_sizes(extent: Tensor, query: Tensor, key: Tensor) -> None:
    if extent.shape[:2] != (query.shape[2], key.shape[2]):
        sizes = f"{query.shape[2]} queries and {key.shape[2]} keys"
        wrong_value("plan", f"be made for {sizes}", f"{extent.shape[0]} and {extent.shape[1]}")


def _expanded_bias(key_bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if not isinstance(key_bias, Tensor):
        wrong_type("key_bias", "be a tensor", type(key_bias).__name__)
    if not key_bias.is_floating_point():
        wrong_type("key_bias", "be floating point", key_bias.dtype, "For a mask use 0 and -inf.")
    check_same_device("key_bias", key_bias, "query", query.device)
    wanted = (query.shape[0], query.shape[1], key.shape[2])
    shape = (1,) * (3 - key_bias.dim()) + tuple(key_bias.shape)
    if len(shape) != 3 or any(size not in (1, want) for size, want in zip(shape, wanted, strict=True)):
        wrong_value("key_bias", f"broadcast to [batch, heads, keys] = {list(wanted)}", shape_of(key_bias))
    return key_bias.to(_lse_dtype(query)).expand(wanted)


def _checked_positions(positions: Positions, query: Tensor, key: Tensor) -> Positions:
    if not isinstance(positions, tuple) or len(positions) != 2:
        wrong_type("positions", "be a pair (query positions, key positions)", type(positions).__name__)
    checked = []
    for name, x, like in zip(("positions.query", "positions.key"), positions, (query, key), strict=True):
        check_tensor(name, x, dims=2, hint="Expected [batch or 1, tokens].")
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            wrong_type(name, "be integers", x.dtype)
        check_same_device(name, x, "query", query.device)
        if x.shape[0] not in (1, query.shape[0]) or x.shape[1] != like.shape[2]:
            wrong_value(name, f"have shape [1 or {query.shape[0]}, {like.shape[2]}]", shape_of(x))
        # Clamped, not wrapped: a position beyond 32 bits still means never, or always.
        checked.append(x.clamp(-(2**31), 2**31 - 1).to(torch.int32))
    return Positions(*checked)


def _checked_scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return float(query.shape[3] ** -0.5)
    is_number: bool = not isinstance(scale, bool) and isinstance(scale, (Real, torch.SymFloat))
    if not is_number:
        wrong_type("scale", "be a number", type(scale).__name__)
    if not -_LARGEST <= scale <= _LARGEST:
        wrong_value("scale", "be finite", scale)
    return float(scale)


def _refuse_forward_mode(*inputs: Tensor | None) -> None:
    """Without this the operator's tangents would silently be zero."""
    if forward_ad._current_level < 0:
        return
    for x in inputs:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "`attend` must be differentiated backward; got forward-mode tangents. Use torch.autograd.grad."
            )
