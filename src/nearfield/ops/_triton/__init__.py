"""Where kernels are looked for, and what all of them share.

An operation asks for its own module of kernels by its path (`kernels`). Nothing here imports triton before that, so the
library works where triton does not exist.
"""

import importlib
import importlib.metadata
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

OLDEST_TRITON = (3, 6)
KNOWN_GLUON = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose Gluon the Hopper kernels were compiled with; see `ops/attention/hopper/names.py`."""


@lru_cache
def _module(name: str) -> Any:
    """Remembered: even what is imported takes `import_module` some microseconds to find, at every call."""
    return importlib.import_module(name)


def load(path: str) -> Any:
    """A module of kernels below `ops/`, as "windows.triton"."""
    return _module(f"nearfield.ops.{path}")


@lru_cache
def triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed Triton, or None. Does not import it."""
    try:
        if importlib.util.find_spec("triton") is None:
            return None
    except ModuleNotFoundError:  # a finder that hides it
        return None
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        version = importlib.import_module("triton").__version__
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


_IS_NEW_ENOUGH = (triton_version() or (0, 0)) >= OLDEST_TRITON
"""Looked up once: torch.compile does not trace the function that knows."""


def is_new_enough() -> bool:
    """Whether there is a Triton that the kernels can be compiled with."""
    return _IS_NEW_ENOUGH


@lru_cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which needs no GPU."""
    if triton_version() is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


@lru_cache
def missing(impl: str) -> str | None:
    """Why no kernels of "triton" or "gluon" can run on this machine, or None."""
    version = triton_version()
    if version is None:
        return "Triton is not installed"
    if version < OLDEST_TRITON:
        return f"Triton {version[0]}.{version[1]} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    if impl == "gluon" and version not in KNOWN_GLUON:
        known = ", ".join(f"{major}.{minor}" for major, minor in KNOWN_GLUON)
        return f"Gluon of Triton {version[0]}.{version[1]} is not known (known: {known})"
    if not is_interpreted() and not torch.cuda.is_available():
        return "there is no GPU"
    return None


def unsupported_tensor(
    x: Tensor, *, most_channels: int | None = None, multiplies: bool = False
) -> str | None:
    """Why plain kernels cannot take a tensor, or None: what all of them ask. Each may have more reasons.

    Args:
        most_channels: that a program holds.
        multiplies: whether the tensor goes into matrix products.
    """
    if not x.is_cuda and not is_interpreted():
        return f"the tensors are on {x.device}"
    if x.dtype == torch.float64:
        return "float64 is for the reference"
    if multiplies and x.dtype == torch.bfloat16 and is_interpreted():
        return "Triton's interpreter computes wrong bfloat16 products"
    if most_channels is not None and x.shape[-1] > most_channels:
        return f"head dimension {x.shape[-1]} is above {most_channels}"
    return None


def are_wanted(impl: str, x: Tensor) -> bool:
    """Whether kernels are to run: where they are asked for, and by default on a GPU."""
    return impl in ("triton", "gluon") or (impl == "auto" and x.is_cuda)


def kernels(path: str, impl: str, x: Tensor, *more: Any) -> Any:
    """A module of kernels, where they are wanted and can run such a call (see its `unsupported`); else None.

    Args:
        path: of the module, below `ops/`.
        x, more: what `unsupported` takes.
    """
    if not are_wanted(impl, x) or missing("triton") is not None:
        return None
    module = load(path)
    return module if module.unsupported(x, *more) is None else None
