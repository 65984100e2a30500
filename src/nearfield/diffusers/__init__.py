"""One call that makes a diffusers model sparse, and takes it back: `apply(pipe_or_model, method) -> Handle`.

`define` makes one more class of models known to it.
"""

from nearfield.diffusers import models
from nearfield.diffusers.apply import Handle, apply, remove
from nearfield.diffusers.compiling import compiled_blocks
from nearfield.diffusers.lora import Switch
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
from nearfield.diffusers.standalone import Opened, open_model, step_arguments
from nearfield.session import TokenLayout

__all__ = [
    "LEAVE",
    "ComfyModel",
    "Handle",
    "MergedBlocks",
    "Move",
    "Opened",
    "Pixels",
    "Spec",
    "Switch",
    "TokenLayout",
    "all_specs",
    "apply",
    "compiled_blocks",
    "define",
    "models",
    "open_model",
    "remove",
    "step_arguments",
]
