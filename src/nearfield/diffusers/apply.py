"""`apply` and the handle it gives."""

import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nearfield._checks import check_int, check_member, wrong_value
from nearfield._types import Impl
from nearfield.diffusers.find import TargetModule, known_spec, models_of, name_of, num_layers_of, parts_of
from nearfield.diffusers.lora import Switch, loras_in
from nearfield.diffusers.models.spec import Pixels, classes_where, spec_of
from nearfield.diffusers.ranks import check_same_ranks, mesh_of
from nearfield.diffusers.region import Region
from nearfield.diffusers.steps import SchedulerState
from nearfield.diffusers.summary import pairs_kept, summary
from nearfield.layout import Geometry, Grid
from nearfield.methods import DEFAULT, Composition, Method, Recipe, recipes
from nearfield.parallel import Ranks, check_splittable
from nearfield.session import TokenLayout


def apply(
    target: Any,
    method: Method | Recipe | str | Path = DEFAULT,
    *,
    scheduler: Any = None,
    impl: Impl = "auto",
    mesh: DeviceMesh | None = None,
    lora: str | Switch | None = None,
) -> "Handle":
    """Let the self-attention of a diffusers pipeline or model read what `method` says, or its blocks merge tokens.

    Nothing is patched: attention processors are set and hooks registered, on this model alone, until `remove`.

    Args:
        target: a pipeline, or one of its models.
        method: who reads whom, such as `Hilbert()`, the default; `Merge()` merges tokens, and `Merge() | Hilbert()`
            does both. Or a recipe: its file, as `nearfield tune` writes it, or its name if it ships
            (`recipes.names()`).
        scheduler: says which denoising step is being computed, so that the first steps can stay dense. A pipeline
            has one; without any, no step is dense.
        impl: passed on to `attend`.
        mesh: split the image tokens over the ranks of a mesh of one dimension. Every rank applies the same to the same
            model, calls it with the same inputs, and gets the whole result. By default the ranks that diffusers'
            `enable_parallelism` was given, if it was called: its own split and attention are suspended until `remove`.
        lora: the name of an adapter that the model has loaded, and that was distilled for the method. It is off in
            dense steps, where it would only do harm. Or an object whose `switch(is_on)` does that, switched on.

    Returns:
        A handle: `with apply(pipe, method): ...`, or `handle.remove()`.
    """
    _check_is_no_name(method)
    recipe = recipes.recipe_of(method)
    composition = Composition.of(recipe.method)
    check_member("impl", impl, get_args(Impl))
    models = models_of(target)
    recipe.check_model(models[0])
    mesh = mesh_of(models) if mesh is None else mesh
    ranks = None if mesh is None else _checked_ranks(mesh, models, composition, impl, lora)
    steps = SchedulerState(None if isinstance(target, nn.Module) else target, scheduler)
    if composition.is_stateful:
        steps.check_is_given()
    regions = [
        region
        for model, switch in zip(models, loras_in(models, lora), strict=True)
        for region in _regions_of(model, composition, steps, impl, ranks, switch)
    ]
    handle = Handle(models, regions, composition, steps, ranks)
    try:
        for region in regions:
            region.install()
        if composition.warning is not None:
            warnings.warn(composition.warning, stacklevel=2)  # which may be made an error
    except BaseException:  # nothing stays half applied
        handle.remove()
        raise
    return handle


def remove(target: Any) -> None:
    """Take out whatever `apply` put into a pipeline or model, where its handle is not at hand.

    Args:
        target: a pipeline, or one of its models, with nearfield or without.
    """
    for model in models_of(target):
        for module in model.modules():
            for region in Region.on(module):
                region.remove()


