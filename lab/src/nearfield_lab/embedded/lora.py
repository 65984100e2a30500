"""LoRAs that `nearfield distill` made: which method they are for, and how a model has one for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

from torch import Tensor, nn

from nearfield import recipes
from nearfield._checks import shape_of
from nearfield._files import check_fields
from nearfield.methods import Composition, Method
from nearfield_lab.embedded.sampler import DemoPipeline
from nearfield_lab.missing import MissingExtra
from nearfield_lab.storage import BadFile, read_facts, read_tensors, require_finite

_ADAPTER = "nearfield"
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@contextmanager
def lora_on(pipeline: Any, path: Path | None) -> "Iterator[str | FusedLora | None]":
    """The pipeline's transformer with a LoRA; as it was before, afterwards. Nothing happens where `path` is None.

    Gives what `apply` takes for its `lora`.
    """
    if path is None:
        yield None
        return
    lora = lora_for(pipeline, path)
    lora.switch(True)
    try:
        yield lora.stepwise
    finally:
        lora.switch(False)


def lora_for(pipeline: Any, path: Path) -> "FusedLora | AdapterLora":
    """A LoRA for a pipeline, switched off."""
    if isinstance(pipeline, DemoPipeline):
        return FusedLora(pipeline.transformer, path)
    return AdapterLora(pipeline.transformer, path)


def method_of_lora(path: Path) -> Method | None:
    """What a LoRA was distilled for; None where its file does not say."""
    return _method_in(path, read_facts(path))


def suits(lora: Method | None, method: Method) -> bool:
    """Whether a LoRA for one method is one for the other: dense steps have no part in distilling."""
    return lora is not None and _settled(lora) == _settled(method)


def _settled(method: Method) -> Method:
    return Composition.of(method).sparse_form()


class FusedLora:
    """A LoRA inside the weights of a small model: no package is needed, and no layer gets slower.

    Both sets of weights are kept: switched off, the model is itself again, bit for bit.

    Args:
        path: a file of `nearfield distill`.
    """

    def __init__(self, transformer: nn.Module, path: Path) -> None:
        tensors, facts = read_tensors(path)
        self.method = _method_in(path, facts)
        self._weights = [
            (layer.weight, layer.weight.data, _added(layer.weight.data, *factors))
            for layer, factors in _factors(transformer, tensors, path)
        ]

    @property
    def stepwise(self) -> "FusedLora":
        """What `apply` takes for its `lora`."""
        return self

    def switch(self, is_on: bool) -> None:
        for weight, plain, tuned in self._weights:
            weight.data = tuned if is_on else plain


class AdapterLora:
    """A LoRA next to the weights of any diffusers model, by peft."""

    def __init__(self, transformer: Any, path: Path) -> None:
        self._transformer = transformer
        self._tensors, facts = read_tensors(path)
        require_finite(path, self._tensors)
        self.method = _method_in(path, facts)

    @property
    def stepwise(self) -> str:
        """What `apply` takes for its `lora`: to load it again and again would take long."""
        return _ADAPTER

    def switch(self, is_on: bool) -> None:
        if not is_on:
            self._transformer.delete_adapters(_ADAPTER)
            return
        try:
            self._transformer.load_lora_adapter(self._tensors, adapter_name=_ADAPTER)
        except ImportError as error:
            raise MissingExtra("peft", error, "train") from None


def _method_in(path: Path, facts: Mapping[str, Any]) -> Method | None:
    check_fields(path, facts, {"recipe": (dict, NoneType)})
    return recipes.read(facts["recipe"]).method if facts.get("recipe") else None


def _factors(
    transformer: nn.Module, tensors: Mapping[str, Tensor], path: Path
) -> Iterator[tuple[Any, tuple[Tensor, Tensor]]]:
    """The layers that a LoRA changes, and two matrices for each, whose product is added to its weights."""
    names = [name.removesuffix(_DOWN) for name in tensors if name.endswith(_DOWN)]
    if len(tensors) != 2 * len(names) or any(name + _UP not in tensors for name in names):
        raise BadFile(
            f"{path} is no LoRA of `nearfield distill`: those hold pairs of lora_A and lora_B alone"
        )
    require_finite(path, tensors)
    for name in names:
        layer: Any = dict(transformer.named_modules()).get(name.removeprefix("transformer."))
        factors = down, up = tensors[name + _DOWN], tensors[name + _UP]
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != up.shape[1]:
            raise BadFile(
                f"`{name}` in {path} must be two matrices that can be multiplied;"
                f" got {shape_of(up)} and {shape_of(down)}"
            )
        if not isinstance(layer, nn.Linear) or layer.weight.shape != (up.shape[0], down.shape[1]):
            raise BadFile(f"{path} is a LoRA for another model: this one has no such layer as {name}")
        yield layer, factors


def _added(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    change = up.to(weight.device).float() @ down.to(weight.device).float()
    return (weight.float() + change).to(weight.dtype)
