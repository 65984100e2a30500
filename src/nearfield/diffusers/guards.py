"""What is checked at the entrance of a call: that the model, its hooks and inputs let tokens change their order."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from nearfield._checks import wrong_value
from nearfield.diffusers.find import ModuleLayer, TargetModule
from nearfield.diffusers.merged_blocks import Merger
from nearfield.diffusers.moves import Place
from nearfield.parallel import Ranks
from nearfield.session import TokenLayout, TokenState

_LOOKED_AT = 4096  # numbers of a sample that ranks compare
_PARALLEL = "a parallel configuration"
_AS_IT_WAS = "stay as it was when nearfield was applied"

# Not put together where they are raised: torch.compile could not trace that.
_NOT_READY = (
    "`hidden_states` must have the size that was made ready before the model was compiled; got another."
    " Call `handle.prepare(height=..., width=...)` first, or compile blocks alone with `compile_repeated_blocks`."
)
_MERGED_WHOLE = (
    "`method` must not merge where torch.compile traces the whole model: which maps still serve is looked up at its"
    " entrance. Use `compile_repeated_blocks`, which compiles blocks alone."
)
_READY_ELSEWHERE = (
    "`device` must be where the model runs when a size is made ready for torch.compile; got another."
    " Call `handle.prepare(height=..., width=..., device=...)`."
)


def check_unchanged(part: TargetModule, layers: Sequence[ModuleLayer], places: Sequence[Place]) -> None:
    """Whether modules and processors are those of the moment when nearfield was applied."""
    for place in places:
        found = place.parent._modules[place.path.rpartition(".")[2]]
        if getattr(found, "_orig_mod", found) is not place.module:
            hint = "Call `handle.remove()` and apply again."
            wrong_value(place.path, _AS_IT_WAS, type(found).__name__, hint)
    for name in () if part.ranks is None else caches_in(part.root):
        hint = "Call `disable_cache()`: each rank would decide by its own tokens whether blocks are computed."
        wrong_value("target", "have no cache of diffusers where tokens are split over ranks", name, hint)
    for layer in layers:
        _check_layer(layer)


def _check_layer(layer: ModuleLayer) -> None:
    found = layer.attention.processor
    if found is not layer.installed:
        hint = (
            "Load IP-Adapters, fuse projections and set processors first, then apply; `handle.remove()` now."
        )
        wrong_value(f"{layer.name}.processor", _AS_IT_WAS, type(found).__name__, hint)
    if getattr(layer.installed, "_parallel_config", None) is not None:
        wrong_value(f"{layer.name}.processor", "not be parallelised", _PARALLEL)
    guidance = None if layer.index is None else guidance_in(layer.attention)
    if guidance is not None:
        hint = "It goes by the order of the image, or by attention that sparse layers do not compute."
        wrong_value(layer.name, "have no guidance that perturbs attention", guidance, hint)


def check_ready(
    part: TargetModule, state: TokenState | None, layout: TokenLayout | str, sample: Tensor
) -> None:
    """Nothing can be looked up while torch.compile traces the whole model."""
    if part.method.merge is not None:
        raise ValueError(_MERGED_WHOLE)
    if state is None or layout != state.layout:
        raise ValueError(_NOT_READY)
    if sample.device != state.device:
        raise ValueError(_READY_ELSEWHERE)


def check_merged_blocks(merger: Merger) -> None:
    """Whether blocks that run on merged tokens are free to do so."""
    for block in merger.blocks:
        if block.group is None:
            continue
        for name in caches_in(block.module):
            hint = "It would keep merged tokens for a step that merges others."
            wrong_value(block.name, "have no cache of diffusers where tokens are merged", name, hint)
        is_whole = not block.parts and block.norm is None
        if not is_whole and getattr(block.module, "_compiled_call_impl", None) is not None:
            hint = "Hooks inside of a compiled block would break its graph."
            wrong_value("placement", f"be 'block' where {block.name} is compiled", "'module'", hint)


def check_same_sample(name: str, sample: Tensor, ranks: Ranks) -> None:
    """Every rank must be given the same image, of which it takes its share: noise has to come from one seed."""
    hint = "Give every rank the same inputs: for a pipeline, a `generator` with one seed."
    first = sample.detach().flatten()[:_LOOKED_AT].double().sum()
    seen = f"{tuple(sample.shape)} beginning with a sum of {float(first):.12g}"
    ranks.compare({name: seen}, hint)


# -- hooks of diffusers ---------------------------------------------------------------------------------------------

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


# Hooks that cut and gather tokens: they are suspended while nearfield is applied (`ranks.py`).
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
