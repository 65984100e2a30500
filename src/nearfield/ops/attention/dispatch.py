"""Which implementation runs a call, and why: the one place where that is chosen."""

from typing import Any, NamedTuple, get_args

from torch import Tensor

from nearfield._checks import check_member
from nearfield._types import Impl, Positions
from nearfield.ops import _triton
from nearfield.ops.attention import cpu as grouped
from nearfield.ops.attention import reference
from nearfield.plan import Plan


class Choice(NamedTuple):
    """Which implementation runs, why, and for each faster one why it does not."""

    impl: str
    reason: str
    rejected: dict[str, str]


_KERNELS = {"triton": "attention.triton", "gluon": "attention.hopper"}

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
    reason = _triton.missing(name)
    if reason is None:
        reason = implementation(name).unsupported(query, key, plan, key_bias, positions, backward)
    return reason


def implementation(name: str) -> Any:
    """The module that holds `attend_forward` and `attend_backward` of an implementation."""
    if name == "reference":
        return reference
    return grouped if name == "grouped" else _triton.load(_KERNELS[name])
