"""The public operation: check the call, run it, differentiate it.

One call travels like this: `attend` checks the arguments and hands the plan's lists to the registered operator
`nearfield::attend` (`operators.py`), which is opaque to torch.compile. Inside it (`read`) `explain_choice`
(`dispatch.py`) picks an implementation for the real tensors. Its gradient is the operator
`nearfield::attend_backward` over the same lists. Eager inference goes to `read` at once, and eager training, too, as a
plain node of autograd's graph.
"""

from collections.abc import Sequence
from functools import reduce
from numbers import Real
from typing import get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nearfield._checks import check_member, check_same_device, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Gradients, Impl, Positions
from nearfield.layout import level_starts
from nearfield.ops import _triton as kernels
from nearfield.ops._op import is_eager_autograd, is_plain_eager, is_transformed
from nearfield.ops.attention import operators
from nearfield.ops.attention.operators import (
    KeyValuePart,
    Pooling,
    all_lists,
    attend_node,
    check_sizes,
    lse_dtype,
    merge_attended,
    read,
    read_continued,
    read_together,
    together_node,
)
from nearfield.plan import Packing, Plan

__all__ = [
    "KeyValuePart",
    "Pooling",
    "attend",
    "attend_continued",
    "attend_parts",
    "gradients",
    "merge_attended",
    "packing_for",
]

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
    if is_plain_eager(query, key, value, key_bias):
        return read(query, KeyValuePart(key, value, plan, key_bias, positions), scale, impl)
    wants_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, key_bias)
    )
    is_eager = is_eager_autograd(query, key, value, key_bias)
    out, lse = (attend_node if is_eager else torch.ops.nearfield.attend)(
        query,
        key,
        value,
        *all_lists(plan, query, key, wants_gradient, impl),
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


def attend_continued(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    more: tuple[Tensor, Tensor],
    plan: Plan,
    *,
    key_bias: Tensor | None = None,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Attended | None:
    """`attend` over keys of which the last are in tensors of their own, for callers that differentiate by hand.

    Args:
        more: the keys and values that follow in the plan.
        key_bias: of all of them.

    Returns:
        None where nothing reads keys from two places: put them together then.
    """
    bias = None if key_bias is None else key_bias.to(lse_dtype(query)).expand(*query.shape[:2], plan.num_keys)
    return read_continued(query, key, value, more, plan, bias, _checked_scale(scale, query), impl)


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
    bias = None if key_bias is None else _expanded_bias(key_bias, query, key)
    lists = all_lists(plan, query, key, True, impl)
    to_query, to_key, to_value, to_bias = torch.ops.nearfield.attend_backward(
        *grads, query, key, value, *attended, *lists, bias, None, None,
        plan._extent, plan.q_block, plan.k_block, _checked_scale(scale, query), impl,
    )  # fmt: skip
    return Gradients(to_query, to_key, to_value, None if bias is None else to_bias)


def attend_parts(
    query: Tensor,
    parts: Sequence[KeyValuePart],
    *,
    scale: float | None = None,
    impl: Impl = "auto",
    pooling: Pooling | None = None,
    once: bool = False,
) -> Attended:
    """Every query reads what several plans list, each among keys of its own, in one softmax.

    The same as attending to each part and merging the results. But where kernels run, the whole is differentiated at
    once: with the `lse` of all parts the gradients of one do not depend on the others, so nothing is kept, and nothing
    computed, for having merged. Parts with `positions` are differentiated apart.

    Args:
        pooling: the second of two parts is pooled from the first, and from nothing else. Its gradients are then spread
            by the kernel that computes the first one's, instead of one by one by autograd.
        once: the plans are for this call alone. They are then transposed in the backward pass, beside its first
            kernels.
    """
    if pooling is not None:
        _check_pooling(pooling, parts)
    leaves = [query, *(x for part in parts for x in (part.key, part.value, part.key_bias))]
    has_gradients = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
    is_plain = impl == "grouped" or (impl == "auto" and not _suits_kernels(query))
    has_positions = any(part.positions is not None for part in parts)
    is_apart = impl == "reference" or (is_plain and (has_gradients or is_transformed()))
    if is_apart or (has_gradients and has_positions):
        attended = (
            attend(query, *part[:3], key_bias=part.key_bias, positions=part.positions, scale=scale, impl=impl)
            for part in parts
        )
        return reduce(merge_attended, attended)
    parts = [_checked_part(query, part, impl) for part in parts]
    scale = _checked_scale(scale, query)
    if is_plain_eager(*leaves):
        return read_together(query, parts, scale, impl)
    lists: list[Tensor | None] = []
    biases: dict[int, Tensor] = {}
    learned: list[int] = []
    positions: dict[int, Positions] = {}
    for number, part in enumerate(parts):
        bias = part.key_bias
        own = (query, part.key, part.value, bias)
        wants_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in own)
        lists += (
            *all_lists(part.plan, query, part.key, wants_gradient and not once, impl),
            *(part.plan.boxes or (None, None)),
            *(part.packed[:2] if part.packed else (None, None)),
        )
        if bias is not None:
            biases[number] = bias
            if torch.is_grad_enabled() and bias.requires_grad:
                learned.append(number)
        if part.positions is not None:
            positions[number] = part.positions
    out, lse = (together_node if is_eager_autograd(*leaves) else torch.ops.nearfield.attend_parts)(
        query,
        [part.key.detach() if pooling and number else part.key for number, part in enumerate(parts)],
        [part.value.detach() if pooling and number else part.value for number, part in enumerate(parts)],
        lists,
        list(biases.values()),
        list(biases),
        learned,
        list(pooling or ()),
        [side for pair in positions.values() for side in pair],
        list(positions),
        [part.plan._extent for part in parts],
        [size for part in parts for size in _sizes(part)],
        scale,
        impl,
    )
    return Attended(out, lse)


def _checked_part(query: Tensor, part: KeyValuePart, impl: Impl) -> KeyValuePart:
    key, _, plan, bias, positions = part[:5]
    _check_call(query, key, part.value, plan, impl)
    _refuse_forward_mode(query, key, part.value, bias)
    return part._replace(
        key_bias=None if bias is None else _expanded_bias(bias, query, key),
        positions=None if positions is None else _checked_positions(positions, query, key),
    )


def _sizes(part: KeyValuePart) -> tuple[int, ...]:
    return (
        part.plan.q_block,
        part.plan.k_block,
        part.similar_rows,
        *(part.packed[2:] if part.packed else (0, 0)),
    )


def packing_for(query: Tensor, block: int, impl: Impl) -> Packing | None:
    """How the lists of parts whose rows, of `block` queries, are alike would be packed for such queries; None if they
    would not. (`launch.py` decides; where it thinks otherwise lists are merged then.)"""
    runs_kernels = impl in ("triton", "gluon") or (impl == "auto" and _suits_kernels(query))
    is_narrow = query.element_size() == 2 and query.shape[-1] <= 64
    return operators.PACKING if runs_kernels and is_narrow and block == 16 else None


def _suits_kernels(query: Tensor) -> bool:
    """Whether kernels can run any call with such queries, backwards, too; plain, for torch.compile to trace."""
    return _HAS_TRITON and query.is_cuda and query.dtype != torch.float64 and query.shape[-1] <= 128


# -- checks ------------------------------------------------------------------------------------------------------


def _check_call(query: Tensor, key: Tensor, value: Tensor, plan: Plan, impl: str) -> None:
    check_tensors(query, key, value)
    check_member("impl", impl, get_args(Impl))
    _check_plan(plan, query, key)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """What every call asks of them, whoever reads whom."""
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


def _check_plan(plan: Plan, query: Tensor, key: Tensor) -> None:
    if not isinstance(plan, Plan):
        wrong_type("plan", "be a Plan", type(plan).__name__, "Build one with `nearfield.plan.builders`.")
    if (
        not torch.compiler.is_compiling()
    ):  # a traced graph is for all sizes; the operator compares them when it runs
        check_sizes(plan._extent, query, key)
    for side, size, wanted in zip(("batch", "heads"), plan.blocks.shape[:2], query.shape[:2], strict=True):
        if size not in (1, wanted):
            wrong_value("plan", f"have {side} 1 or {wanted} (that of `query`)", size)
    check_same_device("plan", plan.offsets, "query", query.device)


def _check_pooling(pooling: Pooling, parts: Sequence[KeyValuePart]) -> None:
    if len(parts) != 2:
        wrong_value("parts", "be two where the second is pooled from the first", len(parts))
    wanted = level_starts(parts[0].key.shape[2], *pooling)[-1]
    if parts[1].key.shape[2] != wanted:
        wrong_value(
            "parts", f"have {wanted} keys in the second, pooled from the first", parts[1].key.shape[2]
        )


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
    return key_bias.to(lse_dtype(query)).expand(wanted)


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
        if x.dtype != torch.int32:
            # Clamped, not wrapped: a position beyond 32 bits still means never, or always.
            x = x.clamp(-(2**31), 2**31 - 1).to(torch.int32)
        checked.append(x)
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
