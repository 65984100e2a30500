"""The attention processor that is put in place of a model's own.

It calls the processor that was there, which projects, normalises and rotates as it always did, and takes over only
where that one attends. So it has no model code of its own. The processor's function is compiled anew from its source,
with that one call addressed to us: nothing is patched, other threads and models see nothing, torch.compile traces it as
any function, and no other call costs more than before. Where the source does not show the call (it is in a helper, or
under a decorator), a `TorchFunctionMode` takes it over.

Where a kernel rotates in one pass what plain torch does in nine, the processor that was there is given no rotary rows,
and queries and keys are rotated at the call that is taken over.
"""

import ast
import copy
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

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
        call: the call that the processor is in.
        heads: (heads, head_dim) that the layer has.
        rotary: the argument with rotary rows, as `Spec.rotary`.
    """

    def __init__(
        self,
        original: Any,
        call: ModelCall,
        impl: Impl,
        heads: tuple[int, int],
        rotary: str = "",
    ) -> None:
        self.original = original
        function = _taking_over(type(original).__call__)
        self._function = function or _in_function_mode
        self._twin = original if function else _ending_in_torch(original)
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
        out = self._function(taken, self._twin, attn, *args, **kwargs)
        if taken.times != 1:
            got = f"{taken.times} calls in {type(self.original).__name__}"
            hint = "Set another processor, then apply."
            wrong_value("processor", "call `scaled_dot_product_attention` once", got, hint)
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
    return _class_like(kind)(original, call, impl, heads, rotary)


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

_TAKEN = "nearfield_taken"
"""The argument that a compiled function asks for attention."""


class _TakeOver(ast.NodeTransformer):
    """Addresses a function's calls of torch's and diffusers' attention to its new first argument."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self.times = 0

    def visit_Call(self, node: ast.Call) -> ast.Call:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        self.generic_visit(node)
        called = self._named(node.func)
        # torch's own, or what somebody has put in its place.
        torches = scaled_dot_product_attention, functional.scaled_dot_product_attention
        if any(called is each for each in (*torches, dispatch_attention_fn)):
            self.times += 1
            node.func = ast.Attribute(ast.Name(_TAKEN, ast.Load()), "attend", ast.Load())
            if called is dispatch_attention_fn:
                node.keywords.append(ast.keyword("tokens_first", ast.Constant(True)))
        return node

    def _named(self, node: ast.expr) -> Any:
        """What an expression such as `F.scaled_dot_product_attention` names outside the function; None if nothing."""
        root, *path = ast.unparse(node).split(".")
        found = None
        if root not in self.function.__code__.co_varnames:
            found = self.function.__globals__.get(root)
        for name in path:
            found = getattr(found, name, None)
        return found


@functools.cache
def _taking_over(function: Any) -> Callable[..., Any] | None:
    """A processor's function, compiled with a first argument that it asks for attention.

    None where the source does not say what runs, as with closures, decorators and `super()`, or has no such call.
    """
    try:
        # In a block, so that the columns of its lines and strings stay as they are.
        tree = ast.parse("if True:\n" + inspect.getsource(function))
    except (OSError, TypeError, SyntaxError):
        return None
    code, definition = function.__code__, tree.body[0].body[0]  # type: ignore[attr-defined]
    if not isinstance(definition, ast.FunctionDef) or definition.name != code.co_name:
        return None
    definition.decorator_list = []
    ast.increment_lineno(tree, code.co_firstlineno - 2)
    if _facts(_compiled(tree, code)) != _facts(code):
        return None
    take_over = _TakeOver(function)
    take_over.visit(tree)
    if not take_over.times:
        return None
    (definition.args.posonlyargs or definition.args.args).insert(0, ast.arg(_TAKEN))
    changed = _compiled(ast.fix_missing_locations(tree), code)
    made = FunctionType(changed, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _compiled(tree: ast.Module, code: CodeType) -> CodeType:
    """The function of a source that has the name and file of `code`."""
    module = compile(tree, code.co_filename, "exec", dont_inherit=True)
    functions = (each for each in module.co_consts if isinstance(each, CodeType))
    return next(each for each in functions if each.co_name == code.co_name)


def _facts(code: CodeType) -> tuple[Any, ...]:
    """What differs where two functions have not one source. Their bytecode depends on the imports around it, too."""
    values = [each for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_names, code.co_varnames, code.co_freevars, values


class _FunctionMode(TorchFunctionMode):
    """Takes over calls of torch's attention wherever they are made, at some cost for every other call of torch."""

    def __init__(self, taken: "_Taken") -> None:
        super().__init__()
        self.taken = taken

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # written in Python, and torch.compile knows it only as a method
            return args[0].unflatten(*args[1:], **kwargs)
        if func is scaled_dot_product_attention:
            func = self.taken.attend
        return func(*args, **kwargs)


def _in_function_mode(taken: "_Taken", processor: Any, attn: Any, *args: Any, **kwargs: Any) -> Any:
    with _FunctionMode(taken):
        return processor(attn, *args, **kwargs)


def _ending_in_torch(processor: Any) -> Any:
    """A copy that does not take another backend, whatever is set on the processor or for the process."""
    if not hasattr(processor, "_attention_backend"):
        return processor
    from diffusers.models.attention_dispatch import AttentionBackendName

    twin = copy.copy(processor)
    twin._attention_backend = AttentionBackendName.NATIVE
    twin._parallel_config = None
    return twin


_NOTHING = Extras(None, None)


class _Taken:
    """The call that was taken over: what a layer reads, or torch's attention if that is None."""

    def __init__(
        self,
        attention: LayerAttention | StatefulAttention | None,
        impl: Impl,
        heads: tuple[int, int],
        extras: Extras,
    ) -> None:
        self.attention, self.impl, self.heads, self.extras = attention, impl, heads, extras
        self.times = 0

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
        attention_kwargs: Any = None,
        *,
        tokens_first: bool = False,
        backend: Any = None,
        parallel_config: Any = None,
    ) -> Tensor:
        """As torch's `scaled_dot_product_attention`, or as diffusers' `dispatch_attention_fn`.

        Args:
            tokens_first: tokens come before heads, as in diffusers' function. A mask may be `[B, keys]` then.
        """
        self.times += 1
        if tokens_first:
            if attn_mask is not None and attn_mask.dim() == 2:
                attn_mask = attn_mask[:, None, None]
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if dropout_p or is_causal:
            wrong_value("processor", "use neither dropout nor causal order", (dropout_p, is_causal))
        if (query.shape[1], query.shape[3]) != self.heads:
            found = f"{query.shape[1]} of {query.shape[3]}"
            hint = "Tensor parallelism is not supported: plans are made for the heads there were."
            wrong_value("processor", f"have the {self.heads[0]} heads of {self.heads[1]} it had", found, hint)
        if self.extras.rows is not None:
            query, key = (_rotated(x, self.extras.rows, self.impl) for x in (query, key))
        if self.attention is None:
            out = scaled_dot_product_attention(
                query, key, value, attn_mask, scale=scale, enable_gqa=enable_gqa
            )
            return out.transpose(1, 2) if tokens_first else out
        kind = query.device.type
        if torch.is_autocast_enabled(kind):
            # It casts for scaled_dot_product_attention, but does not know attend.
            dtype = torch.get_autocast_dtype(kind)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        bias = None if attn_mask is None else _key_bias(attn_mask)
        if self.extras.bias is not None:
            bias = self.extras.bias if bias is None else self.extras.bias + bias
        out = self.attention.attend(query, key, value, key_bias=bias, scale=scale, impl=self.impl).out
        return out.transpose(1, 2) if tokens_first else out


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
