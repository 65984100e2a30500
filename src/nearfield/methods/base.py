"""The contract of a method: it decides who reads whom.

Everything that other code asks of a method stands here, with a default for what most methods need not decide. So a new
method is one class that overrides only what it decides differently.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from nearfield._checks import check_int, wrong_type, wrong_value
from nearfield._memo import device_name
from nearfield.layout import CurveOrder, Geometry, Ordering, Span, along, check_geometry
from nearfield.methods.borders import Borders, Reads, borders_of_reads
from nearfield.methods.dense_parts import (
    DenseSteps,
    Layers,
    checked_layers,
    checked_steps,
    ends_of,
    layer_reason,
)
from nearfield.methods.layers import LayerAttention, PlanLayer
from nearfield.methods.registry import register
from nearfield.methods.view import View, view_of_blocks
from nearfield.plan import Plan

Pieces = tuple[tuple[int, ...], ...]
"""For each image, how many tokens of its order may be merged with each other, one piece after another."""


class Section(NamedTuple):
    """A stretch of image tokens that ranks share out evenly.

    Args:
        window: tokens that are summarised together, so that ranks are not to part them.
        is_spread: whether it is cut more finely where it has no block for every rank: its tokens may be read by
            everyone and read everyone, which should not be one rank's load.
    """

    span: Span
    window: int = 1
    is_spread: bool = False


class Method(ABC):
    """Who reads whom, in every layer of a model. A frozen dataclass; its fields are the configuration.

    Commands, recipes and nodes know a class by its `name` from the moment it is defined. They show what the `Args:` of
    its docstring say of its fields; fields that are explained below need no line of their own.

    Args:
        order: the order of image tokens in which consecutive ones form blocks.
        dense_layers: how many of the first layers stay dense, or the indices of those that do (negative ones count
            from the end).
        dense_steps: how many of the first denoising steps stay dense, or, below 1, which share of them; two numbers
            are of the first and of the last steps.
    """

    name: ClassVar[str] = ""
    """The name by which commands find it, in lower case; a class without a name is not registered."""
    is_baseline: ClassVar[bool] = False
    """Whether it serves comparisons alone; the package does not export a baseline."""
    takes_text: ClassVar[bool] = True
    """Whether sequences may hold text."""

    ladders: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Values of fields from gentle to bold, among which tuning looks for the boldest that a model bears."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Fields with which a method leaves something out of about a hundred tokens: what it is tried with."""
    everything: ClassVar[Mapping[str, Any] | None] = None
    """Further fields with which it reads everything, or merges nothing; None where no fields do that."""

    order: CurveOrder = "hilbert"
    dense_layers: Layers = 0
    dense_steps: DenseSteps = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__dict__.get("name"):
            register(cls)

    # -- who reads whom ----------------------------------------------------------------------------------------------

    @abstractmethod
    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> LayerAttention:
        """What a layer of a model reads, prepared for a geometry and a device."""

    def ordering(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> Ordering:
        """The order of the image tokens (all images, one after another; the text stays where it is)."""
        check_geometry(geometry)
        return along(self.order, geometry, device_name(device))

    def module(self, dim: int, heads: int) -> nn.Module | None:
        """Parameters that belong to the method, as a module which gives, for tokens `[B, N, dim]`, further arguments of
        `LayerAttention.attend`; None for no parameters."""
        del dim, heads
        return None

    # -- where it applies --------------------------------------------------------------------------------------------

    def check_dense_parts(self) -> None:
        object.__setattr__(self, "dense_layers", checked_layers(self.dense_layers))
        object.__setattr__(self, "dense_steps", checked_steps(self.dense_steps))

    def check_layers(self, num_layers: int) -> None:
        """Refuse indices of layers that a model does not have. A number of layers may be larger than the model's."""
        for layer in self.dense_layers if isinstance(self.dense_layers, tuple) else ():
            if not -num_layers <= layer < num_layers:
                rule = f"hold indices from {-num_layers} to {num_layers - 1}"
                wrong_value("dense_layers", rule, layer)

    def dense_layer_reason(self, index: int, num_layers: int) -> str | None:
        """Why a layer stays dense, or None."""
        return layer_reason(self.dense_layers, index, num_layers)

    def num_dense_steps(self, num_steps: int) -> tuple[int, int]:
        """How many of the first and of the last of `num_steps` denoising steps stay dense."""
        return ends_of(self.dense_steps, num_steps)

    @property
    def is_stateful(self) -> bool:
        """Whether the result of a layer depends on earlier steps."""
        return False

    def refreshes(self, num_steps: int) -> list[int]:
        """The steps, of `num_steps`, at which a stateful method decides anew."""
        del num_steps
        return []

    @property
    def can_split(self) -> bool:
        """Whether tokens may be split over ranks. A method that can split makes `PlanLayer`s, whose plans are known
        before calls."""
        return False

    @property
    def compile_reason(self) -> str | None:
        """Why the blocks of a model must not be compiled, or None."""
        return "its lists are remembered from step to step, outside of graphs" if self.is_stateful else None

    @property
    def warning(self) -> str | None:
        """A warning that `apply` gives, or None."""
        return None

    # -- how the images are cut --------------------------------------------------------------------------------------

    def pieces(self, geometry: Geometry) -> Pieces:
        """Of every image, the lengths of the runs of its order; tokens of two runs are never merged."""
        check_geometry(geometry)
        return tuple((math.prod(grid),) for grid in geometry.images)

    def sections(self, geometry: Geometry) -> tuple[Section, ...]:
        """How ranks share out the images' tokens."""
        check_geometry(geometry)
        return tuple(Section(span) for span in geometry.image_spans)

    @property
    def weighs_image_keys(self) -> bool:
        """Whether a bias on image tokens counts wherever they are read: summaries know nothing of it."""
        return True

    def borders(
        self,
        geometry: Geometry,
        *,
        layers: Sequence[int] | None = None,
        heads: int | None = None,
        q_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Borders | None:
        """Where the method separates neighbours in the picture, on average over layers; None where content decides.

        Args:
            layers: by default all that differ.
            heads: number of heads, where these differ.
            q_block: the block the images were made with; by default that of the device.
            device: where they were made.
        """
        del geometry, layers, heads, q_block, device
        return None

    def view(self, geometry: Geometry, index: int = 0, *, near: Plan | None = None) -> View | None:
        """What of a layer can be drawn on the (first) image; None where content decides.

        Args:
            near: what the layer reads exactly, where that is known already.
        """
        del geometry, index, near
        return None

    # -- words -------------------------------------------------------------------------------------------------------

    def with_dense_steps(self, steps: DenseSteps) -> "Method":
        """The same method with other dense steps."""
        if "dense_steps" not in getattr(self, "__dataclass_fields__", {}):
            wrong_type("method", "have a field `dense_steps`", type(self).__name__)
        value: Any = self
        changed: Method = replace(value, dense_steps=steps)
        return changed

    def sparse_form(self) -> "Method":
        """A method that reads the same in sparse steps, and is equal for all methods that do."""
        return self.with_dense_steps(0)

    @property
    def label(self) -> str:
        """The method with the fields that were set."""
        value: Any = self
        if not is_dataclass(value):
            return type(self).__name__
        own = ((each, getattr(value, each.name)) for each in fields(value) if each.repr)
        given = ", ".join(f"{each.name}={value!r}" for each, value in own if value != each.default)
        return f"{type(self).__name__}({given})"

    def describe(self, geometry: Geometry, *, device: torch.device | str = "cpu") -> str:
        """What the fields come to on a geometry, in words."""
        check_geometry(geometry)
        return "\n".join([f"{geometry}: {geometry.num_tokens} tokens", *self.pair_lines(geometry, device)])

    def pair_lines(self, geometry: Geometry, device: torch.device | str) -> list[str]:
        """How many pairs are kept, where that is known before calls."""
        pairs = self.layer(geometry, heads=1, device=device).num_pairs
        if pairs is None:
            return []
        share = pairs / geometry.num_tokens**2
        return [f"  pairs kept: {share:.1%} (at most {1 / share:.2f}x faster than dense)"]


class PlanMethod(Method):
    """A method that decides by the geometry alone. Write `plan`; everything else follows from it."""

    period: ClassVar[int] = 1
    """The number of layers after which plans repeat."""

    @abstractmethod
    def plan(self, geometry: Geometry, layer: int, *, q_block: int, k_block: int) -> Plan:
        """Who reads whom in a layer, among tokens in the order of `ordering`; on any device."""

    def block_sizes(self, device: torch.device | str) -> tuple[int, int]:
        """Queries and keys per block of the plans that suit a device."""
        return (128, 64) if torch.device(device).type == "cuda" else (16, 16)

    def layer(
        self,
        geometry: Geometry,
        index: int = 0,
        *,
        heads: int | None = None,
        q_block: int | None = None,
        k_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PlanLayer:
        """What a layer reads: its plan, made once for a geometry and kept."""
        del heads  # all read alike
        check_geometry(geometry)
        check_int("index", index, at_least=0)
        own = self.block_sizes(device)
        sizes = own[0] if q_block is None else q_block, own[1] if k_block is None else k_block
        return _plan_layer(self, geometry, index % self.period, *sizes, device_name(device))

    @property
    def can_split(self) -> bool:
        return True

    def view(self, geometry: Geometry, index: int = 0, *, near: Plan | None = None) -> View | None:
        near = near or self.layer(geometry, index).near
        order = self.ordering(geometry).order[: math.prod(geometry.grid)]
        return view_of_blocks(
            order, geometry.image_spans[0], near.q_block, f"{self.order.capitalize()} order"
        )

    def borders(
        self,
        geometry: Geometry,
        *,
        layers: Sequence[int] | None = None,
        heads: int | None = None,
        q_block: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Borders | None:
        read = [
            Reads.of(self.layer(geometry, layer, heads=heads, q_block=q_block, device=device).near)
            for layer in (range(self.period) if layers is None else layers)
        ]
        return borders_of_reads(self.ordering(geometry), geometry, read)


@lru_cache(maxsize=256)
def _plan_layer(
    method: PlanMethod, geometry: Geometry, layer: int, q_block: int, k_block: int, device: str
) -> PlanLayer:
    # A graph of training saves the lists: they must not be made in inference mode.
    with torch.inference_mode(False):
        return PlanLayer(method.plan(geometry, layer, q_block=q_block, k_block=k_block).to(device))
