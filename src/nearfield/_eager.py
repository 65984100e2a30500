"""Whether a call may do without its operator."""

import torch
from torch import Tensor

_ORDINARY = (Tensor, torch.nn.Parameter)


def is_unobserved(*tensors: Tensor | None) -> bool:
    """Whether a call needs no operator: nothing traces it, differentiates it, or stands in for its tensors.

    Eager inference is such a call, and its operator would cost the host more than the rest of it.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    needs_none = not torch.is_grad_enabled()
    return all(x is None or (type(x) in _ORDINARY and (needs_none or not x.requires_grad)) for x in tensors)
