"""Hearing which branch of guidance a pipeline computes. Imported where diffusers surely is: it is at hand then."""

from collections.abc import Callable
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import BaseState, StateManager
from torch import nn

from nearfield.diffusers.guards import LISTENER


class Listener(nn.Module):
    """A child without weights through which a model hears the names of its calls.

    Pipelines say `with model.cache_context("cond")`, and diffusers tells every stateful hook below the model. A hook on
    the model itself would be wrapped around its `forward`, which offloading exchanges, too; one on a child that nobody
    calls is in no one's way.

    Args:
        ended: called when a pipeline says that its generation is over.
    """

    def __init__(self, model: nn.Module, ended: Callable[[], None]) -> None:
        super().__init__()
        self._names = _Names()
        HookRegistry.check_if_exists_or_initialize(self).register_hook(_Hook(self._names, ended), LISTENER)
        model.add_module(LISTENER, self)
        _refresh(model)

    @property
    def name(self) -> str | None:
        """Of the call that is being made; None if the pipeline gave it none."""
        return self._names.name

    @staticmethod
    def leave(model: nn.Module) -> None:
        delattr(model, LISTENER)
        _refresh(model)


class _Names(StateManager):  # type: ignore[misc]
    """Only what it is told matters here, not the states that it could keep."""

    def __init__(self) -> None:
        super().__init__(BaseState)
        self.name: str | None = None

    def set_context(self, context: Any) -> None:
        super().set_context(context)
        self.name = None if context is None else str(getattr(context, "name", context))


class _Hook(ModelHook):  # type: ignore[misc]
    _is_stateful = True

    def __init__(self, names: _Names, ended: Callable[[], None]) -> None:
        super().__init__()
        self.names, self._ended = names, ended

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.names.set_context(None)
        self._ended()
        return module


def _refresh(model: nn.Module) -> None:
    """Let diffusers look for hooks again: it keeps a list of them."""
    if not hasattr(model, "_diffusers_hook"):
        return
    registry = HookRegistry.check_if_exists_or_initialize(model)
    if hasattr(registry, "invalidate_child_registries_cache"):
        registry.invalidate_child_registries_cache()
    else:  # before diffusers 0.41 it kept the list, too, and had no way to say so
        registry._child_registries_cache = None
