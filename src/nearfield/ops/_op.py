"""Whether a call may do without its operator, and how it is differentiated then."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ORDINARY = (Tensor, torch.nn.Parameter)


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether a call needs no operator: nothing traces it or differentiates it, and its tensors are what they seem.

    Eager inference is such a call, and its operator would cost the host more than the rest of it.
    """
    return not _is_traced() and all(
        x is None or (_is_ordinary(x) and not (x.requires_grad and torch.is_grad_enabled())) for x in tensors
    )


def is_eager_autograd(*tensors: Tensor | None) -> bool:
    """The same of a call that autograd alone may observe: eager training."""
    return not _is_traced() and all(x is None or _is_ordinary(x) for x in tensors)


def dispatch(plain: Any, operator: Any, *tensors: Tensor | None, differentiable: Any = None) -> Any:
    """What to call: the function itself, its node, if there is one, or, where something else looks on, its operator."""
    if is_plain_eager(*tensors):
        return plain
    return differentiable if differentiable is not None and is_eager_autograd(*tensors) else operator


def node(
    forward: Callable[..., Any], remember: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """What an operator with these is to autograd, without the operator, for calls that are only differentiated.

    Both save the same tensors in the same order, so that one may be recomputed as the other.

    Args:
        remember, differentiate: as `register_autograd` takes them. `differentiate` calls an operator unless it is
            unobserved itself, and all that was saved for it, too: an operator without a gradient of its own refuses to
            be differentiated once more, where a plain function would seem to be constant.
    """

    # Not a `setup_context` of its own: torch would then inspect the signature of `forward` at every call.
    def read_and_remember(ctx: Any, *inputs: Any) -> Any:
        output = forward(*inputs)
        remember(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(read_and_remember), "backward": staticmethod(differentiate)}
    kind: Any = type(f"{forward.__name__.strip('_')}_node", (torch.autograd.Function,), methods)
    apply: Callable[..., Any] = kind.apply
    return apply


def _is_traced() -> bool:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return bool(
        torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way, or an export, whose graph may be differentiated later.

    Traced by torch before 2.13, a call that is compiled is taken for one that is exported.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_ordinary(x: Tensor) -> bool:
    """Not of a subclass, not without data, not negated on paper alone (the imaginary part of a conjugate is), and not
    several at once, as gradients may be (`is_grads_batched`)."""
    is_one = not torch._C._functorch.is_legacy_batchedtensor(x)
    return type(x) in _ORDINARY and is_one and not (x.is_meta or x.is_neg())
