"""The models that `apply` knows: one module per family, one `Spec` per class.

Defining a spec makes its class known, so this module only imports the others.
"""

import pkgutil
from importlib import import_module

from nearfield.diffusers.models.spec import (
    LEAVE,
    ComfyModel,
    MergedBlocks,
    Move,
    Pixels,
    Spec,
    all_specs,
    define,
)

for _found in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_found.name}")

__all__ = [
    "LEAVE",
    "ComfyModel",
    "MergedBlocks",
    "Move",
    "Pixels",
    "Spec",
    "all_specs",
    "define",
]
