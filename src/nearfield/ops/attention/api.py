"""The public operation: check the call, and run it.

`attend` is `attend_parts` of one part. Both check their arguments; then the operation (`operators.py`) runs the call as
a function, a node of autograd's graph or a registered operator, whichever fits what observes it (`ops/_op.py`). There
`read` asks `explain_choice` (`dispatch.py`) for an implementation that suits the tensors.
"""

from collections.abc import Sequence
from functools import reduce
from numbers import Real
from typing import get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nearfield._checks import check_member, check_same_device, check_tensor, shape_of, wrong_type, wrong_value
from nearfield._types import Attended, Impl, Positions
from nearfield.ops.attention.operators import (
    MOST_PARTS,
    OPERATIONS,
    check_sizes,
    leaves,
    lse_dtype,
    read_continued,
)
from nearfield.ops.attention.parts import KeyValuePart, merge_attended
from nearfield.plan import Plan

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGEST = torch.finfo(torch.float32).max
_LAYOUT_HINT = "Expected [batch, heads, tokens, head_dim]."


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
    part = _checked_part(query, KeyValuePart(key, value, plan, key_bias, positions), impl)
    run = OPERATIONS[0].dispatch(query, key, value, part.key_bias)
    return Attended(*run(query, [part], checked_scale(scale, query), impl))


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
    if key_bias is not None:
        key_bias = key_bias.to(lse_dtype(query)).expand(*query.shape[:2], plan.num_keys)
    part = KeyValuePart(key, value, plan, key_bias)
    return read_continued(query, part, more, checked_scale(scale, query), impl)


def attend_parts(
    query: Tensor, parts: Sequence[KeyValuePart], *, scale: float | None = None, impl: Impl = "auto"
) -> Attended:
    """Every query reads what several plans list, each among keys of its own, in one softmax.

    The same as attending to each part and merging the results, but read in one pass, and differentiated in one, where
    an implementation can do that.
    """
    parts = checked_parts(query, parts, impl)
    scale = checked_scale(scale, query)
    attended = []
    for start in range(0, len(parts), MOST_PARTS):
        some = parts[start : start + MOST_PARTS]
        run = OPERATIONS[len(some) - 1].dispatch(*leaves(query, some))
        attended.append(Attended(*run(query, some, scale, impl)))
    return reduce(merge_attended, attended)


def checked_parts(query: Tensor, parts: Sequence[KeyValuePart], impl: Impl) -> list[KeyValuePart]:
    """The parts as implementations take them: the bias `[B, H, M]`, positions in 32 bits."""
    if not parts:
        wrong_value("parts", "hold at least one part", "none")
    return [_checked_part(query, part, impl) for part in parts]


def _checked_part(query: Tensor, part: KeyValuePart, impl: Impl) -> KeyValuePart:
    key, value, plan, bias, positions = part
    check_tensors(query, key, value)
    check_member("impl", impl, get_args(Impl))
    _check_plan(plan, query, key)
    _refuse_forward_mode(query, key, value, bias)
    if bias is not None:
        bias = _expanded_bias(bias, query, key)
    if positions is not None:
        positions = _checked_positions(positions, query, key)
    return KeyValuePart(key, value, plan, bias, positions)


# -- checks ------------------------------------------------------------------------------------------------------


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
    ):  # a traced graph is for all sizes; its operator compares them when it runs
        check_sizes(plan, query, key)
    for side, size, wanted in zip(("batch", "heads"), plan.blocks.shape[:2], query.shape[:2], strict=True):
        if size not in (1, wanted):
            wrong_value("plan", f"have {side} 1 or {wanted} (that of `query`)", size)
    check_same_device("plan", plan.offsets, "query", query.device)


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


def checked_scale(scale: float | None, query: Tensor) -> float:
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
