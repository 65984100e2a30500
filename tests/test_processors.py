"""Processors of users: however they call attention, that call is taken over, and they do all else as before."""

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from tests import tiny_models
from tests.test_adapters import EVERYTHING, SPARSE, assert_differ, assert_same, run, trace
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

import nearfield
from nearfield.diffusers import models
from nearfield.diffusers.models import spec as registry
from nearfield.diffusers.processor import _taking_over

GRID = (9, 14)


def heads_of(attn: Any, x: Tensor, rotary: Any) -> Any:
    """Queries, keys and values of a single block of FLUX, heads before tokens."""
    query, key, value = (to(x).unflatten(-1, (attn.heads, -1)) for to in (attn.to_q, attn.to_k, attn.to_v))
    query, key = attn.norm_q(query), attn.norm_k(key)
    if rotary is not None:
        query = apply_rotary_emb(query, rotary, sequence_dim=1)
        key = apply_rotary_emb(key, rotary, sequence_dim=1)
    return tuple(each.transpose(1, 2) for each in (query, key, value))


def joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


class Direct:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        query, key, value = heads_of(attn, x, rows)
        return joined(F.scaled_dot_product_attention(query, key, value))


class Alias:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        return joined(sdpa(*heads_of(attn, x, rows)))


class WithText:
    """A text
    with a line that is not indented."""

    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        """A text
        that is indented."""
        return joined(sdpa(*heads_of(attn, x, rows)))


class Stateful:
    """Its own attributes and methods are there."""

    def __init__(self) -> None:
        self.factor, self.__hidden, self.calls = 1.0, 1.0, 0

    def scaled_dot_product_attention(self, value: Tensor) -> Tensor:
        return value

    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        self.calls += 1
        query, key, value = heads_of(attn, x, rows)
        value = self.scaled_dot_product_attention(value) * self.factor * self.__hidden
        return joined(sdpa(query, key, value))


class Derived(Direct):
    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(attn, *args, **kwargs)


class Inherited(Direct):
    pass


class InAFunction:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        return helper(*heads_of(attn, x, rows))


def helper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return joined(F.scaled_dot_product_attention(query, key, value))


class InAMethod:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        return self.read(*heads_of(attn, x, rows))

    def read(self, *args: Any) -> Tensor:
        return helper(*args)


class UnderAnotherName:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        attention = F.scaled_dot_product_attention
        return joined(attention(*heads_of(attn, x, rows)))


class ImportedInside:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        from torch.nn.functional import scaled_dot_product_attention as attention

        return joined(attention(*heads_of(attn, x, rows)))


class Nested:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return scaled_dot_product_attention(query, key, value)

        return joined(read(*heads_of(attn, x, rows)))


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return twice


class Decorated:
    @doubled
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        return joined(sdpa(*heads_of(attn, x, rows))) / 2


def closure() -> type:
    factor = 1.0

    class Closure:
        def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
            return factor * joined(sdpa(*heads_of(attn, x, rows)))

    return Closure


def defaults() -> type:
    factor = 1.0

    class Defaults:
        def __call__(
            self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None, *, by: float = factor
        ) -> Any:
            return by * joined(sdpa(*heads_of(attn, x, rows)))

    return Defaults


class Lambda:
    __call__ = lambda self, attn, x, _=None, mask=None, rows=None: joined(  # noqa: E731
        sdpa(*heads_of(attn, x, rows))
    )


class Module(nn.Module):
    def forward(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        return joined(sdpa(*heads_of(attn, x, rows)))


class Dispatched:
    _attention_backend = None
    _parallel_config = None

    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        query, key, value = (each.transpose(1, 2) for each in heads_of(attn, x, rows))
        out = dispatch_attention_fn(
            query, key, value, None, 0.0, False, None, False, None, backend=self._attention_backend
        )
        return out.flatten(2)


class DispatchedInAMethod(Dispatched):
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        return self.read(*(x.transpose(1, 2) for x in heads_of(attn, x, rows)))

    def read(self, *args: Any) -> Tensor:
        out: Tensor = attention_dispatch.dispatch_attention_fn(*args, backend=self._attention_backend)
        return out.flatten(2)


def without_source() -> type:
    made: dict[str, Any] = dict(globals())
    exec(inspect.getsource(Direct).replace("Direct", "WithoutSource"), made)
    kind: type = made["WithoutSource"]
    return kind


COMPILED = (Direct, Alias, WithText, Inherited, Nested, defaults(), Dispatched)
"""Those whose source shows the call."""
WATCHED = (
    Stateful,  # a name of its class is hidden: compiled alone, it would be another
    Derived,
    InAFunction,
    InAMethod,
    UnderAnotherName,
    ImportedInside,
    Decorated,
    closure(),
    Lambda,
    Module,
    DispatchedInAMethod,
    without_source(),
)
"""Those in which any call of torch may be it."""
KINDS = {kind.__name__: kind for kind in (*COMPILED, *WATCHED)}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(models.flux.FLUX, processors=("FluxAttnProcessor", *KINDS))
    monkeypatch.setitem(registry.SPECS, spec.model, spec)


def with_processor(kind: type) -> Any:
    model = tiny_models.flux(0, 2)
    for block in model.single_transformer_blocks:
        block.attn.set_processor(kind())
    return model


def test_which_are_compiled() -> None:
    assert all(_taking_over(kind.__call__) for kind in COMPILED)
    assert not any(_taking_over(kind.__call__) for kind in WATCHED)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_processor_is_taken_over(kind: type) -> None:
    inputs = tiny_models.flux_inputs(GRID)
    stock = tiny_models.flux(0, 2)
    dense = run(stock, inputs)
    with nearfield.apply(stock, SPARSE):
        sparse = run(stock, inputs)
    model = with_processor(kind)
    before = trace(model)
    assert_same(run(model, inputs), dense)
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, inputs), dense)
    with nearfield.apply(model, SPARSE):
        assert_same(run(model, inputs), sparse)
    assert_differ(sparse, dense)
    assert trace(model) == before


