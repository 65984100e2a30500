"""Whether a call may do without its operator."""

import torch
from torch import Tensor

_ORDINARY = (Tensor, torch.nn.Parameter)


def is_unobserved(*tensors: Tensor | None) -> bool:
    """Whether a call needs no operator: nothing traces it or differentiates it, and its tensors are what they seem.

    Eager inference is such a call, and its operator would cost the host more than the rest of it.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(x is None or _is_ordinary(x) for x in tensors)


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way, or an export, whose graph may be differentiated later.

    Traced by torch before 2.13, a call that is compiled is taken for one that is exported.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_ordinary(x: Tensor) -> bool:
    """Not of a subclass, not without data, not negated on paper alone (the imaginary part of a conjugate is)."""
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return type(x) in _ORDINARY and not (needs_gradient or x.is_meta or x.is_neg())
