"""The attention processor that is put in place of a model's own.

It calls the function of the processor that was there, which projects, normalises and rotates as it always did, and
takes over only where that function attends. So it has no model code of its own. The function is compiled anew from its
source, with that one call addressed to us: nothing is patched, other threads and models see nothing, torch.compile
traces it as any function, and no other call costs more than before.

Where a kernel rotates in one pass what plain torch does in nine, the processor that was there is given no rotary rows,
and queries and keys are rotated at the call that is taken over.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nearfield._checks import shape_of, wrong_value
from nearfield._types import Attended, Impl
from nearfield.diffusers.models.spec import Arguments
from nearfield.methods import LayerAttention
from nearfield.ops import is_rotated_by_kernel, rotate
from nearfield.session import key_bias


class ModelCall(Protocol):
    """The call of a model that a processor is in, as far as the processor asks."""

    is_dense_step: bool
    is_recomputing: bool

    def in_forward(self) -> bool: ...

    def called_outside(self, was_shared: bool) -> None: ...


class Extras(NamedTuple):
    """What is left to do where the call is taken over.

    Args:
        rows: rotary rows (cos, sin) of each sample, `[B or 1, 1, tokens, head_dim]`: the original was given none.
        bias: on keys, `[B, 1, tokens]`.
    """

    rows: "tuple[Tensor, Tensor] | None"
    bias: Tensor | None


class SparseProcessor:
    """Reads what `attention` says; without one, and in dense steps, it is the original.

    Args:
        original: the processor that was there.
        attending: its function, which asks its first argument for attention.
        call: the call that the processor is in.
        heads: (heads, head_dim) that the layer has.
        rotary: the argument with rotary rows, as `Spec.rotary`.
    """

    def __init__(
        self,
        original: Any,
        attending: Callable[..., Any],
        call: ModelCall,
        impl: Impl,
        heads: tuple[int, int],
        rotary: str = "",
    ) -> None:
        self.original, self.attending = original, attending
        self.heads = heads
        # Without itself and the attention module.
        self._names = tuple(inspect.signature(type(original).__call__).parameters)[2:]
        self.rotary = rotary if rotary in self._names else ""
        self.call = call
        self.impl = impl
        self.attention: LayerAttention | StatefulAttention | None = None
        self.dense_attention: LayerAttention | None = None
        """What dense steps and layers read where tokens are split over ranks, or merged ones weighed; None: the
        original reads."""
        self.extras: Extras | None = None
        """Set while a block runs on merged tokens."""
        self.is_shared = False
        """Whether another model has called it with gradients: then it is not known whose layer is computed again."""

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.call.in_forward():
            self._called_outside()
            return self.original(attn, *args, **kwargs)
        if self.is_shared and self.call.is_recomputing:
            hint = "Call `disable_gradient_checkpointing()`, or do not share layers."
            wrong_value("backward", "not compute layers again that two models share", "checkpointing", hint)
        extras = self.extras
        is_dense = self.call.is_dense_step
        attention = self.dense_attention if is_dense else self.attention or self.dense_attention
        if attention is None and extras is None:
            return self.original(attn, *args, **kwargs)
        # What is traced needs no kernel, and the kernel has no gradient.
        if extras is None and self.rotary and not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
            extras, args, kwargs = self._without_rows(args, kwargs)
        taken = _Taken(attention, self.impl, self.heads, extras or _NOTHING)
        out = self.attending(taken, attn, *args, **kwargs)
        if taken.times != 1:
            got = f"{taken.times} calls in {type(self.original).__name__}"
            wrong_value("processor", "call `scaled_dot_product_attention` once", got)
        return out

    def _without_rows(self, args: Any, kwargs: Any) -> tuple[Extras | None, Any, Any]:
        """Rotary rows, and the other arguments of the original: it is given none."""
        arguments = Arguments(self._names, args, kwargs)
        rows = arguments.get(self.rotary)
        if rows is None or rows[0].dim() != 2 or not is_rotated_by_kernel(self.impl, *rows):
            return None, args, kwargs
        cos, sin = rows
        arguments.set(self.rotary, None)
        return Extras((cos[None, None], sin[None, None]), None), arguments.args, arguments.kwargs

    def _called_outside(self) -> None:
        if not torch.compiler.is_compiling():
            self.call.called_outside(self.is_shared)
        if torch.is_grad_enabled():
            self.is_shared = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_copy(type(self.original).__name__)

    # diffusers sets these on processors that have them; they are for the dense parts.

    @property
    def _attention_backend(self) -> Any:
        return getattr(self.original, "_attention_backend", None)

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        if hasattr(self.original, "_attention_backend"):
            self.original._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return getattr(self.original, "_parallel_config", None)

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        if hasattr(self.original, "_parallel_config"):
            self.original._parallel_config = config


class StatefulAttention:
    """A layer whose result depends on earlier steps, as a processor has to call it: not traced, nothing computed again.

    What it does depends on the step, so torch.compile would have to make a graph for each; and a block that is
    computed again in the backward pass would find what its first computation has left.
    """

    def __init__(self, layer: LayerAttention, call: ModelCall) -> None:
        self.layer, self.call = layer, call
        self.attend = torch.compiler.disable(self._attend, reason="lists are remembered from step to step")

    def _attend(self, *args: Any, **kwargs: Any) -> Attended:
        if self.call.is_recomputing:
            hint = 'Use predict="online", or call `disable_gradient_checkpointing()`.'
            wrong_value("backward", "not compute layers again that remember", "checkpointing", hint)
        return self.layer.attend(*args, **kwargs)


def sparse_processor(
    original: Any, call: ModelCall, impl: Impl, heads: tuple[int, int], rotary: str = ""
) -> SparseProcessor:
    kind: Any = type(original)
    return _class_like(kind)(original, _attending(kind.__call__), call, impl, heads, rotary)


def refuse_to_copy(name: str) -> NoReturn:
    """What copying and pickling end in: a copy would share the plans of the original, and lose its pipeline."""
    hint = (
        "Call `nearfield.remove(model)` first; `save_pretrained` and `state_dict` work also while it is on."
    )
    wrong_value("model", "be without nearfield to be copied or pickled", f"{name} with it", hint)


@functools.cache
def _class_like(original: Any) -> type[SparseProcessor]:
    """A class whose `__call__` shows the original's signature: attention modules pass on only what they find there."""

    own = SparseProcessor.__call__  # as a function of its own, which may have another signature
    call = functools.wraps(original.__call__)(FunctionType(own.__code__, own.__globals__))
    return type(f"Sparse{original.__name__}", (SparseProcessor,), {"__call__": call})


