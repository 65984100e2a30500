"""One call that makes a diffusers model sparse, and takes it back: `apply(pipe_or_model, method) -> Handle`."""

from nearfield.diffusers.handle import Handle, apply, remove

__all__ = ["Handle", "apply", "remove"]
