"""`enable_parallelism` of diffusers: over which ranks a model was to be split, and how its own split is suspended.

diffusers cuts tensors into equal chunks in hooks, and its attention processors exchange keys between ranks. Where
nearfield splits the tokens, both must do nothing, and afterwards what they did before.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nearfield._checks import wrong_value
from nearfield.diffusers.guards import context_parallel_hooks
from nearfield.parallel import Ranks


def mesh_of(models: Sequence[nn.Module]) -> DeviceMesh | None:
    """The ranks that `enable_parallelism` was given; None if it was not called on any of the models."""
    meshes = (_mesh_of(model) for model in models)
    return next((mesh for mesh in meshes if mesh is not None), None)


def check_same_ranks(models: Sequence[nn.Module], ranks: Ranks) -> None:
    """Whether all models that were parallelised have the ranks that their tokens will be split over."""
    for model in models:
        mesh = _mesh_of(model)
        if mesh is not None and _members(mesh) != _members(ranks.mesh):
            rule = f"hold the ranks {_members(mesh)} that {type(model).__name__} was parallelised over"
            hint = (
                "Leave out `mesh`, and call `enable_parallelism` with one mesh on all models of a pipeline."
            )
            wrong_value("mesh", rule, _members(ranks.mesh), hint)


def _mesh_of(model: Any) -> DeviceMesh | None:
    config = getattr(model, "_parallel_config", None)
    if config is None:
        if context_parallel_hooks(model):
            got = "hooks that cut tokens, and no configuration"
            wrong_value("target", "be parallelised by `enable_parallelism`, if at all", got)
        return None
    if getattr(config, "tensor_parallel_config", None) is not None:
        hint = "Plans are made for all heads of a layer, of which each rank would have some."
        wrong_value("target", "not be under tensor parallelism", type(config).__name__, hint)
    own = getattr(config, "context_parallel_config", None)
    # Of one dimension, whatever the degrees: diffusers cuts tokens along it, too, and only its attention knows two.
    mesh = getattr(own, "_flattened_mesh", None)
    if not isinstance(mesh, DeviceMesh):
        hint = "Call `enable_parallelism(config=ContextParallelConfig(...))`."
        wrong_value("target", "be parallelised over a mesh, if at all", type(config).__name__, hint)
    return mesh


def _members(mesh: DeviceMesh) -> list[int]:
    members: list[int] = mesh.mesh.flatten().tolist()
    return members


class _Suspended(NamedTuple):
    """What a hook calls before and after the forward of its module."""

    functions: Any
    pre_forward: Any
    post_forward: Any


class SuspendedParallelism:
    """What `enable_parallelism` put into a model does nothing until `end`.

    The hooks stay where they are, in their order among others, and only pass on what they are given.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config = getattr(model, "_parallel_config", None)
        self._hooks: list[_Suspended] = []
        self._processors: list[tuple[Any, Any]] = []
        if self._config is None:
            return
        for hook in context_parallel_hooks(model):
            functions = hook.fn_ref
            self._hooks.append(_Suspended(functions, functions.pre_forward, functions.post_forward))
            functions.pre_forward, functions.post_forward = _arguments_alone, _output_alone
        for module in model.modules():
            processor = getattr(module, "processor", None)
            config = getattr(processor, "_parallel_config", None)
            if processor is not None and config is not None:
                self._processors.append((processor, config))
                processor._parallel_config = None

    @property
    def is_anything(self) -> bool:
        return self._config is not None

    def check(self) -> None:
        """Whether the model was parallelised, or parallelised anew, since."""
        found = getattr(self._model, "_parallel_config", None)
        if found is not self._config:
            hint = "Call `handle.remove()`, then `enable_parallelism`, then apply: it takes the ranks from there."
            wrong_value("target", "be parallelised before nearfield is applied", "another since", hint)

    def end(self) -> None:
        for functions, pre_forward, post_forward in self._hooks:
            functions.pre_forward, functions.post_forward = pre_forward, post_forward
        for processor, config in self._processors:
            processor._parallel_config = config
        self._hooks, self._processors = [], []


def _arguments_alone(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _output_alone(module: nn.Module, output: Any) -> Any:
    return output
