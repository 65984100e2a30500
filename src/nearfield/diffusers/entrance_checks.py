"""What is checked at the entrance of a call: that model and inputs are such that tokens may change their order."""

from collections.abc import Sequence

from torch import Tensor

from nearfield._checks import wrong_value
from nearfield.diffusers.foreign_hooks import caches_in, guidance_in
from nearfield.diffusers.layers import Layer
from nearfield.diffusers.merging import COMPILED_WHOLE
from nearfield.diffusers.models.spec import TokenLayout
from nearfield.diffusers.moving import Place
from nearfield.diffusers.target import TargetModule
from nearfield.diffusers.token_state import TokenState
from nearfield.parallel import Ranks

_LOOKED_AT = 4096  # numbers of a sample that ranks compare
_PARALLEL = "a parallel configuration"
_AS_IT_WAS = "stay as it was when nearfield was applied"

# Not put together where they are raised: torch.compile could not trace that.
_NOT_READY = (
    "`hidden_states` must have the size that was made ready before the model was compiled; got another."
    " Call `handle.prepare(height=..., width=...)` first, or compile blocks alone with `compile_repeated_blocks`."
)
_READY_ELSEWHERE = (
    "`device` must be where the model runs when a size is made ready for torch.compile; got another."
    " Call `handle.prepare(height=..., width=..., device=...)`."
)


def check_unchanged(part: TargetModule, layers: Sequence[Layer], places: Sequence[Place]) -> None:
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


def _check_layer(layer: Layer) -> None:
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
    part: TargetModule, ready: TokenState | None, located: TokenLayout | str, sample: Tensor
) -> None:
    """Nothing can be looked up while torch.compile traces the whole model."""
    if part.method.merge is not None:
        raise ValueError(COMPILED_WHOLE)
    if ready is None or located != ready.located:
        raise ValueError(_NOT_READY)
    if sample.device != ready.device:
        raise ValueError(_READY_ELSEWHERE)


def check_same_sample(name: str, sample: Tensor, ranks: Ranks) -> None:
    """Every rank must be given the same image, of which it takes its share: noise has to come from one seed."""
    hint = "Give every rank the same inputs: for a pipeline, a `generator` with one seed."
    first = sample.detach().flatten()[:_LOOKED_AT].double().sum()
    seen = f"{tuple(sample.shape)} beginning with a sum of {float(first):.12g}"
    ranks.compare({name: seen}, hint)
