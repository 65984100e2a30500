"""What `apply` works on: the models of a target, the parts that tokens enter and leave, and their attention layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from nearfield._checks import wrong_type, wrong_value
from nearfield._types import Impl
from nearfield.diffusers.lora import Switch
from nearfield.diffusers.models.spec import CROSS_ATTENTION, Spec, classes_where, spec_of
from nearfield.diffusers.processor import ModelCall, sparse_processor
from nearfield.methods import Composition
from nearfield.parallel import Ranks
from nearfield.session import Layer, attention_modules, find

if TYPE_CHECKING:
    from nearfield.diffusers.merged_blocks import Merger

_LARGEST_HEAD = 128  # that a kernel takes
_COMPONENTS = ("transformer", "transformer_2", "unet")
_UNKNOWN = (
    "One spec makes a class known: it says which attention layers see the image, where tokens enter and leave, and how"
    " large the image is (docs/models.md, Add a model)."
)


@dataclass(frozen=True, eq=False)
class TargetModule:
    """A part of a model that tokens enter and leave, and what is to be done in it. Nothing of it changes.

    Args:
        name: its path in the model; "" is the model itself.
        root: the model.
        spec: the facts about the model.
        impl: passed on to `attend`.
        ranks: those that its tokens are split over.
        lora: what is switched off in dense steps.
    """

    name: str
    module: nn.Module
    root: nn.Module
    spec: Spec
    method: Composition
    impl: Impl = "auto"
    ranks: Ranks | None = None
    lora: Switch | None = None

    def path(self, name: str) -> str:
        """Where something that has a name in this part is found in the model."""
        return f"{self.name}.{name}" if self.name else name


@dataclass(frozen=True)
class ModuleLayer(Layer):
    """One attention module of a part.

    Args:
        head_dim: the dimension of its queries.
        name: its path in the model.
        path: its path in the part.
        processor: what was found in it.
        installed: what was put there; the same if it stays as it was.
    """

    head_dim: int
    name: str
    path: str
    attention: Any
    processor: Any
    installed: Any

    @property
    def is_ours(self) -> bool:
        """Whether a processor was put in: also in dense layers, where tokens are split over ranks or merged."""
        return self.installed is not self.processor


def name_of(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


# -- models and parts ----------------------------------------------------------------------------------------------


def models_of(target: Any) -> list[nn.Module]:
    """The models of a pipeline, or a model alone, without the wrappers around them."""
    if isinstance(target, nn.Module):
        return [_unwrapped(target)]
    parts = [getattr(target, name, None) for name in _COMPONENTS]
    models = [_unwrapped(part) for part in parts if isinstance(part, nn.Module)]
    if not models:
        wrong_type(
            "target", "be a diffusers pipeline with a transformer or unet, or a model", name_of(target)
        )
    return models


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch.compile, peft and DistributedDataParallel, which call it as a whole."""
    if isinstance(model, nn.DataParallel):
        hint = "Its replicas would share one state among threads; use DistributedDataParallel, or the model inside."
        wrong_value("target", "not be in DataParallel", name_of(model.module), hint)
    inner: Any = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
    elif hasattr(type(model), "get_base_model"):
        whole: Any = model
        inner = whole.get_base_model()
    return model if inner is model else _unwrapped(inner)


def known_spec(model: nn.Module) -> Spec:
    """The spec of a model's class, which there must be."""
    spec = spec_of(model)
    if spec is None:
        known = classes_where(lambda spec: True)
        wrong_value("target", f"be, or have, one of {known}", name_of(model), _UNKNOWN)
    return spec


def parts_of(model: nn.Module, spec: Spec) -> list[tuple[str, nn.Module]]:
    """The parts of a model that tokens enter and leave, by name."""
    if not spec.region:
        return [("", model)]
    return [
        (f"{path}.{name}", part)
        for root in spec.regions
        for path, child in find(model, root)
        for name, part in child.named_modules()
        if type(part).__name__ == spec.region
    ]


# -- layers --------------------------------------------------------------------------------------------------------


def num_layers_of(part: TargetModule) -> int:
    """Attention layers that the method may make sparse."""
    return sum(len(find(part.module, path)) for path in part.spec.layers)


def layers_of(
    part: TargetModule, merger: "Merger | None", call: ModelCall, first: int, num_layers: int
) -> Sequence[ModuleLayer]:
    """All layers of a part, with the processors that will be put in.

    Args:
        call: what the processors ask about the call they are in.
        first: the index of the first one among those of the model.
        num_layers: how many the model has.
    """
    layers = tuple(_adapted(layer, part, merger, call) for layer in _found(part, first, num_layers))
    for layer in layers:
        _check_processor(part.spec, layer)
        _check_text(part.method, part.spec, layer)
    return layers


def _found(part: TargetModule, first: int, num_layers: int) -> Iterator[ModuleLayer]:
    modules = attention_modules(part.module, part.spec.layers, part.spec.image_only)
    for index, (name, attention, sees_text) in enumerate(modules, first):
        reason = _unfit(attention) or part.method.dense_layer_reason(index, num_layers)
        yield _as_it_is(part, index, name, attention, sees_text, reason)
    for path, reason in part.spec.dense.items():
        for name, attention in find(part.module, path):
            yield _as_it_is(part, None, name, attention, False, reason)


def _unfit(attention: Any) -> str | None:
    """Why a layer stays dense whatever the method says."""
    if getattr(attention, "is_cross_attention", False):
        return CROSS_ATTENTION
    head_dim = attention.inner_dim // attention.heads
    return f"head dimension {head_dim} is above {_LARGEST_HEAD}" if head_dim > _LARGEST_HEAD else None


def _as_it_is(
    part: TargetModule, index: int | None, path: str, attention: Any, sees_text: bool, dense: str | None
) -> ModuleLayer:
    heads, processor, names = attention.heads, attention.get_processor(), (part.path(path), path)
    facts = index, heads, sees_text, dense, None, attention.inner_dim // heads
    return ModuleLayer(*facts, *names, attention, processor, processor)


def _adapted(layer: ModuleLayer, part: TargetModule, merger: "Merger | None", call: ModelCall) -> ModuleLayer:
    """With a processor of ours, where it reads sparsely, over ranks, or among merged tokens that ask for it."""
    is_split = part.ranks is not None and layer.index is not None
    group, is_merged = None, False
    if merger is not None and layer.index is not None and layer.dense != CROSS_ATTENTION:
        group = merger.group_of(layer.path)
        is_merged = group is not None and merger.needs_processors
    if not (layer.is_sparse or is_split or is_merged):
        return replace(layer, group=group)
    sizes = layer.heads, layer.head_dim
    installed = sparse_processor(layer.processor, call, part.impl, sizes, part.spec.rotary)
    return replace(layer, group=group, installed=installed)


def _check_processor(spec: Spec, layer: ModuleLayer) -> None:
    name = type(layer.processor).__name__
    if name not in spec.processors:
        hint = "Set or load processors that are known, or leave this model dense."
        known = ", ".join(spec.processors)
        wrong_value("target", f"have attention processors of {known}", f"{name} in {layer.name}", hint)


def _check_text(method: Composition, spec: Spec, layer: ModuleLayer) -> None:
    """Methods for images alone are refused here where text is sure, not at the first call."""
    if spec.text and layer.is_sparse and layer.sees_text and not method.takes_text:
        others = classes_where(lambda spec: not spec.text)
        hint = f"It reads images alone, as in {others}. Layers that see text may be named in `dense_layers`."
        wrong_value("method", f"take the text of {spec.model}", type(method.parts[-1]).__name__, hint)
