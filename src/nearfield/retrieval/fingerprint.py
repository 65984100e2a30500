"""What a chunk depends on besides its text, as a few named facts that can be compared."""

import hashlib
import json
import pydoc
import random
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from nearfield._checks import wrong_value

_PIECE = 2**16  # entries that share a sum
_AT_ONCE = 16 * _PIECE  # entries that memory is taken for, as 64-bit integers
_BITS = {1: torch.int8, 2: torch.int16}
_SAMPLES = 8
_ORDINARY = {Tensor, torch.nn.Parameter}

# Fields of a configuration and attributes of modules on which keys and values do not depend.
_PASSING = {
    *("_name_or_path", "_model_name_or_path", "transformers_version", "dtype", "torch_dtype"),
    *("use_cache", "architectures", "name_or_path", "warnings_issued", "hf_device_map"),
    *("_attn_implementation", "_compiled_call_impl", "_output_capturing_hooks_installed"),
}
_PASSING |= {*vars(torch.nn.Module())} - {"training"}
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_SETTINGS = (*_PLAIN, dict, list, tuple, set, frozenset, *_FUNCTIONS)
_PACKAGES = ("torch.", "transformers.", "accelerate.", "peft.")
_names: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()


def fingerprint(model: Any, prefix: Tensor) -> dict[str, str]:
    """Facts that must agree between the model that made a chunk and the one that reuses it.

    All parameters and buffers are read, and the place of each entry counts. A change of one entry of up to 32 bits
    always changes the facts; other changes go unseen with a probability below 2^-31. The sums are the same on every
    device. They do not protect against deliberate forgery.
    """
    return _facts(model, prefix, _weights(model), _contents(model)[1])


class Fingerprints:
    """The fingerprint of a model as it is at each call. The weights are read again only where they have changed."""

    def __init__(self) -> None:
        self._watch: _Watch | None = None
        self._weights = ""

    def of(self, model: Any, prefix: Tensor) -> dict[str, str]:
        tensors, settings = _contents(model)
        if self._watch is None or not self._watch.unchanged(tensors):
            watch = _Watch(tensors)  # first, so that the next call notices what changes during the reading
            self._weights = _weights(model)
            self._watch = watch
        return _facts(model, prefix, self._weights, settings)


def chunk_id(facts: Mapping[str, str], tokens: Tensor) -> str:
    """The name of a chunk, which depends on its text and the facts alone."""
    return _digest(_text(dict(facts)) + _text(tokens.tolist()))


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The facts that do not agree, or that only one side knows."""
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]


def _facts(model: Any, prefix: Tensor, weights: str, settings: str) -> dict[str, str]:
    config = {name: value for name, value in model.config.to_dict().items() if name not in _PASSING}
    rope = config.pop("rope_parameters", None)
    return {
        "format": "3",
        "model": type(model).__name__,
        "configuration": _digest(_text(config)),
        "modules": _digest(settings),
        "weights": weights,
        "precision": str(model.dtype),
        "rope": _text(rope),
        "prefix": _text(prefix.tolist()),
    }


# -- modules -----------------------------------------------------------------------------------------------------


def _contents(model: Any) -> tuple[list[Tensor], str]:
    """All tensors of a model in a fixed order, and as text what else its modules are.

    That is the class of each module, the names of its parts, its attributes (as the adapters that are on), and its
    hooks. To ask the model for all this by name takes several times as long.
    """
    tensors: list[Tensor | None] = []
    seen: list[str] = []
    modules = [model]
    while modules:
        module = modules.pop()
        modules += [child for child in module._modules.values() if child is not None]
        if "_orig_mod" in module._modules:  # what torch.compile puts around a model
            continue
        tensors += module._parameters.values()
        tensors += module._buffers.values()
        seen.append(type(module).__qualname__)
        seen += module._modules
        for name, value in vars(module).items():
            kind = type(value)
            if name in _PASSING:
                continue
            if issubclass(kind, Tensor):
                tensors.append(value)
            elif issubclass(kind, _SETTINGS):
                seen += (name, _setting(value))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            seen += [_name_of(hook) for hook in hooks.values() if not _only_observes(hook)]
    found = [tensor for tensor in tensors if tensor is not None]
    if not _ORDINARY.issuperset(map(type, found)):
        found = [part for tensor in found for part in _parts(tensor)]
    return found, "\n".join(seen)


def _setting(value: Any) -> str:
    """A value as text, without the objects in it, whose text would differ from process to process."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, _FUNCTIONS):
        return _name_of(value)
    parts: Iterable[str] = ()
    if isinstance(value, dict):
        parts = (f"{_setting(key)}: {_setting(one)}" for key, one in value.items())
    elif isinstance(value, list | tuple):
        parts = map(_setting, value)
    elif isinstance(value, set | frozenset):
        parts = sorted(map(_setting, value))
    return f"{type(value).__name__}({', '.join(parts)})"


