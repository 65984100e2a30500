"""One call that makes a diffusers model sparse, and takes it back: `apply(pipe_or_model, method) -> Handle`."""

from nearfield.diffusers.compiling import compiled_blocks
from nearfield.diffusers.handle import Handle, apply, remove
from nearfield.diffusers.lora import Switch

__all__ = ["Handle", "Switch", "apply", "compiled_blocks", "remove"]
