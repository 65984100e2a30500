"""A LoRA that was distilled for sparse attention is off in dense steps: the model is itself there."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from nearfield._checks import wrong_type, wrong_value

# Not put together where it is raised: torch.compile could not trace that.
SWITCHED_WHOLE = (
    "`lora` must be None where torch.compile traces a whole model, in which nothing can be switched; got one."
    " Compile blocks alone with `compile_repeated_blocks`, or take a method with `dense_steps=0`."
)


@runtime_checkable
class Switch(Protocol):
    """Something that can be taken out of a model and put back."""

    def switch(self, is_on: bool) -> None: ...


class NamedLora:
    """An adapter of peft that a model has loaded.

    Its scale becomes zero, and again what it was, so that other adapters stay as they are. Its layers are
    looked for each time: adapters may be loaded anew under their names.

    Args:
        name: under which it was loaded.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._model, self._name = model, name
        self._resting: list[tuple[Any, float]] = []

    def layers(self) -> list[Any]:
        """Those that have it; refuses what does not go away with its scale."""
        found: list[Any] = [module for module in self._model.modules() if self._name in _scales(module)]
        if any(getattr(layer, "merged", False) for layer in found):
            hint = "Call `pipe.unfuse_lora()`, or leave `lora` out: then it is there in dense steps, too."
            wrong_value("lora", "not be fused into the weights", repr(self._name), hint)
        if any(getattr(layer, "use_dora", {}).get(self._name) for layer in found):
            hint = "It changes the norms of weights, too. Leave `lora` out: then it is there in dense steps, too."
            wrong_value("lora", "be a plain LoRA", f"{self._name!r}, which is a DoRA", hint)
        self._check_has_nothing_else()
        return found

    def _check_has_nothing_else(self) -> None:
        """Modules and biases of an adapter's own have no scale."""
        config = (getattr(self._model, "peft_config", None) or {}).get(self._name)
        for field, without in (("modules_to_save", None), ("bias", "none")):
            setting = getattr(config, field, without)
            if setting and setting != without:
                hint = "That does not go away with its scale. Leave `lora` out: then it is there in dense steps, too."
                wrong_value("lora", "be a plain LoRA", f"{self._name!r} with {field}={setting!r}", hint)

    def switch(self, is_on: bool) -> None:
        if is_on:
            for layer, scale in self._resting:
                # After Ctrl-C nobody knows that the call is over: it may have been scaled or deleted since.
                if _scales(layer).get(self._name) == 0.0:
                    self._set(layer, scale)
            self._resting = []
        elif not self._resting:
            layers = self.layers()
            self._resting = [(layer, _scales(layer)[self._name]) for layer in layers]
            for layer in layers:
                self._set(layer, 0.0)

    def _set(self, layer: Any, scale: float) -> None:
        _scales(layer)[self._name] = scale


def _scales(module: Any) -> dict[str, float]:
    """Of peft's adapters in a layer."""
    found = getattr(module, "scaling", None)
    return found if isinstance(found, dict) else {}


def loras_in(models: Sequence[nn.Module], lora: "str | Switch | None") -> list[Switch | None]:
    """What is switched in each model, for the argument of `apply`. Of several models one may have a LoRA."""
    if lora is None or isinstance(lora, Switch):
        return [lora] * len(models)
    if not isinstance(lora, str):
        wrong_type("lora", "be the name of an adapter, or have a method `switch`", type(lora).__name__)
    named = [NamedLora(model, lora) for model in models]
    found: list[Switch | None] = [one if one.layers() else None for one in named]
    if not any(found):
        hint = "Load it first: pipe.load_lora_weights(folder, adapter_name=...)."
        wrong_value("lora", "be the name of an adapter that the model has loaded", repr(lora), hint)
    return found