def _name_of(function: Any) -> str:
    """The name of a function that can be imported by it, or is of a known package; else one of this process alone."""
    try:
        is_known = function in _names
    except TypeError:  # an object that cannot be remembered: never the same again
        return uuid.uuid4().hex
    if not is_known:
        if isinstance(function, partial):
            name = _setting((function.func, function.args, function.keywords))
        else:
            is_of_module = isinstance(getattr(function, "__self__", None), torch.nn.Module)
            plain = function.__func__ if is_of_module else function
            name = f"{getattr(plain, '__module__', None)}.{getattr(plain, '__qualname__', None)}"
            if pydoc.locate(name) is not plain and not name.startswith(_PACKAGES):
                name = uuid.uuid4().hex
        _names[function] = name
    return _names[function]


def _only_observes(hook: Any) -> bool:
    """Whether a hook is one by which transformers notes outputs, once it was asked for some."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


# -- reading all weights -----------------------------------------------------------------------------------------


@torch.no_grad()
def _weights(model: Any) -> str:
    # The state lacks buffers that are not saved, such as the frequencies of a rotary embedding.
    state = dict(model.named_buffers(remove_duplicate=False)) | model.state_dict(keep_vars=True)
    for prefix, module in model.named_modules():
        more = {name: value for name, value in vars(module).items() if issubclass(type(value), Tensor)}
        state |= {f"{prefix}.{name}": value for name, value in more.items()}
    read: dict[int, str] = {}  # tied weights once
    lines = []
    for name, value in state.items():
        if id(value) not in read:
            read[id(value)] = "; ".join(_described(name, leaf) for leaf in pytree.tree_leaves(value))
        lines.append(f"{name} {read[id(value)]}")
    return _digest("\n".join(lines))


def _described(name: str, value: object) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return "; ".join(
        f"{list(part.shape)} {part.dtype} {_text(list(_sums(name, part)))}" for part in _parts(value)
    )


def _sums(name: str, weight: Tensor) -> Iterator[int]:
    """Sums over pieces of a tensor: its bits as integers, times a factor for each place."""
    if weight.is_meta:
        hint = "Weights that accelerate has offloaded cannot be compared."
        wrong_value("model", "hold all its weights in memory", f"{name} on the meta device", hint)
    if weight.is_quantized:
        weight = weight.dequantize()
    entries = weight.detach().reshape(-1).contiguous()
    bits = entries.view(_BITS.get(entries.element_size(), torch.int32))
    factors = _factors(bits.device)
    for some in bits.split(_AT_ONCE):
        whole = len(some) // _PIECE * _PIECE
        yield from (some[:whole].view(-1, _PIECE) * factors).sum(1).tolist()
        if whole < len(some):
            yield int((some[whole:] * factors[: len(some) - whole]).sum())


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, so that a change of one entry always changes the sum."""
    numbers = bytearray(random.Random(0).randbytes(8 * _PIECE))
    return (torch.frombuffer(numbers, dtype=torch.int64) | 1).to(device)


# -- noticing changes --------------------------------------------------------------------------------------------


class _Watch:
    """Decides whether tensors have changed since they were last seen, without reading all of them.

    torch counts writes to a tensor, but not those through `.data` (as peft merges), NumPy or a fused optimizer. To
    notice these, eight entries of each tensor are compared. References are weak, so they keep no memory alive. While a
    reference to a storage is held, a new storage at the same address is not mistaken for it.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._seen = [(weakref.ref(tensor), _mark(tensor), _places(tensor)) for tensor in tensors]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            if not tensor.is_quantized:  # cannot be read as bytes
                self._alike.setdefault((tensor.device, tensor.dtype), []).append(index)
        samples = self._samples_of(tensors)
        assert samples is not None
        self._samples = samples

    def unchanged(self, tensors: list[Tensor]) -> bool:
        samples = self._samples_of(tensors) if len(tensors) == len(self._seen) else None
        return samples is not None and all(map(torch.equal, samples, self._samples))

    @torch.inference_mode()
    def _samples_of(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """Some entries of each tensor, as bytes; None if a tensor was replaced. Comparing them waits for a GPU."""
        some = []
        for tensor, (known, mark, places) in zip(tensors, self._seen, strict=True):
            if known() is not tensor or _mark(tensor) != mark:
                return None
            some.append(tensor.as_strided(*places))
        return [
            torch.cat([some[index] for index in indices]).view(torch.uint8)
            for indices in self._alike.values()
        ]


def _mark(tensor: Tensor) -> tuple[Any, ...]:
    """Facts that differ after a tensor was written to or given other memory. Inference tensors count no writes."""
    version = None if tensor.is_inference() else tensor._version
    storage = tensor.untyped_storage()._cdata
    return version, storage, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _places(tensor: Tensor) -> tuple[tuple[int], tuple[int]]:
    """How many entries of a tensor's memory are compared, and how far apart they stand."""
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(span, _SAMPLES) if tensor.numel() else 0
    return (count,), (max(1, (span - 1) // max(1, count - 1)),)


def _parts(tensor: Any) -> Iterable[Tensor]:
    """The tensors that hold a tensor's memory. A tensor that wraps others, as a quantised one, has none of its own."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return (tensor,)
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
