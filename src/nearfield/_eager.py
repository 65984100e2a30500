"""Whether a call may do without its operator, and how it is differentiated then."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ORDINARY = (Tensor, torch.nn.Parameter)


def is_unobserved(*tensors: Tensor | None) -> bool:
    """Whether a call needs no operator: nothing traces it or differentiates it, and its tensors are what they seem.

    Eager inference is such a call, and its operator would cost the host more than the rest of it.
    """
    return not _is_traced() and all(
        x is None or (_is_ordinary(x) and not (x.requires_grad and torch.is_grad_enabled())) for x in tensors
    )


def is_only_differentiated(*tensors: Tensor | None) -> bool:
    """The same of a call that autograd alone may observe: eager training. (A graph that is captured keeps nothing that
    was made for it, and costs the host nothing later.)"""
    if _is_traced() or not all(x is None or _is_ordinary(x) for x in tensors):
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def node(
    forward: Callable[..., Any], remember: Callable[..., None], differentiate: Callable[..., Any]
) -> Callable[..., Any]:
    """What an operator with these is to autograd, without the operator, for calls that are only differentiated.

    Args:
        remember, differentiate: as `register_autograd` takes them.
    """
    names = {"forward": forward, "setup_context": remember, "backward": once_differentiable(differentiate)}
    methods = {name: staticmethod(function) for name, function in names.items()}
    kind: Any = type(forward.__name__, (torch.autograd.Function,), methods)
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
    """Not of a subclass, not without data, not negated on paper alone (the imaginary part of a conjugate is)."""
    return type(x) in _ORDINARY and not (x.is_meta or x.is_neg())
