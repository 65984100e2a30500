"""Models on which diffusers' `enable_parallelism` was called: what each rank does in the tests of `apply` on them."""

import contextlib
import warnings
from typing import Any, NamedTuple
from unittest import mock

import torch
from diffusers import ContextParallelConfig
from tests import tiny_models
from tests.split_models import GRID, METHODS, gradients_of, inputs_of, kind_of, model_of
from tests.tiles import paper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nearfield
from nearfield import Hilbert, LogLinear, apply
from nearfield.diffusers.guards import context_parallel_hooks


def parallelised(model: Any, **options: Any) -> Any:
    """diffusers counts accelerators to choose one, and finds none here."""
    with mock.patch("torch.accelerator.device_count", return_value=1):
        model.enable_parallelism(config=ContextParallelConfig(**options))
    return model


class Ran(NamedTuple):
    out: Tensor
    summary: str
    bytes_sent: int


def run(mesh: DeviceMesh, name: str) -> Ran:
    """As `split_models.run`, but the ranks are diffusers' to name. It could not cut the 7 tokens of text itself."""
    model = parallelised(model_of(), ring_degree=mesh.size())
    with torch.no_grad(), apply(model, METHODS[name]) as handle:
        out = model(**inputs_of())[0]
        assert handle.ranks is not None
        return Ran(out, handle.summary(), handle.ranks.bytes_sent)


def run_video(mesh: DeviceMesh, kind: str) -> Tensor:
    model, inputs = kind_of(kind, torch.float32)
    parallelised(model, ulysses_degree=mesh.size())
    with torch.no_grad(), apply(model, METHODS["two-way"]):
        return tiny_models.first(model(**inputs))


def generate(mesh: DeviceMesh | None, num_parallelised: int) -> Tensor:
    """A guided pipeline of two models, of which the last ones are parallelised; the first step is dense."""
    models = [tiny_models.wan(), tiny_models.wan(layers=1)]
    for model in [] if mesh is None else models[-num_parallelised:]:
        parallelised(model, ulysses_degree=torch.distributed.get_world_size())
    pipe = tiny_models.wan_pipeline(transformer=models[0], transformer_2=models[1], boundary_ratio=0.5)
    with apply(pipe, paper(tiles=4, shared_tokens=16, dense_layers=0, dense_steps=1)):
        video: Tensor = pipe(**tiny_models.wan_call()).frames
    return video


def gradients(mesh: DeviceMesh) -> list[Tensor]:
    model = parallelised(model_of(), ring_degree=mesh.size()).train().requires_grad_()
    with apply(model, METHODS["two-way"]):
        return gradients_of(model, mesh)


class Rested(NamedTuple):
    """Outputs of diffusers' own split before and after, of nearfield's in between; whether all is as it was."""

    before: Tensor
    between: Tensor
    after: Tensor
    is_restored: list[bool]


def rest(mesh: DeviceMesh, way: str) -> Rested:
    """Ulysses of 6 heads, which 2 and 3 ranks divide; nearfield removed in one of three ways."""
    model = parallelised(tiny_models.flux(heads=6), ulysses_degree=mesh.size(), ulysses_anything=True)
    inputs = tiny_models.flux_inputs(GRID, batch=2)
    with torch.no_grad():
        before, trace = model(**inputs)[0], _trace(model)
        handle = apply(model, METHODS["two-way"])
        changed = _trace(model) != trace
        between = model(**inputs)[0]
        if way == "handle":
            handle.remove()
            handle.remove()
        elif way == "remove":
            nearfield.remove(model)
        else:
            handle.remove()
            _fail_to_apply(model)
        return Rested(before, between, model(**inputs)[0], [changed, _trace(model) == trace])


class _Cautious(Hilbert):
    """Warns when all is in place."""

    @property
    def warning(self) -> str:
        return "about this"


def _fail_to_apply(model: nn.Module) -> None:
    with warnings.catch_warnings(), contextlib.suppress(UserWarning):
        warnings.simplefilter("error", UserWarning)
        apply(model, _Cautious(tiles=4, dense_steps=0))
        raise AssertionError("nothing was raised")


def _trace(model: nn.Module) -> list[Any]:
    """Hooks in their order, what they call, and configurations, by identity."""
    found: list[Any] = [id(getattr(model, "_parallel_config", None))]
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        found.append((name, id(processor), id(getattr(processor, "_parallel_config", None))))
        found.append(
            [len(module._forward_pre_hooks), len(module._forward_hooks), id(vars(module).get("forward"))]
        )
        registry = getattr(module, "_diffusers_hook", None)
        found.append([] if registry is None else [(key, id(hook)) for key, hook in registry.hooks.items()])
    for hook in context_parallel_hooks(model):
        found.append((hook.fn_ref.pre_forward, hook.fn_ref.post_forward))
    return found


def both_degrees(mesh: DeviceMesh) -> Tensor:
    """Ring and Ulysses at once, over a mesh of one's own."""
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ring", "other", "ulysses"))
    model = parallelised(model_of(), ring_degree=2, ulysses_degree=2, mesh=whole)
    with torch.no_grad(), apply(model, METHODS["keys"]) as handle:
        assert handle.ranks is not None
        assert handle.ranks.size == mesh.size()
        return model(**inputs_of())[0]


def refused(mesh: DeviceMesh) -> list[str]:
    """Messages of what does not go together; the model goes on as before."""
    messages = []
    model = parallelised(tiny_models.flux(), ring_degree=mesh.size())
    wide = init_device_mesh("cpu", (mesh.size(), 1))
    reverse = DeviceMesh("cpu", list(reversed(range(mesh.size()))))
    for method, other in ((METHODS["keys"], wide), (METHODS["keys"], reverse), (LogLinear(), None)):
        try:
            apply(model, method, mesh=other)
        except ValueError as error:
            messages.append(str(error))
    with apply(model, METHODS["keys"], mesh=mesh), torch.no_grad():
        own = model._parallel_config
        assert own is not None  # so that diffusers refuses to be called twice
        model(**tiny_models.flux_inputs(GRID))
        model._parallel_config = None
        try:
            model(**tiny_models.flux_inputs(GRID))
        except ValueError as error:
            messages.append(str(error))
        model._parallel_config = own
    return messages
