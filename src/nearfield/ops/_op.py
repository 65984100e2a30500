"""One operation, declared once: from its function, its shapes and its gradient follow all the ways a call can run.

- Nothing traces or differentiates the call (eager inference): the function itself is called.
- Autograd alone observes it (eager training): the call is a node of autograd's graph around the same function.
- Anything else observes it (torch.compile, export, `torch.func.vmap`, dispatch modes): it is the registered
  operator `nearfield::<name>`, which is opaque to tracers and has the same gradient.

An operator takes tensors and numbers alone. A call of plans and parts therefore declares how it is flattened into
them, and what the operator makes of them again. The node takes the call as it is, and saves the same tensors in the
same order as the operator does, so that either may recompute what the other saved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

_ORDINARY = (Tensor, torch.nn.Parameter)


def is_plain_eager(*tensors: Any) -> bool:
    """Whether nothing traces or differentiates a call, and its tensors are what they seem.

    Eager inference is such a call, and an operator would cost the host more than the rest of it.
    """
    return not _is_traced() and all(
        not isinstance(x, Tensor) or (_is_ordinary(x) and not (x.requires_grad and torch.is_grad_enabled()))
        for x in tensors
    )


def is_eager_autograd(*tensors: Any) -> bool:
    """Whether at most autograd observes a call: eager training, or inference."""
    return not _is_traced() and all(not isinstance(x, Tensor) or _is_ordinary(x) for x in tensors)


def _is_traced() -> bool:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return bool(
        torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _is_ordinary(x: Tensor) -> bool:
    """Whether a tensor is no subclass, has data, is not negated lazily (as the imaginary part of a conjugate is), and
    is not several tensors at once, as gradients may be (`is_grads_batched`)."""
    is_one = not torch._C._functorch.is_legacy_batchedtensor(x)
    return type(x) in _ORDINARY and is_one and not (x.is_meta or x.is_neg())


@dataclass(frozen=True)
class Gradient:
    """How an operation is differentiated.

    Args:
        of: which of the operator's arguments have gradients.
        backward: takes the gradients of the outputs, then what was saved; gives one gradient for each of `of` (None
            where there is none). Usually an `Operation` of its own, which refuses a second derivative.
        saves: what is saved, from the operator's arguments and the outputs: tensors and anything else. By default all.
        materializes: outputs that nothing depends on have gradients of zeros; else of None.
        chooses: `backward` takes one argument before all others: for each of `of`, whether its gradient is wanted.
    """

    of: Sequence[int]
    backward: Callable[..., Any]
    saves: Callable[[Sequence[Any], Sequence[Tensor]], Sequence[Any]] = lambda flat, outputs: (
        *flat,
        *outputs,
    )
    materializes: bool = True
    chooses: bool = False


class Operation:
    """A function of tensors with everything that torch has to know of it.

    Args:
        name: of the operator, `nearfield::<name>`.
        forward: the function. It gives a tensor, or a tuple or a list of tensors, none of which shares memory with an
            argument.
        fake: the same for tensors without data: the outputs' shapes, strides and types.
        gradient: how it is differentiated; None: it is not.
        flatten: the arguments of `forward` as the operator's. By default they are the same.
        restore: the arguments of `forward`, from the operator's.
        schema: the operator's, where the annotations of `forward` do not say it.
    """

    known: ClassVar[dict[str, "Operation"]] = {}
    """All operations by name."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        gradient: Gradient | None = None,
        flatten: Callable[..., Sequence[Any]] | None = None,
        restore: Callable[..., Sequence[Any]] | None = None,
        schema: str | None = None,
    ) -> None:
        def whole(*flat: Any) -> Any:
            return forward(*flat) if restore is None else forward(*restore(*flat))

        self.forward, self._flatten, self._gradient = forward, flatten, gradient
        self.known[name] = self
        operator = torch.library.custom_op(
            f"nearfield::{name}", forward if restore is None else whole, mutates_args=(), schema=schema
        )
        operator.register_fake(fake)
        if gradient is not None:
            operator.register_autograd(self._differentiate_operator, setup_context=self._set_up)
        self.operator = getattr(torch.ops.nearfield, name)
        self._node = _node(self, name)

    def __call__(self, *call: Any) -> Any:
        """Run a call whose tensors are its arguments."""
        return self.dispatch(*call)(*call)

    def dispatch(self, *observed: Any) -> Callable[..., Any]:
        """What runs a call in the way that fits whoever observes these tensors of it; takes what `forward` takes."""
        if is_plain_eager(*observed):
            return self.forward
        if self._gradient is not None and is_eager_autograd(*observed):
            return self._as_node
        return self._as_operator

    def _as_node(self, *call: Any) -> Any:
        assert self._gradient is not None
        flat = self._flat(call)
        return self._node(call, flat, *(flat[place] for place in self._gradient.of))

    def _as_operator(self, *call: Any) -> Any:
        return self.operator(*self._flat(call))

    def _flat(self, call: Sequence[Any]) -> Sequence[Any]:
        return call if self._flatten is None else self._flatten(*call)

    # -- autograd --------------------------------------------------------------------------------------------------

    def _save(self, ctx: Any, flat: Sequence[Any], output: Any) -> None:
        assert self._gradient is not None
        outputs = (output,) if isinstance(output, Tensor) else output
        saved = self._gradient.saves(flat, outputs)
        ctx.save_for_backward(*(x for x in saved if isinstance(x, Tensor)))
        ctx.set_materialize_grads(self._gradient.materializes)
        ctx.statics = [None if isinstance(x, Tensor) else (x,) for x in saved]

    def _gradients(self, ctx: Any, grads: Sequence[Any], wanted: list[bool]) -> Sequence[Tensor | None]:
        assert self._gradient is not None
        if len(grads) == 1 and isinstance(grads[0], (list, tuple)):  # the outputs were a list
            grads = grads[0]
        tensors = iter(ctx.saved_tensors)  # a checkpoint gives them only once
        saved = [next(tensors) if static is None else static[0] for static in ctx.statics]
        choice = (wanted,) if self._gradient.chooses else ()
        found = self._gradient.backward(*choice, *grads, *saved)
        return (found,) if isinstance(found, Tensor) else found

    def _set_up(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.num_inputs = len(inputs)
        self._save(ctx, inputs, output)

    def _differentiate_operator(self, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        assert self._gradient is not None
        of = self._gradient.of
        found: list[Tensor | None] = [None] * ctx.num_inputs
        wanted = [ctx.needs_input_grad[place] for place in of]
        for place, gradient in zip(of, self._gradients(ctx, grads, wanted), strict=True):
            found[place] = gradient
        return tuple(found)


def _node(operation: Operation, name: str) -> Callable[..., Any]:
    """What an operation is to autograd when nothing else observes the call."""

    # Not a `setup_context` of its own: torch would then inspect the signature of `forward` at every call.
    def forward(ctx: Any, call: Sequence[Any], flat: Sequence[Any], *leaves: Tensor | None) -> Any:
        del leaves  # autograd looks for them among the arguments; `call` holds them, too
        output = operation.forward(*call)
        operation._save(ctx, flat, output)
        return tuple(output) if isinstance(output, list) else output

    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, None, *operation._gradients(ctx, grads, list(ctx.needs_input_grad[2:]))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind: Any = type(f"{name}_node", (torch.autograd.Function,), methods)
    apply: Callable[..., Any] = kind.apply
    return apply
