"""Small tensors that follow from sizes alone, made once per device instead of at every call."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

_MOST = 256

Make = TypeVar("Make", bound=Callable[..., Tensor])


def device_name(device: torch.device | str) -> str:
    """A device as the key of a cache: "cuda" is the current GPU, by its number, as its tensors say."""
    name = str(device)
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name


def tensor_cache(make: Make) -> Make:
    """Call a function of hashable arguments, one of them a device, once for each set of arguments.

    Nothing is kept while a call is traced or captured: a tracer's stand-ins hold no values and do not mix with real
    tensors, and the memory of a graph under capture holds none before its first replay.
    """
    known: dict[Hashable, Tensor] = {}

    @wraps(make)
    def cached(*sizes: Hashable) -> Tensor:
        if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:
            return make(*sizes)
        if sizes in known:
            return known[sizes]
        with torch.inference_mode(False):  # else it could not serve a training step later
            made = make(*sizes)
        is_captured = made.is_cuda and torch.cuda.is_current_stream_capturing()
        if type(made) is Tensor and not is_captured:
            if len(known) >= _MOST:
                known.clear()
            known[sizes] = made
        return made

    return cached  # type: ignore[return-value]