class Handle:
    """What `apply` changed, and the way back."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        regions: Sequence[Region],
        method: Composition,
        steps: SchedulerState,
        ranks: Ranks | None = None,
    ) -> None:
        self.composition = method
        self.ranks = ranks
        """Those that tokens are split over; it counts what this one sent."""
        self._models, self._regions, self._steps = tuple(models), tuple(regions), steps

    @property
    def method(self) -> Method:
        """What was applied."""
        parts = self.composition.parts
        return parts[0] if len(parts) == 1 else self.composition

    @property
    def num_layers(self) -> int:
        """Attention layers of the (first) model that a method may make sparse, those that stay dense included."""
        mine = [region for region in self._regions if region.part.root is self._models[0]]
        return sum(layer.index is not None for region in mine for layer in region.layers)

    def remove(self) -> None:
        """Restore what was there. Calling it again does nothing."""
        for region in self._regions:
            region.remove()
        self._forget_removed()

    def _forget_removed(self) -> None:
        """Keep nothing alive that is no longer adapted: `nearfield.remove` does not know this handle."""
        self._regions = tuple(region for region in self._regions if region.is_installed)
        roots = [region.part.root for region in self._regions]
        self._models = tuple(model for model in self._models if any(model is root for root in roots))
        if not self._regions:
            self._steps = SchedulerState()

    def prepare(
        self,
        *,
        height: int,
        width: int,
        frames: int | None = None,
        text: int | None = None,
        references: Sequence[tuple[int, int]] = (),
        batch: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        """Make everything for one size of image ready beforehand.

        Needed only where torch.compile traces the whole model, which cannot look anything up.

        Args:
            height, width: of the image, in pixels.
            frames: of the video, where a model makes one.
            text: tokens of text; by default those of the last call, else what is usual for the model.
            references: heights and widths of reference images, in pixels.
            batch: samples per call.
            device: where the model runs; by default where its parameters are.
        """
        check_int("height", height, at_least=1)
        check_int("width", width, at_least=1)
        self._forget_removed()
        for region in self._regions:
            layout = _layout(region, _pixels(region, height, width, frames), references, text)
            where = region.device if device is None else torch.device(device)
            if where.type == "meta":
                hint = "The weights of the model are offloaded, so it is not known where it runs."
                wrong_value("device", "be given", device, hint)
            region.prepare(layout, where, batch)

    def summary(
        self,
        *,
        height: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        text: int | None = None,
    ) -> str:
        """What was changed, what stays dense and why, and how much attention is saved.

        Args:
            height, width: tell about images of this size (in pixels); by default about the last call.
            frames: of videos.
            text: tokens of text.
        """
        if (height is None) != (width is None):
            wrong_value("width", "be given together with `height`", width)
        for name, value in (("frames", frames), ("text", text)):
            if value is not None and height is None:
                wrong_value(name, "be given together with `height` and `width`", value)
        self._forget_removed()
        places: list[TokenLayout | None] = []
        origin = "last call"
        for region in self._regions:
            if height is not None and width is not None:
                pixels = _pixels(region, height, width, frames)
                places.append(_layout(region, pixels, (), text))
                origin = str(pixels)
            else:
                places.append(region.state.layout if region.state else None)
        return summary(self._models, self._regions, places, self.composition, self._steps, origin)

    def geometry(self) -> Geometry | None:
        """Where the tokens of the last call stood, in the part of the model that has most; None before the first."""
        self._forget_removed()
        known = [region.session.geometry(region.state.layout) for region in self._regions if region.state]
        return max(known, key=lambda geometry: geometry.num_tokens, default=None)

    def pairs_kept(self) -> float | None:
        """The share of all pairs of tokens that calls like the last one read, over all layers and denoising steps.

        None where that is not known: before the first call, or where queries and keys decide.
        """
        self._forget_removed()
        return pairs_kept(self._regions, self.composition, self._steps)

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        self._forget_removed()
        names = ", ".join(type(model).__name__ for model in self._models) or "nothing: removed"
        return f"Handle({names}; {self.composition.label})"


def _pixels(region: Region, height: int, width: int, frames: int | None) -> Pixels:
    name = region.part.spec.model
    if region.part.spec.is_video and frames is None:
        wrong_value("frames", f"be given: {name} makes videos", frames, "A still image has 1.")
    if frames is not None:
        check_int("frames", frames, at_least=1)
        if not region.part.spec.is_video:
            wrong_value("frames", f"be left out: {name} makes images", frames)
    return Pixels(height, width, 1 if frames is None else frames)


def _layout(
    region: Region, pixels: Pixels, references: Sequence[tuple[int, int]], text: int | None
) -> TokenLayout:
    spec = region.part.spec
    if references and not spec.takes_references:
        wrong_value("references", f"be left out: {spec.model} takes none", references)
    images = spec.images(region.part.root, _grid(region, pixels, ("height", "width")))
    images += tuple(_grid(region, Pixels(*size), ("references", "references")) for size in references)
    if spec.text == 0:
        text = 0
    elif text is None:
        text = region.state.layout.text - region.state.layout.num_padding if region.state else spec.text
    return spec.padded(TokenLayout(images, text))


def _grid(region: Region, pixels: Pixels, names: tuple[str, str]) -> Grid:
    """The tokens of an image; `names` are those of the arguments that its sides came from."""
    grid = region.part.spec.size(region.part.root, region.part.name, pixels)
    for name, side, tokens in zip(names, pixels[:2], grid[-2:], strict=True):
        if not tokens:
            wrong_value(name, f"be enough pixels for a token of {region.part.spec.model}", side)
    return grid


def _check_is_no_name(method: object) -> None:
    """A string is a recipe: one that ships, a JSON file, or another file that is there."""
    shipped = recipes.names()
    if not isinstance(method, str) or method in shipped or method.endswith(".json"):
        return
    if not Path(method).is_file():
        listed = f"; recipes that ship: {', '.join(shipped)}" if shipped else ""
        hint = f"Write a method as nearfield.{DEFAULT.label}, without quotes{listed}."
        wrong_value("method", "be a method, or name a recipe", repr(method), hint)


# -- finding out what to change ------------------------------------------------------------------------------------


def _checked_ranks(
    mesh: DeviceMesh, models: Sequence[Any], method: Composition, impl: Impl, lora: str | Switch | None
) -> Ranks:
    """Ranks that have the same models and want the same of them."""
    ranks = Ranks(mesh)
    check_same_ranks(models, ranks)
    check_splittable(method)
    for model in models:
        spec = spec_of(model)
        if spec is not None and not spec.can_split:
            known = classes_where(lambda spec: spec.can_split)
            wrong_value("target", f"be, or have, one of {known} to be split over ranks", name_of(model))
    configurations = [
        (name_of(model), dict(getattr(model, "config", {})), next(model.parameters()).dtype)
        for model in models
    ]
    wanted = {"target": configurations, "method": method, "impl": impl, "torch": torch.__version__}
    ranks.compare(wanted | {"lora": lora if isinstance(lora, str) else type(lora).__name__})
    return ranks


def _regions_of(
    model: nn.Module,
    method: Composition,
    steps: SchedulerState,
    impl: Impl,
    ranks: Ranks | None = None,
    lora: Switch | None = None,
) -> list[Region]:
    """The regions of a model with all their layers. Changes nothing yet."""
    spec = known_spec(model)
    parts = [
        TargetModule(name, module, model, spec, method, impl, ranks, lora)
        for name, module in parts_of(model, spec)
    ]
    if any(Region.on(part.module) for part in parts):
        hint = "Call `remove()` on the first handle, or `nearfield.remove(target)`, before applying again."
        wrong_value("target", "not be adapted already", name_of(model), hint)
    counts = [num_layers_of(part) for part in parts]
    if not sum(counts):
        wrong_value("target", "have attention layers where its class has them", name_of(model))
    method.check_layers(sum(counts))
    firsts = accumulate(counts[:-1], initial=0)
    regions = [Region(part, steps, first, sum(counts)) for part, first in zip(parts, firsts, strict=True)]
    num_sparse = sum(region.session.num_sparse_layers for region in regions)
    for region in regions:
        region.session.num_sparse_layers = num_sparse
    return regions