# -- taking over one call ------------------------------------------------------------------------------------------

_TAKEN = {"scaled_dot_product_attention": "attend", "dispatch_attention_fn": "dispatch"}
"""The functions that attend, torch's and diffusers', and the methods of `_Taken` that are called instead."""


class _TakeOver(ast.NodeTransformer):
    """Addresses calls of functions that attend to an object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        called = ast.unparse(node.func).rpartition(".")[2]
        if called in _TAKEN:
            node.func = ast.Attribute(ast.Name(self.name, ast.Load()), _TAKEN[called], ast.Load())
        return node


@functools.cache
def _attending(function: Any) -> Callable[..., Any]:
    """A function of a processor that asks its first argument for attention; as it is where it has no such call."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:
        wrong_value("processor", "have its source at hand", function.__qualname__)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return function  # type: ignore[no-any-return]
    arguments = definition.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    definition.returns, definition.decorator_list = None, []
    changed = _TakeOver((*arguments.posonlyargs, *arguments.args)[0].arg).visit(tree)
    code = function.__code__
    ast.increment_lineno(ast.fix_missing_locations(changed), code.co_firstlineno - 1)
    made: dict[str, Any] = {}
    exec(compile(changed, code.co_filename, "exec", dont_inherit=True), function.__globals__, made)
    return made[definition.name]  # type: ignore[no-any-return]


_NOTHING = Extras(None, None)
_KNOWN = ("dropout_p", "is_causal", "scale", "enable_gqa")


class _Taken:
    """The call that was taken over: what a layer reads, or torch's attention if that is None."""

    _attention_backend = None
    _parallel_config = None

    def __init__(
        self,
        attention: LayerAttention | StatefulAttention | None,
        impl: Impl,
        heads: tuple[int, int],
        extras: Extras,
    ) -> None:
        self.attention, self.impl, self.heads, self.extras = attention, impl, heads, extras
        self.times = 0

    def dispatch(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """As diffusers' `dispatch_attention_fn`: heads stand behind tokens, and a mask may be `[B, keys]`."""
        if attn_mask is not None and attn_mask.dim() == 2:
            attn_mask = attn_mask[:, None, None]
        known = {name: options[name] for name in _KNOWN if name in options}
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return self.attend(query, key, value, attn_mask, **known).transpose(1, 2)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As torch's `scaled_dot_product_attention`."""
        self.times += 1
        if dropout_p or is_causal:
            wrong_value("processor", "use neither dropout nor causal order", (dropout_p, is_causal))
        if (query.shape[1], query.shape[3]) != self.heads:
            found = f"{query.shape[1]} of {query.shape[3]}"
            hint = "Tensor parallelism is not supported: plans are made for the heads there were."
            wrong_value("processor", f"have the {self.heads[0]} heads of {self.heads[1]} it had", found, hint)
        if self.extras.rows is not None:
            query, key = (_rotated(x, self.extras.rows, self.impl) for x in (query, key))
        if self.attention is None:
            return scaled_dot_product_attention(
                query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa
            )
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # It casts for scaled_dot_product_attention, but does not know attend.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        bias = None if attn_mask is None else _key_bias(attn_mask)
        if self.extras.bias is not None:
            bias = self.extras.bias if bias is None else self.extras.bias + bias
        return self.attention.attend(query, key, value, key_bias=bias, scale=scale, impl=self.impl).out


def _rotated(x: Tensor, rows: tuple[Tensor, Tensor], impl: Impl) -> Tensor:
    for row in rows:
        if row.shape[2:] != x.shape[2:]:
            rule = f"have a row of {x.shape[3]} for each of {x.shape[2]} tokens"
            wrong_value("image_rotary_emb", rule, shape_of(row[0, 0]), "Are `txt_ids` as long as the text?")
    return rotate(x, *rows, impl)


def _key_bias(mask: Tensor) -> Tensor:
    """A mask `[B, H or 1, 1, M]`, boolean or added to the logits, as a bias on keys."""
    if mask.dim() != 4 or mask.shape[2] != 1:
        wrong_value("attention_mask", "be the same for every query ([batch, heads, 1, keys])", shape_of(mask))
    return key_bias(mask)
