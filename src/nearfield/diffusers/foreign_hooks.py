"""Hooks of diffusers that do not go together with tokens in another order, or with fewer of them."""

from collections.abc import Iterator
from typing import Any

from torch import nn

LISTENER = "nearfield_listener"
"""The hook by which nearfield hears the names of calls (`listening.py`)."""

# Hooks that leave tokens alone.
_HARMLESS = {
    LISTENER,
    "group_offloading",
    "lazy_prefetch_group_offloading",
    "layer_execution_tracker",
    "layerwise_casting",
    "peft_autocast_disable",
}


# Hooks that cut and gather tokens: they rest while nearfield is applied (`diffusers_parallel.py`).
_CONTEXT_PARALLEL = {"ContextParallelSplitHook", "ContextParallelGatherHook"}


def caches_in(module: nn.Module) -> list[str]:
    """Names of the hooks that may keep tokens, on a module or on parts of it such as its attention."""
    names = {name for name, hook in _hooks_in(module) if type(hook).__name__ not in _CONTEXT_PARALLEL}
    return sorted(names - _HARMLESS)


def context_parallel_hooks(model: nn.Module) -> list[Any]:
    """The hooks that `enable_parallelism` registered, on a model and on its parts."""
    return [hook for _, hook in _hooks_in(model) if type(hook).__name__ in _CONTEXT_PARALLEL]


def guidance_in(attention: nn.Module) -> str | None:
    """The hook of a guider that blurs queries, taking their order for that of the image, or one that waits for
    `scaled_dot_product_attention`, which sparse layers do not call; None if there is neither."""
    for _, hook in _hooks_in(attention):
        name = type(hook).__name__
        if name == "SmoothedEnergyGuidanceHook" or getattr(hook, "skip_attention_scores", False):
            return name
    return None


def _hooks_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Looked for at the entrance of every call, while the GPU waits: `modules()` takes four times as long."""
    parts = [module]
    while parts:
        part = parts.pop()
        registry = vars(part).get("_diffusers_hook")
        if registry is not None:
            yield from registry.hooks.items()
        parts.extend(child for child in part._modules.values() if child is not None)
