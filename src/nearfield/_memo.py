"""Small tensors that follow from sizes alone, made once per device instead of at every call."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor

_MOST = 256

Make = TypeVar("Make", bound=Callable[..., Tensor])


def device_name(device: torch.device | str) -> str:
    """A device as the key of what is kept: "cuda" is the one that is current, as tensors on it say."""
    name = str(device)
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" else name


def kept(make: Make) -> Make:
    """Remember what a function of hashable arguments, a device among them, gives.

    Not while something is traced or captured: a tracer's stand-ins hold no values and take nothing real beside them,
    and a graph's memory holds none before its first replay.
    """
    known: dict[Hashable, Tensor] = {}

    @wraps(make)
    def remembered(*sizes: Hashable) -> Tensor:
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

    return remembered  # type: ignore[return-value]