class Twice:
    def __call__(self, attn: Any, x: Any, _: Any = None, mask: Any = None, rows: Any = None) -> Any:
        query, key, value = heads_of(attn, x, rows)
        return joined(sdpa(query, key, sdpa(query, key, value)))


def test_one_that_attends_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_models.flux(0, 1), tiny_models.flux_inputs(GRID)
    monkeypatch.setattr(FluxAttnProcessor, "__call__", Twice.__call__)
    with nearfield.apply(model, SPARSE), pytest.raises(ValueError) as error:
        run(model, inputs)
    assert str(error.value) == (
        "`processor` must call `scaled_dot_product_attention` once; got 2 calls in FluxAttnProcessor. "
        "Set another processor, then apply."
    )


def test_attention_that_somebody_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries of kernels ask their users to: dense layers call theirs, sparse ones do not."""
    model, inputs = with_processor(Direct), tiny_models.flux_inputs(GRID)
    dense = run(model, inputs)
    calls = []

    def exchanged(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", exchanged)
    _taking_over.cache_clear()
    with nearfield.apply(model, EVERYTHING):
        assert_same(run(model, inputs), dense)
    assert not calls
    assert_same(run(model, inputs), dense)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", [Stateful, InAMethod, Dispatched], ids=lambda kind: kind.__name__)
def test_models_that_share_a_processor(kind: type) -> None:
    """Each reads its own lists, and the processor is called as it was once they are removed."""
    one, two = (with_processor(kind) for _ in range(2))
    shared = kind()
    for model in (one, two):
        for block in model.single_transformer_blocks:
            block.attn.set_processor(shared)
    inputs = tiny_models.flux_inputs(GRID)
    dense = run(one, inputs)
    with nearfield.apply(one, SPARSE):
        sparse = run(one, inputs)
        assert torch.equal(run(two, inputs), dense)
        with nearfield.apply(two, EVERYTHING):
            assert_same(run(two, inputs), dense)
            assert torch.equal(run(one, inputs), sparse)
    assert torch.equal(run(one, inputs), dense)
    assert torch.equal(run(two, inputs), dense)


@pytest.mark.parametrize("kind", [Direct, InAMethod], ids=lambda kind: kind.__name__)
def test_threads_do_not_see_each_other(kind: type) -> None:
    """One computes sparsely while another, with a model of its own, is dense."""
    inputs = tiny_models.flux_inputs(GRID)
    stock, adapted = with_processor(kind), with_processor(kind)
    dense = run(stock, inputs)
    with nearfield.apply(adapted, SPARSE):
        sparse = run(adapted, inputs)
        wrong: list[str] = []

        def compare(model: Any, expected: Tensor) -> None:
            for _ in range(8):
                if not torch.equal(run(model, inputs), expected):
                    wrong.append(type(model).__name__)

        threads = [
            threading.Thread(target=compare, args=pair) for pair in ((stock, dense), (adapted, sparse))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_functions_are_compiled_once() -> None:
    model, inputs = tiny_models.flux(), tiny_models.flux_inputs(GRID)
    dense = run(model, inputs)
    with nearfield.apply(model, SPARSE):
        sparse = run(model, inputs)
    made = _taking_over.cache_info().currsize
    for _ in range(5):
        with nearfield.apply(model, SPARSE):
            assert torch.equal(run(model, inputs), sparse)
        assert torch.equal(run(model, inputs), dense)
    assert _taking_over.cache_info().currsize == made


@pytest.mark.parametrize("kind", [Direct, InAMethod, Dispatched], ids=lambda kind: kind.__name__)
def test_compiled_blocks_are_one_graph(kind: type) -> None:
    model, inputs = with_processor(kind), tiny_models.flux_inputs(GRID)
    with nearfield.apply(model, SPARSE):
        sparse = run(model, inputs)
        for block in model.single_transformer_blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        assert_same(run(model, inputs), sparse)
    torch.compiler.reset()
