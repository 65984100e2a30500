"""Hooks of diffusers that do not go together with tokens in another order, or with fewer of them."""

from collections.abc import Iterator
from typing import Any

from torch import nn

# Hooks that leave tokens alone.
_HARMLESS = {
    "group_offloading",
    "lazy_prefetch_group_offloading",
    "layer_execution_tracker",
    "layerwise_casting",
    "peft_autocast_disable",
}


def caches_in(module: nn.Module) -> list[str]:
    """Names of the hooks that may keep tokens, on a module or on parts of it such as its attention."""
    return sorted({name for name, _ in _hooks_in(module)} - _HARMLESS)


def guidance_in(attention: nn.Module) -> str | None:
    """The hook of a guider that blurs queries, taking their order for that of the image, or one that waits for
    `scaled_dot_product_attention`, which sparse layers do not call; None if there is neither."""
    for _, hook in _hooks_in(attention):
        name = type(hook).__name__
        if name == "SmoothedEnergyGuidanceHook" or getattr(hook, "skip_attention_scores", False):
            return name
    return None


def _hooks_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for part in module.modules():
        registry = getattr(part, "_diffusers_hook", None)
        yield from registry.hooks.items() if registry is not None else ()
